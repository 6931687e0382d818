"""What a steady step does in Python does not depend on how many parameters a unit has."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks
from torch import nn

WIDTH = 4
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


class Blocks(nn.Module):
    """Three units and the root, however many parameters a block has."""

    def __init__(self, layers_per_block: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers_per_block)))
            for _ in range(3)
        )
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """It calls back into Python whenever it comes."""
    gc.disable()
    yield
    gc.enable()


def work_of(body: Callable[[], Any]) -> tuple[int, int]:
    """Instructions of the interpreter, and calls of Python and C functions, in this thread."""
    instructions = calls = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal instructions
        frame.f_trace_opcodes = True
        instructions += event == "opcode"
        return trace

    def profile(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    others = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        body()
    finally:
        sys.settrace(others[0])
        sys.setprofile(others[1])
    return instructions, calls


def train(model: Any, optimizer: Any, measured: str) -> tuple[int, int]:
    """The work of ``measured`` in the third step."""
    x = torch.ones(2, WIDTH)
    work = (0, 0)
    for _ in range(3):
        optimizer.zero_grad()
        steps = {"passes": lambda: model(x).sum().backward(), "step": optimizer.step}
        for name, body in steps.items():
            if name == measured:
                work = work_of(body)
            else:
                body()
    return work


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "config",
    [{}, {"gradient_clipping": 1.0}, {"optimizer_state_sharding": "world"}],
    ids=lambda config: next(iter(config), "default"),
)
def test_of_an_optimizer_step(kind: str, config: dict[str, Any]) -> None:
    def run(layers_per_block: int) -> tuple[int, int]:
        model = hs.DistributedModel(Blocks(layers_per_block))
        optimizer = hs.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()))
        return train(model, optimizer, "step")

    few, many = (run_ranks(run, 4, n, sharded_data_parallel_degree=2, **config) for n in (1, 20))
    assert few[0] > (0, 0)
    assert few == many


def test_of_forward_and_backward_beyond_the_plain_modules() -> None:
    def run(layers_per_block: int) -> tuple[int, int]:
        base = Blocks(layers_per_block)
        plain = copy.deepcopy(base)
        expected = train(plain, OPTIMIZERS["sgd"](plain.parameters()), "passes")
        model = hs.DistributedModel(base)
        optimizer = hs.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
        work = train(model, optimizer, "passes")
        return work[0] - expected[0], work[1] - expected[1]

    few, many = (run_ranks(run, 2, n, sharded_data_parallel_degree=2) for n in (1, 20))
    assert few[0] > (0, 0)
    assert few == many


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Linear(WIDTH, 1) for name in "abc"})

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        return sum((self.branches[name](x) for name in used), torch.zeros(()))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("state_sharding", ["group", "world"])
def test_every_parameter_has_an_age_of_its_own(kind: str, state_sharding: str) -> None:
    """The set with a gradient changes, comes back, and the state is saved and loaded meanwhile."""
    base = Branches()
    # A capital: the state is looked at after the step. A star: it is loaded back, too.
    script = ["ab", "ab", "b", "b", "AB", "abc", "abc", "BC*", "bc", "a", "abc", "ABC*", "abc"]

    def run() -> None:
        plain = copy.deepcopy(base)
        reference = OPTIMIZERS[kind](plain.parameters())
        model = hs.DistributedModel(copy.deepcopy(base))
        optimizer = hs.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()))
        x = torch.arange(WIDTH).float()
        for number, entry in enumerate(script):
            used = entry.lower().strip("*")
            for net, stepped in ((plain, reference), (model, optimizer)):
                stepped.zero_grad()
                (net(x * (number + 1), used) - 1).square().sum().backward()
                stepped.step()
            if entry != used:
                ours, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
                assert ours.keys() == theirs.keys()
                for index, state in theirs.items():
                    for name, value in state.items():
                        torch.testing.assert_close(ours[index][name], value, rtol=1e-4, atol=1e-6)
            if entry.endswith("*"):
                optimizer.load_state_dict(optimizer.state_dict())
        weights = model.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)

    run_ranks(run, 4, sharded_data_parallel_degree=2, optimizer_state_sharding=state_sharding)
