"""Who takes part in collectives.py: one collective of one size, and the ways to carry it out.

Each is verified on known whole numbers before it is timed. Next: _peers.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pathlib
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks._peers import OpenMpi
from benchmarks._promises import MEMORY

OPS: Final = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Case:
    """One operation of one size over some ranks."""

    op: str
    num_bytes: int
    dtype: torch.dtype
    ranks: int

    @property
    def numel(self) -> int:
        """Of the whole buffer; a multiple of the ranks."""
        return self.num_bytes // self.dtype.itemsize // self.ranks * self.ranks


@dataclass
class Contender:
    """One way of carrying a case out, on buffers of its own kind of memory."""

    backend: str
    algorithm: str
    whole: torch.Tensor
    part: torch.Tensor
    """A reduce-scatter's output; a gather's input is its slot of ``whole``."""
    slots: Sequence[int]
    """Which part of the whole buffer belongs to which rank of the group."""
    call: Callable[[str, torch.Tensor, torch.Tensor], None]
    registered: bool | None = None
    ops: tuple[str, ...] = OPS
    is_roof: bool = False
    samples_s: list[float] = field(default_factory=list)
    num_calls: int = 1
    sent_bytes: float | None = None

    def run(self, case: Case, rank: int) -> None:
        whole = self.whole[: case.numel]
        n = case.numel // case.ranks
        if case.op == "all_gather":
            slot = self.slots[rank]
            self.call(case.op, whole, whole[slot * n : (slot + 1) * n])
        else:
            self.call(case.op, whole, self.part[:n])


def verify(
    contender: Contender, case: Case, rank: int, group: dist.ProcessGroup | None = None
) -> None:
    """Runs it once on known whole numbers, which every order of summation adds exactly.

    Raises:
        SystemExit: on every rank, if the result is wrong on any.
    """
    whole = contender.whole[: case.numel]
    n = case.numel // case.ranks
    part, slot = contender.part[:n], contender.slots[rank]
    mine = whole[slot * n : (slot + 1) * n]
    whole.fill_(math.nan)
    part.fill_(math.nan)
    if case.op == "all_gather":
        mine.copy_(_pattern(n, rank, case.dtype))
        contender.run(case, rank)
        wrong = sum(
            not torch.equal(whole[s * n : (s + 1) * n], _pattern(n, r, case.dtype))
            for r, s in enumerate(contender.slots)
        )
    else:
        whole.copy_(_pattern(case.numel, rank, case.dtype))
        expected = sum(
            (_pattern(case.numel, r, torch.float32) for r in range(case.ranks)),
            start=torch.zeros(case.numel),
        ).to(case.dtype)
        contender.run(case, rank)
        if case.op == "all_reduce":
            wrong = int(not torch.equal(whole, expected))
        else:
            wrong = int(not torch.equal(part, expected[slot * n : (slot + 1) * n]))
    count = torch.tensor([wrong])
    dist.all_reduce(count, group=group)
    if count.item() > 0:
        name = f"{contender.backend} ({contender.algorithm})"
        raise SystemExit(f"{name}: {case.op} gave wrong values; nothing more was timed")
    whole.zero_()  # Repeated sums in place stay what they are.


def _pattern(numel: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers that differ between neighbours and ranks."""
    return ((torch.arange(numel, dtype=torch.int32) * 3 + rank * 5) % 17).to(dtype)


def our_contender(
    communicator: Any,
    name: str,
    algorithm: str,
    memory: tuple[torch.Tensor, torch.Tensor],
    registered: bool,
) -> Contender:
    group = communicator.group
    slots = [group.slot_of(member) for member in range(group.size)]

    def call(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if op == "all_gather":
            communicator.all_gather(whole, part, tag="benchmark").wait()
        elif op == "reduce_scatter":
            communicator.reduce_scatter(part, whole, tag="benchmark").wait()
        else:
            communicator.all_reduce(whole, tag="benchmark").wait()

    return Contender(name, algorithm, *memory, slots, call, registered)


def gloo_call(group: dist.ProcessGroup | None) -> Callable[[str, Any, Any], None]:
    def call(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if op == "all_gather":
            dist.all_gather_into_tensor(whole, part, group=group)
        elif op == "reduce_scatter":
            dist.reduce_scatter_tensor(part, whole, group=group)
        else:
            dist.all_reduce(whole, group=group)

    return call


def mpi_call(mpi: OpenMpi) -> Callable[[str, Any, Any], None]:
    def call(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if op == "all_gather":
            mpi.all_gather(whole, part)
        elif op == "reduce_scatter":
            mpi.reduce_scatter(part, whole)
        else:
            mpi.all_reduce(whole)

    return call


def memory_roofs(size: int, max_bytes: int, dtype: torch.dtype, rank: int) -> Iterator[Contender]:
    """Plain loops over memory that the ranks share, which nobody waits in.

    all-gather: every rank copies the other ranks' slices by the C library's memmove, one by one and
    as many as lie together. reduce-scatter: every rank adds its slice of all ranks' buffers.

    Collective: all ranks.
    """
    numel = max_bytes // dtype.itemsize // size * size
    n = numel // size
    shared = shared_memory(size * numel, dtype)
    shared[rank * numel : (rank + 1) * numel].fill_(1)
    mine = torch.zeros(numel, dtype=dtype)
    dist.barrier()

    def copy(whole: torch.Tensor, begin: int, end: int) -> None:
        offset = begin * dtype.itemsize
        ctypes.memmove(
            whole.data_ptr() + offset, shared.data_ptr() + offset, (end - begin) * dtype.itemsize
        )

    def gather_by_slice(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        count = whole.numel() // size
        for step in range(1, size):
            source = (rank + step) % size
            copy(whole, source * count, (source + 1) * count)

    def gather_at_once(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        # The larger a copy, the sooner the C library stores past the cache.
        count = whole.numel() // size
        copy(whole, 0, rank * count)
        copy(whole, (rank + 1) * count, size * count)

    def reduce(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        count = part.numel()
        rows = shared.view(size, numel)[:, rank * count : (rank + 1) * count]
        block = 32 * 1024
        for begin in range(0, count, block):
            columns = rows[:, begin : begin + block]
            target = part[begin : begin + block]
            torch.add(columns[0], columns[1 % size], out=target)
            for source in range(2, size):
                target.add_(columns[source])

    own_part = torch.zeros(n, dtype=dtype)
    for name, op, call in (
        ("by slice", "all_gather", gather_by_slice),
        ("at once", "all_gather", gather_at_once),
        ("blocked", "reduce_scatter", reduce),
    ):
        yield Contender(MEMORY, name, mine, own_part, range(size), call, ops=(op,), is_roof=True)


def shared_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that all ranks of this host map. Collective: all ranks."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    names: list[Any] = [str(pathlib.Path(folder) / f"hopshard_benchmark_{uuid.uuid4().hex}")]
    dist.broadcast_object_list(names)
    path = pathlib.Path(names[0])
    if dist.get_rank() == 0:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, numel * dtype.itemsize)
    dist.barrier()
    try:
        memory = torch.from_file(names[0], shared=True, size=numel, dtype=dtype)
        dist.barrier()
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return memory
