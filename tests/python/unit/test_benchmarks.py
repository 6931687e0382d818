"""The one form of all benchmarks, what collectives.py and step_time.py make of their rows, and that
they time nothing that gives wrong values."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist

from benchmarks._arms import Arm, Workload, build_model, choose_arms
from benchmarks._contenders import OPS, Case, Contender, verify
from benchmarks._memory import PeakPss, activation_bytes, formula_bytes
from benchmarks._peers import interface_bytes
from benchmarks._promises import crossing_bytes, make_figures
from benchmarks._rows import Figure, Results, Row, bus_factor, p95, size_name, summarise
from benchmarks._step_goals import CLUSTER, LOCAL, ONE_HOST, Promise, other_figures, promises_about
from benchmarks._step_goals import make_figures as make_step_figures
from benchmarks._step_runs import GOAL_BATCH, GOAL_MODEL, PRESETS
from benchmarks._turns import ArmError
from benchmarks.step_time import compare

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


# --- What the rows of step_time.py mean


def step_row(arm: str, degree: int, ms: float, **fields: object) -> Row:
    details = {"degree": degree, "accumulation": 1, "dtype": "fp32", "network": ONE_HOST}
    given = {"nodes": 1, "ranks": 4} | {k: v for k, v in fields.items() if k in ("nodes", "ranks")}
    details |= {k: v for k, v in fields.items() if k not in given}
    return Row(
        "train_step", "gloo", arm, bytes=4, median_ms=ms, p95_ms=ms, bus_gb_s=None,
        details=details, **given,
    )  # type: ignore[arg-type]  # fmt: skip


def test_a_promise_is_our_median_over_the_peers_with_all_others_beside_it() -> None:
    rows = [
        step_row("hopshard", 4, 114.0),
        step_row("fsdp2", 4, 200.0),
        step_row("ddp", 1, 140.0),
        step_row("hsdp", 2, 190.0),
        step_row("fsdp2", 4, 1.0, accumulation=4),  # Another case.
    ]
    promised = promises_about(rows)
    (figure,) = make_step_figures(promised, rows, {}, holds=True)
    assert figure.name == "4 ranks, fp32, accumulation 1: step of hopshard@4 over fsdp2@4"
    assert (figure.value, figure.goal, figure.met) == (0.57, 0.57, True)
    assert figure.details["peers"] == {"ddp": 0.7, "hsdp": 0.95}
    assert figure.details["peers_known"] == {
        "ddp": 0.70, "hsdp": 0.99, "zero3": 1.08, "no_comm": 0.57
    }  # fmt: skip
    others = other_figures(rows, promised)
    assert [f.name.partition(": ")[2] for f in others] == [
        "step of hopshard@4 over ddp@1",
        "step of hopshard@4 over hsdp@2",
    ]
    assert {f.goal for f in others} == {None}


def test_goals_of_a_step_hold_for_their_workload() -> None:
    rows = [step_row("hopshard", 4, 1.0), step_row("fsdp2", 4, 2.0)]
    figures = make_step_figures(promises_about(rows), rows, {}, holds=False)
    assert [(figure.value, figure.goal, figure.met) for figure in figures] == [(0.5, None, None)]


def test_the_goals_are_those_of_the_project() -> None:
    def goals_of(promises: Sequence[Promise]) -> list[tuple[str, float]]:
        return [(promise.name, promise.goal) for promise in promises]

    one, four, bf16 = (
        f"4 ranks, {kind}: " for kind in
        ("fp32, accumulation 1", "fp32, accumulation 4", "bf16, accumulation 1")
    )  # fmt: skip
    assert goals_of(LOCAL) == [
        (one + "step of hopshard@4 over fsdp2@4", 0.57),
        (four + "step of hopshard@2 over fsdp2@4", 0.58),
        (four + "step of hopshard@4 over fsdp2@4", 0.58),
        (bf16 + "step of hopshard@4 over fsdp2@4", 0.65),
        (one + "step of hopshard_gloo@4 over fsdp2@4", 0.90),
        (one + "step of hopshard_gloo@2 over hsdp@2", 0.90),
        (four + "step of hopshard_gloo@4 over fsdp2@4", 0.90),
        (four + "step of hopshard_gloo@2 over hsdp@2", 0.90),
        (one + "peak memory of hopshard@4 over fsdp2@4", 0.65),
        (one + "peak memory of hopshard@2 over hsdp@2", 0.65),
        ("hopshard@4: peak memory over formula_mib + activation_mib", 1.10),
        ("hopshard@2: peak memory over formula_mib + activation_mib", 1.10),
        ("hopshard@4: memory by account over formula_mib", 1.10),
        ("hopshard@2: memory by account over formula_mib", 1.10),
        ("1 rank, fp32, accumulation 1: step of hopshard@1 over no_comm@1", 1.02),
    ]
    fast, slow = ("2 x 2, 1gbit per node, fp32", "2 x 2, 200mbit per node, fp32")
    assert goals_of(CLUSTER) == [
        (f"{fast}, accumulation 4: step of hopshard@2 over fsdp2@4", 0.33),
        (f"{slow}, accumulation 4: step of hopshard@2 over fsdp2@4", 0.14),
        (f"{fast}, accumulation 1: step of hopshard@4 over fsdp2@4", 0.45),
        (f"{fast}, accumulation 4: step of hopshard@4 over fsdp2@4", 0.43),
        (f"{fast}, accumulation 4: step of hopshard@4 over fsdp2_keep@4", 0.43),
        (f"{fast}, accumulation 1: step of hopshard_node@4 over fsdp2@4", 0.45),
        (f"{fast}, accumulation 4: step of hopshard_node@4 over fsdp2@4", 0.43),
        (f"{fast}, accumulation 4: step of hopshard_node@4 over fsdp2_keep@4", 0.43),
    ]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_measures_all_that_it_promises(preset: str) -> None:
    runs, promises = PRESETS[preset]
    measured = set()
    for run in runs:
        arms, _ = choose_arms(run.arms, run.degrees, run.ranks)
        for arm in arms:
            measured.add((run.case, (arm.name, arm.degree), "median_ms"))
            if arm.name in run.memory:
                kinds = ("peak_mib", "account_mib")
                measured |= {(run.case, (arm.name, arm.degree), kind) for kind in kinds}
        assert run.has_goals
    for promise in promises:
        for side in (promise.ours, promise.base):
            assert (promise.case, side, promise.quantity) in measured


def test_what_was_not_measured_is_a_missed_goal_with_its_reason() -> None:
    rows = [step_row("fsdp2", 4, 2.0)]
    reasons = {"4 ranks, fp32, accumulation 4": "hopshard@2: 'build' failed: ConfigError: no"}
    figures = make_step_figures(LOCAL, rows, reasons, holds=True)
    assert len(figures) == len(LOCAL)
    assert {figure.met for figure in figures} == {False}
    notes = {figure.name: figure.details["note"] for figure in figures}
    assert notes["4 ranks, fp32, accumulation 4: step of hopshard@2 over fsdp2@4"] == (
        "not measured: hopshard@2: 'build' failed: ConfigError: no"
    )
    assert notes["4 ranks, bf16, accumulation 1: step of hopshard@4 over fsdp2@4"] == (
        "not measured: hopshard@4 was not asked for"
    )
    assert figures[0].to_json()["value"] is None
    json.dumps([figure.to_json() for figure in figures], allow_nan=False)


def test_memory_is_held_against_a_peer_and_against_the_formula() -> None:
    ours = {"peak_mib": 110.0, "account_mib": 60.0, "formula_mib": 60.0, "activation_mib": 40.0}
    rows = [
        step_row("hopshard", 4, 1.0, **ours),
        step_row("fsdp2", 4, 1.0, peak_mib=220.0),
        step_row("ddp", 1, 1.0, peak_mib=264.0),
    ]
    figures = make_step_figures(promises_about(rows), rows, {}, holds=True)
    assert goals(figures) == {
        "4 ranks, fp32, accumulation 1: step of hopshard@4 over fsdp2@4": (1.0, 0.57),
        "4 ranks, fp32, accumulation 1: peak memory of hopshard@4 over fsdp2@4": (0.5, 0.65),
        "hopshard@4: peak memory over formula_mib + activation_mib": (1.1, 1.1),
        "hopshard@4: memory by account over formula_mib": (1.0, 1.1),
    }
    assert figures[1].details["peers"] == {"ddp": 1.2}
    assert (figures[1].details["ours_mib"], figures[1].details["peer_mib"]) == (110.0, 220.0)


# --- The arms of step_time.py


def test_the_model_is_the_one_that_the_goals_were_set_for() -> None:
    workload = Workload(GOAL_MODEL, 4, GOAL_BATCH, 1, "fp32")
    numel = sum(parameter.numel() for parameter in build_model(workload).parameters())
    assert round(numel / 1e6, 1) == 11.1
    assert (workload.config.context, GOAL_BATCH, workload.tokens) == (128, 2, 1024)


def test_arms_follow_from_names_and_degrees() -> None:
    arms, left_out = choose_arms(["hopshard", "ddp", "fsdp2", "hsdp", "no_comm"], [2, 3, 4], 4)
    assert [arm.label for arm in arms] == [
        "hopshard@2", "hopshard@4", "ddp@1", "fsdp2@4", "hsdp@2", "no_comm@1"
    ]  # fmt: skip
    assert left_out == {
        "hopshard@3": "degree 3 does not divide 4 ranks",
        "hsdp@3": "degree 3 does not divide 4 ranks",
        "hsdp@4": "HSDP of degree 4 over 4 ranks is fsdp2",
    }


def test_zero3_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arms, left_out = choose_arms(["zero3"], [2], 4)
    assert not arms
    assert "pip install deepspeed" in left_out["zero3@4"]


def test_arms_whose_losses_differ_are_not_timed() -> None:
    ddp, ours, alone = Arm("ddp", 1), Arm("hopshard", 2), Arm("no_comm", 1)
    losses = {ours: [4.0, 2.0], ddp: [4.0, 2.0], alone: [4.0, 3.0]}
    assert compare(losses, 1e-5, ranks=4) == {ours: 0.0, ddp: 0.0, alone: 0.0}
    for wrong in ([4.0, 2.1], [4.0, float("nan")]):
        with pytest.raises(ArmError, match=r"differ from those of ddp@1: hopshard@2 by"):
            compare(losses | {ours: wrong}, 1e-5, ranks=4)
    with pytest.raises(ArmError, match=r"no_comm@1 by 5\.0e-01"):
        compare({ddp: [4.0, 2.0], alone: [4.0, 3.0]}, 1e-5, ranks=1)


def test_bf16_arms_begin_with_the_same_values() -> None:
    for parameter in build_model(Workload("tiny", 4, 1, 1, "bf16")).parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, parameter.bfloat16().float())


def test_the_formula_is_that_of_the_documentation() -> None:
    """The worked example of docs/memory.md."""
    kept, moments, pool = 3_337_216, 3_337_216, 3_502_080
    assert formula_bytes(Workload("tiny", 4, 1, 1, "fp32"), 2) == kept + moments + pool


def test_activations_grow_with_the_batch() -> None:
    one, two = (activation_bytes(Workload("tiny", 1, batch, 1, "fp32")) for batch in (1, 2))
    assert 1.8 < two / one < 2.1


def test_peak_memory_sees_what_comes_and_goes() -> None:
    with PeakPss() as memory:
        held = torch.ones(64 * MIB // 4)
        time.sleep(0.3)
        del held
    assert 63 * MIB < memory.peak_bytes < 100 * MIB


def test_an_arm_that_raises_dies_or_hangs_is_said() -> None:
    program = """
        import os, sys, time
        sys.path.insert(0, sys.argv[1])
        from benchmarks import _turns
        from benchmarks._arms import Arm, Workload

        class Strange(_turns.Worker):
            def raise_(self): raise ValueError("strange")
            def die(self): os._exit(7)
            def hang(self): time.sleep(60)

        _turns.Worker = Strange
        workload = Workload("tiny", 1, 1, 1, "fp32")
        place = _turns.Place(0, 1, "127.0.0.1", 1)
        for name in ("raise_", "die", "hang"):
            arm = Arm("ddp", 1)
            try:
                with _turns.Seat([arm], workload, place) as seat:
                    seat.ask(arm, name, limit_s=0.5 if name == "hang" else 60)
            except _turns.ArmError as error:
                lines = str(error).splitlines()
                print(lines[0], "|", lines[-1])
    """
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(ROOT)],
        capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = finished.stdout.splitlines()
    assert len(lines) == 3, finished.stdout + finished.stderr
    assert lines[0] == "ddp@1: 'raise_' failed | ValueError: strange"
    assert lines[1].startswith("ddp@1: its process died in 'die'")
    assert lines[2].startswith("ddp@1: no answer to 'hang' within 0.5 s")


# --- The commands


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


def run_step_time(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "step_time.py"), *arguments],
        capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_step_time_runs_and_writes_the_form(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s.json"
    names = "hopshard,hopshard_gloo,ddp,fsdp2,no_comm"
    finished = run_step_time(
        "--quick", "--ranks", "2", "--accumulation", "2", "--arms", names, "--json", str(path)
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    written = json.loads(path.read_text())
    rows = {row["algorithm"]: row for row in written["rows"]}
    assert list(rows) == names.split(",")
    for row in rows.values():
        assert row["op"] == "train_step" and 0 < row["median_ms"] <= row["p95_ms"]
        assert row["loss_difference"] <= 1e-5
        assert (row["accumulation"], row["ranks"]) == (2, 2)
    ours = rows["hopshard"]
    assert ours["intra_node_bytes"] > 0 and ours["account_mib"] == ours["formula_mib"]
    assert ours["peak_mib"] > ours["account_mib"]
    assert rows["fsdp2"]["sent_mib"] > 1 and rows["fsdp2"]["peak_mib"] > 0
    assert written["figures"] and all(figure["goal"] is None for figure in written["figures"])
    assert "Measured" in finished.stdout


def test_step_time_says_which_arm_failed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s.json"
    finished = run_step_time(
        "--quick", "--ranks", "2", "--arms", "hopshard,ddp", "--backend", "nonsense",
        "--no-memory", "--json", str(path),
    )  # fmt: skip
    assert finished.returncode == 1
    written = json.loads(path.read_text())
    assert written["rows"] == []
    (reason,) = written["meta"]["notes"].values()
    assert "hopshard@2: 'verify' failed" in reason and "ConfigError" in reason


@pytest.mark.parametrize(
    "arguments",
    [["--arms", "hopshard,fsdp9"], ["--degrees", "0"], ["--preset", "moon"], ["--dtype", "fp8"]],
)
def test_bad_options_of_step_time_are_refused(arguments: list[str]) -> None:
    finished = run_step_time(*arguments)
    assert finished.returncode == 2
    assert "usage: step_time.py" in finished.stderr
