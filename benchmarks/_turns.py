"""Processes that take turns: each arm of step_time.py lives in one of its own on every rank.

A rank (``Seat``) forks one process per arm, so that no arm shares groups, threads, allocator or
patched modules with another, and asks them one at a time; the others sleep in a read. ``Worker`` is
the arm's side. Next: step_time.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import multiprocessing
import os
import pathlib
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from benchmarks._arms import KINDS, Arm, Trainer, Workload, connect, make_batches

ANSWER_LIMIT_S: Final = 600.0  # DeepSpeed compiles a part of itself when it is first used.
_END_LIMIT_S: Final = 20.0
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG


class ArmError(RuntimeError):
    """An arm could not do what it was asked for; the text is its own."""


@dataclass(frozen=True)
class Place:
    """A rank, and where rank 0 serves the store."""

    rank: int
    nodes: int
    address: str
    port: int

    @classmethod
    def here(cls) -> Place:
        """As the launcher says."""
        size, per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return cls(
            int(os.environ["RANK"]),
            size // per_node,
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
        )

    def store(self, *, serve: bool = False) -> Store:
        limit = datetime.timedelta(seconds=ANSWER_LIMIT_S)
        return dist.TCPStore(  # type: ignore[attr-defined]
            self.address, self.port, is_master=serve, timeout=limit, wait_for_workers=False
        )


# --- The arm's side


class Worker:
    """One arm on one rank. Collective: every method, among the ranks of the arm."""

    def __init__(self, arm: Arm, workload: Workload, place: Place) -> None:
        self._arm, self._workload, self._place = arm, workload, place
        self._trainer: Trainer | None = None
        self._seconds: list[float] = []
        self._sent: list[int] = []
        self._losses: list[torch.Tensor] = []

    def connect(self, serve: bool = False) -> None:
        limit = datetime.timedelta(seconds=self._workload.timeout_s)
        store = self._place.store(serve=serve)
        connect(store, self._arm, self._place.rank, self._workload, limit)

    def verify(self, workload: Workload, steps: int) -> list[float]:
        """The world's mean losses of some steps with SGD, which shows a gradient's scale."""
        trainer = KINDS[self._arm.name].build(self._arm, workload, "sgd")
        losses = [
            trainer.step(make_batches(workload, self._place.rank, step)) for step in range(steps)
        ]
        trainer.close()
        del trainer
        gc.collect()
        return self._world_mean(losses)

    def build(self) -> None:
        self._trainer = KINDS[self._arm.name].build(self._arm, self._workload, "adamw")

    def begin(self) -> None:
        """Forgets the steps so far: they were warm-up."""
        assert self._trainer is not None
        self._trainer.begin_counting()
        self._seconds, self._sent = [], []

    def step(self, index: int) -> None:
        """A step ends when the slowest rank is done."""
        assert self._trainer is not None
        micro_batches = make_batches(self._workload, self._place.rank, index)
        dist.barrier()
        sent = _sent_bytes(self._place.nodes)
        begin = time.perf_counter()
        loss = self._trainer.step(micro_batches)
        dist.barrier()
        self._seconds.append(time.perf_counter() - begin)
        self._sent.append(_sent_bytes(self._place.nodes) - sent)
        self._losses.append(loss)

    def report(self) -> dict[str, Any]:
        """Of the slowest rank, and of the node that sent most."""
        assert self._trainer is not None
        most = torch.tensor([self._seconds, self._sent], dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        seconds, sent = most.tolist()
        return {
            "backend": self._trainer.backend,
            "seconds": seconds,
            "sent_bytes": sent,
            "losses": self._world_mean(self._losses),
            "account": self._trainer.account(),
        }

    def end(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
        dist.barrier()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _world_mean(self, losses: Sequence[torch.Tensor]) -> list[float]:
        total = torch.stack(list(losses))
        dist.all_reduce(total)
        return [float(loss) / self._workload.ranks for loss in total]


def _sent_bytes(nodes: int) -> int:
    """What this node's network carried away so far; on one host, its loopback."""
    total = 0
    for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if (name.strip() == "lo") == (nodes == 1):
            total += int(counters.split()[8])
    return total


def _serve(pipe: Connection, arm: Arm, workload: Workload, place: Place) -> None:
    """The forked process: answers until it is asked to end."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    torch.set_num_threads(1)
    worker = Worker(arm, workload, place)
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            try:
                answer = getattr(worker, name)(*arguments)
            except BaseException:  # Whatever it is, the rank must hear of it.
                pipe.send((False, traceback.format_exc()))
                return
            pipe.send((True, answer))
            if name == "end":
                return


# --- The rank's side


@dataclass
class _Held:
    process: BaseProcess
    pipe: Connection


@dataclass
class Seat:
    """One rank's processes. Use as a context manager: leaving it ends them.

    Fork before anything starts a thread.
    """

    arms: Sequence[Arm]
    workload: Workload
    place: Place
    _held: dict[Arm, _Held] = field(default_factory=dict)

    def __enter__(self) -> Seat:
        context = multiprocessing.get_context("fork")
        gc.freeze()  # What was imported stays shared: no collection touches it.
        for arm in self.arms:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, arm, self.workload, self.place), daemon=True
            )
            process.start()
            theirs.close()
            self._held[arm] = _Held(process, ours)
        return self

    def __exit__(self, *exception: object) -> None:
        for held in self._held.values():
            held.process.join(0 if exception[0] is not None else _END_LIMIT_S)
            if held.process.is_alive():
                held.process.kill()
                held.process.join()

    def ask(self, arm: Arm, name: str, *arguments: Any, limit_s: float = ANSWER_LIMIT_S) -> Any:
        """Calls a method of the arm's ``Worker`` there. Collective: all ranks.

        Raises:
            ArmError: it raised, died or did not answer in time.
        """
        pipe = self._held[arm].pipe
        try:
            pipe.send((name, arguments))
            if not pipe.poll(limit_s):
                raise ArmError(f"{arm.label}: no answer to '{name}' within {limit_s:g} s")
            is_well, answer = pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = self._held[arm].process.exitcode
            raise ArmError(f"{arm.label}: its process died in '{name}', code {code}") from None
        if not is_well:
            raise ArmError(f"{arm.label}: '{name}' failed\n{answer}")
        return answer
