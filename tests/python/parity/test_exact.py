"""Where arithmetic is exact, sharded and plain are equal to the last bit.

Weights, inputs and targets are small integers, the loss is a sum of products, learning rate and
momentum are powers of two: every number is a short binary fraction, so no order of sums matters.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.python.parity.harness import Task, train_plain, train_sharded


class Integers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3, dtype=dtype)
        self.blocks = nn.ModuleList(
            [nn.Linear(3, 7, dtype=dtype), nn.Linear(7, 2, bias=False, dtype=dtype)]
        )
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x.relu())
        return x


def integers(dtype: torch.dtype) -> Task:
    def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(997 * step + 31 * micro + rank)
        rows = torch.randint(-1, 2, (4, 7), generator=generator).to(dtype)
        return rows[:, :5], rows[:, 5:]

    return Task(
        "integers",
        lambda: Integers(dtype),
        batch,
        lambda model, both: (model(both[0]) * both[1]).sum(),
    )


def sgd(parameters):  # type: ignore[no-untyped-def]
    return torch.optim.SGD(parameters, lr=2.0**-2, momentum=0.5)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize(
    ("world", "degree", "ranks_per_node"),
    [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 1), (4, 4, 2), (8, 2, 2), (8, 4, 2), (8, 8, 4)],
)
@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 2), (torch.float64, 3)])
def test_bits_are_equal(
    dtype: torch.dtype,
    steps: int,
    world: int,
    degree: int,
    ranks_per_node: int,
    accumulation: int,
) -> None:
    size = {"world": world, "accumulation": accumulation, "steps": steps}
    plain = train_plain(integers(dtype), sgd, **size)
    other = train_plain(integers(dtype), sgd, **size, reverse=True)
    histories = train_sharded(
        integers(dtype), sgd, **size, degree=degree, ranks_per_node=ranks_per_node
    )
    assert any(loss for row in plain.losses[-1] for loss in row)
    for rank, history in enumerate(histories):
        for step in range(steps):
            assert history.losses[step][0] == plain.losses[step][rank]
            for name, value in plain.weights[step].items():
                assert torch.equal(value, other.weights[step][name]), "this is not exact"
                assert torch.equal(history.weights[step][name], value), f"{name}, step {step}"
    changed = plain.weights[0]["blocks.0.weight"] != plain.weights[-1]["blocks.0.weight"]
    assert changed.any()
