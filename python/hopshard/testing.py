"""For tests, the library's and its users': ranks as threads, and parity with one plain process.

    import torch, hopshard as hs
    from hopshard.testing import parity

    def build_model():
        return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))

    def loss_fn(model, batch):
        return (model(batch[:, :8]) - batch[:, 8:]).square().mean()

    batches = torch.randn(20, 16, 9, generator=torch.Generator().manual_seed(0))
    parity(build_model, batches, loss_fn, steps=20, degree=(1, 2, 4))

Run it with ``hopshard run -n 4 script.py``. Next: world.py.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import nn

from hopshard import _C, world
from hopshard.config import Config
from hopshard.errors import CommError, InvalidArgument, TimeoutError

T = TypeVar("T")

# What `shm` can reach at best: benchmarks run these without anybody waiting.
copy_memory = _C.copy_memory
sum_memory = _C.sum_memory

_END_LIMIT_S: Final = 5.0  # How long the other ranks may take to notice that one failed.

# torch's global random generator belongs to the process: threads take turns with it.
_build_lock = threading.Lock()


def run_ranks(
    fn: Callable[..., T],
    n: int,
    *args: Any,
    ranks_per_node: int | None = None,
    timeout_s: float = 60.0,
    initialize: bool = True,
    **config: Any,
) -> list[T]:
    """Calls ``fn(*args)`` on ``n`` threads that act as the ranks of a world.

    Each thread has its own world: ``hs.rank()``, ``hs.DistributedModel`` and all else work in it
    as in a process. The first error of any rank ends the others and is raised here.

    Example:
        >>> from hopshard.testing import run_ranks
        >>> import hopshard as hs
        >>> run_ranks(lambda: hs.rank(), 4, sharded_data_parallel_degree=2)
        [0, 1, 2, 3]

    Args:
        fn: Runs on every rank. Threads share torch's random state: seed generators of your own.
        n: Ranks.
        *args: Given to ``fn``.
        ranks_per_node: None: all on one node.
        timeout_s: Limit of the whole run, and of each collective in it.
        initialize: False: ``fn`` calls ``hs.init`` itself, as a script does.
        **config: See ``Config``. Threads meet in memory of their own; ``backend="shm"`` is
            the one transport that carries them, too.

    Returns:
        What the ranks returned, by rank.

    Raises:
        TimeoutError: a rank was still busy after ``timeout_s``; the text shows where.
        Exception: the first rank's, with a note that names the rank.
    """
    if n < 1:
        raise InvalidArgument(f"run_ranks needs at least one rank, got {n}")
    hub = _C.LocalHub(n, max(1, round(timeout_s * 1000)))
    store = _C.memory_store()
    results: list[Any] = [None] * n
    failures: list[tuple[int, BaseException]] = []
    lock = threading.Lock()

    def run_rank(rank: int) -> None:
        world.take_seat(world.ThreadSeat(hub, rank, n, ranks_per_node, store))
        try:
            if initialize:
                world.init(**config)
            results[rank] = fn(*args)
        except BaseException as error:  # Re-raised by the caller, whatever it is.
            with lock:
                failures.append((rank, error))
            hub.abort(f"rank {rank} failed: {type(error).__name__}: {error}")
        finally:
            world.leave_seat()

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(n)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    while any(thread.is_alive() for thread in threads):
        if failures:
            deadline = min(deadline, time.monotonic() + _END_LIMIT_S)
        for thread in threads:
            thread.join(timeout=0.01 if not failures else 0.05)
        if time.monotonic() > deadline:
            break
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if failures:
        raise _first_cause(failures, n)
    if stuck:
        frames = sys._current_frames()
        text = f"run_ranks: rank {stuck[0]} of {n} was still busy after {timeout_s:g} s, in\n"
        frame = frames.get(threads[stuck[0]].ident or 0)
        text += "".join(traceback.format_stack(frame)[-4:]) if frame else "native code"
        hub.abort("run_ranks ran out of time")
        raise TimeoutError(text)
    return results


def _first_cause(failures: Sequence[tuple[int, BaseException]], n: int) -> BaseException:
    """The first failure that is not the echo of another rank's."""
    causes = [item for item in failures if not isinstance(item[1], CommError)]
    rank, error = (causes or list(failures))[0]
    error.add_note(f"raised on rank {rank} of {n}")
    return error


@dataclass(frozen=True)
class ParityRun:
    """One degree's losses beside those of the plain run, by step."""

    degree: int
    sharded: tuple[float, ...]
    plain: tuple[float, ...]
    tolerance: float
    plain_spread: float
    """Largest relative difference between the plain run and a plain run that sums the same
    gradients in another order: what rounding alone does to this model and optimizer."""

    @property
    def differences(self) -> tuple[float, ...]:
        """Relative, by step."""
        return tuple(map(_relative_difference, self.sharded, self.plain))

    @property
    def largest(self) -> float:
        return max(self.differences)

    @property
    def ok(self) -> bool:
        return self.largest <= self.tolerance


@dataclass(frozen=True)
class ParityResult:
    """What ``parity`` found, on every rank."""

    runs: tuple[ParityRun, ...]

    @property
    def largest(self) -> float:
        """Largest relative difference of all degrees."""
        return max(run.largest for run in self.runs)

    @property
    def ok(self) -> bool:
        return all(run.ok for run in self.runs)


def parity(
    build_model: Callable[[], nn.Module],
    batches: Sequence[Any] | torch.Tensor | Callable[[int], Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    *,
    steps: int = 20,
    build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    degree: int | Sequence[int] | None = None,
    accumulation: int = 1,
    tolerance: float = 1e-6,
    spread_factor: float = 0.0,
    seed: int = 0,
    unit: Any = None,
    optimizer_options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> ParityResult:
    """Trains a model sharded over the ranks and plainly in this process, and compares the losses.

    Each step takes ``accumulation`` global batches. The plain run sees whole batches, a rank its
    share of the rows. Prints a table on rank 0.

    Collective: all ranks; under ``hopshard run``, torchrun or mpirun, or inside ``run_ranks``.

    Args:
        build_model: Makes the model; called with ``seed`` set, so all copies are equal.
        batches: Global batches, a sequence or a function of the index: a tensor, or a tuple,
            list or dict of tensors, whose first dimension the number of ranks divides.
        loss_fn: ``loss_fn(model, batch)`` is the mean over the batch's rows. It must not be
            divided by ``accumulation``; that is done here, as a training script does.
        steps: Optimizer steps.
        build_optimizer: Makes a torch optimizer from parameters; plain SGD with lr 0.1 if None.
        degree: One or several degrees; None takes the world that exists, or degree 1.
        accumulation: Backward passes per optimizer step.
        tolerance: Largest relative difference of losses that passes.
        spread_factor: Where rounding is amplified, as by Adam: a difference of up to this many
            times ``ParityRun.plain_spread`` passes as well.
        seed: For ``build_model``.
        unit: See ``DistributedModel``; None takes its default.
        optimizer_options: Keyword arguments of ``DistributedOptimizer``.
        quiet: Print nothing.

    Returns:
        The losses and differences.

    Raises:
        AssertionError: a difference above the tolerance, on every rank, with the table.
    """
    build_optimizer = build_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    get_batch = batches if callable(batches) else batches.__getitem__
    task = _Task(build_model, get_batch, loss_fn, build_optimizer, steps, accumulation, seed)
    degrees = [degree] if isinstance(degree, int) else degree
    here = world.init() if degrees is None else world.init_again(_config_for(degrees[0]))
    plain = task.train_plain(shares=1)
    spread = max(map(_relative_difference, task.train_plain(shares=max(2, here.size)), plain))
    runs: list[ParityRun] = []
    for wanted in degrees or [here.layout.degree]:
        if wanted != here.layout.degree:
            here = world.init_again(_config_for(wanted))
        sharded = task.train_sharded(here, unit, optimizer_options or {})
        limit = max(tolerance, spread_factor * spread)
        runs.append(ParityRun(wanted, tuple(sharded), tuple(plain), limit, spread))
    result = ParityResult(tuple(runs))
    text = format_parity(result, here.size)
    if here.rank == 0 and not quiet:
        print(text, flush=True)
    if not result.ok:
        raise AssertionError(f"sharded and plain training differ\n{text}")
    return result


def format_parity(result: ParityResult, num_ranks: int) -> str:
    """The table that ``parity`` prints. Pure."""
    lines: list[str] = []
    for run in result.runs:
        lines.append(f"parity: {num_ranks} ranks, degree {run.degree}, {len(run.plain)} steps")
        lines.append(f"{'step':>6}  {'loss sharded':>16}  {'loss plain':>16}  {'difference':>10}")
        rows = zip(run.sharded, run.plain, run.differences, strict=True)
        for step, (sharded, plain, difference) in enumerate(rows):
            lines.append(f"{step:>6}  {sharded:>16.10f}  {plain:>16.10f}  {difference:>10.2e}")
        lines.append(
            f"largest relative difference {run.largest:.2e}, tolerance {run.tolerance:.0e}: "
            f"{'ok' if run.ok else 'FAILED'} (two plain runs differ by {run.plain_spread:.2e}; "
            f"median {statistics.median(run.differences):.2e})"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class _Task:
    """One training task, to be run in several ways."""

    build_model: Callable[[], nn.Module]
    get_batch: Callable[[int], Any]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    steps: int
    accumulation: int
    seed: int

    def seeded_model(self) -> nn.Module:
        with _build_lock, torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.build_model()

    def train_plain(self, shares: int) -> list[float]:
        """In this process; with ``shares`` above 1 each batch is summed in so many parts."""
        model = self.seeded_model()
        optimizer = self.build_optimizer(model.parameters())
        losses: list[float] = []
        for step in range(self.steps):
            optimizer.zero_grad()
            total = 0.0
            for index in range(step * self.accumulation, (step + 1) * self.accumulation):
                for share in range(shares):
                    part = _share(self.get_batch(index), share, shares)
                    loss = self.loss_fn(model, part) / self.accumulation
                    (loss / shares).backward()
                    total += float(loss.detach().double()) / shares
            optimizer.step()
            losses.append(total)
        return losses

    def train_sharded(
        self, here: world.World, unit: Any, optimizer_options: Mapping[str, Any]
    ) -> list[float]:
        import hopshard as hs  # The package imports this module's neighbours first.

        wrapping = {} if unit is None else {"unit": unit}
        model = hs.DistributedModel(
            self.seeded_model(), backward_passes_per_step=self.accumulation, **wrapping
        )
        optimizer = hs.DistributedOptimizer(
            self.build_optimizer(model.parameters()), **optimizer_options
        )
        losses = torch.zeros(self.steps, dtype=torch.float64)
        for step in range(self.steps):
            optimizer.zero_grad()
            for index in range(step * self.accumulation, (step + 1) * self.accumulation):
                part = _share(self.get_batch(index), here.rank, here.size)
                loss = self.loss_fn(model, part) / self.accumulation
                model.backward(loss)
                losses[step] += loss.detach().double()
            optimizer.step()
        here.groups.world.all_reduce(losses, tag="parity/losses").wait()
        return [float(loss) / here.size for loss in losses]


def _share(batch: Any, share: int, shares: int) -> Any:
    """Rows of one rank: the ``share``-th of equal parts."""
    if isinstance(batch, torch.Tensor):
        rows = batch.shape[0]
        if rows % shares:
            raise InvalidArgument(
                f"parity: a batch of {rows} rows does not split evenly over {shares} ranks"
            )
        size = rows // shares
        return batch[share * size : (share + 1) * size]
    if isinstance(batch, Mapping):
        return {key: _share(value, share, shares) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_share(value, share, shares) for value in batch)
    return batch


def _config_for(degree: int) -> Config:
    return Config(sharded_data_parallel_degree=degree).with_environment(os.environ)


def _relative_difference(a: float, b: float) -> float:
    if a == b:
        return 0.0
    difference = abs(a - b) / max(abs(a), abs(b))
    return difference if math.isfinite(difference) else math.inf
