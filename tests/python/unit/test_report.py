"""The record of a run and the page that shows it."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hopshard.layout_picture import describe_layout, draw_layout, group_letter
from hopshard.report import REPORT_FILE, format_bytes, write_report
from hopshard.run_log import METRICS_FILE, TABLE_FILE, RunLog, read_run

VOID = {"meta", "br", "link", "img", "hr", "input"}


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.5 - 0.1 * step,
        "tokens_per_s": 8123.0,
        "step_ms": 437.0,
        "peak_bytes": 23_400_000,
        "persistent_bytes": 15_600_000,
        "bytes_sent": {"intra_node": 44_500_000, "inter_node": 3_710_000},
        "split_ms": {
            "gather": 61.0, "compute": 301.0, "reduce": 42.0, "second_hop": 25.0, "optimizer": 8.0,
        },
        **more,
    }  # fmt: skip


FACTS = {
    "name": "a <run> & more",
    "model": "GPT-2 tiny",
    "num_parameters": 1_853_568,
    "unsharded_bytes": 29_657_088,
    "world_size": 4,
    "ranks_per_node": 2,
    "degree": 2,
    "first_val_loss": 5.56,
    "seconds": 201.4,
    "sample": "The <b>function</b> returns",
    "settings": {"steps": 3, "data": ""},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunLog(tmp_path / "run", FACTS) as log:
        log.write(record(1))
        log.write(record(2, val_loss=2.2468))
        log.write(record(3, val_loss=2.1357))
    return tmp_path / "run"


class Page(HTMLParser):
    """Checks that tags nest and collects text by section, attributes and headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.sections: dict[str, str] = {}
        self.section = ""
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.tags: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "section":
            self.section = values.get("id") or ""
            self.sections[self.section] = ""
        self.tags.setdefault(self.section, []).append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        self.loads += [str(values[key]) for key in ("src", "href", "data") if values.get(key)]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack[-1:] == [tag], f"</{tag}> closes {self.stack[-1:]}"
        self.stack.pop()

    def handle_data(self, text: str) -> None:
        if self.section:
            self.sections[self.section] += text


# ---- run_log ---------------------------------------------------------------------------


def test_records_come_back(run: Path) -> None:
    read = read_run(run)
    assert read.facts == FACTS
    assert read.records[0] == record(1)
    assert read.series("val_loss") == ([2, 3], [2.2468, 2.1357])
    assert read.series("bytes_sent.inter_node") == ([1, 2, 3], [3_710_000.0] * 3)
    assert read.series("absent") == ([], [])


def test_table_holds_all_columns(run: Path) -> None:
    with (run / TABLE_FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["val_loss"] for row in rows] == ["", "2.2468", "2.1357"]
    assert rows[0]["bytes_sent.intra_node"] == "44500000"
    assert rows[0]["split_ms.second_hop"] == "25.0"


def test_a_process_that_dies_leaves_its_lines(tmp_path: Path) -> None:
    script = (
        "import os, sys; from hopshard.run_log import RunLog\n"
        "log = RunLog(sys.argv[1], {'degree': 2})\n"
        "log.write({'step': 1, 'loss': 5.0}); log.write({'step': 2, 'loss': 4.0})\n"
        "os._exit(9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=120)
    assert ended.returncode == 9
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 3, "lo')
    read = read_run(tmp_path)
    assert [r["step"] for r in read.records] == [1, 2]
    assert read.facts == {"degree": 2}
    write_report(tmp_path)


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_run(tmp_path)


def test_non_finite_numbers_stay_legal_json(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write({"step": 1, "loss": math.nan, "bytes_sent": {"intra_node": math.inf}})
    line = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(line) == {"step": 1, "loss": None, "bytes_sent": {"intra_node": None}}
    assert read_run(tmp_path).series("loss") == ([], [])


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", FACTS, enabled=False) as log:
        log.write(record(1))
        log.add_facts(val_loss=2.0)
    assert not (tmp_path / "run").exists()


def test_a_new_run_replaces_the_old_one(run: Path) -> None:
    write_report(run)
    with RunLog(run) as log:
        assert not (run / REPORT_FILE).exists()
        log.write(record(7))
    assert [r["step"] for r in read_run(run).records] == [7]


def test_facts_may_come_late(run: Path) -> None:
    with RunLog(run, {"degree": 2}) as log:
        log.write(record(1))
    log.add_facts(sample="text")
    assert read_run(run).facts == {"degree": 2, "sample": "text"}


def test_a_record_needs_a_step(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match="'step'"):
        log.write({"loss": 1.0})


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a run"):
        write_report(tmp_path)


# ---- report ----------------------------------------------------------------------------


def test_page_parses_and_each_section_shows_its_numbers(run: Path) -> None:
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "2.136" in page.sections["summary"]
    assert "from 5.56" in page.sections["summary"]
    assert "8,123" in page.sections["summary"]
    assert "437 ms" in page.sections["summary"]
    assert "0:03:21" in page.sections["summary"]
    assert "2.136" in page.sections["loss"]
    assert "44.5 MB" in page.sections["traffic"]
    assert "3.71 MB" in page.sections["traffic"]
    assert "301.0 ms" in page.sections["split"]
    assert "69 %" in page.sections["split"]
    assert "23.4 MB" in page.sections["memory"]
    assert "29.7 MB" in page.sections["memory"]
    assert "2 sharding groups of 2 ranks" in page.sections["layout"]
    assert "The <b>function</b> returns" in page.sections["sample"]
    for section in ("loss", "traffic", "split", "memory", "layout"):
        assert "svg" in page.tags[section], section
    assert len(page.ids) == len(set(page.ids))


def test_page_loads_nothing_and_reads_in_the_dark(run: Path) -> None:
    text = write_report(run).read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|<script", text)
    assert all(target.startswith("#") for target in Page(text).loads)
    assert "url(#" in text
    assert not re.search(r"url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert "#012345" not in text
    assert "#000000" not in text


def test_references_inside_figures_resolve(run: Path) -> None:
    text = write_report(run).read_text(encoding="utf-8")
    wanted = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    assert wanted
    assert wanted <= set(Page(text).ids)


def test_loss_picture(run: Path) -> None:
    write_report(run)
    data = (run / "loss.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000


def test_text_of_a_run_is_escaped(run: Path) -> None:
    text = write_report(run).read_text(encoding="utf-8")
    assert "<run>" not in text
    assert "a &lt;run&gt; &amp; more" in text
    assert "<b>function" not in text


def test_a_run_with_few_numbers_says_what_is_missing(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write({"step": 1, "loss": 5.0})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "counted no bytes" in page.sections["traffic"]
    assert "did not measure the parts" in page.sections["split"]
    assert "did not measure its memory" in page.sections["memory"]
    assert "does not say how its ranks" in page.sections["layout"]
    assert "sample" not in page.sections


def test_an_empty_run_still_has_a_page(tmp_path: Path) -> None:
    with RunLog(tmp_path, FACTS):
        pass
    Page(write_report(tmp_path).read_text(encoding="utf-8"))


def facts(world_size: int, ranks_per_node: int, degree: int) -> dict[str, Any]:
    return {"world_size": world_size, "ranks_per_node": ranks_per_node, "degree": degree}


@pytest.mark.parametrize(
    ("world", "num_nodes", "num_links"),
    [
        ((1, 1, 1), 1, 0),
        ((4, 2, 2), 2, 2),
        ((4, 2, 4), 2, 0),
        ((4, 2, 1), 2, 3),
        ((16, 4, 8), 4, 8),
    ],
)
def test_layout_draws_each_node_rank_and_link(
    world: tuple[int, int, int], num_nodes: int, num_links: int
) -> None:
    svg = draw_layout(facts(*world))
    assert svg.count('class="node"') == num_nodes
    assert svg.count('class="rank"') == world[0]
    assert svg.count('class="link"') == num_links


def test_layout_colours_follow_the_sharding_groups() -> None:
    svg = draw_layout(facts(4, 2, 2))
    colours = re.findall(r'class="rank"[^>]*fill="([^"]+)"', svg)
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert "ranks 0 and 2 keep the same slice" in svg
    assert "ranks 1 and 3 keep" in svg
    assert "ranks 0 and 1 keep" not in svg


def test_a_large_world_is_drawn_in_part() -> None:
    svg = draw_layout(facts(1024, 8, 16))
    assert svg.count('class="node"') == 16
    assert "128 of 1024 ranks are drawn" in svg


def test_words_about_the_layout() -> None:
    assert "there is no second hop" in describe_layout(facts(4, 2, 4))
    assert describe_layout(facts(1, 1, 1)).startswith(
        "1 rank on 1 node: 1 sharding group of 1 rank"
    )
    assert describe_layout({}) == ""
    assert draw_layout({}) == ""
    assert draw_layout(facts(0, 2, 2)) == ""


def test_letters_and_bytes() -> None:
    assert [group_letter(i) for i in (0, 25, 26, 51, 52, 701, 702)] == [
        "A", "Z", "AA", "AZ", "BA", "ZZ", "AAA",
    ]  # fmt: skip
    assert [format_bytes(n) for n in (0, 999, 1000, 7_414_272, 2.5e9, 3e12)] == [
        "0 B", "999 B", "1 kB", "7.41 MB", "2.5 GB", "3 TB",
    ]  # fmt: skip
