"""The models of the parity tests: small, and each with one thing that is easy to get wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.python.parity.harness import Task

VOCABULARY = 13
HIDDEN = 6


def _generator(step: int, micro: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(10007 * step + 101 * micro + rank)


def _tokens(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    both = torch.randint(VOCABULARY, (2, 2, 5), generator=_generator(step, micro, rank))
    return both[0], both[1]


def _rows(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(4, HIDDEN, generator=_generator(step, micro, rank))


def _token_loss(model: nn.Module, batch: Any) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _square_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - 1).square().mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias: that of the keys has a gradient of zero, whose rounding Adam makes a step of.
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.norm_2 = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """GPT-2 in small."""

    def __init__(self, tied: bool = False, num_blocks: int = 3) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Embedding(8, HIDDEN)
        self.h = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


def _frozen_half() -> nn.Module:
    model = GPT(num_blocks=4)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    model.h[1].requires_grad_(False)  # A unit with nothing to train, others in front of it.
    return model


def _frozen_inputs() -> nn.Module:
    """What trains in a block has its gradients before the block's frozen weights are all used."""
    model = GPT()
    model.h.requires_grad_(False)
    for block in model.h:
        block.mlp[2].requires_grad_(True)
    return model


class OddConv(nn.Module):
    """Odd shapes, channels_last and transposed weights, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 7, (1, 3)), nn.Conv2d(7, 1, 1)]
        )
        self.convs[0].to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(1, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.mix = nn.Parameter(torch.randn(3, 4).t())
        self.register_buffer("shift", torch.tensor([0.25, -0.5, 1.0]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convs[0](x)).tanh()
        x = self.convs[1](x)
        x = self.convs[2](x * self.scale) + self.nothing.sum()
        return (x.flatten(1)[:, :4] @ self.mix + self.shift) / self.count


def _images(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(2, 3, 4, 5, generator=_generator(step, micro, rank))


class Mlp(nn.Module):
    """Blocks of one Linear each, in a list; ``order`` says which are called, and how often."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(num_blocks))
        self.last = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
        x = self.first(x)
        for index in range(len(self.blocks)) if order is None else order:
            x = x + self.blocks[index](x).tanh()
        return self.last(x)


def _ordered_rows(order: Any) -> Any:
    return lambda step, micro, rank: (_rows(step, micro, rank), order(step, micro, rank))


def _ordered_loss(model: nn.Module, batch: Any) -> Tensor:
    rows, order = batch
    return (model(rows, order) - 1).square().mean()


class Order(list):  # type: ignore[type-arg]  # not a tuple: the harness flips what is in those
    """Indices of blocks."""


class WithoutGradient(Mlp):
    """A module that nobody calls, a parameter used only detached, a block that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.never_called = nn.Linear(HIDDEN, 3)
        self.detached = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, order: Any = None) -> Tensor:
        return super().forward(x * self.detached.detach(), (0, 2))


class MixedDtype(nn.Module):
    """fp32 at the ends, fp64 and bf16 between them, both also within one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, 8)
        self.blocks = nn.ModuleList(
            [nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.bfloat16)]
        )
        self.last = nn.Linear(8, 2)
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).double()
        x = self.blocks[0](x).tanh().bfloat16()
        x = self.blocks[1](x).float()
        return self.last(x * self.wide.float() + self.narrow.float())


class Narrow(nn.Module):
    """All of one 16-bit type, norms and buffers too."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = Mlp().to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.dtype)).float()


TASKS = {
    task.name: task
    for task in (
        Task("gpt", GPT, _tokens, _token_loss),
        Task("tied_head", lambda: GPT(tied=True), _tokens, _token_loss),
        Task("frozen_half", _frozen_half, _tokens, _token_loss),
        Task("frozen_inputs", _frozen_inputs, _tokens, _token_loss),
        Task("odd_conv", OddConv, _images, _square_loss),
        Task(
            "sized_units",
            lambda: nn.Sequential(
                *(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(5))
            ),
            _rows,
            _square_loss,
        ),
        Task(
            "used_twice",
            Mlp,
            _ordered_rows(lambda step, micro, rank: Order([0, 1, 0, 2])),
            _ordered_loss,
        ),
        Task(
            "unused_at_times",
            Mlp,
            _ordered_rows(lambda step, micro, rank: Order([0, 1, 2] if step % 2 else [0, 2])),
            _ordered_loss,
        ),
        Task(
            "skipped_by_ranks",
            Mlp,
            _ordered_rows(
                lambda step, micro, rank: Order([0, 1, 2] if (step + micro + rank) % 2 else [1])
            ),
            _ordered_loss,
        ),
        Task("no_gradient", WithoutGradient, _rows, _square_loss),
        # One bf16 ulp is 2^-8 of the value; both runs keep fp32 masters.
        Task("mixed_dtype", MixedDtype, _rows, _square_loss, tolerance=2.0**-8),
        Task("bf16", lambda: Narrow(torch.bfloat16), _rows, _square_loss, tolerance=2.0**-8),
        Task("fp16", lambda: Narrow(torch.float16), _rows, _square_loss, tolerance=2.0**-10),
        Task("unit_by_class", GPT, _tokens, _token_loss, unit=[Attention, "token", "position"]),
    )
}
