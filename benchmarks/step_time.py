#!/usr/bin/env python3
"""Seconds, bytes and memory of a training step: hopshard beside FSDP2, HSDP, DDP and ZeRO-3.

All arms train the same GPT-2 on the same data. First they must produce equal losses; only then do
they take turns, step by step, on the clock. How to read what it prints: benchmarks/README.md.

    python benchmarks/step_time.py --quick
    python benchmarks/step_time.py --arms hopshard,fsdp2,hsdp --degrees 2,4 --accumulation 4
    python benchmarks/step_time.py --preset local --json s.json
    sudo python benchmarks/step_time.py --preset cluster --json c.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import pathlib
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # For the imports below.

import torch

from benchmarks._arms import DTYPES, KINDS, MODELS, Arm, build_model, choose_arms
from benchmarks._launch import is_rank, start_ranks, wait_for_all
from benchmarks._memory import PeakPss, predict
from benchmarks._rows import Results, Row, make_meta, summarise
from benchmarks._step_goals import (
    ONE_HOST,
    Promise,
    make_figures,
    other_figures,
    promises_about,
)
from benchmarks._step_runs import GOAL_BATCH, GOAL_MODEL, PRESETS, Run, only
from benchmarks._turns import ArmError, Place, Seat, Worker
from benchmarks.cluster.run import ClusterError, check_machine

THIS: Final = pathlib.Path(__file__).resolve()
CLUSTER_PROGRAM: Final = THIS.parent / "cluster" / "run.py"
MIN_ROUNDS: Final = 3  # However long a round takes.
MEMORY_STEPS: Final = 3
RUN_LIMIT_S: Final = 900.0
MEMORY_LIMIT_S: Final = 300.0
GRACE_S: Final = 30.0  # The emulated network has to be taken down.
# Relative, over the steps with SGD. In bf16 a weight moves by 2^-8 of its value or not at all.
VERIFIED_TOLERANCE: Final = {"fp32": 1e-5, "bf16": 2e-3}
# And over those with AdamW, which turns the rounding of a gradient near zero into a whole step.
TRAINED_TOLERANCE: Final = {"fp32": 1e-2, "bf16": 5e-2}
DEFAULT_ARMS: Final = ("hopshard", "ddp", "fsdp2", "fsdp2_keep", "hsdp", "hsdp_two_hop", "zero3")


@dataclass
class Found:
    """What the runs brought."""

    rows: list[Row] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    """By arm or case: why there are no rows."""
    has_failed: bool = False


def main() -> int:
    arguments = parse_arguments()
    if is_rank():
        return run_rank(arguments)
    if arguments.preset == "cluster":
        try:
            check_machine()
        except ClusterError as error:
            print(f"step_time: {error}", file=sys.stderr)
            return 2
    runs, promises = chosen_runs(arguments)
    found = Found()
    with tempfile.TemporaryDirectory(prefix="hopshard_step_time_") as folder:
        for run in runs:
            carry_out(run, pathlib.Path(folder), found)
    if promises is None:
        promises = promises_about(found.rows)
    holds = all(run.has_goals for run in runs)
    code = finish(arguments, found, promises, holds)
    return 1 if found.has_failed else code


def chosen_runs(arguments: argparse.Namespace) -> tuple[list[Run], Sequence[Promise] | None]:
    """What to measure, and the promises that must be spoken of; None: those that are measured."""
    promises = None
    if arguments.preset is None:
        run = run_from(arguments)
        runs = [run if arguments.no_memory else dataclasses.replace(run, memory=run.arms)]
    else:
        planned, promises = PRESETS[arguments.preset]
        runs = [dataclasses.replace(run, backend=arguments.backend) for run in planned]
        if arguments.arms is not None:
            runs = [only(run, arguments.arms) for run in runs]
        if arguments.no_memory:
            runs = [dataclasses.replace(run, memory=()) for run in runs]
    return [run.quick() if arguments.quick else run for run in runs], promises


def run_from(arguments: argparse.Namespace) -> Run:
    return Run(
        tuple(DEFAULT_ARMS if arguments.arms is None else arguments.arms),
        tuple(arguments.degrees),
        arguments.accumulation,
        arguments.ranks,
        arguments.dtype,
        None,
        arguments.network or ONE_HOST,
        arguments.steps,
        arguments.seconds,
        arguments.warmup_steps,
        arguments.verified_steps,
        (),
        arguments.model,
        arguments.batch,
        arguments.backend,
    )


def finish(
    arguments: argparse.Namespace, found: Found, promises: Sequence[Promise], holds: bool
) -> int:
    config = {k: v for k, v in vars(arguments).items() if k not in ("json", "result", "part")}
    results = Results({**make_meta("step_time", config), "notes": found.reasons}, found.rows)
    results.figures = make_figures(promises, found.rows, found.reasons, holds=holds)
    if arguments.preset is None:
        results.figures += other_figures(found.rows, promises)
    results.show()
    for name, reason in found.reasons.items():
        print(f"left out: {name}: {reason}")
    if arguments.json:
        results.write(arguments.json)
    return int(arguments.check and bool(results.missed()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), help="all rows that have goals")
    parser.add_argument("--arms", type=_arms, help=f"some of {','.join(KINDS)}")
    parser.add_argument("--degrees", type=_counts, default=[2], help="such as 2,4")
    parser.add_argument("-n", "--ranks", type=_count, default=4)
    parser.add_argument("--model", choices=sorted(MODELS), default=GOAL_MODEL)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument(
        "--batch", type=_count, default=GOAL_BATCH, help="sequences per rank and micro-step"
    )
    parser.add_argument("--accumulation", type=_count, default=4, help="micro-steps per step")
    parser.add_argument("--backend", default="auto", help="hopshard's transport")
    parser.add_argument("--steps", type=_count, default=20, help="timed ones of each arm")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="end the timed steps after so long"
    )
    parser.add_argument("--warmup-steps", type=_count, default=2)
    parser.add_argument("--verified-steps", type=_count, default=3)
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--quick", action="store_true", help="few and small: shows that it works")
    parser.add_argument("--json", metavar="FILE", help="also write {meta, rows, figures} here")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")
    parser.add_argument("--network", default="", help="what lies between the nodes, for the record")
    # For ranks: where they leave what they found, and what to do.
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--part", choices=("time", "memory"), default="time", help=argparse.SUPPRESS
    )
    return parser.parse_args()


# --- Starting ranks


def carry_out(run: Run, folder: pathlib.Path, found: Found) -> None:
    """Adds the rows of one run, or why there are none."""
    arms, left_out = choose_arms(run.arms, run.degrees, run.ranks)
    found.reasons |= {name: text for name, text in left_out.items() if not _is_same(text)}
    case = str(run.case)
    if not arms:
        found.reasons[case] = "none of its arms was asked for or is there"
        return
    _say(f"{case}: {', '.join(arm.label for arm in arms)}")
    rows = start(run, folder / "rows.pickle", ["--part", "time"], RUN_LIMIT_S)
    if isinstance(rows, str):
        found.reasons[case] = rows
        found.has_failed = True
        return
    memory: dict[Arm, Mapping[str, Any]] = {}
    for arm in (arm for arm in arms if arm.name in run.memory and run.rate is None):
        _say(f"{case}: memory of {arm.label}")
        alone = dataclasses.replace(run, arms=(arm.name,), degrees=(arm.degree,))
        fields = start(alone, folder / "memory.pickle", ["--part", "memory"], MEMORY_LIMIT_S)
        if isinstance(fields, str):
            found.reasons[f"memory of {arm.label}"] = fields
            found.has_failed = True
        else:
            memory[arm] = fields
    for row in rows:
        more = memory.get(Arm(row.algorithm, row.details["degree"]), {})
        found.rows.append(dataclasses.replace(row, details={**row.details, **more}))


def start(run: Run, result: pathlib.Path, how: Sequence[str], limit_s: float) -> Any:
    """Starts the ranks of a run, fresh ones; what they left, or the reason why nothing."""
    error = result.with_suffix(".error")
    for path in (result, error):
        path.unlink(missing_ok=True)
    options = [*run.options(), *how, "--result", str(result)]
    if run.rate is None:
        # torch looks for an interface by host name; the ranks are here.
        interface = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        command = [sys.executable, str(THIS), *options]
        code = start_ranks(
            command, run.ranks, use_mpi=False, environment=interface, limit_s=limit_s
        )
    else:
        place = ["--nodes", "2", "--ranks-per-node", str(run.ranks // 2), "--rate", run.rate]
        command = [sys.executable, str(CLUSTER_PROGRAM), *place, "--no-mpi", "step_time", *options]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        code = wait_for_all([subprocess.Popen(command, env=environment)], limit_s, GRACE_S)
    if code == 0 and result.exists():
        return pickle.loads(result.read_bytes())
    if error.exists():
        return error.read_text(encoding="utf-8")
    return f"not done within {limit_s:g} s" if code == 124 else f"exit code {code}"


# --- A rank


def run_rank(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    run, place = run_from(arguments), Place.here()
    if arguments.result is None and arguments.quick:  # Started by hand on an emulated cluster.
        run = run.quick()
    if run.network == ONE_HOST and place.nodes > 1:
        run = dataclasses.replace(run, network=f"{place.nodes} nodes")
    try:
        if arguments.part == "memory":
            result: Any = measure_memory(run, place)
        else:
            arms, reasons = choose_arms(run.arms, run.degrees, run.ranks)
            result = measure_times(run, arms, place)
    except Exception as error:  # Whatever it is: the table says why a row is missing.
        text = str(error) if isinstance(error, ArmError) else traceback.format_exc()
        print(f"rank {place.rank}: {text}", file=sys.stderr, flush=True)
        if arguments.result is not None:
            leave_reason(arguments.result.with_suffix(".error"), text)
        return 1
    if place.rank != 0:
        return 0
    if arguments.result is not None:
        arguments.result.write_bytes(pickle.dumps(result))
        return 0
    return finish(arguments, Found(result, reasons), promises_about(result), run.has_goals)


def leave_reason(path: pathlib.Path, text: str) -> None:
    """In one line; the first rank that fails knows best."""
    # Of a traceback, what follows its last frame: "TypeError: ...".
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    words = dict.fromkeys([line for line in lines[:1] if not line.startswith("Traceback")])
    words |= dict.fromkeys(errors[-1:] or lines[-1:])
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(": ".join(words))


def measure_times(run: Run, arms: Sequence[Arm], place: Place) -> list[Row]:
    """The rows of one run. Collective: all ranks.

    Raises:
        ArmError: an arm failed, or two do not produce the same losses.
    """
    workload = run.workload
    with Seat(arms, workload, place) as seat:
        store = place.store(serve=place.rank == 0)
        for arm in arms:
            seat.ask(arm, "connect")
        verified = dataclasses.replace(workload, accumulation=min(2, workload.accumulation))
        losses = {arm: seat.ask(arm, "verify", verified, run.verified_steps) for arm in arms}
        differences = compare(losses, VERIFIED_TOLERANCE[run.dtype], run.ranks)
        for arm in arms:
            seat.ask(arm, "build")
        for step in range(run.warmup_steps):
            for arm in arms:
                seat.ask(arm, "step", step)
        for arm in arms:
            seat.ask(arm, "begin")
        begin = time.monotonic()
        for number in range(run.steps):
            if place.rank == 0:  # Clocks differ: one rank decides.
                late = number >= MIN_ROUNDS and time.monotonic() - begin > run.seconds
                store.set(f"round/{number}", "end" if late else "go")
            if store.get(f"round/{number}") == b"end":
                break
            # One that always came after the same one would inherit its caches.
            turn = number % len(arms)
            for arm in (*arms[turn:], *arms[:turn]):
                seat.ask(arm, "step", run.warmup_steps + number)
        reports = {arm: seat.ask(arm, "report") for arm in arms}
        trained = {arm: report["losses"] for arm, report in reports.items()}
        compare(trained, TRAINED_TOLERANCE[run.dtype], run.ranks)
        for arm in arms:
            seat.ask(arm, "end")
    return make_rows(run, place.nodes, reports, differences)


def measure_memory(run: Run, place: Place) -> dict[str, Any]:
    """Of the one arm of this run, in this process. Collective: all ranks."""
    (arm,), _ = choose_arms(run.arms, run.degrees, run.ranks)
    if arm.name == "zero3":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # type: ignore[import-not-found]  # noqa: F401  One of the imports.
    store = place.store(serve=place.rank == 0)
    worker = Worker(arm, run.workload, place)
    _meet(store, "imported", place, run.ranks)  # Shares of what all map depend on how many do.
    with PeakPss() as memory:
        _meet(store, "watched", place, run.ranks)
        worker.connect()
        worker.build()
        for step in range(MEMORY_STEPS):
            worker.step(step)
    account = worker.report()["account"].get("account_mib")
    store.set(f"peak/{place.rank}", str(memory.peak_bytes))
    peak = max(int(store.get(f"peak/{rank}")) for rank in range(run.ranks))
    fields: dict[str, Any] = {"peak_mib": round(peak / 2**20, 1), "account_mib": account}
    if place.rank == 0:
        fields |= predict(run.workload, arm)
    worker.end()
    _meet(store, "ended", place, run.ranks)
    return fields


def _meet(store: Any, name: str, place: Place, ranks: int) -> None:
    """Returns when all ranks have come here; rank 0, which serves the store, as the last."""
    _count_to(store, name, ranks)
    gone = f"{name}/gone"
    if place.rank == 0:
        _count_to(store, gone, ranks)
    else:
        store.add(gone, 1)


def _count_to(store: Any, name: str, ranks: int) -> None:
    number = store.add(name, 1)
    deadline = time.monotonic() + MEMORY_LIMIT_S
    while number < ranks:
        if time.monotonic() > deadline:
            raise ArmError(f"{number} of {ranks} ranks have come to '{name}'")
        time.sleep(0.005)
        number = store.add(name, 0)


def compare(
    losses: Mapping[Arm, Sequence[float]], tolerance: float, ranks: int
) -> dict[Arm, float]:
    """Largest relative difference of each arm's losses from the reference's.

    The reference is DDP, or else the first arm. Ranks that do not communicate share the first loss
    alone with the others, unless there is one rank.

    Raises:
        ArmError: one is above the tolerance.
    """
    reference = next((arm for arm in losses if arm.name == "ddp"), next(iter(losses)))
    differences = {}
    for arm, values in losses.items():
        count = 1 if "no_comm" in (arm.name, reference.name) and ranks > 1 else len(values)
        pairs = zip(values[:count], losses[reference][:count], strict=True)
        found = [abs(a - b) / abs(b) for a, b in pairs]
        differences[arm] = math.inf if any(map(math.isnan, found)) else max(found)
    wrong = {arm.label: f"{d:.1e}" for arm, d in differences.items() if not d <= tolerance}
    if wrong:
        text = ", ".join(f"{label} by {difference}" for label, difference in wrong.items())
        raise ArmError(f"losses differ from those of {reference.label}: {text}")
    return differences


def make_rows(
    run: Run, nodes: int, reports: Mapping[Arm, Any], differences: Mapping[Arm, float]
) -> list[Row]:
    """One row per arm. ``bytes`` are those of the parameters, in fp32."""
    num_bytes = 4 * sum(parameter.numel() for parameter in build_model(run.workload).parameters())
    rows = []
    for arm, report in reports.items():
        median = statistics.median(report["seconds"])
        details = {
            "degree": arm.degree,
            "accumulation": run.accumulation,
            "dtype": run.dtype,
            "network": run.network,
            "tokens_per_s": round(run.workload.tokens / median, 1),
            "sent_mib": round(statistics.median(report["sent_bytes"]) / 2**20, 3),
            "loss_difference": float(f"{differences[arm]:.2e}"),
            **report["account"],
        }
        places = (nodes, run.ranks)
        row = summarise(
            "train_step", report["backend"], arm.name, places, num_bytes, report["seconds"], details
        )
        rows.append(row)
    return rows


# --- Odds and ends


def _is_same(reason: str) -> bool:
    """What would be another arm is no loss."""
    return reason.startswith(("HSDP of degree", "hopshard_node of degree"))


def _say(text: str) -> None:
    print(f"step_time: {text}", file=sys.stderr, flush=True)


def _arms(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r}: legal are {', '.join(KINDS)}")
    return list(dict.fromkeys(names))


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
