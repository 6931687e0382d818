"""The fused kernels against torch.optim, bit by bit, and the norms against exact sums.

Single-tensor torch optimizers (``foreach=False, fused=False``) are the reference. Two things keep
bits apart, and both are pinned down here: torch's square root comes from MKL and is off by one unit
in the last place for a fifth of all fp32 values, ours is correctly rounded; and kernels and torch
contract the same multiply-adds only where torch runs its AVX2 or AVX-512 kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hopshard import _C

NUM_STEPS = 20
DTYPES = [torch.float32, torch.float64]
# Below, at and above vector widths, with tails.
SIZES = [0, 1, 3, 7, 8, 15, 31, 64, 1001, 10_007]
TORCH_CONTRACTS = torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}

GradMaker = Callable[[int, torch.dtype, torch.Generator], torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many tiny kernels: waking threads would take most of the time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def random_grad(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Gradients over many orders of magnitude, some exactly zero."""
    values = torch.randn(numel, dtype=dtype, generator=generator)
    exponents = torch.randint(-12, 4, (numel,), generator=generator)
    keep = torch.rand(numel, generator=generator) > 0.05
    return torch.ldexp(values, exponents) * keep


def integer_grad(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-4, 5, (numel,), generator=generator).to(dtype)


def assert_same(ours: torch.Tensor, reference: torch.Tensor, what: str) -> None:
    reference = reference.detach()
    if TORCH_CONTRACTS:
        # The sign of a zero may differ: in torch it depends on the place within a vector.
        different = (ours != reference) & ~(ours.isnan() & reference.isnan())
        assert not different.any(), f"{what}: {int(different.sum())} of {ours.numel()} differ"
    else:
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def rounded_sqrt(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sqrt(values.numpy()))


def lr_of(step: int, base: float) -> float:
    """A schedule that really changes, with warm-up from 0."""
    return base * (step - 1) / 3 if step < 4 else base * (1 + math.cos(step / 7)) / 2


def run_adam(
    numel: int,
    dtype: torch.dtype,
    make_grad: GradMaker,
    *,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decoupled: bool = True,
    maximize: bool = False,
    grad_scale: float = 1.0,
    compare_master: Callable[[torch.Tensor, torch.Tensor, str], None] = assert_same,
) -> None:
    generator = torch.Generator().manual_seed(numel + 17)
    parameter = torch.nn.Parameter(torch.randn(numel, dtype=dtype, generator=generator))
    optimizer_type = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = optimizer_type(
        [parameter],
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
        foreach=False,
        fused=False,
    )
    settings = _C.AdamSettings(
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled,
        maximize=maximize,
    )
    master = parameter.detach().clone()
    exp_avg = torch.zeros_like(master)
    exp_avg_sq = torch.zeros_like(master)
    for step in range(1, NUM_STEPS + 1):
        grad = make_grad(numel, dtype, generator)
        parameter.grad = grad * grad_scale
        optimizer.param_groups[0]["lr"] = settings.lr = lr_of(step, lr)
        optimizer.step()
        _C.adam_step(master, grad, exp_avg, exp_avg_sq, settings, step, grad_scale)
        state = optimizer.state[parameter]
        assert_same(exp_avg, state["exp_avg"], f"exp_avg at step {step}")
        assert_same(exp_avg_sq, state["exp_avg_sq"], f"exp_avg_sq at step {step}")
        compare_master(master, parameter, f"master at step {step}")


@pytest.fixture
def torch_rounds_sqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim as it is, with a correctly rounded square root."""
    monkeypatch.setattr(torch.Tensor, "sqrt", rounded_sqrt)


@pytest.mark.usefixtures("torch_rounds_sqrt")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make_grad", [random_grad, integer_grad])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("numel", SIZES)
def test_adam_equals_torch_at_every_size(
    numel: int, decoupled: bool, make_grad: GradMaker, dtype: torch.dtype
) -> None:
    run_adam(numel, dtype, make_grad, decoupled=decoupled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_with_torchs_own_sqrt(decoupled: bool, dtype: torch.dtype) -> None:
    """Coupled decay feeds a differing master back into the moments, so there it is left out."""
    eps = torch.finfo(dtype).eps
    worst = 0.0

    def compare(ours: torch.Tensor, reference: torch.Tensor, what: str) -> None:
        nonlocal worst
        # One unit of sqrt moves an update by 2 eps; masters are of size 1, steps of 1e-2.
        difference = (ours - reference.detach()).abs() / reference.detach().abs().clamp(min=0.1)
        worst = max(worst, float(difference.max()))

    weight_decay = 0.1 if decoupled else 0.0
    for make_grad in (random_grad, integer_grad):
        run_adam(
            20_001,
            dtype,
            make_grad,
            decoupled=decoupled,
            weight_decay=weight_decay,
            compare_master=compare,
        )
    assert worst <= 3 * eps


@pytest.mark.usefixtures("torch_rounds_sqrt")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_equals_torch_for_all_settings(decoupled: bool, dtype: torch.dtype) -> None:
    # beta1 below and at 0.5 takes the other branch of lerp.
    choices = itertools.product(
        [(0.9, 0.999), (0.95, 0.95), (0.5, 0.9), (0.3, 0.8), (0.0, 0.99)],
        [0.0, 0.01, 0.5],
        [1e-8, 1e-3],
        [False, True],
        [1.0, 0.3173],
    )
    for betas, weight_decay, eps, maximize, grad_scale in choices:
        run_adam(
            203,
            dtype,
            random_grad,
            betas=betas,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
            grad_scale=grad_scale,
            decoupled=decoupled,
        )


def test_adam_keeps_infinities_where_torch_does() -> None:
    """Without decay, an infinite weight must not reach the moments as NaN."""
    settings = _C.AdamSettings(weight_decay=0.0, decoupled_weight_decay=False)
    master = torch.tensor([math.inf, 1.0])
    moments = torch.zeros(2), torch.zeros(2)
    _C.adam_step(master, torch.ones(2), *moments, settings, 1)
    assert torch.isfinite(moments[0]).all()
    assert master[0] == math.inf


def run_sgd(numel: int, dtype: torch.dtype, make_grad: GradMaker, **flags: Any) -> None:
    grad_scale = flags.pop("grad_scale", 1.0)
    generator = torch.Generator().manual_seed(numel + 23)
    parameter = torch.nn.Parameter(torch.randn(numel, dtype=dtype, generator=generator))
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=False, fused=False, **flags)
    settings = _C.SgdSettings(**flags)
    has_momentum = settings.momentum != 0
    master = parameter.detach().clone()
    # Garbage, because the first step must overwrite it.
    buffer = torch.full_like(master, math.nan) if has_momentum else None
    for step in range(1, NUM_STEPS + 1):
        grad = make_grad(numel, dtype, generator)
        parameter.grad = grad * grad_scale
        optimizer.param_groups[0]["lr"] = settings.lr = lr_of(step, 0.1)
        optimizer.step()
        _C.sgd_step(master, grad, buffer, settings, step == 1, grad_scale)
        if buffer is not None:
            reference = optimizer.state[parameter]["momentum_buffer"]
            assert_same(buffer, reference, f"momentum_buffer at step {step}")
        assert_same(master, parameter, f"master at step {step}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make_grad", [random_grad, integer_grad])
@pytest.mark.parametrize("numel", SIZES)
def test_sgd_equals_torch_at_every_size(
    numel: int, make_grad: GradMaker, dtype: torch.dtype
) -> None:
    run_sgd(numel, dtype, make_grad, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sgd_equals_torch_for_all_settings(dtype: torch.dtype) -> None:
    choices = itertools.product(
        [0.0, 0.9], [0.0, 0.25], [0.0, 0.1], [False, True], [False, True], [1.0, 0.3173]
    )
    for momentum, dampening, weight_decay, nesterov, maximize, grad_scale in choices:
        if nesterov and (momentum == 0 or dampening != 0):
            continue  # torch refuses these, and so do we: test_bad_arguments.
        run_sgd(
            203,
            dtype,
            random_grad,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            grad_scale=grad_scale,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_cutting_a_range_changes_no_bit(dtype: torch.dtype) -> None:
    """Shards of any degree hold the bits of the whole, so degrees are comparable exactly."""
    generator = torch.Generator().manual_seed(5)
    settings = _C.AdamSettings(lr=1e-2, weight_decay=0.1)
    state = [torch.rand(1003, dtype=dtype, generator=generator) for _ in range(4)]
    whole = [tensor.clone() for tensor in state]
    _C.adam_step(*whole, settings, 3)
    for cut in (1, 5, 8, 16, 500, 1002):
        parts = [tensor.clone() for tensor in state]
        _C.adam_step(*[tensor[:cut] for tensor in parts], settings, 3)
        _C.adam_step(*[tensor[cut:] for tensor in parts], settings, 3)
        for part, expected in zip(parts, whole, strict=True):
            assert torch.equal(part, expected), f"cut at {cut}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 5, 16, 1023, 1024, 1025, 5000, 300_001])
def test_sums_are_exact_for_integers_and_accurate_otherwise(numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numel)
    integers = torch.randint(-9, 10, (numel,), generator=generator)
    values = integers.to(dtype)
    assert _C.sum_of_squares(values) == int((integers**2).sum())
    assert _C.power_sum(values, 1) == int(integers.abs().sum())
    assert _C.power_sum(values, 2) == int((integers**2).sum())
    assert _C.power_sum(values, 3) == int((integers.abs() ** 3).sum())
    assert _C.power_sum(values, 0) == int((integers != 0).sum())
    assert _C.abs_max(values) == int(integers.abs().max())

    wild = random_grad(numel, dtype, generator)
    exact = math.fsum(float(x) * float(x) for x in wild.tolist())
    assert _C.sum_of_squares(wild) == pytest.approx(exact, rel=1e-14)
    assert _C.power_sum(wild, 2.5) == pytest.approx(
        math.fsum(abs(x) ** 2.5 for x in wild.tolist()), rel=1e-13
    )
    assert _C.abs_max(wild) == float(wild.abs().max())


def test_sum_of_squares_keeps_what_fp32_sums_lose() -> None:
    values = torch.full((4_000_001,), 1e-4)
    values[0] = 1e4
    small = Fraction(float(values[1]))
    exact = float(Fraction(float(values[0])) ** 2 + 4_000_000 * small**2)
    assert _C.sum_of_squares(values) == pytest.approx(exact, rel=1e-14)
    assert _C.sum_of_squares(torch.full((3,), 3e38)) == pytest.approx(2.7e77, rel=1e-6)


def test_sums_do_not_depend_on_padding() -> None:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    padded = torch.cat([values, torch.zeros(96)])
    assert _C.sum_of_squares(padded) == _C.sum_of_squares(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("numel", [1, 7, 16, 17, 100, 2049])
def test_non_finite_values_are_found_anywhere(numel: int, bad: float, dtype: torch.dtype) -> None:
    values = torch.full((numel,), torch.finfo(dtype).max, dtype=dtype)
    assert _C.all_finite(values)
    for place in {0, numel // 2, numel - 1}:
        broken = values.clone()
        broken[place] = bad
        assert not _C.all_finite(broken)
        expected = math.nan if math.isnan(bad) else math.inf
        assert _C.abs_max(broken) == pytest.approx(expected, nan_ok=True)


def test_empty_values() -> None:
    empty = torch.empty(0)
    assert _C.sum_of_squares(empty) == 0
    assert _C.power_sum(empty, 3) == 0
    assert _C.abs_max(empty) == 0
    assert _C.all_finite(empty)


def test_merge_swallows_padding_but_no_skipped_parameter() -> None:
    segment = _C.Segment
    skipped = _C.Segment.SKIPPED
    assert _C.merge_segments([segment(0, 40, 0, 7), segment(64, 67, 0, 7)]) == [
        segment(0, 67, 0, 7)
    ]
    assert _C.merge_segments(
        [segment(0, 40, 0, 7), segment(64, 67, skipped), segment(96, 99, 0, 7)]
    ) == [segment(0, 40, 0, 7), segment(96, 99, 0, 7)]
    assert _C.merge_segments(
        [segment(0, 40, 0, 7), segment(64, 67, 0, 7)], swallow_padding=False
    ) == [segment(0, 40, 0, 7), segment(64, 67, 0, 7)]
    with pytest.raises(_C.InvalidArgument, match="ends at 40"):
        _C.merge_segments([segment(0, 40), segment(39, 67)])


@pytest.mark.usefixtures("torch_rounds_sqrt")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_shard_update_equals_torch_with_groups_ages_and_skips(
    eps: float, dtype: torch.dtype
) -> None:
    """An arena of five parameters in two groups, of which some have no gradient in some steps."""
    offsets, numels, groups = [0, 64, 96, 160, 192], [40, 3, 50, 1, 32], [0, 0, 1, 1, 0]
    generator = torch.Generator().manual_seed(9)
    arena = torch.zeros(256, dtype=dtype)
    parameters = []
    for offset, numel in zip(offsets, numels, strict=True):
        arena[offset : offset + numel] = torch.randn(numel, dtype=dtype, generator=generator)
        parameters.append(torch.nn.Parameter(arena[offset : offset + numel].clone()))
    by_group = [[p for p, g in zip(parameters, groups, strict=True) if g == i] for i in (0, 1)]
    flags: dict[str, Any] = {"foreach": False, "fused": False, "eps": eps}
    optimizer = torch.optim.AdamW(
        [
            {"params": by_group[0], "lr": 1e-2, "weight_decay": 0.1},
            {"params": by_group[1], "lr": 3e-3, "weight_decay": 0.0},
        ],
        **flags,
    )
    settings = [
        _C.AdamSettings(lr=1e-2, weight_decay=0.1, eps=eps),
        _C.AdamSettings(lr=3e-3, weight_decay=0.0, eps=eps),
    ]
    exp_avg, exp_avg_sq = torch.zeros_like(arena), torch.zeros_like(arena)
    ages = [0] * len(parameters)
    for step in range(NUM_STEPS):
        grad = torch.zeros_like(arena)
        segments = []
        for index, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
            is_skipped = (step + index) % 4 == 0
            parameters[index].grad = None
            if not is_skipped:
                ages[index] += 1
                values = 1 + torch.rand(numel, dtype=dtype, generator=generator)
                grad[offset : offset + numel] = values
                parameters[index].grad = values
            group = _C.Segment.SKIPPED if is_skipped else groups[index]
            segments.append(_C.Segment(offset, offset + numel, group, max(ages[index], 1)))
        optimizer.step()
        update = _C.ShardUpdate(arena.numel(), segments)
        update.adam(arena, grad, exp_avg, exp_avg_sq, settings)
        for offset, parameter in zip(offsets, parameters, strict=True):
            assert_same(arena[offset : offset + parameter.numel()], parameter, f"step {step}")
    is_padding = torch.ones(256, dtype=torch.bool)
    for offset, numel in zip(offsets, numels, strict=True):
        is_padding[offset : offset + numel] = False
    for tensor in (arena, exp_avg, exp_avg_sq):
        assert torch.count_nonzero(tensor[is_padding]) == 0


def test_shard_update_sgd_starts_momentum_per_segment() -> None:
    settings = [_C.SgdSettings(lr=1.0, momentum=0.5)]
    master, buffer = torch.zeros(64), torch.full((64,), 8.0)
    update = _C.ShardUpdate(64, [_C.Segment(0, 32, 0, 1), _C.Segment(32, 64, 0, 2)])
    assert len(update.passes) == 2
    update.sgd(master, torch.ones(64), buffer, settings)
    assert buffer[:32].eq(1).all()
    assert buffer[32:].eq(5).all()
    assert torch.equal(master, -buffer)


def test_a_steady_step_is_one_pass_per_run_of_a_group() -> None:
    segments = [_C.Segment(64 * i, 64 * i + 40, int(i >= 50), 12) for i in range(100)]
    update = _C.ShardUpdate(6400, segments)
    assert update.passes == [_C.Segment(0, 3176, 0, 12), _C.Segment(3200, 6376, 1, 12)]


def test_writes_are_visible_to_autograd() -> None:
    """A tensor that autograd saved must not be changed behind its back."""
    master = torch.ones(4)
    factor = torch.ones(4, requires_grad=True)
    product = (master * factor).sum()
    _C.sgd_step(master, torch.ones(4), None, _C.SgdSettings(lr=0.1), True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_bad_arguments_name_the_tensor() -> None:
    settings = _C.AdamSettings()
    good = [torch.zeros(4) for _ in range(4)]
    names = ["master", "grad", "exp_avg", "exp_avg_sq"]
    bad_tensors = {
        "1-D": torch.zeros(2, 2),
        "not contiguous": torch.zeros(8)[::2],
        "float16|Half": torch.zeros(4, dtype=torch.float16),
        "CPU": torch.zeros(4, device="meta"),
        "dense": torch.zeros(4).to_sparse(),
    }
    for (index, name), (text, bad) in itertools.product(enumerate(names), bad_tensors.items()):
        arguments = [*good[:index], bad, *good[index + 1 :]]
        with pytest.raises(_C.InvalidArgument, match=f"adam_step: {name} .*({text})"):
            _C.adam_step(*arguments, settings, 1)
    with pytest.raises(_C.InvalidArgument, match="exp_avg 3"):
        _C.adam_step(good[0], good[1], torch.zeros(3), good[3], settings, 1)
    with pytest.raises(_C.InvalidArgument, match="exp_avg_sq is Double"):
        _C.adam_step(*good[:3], torch.zeros(4, dtype=torch.float64), settings, 1)
    with pytest.raises(_C.InvalidArgument, match="first step is 1"):
        _C.adam_step(*good, settings, 0)
    with pytest.raises(_C.InvalidArgument, match="momentum_buffer 0"):
        _C.sgd_step(good[0], good[1], None, _C.SgdSettings(momentum=0.9), True)
    with pytest.raises(_C.InvalidArgument, match="nesterov"):
        _C.sgd_step(*good[:3], _C.SgdSettings(momentum=0.9, dampening=0.1, nesterov=True), True)
    with pytest.raises(_C.InvalidArgument, match="p must be finite"):
        _C.power_sum(good[0], math.inf)
    with pytest.raises(_C.InvalidArgument, match="outside an arena of 32"):
        _C.ShardUpdate(32, [_C.Segment(0, 33)])
    update = _C.ShardUpdate(4, [_C.Segment(0, 4, group=1)])
    with pytest.raises(_C.InvalidArgument, match="group 1, but there are settings for 1"):
        update.adam(*good, [settings])
    with pytest.raises(_C.InvalidArgument, match="grad has 5 elements, the arena 4"):
        update.adam(good[0], torch.zeros(5), good[2], good[3], [settings, settings])
    assert all(torch.count_nonzero(tensor) == 0 for tensor in good)
