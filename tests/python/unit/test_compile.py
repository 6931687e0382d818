"""torch.compile and autocast around and inside a sharded model (correction 8)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks
from torch import nn

from tests.python.parity.harness import assert_equal_weights, weights_of
from tests.python.parity.models import HIDDEN, Mlp


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, order: Any = None) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@functools.cache
def base() -> nn.Module:
    torch.manual_seed(2)
    return Model()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))


def plain(n: int, steps: int, autocast: bool = False) -> list[dict[str, torch.Tensor]]:
    model = copy.deepcopy(base())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(n):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = (model(batch(step, rank)).float() - 1).square().mean()
            (loss / n).backward()
        optimizer.step()
        seen.append(weights_of(model))
    return seen


def train(
    n: int,
    degree: int,
    steps: int,
    *,
    before: Callable[[nn.Module], None] = lambda module: None,
    after: Callable[[Any], Any] = lambda model: model,
    autocast: bool = False,
) -> list[list[dict[str, torch.Tensor]]]:
    def run() -> list[dict[str, torch.Tensor]]:
        module = copy.deepcopy(base())
        before(module)
        model = hs.DistributedModel(module)
        optimizer = hs.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
        call = after(model)
        seen = []
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = (call(batch(step, hs.rank())).float() - 1).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(weights_of(model))
        return seen

    return run_ranks(run, n, sharded_data_parallel_degree=degree, timeout_s=180)


def compile_blocks(module: Any, backend: str = "aot_eager") -> None:
    for block in module.blocks:
        block.compile(backend=backend)


def compile_blocks_after(model: Any) -> Any:
    compile_blocks(model.module)
    return model


WAYS: dict[str, dict[str, Any]] = {
    "blocks_before": {"before": compile_blocks},
    "blocks_after": {"after": compile_blocks_after},
    "model": {"after": lambda model: torch.compile(model, backend="aot_eager")},
    "module_in_place": {"before": lambda module: module.compile(backend="aot_eager")},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("n", "degree"), [(1, 1), (2, 2)])
def test_compiled_models_train_as_plain_ones(n: int, degree: int, way: dict[str, Any]) -> None:
    steps = 3
    wanted = plain(n, steps)
    for rank, seen in enumerate(train(n, degree, steps, **way)):
        for step in range(steps):
            assert_equal_weights(seen[step], wanted[step], 2e-6, f"rank {rank}, step {step}")


def test_a_compiled_block_has_no_graph_break() -> None:
    def run() -> int:
        module = copy.deepcopy(base())
        model = hs.DistributedModel(module)
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        for block in module.blocks:
            block.compile(backend=counter, fullgraph=True)
        model(batch(0, 0)).sum().backward()
        return counter.frame_count

    assert run_ranks(run, 1)[0] in (1, 3)  # One graph for all blocks, or one each.


@pytest.mark.slow
def test_inductor() -> None:
    """Compiles C++: about 20 s where nothing is cached."""
    wanted = plain(1, 2)
    (seen,) = train(1, 1, 2, before=functools.partial(compile_blocks, backend="inductor"))
    for step in range(2):
        assert_equal_weights(seen[step], wanted[step], 2e-5, f"step {step}")


@pytest.mark.parametrize(("n", "degree"), [(1, 1), (4, 2), (4, 4)])
def test_autocast_is_that_of_plain_torch(n: int, degree: int) -> None:
    """Weights are cast inside units as torch casts them: equal up to bf16's rounding of sums."""
    steps = 3
    wanted = plain(n, steps, autocast=True)
    for rank, seen in enumerate(train(n, degree, steps, autocast=True)):
        for step in range(steps):
            assert_equal_weights(seen[step], wanted[step], 2e-3, f"rank {rank}, step {step}")
    without = plain(n, steps)
    with pytest.raises(AssertionError):  # It does something, and more than the tolerance.
        assert_equal_weights(wanted[-1], without[-1], 1e-4, "autocast")


def test_autocast_around_checkpoint() -> None:
    class Checkpointed(Model):
        def forward(self, x: torch.Tensor, order: Any = None) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.last(x)

    torch.manual_seed(2)
    start = Checkpointed()

    def run() -> dict[str, torch.Tensor]:
        model = hs.DistributedModel(copy.deepcopy(start))
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(step, 0)).float().square().mean()
            loss.backward()
            optimizer.step()
        return weights_of(model)

    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(step, 0)).float().square().mean()
        loss.backward()
        optimizer.step()
    for rank, seen in enumerate(run_ranks(run, 2, sharded_data_parallel_degree=2)):
        assert_equal_weights(seen, weights_of(model), 2e-3, f"rank {rank}")
