"""``hs.Precision``: dtypes of computation and reduction, overrides, loss scaling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks
from torch import nn

from tests.python.parity.models import GPT, HIDDEN, VOCABULARY, Mlp
from tests.python.parity.test_exact import integers, sgd

BF16 = hs.Precision(param_dtype=torch.bfloat16)
STEPS = 4


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(100 * step + rank))


def base_model(build: Callable[[], nn.Module] = Mlp) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return build()


def plain_mixed(base: nn.Module, world: int, cast: Callable[[nn.Module], nn.Module]) -> Any:
    """Losses by step and rank, and the masters at the end: one process, fp32 masters."""
    masters, compute = copy.deepcopy(base), cast(copy.deepcopy(base))
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            with torch.no_grad():
                for narrow, wide in zip(compute.parameters(), masters.parameters(), strict=True):
                    narrow.copy_(wide)
            out = compute(rows(step, rank).to(next(compute.parameters()).dtype))
            loss = (out.float() - 1).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
            for narrow, wide in zip(compute.parameters(), masters.parameters(), strict=True):
                if narrow.grad is not None:
                    grad = narrow.grad.float() / world
                    wide.grad = grad if wide.grad is None else wide.grad + grad
                    narrow.grad = None
        optimizer.step()
    return losses, masters.state_dict()


@pytest.mark.parametrize(("world", "degree"), [(1, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computation_is_narrow_and_masters_are_not(
    world: int, degree: int, dtype: torch.dtype
) -> None:
    base = base_model()
    losses, weights = plain_mixed(base, world, lambda module: module.to(dtype))

    def run() -> list[float]:
        precision = hs.Precision(param_dtype=dtype, output_dtype=torch.float32)
        model = hs.DistributedModel(copy.deepcopy(base), precision=precision)
        start = model.state_dict()
        assert all(torch.equal(start[name], value) for name, value in base.state_dict().items())
        assert {p.dtype for p in model.parameters()} == {dtype}
        optimizer = hs.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
        mine = []
        for step in range(STEPS):
            optimizer.zero_grad()
            out = model(rows(step, hs.rank()))
            assert out.dtype == torch.float32
            loss = (out - 1).square().mean()
            loss.backward()
            optimizer.step()
            mine.append(float(loss.detach()))
        for name, value in model.state_dict().items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, weights[name], rtol=2e-3, atol=2e-4)
        return mine

    for rank, mine in enumerate(run_ranks(run, world, sharded_data_parallel_degree=degree)):
        assert mine == pytest.approx(losses[rank::world], rel=2.0**-8)


def test_state_dict_holds_the_digits_of_the_masters() -> None:
    base = base_model()

    def run() -> None:
        model = hs.DistributedModel(copy.deepcopy(base), precision=BF16)
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
        model(rows(0, hs.rank())).float().square().mean().backward()
        optimizer.step()  # Too small a step for bf16 weights.
        saved = model.state_dict()
        assert any(not torch.equal(saved[k], v) for k, v in base.state_dict().items())
        other = hs.DistributedModel(copy.deepcopy(base), precision=BF16)
        other.load_state_dict(saved)
        for name, value in other.state_dict().items():
            assert torch.equal(value, saved[name])
        average = hs.ema(model)
        average.update()
        averaged = average.state_dict()["weights"]
        assert all(torch.equal(averaged[name], value) for name, value in saved.items())

    run_ranks(run, 4, sharded_data_parallel_degree=2)


@pytest.mark.parametrize(
    "overrides",
    [{nn.LayerNorm: torch.float32}, {"*norm*": torch.float32, "h.1.mlp": torch.float64}],
)
def test_overrides(overrides: dict[Any, torch.dtype]) -> None:
    base = base_model(GPT)

    def run() -> None:
        precision = hs.Precision(param_dtype=torch.bfloat16, overrides=overrides)
        model = hs.DistributedModel(copy.deepcopy(base), precision=precision)
        seen: set[torch.dtype] = set()
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                assert module.weight.dtype == torch.float32
                module.register_forward_hook(lambda module, args, out: seen.add(args[0].dtype))
            elif isinstance(module, nn.Embedding):
                assert module.weight.dtype == torch.bfloat16
        optimizer = hs.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        tokens = torch.arange(10).reshape(2, 5) % VOCABULARY
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            out = model(tokens)
            assert out.dtype == torch.bfloat16
            loss = nn.functional.cross_entropy(out.float().flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] - 0.1
        assert seen == {torch.float32}
        assert {v.dtype for v in model.state_dict().values()} == {torch.float32}

    run_ranks(run, 4, sharded_data_parallel_degree=2)


# --- Reduction ---------------------------------------------------------------------------------


def train_integers(precision: hs.Precision, world: int, degree: int, accumulation: int) -> Any:
    """One step: its sums are small integers, exact in every dtype here."""
    task = integers(torch.float32)

    def run() -> tuple[dict[str, torch.Tensor], int, int]:
        model = hs.DistributedModel(
            copy.deepcopy(task.base), backward_passes_per_step=accumulation, precision=precision
        )
        optimizer = hs.DistributedOptimizer(sgd(model.parameters()))
        meter = model.world.meter
        for micro in range(accumulation):
            model.backward(task.loss(model, task.batch(0, micro, hs.rank())))
        optimizer.step()
        counters = meter.counters()
        sent = [
            sum(v for k, v in counters.items() if name in k and k.endswith("/bytes"))
            for name in ("sharding/reduce_scatter", "replication/all_reduce/second_hop")
        ]
        return model.state_dict(), sent[0], sent[1]

    return run_ranks(
        run,
        world,
        sharded_data_parallel_degree=degree,
        simulate_delays_us=200 if accumulation > 1 else 0,
    )


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("world", "degree"), [(2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize(
    "precision",
    [
        hs.Precision(reduce_dtype=torch.bfloat16),
        hs.Precision(reduce_dtype=torch.float16),
        hs.Precision(reduce_dtype=torch.float16, loss_scale=2.0**10),
        hs.Precision(loss_scale=2.0**12),
    ],
)
def test_exact_sums_travel_in_half_of_the_bytes(
    precision: hs.Precision, world: int, degree: int, accumulation: int
) -> None:
    wide = train_integers(hs.Precision(), world, degree, accumulation)
    narrow = train_integers(precision, world, degree, accumulation)
    factor = 1 if precision.reduce_dtype == torch.float32 else 2
    for (weights, *sent), (other, *other_sent) in zip(wide, narrow, strict=True):
        assert all(torch.equal(other[name], value) for name, value in weights.items())
        assert [factor * count for count in other_sent] == sent


def test_a_narrow_reduction_is_near_the_wide_one() -> None:
    base = base_model(GPT)

    def run(reduce_dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = hs.DistributedModel(
            copy.deepcopy(base), precision=hs.Precision(reduce_dtype=reduce_dtype)
        )
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        tokens = (torch.arange(10).reshape(2, 5) + hs.rank()) % VOCABULARY
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        return model.state_dict()

    wide, narrow = (
        run_ranks(run, 4, dtype, sharded_data_parallel_degree=2)[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    differences = [float((wide[name] - narrow[name]).abs().max()) for name in wide]
    assert 0 < max(differences) < 2e-3


# --- Loss scaling ------------------------------------------------------------------------------


class Small(nn.Module):
    """Gradients that fp16 cannot hold without a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("loss_scale", [None, 2.0**14, "dynamic"])
def test_small_gradients_survive(loss_scale: Any) -> None:
    base = base_model(Small)

    def run() -> float:
        precision = hs.Precision(
            param_dtype=torch.float16, loss_scale=loss_scale, output_dtype=torch.float32
        )
        model = hs.DistributedModel(copy.deepcopy(base), precision=precision)
        model.backward(model(torch.ones(2, 4)).sum() * 1e-9)
        grad = hs.full_grad(model.layer.weight)
        assert grad is not None
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e6))
        before = model.state_dict()["layer.weight"]
        optimizer.step()
        return float((before - model.state_dict()["layer.weight"]).mean())

    for moved in run_ranks(run, 2, sharded_data_parallel_degree=2):
        assert moved == (0.0 if loss_scale is None else pytest.approx(2e-3, rel=1e-2))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(("world", "degree"), [(1, 1), (4, 2), (4, 4)])
def test_one_ranks_overflow_skips_the_step_of_all(world: int, degree: int, bad: float) -> None:
    base = base_model()

    def run() -> list[float]:
        model = hs.DistributedModel(
            copy.deepcopy(base), precision=hs.Precision(loss_scale="dynamic")
        )
        scaler = model.loss_scaler
        assert scaler is not None
        scaler.growth_interval = 3
        torch_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(torch_optimizer, 1)
        optimizer = hs.DistributedOptimizer(torch_optimizer)
        scales = []
        for step in range(8):
            before = model.state_dict()
            optimizer.zero_grad()
            loss = model(rows(step, hs.rank())).square().mean()
            overflows = step == 1
            model.backward(loss * bad if overflows and hs.rank() == hs.size() - 1 else loss)
            optimizer.step()
            schedule.step()
            after = model.state_dict()
            same = all(torch.equal(before[name], value) for name, value in after.items())
            assert same == overflows
            scales.append(scaler.scale)
        assert scaler.num_skipped_steps == 1
        saved = optimizer.state_dict()
        assert saved["loss_scaler"]["scale"] == scaler.scale
        assert {float(s["step"]) for s in saved["state"].values()} == {7.0}
        scaler.scale = 1.0
        optimizer.load_state_dict(saved)
        assert scaler.scale == scales[-1]
        scaler.scale, scaler.is_dynamic = 1.0, False
        optimizer.load_state_dict(saved)
        assert scaler.scale == 1.0  # A fixed one is the program's.
        return scales

    first = 2.0**16
    wanted = [first, first / 2, first / 2, first / 2, first, first, first, 2 * first]
    for scales in run_ranks(run, world, sharded_data_parallel_degree=degree):
        assert scales == wanted


def test_a_loss_that_was_not_scaled_is_refused() -> None:
    def run() -> None:
        model = hs.DistributedModel(Mlp(), precision=hs.Precision(loss_scale=8.0))
        first = hs.DistributedOptimizer(torch.optim.SGD(model.first.parameters(), lr=0.1))
        second = hs.DistributedOptimizer(torch.optim.SGD(model.last.parameters(), lr=0.1))
        model(rows(0, 0)).sum().backward()
        with pytest.raises(hs.ConfigError, match=r"call model\.backward\(loss\)"):
            first.step()
        model.zero_grad()
        model.backward(model(rows(0, 0)).sum())
        first.step()
        second.step()
        with pytest.raises(hs.ConfigError, match="no loss was scaled"):
            first.step()

    run_ranks(run, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"param_dtype": torch.int32}, "param_dtype=torch.int32; legal: torch.float32"),
        ({"param_dtype": "bf16"}, "param_dtype='bf16'"),
        ({"reduce_dtype": torch.float64}, "reduce_dtype=torch.float64"),
        ({"reduce_dtype": None}, "reduce_dtype=None"),
        ({"overrides": {3: torch.float32}}, "neither a module class nor a name pattern"),
        ({"overrides": {"h.*": None}}, r"overrides\['h.\*'\]=None"),
        ({"loss_scale": 0.0}, "loss_scale=0.0; legal: a number > 0"),
        ({"loss_scale": "auto"}, "loss_scale='auto'"),
        ({"initial_loss_scale": float("inf")}, "initial_loss_scale=inf"),
    ],
)
def test_what_is_not_possible(options: Any, text: str) -> None:
    with pytest.raises(hs.ConfigError, match=text):
        hs.Precision(**options)


def test_state_of_any_optimizer_is_as_wide_as_the_masters() -> None:
    def run() -> None:
        model = hs.DistributedModel(Mlp(), precision=BF16)
        optimizer = hs.DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
        model(rows(0, hs.rank())).float().sum().backward()
        optimizer.step()
        sums = [state["sum"] for state in optimizer.state_dict()["state"].values()]
        assert {value.dtype for value in sums} == {torch.float32}

    run_ranks(run, 2, sharded_data_parallel_degree=2)


def test_what_does_not_fit_the_model() -> None:
    def run() -> None:
        wrong: dict[Any, str] = {nn.Conv2d: "matches no module", "no.such*": "matches no module"}
        for key, text in wrong.items():
            with pytest.raises(hs.ConfigError, match=text):
                hs.DistributedModel(Mlp(), precision=hs.Precision(overrides={key: torch.float32}))
        with pytest.raises(hs.ConfigError, match="another module that shares it"):
            hs.DistributedModel(
                GPT(tied=True),
                precision=hs.Precision(
                    param_dtype=torch.bfloat16, overrides={nn.Embedding: torch.float32}
                ),
            )
        wrong_type: Any = torch.bfloat16
        with pytest.raises(hs.ConfigError, match=r"takes a hopshard\.Precision"):
            hs.DistributedModel(Mlp(), precision=wrong_type)

    run_ranks(run, 1)


def test_ranks_with_different_precision_are_told() -> None:
    def run() -> None:
        dtype = torch.bfloat16 if hs.rank() == 1 else torch.float16
        hs.DistributedModel(Mlp(), precision=hs.Precision(param_dtype=dtype))

    with pytest.raises(hs.ConfigError, match="precision"):
        run_ranks(run, 2)
