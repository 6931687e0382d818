"""init, shutdown, rank functions, and ranks as threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import hopshard as hs
import pytest
import torch
import torch.distributed as dist
from hopshard import _C, world
from hopshard.errors import CommError, ConfigError, InvalidArgument
from hopshard.errors import TimeoutError as HopshardTimeoutError
from hopshard.testing import ParityResult, ParityRun, format_parity, run_ranks


def _places() -> dict[str, Any]:
    here = world.current()
    return {
        "rank": (world.rank(), world.size(), world.dp_rank(), world.dp_size()),
        "node": (world.node(), world.num_nodes(), world.local_rank(), world.local_size()),
        "sharding": (world.sharding_rank(), world.sharding_size()),
        "replication": (world.replication_rank(), world.replication_size()),
        "others": (world.tp_rank(), world.tp_size(), world.pp_rank(), world.pp_size()),
        "members": (
            list(here.groups.sharding.group.ranks),
            list(here.groups.replication.group.ranks),
        ),
    }


def test_rank_functions_for_every_rank() -> None:
    places = run_ranks(_places, 8, ranks_per_node=4, sharded_data_parallel_degree=2)
    for rank, place in enumerate(places):
        assert place["rank"] == (rank, 8, rank, 8)  # Data parallel size is the world at any degree.
        assert place["node"] == (rank // 4, 2, rank % 4, 4)
        assert place["sharding"] == (rank % 2, 2)
        assert place["replication"] == (rank // 2, 4)
        assert place["others"] == (0, 1, 0, 1)
        first = rank // 2 * 2
        assert place["members"] == ([first, first + 1], list(range(rank % 2, 8, 2)))


@pytest.mark.parametrize("degree", [1, 2, 3, 6])
def test_groups_move_data_at_every_degree(degree: int) -> None:
    def body() -> tuple[float, float]:
        groups = world.current().groups
        sums = []
        for group in (groups.sharding, groups.replication):
            value = torch.tensor([10.0 ** hs.rank()], dtype=torch.float64)
            group.all_reduce(value, tag="test").wait()
            sums.append(float(value))
        return sums[0], sums[1]

    for rank, (sharding, replication) in enumerate(
        run_ranks(body, 6, sharded_data_parallel_degree=degree)
    ):
        block = rank // degree * degree
        assert sharding == sum(10.0**r for r in range(block, block + degree))
        assert replication == sum(10.0**r for r in range(rank % degree, 6, degree))


def test_last_node_may_hold_fewer_ranks() -> None:
    places = run_ranks(_places, 3, ranks_per_node=2)
    assert [place["node"] for place in places] == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)]


def test_environment_emulates_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPSHARD_RANKS_PER_NODE", "2")
    assert [place["node"][:2] for place in run_ranks(_places, 4)] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
    ]


def test_a_degree_that_does_not_divide_the_world_fails_on_every_rank() -> None:
    def body() -> str:
        with pytest.raises(ConfigError) as caught:
            hs.init(sharded_data_parallel_degree=3)
        return str(caught.value)

    texts = run_ranks(body, 4, initialize=False)
    assert len(set(texts)) == 1 and "3" in texts[0] and "4" in texts[0]


def test_ranks_that_disagree_fail_on_every_rank_before_groups_are_built() -> None:
    ranks = iter(range(3))
    lock = threading.Lock()

    def body() -> str:
        with lock:
            mine = next(ranks)
        with pytest.raises(ConfigError) as caught:
            hs.init(sharded_data_parallel_degree=3 if mine == 1 else 1, microbatches=2)
        return str(caught.value)

    texts = run_ranks(body, 3, initialize=False)
    assert len(set(texts)) == 1
    assert "'sharded_data_parallel_degree': " in texts[0] and "microbatches" not in texts[0]


def test_second_init() -> None:
    def body() -> None:
        first = world.current()
        assert hs.init() is first
        assert hs.init(dp_shard_size=2) is first
        assert hs.init({"sharded_data_parallel_degree": 2}) is first
        with pytest.raises(ConfigError, match=r"'sharded_data_parallel_degree' 2 -> 1"):
            hs.init(sharded_data_parallel_degree=1)
        hs.shutdown()
        assert not hs.is_initialized()
        assert hs.init(sharded_data_parallel_degree=1).layout.degree == 1

    run_ranks(body, 2, sharded_data_parallel_degree=2)


def test_without_init_the_way_out_is_named() -> None:
    assert not hs.is_initialized()
    for function in (world.rank, world.tp_size, world.barrier, world.current):
        with pytest.raises(ConfigError, match=r"hopshard.init"):
            function()


def test_single_process_world_and_its_threads() -> None:
    here = hs.init()
    assert (here.rank, here.size, here.launcher) == (0, 1, "single process")
    assert dist.is_initialized()  # Scripts may use torch.distributed beside us.
    seen: list[int] = []
    worker = threading.Thread(target=lambda: seen.append(hs.size()))
    worker.start()
    worker.join()
    assert seen == [1]  # A data loader's thread belongs to its process's world.
    world.barrier()
    hs.shutdown()
    hs.shutdown()
    assert not dist.is_initialized()


def test_a_process_group_of_the_program_is_used_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert hs.init().size == 1
        hs.shutdown()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_layout_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    hs.init()
    hs.init()
    text = capfd.readouterr().err
    assert text.count("1 rank = 1 node x 1 · degree 1 · 1 replica") == 1
    hs.shutdown()
    hs.init(log_level="warning")
    assert capfd.readouterr().err == ""


def test_layout_of_a_large_world_stays_short() -> None:
    text = world.describe_layout(_C.GroupLayout(1024, 8, 64), launcher="Slurm", backend="c10d")
    assert "1024 ranks = 128 nodes x 8 · degree 64 · 16 replicas" in text
    assert "{0 1 … 63}" in text and "… 12 more" in text and len(text) < 400


def test_results_come_by_rank_and_arguments_arrive() -> None:
    assert run_ranks(lambda a, b: (hs.rank(), a + b), 3, 1, 2) == [(0, 3), (1, 3), (2, 3)]
    with pytest.raises(InvalidArgument, match="at least one rank"):
        run_ranks(hs.rank, 0)


def test_first_error_wins_and_wakes_the_others() -> None:
    def body() -> None:
        if hs.rank() == 2:
            time.sleep(0.1)  # The others wait in the barrier by now.
            raise KeyError("boom")
        hs.barrier()

    start = time.monotonic()
    with pytest.raises(KeyError, match="boom") as caught:
        run_ranks(body, 4, timeout_s=60)
    assert time.monotonic() - start < 5
    assert "raised on rank 2 of 4" in caught.value.__notes__


def test_a_rank_that_leaves_early_is_a_communication_error_and_no_hang() -> None:
    def body() -> None:
        if hs.rank() == 0:
            hs.barrier()

    with pytest.raises(CommError):
        run_ranks(body, 2, timeout_s=0.5)


def test_a_rank_that_never_ends_is_named_with_its_place() -> None:
    release = threading.Event()

    def body() -> None:
        if hs.rank() == 1:
            release.wait(30)

    try:
        with pytest.raises(HopshardTimeoutError, match=r"rank 1 of 2 was still busy.*\n.*"):
            run_ranks(body, 2, timeout_s=0.5)
    finally:
        release.set()


def test_parity_verdict() -> None:
    good = ParityRun(2, (1.0, 0.5), (1.0, 0.5 * (1 + 5e-7)), 1e-6, 0.0)
    assert good.ok and 4e-7 < good.largest < 6e-7
    assert not ParityRun(2, (1.0,), (1.0 + 1e-5,), 1e-6, 0.0).ok
    assert not ParityRun(2, (float("nan"),), (1.0,), 1e-6, 0.0).ok
    text = format_parity(ParityResult((good,)), 4)
    assert "4 ranks, degree 2, 2 steps" in text and "ok" in text
    assert len([line for line in text.splitlines() if line.strip()[0].isdigit()]) == 2
