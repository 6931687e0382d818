"""Collectives and bytes of a step are those of the design's formulas.

With U blocks beside a root, m micro-steps, p ranks in a sharding group, r replicas and M bytes of
flat buffers (fp32), one step of one rank is
  gathers      m * (2U + 1)        a block in forward and backward, the root once: it stays
  hop 1        m * (U + 1)         every unit that can be trained
  hop 2        1                   of M / p bytes, if it fits one bucket
  sent bytes   (p-1)/p * M per gather or hop 1 of everything, 2 (r-1)/r * M/p for hop 2
"""

from __future__ import annotations

import copy
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks
from torch import nn

from tests.python.parity.models import HIDDEN, Mlp

NUM_BLOCKS = 5


def build() -> nn.Module:
    torch.manual_seed(2)
    return Mlp(NUM_BLOCKS)


def padded_bytes(numels: list[int], degree: int) -> int:
    """Parameters at multiples of 128 bytes, the tail such that all slices are."""
    end = sum(-(-numel * 4 // 128) * 128 for numel in numels[:-1]) + numels[-1] * 4
    return -(-end // (128 * degree)) * 128 * degree


def flat_bytes(model: nn.Module, degree: int) -> tuple[int, int]:
    """Of the root and of one block."""
    root = [p.numel() for part in (model.first, model.last) for p in part.parameters()]
    block = [p.numel() for p in model.blocks[0].parameters()]
    return padded_bytes(root, degree), padded_bytes(block, degree)


def measure(
    n: int,
    degree: int,
    *,
    micro_steps: int = 1,
    ranks_per_node: int | None = None,
    with_graph: bool = True,
    base: nn.Module | None = None,
    **config: Any,
) -> list[dict[str, int]]:
    """Counters of the third step, by rank."""
    base = base or build()

    def run() -> dict[str, int]:
        model = hs.DistributedModel(copy.deepcopy(base), backward_passes_per_step=micro_steps)
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        before: dict[str, int] = {}
        for _ in range(3):
            before = hs.current().meter.counters()
            optimizer.zero_grad()
            for _ in range(micro_steps):
                if with_graph:
                    model(torch.ones(2, HIDDEN)).mean().backward()
                else:
                    with torch.no_grad():
                        model(torch.ones(2, HIDDEN))
            if with_graph:
                optimizer.step()
        after = hs.current().meter.counters()
        return {name: value - before.get(name, 0) for name, value in after.items()}

    return run_ranks(
        run, n, sharded_data_parallel_degree=degree, ranks_per_node=ranks_per_node, **config
    )


def total(counters: dict[str, int], prefix: str, quantity: str) -> int:
    return sum(
        value
        for name, value in counters.items()
        if name.startswith(f"comm/{prefix}/") and name.endswith(f"/{quantity}")
    )


def sent(counters: dict[str, int], prefix: str) -> int:
    return total(counters, prefix, "sent_intra_node_bytes") + total(
        counters, prefix, "sent_inter_node_bytes"
    )


GRID = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)]


@pytest.mark.parametrize("micro_steps", [1, 2, 4])
@pytest.mark.parametrize(("n", "degree"), GRID)
def test_collectives_and_bytes_of_a_step(n: int, degree: int, micro_steps: int) -> None:
    root, block = flat_bytes(build(), degree)
    whole = root + NUM_BLOCKS * block
    replicas = n // degree
    for counters in measure(n, degree, micro_steps=micro_steps):
        gathers = total(counters, "sharding/all_gather/unshard", "calls")
        reductions = total(counters, "sharding/reduce_scatter/reduce", "calls")
        second = total(counters, "replication/all_reduce/second_hop", "calls")
        assert gathers == (micro_steps * (2 * NUM_BLOCKS + 1) if degree > 1 else 0)
        assert reductions == (micro_steps * (NUM_BLOCKS + 1) if degree > 1 else 0)
        assert second == (1 if replicas > 1 else 0)
        gathered = micro_steps * (root + 2 * NUM_BLOCKS * block)
        share = degree - 1
        assert sent(counters, "sharding/all_gather/unshard") == gathered * share // degree
        assert sent(counters, "sharding/reduce_scatter/reduce") == (
            micro_steps * whole * share // degree
        )
        assert sent(counters, "replication/all_reduce/second_hop") == (
            2 * (replicas - 1) * (whole // degree) // replicas
        )
        # One agreement a step, and nothing else but what is counted above.
        assert total(counters, "world/all_reduce/control", "calls") == 1
        everything = sum(value for name, value in counters.items() if name.endswith("/calls"))
        assert everything == gathers + reductions + second + 1


def test_buckets_of_the_second_hop() -> None:
    root, block = flat_bytes(build(), 2)
    shard = (root + NUM_BLOCKS * block) // 2
    (counters, *_) = measure(4, 2, second_hop_bucket_bytes=256)
    assert total(counters, "replication/all_reduce/second_hop", "calls") == -(-shard // 256)
    assert total(counters, "replication/all_reduce/second_hop", "bytes") == shard


def test_links() -> None:
    """Sharding groups on one node, replicas on several: only hop 2 leaves the node."""
    for counters in measure(4, 2, ranks_per_node=2):
        assert total(counters, "sharding/all_gather/unshard", "sent_inter_node_bytes") == 0
        assert total(counters, "sharding/reduce_scatter/reduce", "sent_inter_node_bytes") == 0
        second = "replication/all_reduce/second_hop"
        assert total(counters, second, "sent_intra_node_bytes") == 0
        assert total(counters, second, "sent_inter_node_bytes") > 0


def test_an_evaluation_gathers_everything_once_and_reduces_nothing() -> None:
    for counters in measure(4, 2, with_graph=False):
        assert total(counters, "sharding/all_gather/unshard", "calls") == NUM_BLOCKS + 1
        assert sum(v for name, v in counters.items() if name.endswith("/calls")) == NUM_BLOCKS + 1


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_units_that_stay_are_gathered_once_a_pass(micro_steps: int) -> None:
    for counters in measure(4, 2, micro_steps=micro_steps, reshard_after_forward=False):
        gathers = total(counters, "sharding/all_gather/unshard", "calls")
        assert gathers == micro_steps * (NUM_BLOCKS + 1)
        reductions = total(counters, "sharding/reduce_scatter/reduce", "calls")
        assert reductions == micro_steps * (NUM_BLOCKS + 1)


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_a_smaller_group_gathers_all_but_the_first_of_a_step(micro_steps: int) -> None:
    root, block = flat_bytes(build(), 4)
    whole = root + NUM_BLOCKS * block
    for counters in measure(
        4, 4, micro_steps=micro_steps, ranks_per_node=2, reshard_after_forward=2
    ):
        assert total(counters, "sharding/all_gather/unshard", "calls") == NUM_BLOCKS + 1
        inside = "secondary/all_gather/unshard"
        all_gathers = micro_steps * (2 * NUM_BLOCKS + 1)
        assert total(counters, inside, "calls") == all_gathers - (NUM_BLOCKS + 1)
        assert total(counters, inside, "sent_inter_node_bytes") == 0
        again = micro_steps * (root + 2 * NUM_BLOCKS * block) - whole
        assert total(counters, inside, "sent_intra_node_bytes") == again // 2


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_small_parameters_are_gathered_once_a_step(micro_steps: int) -> None:
    bias_numel = max(block.bias.numel() for block in build().blocks)
    for counters in measure(
        4, 2, micro_steps=micro_steps, param_persistence_threshold=bias_numel + 1
    ):
        gathers = total(counters, "sharding/all_gather/unshard", "calls")
        assert gathers == micro_steps * (2 * NUM_BLOCKS + 1) + 1
        # Their gradients: together, at the end of each backward.
        reductions = total(counters, "sharding/reduce_scatter/reduce", "calls")
        assert reductions == micro_steps * (NUM_BLOCKS + 2)


def test_a_frozen_unit_is_gathered_and_not_reduced() -> None:
    base = build()
    base.blocks[2].requires_grad_(False)
    for counters in measure(4, 2, base=base):
        assert total(counters, "sharding/all_gather/unshard", "calls") == 2 * NUM_BLOCKS + 1
        assert total(counters, "sharding/reduce_scatter/reduce", "calls") == NUM_BLOCKS


def test_gradient_clipping_costs_one_small_all_reduce() -> None:
    plain = measure(4, 2)[0]
    clipped = measure(4, 2, gradient_clipping=1.0)[0]
    assert total(clipped, "sharding/all_reduce/norm", "calls") == 1
    assert total(clipped, "sharding/all_reduce/norm", "bytes") == 8
    extra = sum(v for k, v in clipped.items() if k.endswith("/calls")) - sum(
        v for k, v in plain.items() if k.endswith("/calls")
    )
    assert extra == 1
