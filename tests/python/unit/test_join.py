"""hs.join: ranks generate texts of different lengths; nobody waits for who has none left."""

from __future__ import annotations

import copy
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks

from tests.python.parity.models import GPT, HIDDEN, Mlp


def generate(model: Any, length: int) -> list[int]:
    tokens = torch.tensor([[1, 2]])
    for _ in range(length):
        tokens = torch.cat([tokens, model(tokens[:, -4:])[:, -1].argmax(-1, keepdim=True)], 1)
    return [int(token) for token in tokens[0]]


@pytest.mark.parametrize("threshold", [0, 16])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("n", "degree"), [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_uneven_generation(n: int, degree: int, reshard: bool, threshold: int) -> None:
    torch.manual_seed(0)
    base = GPT()
    with torch.no_grad():
        wanted = [generate(base, 5 * rank % 7) for rank in range(n)]

    def run() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        for _ in range(2):
            with hs.join(model), torch.no_grad():
                assert generate(model, 5 * hs.rank() % 7) == wanted[hs.rank()]
        # And training goes on.
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.tensor([[1, 2, 3]])).square().mean().backward()
        optimizer.step()
        with hs.join(model), torch.no_grad():
            assert len(generate(model, hs.rank())) == 2 + hs.rank()

    run_ranks(
        run,
        n,
        sharded_data_parallel_degree=degree,
        reshard_after_forward=reshard,
        param_persistence_threshold=threshold,
    )


def test_a_rank_that_fails_ends_the_others() -> None:
    def run() -> str:
        model = hs.DistributedModel(Mlp())
        try:
            with hs.join(model), torch.no_grad():
                model(torch.ones(1, HIDDEN))
                if hs.rank() == 1:
                    raise ValueError("no more text")
                for _ in range(3):
                    model(torch.ones(1, HIDDEN))
        except (ValueError, hs.CommError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    texts = run_ranks(run, 2, sharded_data_parallel_degree=2)
    assert texts[1] == "ValueError: no more text"
    assert "global rank 1 left `with hopshard.join(model):` with an error" in texts[0]


def test_a_forward_with_gradients_is_refused() -> None:
    def run() -> None:
        model = hs.DistributedModel(Mlp())
        with (
            pytest.raises(hs.ScheduleError, match=r"runs without a backward; use torch.no_grad"),
            hs.join(model),
        ):
            model(torch.ones(1, HIDDEN))
        with (
            pytest.raises(hs.ScheduleError, match=r"inside hopshard\.join"),
            hs.join(model),
            hs.join(model),
        ):
            pass
        with torch.no_grad():
            model(torch.ones(1, HIDDEN))

    run_ranks(run, 1)


class Net(torch.nn.Module):
    def __init__(self, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.order = order

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        for index in self.order:
            x = self.h[index](x)
            if fails:
                raise ValueError("inside a forward")
        return x


def texts_of(body: Any, module: Any, **config: Any) -> list[str]:
    """What each of two ranks says."""

    def run() -> str:
        model = hs.DistributedModel(copy.deepcopy(module))
        try:
            body(model)
        except (ValueError, hs.Error) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    return run_ranks(run, 2, sharded_data_parallel_degree=2, timeout_s=20, **config)


@pytest.mark.parametrize("reshard", [True, False])
def test_an_error_inside_a_forward_ends_the_others_too(reshard: bool) -> None:
    def body(model: Any) -> None:
        with hs.join(model), torch.no_grad():
            for step in range(3):
                model(torch.ones(1, 8), fails=hs.rank() == 1 and step == 1)

    texts = texts_of(body, Net(), reshard_after_forward=reshard)
    assert texts[1] == "ValueError: inside a forward"
    assert "global rank 1 left `with hopshard.join(model):` with an error" in texts[0]


def test_units_in_another_order_are_refused_at_once() -> None:
    def body(model: Any) -> None:
        with hs.join(model), torch.no_grad():
            for _ in range(1 + hs.rank()):
                model(torch.ones(1, 8))

    for text in texts_of(body, Net((2, 1, 0))):
        assert text.startswith(("ScheduleError", "CommError"))
    assert any("ran outside the order of the units" in text for text in texts_of(body, Net((2, 0))))

    def after_training(model: Any) -> None:
        model(torch.ones(1, 8)).sum().backward()
        body(model)

    assert texts_of(after_training, Net((2, 1, 0))) == ["no error"] * 2


def test_what_joined_ranks_cannot_follow_is_refused() -> None:
    def run() -> None:
        model = hs.DistributedModel(Net())
        with torch.no_grad():
            with hs.join(model), pytest.raises(hs.ScheduleError, match="leave the join first"):
                model.state_dict()
            with hs.join(model), pytest.raises(hs.ScheduleError, match=r"'h\.1' ran by itself"):
                model.module.h[1](torch.ones(1, 8))
        with (
            pytest.raises(hs.ConfigError, match="join takes a DistributedModel, not Linear"),
            hs.join(torch.nn.Linear(2, 2)),  # type: ignore[arg-type]
        ):
            pass

    run_ranks(run, 2, sharded_data_parallel_degree=2)
