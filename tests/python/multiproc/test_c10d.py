"""The conformance suite of the ``c10d`` backend: real processes over Gloo.

Inputs are integer valued, so every result has an exact formula and is compared bit for bit. The
file is its own worker: ``python test_c10d.py CASE RANK SIZE INIT_FILE``.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hopshard import _C

NUMERIC = [
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
# 65537 int64 elements on 4 ranks are above the limit up to which all_reduce is a summed gather.
NUMELS = [0, 1, 3, 100, 65536 + 1]
TIMEOUT_MS = 20_000


def value_of(rank: int, index: torch.Tensor) -> torch.Tensor:
    return (index * 3 + rank * 5) % 11


def connect(ranks: list[int], slots: list[int] | None = None, name: str = "g") -> _C.Communicator:
    """Collective over the world; returns this rank's communicator of its own group."""
    process_group = dist.new_group(ranks, backend="gloo")
    group = _C.Group(name, ranks, ranks.index(dist.get_rank()), slots or [])
    return _C.c10d_communicator(process_group, group, TIMEOUT_MS)


def check_operations(comm: _C.Communicator, numel: int) -> None:
    rank, size = comm.rank, comm.size
    slots = comm.group.slots or list(range(size))
    owner = torch.tensor([slots.index(slot) for slot in range(size)])
    index = torch.arange(numel)
    whole_index = torch.arange(numel * size)
    start = slots[rank] * numel
    for dtype in [*NUMERIC, torch.bool]:
        note = f"{dtype} numel={numel} size={size} slots={slots}"
        mine = value_of(rank, index).to(dtype)
        for in_place in (False, True):
            output = torch.full((numel * size,), 1, dtype=dtype)
            source = mine
            if in_place:
                source = output[start : start + numel]
                source.copy_(mine)
            comm.all_gather(output, source, tag="unshard/x").wait()
            expected = torch.cat([value_of(int(member), index) for member in owner]).to(dtype)
            assert torch.equal(output, expected), f"all_gather {note} in_place={in_place}"
        for root in (0, size - 1):
            tensor = mine.clone()
            comm.broadcast(tensor, root).wait()
            assert torch.equal(tensor, value_of(root, index).to(dtype)), f"broadcast {note}"
        if dtype == torch.bool:
            continue
        for op in ("sum", "max"):
            stacked = torch.stack([value_of(member, whole_index) for member in range(size)])
            reduced = (stacked.sum(0) if op == "sum" else stacked.amax(0)).to(dtype)
            for in_place in (False, True):
                whole = value_of(rank, whole_index).to(dtype)
                part = whole[start : start + numel] if in_place else torch.ones(numel, dtype=dtype)
                comm.reduce_scatter(part, whole, op=op).wait()
                expected = reduced[start : start + numel]
                assert torch.equal(part, expected), f"reduce_scatter {op} {note} {in_place=}"
            tensor = mine.clone()
            comm.all_reduce(tensor, op=op).wait()
            assert torch.equal(tensor, reduced[:numel]), f"all_reduce {op} {note}"


def case_operations(rank: int, size: int) -> None:
    everyone = list(range(size))
    for slots in ([], everyone[::-1], [(i + 1) % size for i in everyone]):
        comm = connect(everyone, slots)
        assert comm.backend == "c10d"
        for numel in NUMELS:
            check_operations(comm, numel)
        comm.barrier(tag="end of slots")
    # Sub-groups: every rank makes both, and uses its own.
    if size == 4:
        groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 2], [1, 3])]
        ranks = [0, 2] if rank % 2 == 0 else [1, 3]
        group = _C.Group("half", ranks, rank // 2, [1, 0])
        half = _C.c10d_communicator(groups[rank % 2], group, TIMEOUT_MS)
        check_operations(half, 100)


def case_precision(rank: int, size: int) -> None:
    comm = connect(list(range(size)))
    # 256 + 1 is 256 in bf16: only a sum in fp32 gives 256 + 3.
    for numel in (6, 1 << 20):
        tensor = torch.full((numel,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        comm.all_reduce(tensor.clone(), op="max").wait()
        summed = tensor.clone()
        comm.all_reduce(summed).wait()
        exact = torch.tensor(256.0 + size - 1).bfloat16()
        assert torch.equal(summed, exact.expand(numel)), f"all_reduce of {numel}"
        part = torch.empty(numel // 2 // size, dtype=torch.bfloat16)
        comm.reduce_scatter(part, tensor[: part.numel() * size].clone()).wait()
        assert torch.equal(part, exact.expand(part.numel())), f"reduce_scatter of {numel}"
    # All ranks hold the same bits, whatever the order of the sum; hard to add values on purpose.
    for numel in (1000, 1 << 20):
        generator = torch.Generator().manual_seed(rank)
        tensor = torch.randn(numel, generator=generator) * 10 ** (rank % 3)
        mine = tensor.clone()
        comm.all_reduce(mine).wait()
        root = mine.clone()
        comm.broadcast(root, 0).wait()
        assert torch.equal(mine, root), f"all_reduce of {numel} differs between ranks"
    # reduce_scatter adds in the order of the ranks, and a maximum with NaN is NaN.
    inputs = [
        torch.randn(40 * size, generator=torch.Generator().manual_seed(r)) for r in range(size)
    ]
    part = torch.empty(40)
    comm.reduce_scatter(part, inputs[rank].clone()).wait()
    total = inputs[0].clone()
    for other in inputs[1:]:
        total += other
    assert torch.equal(part, total[rank * 40 : rank * 40 + 40]), "order of the sum"
    nan = torch.tensor([float("nan") if rank == 1 else 1.0, 2.0])
    comm.all_reduce(nan, op="max").wait()
    assert nan[0].isnan() and nan[1] == 2, "max with NaN"
    # Asynchronous, completed in another order than issued, and dropped without wait.
    a, b = torch.ones(50_000), torch.ones(50_000 * size)
    first, second = comm.all_reduce(a), comm.all_gather(b, torch.ones(50_000) * rank)
    if rank % 2 == 0:
        first, second = second, first
    first.wait()
    second.wait()
    second.wait()
    assert a.eq(size).all() and b[::50_000].tolist() == list(range(size))
    dropped = comm.all_reduce(a)
    del dropped
    assert a.eq(size * size).all()


def expect(kind: type[Exception], call: Callable[[], object], *words: str) -> str:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert all(word in text for word in words), f"{words} not all in: {text}"
    assert kind is _C.CommError or caught.type is kind, f"{caught.type}: {text}"
    return text


def case_arguments(rank: int, size: int) -> None:
    comm = connect(list(range(size)))
    who = f"in group 'g' on rank {rank} of {size} (global rank {rank})"
    expect(
        _C.InvalidArgument,
        lambda: comm.all_gather(torch.empty(5), torch.empty(3), tag="unshard/h.3"),
        "c10d all_gather 'unshard/h.3'",
        who,
        "3 * 2 = 6",
    )
    expect(_C.InvalidArgument, lambda: comm.all_reduce(torch.ones(2).bool()), "Bool", who)
    expect(_C.InvalidArgument, lambda: comm.broadcast(torch.ones(2), 2), "root 2", who)
    wrong = _C.Group("g", [0, 1], 1 - rank)
    expect(
        _C.InvalidArgument,
        lambda: _C.c10d_communicator(dist.group.WORLD, wrong, 1000),
        "new_group",
    )
    expect(
        _C.InvalidArgument,
        lambda: _C.c10d_communicator(dist.group.WORLD, comm.group, 0),
        "must be positive",
    )
    comm.barrier()  # Nothing of the above moved a byte.


def case_time_limit(rank: int, size: int) -> None:
    comm = connect(list(range(size)))
    comm.barrier()
    if rank == 1:
        time.sleep(4)
        return
    start = time.monotonic()
    expect(
        _C.TimeoutError,
        lambda: comm.all_reduce(torch.ones(5), tag="norm", timeout_ms=500).wait(),
        "c10d all_reduce 'norm' in group 'g' on rank 0 of 2",
        "500 ms",
    )
    assert time.monotonic() - start < 3
    expect(_C.CommError, comm.barrier, "unusable since an earlier failure")


def case_abort(rank: int, size: int) -> None:
    comm = connect(list(range(size)))
    comm.barrier()
    start = time.monotonic()
    if rank == 1:
        time.sleep(0.5)
        comm.abort("the user pressed Ctrl-C")
        comm.abort("again")
    elif rank == 0:
        expect(_C.CommError, comm.barrier, "global rank 1", "the user pressed Ctrl-C")
    expect(_C.CommError, lambda: comm.all_reduce(torch.ones(5)).wait(), "Ctrl-C")
    assert time.monotonic() - start < 3
    if rank == 1:
        time.sleep(3)  # The others must wake without the end of this process.


def case_killed(rank: int, size: int) -> None:
    comm = connect(list(range(size)))
    comm.barrier()
    if rank == 2:
        os.kill(os.getpid(), 9)
    start = time.monotonic()

    def train() -> None:
        for _ in range(3):
            comm.all_gather(torch.empty(1000 * size), torch.ones(1000), tag="unshard/h.0").wait()

    text = expect(_C.CommError, train, "c10d all_gather 'unshard/h.0' in group 'g'")
    assert time.monotonic() - start < 5, "the survivors must not wait for their time limit"
    print(text, flush=True)
    time.sleep(1.5)  # Not the end of this process is what ends the others.


def main() -> None:
    case, rank, size, init_file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{init_file}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    globals()[f"case_{case}"](rank, size)
    sys.stdout.flush()
    os._exit(0)  # A group with a dead peer may wait for its limit when it is destroyed.


def launch(case: str, size: int, init_file: Path, limit_s: float = 150) -> list[tuple[int, str]]:
    """Runs a case; returns exit code and output of each rank, none left running."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, case, str(rank), str(size), str(init_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + limit_s
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            results.append((process.returncode, output))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("operations", 2),
        ("operations", 4),
        ("precision", 4),
        ("arguments", 2),
        ("time_limit", 2),
        ("abort", 3),
    ],
)
def test_case(case: str, size: int, tmp_path: Path) -> None:
    for rank, (code, output) in enumerate(launch(case, size, tmp_path / "store")):
        assert code == 0, f"rank {rank} of {size}:\n{output}"


def test_a_killed_peer_ends_the_others(tmp_path: Path) -> None:
    results = launch("killed", 4, tmp_path / "store")
    assert results[2][0] == -9
    for rank in (0, 1, 3):
        code, output = results[rank]
        assert code == 0, f"rank {rank}:\n{output}"


if __name__ == "__main__":
    main()
