"""``hs.unshard``: whole parameters inside, changes kept, nothing left gathered behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks
from torch import nn

from tests.python.parity.models import GPT, HIDDEN, MixedDtype, Mlp, OddConv


def on_models(
    kind: Callable[[], nn.Module],
    body: Callable[[Any, nn.Module], Any],
    n: int = 4,
    degree: int = 4,
) -> list[Any]:
    torch.manual_seed(2)
    base = kind()
    return run_ranks(
        lambda: body(hs.DistributedModel(copy.deepcopy(base)), base),
        n,
        sharded_data_parallel_degree=degree,
        ranks_per_node=min(2, n),
    )


def gathered(model: Any) -> list[bool]:
    return [model._engine.is_gathered(unit) for unit in range(model._engine.num_units)]


@pytest.mark.parametrize("kind", [lambda: GPT(tied=True), OddConv, MixedDtype])
def test_values_inside(kind: Callable[[], nn.Module]) -> None:
    def body(model: Any, base: nn.Module) -> None:
        with hs.unshard(model):
            for mine, other in zip(model.parameters(), base.parameters(), strict=True):
                assert torch.equal(mine, other) and mine.stride() == other.stride()
        assert not any(gathered(model))

    on_models(kind, body)


def test_a_part_gathers_only_its_units() -> None:
    def body(model: Any, base: nn.Module) -> None:
        block = model.module.blocks[1]
        for part in (block, block.weight):
            with hs.unshard(part):
                assert torch.equal(block.weight, base.blocks[1].weight)
                assert gathered(model) == [False, False, True, False]
                with pytest.raises(RuntimeError, match=r"blocks\.0\.weight"):
                    model.module.blocks[0].weight.sum()
        assert not any(gathered(model))

    on_models(Mlp, body)


@pytest.mark.parametrize("kind", [Mlp, MixedDtype])
def test_changes_are_kept(kind: Callable[[], nn.Module]) -> None:
    def body(model: Any, base: nn.Module) -> None:
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        with hs.unshard(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2).add_(1)
        for name, value in base.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value * 2 + 1)
        # Master and shard are one: a step with nothing to do does not bring the old values back.
        model(torch.ones(2, HIDDEN)).sum().backward()
        optimizer.step()
        for name, value in base.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value * 2 + 1)

    on_models(kind, body, degree=2)


def test_changes_without_write_back_are_dropped() -> None:
    def body(model: Any, base: nn.Module) -> None:
        with hs.unshard(model, write_back=False), torch.no_grad():
            model.module.first.weight.zero_()
        assert torch.equal(model.state_dict()["first.weight"], base.first.weight)

    on_models(Mlp, body)


def test_changes_before_an_exception_are_dropped_and_all_is_released() -> None:
    def body(model: Any, base: nn.Module) -> None:
        with (  # noqa: PT012
            pytest.raises(ValueError, match="mine"),
            hs.unshard(model),
            torch.no_grad(),
        ):
            model.module.first.weight.zero_()
            raise ValueError("mine")
        assert not any(gathered(model))
        assert torch.equal(model.state_dict()["first.weight"], base.first.weight)
        model(torch.ones(2, HIDDEN)).sum().backward()

    on_models(Mlp, body)


def test_nested_and_around_a_forward() -> None:
    def body(model: Any, base: nn.Module) -> None:
        with hs.unshard(model):
            with hs.unshard(model.module.blocks[0]):
                pass
            assert all(gathered(model))
            rows = torch.ones(2, HIDDEN)
            torch.testing.assert_close(model(rows), base(rows))
            assert torch.equal(model.module.blocks[0].weight, base.blocks[0].weight)
        assert not any(gathered(model)[1:])

    on_models(Mlp, body)


def test_initialisation_as_scripts_do_it() -> None:
    def body(model: Any, base: nn.Module) -> None:
        with hs.unshard(model):
            nn.init.constant_(model.module.last.weight, 3.0)
            model.module.last.bias.data.fill_(4.0)
        assert torch.equal(model.state_dict()["last.weight"], torch.full((2, HIDDEN), 3.0))
        assert torch.equal(model.state_dict()["last.bias"], torch.full((2,), 4.0))

    on_models(Mlp, body)


def test_a_module_of_nobody() -> None:
    def body(model: Any, base: nn.Module) -> None:
        with pytest.raises(hs.ConfigError, match=r"Mlp belongs to a DistributedModel"):
            hs.unshard(base).__enter__()

    on_models(Mlp, body, 2, 2)


def test_versions_tell_autograd_of_changes() -> None:
    """A graph from before a write-back or a load must not use the new values silently."""

    def body(model: Any, base: nn.Module) -> None:
        before = model.module.first.weight._version
        with hs.unshard(model), torch.no_grad():
            model.module.first.weight.mul_(2)
        after = model.module.first.weight._version
        assert after > before
        model.load_state_dict(base.state_dict())
        assert model.module.first.weight._version > after

    on_models(Mlp, body, 2, 2)


def test_deepcopy_and_pickle_inside() -> None:
    def body(model: Any, base: nn.Module) -> None:
        with hs.unshard(model):
            kept = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        for name, parameter in base.named_parameters():
            assert torch.equal(kept[name], parameter)

    on_models(Mlp, body)


def test_secondary_shards_follow_every_change() -> None:
    def run() -> None:
        model = hs.DistributedModel(Mlp())
        plain, x = Mlp(), torch.ones(2, HIDDEN)

        def check() -> None:
            plain.load_state_dict(model.state_dict())
            assert torch.equal(model(x), plain(x))

        model(x).sum().backward()
        check()
        with hs.unshard(model.blocks[0]), torch.no_grad():
            for parameter in model.blocks[0].parameters():
                parameter.add_(1.0)
        check()
        model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
        check()
        handle = model.blocks[1].register_forward_pre_hook(lambda module, args: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        check()
        before = model.world.meter.counters()["comm/sharding/all_gather/unshard/calls"]
        check()
        after = model.world.meter.counters()["comm/sharding/all_gather/unshard/calls"]
        assert after - before == 0

    run_ranks(run, 4, sharded_data_parallel_degree=4, reshard_after_forward=2)
