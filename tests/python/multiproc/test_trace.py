"""``hopshard trace``: one file, a lane for each kind of work, every rank."""

from __future__ import annotations

import itertools
import json
import pathlib
import subprocess
import sys
from typing import Any

import hopshard as hs
import torch
from hopshard.testing import run_ranks
from hopshard.trace import merge

from tests.python.parity.models import HIDDEN, Mlp

SCRIPT = """
import torch, hopshard as hs
hs.init(sharded_data_parallel_degree=2)
torch.manual_seed(0)
blocks = [torch.nn.Linear(64, 64) for _ in range(3)]
model = hs.DistributedModel(torch.nn.Sequential(*blocks), unit=torch.nn.Linear)
optimizer = hs.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""


def trace(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hopshard.cli", "trace", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
    )


def test_a_trace_of_two_ranks_and_two_replicas(tmp_path: pathlib.Path) -> None:
    finished = trace(tmp_path, "-n", "4", "-c", SCRIPT)
    assert finished.returncode == 0, finished.stderr
    assert "trace.json" in finished.stdout and "of 4 ranks" in finished.stdout
    content = json.loads((tmp_path / "trace.json").read_text())
    assert set(content["hidden_share"]) == {"0", "1", "2", "3"}
    assert all(0 <= share <= 1 for share in content["hidden_share"].values())
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0
    assert all(event["dur"] >= 0 for event in spans)
    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in content["traceEvents"]
        if event["name"] == "thread_name"
    }
    for rank in range(4):
        names: dict[str, list[str]] = {}
        for event in spans:
            if event["pid"] == rank:
                names.setdefault(lanes[rank, event["tid"]], []).append(event["name"])
        # Three steps; blocks 0 and 1 are gathered again for the backward, and so is 2.
        assert names["compute"].count("forward 1") == names["compute"].count("backward 1") == 3
        assert names["gather"].count("gather 1") == 6
        assert sorted(names["hop 1"]) == sorted(f"hop 1 {unit}" for unit in "012" * 3)
        assert names["step"] == ["optimizer"] * 3
        assert set(names["hop 2"]) == {"hop 2"}


def test_lanes_hold_no_two_collectives_at_once(tmp_path: pathlib.Path) -> None:
    def run() -> None:
        model = hs.DistributedModel(Mlp())
        for _ in range(3):
            model(torch.ones(2, HIDDEN)).mean().backward()

    run_ranks(run, 2, sharded_data_parallel_degree=2, trace_folder=str(tmp_path))
    files = sorted(tmp_path.glob("*.json"))
    assert [file.name for file in files] == ["rank0-model0.json", "rank1-model0.json"]
    for file in files:
        events = json.loads(file.read_text())["traceEvents"]
        for lane in (1, 2, 3):
            spans = sorted(
                (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("tid") == lane and "ts" in e
            )
            for (_, end), (begin, _) in itertools.pairwise(spans):
                assert begin >= end - 0.01


def test_every_model_has_a_file_and_lanes_of_its_own(tmp_path: pathlib.Path) -> None:
    def run() -> None:
        for _ in range(2):  # One after the other.
            model = hs.DistributedModel(Mlp())
            model(torch.ones(2, HIDDEN)).mean().backward()
            del model

    run_ranks(run, 2, sharded_data_parallel_degree=2, trace_folder=str(tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 4
    merged = merge(tmp_path)
    assert set(merged["hidden_share"]) == {"0", "0, model 1", "1", "1, model 1"}
    names = {e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "thread_name"}
    assert {"gather", "gather of model 1"} <= names


def test_bad_input(tmp_path: pathlib.Path) -> None:
    nothing = trace(tmp_path, "-c", "print(1)")
    assert nothing.returncode == 2 and "no rank wrote a trace" in nothing.stderr
    folder = trace(tmp_path, "-o", "no/such/file.json", "-c", "print(1)")
    assert folder.returncode == 2 and "there is no folder" in folder.stderr
    failed = trace(tmp_path, "-n", "2", "-c", SCRIPT + "\nraise SystemExit(3)\n")
    assert failed.returncode == 3  # And what there is, is written.
    assert (tmp_path / "trace.json").exists()


def statistics_of(depth: int) -> dict[str, Any]:
    def run() -> dict[str, Any]:
        model = hs.DistributedModel(Mlp())
        for _ in range(3):
            model(torch.ones(2, HIDDEN)).mean().backward()
        return model.statistics()

    return run_ranks(run, 2, sharded_data_parallel_degree=2, prefetch_depth=depth)[0]


def test_what_nobody_hides_counts_as_waited_for() -> None:
    assert statistics_of(1)["hidden_share"] >= 0
    statistics = statistics_of(0)  # Every gather is waited for at once.
    assert statistics["hidden_seconds"]["gather"] < statistics["seconds"]["gather"]
