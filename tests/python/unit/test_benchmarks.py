"""The one form of all benchmarks, what collectives.py makes of its rows, and that it times nothing
that gives wrong values."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from benchmarks._contenders import OPS, Case, Contender, verify
from benchmarks._peers import interface_bytes
from benchmarks._promises import crossing_bytes, make_figures
from benchmarks._rows import Figure, Results, Row, bus_factor, p95, size_name, summarise

ROOT = pathlib.Path(__file__).resolve().parents[3]
MIB = 2**20


# --- The form


def test_rows_have_the_fields_that_all_benchmarks_share() -> None:
    row = summarise(
        "all_gather", "shm", "flat", (2, 4), 64 * MIB, [0.01, 0.03, 0.02], {"registered": True}
    )
    assert row.to_json() == {
        "op": "all_gather", "backend": "shm", "algorithm": "flat", "nodes": 2, "ranks": 4,
        "bytes": 64 * MIB, "median_ms": 20.0, "p95_ms": 30.0, "bus_gb_s": 2.517, "samples": 3,
        "registered": True,
    }  # fmt: skip


def test_bus_bandwidth_is_what_a_rank_must_move() -> None:
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 0.75
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("train_step", 4) is None


def test_p95_is_a_real_sample() -> None:
    assert p95([3.0, 1.0, 2.0]) == 3.0
    assert p95([float(i) for i in range(101)]) == 95.0


@pytest.mark.parametrize(
    ("value", "goal", "better", "met"),
    [
        (2.0, 2.0, "higher", True),
        (1.9999, 2.0, "higher", False),
        (2.0, 2.0, "lower", True),
        (2.1, 2.0, "lower", False),
        (float("nan"), 2.0, "higher", False),
        (1.0, None, "higher", None),
    ],
)
def test_goals_are_met_or_missed(value: float, goal: float, better: str, met: bool | None) -> None:
    assert Figure("x", value, goal, better).met is met  # type: ignore[arg-type]


def test_results_are_written_and_a_missed_goal_is_printed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [summarise("all_gather", "shm", "flat", (1, 4), MIB, [0.001])]
    figures = [Figure("good", 3.0, 2.0, "higher"), Figure("bad", 1.0, 2.0, "higher")]
    results = Results({"benchmark": "x"}, rows, figures)
    results.write(tmp_path / "a.json")
    written = json.loads((tmp_path / "a.json").read_text())
    assert set(written) == {"meta", "rows", "figures"}
    assert written["figures"][1] == {
        "name": "bad", "value": 1.0, "goal": 2.0, "better": "higher", "met": False
    }  # fmt: skip
    assert [figure.name for figure in results.missed()] == ["bad"]
    results.show()
    out = capsys.readouterr().out
    assert "MISSED" in out and "1 of 2 goals met" in out


def test_sizes_in_words() -> None:
    assert [size_name(n) for n in (64, 4096, 16 * MIB, 2**31)] == [
        "64 B", "4 KiB", "16 MiB", "2 GiB"
    ]  # fmt: skip


# --- What the rows of collectives.py mean


def row(backend: str, ms: float, algorithm: str = "flat", **fields: object) -> Row:
    given = {
        "op": "all_gather", "nodes": 1, "ranks": 4, "bytes": 16 * MIB, "details": {}
    } | fields  # fmt: skip
    return Row(
        backend=backend, algorithm=algorithm, median_ms=ms, p95_ms=ms, bus_gb_s=None, **given
    )  # type: ignore[arg-type]


def goals(figures: list[Figure]) -> dict[str, tuple[float, float | None]]:
    return {figure.name: (round(figure.value, 3), figure.goal) for figure in figures}


def test_figures_of_one_host() -> None:
    rows = [
        row("shm", 1.0, details={"registered": True}),
        row("shm", 2.0, details={"registered": False}),
        row("gloo", 13.0, "own"),
        row("open_mpi", 5.0, "own"),
        row("memory", 0.9, "roof"),
        row("shm", 0.02, op="all_reduce", bytes=4096, ranks=2, details={"registered": True}),
        row("open_mpi", 0.01, "own", op="all_reduce", bytes=4096, ranks=2),
    ]
    assert goals(make_figures(rows, None)) == {
        "all_gather 16 MiB, shm: times as fast as gloo": (13.0, 12.0),
        "all_gather 16 MiB, shm: times as fast as open_mpi": (5.0, 2.5),
        "all_gather 16 MiB, shm: share of the memory roof": (0.9, 0.85),
        "all_gather 16 MiB, shm, not registered: times as fast as gloo": (6.5, 5.0),
        "all_gather 16 MiB, shm, not registered: times as fast as open_mpi": (2.5, None),
        "all_gather 16 MiB, memory roof: times as fast as gloo": (14.444, None),
        "all_gather 16 MiB, memory roof: times as fast as open_mpi": (5.556, None),
        "all_reduce 4 KiB, shm, 2 ranks: time over open_mpi's": (2.0, 1.0),
    }
    assert [figure.met for figure in make_figures(rows, None)] == [
        True, True, True, True, None, None, None, False
    ]  # fmt: skip


def test_goals_hold_for_the_sizes_and_ranks_that_they_were_set_for() -> None:
    for other in ({"ranks": 2}, {"bytes": 8 * MIB}):
        rows = [
            row("shm", 1, details={"registered": True}, **other),
            row("gloo", 1, "own", **other),
        ]
        assert [figure.goal for figure in make_figures(rows, None)] == [None]


def test_figures_of_two_nodes() -> None:
    two = {"nodes": 2, "bytes": 32 * MIB}
    rows = [
        row("c10d", 220, "flat", **two, details={"node_sent_mib": 24.0}),
        row("shm+c10d", 150, "hierarchical", **two, details={"node_sent_mib": 20.0}),
        row("shm+ofi", 140, "hierarchical", **two, details={"node_sent_mib": 16.1}),
        row("gloo", 240, "own", **two, details={"node_sent_mib": 24.0}),
        row("open_mpi", 280, "own", **two, details={"node_sent_mib": 32.0}),
    ]
    found = make_figures(rows, line_rate=16 * MIB / 0.138)
    values = goals(found)
    where = "all_gather 32 MiB, "
    assert values[where + "shm+c10d: times as fast as gloo"] == (1.6, 1.45)
    assert values[where + "shm+c10d: times as fast as open_mpi"] == (1.867, 1.6)
    assert values[where + "shm+c10d: times as fast as flat c10d"] == (1.467, 1.42)
    assert values[where + "shm+c10d: share of the line rate"] == (0.92, 0.95)
    assert values[where + "shm+ofi: share of the line rate"] == (0.986, 0.95)
    assert values[where + "shm+ofi: times as fast as shm+c10d"] == (1.071, 1.0)
    assert values[where + "c10d: node's bytes over the formula's"][0] == 1.0
    missed = [figure.name for figure in found if figure.met is False]
    assert missed == [
        where + "shm+c10d: share of the line rate",
        where + "shm+c10d: node's bytes over the formula's",
    ]


def test_bytes_that_cross_a_node() -> None:
    flat = row("c10d", 1, nodes=2, ranks=4, bytes=4 * MIB)
    two_level = row("shm+c10d", 1, "hierarchical", nodes=2, ranks=4, bytes=4 * MIB)
    assert crossing_bytes(flat) == 3 * MIB  # (p - 1) / p * M
    assert crossing_bytes(two_level) == 2 * MIB  # (p - k) / p * M


# --- Verified before timed


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("world_of_one")
def test_wrong_values_are_found_and_right_ones_pass(op: str) -> None:
    def right(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if op == "reduce_scatter":
            part.copy_(whole)

    def wrong(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        right(op, whole, part)
        (part if op == "reduce_scatter" else whole)[-1] += 1

    def idle(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if op != "reduce_scatter":
            whole[0] = 3

    case = Case(op, 4096, torch.float32, 1)
    for call, passes in ((right, True), (wrong, False), (idle, False)):
        memory = (torch.zeros(1024), torch.zeros(1024))
        contender = Contender("any", "own", *memory, [0], call)
        if passes:
            verify(contender, case, 0)
        else:
            with pytest.raises(SystemExit, match=f"any .own.: {op} gave wrong values"):
                verify(contender, case, 0)


def test_interface_bytes_leave_loopback_out() -> None:
    before = interface_bytes()
    assert all(number >= 0 for number in before)
    sent, received = interface_bytes()
    assert sent >= before[0] and received >= before[1]


# --- The command


@pytest.mark.parametrize("how", [[], ["--no-mpi"]])
def test_collectives_run_and_write_the_form(tmp_path: pathlib.Path, how: list[str]) -> None:
    path = tmp_path / "a.json"
    finished = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "collectives.py"), "--ranks", "2", "--quick",
         "--backends", "c10d", "--json", str(path), *how],
        capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    written = json.loads(path.read_text())
    assert {row["op"] for row in written["rows"]} == set(OPS)
    backends = {row["backend"] for row in written["rows"]}
    assert {"c10d", "gloo", "memory"} <= backends
    notes = written["meta"]["notes"]
    assert ("open_mpi" in backends) != notes["open_mpi"].startswith("left out")
    assert ("open_mpi" in backends) <= (how == [])
    needed = {"op", "backend", "algorithm", "nodes", "ranks", "bytes"}
    needed |= {"median_ms", "p95_ms", "bus_gb_s"}
    for row in written["rows"]:
        assert needed <= set(row)
        assert 0 < row["median_ms"] <= row["p95_ms"]
    assert "Measured" in finished.stdout
