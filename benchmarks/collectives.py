#!/usr/bin/env python3
"""Collectives: hopshard's backends, flat and hierarchical, beside Gloo's and Open MPI's own calls.

All are verified, then timed in the same processes, taking turns. Starts its ranks itself, or is
started as ranks by benchmarks/cluster/run.py on an emulated network. How to read what it prints:
benchmarks/README.md.

    python benchmarks/collectives.py --ranks 4 --mib 16,64 --json a.json
    sudo python benchmarks/cluster/run.py --nodes 2 --ranks-per-node 2 --rate 1gbit \
        collectives --mib 32 --json b.json
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # For the imports below.

import hopshard as hs
import torch
import torch.distributed as dist
from hopshard.transports import Algorithm, Offer

from benchmarks._contenders import (
    OPS,
    Case,
    Contender,
    gloo_call,
    memory_roofs,
    mpi_call,
    our_contender,
    verify,
)
from benchmarks._launch import is_rank, python_command, start_ranks
from benchmarks._peers import OpenMpi, interface_bytes, measure_line_rate
from benchmarks._promises import GLOO, LATENCY_BYTES, OPEN_MPI, make_figures
from benchmarks._rows import Results, Row, make_meta, summarise

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BETWEEN_NODES: Final = ("c10d", "ofi", "mpi")
SAMPLE_S: Final = 0.02  # Shorter calls are repeated until one sample takes so long.
MAX_CALLS: Final = 2000
TIMEOUT_S: Final = 120.0


def main() -> int:
    arguments = parse_arguments()
    if not is_rank():
        command = python_command(str(pathlib.Path(__file__).resolve()))
        return start_ranks(command, arguments.ranks, use_mpi=not arguments.no_mpi)
    torch.set_num_threads(1)
    hs.init(log_level="warning", timeout_s=TIMEOUT_S)
    results = Benchmark(arguments).run()
    code = 0
    if hs.rank() == 0:
        results.show()
        if arguments.json:
            results.write(arguments.json)
        code = int(arguments.check and bool(results.missed()))
    hs.shutdown()
    if OpenMpi.why_not() is None:
        OpenMpi().finish()
    return code


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="if it starts them itself")
    parser.add_argument("--mib", type=_sizes, default=[16.0, 64.0], help="such as 16,64")
    parser.add_argument("--ops", type=_ops, default=list(OPS), help=f"some of {','.join(OPS)}")
    parser.add_argument(
        "--backends",
        type=lambda text: text.split(","),
        help="such as shm,c10d,shm+c10d; default: all that are available",
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--samples", type=int, default=20, help="of each row")
    parser.add_argument("--quick", action="store_true", help="few and small: shows that it works")
    parser.add_argument("--json", metavar="FILE", help="also write {meta, rows, figures} here")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")
    parser.add_argument("--no-mpi", action="store_true", help="leave Open MPI out")
    parser.add_argument("--network", default="", help="what lies between the nodes, for the record")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mib, arguments.samples = [0.25], 3
    return arguments


# --- Measuring


class Benchmark:
    """One rank's part. Collective: every method."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._world = hs.current()
        self._nodes, self._size = self._world.num_nodes, self._world.size
        self._dtype = DTYPES[arguments.dtype]
        self._max_bytes = max(int(mib * 2**20) for mib in arguments.mib)
        self._clock_is_common = len(set(_everybody(_boot_id()))) == 1
        self._notes: dict[str, str] = {}
        self._line_rates: list[float] = []
        self._communicators: list[Any] = []
        self._backends = self._choose_backends()

    def run(self) -> Results:
        self._measure_line_rate()
        results = Results({})
        plain = self._plain_memory()
        contenders = [*self._ours(plain), *self._peers(plain), *self._roofs()]
        for op in self._arguments.ops:
            for mib in self._arguments.mib:
                case = Case(op, int(mib * 2**20), self._dtype, self._size)
                results.rows += self._measure(case, [c for c in contenders if op in c.ops])
        self._measure_line_rate()
        if self._nodes == 1 and "all_reduce" in self._arguments.ops and self._size >= 2:
            results.rows += self._measure_latency()
        results.meta = self._meta()
        line_rate = _median(self._line_rates) if self._line_rates else None
        results.figures = make_figures(results.rows, line_rate)
        return results

    def _ours(self, plain: tuple[torch.Tensor, torch.Tensor]) -> list[Contender]:
        found = []
        for name in self._backends:
            algorithm: Algorithm = "hierarchical" if "+" in name else "flat"
            communicator = self._world.connect(name, algorithm=algorithm)
            self._communicators.append(communicator)
            arena = communicator.allocate(_whole_bytes(plain[0]) + _whole_bytes(plain[1]))
            cut = _whole_bytes(plain[0])
            registered = (arena[:cut].view(self._dtype), arena[cut:].view(self._dtype))
            found.append(our_contender(communicator, name, algorithm, registered, True))
            if name == "shm":  # Elsewhere registration changes nothing that a single host shows.
                found.append(our_contender(communicator, name, algorithm, plain, False))
        return found

    def _choose_backends(self) -> list[str]:
        """Those that every rank has. Collective."""
        missing: dict[str, str] = {}
        for offer in _everybody(dict(Offer.here("").missing)):
            missing.update(offer)
        if "OMPI_COMM_WORLD_SIZE" not in os.environ:
            missing.setdefault("mpi", "the ranks were not started by mpirun")
        per_node = self._size // self._nodes
        if self._arguments.backends is not None:
            names = list(self._arguments.backends)
        elif self._nodes == 1:
            names = ["shm", *BETWEEN_NODES]
        else:
            names = list(BETWEEN_NODES)
            if per_node > 1:
                names += [f"shm+{name}" for name in BETWEEN_NODES]
        chosen = []
        for name in names:
            why = next((missing[part] for part in name.split("+") if part in missing), None)
            if why is None:
                chosen.append(name)
            else:
                self._notes[name] = f"left out: {why}"
        return chosen

    def _peers(self, plain: tuple[torch.Tensor, torch.Tensor]) -> list[Contender]:
        whole, part = plain
        in_order = range(self._size)
        found = [Contender(GLOO, "own", whole, part, in_order, gloo_call(None))]
        why_not = "--no-mpi" if self._arguments.no_mpi else OpenMpi.why_not()
        if why_not is None:
            mpi = OpenMpi()
            self._notes[OPEN_MPI] = mpi.version
            ops = OPS if OpenMpi.can_reduce(self._dtype) else ("all_gather",)
            call = mpi_call(mpi)
            found.append(Contender(OPEN_MPI, "own", whole, part, in_order, call, ops=ops))
        else:
            self._notes[OPEN_MPI] = f"left out: {why_not}"
        return found

    def _roofs(self) -> list[Contender]:
        """The memory roof: all ranks move the bytes of a collective at once, without waiting."""
        if self._nodes > 1:
            return []
        return list(memory_roofs(self._size, self._max_bytes, self._dtype, self._world.rank))

    def _plain_memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        numel = self._max_bytes // self._dtype.itemsize // self._size * self._size
        return (
            torch.zeros(numel, dtype=self._dtype),
            torch.zeros(numel // self._size, dtype=self._dtype),
        )

    def _measure(self, case: Case, contenders: Sequence[Contender]) -> list[Row]:
        rank = self._world.rank
        for contender in contenders:
            contender.samples_s = []
            if not contender.is_roof:
                verify(contender, case, rank)
            self._fit_calls(contender, case, rank)
        for contender in contenders:
            if self._nodes > 1 and not contender.is_roof:
                contender.sent_bytes = self._count_bytes(contender, case, rank)
        self._take_turns(case, contenders)
        return [self._row(case, contender) for contender in contenders]

    def _row(self, case: Case, contender: Contender) -> Row:
        details: dict[str, Any] = {"registered": contender.registered}
        if contender.sent_bytes is not None:
            details["node_sent_mib"] = round(contender.sent_bytes / 2**20, 3)
        places = (1 if case.ranks < self._size else self._nodes, case.ranks)
        return summarise(
            case.op,
            contender.backend,
            contender.algorithm,
            places,
            case.numel * case.dtype.itemsize,
            contender.samples_s,
            details,
        )

    def _take_turns(
        self,
        case: Case,
        contenders: Sequence[Contender],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        spans: dict[int, list[tuple[float, float]]] = {id(c): [] for c in contenders}
        for sample in range(self._arguments.samples):
            turn = sample % len(contenders)
            # One that always came after the same one would inherit its caches.
            for contender in [*contenders[turn:], *contenders[:turn]]:
                dist.barrier(group)
                spans[id(contender)].append(_timed(contender, case, self._world.rank))
        for contender in contenders:
            times = self._slowest(spans[id(contender)], group)
            contender.samples_s = [seconds / contender.num_calls for seconds in times]

    def _slowest(
        self, spans: Sequence[tuple[float, float]], group: dist.ProcessGroup | None
    ) -> list[float]:
        """From when the first rank began to when the last one was done, where clocks are common."""
        mine = torch.tensor(spans, dtype=torch.float64)
        everyone = torch.stack(_everybody(mine, group))  # [ranks, samples, 2]
        if self._clock_is_common:
            times = everyone[:, :, 1].amax(0) - everyone[:, :, 0].amin(0)
        else:
            times = (everyone[:, :, 1] - everyone[:, :, 0]).amax(0)
        return [float(seconds) for seconds in times]

    def _fit_calls(self, contender: Contender, case: Case, rank: int) -> None:
        """How many calls make one sample; equal on all ranks."""
        contender.num_calls = 1
        dist.barrier()
        begin, end = _timed(contender, case, rank)
        slowest = max(_everybody(end - begin))
        contender.num_calls = max(1, min(MAX_CALLS, math.ceil(SAMPLE_S / max(slowest, 1e-7))))

    def _count_bytes(self, contender: Contender, case: Case, rank: int) -> float:
        """What one call sends over a node's interface, of the node that sends most."""
        calls = 2
        before = self._settled_bytes()
        for _ in range(calls):
            contender.run(case, rank)
        after = self._settled_bytes()
        return max(_everybody(after - before)) / calls

    def _settled_bytes(self) -> int:
        dist.barrier()
        time.sleep(0.05)  # The last acknowledgements are under way.
        sent, _ = interface_bytes()
        dist.barrier()
        return sent

    def _measure_latency(self) -> list[Row]:
        """A small all-reduce of two ranks, so that each has a core where there are two."""
        group = dist.new_group([0, 1])
        takes_part = self._world.rank < 2
        numel = LATENCY_BYTES // self._dtype.itemsize
        case = Case("all_reduce", LATENCY_BYTES, self._dtype, 2)
        plain = (torch.zeros(numel, dtype=self._dtype), torch.zeros(numel, dtype=self._dtype))
        contenders: list[Contender] = []
        mpi = None
        if OPEN_MPI in self._notes and not self._notes[OPEN_MPI].startswith("left out"):
            mpi = OpenMpi(2) if OpenMpi.can_reduce(self._dtype) else None
        if takes_part:
            for name in self._backends:
                if "+" in name:
                    continue
                communicator = self._world.connect(name, [0, 1], "flat")
                self._communicators.append(communicator)
                arena = communicator.allocate(2 * LATENCY_BYTES).view(self._dtype)
                memory = (arena[:numel], arena[numel:])
                contenders.append(our_contender(communicator, name, "flat", memory, True))
            contenders.append(Contender(GLOO, "own", *plain, range(2), gloo_call(group)))
            if mpi is not None:
                contenders.append(Contender(OPEN_MPI, "own", *plain, range(2), mpi_call(mpi)))
            for contender in contenders:
                verify(contender, case, self._world.rank, group)
                contender.num_calls = 200
                _timed(contender, case, self._world.rank)
        # The other ranks sleep in Gloo meanwhile, and take part in what is exchanged.
        if takes_part:
            self._take_turns(case, contenders, group)
        dist.barrier()
        return [self._row(case, contender) for contender in contenders]

    def _measure_line_rate(self) -> None:
        local_rank = self._world.local_rank
        rate = measure_line_rate(self._world.node, self._nodes, local_rank)
        if rate is not None:
            self._line_rates.append(rate)

    def _meta(self) -> dict[str, Any]:
        kept = ("mib", "ops", "dtype", "samples")
        config = {name: getattr(self._arguments, name) for name in kept}
        config |= {"nodes": self._nodes, "ranks": self._size}
        meta = make_meta("collectives", config)
        meta["network"] = self._arguments.network or "one host"
        meta["line_rate_mb_per_s"] = [round(rate / 1e6, 2) for rate in self._line_rates]
        meta["clock"] = "common" if self._clock_is_common else "of the slowest rank"
        meta["notes"] = self._notes
        return meta


def _timed(contender: Contender, case: Case, rank: int) -> tuple[float, float]:
    begin = time.monotonic()
    for _ in range(contender.num_calls):
        contender.run(case, rank)
    return begin, time.monotonic()


# --- Odds and ends


def _everybody(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in rank order. Collective: the group, all ranks if None."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _boot_id() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return uuid.uuid4().hex


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _whole_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sizes(text: str) -> list[float]:
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of MiB such as 16,64")
    return sizes


def _ops(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(OPS):
        raise argparse.ArgumentTypeError(f"{text!r}: legal are {', '.join(OPS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
