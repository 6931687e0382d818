"""torch.compile and autocast around and inside a sharded model."""

from __future__ import annotations

import copy
import functools
import os
import pathlib
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


PATH = os.pathsep.join(
    [str(pathlib.Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
)


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


def train_here(
    steps: int,
    *,
    before: Callable[[nn.Module], Any] = lambda module: None,
    after: Callable[[Any], Any] = lambda model: model,
    autocast: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """On this rank of the world that exists."""
    module = copy.deepcopy(base())
    before(module)
    model = hs.DistributedModel(module)
    optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
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


# Processes and not threads: the compiler keeps state by thread.
SCRIPT = """
    import sys

    import torch

    import hopshard as hs
    from tests.python.parity.harness import assert_equal_weights
    from tests.python.unit.test_compile import plain, train_here

    hs.init(sharded_data_parallel_degree=int(sys.argv[1]))
    backend, num_frames = sys.argv[2], [0]

    def count_and_compile(graph, inputs):
        num_frames[0] += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def compile_blocks(model, **options):
        for block in model.blocks:
            block.compile(**options)
        return model

    # One graph per block: nothing of hopshard's runs inside, so nothing breaks it.
    whole = {"backend": count_and_compile, "fullgraph": True}
    ways = {
        "blocks before": {"before": lambda module: compile_blocks(module, backend=backend)},
        "blocks after": {"after": lambda model: compile_blocks(model, backend=backend)},
        "whole blocks": {"after": lambda model: compile_blocks(model, **whole)},
        "model": {"after": lambda model: torch.compile(model, backend=backend)},
        "module": {"before": lambda module: module.compile(backend=backend)},
    }
    if backend == "inductor":
        ways = {"blocks after": ways["blocks after"]}
    wanted = plain(hs.size(), 3)
    for name, way in ways.items():
        torch._dynamo.reset()
        for step, weights in enumerate(train_here(3, **way)):
            assert_equal_weights(weights, wanted[step], float(sys.argv[3]), f"{name}, step {step}")
    assert backend == "inductor" or 1 <= num_frames[0] <= 3, num_frames
"""


@pytest.mark.parametrize(("n", "degree"), [(1, 1), (2, 2), (2, 1)])
def test_compiled_models_train_as_plain_ones(
    run: Any, monkeypatch: pytest.MonkeyPatch, n: int, degree: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", PATH)
    finished = run("-n", str(n), script=SCRIPT, arguments=(str(degree), "aot_eager", "2e-6"))
    assert finished.code == 0, finished.err


def test_inductor(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles C++: about 20 s where nothing is cached."""
    monkeypatch.setenv("PYTHONPATH", PATH)
    finished = run("-n", "1", script=SCRIPT, arguments=("1", "inductor", "2e-5"))
    assert finished.code == 0, finished.err


@pytest.mark.parametrize(("n", "degree"), [(1, 1), (4, 2), (4, 4)])
def test_autocast_is_that_of_plain_torch(n: int, degree: int) -> None:
    """Weights are cast inside units as torch casts them: equal up to bf16's rounding of sums."""
    steps = 3
    wanted = plain(n, steps, autocast=True)
    runs = run_ranks(
        lambda: train_here(steps, autocast=True), n, sharded_data_parallel_degree=degree
    )
    for rank, seen in enumerate(runs):
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
