"""DistributedOptimizer: what it accepts, and when it changes weights and state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks
from torch import nn

from tests.python.parity.models import HIDDEN, Mlp

ROWS = torch.ones(3, HIDDEN)


@pytest.fixture
def base() -> nn.Module:
    torch.manual_seed(2)
    return Mlp()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def on_models(base: nn.Module, body: Callable[[Any], Any], n: int = 4, **config: Any) -> list[Any]:
    return run_ranks(
        lambda: body(hs.DistributedModel(copy.deepcopy(base))),
        n,
        **{"sharded_data_parallel_degree": 2, **config},
    )


# --- bad input ------------------------------------------------------------------------------------


def test_parameters_of_another_module(base: nn.Module) -> None:
    def body(model: Any) -> None:
        with pytest.raises(hs.ConfigError, match="wrap the module first"):
            hs.DistributedOptimizer(sgd(copy.deepcopy(base).parameters()))
        stray = nn.Parameter(torch.ones(2, 3))
        with pytest.raises(hs.ConfigError, match=r"parameter 8.*group 0.*\(2, 3\)"):
            hs.DistributedOptimizer(sgd([*list(model.parameters())[:8], stray]))
        other = hs.DistributedModel(copy.deepcopy(base))
        both = [{"params": list(model.parameters())}, {"params": list(other.parameters())}]
        with pytest.raises(hs.ConfigError, match="parameter 0 of group 1"):
            hs.DistributedOptimizer(sgd(both))

    on_models(base, body)


def test_something_that_is_no_torch_optimizer(base: nn.Module) -> None:
    def body(model: Any) -> None:
        with pytest.raises(hs.ConfigError, match="takes a torch optimizer, not list"):
            hs.DistributedOptimizer(list(model.parameters()))  # type: ignore[arg-type]
        with pytest.raises(hs.ConfigError, match="DistributedOptimizer"):
            hs.DistributedOptimizer(hs.DistributedOptimizer(sgd(model.parameters())))

    on_models(base, body, 2)


class Whole(torch.optim.SGD):
    """Says nothing of whether it is element-wise."""


@pytest.mark.parametrize(
    "build",
    [torch.optim.LBFGS, torch.optim.Adafactor, lambda p: Whole(p, lr=0.1)],
    ids=["lbfgs", "adafactor", "own"],
)
def test_an_optimizer_that_is_not_known_to_be_elementwise(base: nn.Module, build: Any) -> None:
    def body(model: Any) -> None:
        with pytest.raises(hs.ConfigError, match="elementwise=True"):
            hs.DistributedOptimizer(build(model.parameters()))

    on_models(base, body, 2)


def test_the_users_word_for_elementwise(base: nn.Module) -> None:
    def body(model: Any) -> None:
        optimizer = hs.DistributedOptimizer(Whole(model.parameters(), lr=0.1), elementwise=True)
        plain = copy.deepcopy(base)
        for target in (model, plain):
            target(ROWS).sum().backward()
        optimizer.step()
        sgd(plain.parameters()).step()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value)

    on_models(base, body)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_that_has_stepped(base: nn.Module, kind: Any) -> None:
    def body(model: Any) -> None:
        used = kind(copy.deepcopy(base).parameters())
        for parameter in used.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        used.step()
        with pytest.raises(hs.ConfigError, match="has stepped already"):
            hs.DistributedOptimizer(used)

    on_models(base, body, 2)


def test_groups_after_wrapping(base: nn.Module) -> None:
    def body(model: Any) -> None:
        some = list(model.parameters())
        optimizer = hs.DistributedOptimizer(sgd(some[:4]))
        with pytest.raises(hs.ConfigError, match="before DistributedOptimizer"):
            optimizer.add_param_group({"params": some[4:]})

    on_models(base, body, 2)


def test_a_step_without_any_gradient(base: nn.Module) -> None:
    def body(model: Any) -> None:
        optimizer = hs.DistributedOptimizer(sgd(model.parameters()))
        with pytest.raises(hs.ConfigError, match=r"no parameter .* has a gradient"):
            optimizer.step()
        model(ROWS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # Nothing to do, as in torch.

    on_models(base, body, 2)


def test_a_step_inside_unshard(base: nn.Module) -> None:
    def body(model: Any) -> None:
        optimizer = hs.DistributedOptimizer(sgd(model.parameters()))
        model(ROWS).sum().backward()
        with hs.unshard(model), pytest.raises(hs.ShardedError, match="unshard"):
            optimizer.step()

    on_models(base, body, 2)


def test_a_step_of_the_wrapped_optimizer_is_not_a_silent_no_op(base: nn.Module) -> None:
    """Weights and gradients lie in slices; torch's own step cannot reach them."""

    def body(model: Any) -> None:
        inner = sgd(model.parameters())
        hs.DistributedOptimizer(inner)
        model(ROWS).sum().backward()
        with pytest.raises(Exception, match=r"first\.weight"):
            inner.step()

    on_models(base, body, 2)


# --- state ----------------------------------------------------------------------------------------


def test_hyper_parameters_are_live_in_both(base: nn.Module) -> None:
    def body(model: Any) -> None:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = hs.DistributedOptimizer(inner)
        inner.param_groups[0]["lr"] = 0.0
        inner.param_groups[0]["weight_decay"] = 0.0
        model(ROWS).sum().backward()
        optimizer.step()
        for name, value in base.state_dict().items():
            assert torch.equal(model.state_dict()[name], value)
        optimizer.param_groups[0]["lr"] = 0.5
        assert inner.param_groups[0]["lr"] == 0.5
        optimizer.step()
        assert not torch.equal(model.state_dict()["last.weight"], base.last.weight)

    on_models(base, body)


def test_state_dict_on_rank_0_only(base: nn.Module) -> None:
    def body(model: Any) -> None:
        optimizer = hs.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        model(ROWS).sum().backward()
        optimizer.step()
        found = optimizer.state_dict(rank0_only=True)
        assert (len(found["state"]) == 10) if hs.rank() == 0 else found == {}

    on_models(base, body)


def test_a_plain_optimizer_loads_the_state(base: nn.Module) -> None:
    def body(model: Any) -> None:
        optimizer = hs.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        model(ROWS).square().mean().backward()
        optimizer.step()
        plain = copy.deepcopy(base)
        plain.load_state_dict(model.state_dict())
        inner = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        inner.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        for target in (model, plain):
            target(ROWS).square().mean().backward()
        optimizer.step()
        inner.step()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)

    on_models(base, body)


def test_a_state_with_other_groups(base: nn.Module) -> None:
    def body(model: Any) -> None:
        optimizer = hs.DistributedOptimizer(sgd(model.parameters()))
        other = sgd(list(base.parameters())[:3]).state_dict()
        with pytest.raises(hs.ConfigError, match="other parameter groups"):
            optimizer.load_state_dict(other)

    on_models(base, body, 2)


def test_replicas_are_bit_equal(base: nn.Module) -> None:
    def body(model: Any) -> dict[str, torch.Tensor]:
        optimizer = hs.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + hs.rank())
            rows = torch.randn(4, HIDDEN, generator=generator)
            model(rows).square().mean().backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
        return model.state_dict()

    first, *others = on_models(base, body, 8, ranks_per_node=2)
    for other in others:
        for name, value in first.items():
            assert torch.equal(other[name], value), name


def test_no_weight_and_no_state_change_when_the_world_disagrees(base: nn.Module) -> None:
    """A rank that fails before the agreement leaves nobody with a half-done step."""

    def body(model: Any) -> None:
        optimizer = hs.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        masters = [arena.clone() for arena in model._engine.master_arenas()]
        model(ROWS, [1, 0] if hs.rank() == 1 else [0, 1]).sum().backward()
        with pytest.raises(hs.Error):
            optimizer.step()
        for before, after in zip(masters, model._engine.master_arenas(), strict=True):
            assert torch.equal(before, after)
        assert not any(m.any() for group in optimizer._update.moments.values() for m in group)

    on_models(base, body, 2, sharded_data_parallel_degree=1)
