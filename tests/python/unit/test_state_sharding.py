"""optimizer_state_sharding="world": the same numbers, an n-th of the moments."""

from __future__ import annotations

import copy
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks
from torch import nn

from tests.python.parity.models import HIDDEN, MixedDtype, Mlp


def train(base: nn.Module, build: Any, steps: int, **config: Any) -> list[Any]:
    """Bytes of state, weights and optimizer state after so many steps."""

    def run() -> Any:
        model = hs.DistributedModel(copy.deepcopy(base))
        optimizer = hs.DistributedOptimizer(build(model.parameters()))
        for step in range(steps):
            optimizer.zero_grad()
            rows = torch.full((2, HIDDEN), 0.1 * (step + hs.rank() + 1))
            (model(rows) - 1).square().mean().backward()
            optimizer.step()
        return optimizer.state_bytes(), model.state_dict(), optimizer.state_dict()

    return run_ranks(run, 4, **config)


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return kind()


BUILDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.01),
}


@pytest.mark.parametrize("optimizer", BUILDS)
@pytest.mark.parametrize("kind", [Mlp, MixedDtype])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_bits_are_those_of_the_group(optimizer: str, kind: type[nn.Module], degree: int) -> None:
    base = built(kind)
    group = train(base, BUILDS[optimizer], 3, sharded_data_parallel_degree=degree)
    world = train(
        base,
        BUILDS[optimizer],
        3,
        sharded_data_parallel_degree=degree,
        optimizer_state_sharding="world",
    )
    for mine, other in zip(world, group, strict=True):
        for name, value in other[1].items():
            assert torch.equal(mine[1][name], value), name
        assert mine[2]["state"].keys() == other[2]["state"].keys()
        for number, state in other[2]["state"].items():
            for name, value in state.items():
                if value is not None:
                    assert torch.equal(mine[2]["state"][number][name], value), (number, name)


def test_moments_are_divided_by_the_world() -> None:
    base = nn.Sequential(nn.Linear(HIDDEN, 64), nn.Linear(64, 64))
    for degree in (1, 2, 4):
        states = train(
            base,
            BUILDS["adamw"],
            1,
            sharded_data_parallel_degree=degree,
            optimizer_state_sharding="world",
        )
        numel = sum(parameter.numel() for parameter in base.parameters())
        total = sum(num_bytes for num_bytes, _, _ in states)
        assert 8 * numel <= total <= 8 * numel + 16 * 128 * 4  # Padding, in both moments.
        assert max(num_bytes for num_bytes, _, _ in states) <= total / 4 + 2 * 128 * 16


def test_a_saved_state_is_taken_by_either() -> None:
    base = built(Mlp)
    (_, weights, state) = train(base, BUILDS["adamw"], 2, sharded_data_parallel_degree=2)[0]

    def resume() -> Any:
        model = hs.DistributedModel(copy.deepcopy(base))
        optimizer = hs.DistributedOptimizer(BUILDS["adamw"](model.parameters()))
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        (model(torch.ones(2, HIDDEN)) - 1).square().mean().backward()
        optimizer.step()
        return model.state_dict(), optimizer.state_dict()

    results = [
        run_ranks(resume, 4, sharded_data_parallel_degree=p, optimizer_state_sharding=where)[0]
        for p, where in [(1, "group"), (1, "world"), (2, "world"), (4, "world")]
    ]
    for name, value in results[0][0].items():
        for other, _ in results[1:]:
            assert torch.allclose(other[name], value, rtol=1e-6), name


def test_other_optimizers_are_refused() -> None:
    def run() -> None:
        model = hs.DistributedModel(built(Mlp))
        with pytest.raises(hs.ConfigError, match="'world' with RMSprop: only the state of Adam"):
            hs.DistributedOptimizer(torch.optim.RMSprop(model.parameters()))

    run_ranks(run, 2, optimizer_state_sharding="world")
