"""One plain process and a world of ranks train the same model; both record losses and weights.

Two kinds of reference. ``train_plain`` is one process that sees the whole global batch. For
scripts that do more than a training loop, ``run_plain`` runs the very same function on plain
replicas in threads, which average ``p.grad`` where the script calls ``rank.sync()``; there the
sharded run does nothing. Next: models.py, the models.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hopshard as hs
import torch
from hopshard.testing import run_ranks
from torch import nn
from torch.utils._pytree import tree_map

Weights = dict[str, torch.Tensor]
BuildOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# Steep enough to show a wrong scale at once; eps large enough that the rounding of a gradient
# that is zero in theory does not become a whole step.
OPTIMIZERS: dict[str, BuildOptimizer] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-4, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3, momentum=0.5),
}


@dataclass(frozen=True)
class Task:
    """A model, its data and its loss. ``batch(step, micro, rank)`` is one rank's share."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    unit: Any = None
    tolerance: float = 1e-6
    """Largest relative difference that the arithmetic explains (SGD)."""

    @functools.cached_property
    def base(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()


@dataclass
class History:
    """What one training saw: losses by step, rank and micro-step, weights after every step."""

    losses: list[list[list[float]]] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)


def weights_of(model: nn.Module) -> Weights:
    return {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def cloned(tree: Any) -> Any:
    """A copy, for what the run will change."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


class Masters:
    """Plain mixed precision: fp32 copies of low-precision parameters, which the optimizer steps."""

    def __init__(self, model: nn.Module) -> None:
        self.pairs = []
        self.parameters = []
        for parameter in model.parameters():
            if parameter.dtype in (torch.float32, torch.float64):
                self.parameters.append(parameter)
            else:
                master = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
                self.pairs.append((parameter, master))
                self.parameters.append(master)

    def take_gradients(self) -> None:
        for parameter, master in self.pairs:
            if parameter.grad is not None:
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad + grad
                parameter.grad = None

    @torch.no_grad()
    def write(self) -> None:
        for parameter, master in self.pairs:
            parameter.copy_(master)


def train_plain(
    task: Task,
    build_optimizer: BuildOptimizer,
    *,
    world: int,
    accumulation: int,
    steps: int,
    reverse: bool = False,
) -> History:
    """One process, the global batch in shares; ``reverse`` sums them in another order."""
    model = copy.deepcopy(task.base)
    masters = Masters(model)
    optimizer = build_optimizer(masters.parameters)
    history = History()
    for step in range(steps):
        optimizer.zero_grad()
        losses = [[0.0] * accumulation for _ in range(world)]
        order = [(micro, rank) for micro in range(accumulation) for rank in range(world)]
        for micro, rank in reversed(order) if reverse else order:
            batch = task.batch(step, micro, rank)
            loss = task.loss(model, _flipped(batch) if reverse else batch) / accumulation
            (loss / world).backward()
            masters.take_gradients()
            losses[rank][micro] = float(loss.detach())
        optimizer.step()
        masters.write()
        history.losses.append(losses)
        history.weights.append(weights_of(model))
    return history


def train_sharded(
    task: Task,
    build_optimizer: BuildOptimizer,
    *,
    world: int,
    degree: int,
    accumulation: int,
    steps: int,
    ranks_per_node: int | None = None,
    **config: Any,
) -> list[History]:
    """The same on ranks; every rank's weights are recorded. Losses are this rank's alone."""

    def train() -> History:
        model = hs.DistributedModel(
            differ_by_rank(copy.deepcopy(task.base)),
            unit=task.unit,
            backward_passes_per_step=accumulation,
        )
        optimizer = hs.DistributedOptimizer(build_optimizer(model.parameters()))
        history = History()
        for step in range(steps):
            optimizer.zero_grad()
            losses = []
            for micro in range(accumulation):
                loss = task.loss(model, task.batch(step, micro, hs.rank())) / accumulation
                loss.backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            history.losses.append([losses])
            history.weights.append(weights_of(model))
        return history

    return run_ranks(
        train,
        world,
        sharded_data_parallel_degree=degree,
        ranks_per_node=ranks_per_node,
        **config,
    )


def differ_by_rank(module: nn.Module) -> nn.Module:
    """Ranks other than 0 start from rubbish: only rank 0's values may count."""
    if hs.rank() != 0:
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.is_floating_point():
                    tensor.fill_(float(hs.rank()))
    return module


def _flipped(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.flip(0) if batch.dim() else batch
    return type(batch)(_flipped(part) for part in batch) if isinstance(batch, tuple) else batch


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def difference(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference of two tensors, relative to the largest element of the second."""
    assert mine.shape == other.shape and mine.dtype == other.dtype
    delta = largest(mine.double() - other.double())
    return delta / max(largest(other), 1e-3)


def relative(mine: float, other: float) -> float:
    return 0.0 if mine == other else abs(mine - other) / max(abs(mine), abs(other), 1e-3)


def assert_equal_weights(mine: Weights, other: Weights, tolerance: float, where: str) -> None:
    assert list(mine) == list(other), where
    for name, value in mine.items():
        delta = difference(value, other[name])
        assert delta <= tolerance, f"{where}: '{name}' differs by {delta:.2e} > {tolerance:.2e}"


# --- scripts that run plain and sharded ---------------------------------------------------------


class _Meeting:
    """Where plain replicas exchange objects."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


@dataclass
class Rank:
    """What a script gets: the same in the plain and in the sharded run."""

    rank: int
    size: int
    model: Any
    optimizer: Any
    torch_optimizer: torch.optim.Optimizer
    meeting: _Meeting | None = None
    recorded: list[Any] = field(default_factory=list)

    @property
    def is_sharded(self) -> bool:
        return self.meeting is None

    @property
    def module(self) -> Any:
        """The user's module."""
        return self.model.module if self.is_sharded else self.model

    def sync(self) -> None:
        """Plain: averages the gradients over the replicas. Sharded: the engine did."""
        if self.meeting is None:
            return
        parameters = list(self.model.parameters())
        everyone = self.meeting.exchange(
            self.rank, [None if p.grad is None else p.grad.clone() for p in parameters]
        )
        for parameter, grads in zip(parameters, zip(*everyone, strict=True), strict=True):
            found = [grad for grad in grads if grad is not None]
            if found:
                parameter.grad = torch.stack(found).sum(0) / self.size

    def step(self) -> None:
        self.sync()
        self.optimizer.step()

    def record(self, *values: Any) -> None:
        """The weights as they are now, and numbers."""
        self.recorded.append((weights_of(self.model), *cloned(values)))

    def batch(self, step: int, rows: int = 4, features: int = 6) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(rows, features, generator=generator)


Script = Callable[[Rank], Any]


def run_plain(
    script: Script, base: nn.Module, size: int, build_optimizer: BuildOptimizer
) -> list[list[Any]]:
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            model = copy.deepcopy(base)
            optimizer = build_optimizer(model.parameters())
            rank = Rank(index, size, model, optimizer, optimizer, meeting)
            script(rank)
            results[index] = rank.recorded
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def run_sharded(
    script: Script,
    base: nn.Module,
    size: int,
    degree: int,
    build_optimizer: BuildOptimizer,
    *,
    unit: Any = None,
    passes: int = 1,
    ranks_per_node: int | None = None,
    timeout_s: float = 60.0,
    **config: Any,
) -> list[list[Any]]:
    def run() -> list[Any]:
        model = hs.DistributedModel(
            differ_by_rank(copy.deepcopy(base)), unit=unit, backward_passes_per_step=passes
        )
        torch_optimizer = build_optimizer(model.parameters())
        optimizer = hs.DistributedOptimizer(torch_optimizer)
        rank = Rank(hs.rank(), hs.size(), model, optimizer, torch_optimizer)
        script(rank)
        return rank.recorded

    return run_ranks(
        run,
        size,
        sharded_data_parallel_degree=degree,
        ranks_per_node=ranks_per_node,
        timeout_s=timeout_s,
        **config,
    )


WORLDS = ((1, 1, None), (2, 1, None), (2, 2, None), (4, 2, 2), (4, 4, 2))
"""World, degree and ranks per node: each hop alone, both, and a group over two nodes."""


def assert_same(
    script: Script,
    base: nn.Module,
    *,
    optimizer: str | BuildOptimizer = "sgd",
    worlds: Sequence[tuple[int, int, int | None]] = WORLDS,
    tolerance: float = 2e-6,
    **options: Any,
) -> None:
    """The script records the same on plain replicas and on ranks."""
    build = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    for size, degree, ranks_per_node in worlds:
        plain = run_plain(script, base, size, build)
        sharded = run_sharded(
            script, base, size, degree, build, ranks_per_node=ranks_per_node, **options
        )
        for rank, (mine, other) in enumerate(zip(sharded, plain, strict=True)):
            assert len(mine) == len(other) > 0
            for number, (row, wanted) in enumerate(zip(mine, other, strict=True)):
                where = f"world {size}, degree {degree}, rank {rank}, record {number}"
                _assert_same_value(row, wanted, tolerance, where)


def _assert_same_value(mine: Any, other: Any, tolerance: float, where: str) -> None:
    if isinstance(other, torch.Tensor):
        delta = difference(mine.detach(), other.detach())
        assert delta <= tolerance, f"{where} differs by {delta:.2e}"
    elif isinstance(other, float):
        assert relative(mine, other) <= tolerance, f"{where}: {mine!r} is not {other!r}"
    elif isinstance(other, dict):
        assert list(mine) == list(other), where
        for key in other:
            _assert_same_value(mine[key], other[key], tolerance, f"{where}, {key!r}")
    elif isinstance(other, list | tuple):
        assert len(mine) == len(other), where
        for number, (a, b) in enumerate(zip(mine, other, strict=True)):
            _assert_same_value(a, b, tolerance, f"{where}, item {number}")
    else:
        assert mine == other, where
