"""The handle that ``param.grad`` is after a backward."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.gradients import ShardedGrad, sum_norms
from hopshard.testing import run_ranks
from torch import nn

from tests.python.parity.models import HIDDEN, MixedDtype, Mlp, OddConv


def built(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return kind()


def after_backward(
    body: Callable[[Any, nn.Module], Any],
    n: int = 4,
    degree: int = 2,
    base: nn.Module | None = None,
) -> list[Any]:
    """Calls ``body(model, plain)`` where both have the gradients of one batch."""
    base = base or built(Mlp)

    def run() -> Any:
        plain = copy.deepcopy(base)
        model = hs.DistributedModel(copy.deepcopy(base))
        for target in (plain, model):
            target(torch.ones(3, HIDDEN)).square().mean().backward()
        return body(model, plain)

    return run_ranks(run, n, sharded_data_parallel_degree=degree)


def pairs(model: Any, plain: nn.Module) -> list[tuple[Any, Any]]:
    return [
        (mine.grad, other.grad)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True)
    ]


def test_full_gradient() -> None:
    def body(model: Any, plain: nn.Module) -> None:
        for mine, other in pairs(model, plain):
            assert isinstance(mine, ShardedGrad)
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
            torch.testing.assert_close(mine.full(), other)
            assert type(mine.full()) is torch.Tensor

    after_backward(body)


def test_gradients_of_mixed_dtypes() -> None:
    def body(model: Any, plain: nn.Module) -> None:
        for mine, other in pairs(model, plain):
            torch.testing.assert_close(mine.full(), other)
            torch.testing.assert_close(mine.norm(), other.norm())

    after_backward(body, base=built(MixedDtype))


def test_reading_gathers_the_whole() -> None:
    def body(model: Any, plain: nn.Module) -> None:
        for mine, other in pairs(model, plain):
            torch.testing.assert_close(mine + 1, other + 1)
            torch.testing.assert_close(mine.sum(), other.sum())
            torch.testing.assert_close(mine.clone(), other)
            torch.testing.assert_close(mine.mean(dim=0), other.mean(dim=0))
            torch.testing.assert_close(mine.norm(dim=0), other.norm(dim=0))
            torch.testing.assert_close(mine.to(torch.float64), other.double())
            torch.testing.assert_close(torch.cat([mine.flatten()]), other.flatten())
            assert mine.abs().max().item() == pytest.approx(other.abs().max().item())
            torch.testing.assert_close(mine[0] * 1, other[0] * 1)
            torch.testing.assert_close(sum(part.sum() for part in mine.unbind(0)), other.sum())
            torch.testing.assert_close(mine.view(-1).norm(), other.norm())
            assert "ShardedGrad" not in repr(mine[0])

    after_backward(body)


@pytest.mark.parametrize("order", [0.0, 0.5, 1.0, 2.0, 3.0, float("inf")])
def test_norms_come_from_the_slices(order: float) -> None:
    def body(model: Any, plain: nn.Module) -> None:
        meter = hs.current().meter
        for mine, other in pairs(model, plain):
            torch.testing.assert_close(
                torch.linalg.vector_norm(mine, order), torch.linalg.vector_norm(other, order)
            )
        mine_all = torch._foreach_norm([m for m, _ in pairs(model, plain)], order)
        other_all = torch._foreach_norm([o for _, o in pairs(model, plain)], order)
        torch.testing.assert_close(mine_all, other_all)
        # All parameters' norms travel together, once.
        name = "max" if order == float("inf") else "sum"
        kind = "comm/sharding/all_reduce/norm/calls"
        assert meter.counters().get(kind, 0) == 1, (name, meter.counters())
        assert not any("all_gather/gradient" in key for key in meter.counters())

    after_backward(body)


def test_norms_follow_changes() -> None:
    def body(model: Any, plain: nn.Module) -> None:
        grad = model.module.first.weight.grad
        before = float(grad.norm())
        grad.mul_(2)
        assert float(grad.norm()) == pytest.approx(2 * before)

    after_backward(body)


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul": lambda g: g.mul_(0.5),
    "mul_tensor": lambda g: g.mul_(torch.tensor(0.5)),
    "mul_full": lambda g: g.mul_(torch.arange(1.0, 1 + g.numel()).view(g.shape)),
    "mul_row": lambda g: g.mul_(torch.arange(1.0, 1 + g.shape[-1])),
    "add": lambda g: g.add_(1, alpha=2),
    "add_itself": lambda g: g.add_(g),
    "addcmul": lambda g: g.addcmul_(torch.ones(g.shape), torch.full(g.shape, 2.0), value=3.0),
    "clamp": lambda g: g.clamp_(-0.01, 0.01),
    "copy": lambda g: g.copy_(torch.arange(float(g.numel())).view(g.shape)),
    "lerp": lambda g: g.lerp_(torch.ones(g.shape), 0.5),
    "neg": lambda g: g.neg_(),
    "zero": lambda g: g.zero_(),
    "fill": lambda g: g.fill_(3),
    "nan_to_num": lambda g: torch.nan_to_num_(g),
    "data": lambda g: g.data.div_(4),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("kind", [Mlp, OddConv])
def test_in_place_changes_of_elements(
    kind: Callable[[], nn.Module], change: Callable[[torch.Tensor], Any]
) -> None:
    base = built(kind)

    def run() -> None:
        plain = copy.deepcopy(base)
        model = hs.DistributedModel(copy.deepcopy(base))
        rows = torch.ones(2, 3, 4, 5) if kind is OddConv else torch.ones(3, HIDDEN)
        for target in (plain, model):
            target(rows).square().mean().backward()
        for mine, other in pairs(model, plain):
            if other.dim() == 0:
                continue
            change(other)
            change(mine)
            torch.testing.assert_close(mine.full(), other)

    run_ranks(run, 4, sharded_data_parallel_degree=4, ranks_per_node=2)


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.cumsum_(0),
        lambda grad: grad.t_(),
        lambda grad: grad.index_fill_(0, torch.tensor([0]), 1.0),
        lambda grad: torch.add(torch.ones(grad.shape), 1, out=grad),
    ],
    ids=["cumsum", "transpose", "index_fill", "out"],
)
def test_other_changes_in_place_are_errors_that_name_the_parameter(
    change: Callable[[Any], Any],
) -> None:
    def body(model: Any, plain: nn.Module) -> None:
        with pytest.raises((hs.ShardedError, RuntimeError), match=r"blocks\.1\.weight"):
            change(model.module.blocks[1].weight.grad)

    after_backward(body, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.__setitem__(0, 0),
        lambda grad: grad[0].zero_(),
        lambda grad: grad.view(-1)[1:3].mul_(2),
        lambda grad: grad.t().add_(1),
        lambda grad: grad.unbind(0)[1].fill_(3),
        lambda grad: grad.chunk(2)[0][0].fill_(3),
    ],
    ids=["item", "select", "view", "transpose", "unbind", "chunk"],
)
def test_writing_into_a_part_is_not_a_silent_no_op(change: Callable[[Any], Any]) -> None:
    """Parts are views of a gathered copy, where a change would be lost."""

    def body(model: Any, plain: nn.Module) -> None:
        with pytest.raises(hs.ShardedError, match=r"blocks\.1\.weight.*full"):
            change(model.module.blocks[1].weight.grad)

    after_backward(body, 2)


def test_a_gradient_as_the_source_of_a_change() -> None:
    """Averages of gradients that scripts keep."""

    def body(model: Any, plain: nn.Module) -> None:
        for mine, other in pairs(model, plain):
            average = torch.ones(other.shape)
            average.mul_(0.9).add_(mine, alpha=0.1)
            torch.testing.assert_close(average, 0.9 + 0.1 * other)
            average.copy_(mine)
            torch.testing.assert_close(average, other)
            torch._foreach_add_([average], [mine])
            torch.testing.assert_close(average, 2 * other)
            torch.testing.assert_close(torch.add(mine, 1, out=average), 1 + other)

    after_backward(body)


def test_text_of_a_handle() -> None:
    def body(model: Any, plain: nn.Module) -> None:
        text = repr(model.module.blocks[1].weight.grad)
        assert "blocks.1.weight" in text and str((HIDDEN, HIDDEN)) in text

    after_backward(body, 2)


def test_a_wrong_shape_is_refused() -> None:
    def body(model: Any, plain: nn.Module) -> None:
        with pytest.raises(RuntimeError, match=r"size|shape"):
            model.module.blocks[1].weight.grad = torch.ones(2)
        with pytest.raises(RuntimeError):
            model.module.blocks[1].weight.grad.add_(torch.ones(5, 7))

    after_backward(body, 2)


def test_a_model_may_end_before_the_others_reduce() -> None:
    """Its engine waits for the reduction, and must let the other threads arrive meanwhile."""
    base = built(Mlp)

    def run() -> None:
        model = hs.DistributedModel(copy.deepcopy(base), backward_passes_per_step=2)
        if hs.rank() == 1:  # Late with what it reduces last.
            model.module.first.weight.register_hook(lambda _: time.sleep(0.3))
        loss = model(torch.ones(3, HIDDEN)).sum()
        loss.backward()
        del loss, model
        gc.collect()

    run_ranks(run, 2, sharded_data_parallel_degree=2, timeout_s=20.0)


def test_handles_keep_nothing_alive() -> None:
    base = built(Mlp)

    def run() -> Any:
        model = hs.DistributedModel(copy.deepcopy(base))
        model(torch.ones(3, HIDDEN)).sum().backward()
        engine, grad = weakref.ref(model._engine), model.module.first.weight.grad
        del model
        gc.collect()
        assert engine() is None
        with pytest.raises(hs.ShardedError, match="deleted"):
            grad.full()

    run_ranks(run, 2, sharded_data_parallel_degree=2)


def test_sum_norms_of_pieces() -> None:
    whole = torch.arange(-4.0, 8.0)

    def run() -> None:
        group = hs.current().groups.sharding
        piece = whole[hs.rank() * 6 : hs.rank() * 6 + 6].double()
        for order in (0.0, 1.0, 2.0, float("inf")):
            (found,) = sum_norms([piece], order, group)
            assert float(found) == pytest.approx(float(torch.linalg.vector_norm(whole, order)))

    run_ranks(run, 2, sharded_data_parallel_degree=2)


def test_full_grad_is_the_worlds_mean() -> None:
    def check(model: Any, plain: nn.Module) -> None:
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            full = hs.full_grad(mine)
            assert full is not None and torch.allclose(full, other.grad, atol=1e-6)
            assert not isinstance(full, ShardedGrad)
        model.zero_grad()
        assert hs.full_grad(next(model.parameters())) is None

    after_backward(check)


def test_full_grad_names_what_has_none() -> None:
    def run() -> None:
        module = built(Mlp)
        module.first.requires_grad_(False)
        model = hs.DistributedModel(module)
        with pytest.raises(hs.ConfigError, match=r"parameter 'first\.weight' is frozen"):
            hs.full_grad(module.first.weight)
        with pytest.raises(hs.ConfigError, match="belongs to no DistributedModel"):
            hs.full_grad(nn.Parameter(torch.ones(1)))
        # A gradient on one rank only is everyone's.
        if hs.rank() == 0:
            model(torch.ones(1, HIDDEN)).sum().backward()
        else:
            (model(torch.ones(1, HIDDEN)) * 0).sum().backward()
        assert hs.full_grad(module.last.weight) is not None

    run_ranks(run, 2, sharded_data_parallel_degree=2)
