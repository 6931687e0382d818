"""The GPT-2 example as a user starts it: real processes, and the folder that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "gpt2" / "train.py"
LAUNCHER = [sys.executable, "-m", "hopshard.cli", "run"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(
        "\n\n".join(f"Paragraph {i} says that {i} follows {i - 1}." for i in range(999))
    )
    return path


def run(command: list[str], folder: Path, text: Path, *options: str) -> str:
    arguments = ["--runs", str(folder), "--name", "run", "--data", str(text), *options]
    arguments += ["--batch-size", "2", "--context", "32", "--eval-batches", "1", "--log-every", "1"]
    arguments += ["--final-eval-batches", "1", "--sample-bytes", "8", "--eval-every", "4"]
    ended = subprocess.run(
        [*command, str(SCRIPT), *arguments],
        check=False, capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def records_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def facts_of(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "run" / "run.json").read_text())
    return facts


@pytest.mark.parametrize("command", [[sys.executable], [*LAUNCHER, "-n", "1"]])
def test_one_rank(command: list[str], tmp_path: Path, text: Path) -> None:
    output = run(command, tmp_path, text, "--steps", "6")
    records = records_of(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records if "val_loss" in record] == [4, 6]
    assert all(record["bytes_sent"] == {"intra_node": 0, "inter_node": 0} for record in records)
    assert facts_of(tmp_path)["degree"] == 1
    assert "validation loss" in output


def test_four_ranks_on_two_nodes(tmp_path: Path, text: Path) -> None:
    command = [*LAUNCHER, "-n", "4", "--emulate", "2x2"]
    output = run(command, tmp_path, text, "--steps", "6")
    facts, records = facts_of(tmp_path), records_of(tmp_path)
    assert (facts["world_size"], facts["ranks_per_node"], facts["degree"]) == (4, 2, 2)
    keys = {"step", "loss", "tokens_per_s", "step_ms", "peak_bytes", "bytes_sent", "split_ms"}
    assert all(keys <= record.keys() for record in records)
    assert all(record["step_ms"] > 0 and record["peak_bytes"] > 0 for record in records)
    assert 5.0 < records[0]["loss"] < 6.0
    assert records[-1]["loss"] < records[0]["loss"]

    # Between the two nodes goes hop 2 alone: an all-reduce over 2 ranks of half the model.
    half_bytes = 4 * facts["num_parameters"] / 2
    inter_node = records[-1]["bytes_sent"]["inter_node"]
    assert half_bytes <= inter_node <= 1.05 * half_bytes + 4096
    # Inside a node: two micro-steps with two gathers (the root: one) and one reduction.
    assert records[-1]["bytes_sent"]["intra_node"] >= 5.8 * half_bytes

    for name in ("report.html", "loss.png", "metrics.csv"):
        assert (tmp_path / "run" / name).stat().st_size > 1000 or name == "metrics.csv"
    assert facts["sample"].startswith(facts["prompt"])
    assert f"{records[-1]['val_loss']:.3f}" in output
    # Only rank 0 speaks; of the others there is no line.
    assert not any(line.startswith(("[1]", "[2]", "[3]")) for line in output.splitlines())


def test_a_slow_machine_ends_in_time_on_all_ranks(tmp_path: Path, text: Path) -> None:
    few_seconds = ["--steps", "100000", "--max-seconds", "4", "--warm-up-steps", "1"]
    run([*LAUNCHER, "-n", "2"], tmp_path, text, *few_seconds)
    facts, records = facts_of(tmp_path), records_of(tmp_path)
    assert facts["seconds"] < 30
    assert records[-1]["step"] < 100000
    assert "val_loss" in records[-1]
    # The cosine was walked to its end although few of the steps were done.
    assert records[-1]["learning_rate"] < 0.2 * max(record["learning_rate"] for record in records)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--model", "huge"], "--model huge is not one of: tiny"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--data", "nowhere.txt"], "nowhere.txt: no such file"),
    ],
)
def test_illegal_settings_say_so(options: list[str], reason: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--runs", str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert list(tmp_path.iterdir()) == []
