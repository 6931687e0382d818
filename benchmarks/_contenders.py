"""Who takes part in collectives.py: one collective of one size, and the ways to carry it out.

Each is verified on known whole numbers before it is timed. Next: _peers.py.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from hopshard.testing import copy_memory, sum_memory

from benchmarks._peers import OpenMpi
from benchmarks._promises import MEMORY

OPS: Final = ("all_gather", "reduce_scatter", "all_reduce")

# Linux's; Python 3.11 does not name them all.
_MAP_FIXED: Final = 0x10
_MADV_COLLAPSE: Final = 25
_HUGE_PAGE_BYTES: Final = 2 * 2**20

Call = Callable[[str, torch.Tensor, torch.Tensor], None]
"""Of an operation, the whole buffer and the part."""


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
    call: Call
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


def gloo_call(group: dist.ProcessGroup | None) -> Call:
    def call(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if op == "all_gather":
            dist.all_gather_into_tensor(whole, part, group=group)
        elif op == "reduce_scatter":
            dist.reduce_scatter_tensor(part, whole, group=group)
        else:
            dist.all_reduce(whole, group=group)

    return call


def mpi_call(mpi: OpenMpi) -> Call:
    def call(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if op == "all_gather":
            mpi.all_gather(whole, part)
        elif op == "reduce_scatter":
            mpi.reduce_scatter(part, whole)
        else:
            mpi.all_reduce(whole)

    return call


def memory_roofs(size: int, max_bytes: int, dtype: torch.dtype, rank: int) -> Iterator[Contender]:
    """Loops over memory that the ranks share, which nobody waits in.

    all-gather: every rank copies the other ranks' slices. reduce-scatter: every rank adds its slice
    of all ranks' buffers. By the loops of ``shm`` itself and by others; the fastest is the roof.

    Collective: all ranks.
    """
    numel = max_bytes // dtype.itemsize // size * size
    shared = shared_memory(2 * size * numel, dtype).view(2, size, numel)
    source, mine = shared[0, rank], shared[1, rank]
    source.fill_(1)
    mine.zero_()
    dist.barrier()

    def gather_with(copy: Callable[[torch.Tensor, torch.Tensor], Any]) -> Call:
        def gather(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
            count = whole.numel() // size
            for step in range(1, size):
                member = (rank + step) % size
                span = slice(member * count, (member + 1) * count)
                copy(whole[span], shared[0, member][span])

        return gather

    def own_slices(part: torch.Tensor) -> torch.Tensor:
        return shared[0, :, rank * part.numel() : (rank + 1) * part.numel()]

    def sum_in_one_pass(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        sum_memory(part, list(own_slices(part)))

    def sum_in_blocks(op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        block = 32 * 1024
        rows = own_slices(part)
        for begin in range(0, part.numel(), block):
            columns = rows[:, begin : begin + block]
            target = part[begin : begin + block]
            torch.add(columns[0], columns[1 % size], out=target)
            for member in range(2, size):
                target.add_(columns[member])

    for name, op, call in (
        ("past the cache", "all_gather", gather_with(copy_memory)),
        ("memmove", "all_gather", gather_with(_memmove)),
        ("one pass", "reduce_scatter", sum_in_one_pass),
        ("torch, blocked", "reduce_scatter", sum_in_blocks),
    ):
        yield Contender(MEMORY, name, mine, mine, range(size), call, ops=(op,), is_roof=True)


def _memmove(to: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)


def shared_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that all ranks of this host map, in huge pages where the kernel has them.

    Collective: all ranks.
    """
    num_bytes = numel * dtype.itemsize
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        file = os.memfd_create("hopshard_benchmark")
        os.posix_fallocate(file, 0, num_bytes)
        made = [f"/proc/{os.getpid()}/fd/{file}"]
    dist.broadcast_object_list(made)
    file = os.open(made[0], os.O_RDWR)
    address = _map(file, num_bytes)
    dist.barrier()
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def _map(file: int, num_bytes: int) -> int:
    """Address of the mapping; Python's own cannot be told to lie where huge pages can."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = libc.mmap(None, num_bytes + _HUGE_PAGE_BYTES, 0, flags, -1, 0)
    address = -(-reserved // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, file, 0) != address:
        raise OSError(ctypes.get_errno(), "mmap of the memory roof")
    libc.madvise(address, num_bytes, _MADV_COLLAPSE)  # Fails on old kernels: small pages then.
    return address
