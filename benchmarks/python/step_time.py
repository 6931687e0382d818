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
import os
import pathlib
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # For the imports below.

import hopshard as hs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks._rows import Figure, Results, Row, make_meta, summarise
from examples.gpt2.model import GPT2, SHAPES, GPT2Config

MODELS: Final = {
    "tiny": SHAPES["tiny"],
    "small": GPT2Config(num_layers=8, num_heads=8, hidden=512, context=128, vocabulary_size=256),
}
SEED: Final = 0
ROWS_FILE: Final = "HOPSHARD_BENCHMARK_ROWS"  # Set for ranks: where rank 0 leaves its rows.
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
    if ROWS_FILE in os.environ:
        return run_rank(arguments)
    # One process per rank, started as a user would, and fresh ones for each degree: process groups
    # of one system must not outlive its row.
    command = [sys.executable, "-m", "hopshard.cli", "run", "-n", str(arguments.ranks)]
    command += ["--no-prefix", str(pathlib.Path(__file__).resolve()), *sys.argv[1:]]
    config = {name: value for name, value in vars(arguments).items() if name != "json"}
    results = Results(make_meta("step_time", config))
    with tempfile.TemporaryDirectory(prefix="hopshard_step_time_") as folder:
        rows_file = pathlib.Path(folder) / "rows.pickle"
        environment = {"OMP_NUM_THREADS": "1", **os.environ, ROWS_FILE: str(rows_file)}
        for degree in arguments.degrees.split(","):
            finished = subprocess.run([*command, "--degrees", degree], check=False, env=environment)
            if finished.returncode != 0:
                return finished.returncode
            results.rows += pickle.loads(rows_file.read_bytes())
    results.figures = make_figures(results.rows)
    results.show()
    if arguments.json:
        results.write(arguments.json)
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
    parser.add_argument("--json", metavar="FILE", help="also write {meta, rows, figures} here")
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
    rows = measure(settings)
    if hs.rank() == 0:
        pathlib.Path(os.environ[ROWS_FILE]).write_bytes(pickle.dumps(rows))
    hs.shutdown()
    return 0


def measure(settings: Settings) -> list[Row]:
    """The rows of one degree. Collective: all ranks.

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
    return make_rows(settings, samples, losses, differences, meter)


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


def make_rows(
    settings: Settings,
    samples: dict[str, list[float]],
    losses: dict[str, list[float]],
    differences: dict[str, float],
    meter: Any,
) -> list[Row]:
    """One row per system. ``bytes`` are those of the parameters."""
    sent = {
        link: meter.value(f"comm/sent_{link}_bytes") // settings.steps
        for link in ("intra_node", "inter_node")
    }
    tokens = settings.ranks * settings.accumulation * settings.batch
    tokens *= MODELS[settings.model].context
    num_bytes = 4 * sum(p.numel() for p in build_model(settings).parameters())
    rows = []
    for name, values in samples.items():
        details = {
            "degree": settings.degree,
            "tokens_per_s": round(tokens / statistics.median(values), 1),
            "loss_difference": float(f"{differences[name]:.2e}"),
            "final_loss": round(losses[name][-1], 6),
        }
        if name == "hopshard":
            details |= {f"{link}_bytes": value for link, value in sent.items()}
        places = (hs.num_nodes(), settings.ranks)
        rows.append(summarise("train_step", "gloo", name, places, num_bytes, values, details))
    return rows


def make_figures(rows: Sequence[Row]) -> list[Figure]:
    """How many times as fast as the others hopshard is, per degree."""
    figures = []
    for ours in (row for row in rows if row.algorithm == "hopshard"):
        degree = ours.details["degree"]
        for peer in rows:
            if peer.details["degree"] == degree and peer is not ours:
                name = f"step, degree {degree}: times as fast as {peer.algorithm}"
                details = {"ours_ms": ours.median_ms, "peer_ms": peer.median_ms}
                value = peer.median_ms / ours.median_ms
                figures.append(Figure(name, value, None, "higher", details))
    return figures


if __name__ == "__main__":
    sys.exit(main())
