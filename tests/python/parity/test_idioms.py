"""What plain training scripts do with gradients, optimizers and schedulers gives plain results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hopshard as hs
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.python.parity.harness import OPTIMIZERS, Rank, assert_same, cloned
from tests.python.parity.models import Mlp


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return Mlp()


def backward(rank: Rank, step: int, factor: float = 1.0) -> torch.Tensor:
    loss = (rank.model(rank.batch(step)) - 1).square().mean() * factor
    loss.backward()
    rank.sync()
    return loss.detach()


def with_gradients(change: Callable[[Rank], Any]) -> Callable[[Rank], None]:
    """A training loop with something between backward and step."""

    def script(rank: Rank) -> None:
        for step in range(3):
            rank.optimizer.zero_grad()
            backward(rank, step)
            seen = change(rank)
            rank.optimizer.step()
            rank.record(*([] if seen is None else [seen]))

    return script


# --- clipping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("limit", [0.01, 100.0])
@pytest.mark.parametrize("order", [2.0, float("inf"), 1.0])
def test_clip_grad_norm_of_torch(order: float, limit: float, foreach: bool | None) -> None:
    def clip(rank: Rank) -> float:
        return float(clip_grad_norm_(rank.model.parameters(), limit, order, foreach=foreach))

    assert_same(with_gradients(clip), mlp())


@pytest.mark.parametrize("order", [2.0, float("inf"), 1.0])
def test_clip_grad_norm_of_the_optimizer(order: float) -> None:
    def clip(rank: Rank) -> float:
        if rank.is_sharded:
            return float(rank.optimizer.clip_grad_norm_(0.01, order))
        return float(clip_grad_norm_(rank.model.parameters(), 0.01, order))

    assert_same(with_gradients(clip), mlp())


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_gradient_clipping_of_the_configuration(optimizer: str) -> None:
    def clip(rank: Rank) -> None:
        if not rank.is_sharded:
            clip_grad_norm_(rank.model.parameters(), 0.01)

    assert_same(with_gradients(clip), mlp(), optimizer=optimizer, gradient_clipping=0.01)


def test_clipping_of_some_parameters() -> None:
    def clip(rank: Rank) -> float:
        return float(clip_grad_norm_(rank.module.blocks[1].parameters(), 0.001))

    assert_same(with_gradients(clip), mlp())


@pytest.mark.parametrize("foreach", [None, False])
def test_clip_grad_value(foreach: bool | None) -> None:
    def clip(rank: Rank) -> None:
        clip_grad_value_(rank.model.parameters(), 1e-3, foreach=foreach)

    assert_same(with_gradients(clip), mlp())


def test_non_finite_norm_is_an_error_where_asked() -> None:
    def script(rank: Rank) -> None:
        backward(rank, 0, float("inf") if rank.rank == rank.size - 1 else 1.0)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(rank.model.parameters(), 1.0, error_if_nonfinite=True)
        rank.record()

    assert_same(script, mlp())


# --- loops over p.grad ----------------------------------------------------------------------------


def _norm_by_hand(rank: Rank) -> float:
    return sum(float(p.grad.norm()) ** 2 for p in rank.model.parameters()) ** 0.5


def _item_by_item(rank: Rank) -> list[float]:
    return [float(p.grad.abs().max()) + p.grad.sum().item() for p in rank.model.parameters()]


def _scale(rank: Rank) -> None:
    for parameter in rank.model.parameters():
        parameter.grad.mul_(0.5)


def _scale_augmented(rank: Rank) -> None:
    for parameter in rank.model.parameters():
        parameter.grad *= 0.5
        parameter.grad.data /= 2


def _clamp_data(rank: Rank) -> None:
    for parameter in rank.model.parameters():
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def _foreach(rank: Rank) -> None:
    torch._foreach_mul_([p.grad for p in rank.model.parameters()], 0.25)


def _add_noise(rank: Rank) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in rank.model.parameters():
        parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def _replace(rank: Rank) -> None:
    for parameter in rank.model.parameters():
        parameter.grad = parameter.grad.clone() * 3


def _drop_one(rank: Rank) -> None:
    rank.module.blocks[1].weight.grad = None


def _print(rank: Rank) -> None:
    for parameter in rank.model.parameters():
        assert str(tuple(parameter.shape)) in repr(parameter.grad) or not rank.is_sharded


def _zero_non_finite(rank: Rank) -> None:
    for parameter in rank.model.parameters():
        if not torch.isfinite(parameter.grad).all():
            parameter.grad.zero_()
        torch.nan_to_num_(parameter.grad)


@pytest.mark.parametrize(
    "change",
    [
        _norm_by_hand,
        _item_by_item,
        _scale,
        _scale_augmented,
        _clamp_data,
        _foreach,
        _add_noise,
        _replace,
        _drop_one,
        _print,
        _zero_non_finite,
    ],
    ids=lambda change: change.__name__.strip("_"),
)
def test_loop_over_gradients(change: Callable[[Rank], Any]) -> None:
    assert_same(with_gradients(change), mlp())


def test_gradient_is_none_until_a_backward() -> None:
    def script(rank: Rank) -> None:
        for step in range(2):
            rank.record([p.grad is None for p in rank.model.parameters()])
            (rank.model(rank.batch(step), [0, 2]) - 1).square().mean().backward()
            rank.sync()
            rank.record([p.grad is None for p in rank.model.parameters()])
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    assert_same(script, mlp())


def test_an_operation_that_needs_the_whole_gradient_in_place_says_so() -> None:
    def script(rank: Rank) -> None:
        backward(rank, 0)
        grad = rank.module.blocks[1].weight.grad
        if rank.is_sharded:
            with pytest.raises(hs.ShardedError, match=r"blocks\.1\.weight"):
                grad.cumsum_(0)
        rank.optimizer.step()
        rank.record()

    assert_same(script, mlp())


# --- GradScaler -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_skips_everywhere_when_one_rank_overflows(
    unscale: bool, optimizer: str
) -> None:
    def script(rank: Rank) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(5):
            rank.optimizer.zero_grad()
            loss = (rank.model(rank.batch(step)) - 1).square().mean()
            if step == 2 and rank.rank == rank.size - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            rank.sync()
            if unscale:
                scaler.unscale_(rank.optimizer)
                clip_grad_norm_(rank.model.parameters(), 0.05)
            scaler.step(rank.optimizer)
            scaler.update()
            rank.record(scaler.get_scale())

    assert_same(script, mlp(), optimizer=optimizer)


# --- schedulers, closures, state ------------------------------------------------------------------


@pytest.mark.parametrize("over_torch_optimizer", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    ],
    ids=["step", "lambda", "one_cycle", "cosine"],
)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.filterwarnings("error")
def test_lr_scheduler(optimizer: str, build: Any, over_torch_optimizer: bool) -> None:
    def script(rank: Rank) -> None:
        scheduler = build(rank.torch_optimizer if over_torch_optimizer else rank.optimizer)
        for step in range(4):
            rank.optimizer.zero_grad()
            backward(rank, step)
            rank.optimizer.step()
            scheduler.step()
            rank.record(scheduler.get_last_lr(), rank.optimizer.param_groups[0]["lr"])

    assert_same(script, mlp(), optimizer=optimizer, worlds=[(4, 2, 2)], tolerance=1e-5)


def test_closure() -> None:
    def script(rank: Rank) -> None:
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                rank.optimizer.zero_grad()
                return backward(rank, step)

            rank.record(float(rank.optimizer.step(closure)))

    assert_same(script, mlp())


MORE_OPTIMIZERS = {
    **OPTIMIZERS,
    "adam_decay": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-4, weight_decay=0.1),
    "adam_maximize": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-4, maximize=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4, amsgrad=True),
    "sgd_plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-4),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3, eps=1e-4),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3, eps=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-1, eps=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


def _train_and_keep_state(rank: Rank, steps: int = 3) -> None:
    for step in range(steps):
        rank.optimizer.zero_grad()
        (rank.model(rank.batch(step), [0, 2]) - 1).square().mean().backward()
        rank.step()
    rank.record(rank.optimizer.state_dict())


@pytest.mark.parametrize("optimizer", list(MORE_OPTIMIZERS))
def test_state_dict_is_torchs(optimizer: str) -> None:
    """With a block that never gets a gradient, whose state torch does not make either."""
    assert_same(
        _train_and_keep_state,
        mlp(),
        optimizer=MORE_OPTIMIZERS[optimizer],
        worlds=[(1, 1, None), (4, 2, 2)],
        tolerance=2e-5,
    )


@pytest.mark.parametrize("optimizer", list(MORE_OPTIMIZERS))
def test_state_survives_a_round_trip(optimizer: str) -> None:
    def script(rank: Rank) -> None:
        _train_and_keep_state(rank)
        kept = rank.model.state_dict(), rank.optimizer.state_dict()
        if not rank.is_sharded:  # Torch hands out the live tensors.
            kept = cloned(kept)
        _train_and_keep_state(rank)
        rank.model.load_state_dict(kept[0])
        rank.optimizer.load_state_dict(kept[1])
        rank.record(rank.optimizer.state_dict())
        _train_and_keep_state(rank)

    assert_same(
        script,
        mlp(),
        optimizer=MORE_OPTIMIZERS[optimizer],
        worlds=[(4, 2, 2)],
        tolerance=2e-5,
    )


def test_parameter_groups() -> None:
    def build(parameters: Any) -> torch.optim.Optimizer:
        everything = list(parameters)
        return torch.optim.AdamW(
            [
                {"params": [p for p in everything if p.dim() > 1], "weight_decay": 0.2},
                {"params": [p for p in everything if p.dim() <= 1], "lr": 1e-2},
            ],
            lr=3e-3,
            eps=1e-4,
            weight_decay=0.0,
        )

    assert_same(_train_and_keep_state, mlp(), optimizer=build)


def test_optimizer_over_a_part_of_the_model() -> None:
    def build(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters)[::2], lr=0.1, momentum=0.9)

    assert_same(_train_and_keep_state, mlp(), optimizer=build)


# --- accumulation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("of_model", [False, True])
def test_accumulate(of_model: bool) -> None:
    def script(rank: Rank) -> None:
        from contextlib import nullcontext

        for step in range(3):
            rank.optimizer.zero_grad()
            for micro in range(3):
                hold: Any = nullcontext()
                if rank.is_sharded and micro < 2:
                    hold = rank.model.accumulate() if of_model else hs.accumulate()
                with hold:
                    (rank.model(rank.batch(step + 50 * micro)) - 1).square().mean().backward()
            rank.step()
            rank.record()

    assert_same(script, mlp())


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_step_function_with_micro_batches(num_microbatches: int) -> None:
    def script(rank: Rank) -> None:
        def body(rows: torch.Tensor, targets: list[torch.Tensor]) -> torch.Tensor:
            loss = (rank.model(rows) - targets[0]).square().mean()
            if rank.is_sharded:
                rank.model.backward(loss)
            else:
                loss.backward()
            return loss

        train_step = hs.step(body) if rank.is_sharded else body
        for step in range(3):
            rank.optimizer.zero_grad()
            rows = rank.batch(step, rows=8)
            loss = train_step(rows, [rows[:, :2].sin()])
            if rank.is_sharded:
                assert len(loss.outputs) == num_microbatches
                loss = loss.reduce_mean()
            rank.step()
            rank.record(float(loss.detach()))

    assert_same(script, mlp(), microbatches=num_microbatches)
