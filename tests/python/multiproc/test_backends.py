"""The conformance suite over real processes, for every backend that connects them.

tests/cpp/conformance is the same for ranks that are threads. Inputs are integer valued, so every
result has an exact formula and is compared bit for bit. The file is its own worker:
``python test_backends.py BACKEND CASE SIZE INIT_FILE``, with RANK in the environment or under
mpirun.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hopshard import _C
from hopshard.config import Config
from hopshard.link_costs import LinkCosts
from hopshard.torch_groups import TorchGroups
from hopshard.transports import Choice, Transports

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
BACKEND = ""  # Of a worker.
BACKENDS = ["c10d", "shm", "mpi", "ofi", "shm+c10d", "shm+c10d two-level", "shm+ofi two-level"]
num_connected: Counter[tuple[int, ...]] = Counter()


def value_of(rank: int, index: torch.Tensor) -> torch.Tensor:
    return (index * 3 + rank * 5) % 11


def make_process_group(part: _C.Group) -> dist.ProcessGroup:
    return torch_groups.make_group(part, Config())


torch_groups = TorchGroups()


def connect(ranks: list[int], slots: list[int] | None = None, name: str = "g") -> _C.Communicator:
    """Collective over ``ranks``."""
    group = _C.Group(name, ranks, ranks.index(dist.get_rank()), slots or [])
    num_connected[tuple(ranks)] += 1
    store = _C.c10d_store(torch_groups.store()).prefixed(f"{ranks}/{num_connected[tuple(ranks)]}")
    transports = Transports(
        Choice.parse(BACKEND.split()[0]),
        store=store,
        make_process_group=make_process_group,
        ranks_per_node=2 if "+" in BACKEND else 8,
        costs=LinkCosts(),
        timeout_ms=TIMEOUT_MS,
    )
    made = transports.connect(group, algorithm="hierarchical" if is_two_level() else "auto")
    assert made is not None
    return made


def is_two_level() -> bool:
    return BACKEND.endswith("two-level")


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
    choices = [[], everyone[::-1], [(i + 1) % size for i in everyone]]
    if is_two_level():
        choices = [[0, 2, 1, 3]]  # Slice order of two nodes.
    for slots in choices:
        comm = connect(everyone, slots)
        for part in BACKEND.split()[0].split("+"):
            assert part in comm.backend or slots  # These slots may need the flat one.
        for numel in NUMELS:
            check_operations(comm, numel)
        comm.barrier(tag="end of slots")
        if size == 4 and not is_two_level():
            ranks = [0, 2] if rank % 2 == 0 else [1, 3]
            check_operations(comm.split(_C.Group("half", ranks, rank // 2, [1, 0])), 100)
    if size == 4 and not is_two_level():
        check_operations(connect([0, 2] if rank % 2 == 0 else [1, 3], [1, 0], "half"), 100)


def case_in_flight(rank: int, size: int) -> None:
    """Many at once, over two groups, and one group's wait does not hold up the other's."""
    slots = [0, 2, 1, 3] if is_two_level() else []
    one, other = connect(list(range(size)), slots, "one"), connect(list(range(size)), slots, "two")
    tensors = [torch.arange(7) + rank * call for call in range(1000)]
    for start in range(0, 1000, 100):
        works = [
            (one if call % 3 else other).all_reduce(tensors[call])
            for call in range(start, start + 100)
        ]
        for work in works:
            work.wait()
    ranks_sum = size * (size - 1) // 2
    for call, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.arange(7) * size + ranks_sum * call), call
    for _ in range(20):
        whole = torch.zeros(10_000 * size)
        gather = one.all_gather(whole, torch.full((10_000,), rank + 1.0))
        if rank == 0:
            gather.wait()
        other.barrier()
        gather.wait()
        assert whole.sum() == 10_000 * size * (size + 1) // 2
    # A rank goes on while another has not come.
    one.barrier()
    start = time.monotonic()
    if rank == 1:
        time.sleep(2)
    late = [one.all_reduce(torch.ones(5)) for _ in range(3)]
    assert rank == 1 or time.monotonic() - start < 1.5
    for work in late:
        work.wait()
    work = one.all_reduce(tensors[0])
    deadline = time.monotonic() + 10
    while not work.test():
        assert time.monotonic() < deadline, "it must go on without anybody in wait()"
        time.sleep(0.001)
    # Memory of the backend's own, in any place of it, beside ordinary memory.
    memory = one.allocate(4 * 100 * (size + 1)).view(torch.float32)
    assert not memory.any()
    memory[:100] = rank + 1
    source = memory[:100].clone() if rank == 0 else memory[:100]
    one.all_gather(memory[100:], source).wait()
    assert memory[100:].sum() == 100 * size * (size + 1) // 2
    total = torch.full((100,), 5.0)
    one.reduce_scatter(total, memory[100:].clone(), accumulate=True).wait()
    assert total.eq(5 + size * (one.group.slot_of(rank) + 1)).all() or is_two_level()


def case_precision(rank: int, size: int) -> None:
    comm = connect(list(range(size)), [0, 2, 1, 3] if is_two_level() else [])
    # 256 + 1 is 256 in bf16: only a sum in fp32 gives 256 + 3.
    for numel in (6, 1 << 20):
        tensor = torch.full((numel,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        comm.all_reduce(tensor.clone(), op="max").wait()
        summed = tensor.clone()
        comm.all_reduce(summed).wait()
        exact = torch.tensor(256.0 + size - 1).bfloat16()
        # Two levels round twice: half a unit in the last place, which is 2 here, more.
        allowed = 2 if "+" in BACKEND else 0
        assert (summed.float() - exact.float()).abs().max() <= allowed, f"all_reduce of {numel}"
        part = torch.empty(numel // 2 // size, dtype=torch.bfloat16)
        comm.reduce_scatter(part, tensor[: part.numel() * size].clone()).wait()
        if part.numel():
            difference = (part.float() - exact.float()).abs().max()
            assert difference <= allowed, f"reduce_scatter of {numel}"
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
    if BACKEND in ("c10d", "shm", "mpi"):
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
    by_slot = [comm.group.slot_of(int(member)) for member in b[::50_000]]
    assert a.eq(size).all() and by_slot == list(range(size))
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
        f"{comm.backend} all_gather 'unshard/h.3'",
        who,
        "3 * 2 = 6",
    )
    expect(_C.InvalidArgument, lambda: comm.all_reduce(torch.ones(2).bool()), "Bool", who)
    expect(_C.InvalidArgument, lambda: comm.broadcast(torch.ones(2), 2), "root 2", who)
    expect(_C.InvalidArgument, lambda: comm.split(_C.Group("part", [0, 7], 0)), "7", "not in it")
    expect(_C.InvalidArgument, lambda: comm.allocate(-1), "-1")
    comm.barrier()
    if BACKEND != "c10d":
        return
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
        f"{comm.backend} all_reduce 'norm' in group 'g' on rank 0 of 2",
        "500 ms",
        "global rank 1",
    )
    assert time.monotonic() - start < 3
    expect(_C.CommError, comm.barrier, "unusable")


def case_mismatch(rank: int, size: int) -> None:
    comm = connect(list(range(size)))

    def call() -> None:
        if rank == 1:
            comm.all_reduce(torch.ones(7), tag="norm").wait()
        else:
            comm.all_gather(torch.ones(5 * size), torch.ones(5), tag="unshard/h.0").wait()

    text = expect(_C.ScheduleError, call, "all_gather 'unshard/h.0' of 5", "all_reduce 'norm' of 7")
    assert "rank 1: all_reduce" in text
    if BACKEND != "c10d":
        return
    # Each rank has issued another number of operations before it hears of a disagreement. None of
    # those moves data, and the ranks are in step after it: twice, to leave nothing behind.
    for round_ in range(2):
        tensor = torch.ones(3)
        works = [comm.all_reduce(tensor, tag=f"of rank {rank}")]
        works += [comm.all_reduce(tensor, tag="later") for _ in range(2 * rank)]
        expect(_C.ScheduleError, works[-1].wait, "rank 0: all_reduce 'of rank 0'")
        good = torch.ones(3)
        comm.all_reduce(good, tag=f"good {round_}").wait()
        assert good.eq(size).all() and tensor.eq(1).all()
        for work in works:
            expect(_C.ScheduleError, work.wait, "rank 1: all_reduce 'of rank 1'")


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
    # Out of the barrier on all ranks: what the dead rank sent last may be lost with it.
    store = _C.c10d_store(torch_groups.store())
    store.set(f"ready{rank}", "yes")
    if rank == 2:
        for other in range(size):
            store.get(f"ready{other}", TIMEOUT_MS)
        os.kill(os.getpid(), 9)
    start = time.monotonic()

    def train() -> None:
        for _ in range(3):
            comm.all_reduce(torch.ones(1000 * size), tag="unshard/h.0").wait()

    text = expect(_C.CommError, train, f"{comm.backend} all_reduce 'unshard/h.0' in group 'g'")
    if BACKEND != "ofi":  # TCP under libfabric may only say that a connection broke.
        assert "global rank 2" in text.split("global rank", 1)[1], text
    # libfabric's tcp says nothing when a peer ends: silence of some seconds has to do.
    limit_s = 12 if BACKEND == "ofi" else 5
    assert time.monotonic() - start < limit_s, "the survivors must not wait for their time limit"
    print(text, flush=True)
    time.sleep(1.5)  # Not the end of this process is what ends the others.


def main() -> None:
    global BACKEND
    BACKEND, case, size, init_file = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{init_file}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        globals()[f"case_{case}"](rank, size)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    if BACKEND == "mpi":
        return  # MPI_Finalize is part of the test, after failures too.
    os._exit(0)  # A group with a dead peer may wait for its limit when it is destroyed.


def launch(
    backend: str, case: str, size: int, init_file: Path, limit_s: float = 150
) -> list[tuple[int, str]]:
    """Runs a case; returns exit code and output of each process, none left running."""
    command = [sys.executable, __file__, backend, case, str(size), str(init_file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if backend == "mpi":
        command = [*mpirun(size), *command]
        environments = [environment]
    else:
        environments = [{**environment, "RANK": str(rank)} for rank in range(size)]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for environment in environments
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


def mpirun(size: int) -> list[str]:
    command = ["mpirun", "--oversubscribe", "--tag-output", "-np", str(size)]
    command += ["--mca", "btl", "self,vader,tcp", "--mca", "pml", "ob1"]
    return [*command, "--allow-run-as-root"] if os.geteuid() == 0 else command


def skip_unless_available(backend: str) -> None:
    """test_comm.py fails if a backend is missing whose library is there."""
    why_not = {info.name: info.why_not for info in _C.backends()}
    for part in backend.split()[0].split("+"):
        if why_not[part]:
            pytest.skip(f"{part}: {why_not[part]}")


CASES = [
    ("operations", 2),
    ("operations", 4),
    ("precision", 4),
    ("in_flight", 4),
    ("arguments", 2),
    ("time_limit", 2),
    ("abort", 3),
    ("mismatch", 3),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "size"), CASES)
def test_case(backend: str, case: str, size: int, tmp_path: Path) -> None:
    skip_unless_available(backend)
    if "+" in backend and size != 4:
        return  # Two ranks are one node, and three are no whole nodes: flat, as tested without "+".
    for number, (code, output) in enumerate(launch(backend, case, size, tmp_path / "store")):
        assert code == 0, f"process {number} of {size} ranks:\n{output}"


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "mpi"])
def test_a_killed_peer_ends_the_others(backend: str, tmp_path: Path) -> None:
    """Not for MPI: mpirun ends all ranks itself."""
    skip_unless_available(backend)
    results = launch(backend, "killed", 4, tmp_path / "store")
    assert results[2][0] == -9
    for rank in (0, 1, 3):
        code, output = results[rank]
        assert code == 0, f"rank {rank}:\n{output}"
    assert not [name for name in os.listdir("/dev/shm") if "hopshard" in name]


if __name__ == "__main__":
    main()
