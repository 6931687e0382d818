"""``hopshard tune``: measures what a message costs inside a node and between nodes.

Started plainly it starts ranks of this host; under ``hopshard run``, torchrun, mpirun or srun it
measures with the ranks that are there. The file it writes is read by ``init`` (link_costs.py), and
chooses between flat and two-level collectives. Next: link_costs.py.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from hopshard import _C, world
from hopshard.cli import run
from hopshard.errors import ConfigError
from hopshard.launch_env import detect_launch
from hopshard.link_costs import LinkCost, LinkCosts
from hopshard.transports import Algorithm

DEFAULT_OUTPUT: Final = "link_costs.json"
SIZES: Final = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
"""Bytes of the whole buffer that are measured."""
SHOWN_SIZES: Final = tuple(4 << (10 + 2 * step) for step in range(9))
_OPS: Final = ("all_gather", "reduce_scatter")
_SAMPLES: Final = 15
_SIZE_BUDGET_S: Final = 1.5  # For one size of one link; slow links get fewer samples.
_LARGEST: Final = 1 << 34


@dataclass(frozen=True)
class Sample:
    """A ring of ``ranks`` ranks took ``seconds`` for ``num_bytes`` that share one link.

    The model: ``(ranks - 1) * (alpha + num_bytes / ranks / bandwidth)``.
    """

    ranks: int
    num_bytes: float
    seconds: float


def add_parser(commands: Any) -> None:
    """Adds ``hopshard tune``."""
    parser = commands.add_parser(
        "tune",
        help="measure the links inside and between nodes, for hopshard.init",
        description="Measures latency and bandwidth inside a node and between nodes and writes "
        "them to a file. Give it to hopshard.init(link_costs=FILE) or HOPSHARD_LINK_COSTS. On "
        "several hosts start it by torchrun, mpirun or srun, one process per rank.",
    )
    parser.add_argument(
        "-n",
        "--ranks",
        type=run.positive,
        metavar="N",
        help="ranks to start on this host (default: its cores, at least 2)",
    )
    parser.add_argument(
        "--emulate",
        type=run.nodes_by_ranks,
        metavar="NODESxRANKS",
        help="let this host look like several nodes, e.g. 2x2",
    )
    parser.add_argument(
        "--backend", default="auto", help="what to measure with, such as shm+c10d (default: auto)"
    )
    parser.add_argument(
        "--output", default=DEFAULT_OUTPUT, metavar="FILE", help=f"default: {DEFAULT_OUTPUT}"
    )
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Measures, writes the file, and prints what follows from it."""
    output = run.output_file(arguments.output)
    if detect_launch(os.environ).size == 1:
        return run.execute(_as_run(arguments, output))
    here = world.init(backend=arguments.backend, log_level="warning")
    try:
        costs = measure(here)
        measured = measure_algorithms(here)
        if here.rank == 0:
            costs.save(output)
            show(costs, here.num_nodes, here.size // here.num_nodes, measured)
            print(f"written to {output}; use it with hopshard.init(link_costs={str(output)!r})")
    finally:
        world.shutdown()
    return 0


def _as_run(arguments: argparse.Namespace, output: pathlib.Path) -> argparse.Namespace:
    """The same command as ``hopshard run`` starts it."""
    ranks = arguments.ranks
    if ranks is None and arguments.emulate is None:
        ranks = max(2, len(os.sched_getaffinity(0)))
    nodes, per_node = arguments.emulate or (1, ranks)
    if nodes * per_node < 2 or (ranks or 2) < 2:
        raise ConfigError("a link has two ends: measure with two ranks or more")
    rest = ["tune", "--backend", arguments.backend, "--output", str(output)]
    return argparse.Namespace(
        ranks=ranks,
        emulate=arguments.emulate,
        no_prefix=True,
        module="hopshard.cli",
        code=None,
        program=rest,
    )


# --- Measuring


def measure(here: world.World) -> LinkCosts:
    """Both links, or the built-in costs of one that these ranks do not have. Collective: all."""
    layout, transports = here.layout, here.transports
    if transports is None:
        raise ConfigError("ranks that are threads have no links to measure")
    per_node = layout.ranks_per_node
    if here.size % per_node:
        raise ConfigError(
            f"{here.size} ranks are not whole nodes of {per_node}; start equally many on each"
        )
    choice = transports.choice
    fields: dict[str, Any] = {}
    notes: dict[str, str | int | float] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "hopshard": _C.__version__,
        "nodes": here.num_nodes,
        "ranks_per_node": per_node,
        "intra_node": "not measured: one rank per node",
        "inter_node": "not measured: one node",
    }
    # All nodes at once, and then all rails at once: so ranks meet each other in training.
    first = here.node * per_node
    for link, backend, ranks, sharing in (
        ("intra_node", choice.intra_node, list(range(first, first + per_node)), 1),
        ("inter_node", choice.inter_node, list(range(here.local_rank, here.size, per_node)), 0),
    ):
        if len(ranks) < 2:
            continue
        samples = _sample_link(here, backend, ranks, sharing or per_node)
        fields[link] = fit(samples)
        notes[link] = backend
    return LinkCosts(**fields, measured=notes)


def _sample_link(
    here: world.World, backend: str, ranks: Sequence[int], sharing: int
) -> list[Sample]:
    """Samples of rings that run at once, ``sharing`` of which share one link."""
    communicator = here.connect(backend, ranks, "flat")
    samples = []
    for num_bytes in SIZES:
        for op in _OPS:
            seconds = _median_time(here, _operation(communicator, op, num_bytes // sharing))
            samples.append(Sample(len(ranks), float(num_bytes), seconds))
    return samples


def _operation(communicator: _C.Communicator, op: str, num_bytes: int) -> Callable[[], None]:
    size, rank = communicator.size, communicator.rank
    n = max(1, num_bytes // 4 // size)
    whole = communicator.allocate(4 * n * size).view(torch.float32)
    part = communicator.allocate(4 * n).view(torch.float32)
    slot = communicator.group.slot_of(rank)
    mine = whole[slot * n : (slot + 1) * n]

    def gather() -> None:
        communicator.all_gather(whole, mine, tag="tune").wait()

    def reduce() -> None:
        communicator.reduce_scatter(part, whole, tag="tune").wait()

    return gather if op == "all_gather" else reduce


def _median_time(here: world.World, operation: Callable[[], None]) -> float:
    """Of the slowest rank. Collective: all ranks, whatever groups ``operation`` runs in."""
    times: list[float] = []
    spent = 0.0
    operation()  # Connections and pages are made by the first.
    while len(times) < _SAMPLES and (len(times) < 3 or spent < _SIZE_BUDGET_S):
        here.barrier()
        begin = time.perf_counter()
        operation()
        slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        here.groups.world.all_reduce(slowest, op="max", tag="tune").wait()
        times.append(float(slowest))
        spent += times[-1]
    return statistics.median(times)


def measure_algorithms(here: world.World) -> dict[tuple[str, int], float]:
    """Seconds of flat and hierarchical all-gathers, to hold the predictions against."""
    transports = here.transports
    if transports is None or here.num_nodes == 1 or here.layout.ranks_per_node == 1:
        return {}
    choice = transports.choice
    times: dict[tuple[str, int], float] = {}
    algorithms: tuple[Algorithm, ...] = ("flat", "hierarchical")
    for algorithm in algorithms:
        name = f"{choice.intra_node}+{choice.inter_node}"
        communicator = here.connect(name, None, algorithm)
        for num_bytes in SIZES:
            operation = _operation(communicator, "all_gather", num_bytes)
            times[algorithm, num_bytes] = _median_time(here, operation)
    return times


# --- What follows


def fit(samples: Sequence[Sample]) -> LinkCost:
    """Latency and bandwidth with the least squares of relative errors. Pure.

    Raises:
        ConfigError: no samples, or times that no link can have.
    """
    if not samples or any(not 0 < s.seconds < float("inf") for s in samples):
        raise ConfigError(f"these times are none that a link can have: {list(samples)}")
    rows = [
        ((s.ranks - 1) / s.seconds, (s.ranks - 1) * s.num_bytes / s.ranks / s.seconds)
        for s in samples
    ]
    # Normal equations of  alpha * a + beta * b = 1, neither of them below 0.
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    a_sum, b_sum = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    alpha = (a_sum * bb - b_sum * ab) / determinant if determinant > 0 else 0.0
    beta = (b_sum * aa - a_sum * ab) / determinant if determinant > 0 else 0.0
    if alpha <= 0:
        alpha, beta = 0.0, b_sum / bb
    elif beta <= 0:
        # Faster than can be told from the latency: the largest message bounds it from below.
        largest = max(samples, key=lambda s: s.num_bytes)
        alpha = a_sum / aa
        beta = largest.seconds / ((largest.ranks - 1) * largest.num_bytes / largest.ranks)
    return LinkCost(alpha_us=round(alpha * 1e6, 3), gb_per_s=_significant(1e-9 / beta))


def two_level_ranges(
    costs: LinkCosts, op: str, num_nodes: int, ranks_per_node: int
) -> list[tuple[int, int | None]]:
    """Sizes at which the two-level algorithm is predicted to win. Pure.

    Returns:
        First size and the first one that is too large, in bytes of the whole buffer; None where it
        wins for ever. Two ranges at most: the flat time is the larger of two lines over the bytes,
        the two-level time is one. A gap between them that holds no power of two is not seen.
    """
    native = costs.as_native()

    def wins(num_bytes: int) -> bool:
        shape = (num_nodes, ranks_per_node, num_bytes, native)
        return _C.predict_us(op, "hierarchical", *shape) < _C.predict_us(op, "flat", *shape)

    sizes = [0, *(1 << power for power in range(_LARGEST.bit_length()))]
    edges = [0] if wins(0) else []
    for low, high in itertools.pairwise(sizes):
        if wins(low) != wins(high):
            edges.append(_first_change(wins, low, high))
    ends: list[int | None] = [*edges[1::2]]
    if len(edges) % 2:
        ends.append(None)
    return list(zip(edges[0::2], ends, strict=True))


def _first_change(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first size in (low, high] at which it is no longer as at ``low``; at ``high`` it is."""
    before = holds(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) == before else (low, middle)
    return high


def describe_ranges(ranges: Sequence[tuple[int, int | None]]) -> str:
    """In words.

    >>> describe_ranges([(0, 2048), (65536, None)])
    'below 2,048 bytes, and from 65,536 bytes on'
    """
    words = []
    for begin, end in ranges:
        if end is None:
            words.append(f"from {begin:,} bytes on" if begin > 1 else "always")
        else:
            words.append(f"from {begin:,} to {end:,} bytes" if begin else f"below {end:,} bytes")
    return ", and ".join(words) or "never"


def show(
    costs: LinkCosts,
    num_nodes: int,
    ranks_per_node: int,
    measured: Mapping[tuple[str, int], float],
) -> None:
    """Prints the links, the predictions, and from where on two levels win."""
    # Under mpirun the output is a pseudo terminal that has no width.
    console = Console(highlight=False, width=max(100, shutil.get_terminal_size().columns))
    links = Table(box=None, pad_edge=False)
    for name in ("link", "with", "latency of a step", "bandwidth"):
        links.add_column(name, justify="left" if name in ("link", "with") else "right")
    for name in ("intra_node", "inter_node"):
        cost, how = getattr(costs, name), str(costs.measured.get(name, ""))
        what = "inside a node" if name == "intra_node" else "between nodes"
        how = how.replace("not measured", "built-in, not measured")
        bandwidth = f"{cost.gb_per_s:.3g} GB/s"
        links.add_row(what, how, f"{cost.alpha_us:,.1f} µs", bandwidth)
    console.print(links)
    if num_nodes == 1 or ranks_per_node == 1:
        console.print("\none level of links: collectives are flat")
        return
    table = Table(
        title=f"\nall-gather over {num_nodes} x {ranks_per_node}, ms"
        + (" (measured)" if measured else ""),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for name in ("bytes", "flat", "two-level", "choice"):
        table.add_column(name, justify="right")
    native = costs.as_native()
    for num_bytes in SHOWN_SIZES:
        cells, times = [], {}
        for algorithm in ("flat", "hierarchical"):
            times[algorithm] = _C.predict_us(
                "all_gather", algorithm, num_nodes, ranks_per_node, num_bytes, native
            )
            cell = f"{times[algorithm] / 1e3:,.3f}"
            if (algorithm, num_bytes) in measured:
                cell += f" ({measured[algorithm, num_bytes] * 1e3:,.3f})"
            cells.append(cell)
        choice = "two-level" if times["hierarchical"] < times["flat"] else "flat"
        table.add_row(_size(num_bytes), *cells, choice)
    console.print(table)
    for op in (*_OPS, "all_reduce"):
        won = describe_ranges(two_level_ranges(costs, op, num_nodes, ranks_per_node))
        console.print(f"{op.replace('_', '-')}: two-level wins {won}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _significant(value: float) -> float:
    return float(f"{value:.4g}")
