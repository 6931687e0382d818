"""Things that plain scripts do and that would be lost or go wrong without a word on slices."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks
from torch import nn

WIDTH = 8


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def rows() -> torch.Tensor:
    return torch.arange(3 * WIDTH).reshape(3, WIDTH) / WIDTH


def on_ranks(build: Callable[[], nn.Module], body: Callable[[Any], Any], n: int = 2) -> list[Any]:
    base = build()

    def run() -> Any:
        return body(hs.DistributedModel(copy.deepcopy(base)))

    return run_ranks(run, n, sharded_data_parallel_degree=2)


def sgd(model: Any) -> hs.DistributedOptimizer:
    return hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


class Clamping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_change_in_place_inside_a_forward() -> None:
    def build() -> nn.Module:
        model = Two()
        model.blocks[0] = Clamping(WIDTH, WIDTH)
        return model

    def body(model: Any) -> None:
        with pytest.raises(hs.ShardedError, match=r"blocks\.0\.weight.*changed in place"):
            model(rows())
        # Nothing is left behind: the next forward reports it again.
        with pytest.raises(hs.ShardedError, match="changed in place"):
            model(rows())

    on_ranks(build, body)


def test_embedding_max_norm_changes_weights_in_forward() -> None:
    def body(model: Any) -> None:
        with pytest.raises(hs.ShardedError, match="max_norm"):
            model(torch.arange(6))

    on_ranks(lambda: nn.Sequential(nn.Embedding(20, WIDTH, max_norm=0.5)), body)


def test_shapes_and_dtypes_inside_unshard() -> None:
    def body(model: Any) -> None:
        weight = model.module.blocks[0].weight
        before = model.state_dict()["blocks.0.weight"]
        for wrong in (torch.zeros(3, 3), torch.zeros(WIDTH, WIDTH, dtype=torch.float64)):
            with (
                pytest.raises(hs.ConfigError, match=r"blocks\.0\.weight"),
                hs.unshard(model.module.blocks[0]),
            ):
                weight.data = wrong
        assert torch.equal(model.state_dict()["blocks.0.weight"], before)
        model(rows()).sum().backward()

    on_ranks(Two, body)


def test_the_data_of_a_sharded_gradient() -> None:
    def body(model: Any) -> None:
        model(rows()).sum().backward()
        with pytest.raises(hs.ShardedError, match=r"blocks\.1\.bias"):
            model.module.blocks[1].bias.grad.data = torch.zeros(WIDTH)

    on_ranks(Two, body)


def test_the_wrapped_optimizer_speaks_for_the_wrapper() -> None:
    def body(model: Any) -> None:
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer = hs.DistributedOptimizer(inner)
        calls = []
        inner.register_step_post_hook(lambda *_: calls.append(1))
        model(rows()).sum().backward()
        optimizer.step()
        state = inner.state_dict()
        assert len(state["state"]) == 4
        assert calls == [1]
        groups = inner.param_groups
        inner.load_state_dict(state)
        assert inner.param_groups is groups  # A scheduler's groups stay live.
        with pytest.raises(hs.ConfigError):
            inner.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(hs.ConfigError, match="already"):
            hs.DistributedOptimizer(optimizer)

    on_ranks(Two, body)


@pytest.mark.parametrize("kind", ["lr", "class"])
def test_ranks_with_other_optimizers(kind: str) -> None:
    def body(model: Any) -> None:
        is_other = hs.rank() == 1
        if kind == "lr":
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2 if is_other else 0.1)
        else:
            made = torch.optim.AdamW if is_other else torch.optim.SGD
            optimizer = made(model.parameters(), lr=0.1)
        with pytest.raises(hs.ConfigError, match=rf"optimizer[\s\S]*{kind}"):
            hs.DistributedOptimizer(optimizer)

    on_ranks(Two, body)


def test_ranks_with_other_buffers() -> None:
    def run() -> None:
        model = Two()
        model.register_buffer("table", torch.zeros(4 + hs.rank()))
        with pytest.raises(hs.ConfigError, match=r"disagree on the model[\s\S]*table"):
            hs.DistributedModel(model)

    run_ranks(run, 2)


@pytest.mark.parametrize("copying", [pickle.dumps, copy.deepcopy])
def test_copies_of_the_model(copying: Callable[[Any], Any]) -> None:
    def body(model: Any) -> None:
        with pytest.raises(hs.ConfigError, match="state_dict"):
            copying(model)

    on_ranks(Two, body)


def test_lazy_modules() -> None:
    def run() -> None:
        with pytest.raises(hs.ConfigError, match="lazy"):
            hs.DistributedModel(nn.Sequential(nn.LazyLinear(4)))

    run_ranks(run, 1)


class Listed(nn.Module):
    """Parameters in containers that have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(WIDTH, WIDTH) for _ in range(3))
        self.named = nn.ParameterDict({"bias": torch.ones(WIDTH)})
        self.grid = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(2)
        )
        self.heads = nn.ModuleList([nn.ModuleDict({"out": nn.Linear(WIDTH, WIDTH)})])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = (x @ weight).tanh()
        for row in self.grid:
            for layer in row:
                x = layer(x)
        return self.heads[0]["out"](x + self.named["bias"])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(0)
        return self.out(self.layer(self.attention(x, x, x)[0]))


@pytest.mark.parametrize(
    "build",
    [
        Listed,
        Attention,
        lambda: nn.LSTM(WIDTH, WIDTH),
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0), 2, enable_nested_tensor=False
        ),
    ],
    ids=["containers", "attention", "lstm", "encoder"],
)
def test_the_default_cut_fits_torchs_own_layers(build: Callable[[], nn.Module]) -> None:
    base = build()

    def loss_of(model: Any) -> torch.Tensor:
        out = model(rows())
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    def body(model: Any) -> tuple[float, float]:
        optimizer = sgd(model)
        first = loss_of(model)
        first.backward()
        optimizer.step()
        with torch.no_grad():
            return first.item(), loss_of(model.eval()).item()

    plain = copy.deepcopy(base)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    first = loss_of(plain)
    first.backward()
    optimizer.step()
    with torch.no_grad():
        second = loss_of(plain.eval()).item()
    for found in on_ranks(lambda: base, body):
        assert found == pytest.approx((first.item(), second), rel=1e-5)


class Scaled(nn.Module):
    """A scale that is small enough to be persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.full((1,), 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return x * self.scale


def on_scaled(body: Callable[[Any, Any], None], degree: int, **config: Any) -> None:
    def run() -> None:
        model = hs.DistributedModel(Scaled())
        body(model, hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0)))

    run_ranks(run, 2, sharded_data_parallel_degree=degree, **config)


X = torch.ones(1, 8)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_change_of_a_persistent_parameter_is_found_before_the_step(degree: int) -> None:
    def body(model: Any, optimizer: Any) -> None:
        model(X).sum().backward()
        with torch.no_grad():
            model.module.scale.clamp_(0, 1)
        with pytest.raises(hs.ShardedError, match="'scale' was changed in place"):
            optimizer.step()
        optimizer.step()  # The copy was let go.
        assert model.state_dict()["scale"] == 5.0
        with hs.unshard(model.module.scale), torch.no_grad():
            model.module.scale.clamp_(0, 1)
        model(X).sum().backward()
        optimizer.step()
        assert model.state_dict()["scale"] == 1.0

    on_scaled(body, degree, param_persistence_threshold=10)


def double_and_stop(model: Any) -> None:
    with hs.unshard(model), torch.no_grad():
        model.module.scale.mul_(2)
        raise RuntimeError("stop")


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("threshold", [0, 10])
def test_discarded_changes_are_gone_at_once(degree: int, threshold: int) -> None:
    def body(model: Any, optimizer: Any) -> None:
        wanted = model(X)
        with hs.unshard(model, write_back=False), torch.no_grad():
            model.module.scale.mul_(2)
        assert torch.equal(model(X), wanted)
        with pytest.raises(RuntimeError, match="stop"):
            double_and_stop(model)
        assert torch.equal(model(X), wanted)

    on_scaled(body, degree, param_persistence_threshold=threshold)


def test_nothing_is_updated_by_a_step_that_is_refused() -> None:
    def body(model: Any, _: Any) -> None:
        optimizer = hs.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        average = hs.ema(model)
        model(X).sum().backward()
        before = model.state_dict()
        with hs.unshard(model, write_back=False):
            with pytest.raises(hs.ShardedError, match="leave it first"):
                optimizer.step()
            with pytest.raises(hs.ShardedError, match="leave it first"), average.applied():
                pass
        with average.applied(), pytest.raises(hs.ShardedError, match="would train the average"):
            optimizer.step()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not any(optimizer.state_dict()["state"])

    on_scaled(body, 2)


def test_a_gather_that_was_refused_is_made_again() -> None:
    def body(model: Any, optimizer: Any) -> None:
        kept = model.module.scale.data
        model.module.scale.data = torch.full((1,), 7.0)
        for _ in range(2):
            with pytest.raises(hs.ShardedError, match="'scale' was given new data"):
                model(X)
        model.module.scale.data = kept
        model(X).sum().backward()
        optimizer.step()

    on_scaled(body, 2, param_persistence_threshold=10)


def test_looking_at_narrow_weights_keeps_the_digits_of_their_masters() -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = hs.DistributedModel(nn.Linear(8, 8).bfloat16())
        optimizer = hs.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
        model(X.bfloat16()).sum().backward()
        optimizer.step()
        (masters,) = (arena.clone() for arena in model._engine.master_arenas())
        with hs.unshard(model):
            pass
        assert torch.equal(model._engine.master_arenas()[0], masters)
        with hs.unshard(model), torch.no_grad():
            model.module.bias[3] = 2.0
        changed = model._engine.master_arenas()[0] != masters
        assert int(changed.sum()) == 1

    run_ranks(run, 1)
