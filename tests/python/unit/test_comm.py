"""The communicators as Python sees them; arithmetic and failures are tested in C++."""

from __future__ import annotations

import gc
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hopshard import _C


def run_ranks(size: int, run: Callable[[int, Any], Any], timeout_ms: int = 20_000) -> list[Any]:
    """Runs ``run(rank, hub)`` on a thread per rank; returns results, or raises the first error."""
    hub = _C.LocalHub(size, timeout_ms)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = run(rank, hub)
        except BaseException as error:
            errors.append(error)
            hub.rank_failed(rank, str(error))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs: a binding kept the GIL?"
    if errors:
        raise errors[0]
    return results


def world(size: int, rank: int, slots: list[int] | None = None) -> _C.Group:
    return _C.Group("world", list(range(size)), rank, slots or [])


def test_all_operations() -> None:
    def run(rank: int, hub: _C.LocalHub) -> None:
        comm = hub.communicator(world(3, rank, [2, 0, 1]))
        assert (comm.rank, comm.size, comm.backend) == (rank, 3, "local")
        assert comm.group.slots == [2, 0, 1]
        whole = torch.empty(6)
        comm.all_gather(whole, torch.full((2,), float(rank)), tag="unshard/x").wait()
        assert whole.tolist() == [1, 1, 2, 2, 0, 0]
        part = torch.empty(2)
        comm.reduce_scatter(part, torch.arange(6.0), tag="hop1/x").wait()
        start = 2 * comm.group.slots[rank]
        assert part.tolist() == [3.0 * start, 3.0 * (start + 1)]
        value = torch.tensor([float(rank)])
        comm.all_reduce(value, op="max").wait()
        assert value.item() == 2
        comm.broadcast(value := torch.tensor([rank + 10]), root=1).wait()
        assert value.item() == 11
        comm.barrier(tag="end", timeout_ms=5_000)

    run_ranks(3, run)


def test_errors_have_types_and_words() -> None:
    hub = _C.LocalHub(2, 50)
    comm = hub.communicator(world(2, 0))
    with pytest.raises(_C.InvalidArgument, match=r"3 \* 2 = 6"):
        comm.all_gather(torch.empty(5), torch.empty(3))
    with pytest.raises(_C.InvalidArgument, match="'sum' and 'max'"):
        comm.all_reduce(torch.empty(5), op="mean")
    with pytest.raises(_C.TimeoutError, match="global rank 1 did not arrive"):
        comm.barrier(tag="b")
    hub.abort("over")
    with pytest.raises(_C.CommError):
        comm.barrier()
    with pytest.raises(_C.InvalidArgument, match="twice"):
        _C.Group("g", [0, 0], 0)
    assert issubclass(_C.TimeoutError, _C.CommError) and issubclass(_C.CommError, _C.Error)


def test_a_dropped_work_waits_without_the_gil() -> None:
    def run(rank: int, hub: _C.LocalHub) -> None:
        comm = hub.communicator(world(2, rank))
        tensor = torch.ones(4)
        work = comm.all_reduce(tensor)
        del work
        gc.collect()
        assert tensor.tolist() == [2.0] * 4

    run_ranks(2, run)


def test_a_failing_rank_ends_the_others() -> None:
    def run(rank: int, hub: _C.LocalHub) -> None:
        comm = hub.communicator(world(2, rank))
        if rank == 0:
            raise ValueError("bad batch")
        comm.barrier()

    with pytest.raises(ValueError, match="bad batch"):
        run_ranks(2, run)


def test_recording_counts_and_logs() -> None:
    meter, log = _C.Meter(), _C.CallLog()
    group = _C.Group("sharding[0-3]", [0, 1, 2, 3], 1)
    comm = _C.recording_communicator(None, group, meter, 2, log)
    comm.all_gather(torch.empty(8), torch.ones(2), tag="unshard/h.0").wait()
    comm.all_reduce(torch.ones(4), tag="norm").wait()
    assert meter.value("comm/sharding/all_gather/unshard/calls") == 1
    assert meter.comm_total("calls") == 2
    assert meter.comm_total("bytes", op="all_gather") == 32
    assert meter.comm_total("sent_inter_node_bytes", kind="unshard") == 24
    assert meter.counters()["comm/sent_inter_node_bytes"] == 24 + 24
    assert [(call.op, call.tag, call.numel, call.dtype, call.group) for call in log.calls()] == [
        ("all_gather", "unshard/h.0", 8, torch.float32, "sharding[0-3]"),
        ("all_reduce", "norm", 4, torch.float32, "sharding[0-3]"),
    ]


def test_delayed_injects() -> None:
    inner = _C.recording_communicator(None, world(2, 0), _C.Meter(), 2)
    comm = _C.delayed_communicator(inner, max_delay_us=10, fail_at_call=1)
    comm.barrier()
    with pytest.raises(_C.CommError, match="injected failure at call 1"):
        comm.barrier()


def test_process_groups_ask_the_factory_in_order() -> None:
    asked: list[tuple[str, list[int]]] = []

    def factory(group: _C.Group) -> _C.Communicator:
        asked.append((group.name, group.slots))
        return _C.recording_communicator(None, group, _C.Meter(), 2)

    groups = _C.make_process_groups(_C.GroupLayout(8, 2, 4), 5, factory)
    assert asked == [("world[0-7]", []), ("sharding[4-7]", [0, 2, 1, 3]), ("replication[1,5]", [])]
    assert [c.size for c in (groups.world, groups.sharding, groups.replication)] == [8, 4, 2]

    def broken(group: _C.Group) -> _C.Communicator:
        raise KeyError("no such group")

    with pytest.raises(KeyError, match="no such group"):
        _C.make_process_groups(_C.GroupLayout(2, 2, 1), 0, broken)


def test_importing_leaves_the_signal_handlers_alone() -> None:
    script = """
        import pathlib, torch
        def caught():
            return pathlib.Path("/proc/self/status").read_text().split("SigCgt:")[1].split()[0]
        before = caught()
        from hopshard import _C
        _C.backends()
        assert caught() == before, (before, caught())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_what_this_machine_can_build_is_built() -> None:
    why_not = {backend.name: backend.why_not for backend in _C.backends()}
    assert why_not["shm"] is None
    if pathlib.Path("/usr/include/rdma/fabric.h").exists():
        assert why_not["ofi"] is None
    if shutil.which("mpicxx"):
        assert why_not["mpi"] is None


def test_backends() -> None:
    known = {backend.name: backend for backend in _C.backends()}
    assert list(known) == ["local", "recording", "c10d", "shm", "mpi", "nccl", "ofi"]
    assert all(known[name].why_not is None for name in ("local", "recording", "c10d"))
    for backend in known.values():
        assert backend.summary
        assert backend.why_not is None or len(backend.why_not) > 10
