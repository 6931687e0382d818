"""What step_time.py runs: which arms take turns on which workload, for how long.

Pure. The presets measure every promise of _step_goals.py; a test compares. Next: step_time.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks._arms import Workload
from benchmarks._step_goals import CLUSTER, LOCAL, ONE_HOST, Case, Promise

GOAL_MODEL: Final = "11M"
GOAL_BATCH: Final = 2
"""What the goals were set for."""


@dataclass(frozen=True)
class Run:
    """Arms that take turns in one set of processes, and for how long."""

    arms: tuple[str, ...]
    degrees: tuple[int, ...]
    accumulation: int
    ranks: int = 4
    dtype: str = "fp32"
    rate: str | None = None
    """Of each of two emulated nodes; None is this host alone."""
    network: str = ONE_HOST
    """In words, for the record."""
    steps: int = 20
    """Timed ones of each arm, if the seconds allow."""
    seconds: float = 120.0
    warmup_steps: int = 2
    verified_steps: int = 3
    memory: tuple[str, ...] = ()
    """Arms whose memory is measured too, each in processes of its own."""
    model: str = GOAL_MODEL
    batch: int = GOAL_BATCH
    backend: str = "auto"

    @property
    def workload(self) -> Workload:
        return Workload(
            self.model, self.ranks, self.batch, self.accumulation, self.dtype, self.backend
        )

    @property
    def case(self) -> Case:
        network = self.network if self.rate is None else f"2 x 2, {self.rate} per node"
        return Case(network, self.dtype, self.accumulation, self.ranks)

    @property
    def has_goals(self) -> bool:
        return (self.model, self.batch) == (GOAL_MODEL, GOAL_BATCH)

    def quick(self) -> Run:
        small: dict[str, Any] = {"model": "tiny", "batch": 1, "steps": 2, "seconds": 5.0}
        small |= {"warmup_steps": 1, "verified_steps": 2}
        # Each costs a start of all ranks.
        memory = tuple(name for name in self.memory if name in ("hopshard", "fsdp2", "hsdp"))
        return dataclasses.replace(self, memory=memory, **small)

    def options(self) -> list[str]:
        """This run as arguments, for its ranks."""
        values = {
            "arms": ",".join(self.arms),
            "degrees": ",".join(map(str, self.degrees)),
            "warmup-steps": self.warmup_steps,
            "verified-steps": self.verified_steps,
        }
        plain = ("accumulation", "ranks", "dtype", "network", "steps", "seconds", "model", "batch")
        values |= {name: getattr(self, name) for name in (*plain, "backend")}
        return [part for name, value in values.items() for part in (f"--{name}", str(value))]


_PEERS: Final = ("ddp", "fsdp2", "fsdp2_keep", "hsdp")
PRESETS: Final[dict[str, tuple[tuple[Run, ...], tuple[Promise, ...]]]] = {
    "local": (
        (
            Run(
                ("hopshard", "hopshard_gloo", *_PEERS, "zero3", "no_comm"),
                (4, 2),
                accumulation=1,
                memory=("hopshard", *_PEERS, "zero3"),
            ),
            Run(
                ("hopshard", "hopshard_gloo", *_PEERS, "hsdp_two_hop", "zero3", "no_comm"),
                (4, 2),
                accumulation=4,
                steps=14,
                seconds=250.0,
            ),
            Run(
                ("hopshard", "ddp", "fsdp2", "fsdp2_keep", "zero3", "no_comm"),
                (4,),
                accumulation=1,
                dtype="bf16",
                seconds=90.0,
            ),
            Run(("hopshard", "no_comm"), (1,), accumulation=1, ranks=1, steps=100, seconds=60.0),
        ),
        LOCAL,
    ),
    "cluster": (
        (
            Run(
                ("hopshard", "hopshard_node", *_PEERS, "hsdp_two_hop", "zero3"),
                (2, 4),
                accumulation=4,
                rate="1gbit",
                steps=9,
                seconds=240.0,
                verified_steps=2,
            ),
            Run(
                ("hopshard", "hopshard_node", "fsdp2", "fsdp2_keep"),
                (4,),
                accumulation=1,
                rate="1gbit",
                steps=12,
                seconds=60.0,
                verified_steps=2,
            ),
            Run(
                ("hopshard", "fsdp2", "hsdp", "hsdp_two_hop"),
                (2,),
                accumulation=4,
                rate="200mbit",
                steps=5,
                seconds=200.0,
                warmup_steps=1,
                verified_steps=2,
            ),
        ),
        CLUSTER,
    ),
}


def only(run: Run, names: Sequence[str]) -> Run:
    """The run with these arms alone."""
    arms = tuple(name for name in run.arms if name in names)
    memory = tuple(name for name in run.memory if name in names)
    return dataclasses.replace(run, arms=arms, memory=memory)
