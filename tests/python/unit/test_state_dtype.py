"""optimizer_state_dtype="bf16": half of the memory, the same training, and runs that repeat."""

from __future__ import annotations

import copy
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks
from torch import nn

from tests.python.parity.models import HIDDEN, Mlp
from tests.python.unit.test_state_sharding import BUILDS, built, train

BF16: dict[str, Any] = {"optimizer_state_dtype": "bf16"}
WITH_STATE = ["adamw", "sgd"]


def assert_same(mine: dict[str, Any], other: dict[str, Any]) -> None:
    """Of weights, or of an optimizer's state."""
    assert mine.keys() == other.keys()
    for name, value in other.items():
        if isinstance(value, dict):
            assert_same(mine[name], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(mine[name], value), name


def values_of(optimizer_state: dict[str, Any]) -> list[torch.Tensor]:
    """The moments."""
    return [
        value
        for state in optimizer_state["state"].values()
        for name, value in state.items()
        if name != "step"
    ]


@pytest.mark.parametrize("optimizer", WITH_STATE)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_half_the_bytes_and_the_same_on_all_replicas(optimizer: str, degree: int) -> None:
    base = built(Mlp)
    wide = train(base, BUILDS[optimizer], 3, sharded_data_parallel_degree=degree)
    results = train(base, BUILDS[optimizer], 3, sharded_data_parallel_degree=degree, **BF16)
    for (num_bytes, weights, state), (wide_bytes, _, _) in zip(results, wide, strict=True):
        assert 2 * num_bytes == wide_bytes > 0
        assert_same(weights, results[0][1])
        assert_same(state["state"], results[0][2]["state"])
        for value in values_of(state):
            assert value.dtype == torch.float32
            assert torch.equal(value, value.bfloat16().float())


@pytest.mark.parametrize("optimizer", WITH_STATE)
@pytest.mark.parametrize("degree", [1, 2])
def test_bits_of_the_world_are_those_of_the_group(optimizer: str, degree: int) -> None:
    base = built(Mlp)
    config = {"sharded_data_parallel_degree": degree, **BF16}
    group = train(base, BUILDS[optimizer], 4, **config)[0]
    world = train(base, BUILDS[optimizer], 4, optimizer_state_sharding="world", **config)[0]
    assert_same(world[1], group[1])
    assert_same(world[2]["state"], group[2]["state"])


def test_equal_seeds_repeat_and_others_do_not() -> None:
    base = built(Mlp)
    first, again, other = (
        train(base, BUILDS["adamw"], 3, optimizer_state_seed=seed, **BF16)[0] for seed in (1, 1, 2)
    )
    assert_same(again[1], first[1])
    assert_same(again[2]["state"], first[2]["state"])
    pairs = zip(values_of(other[2]), values_of(first[2]), strict=True)
    assert any(not torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("optimizer", WITH_STATE)
def test_losses_are_those_of_fp32_moments(optimizer: str) -> None:
    torch.manual_seed(6)
    base = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    x = torch.randn(64, 16)
    y = (x @ torch.randn(16, 1)).tanh()

    def run() -> list[float]:
        model = hs.DistributedModel(copy.deepcopy(base))
        stepper = hs.DistributedOptimizer(BUILDS[optimizer](model.parameters()))
        losses = []
        for _ in range(150):
            stepper.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            stepper.step()
            losses.append(loss.item())
        return losses

    wide = run_ranks(run, 2, sharded_data_parallel_degree=2)[0]
    ours = run_ranks(run, 2, sharded_data_parallel_degree=2, **BF16)[0]
    assert wide[-1] < wide[0] / 10
    assert ours != wide
    assert ours == pytest.approx(wide, rel=0.05)


@pytest.mark.parametrize("optimizer", WITH_STATE)
def test_a_loaded_state_is_the_saved_one_and_goes_on_as_if_nothing_had_been(optimizer: str) -> None:
    base = built(Mlp)
    config = {"sharded_data_parallel_degree": 2, **BF16}
    _, weights, state = train(base, BUILDS[optimizer], 2, **config)[0]

    def run(resumed: bool) -> Any:
        model = hs.DistributedModel(copy.deepcopy(base))
        stepper = hs.DistributedOptimizer(BUILDS[optimizer](model.parameters()))
        loaded = None
        if resumed:
            model.load_state_dict(weights)
            stepper.load_state_dict(state)
            loaded = stepper.state_dict()
        for step in range(2 if resumed else 0, 5):
            stepper.zero_grad()
            rows = torch.full((2, HIDDEN), 0.1 * (step + hs.rank() + 1))
            (model(rows) - 1).square().mean().backward()
            stepper.step()
        return loaded, model.state_dict(), stepper.state_dict()

    _, expected_weights, expected = run_ranks(run, 4, False, **config)[0]
    loaded, got_weights, got = run_ranks(run, 4, True, **config)[0]
    assert_same(loaded["state"], state["state"])
    assert_same(got_weights, expected_weights)
    assert_same(got["state"], expected["state"])


@pytest.mark.parametrize("optimizer", WITH_STATE)
def test_a_plain_optimizer_takes_the_state_and_gives_its_own(optimizer: str) -> None:
    base = built(Mlp)
    _, weights, state = train(base, BUILDS[optimizer], 2, **BF16)[0]
    plain = copy.deepcopy(base)
    plain.load_state_dict(weights)
    reference = BUILDS[optimizer](plain.parameters())
    reference.load_state_dict(state)
    plain(torch.ones(2, HIDDEN)).sum().backward()
    reference.step()
    wide = reference.state_dict()

    def run() -> dict[str, Any]:
        model = hs.DistributedModel(copy.deepcopy(base))
        stepper = hs.DistributedOptimizer(BUILDS[optimizer](model.parameters()))
        stepper.load_state_dict(wide)
        return stepper.state_dict()

    ours = run_ranks(run, 1, **BF16)[0]
    for mine, theirs in zip(values_of(ours), values_of(wide), strict=True):
        assert torch.equal(mine, theirs.bfloat16().float())


def test_what_cannot_be_kept_in_bf16_is_refused() -> None:
    def run() -> None:
        model = hs.DistributedModel(built(Mlp))
        with pytest.raises(hs.ConfigError, match="'bf16' with RMSprop: only the state of Adam, "):
            hs.DistributedOptimizer(torch.optim.RMSprop(model.parameters()))
        with pytest.raises(hs.ConfigError, match=r"'bf16' with Adam: .*without amsgrad"):
            hs.DistributedOptimizer(torch.optim.Adam(model.parameters(), amsgrad=True))
        double = hs.DistributedModel(nn.Linear(3, 3, dtype=torch.float64))
        with pytest.raises(hs.ConfigError, match=r"'bf16' with fp64 parameters.*use 'fp32'"):
            hs.DistributedOptimizer(BUILDS["adamw"](double.parameters()))

    run_ranks(run, 2, **BF16)
    with pytest.raises(hs.ConfigError, match="legal: one of 'fp32', 'bf16'"):
        hs.Config(optimizer_state_dtype="fp16")
    with pytest.raises(hs.ConfigError, match="optimizer_state_seed"):
        hs.Config(optimizer_state_seed=-1)


def test_bf16_parameters_keep_fp32_masters() -> None:
    base = built(Mlp).bfloat16()

    def run() -> int:
        model = hs.DistributedModel(copy.deepcopy(base))
        stepper = hs.DistributedOptimizer(BUILDS["adamw"](model.parameters()))
        for _ in range(2):
            stepper.zero_grad()
            model(torch.ones(2, HIDDEN, dtype=torch.bfloat16)).sum().backward()
            stepper.step()
        assert all(value.isfinite().all() for value in model.state_dict().values())
        return model.statistics()["optimizer_bytes"]

    (wide,), (ours,) = run_ranks(run, 1), run_ranks(run, 1, **BF16)
    assert 2 * ours == wide
