"""hs.ema averages slices as torch's AveragedModel does whole weights."""

from __future__ import annotations

import copy
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.python.parity.harness import Rank, assert_same, weights_of
from tests.python.parity.models import HIDDEN, MixedDtype, Mlp


def built(kind: type[nn.Module] = Mlp) -> nn.Module:
    torch.manual_seed(3)
    return kind()


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_averages_are_those_of_torch(decay: float) -> None:
    def script(rank: Rank) -> None:
        average: Any
        if rank.is_sharded:
            average = hs.ema(rank.model, decay)
        else:
            average = AveragedModel(rank.model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        for step in range(4):
            rank.optimizer.zero_grad()
            (rank.model(rank.batch(step)) - 1).square().mean().backward()
            rank.step()
            if rank.is_sharded:
                average.update()
                before = weights_of(rank.model)
                with average.applied():
                    rank.record(float(rank.model(torch.ones(1, HIDDEN)).sum().detach()))
                assert all(torch.equal(before[k], v) for k, v in weights_of(rank.model).items())
            else:
                average.update_parameters(rank.model)
                weights = weights_of(average.module)
                output = float(average.module(torch.ones(1, HIDDEN)).sum().detach())
                rank.recorded.append((weights, output))

    assert_same(script, built())


def test_a_swap_in_the_middle_of_an_accumulation_changes_nothing() -> None:
    def script(rank: Rank) -> None:
        average = hs.ema(rank.model, 0.5) if rank.is_sharded else None
        for step in range(3):
            rank.optimizer.zero_grad()
            for micro in range(2):
                (rank.model(rank.batch(step + 10 * micro)) - 1).square().mean().backward()
                if average is not None and micro == 0:
                    with average.applied(), torch.no_grad():
                        rank.model(torch.ones(1, HIDDEN))
            rank.step()
            rank.record()
            if average is not None:
                average.update()

    assert_same(script, built(), passes=2)


def test_state_goes_to_another_degree() -> None:
    base = built(MixedDtype)

    def save() -> Any:
        model = hs.DistributedModel(copy.deepcopy(base))
        average = hs.ema(model, 0.75)
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            model(torch.ones(2, HIDDEN)).square().mean().backward()
            optimizer.step()
            average.update()
        return average.state_dict()

    (saved, *_) = run_ranks(save, 4, sharded_data_parallel_degree=2)

    def load() -> Any:
        average = hs.ema(hs.DistributedModel(copy.deepcopy(base)), 0.1)
        average.load_state_dict(saved)
        assert (average.decay, average.num_updates) == (0.75, 2)
        return average.state_dict()

    (loaded, *_) = run_ranks(load, 4, sharded_data_parallel_degree=4)
    assert saved.keys() == loaded.keys()
    for name, value in saved["weights"].items():
        assert torch.equal(loaded["weights"][name], value), name


def test_bad_input() -> None:
    def run() -> None:
        module = built()
        with pytest.raises(hs.ConfigError, match="takes a DistributedModel, not Mlp"):
            hs.ema(module)  # type: ignore[arg-type]
        model = hs.DistributedModel(module)
        with pytest.raises(hs.ConfigError, match=r"decay=1\.5: a number from 0 to 1"):
            hs.ema(model, 1.5)
        average = hs.ema(model)
        with average.applied(), pytest.raises(hs.ShardedError, match="the weights are the average"):
            average.update()

    run_ranks(run, 1)
