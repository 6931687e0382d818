#!/usr/bin/env python3
"""Seconds of a training step: hopshard beside torch's FSDP2 (one dimension and HSDP) and DDP.

All systems train the same GPT-2 on the same data over Gloo on CPU ranks of this host, in one run,
taking turns step by step. First they must produce equal losses; only then is the clock started.
How to read a row: benchmarks/README.md.

    python benchmarks/python/step_time.py --quick
    python benchmarks/python/step_time.py -n 4 --degrees 1,2,4 --model tiny
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # For examples.

import hopshard as hs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from examples.gpt2.model import GPT2, SHAPES, GPT2Config

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
MODELS: Final = {
    "tiny": SHAPES["tiny"],
    "small": GPT2Config(num_layers=8, num_heads=8, hidden=512, context=128, vocabulary_size=256),
}
SEED: Final = 0
LOSS_TOLERANCE: Final = 1e-5  # Relative, over the verified steps.

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Settings:
    """What one row measures."""

    ranks: int
    degree: int
    model: str
    batch: int
    accumulation: int
    steps: int
    verified_steps: int


@dataclass
class Runner:
    """One system: a step on given micro-batches, returning this rank's mean loss."""

    name: str
    step: Callable[[Sequence[torch.Tensor]], torch.Tensor]


def main() -> int:
    arguments = parse_arguments()
    if "HOPSHARD_BENCHMARK_RANK" in os.environ:
        return run_rank(arguments)
    # One process per rank, started as a user would, and fresh ones for each degree: process groups
    # of one system must not outlive its row.
    command = [sys.executable, "-m", "hopshard.cli", "run", "-n", str(arguments.ranks)]
    command += ["--no-prefix", str(pathlib.Path(__file__).resolve()), *sys.argv[1:]]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "HOPSHARD_BENCHMARK_RANK": "1"}
    for degree in arguments.degrees.split(","):
        finished = subprocess.run([*command, "--degrees", degree], check=False, env=environment)
        if finished.returncode != 0:
            return finished.returncode
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--ranks", type=int, default=4)
    parser.add_argument("--degrees", default="2", help="comma-separated; one row each")
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and micro-step")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-steps per step")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each system")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it works")
    return parser.parse_args()


def run_rank(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    settings = Settings(
        ranks=arguments.ranks,
        degree=int(arguments.degrees),
        model=arguments.model,
        batch=1 if arguments.quick else arguments.batch,
        accumulation=arguments.accumulation,
        steps=3 if arguments.quick else arguments.steps,
        verified_steps=3 if arguments.quick else 8,
    )
    row = measure(settings)
    if hs.rank() == 0:
        print(json.dumps(row), flush=True)
    hs.shutdown()
    return 0


def measure(settings: Settings) -> dict[str, Any]:
    """One row. Collective: all ranks.

    Raises:
        SystemExit: two systems do not produce the same losses.
    """
    hs.init(sharded_data_parallel_degree=settings.degree, log_level="warning")
    # Adam hides a gradient of the wrong scale; SGD does not.
    checked = [build(settings, sgd) for build in builders(settings)]
    losses = {runner.name: train(runner, settings) for runner in checked}
    differences = compare(losses)
    del checked
    runners = [build(settings, adamw) for build in builders(settings)]
    for runner in runners:
        train(runner, settings)  # Warm-up.

    meter = hs.current().meter
    samples: dict[str, list[float]] = {runner.name: [] for runner in runners}
    meter.reset()
    for step in range(settings.steps):
        micro_batches = batches(settings, settings.verified_steps + step)
        # A system that always came after the same one would inherit its caches.
        for runner in runners[step % len(runners) :] + runners[: step % len(runners)]:
            dist.barrier()
            begin = time.perf_counter()
            runner.step(micro_batches)
            dist.barrier()  # A step ends when the slowest rank is done.
            samples[runner.name].append(time.perf_counter() - begin)
    return make_row(settings, samples, losses, differences, meter)


def builders(settings: Settings) -> list[Callable[[Settings, MakeOptimizer], Runner]]:
    chosen = [build_hopshard, build_ddp, build_fsdp2]
    if 1 < settings.degree < settings.ranks:
        chosen.append(build_hsdp)
    return chosen


def build_model(settings: Settings) -> GPT2:
    torch.manual_seed(SEED)
    return GPT2(MODELS[settings.model])


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def build_hopshard(settings: Settings, make_optimizer: MakeOptimizer) -> Runner:
    model = hs.DistributedModel(
        build_model(settings), backward_passes_per_step=settings.accumulation
    )
    optimizer = hs.DistributedOptimizer(make_optimizer(model))
    return Runner("hopshard", lambda micro: run_step(model, optimizer, micro, no_sync=None))


def build_ddp(settings: Settings, make_optimizer: MakeOptimizer) -> Runner:
    model = torch.nn.parallel.DistributedDataParallel(build_model(settings))

    def no_sync(is_last: bool) -> Any:
        return contextlib.nullcontext() if is_last else model.no_sync()

    optimizer = make_optimizer(model)
    return Runner("ddp", lambda micro: run_step(model, optimizer, micro, no_sync=no_sync))


def build_fsdp2(settings: Settings, make_optimizer: MakeOptimizer) -> Runner:
    mesh = init_device_mesh("cpu", (settings.ranks,))
    return shard_with_torch("fsdp2", settings, make_optimizer, mesh)


def build_hsdp(settings: Settings, make_optimizer: MakeOptimizer) -> Runner:
    shape = (settings.ranks // settings.degree, settings.degree)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return shard_with_torch("hsdp", settings, make_optimizer, mesh)


def shard_with_torch(
    name: str, settings: Settings, make_optimizer: MakeOptimizer, mesh: DeviceMesh
) -> Runner:
    """FSDP2 with blocks as units; with two dimensions the all-reduce waits for the last pass."""
    model = build_model(settings)
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # As hopshard: sums travel, the mean is one division. Gloo has no average.
    for module in [*model.h, model]:
        module.set_gradient_divide_factor(settings.ranks)
        module.set_force_sum_reduction_for_comms(True)

    def no_sync(is_last: bool) -> Any:
        model.set_requires_all_reduce(is_last)
        return contextlib.nullcontext()

    optimizer = make_optimizer(model)
    return Runner(name, lambda micro: run_step(model, optimizer, micro, no_sync=no_sync))


def run_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[torch.Tensor],
    no_sync: Callable[[bool], Any] | None,
) -> torch.Tensor:
    """The same few lines for every system."""
    total = torch.zeros((), dtype=torch.float64)
    optimizer.zero_grad()
    for index, tokens in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with no_sync(is_last) if no_sync else contextlib.nullcontext():
            _, loss = model(tokens[:, :-1], targets=tokens[:, 1:])
            (loss / len(micro_batches)).backward()
        total += loss.detach().double() / len(micro_batches)
    optimizer.step()
    return total


def batches(settings: Settings, step: int) -> list[torch.Tensor]:
    """This rank's micro-batches of a step, the same for every system: noisy counting."""
    config = MODELS[settings.model]
    generator = torch.Generator().manual_seed(step * settings.ranks + hs.rank())
    shape = (settings.batch, config.context + 1)
    result = []
    for _ in range(settings.accumulation):
        start = torch.randint(config.vocabulary_size, (settings.batch, 1), generator=generator)
        noise = torch.randint(3, shape, generator=generator)
        result.append((start + torch.arange(shape[1]) + noise) % config.vocabulary_size)
    return result


def train(runner: Runner, settings: Settings) -> list[float]:
    """The world's mean losses of the verified steps."""
    losses = torch.stack(
        [runner.step(batches(settings, step)) for step in range(settings.verified_steps)]
    )
    dist.all_reduce(losses)
    return [float(loss) / settings.ranks for loss in losses]


def compare(losses: dict[str, list[float]]) -> dict[str, float]:
    """Largest relative difference of each system's losses from DDP's."""
    differences = {
        name: max(abs(a - b) / abs(b) for a, b in zip(values, losses["ddp"], strict=True))
        for name, values in losses.items()
    }
    wrong = {name: value for name, value in differences.items() if not value <= LOSS_TOLERANCE}
    if wrong:
        raise SystemExit(f"losses differ from DDP's by {wrong}; nothing was timed")
    return differences


def make_row(
    settings: Settings,
    samples: dict[str, list[float]],
    losses: dict[str, list[float]],
    differences: dict[str, float],
    meter: Any,
) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in samples.items()}
    sent = {
        link: meter.value(f"comm/sent_{link}_bytes") // settings.steps
        for link in ("intra_node", "inter_node")
    }
    return {
        "benchmark": "step_time",
        "config": vars(settings),
        "parameters": sum(p.numel() for p in build_model(settings).parameters()),
        "seconds_median": {name: round(value, 6) for name, value in medians.items()},
        "seconds_p95": {name: round(p95(values), 6) for name, values in samples.items()},
        "ratio_to_hopshard": {
            name: round(value / medians["hopshard"], 4) for name, value in medians.items()
        },
        "tokens_per_s": round(
            settings.ranks
            * settings.accumulation
            * settings.batch
            * MODELS[settings.model].context
            / medians["hopshard"],
            1,
        ),
        "hopshard_bytes_sent_per_step": sent,
        "final_loss": round(losses["hopshard"][-1], 6),
        "largest_loss_difference": {n: float(f"{d:.2e}") for n, d in differences.items()},
        "commit": commit(),
        "machine": machine(),
    }


def p95(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]


def commit() -> str:
    """The commit, "+changes" if the tree differs from it, or what stands for it outside git."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return f"none, version {hs.__version__}"
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_rank": torch.get_num_threads(),
    }


if __name__ == "__main__":
    sys.exit(main())
