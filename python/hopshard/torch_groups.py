"""Torch process groups under a world: the default one, those of parts, and their store.

Groups are made in Python, because torch's wheels bring no gloo headers; ``_C.c10d_communicator``
takes them from there. Next: transports.py.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hopshard import _C
from hopshard.config import Config
from hopshard.errors import CommError, ConfigError
from hopshard.launch_env import LaunchEnvironment


class TorchGroups:
    """The process groups that this process has made; one per process."""

    def __init__(self) -> None:
        self.owns_default = False
        """``connect_default`` created torch's default group."""
        self._beside: dist.ProcessGroup | None = None
        self._num_made: Counter[tuple[int, ...]] = Counter()
        self._num_worlds = 0
        # Kept until the process ends: rank 0 may serve it to the others.
        self._store: Store | None = None
        self._num_connects = 0

    def connect_default(
        self, launch: LaunchEnvironment, config: Config
    ) -> tuple[dist.ProcessGroup, LaunchEnvironment]:
        """Torch's default group, created if there is none, or a gloo one beside it."""
        self._num_worlds += 1
        self._num_made.clear()
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            if (rank, size) != (launch.rank, launch.size):
                if launch.launcher != "single process":
                    raise ConfigError(
                        f"torch's process group says rank {rank} of {size}, but "
                        f"{launch.launcher} says rank {launch.rank} of {launch.size}"
                    )
                # Started by the program itself, e.g. torch.multiprocessing; hosts tell the nodes.
                launch = LaunchEnvironment("torch process group", rank, size, 0, 0)
            group = dist.group.WORLD
            assert group is not None
            if "gloo" in str(dist.get_backend_config(group)):
                return group, launch
            self._beside = dist.new_group(backend="gloo", timeout=time_limit(config))
            return self._beside, launch
        try:
            dist.init_process_group(
                "gloo",
                timeout=time_limit(config),
                rank=launch.rank,
                world_size=launch.size,
                store=self._next_store(launch, config),
            )
        except (RuntimeError, ValueError) as error:  # torch's errors derive from these.
            raise CommError(
                f"rank {launch.rank} of {launch.size} ({launch.launcher}) could not connect within "
                f"{config.timeout_s:g} s to rank 0 at "
                f"{launch.master_address}:{launch.master_port}: {error}"
            ) from error
        self.owns_default = True
        group = dist.group.WORLD
        assert group is not None
        return group, launch

    def store(self) -> Store:
        """A part of the default group's store that nobody else writes to. Not collective."""
        default = dist.group.WORLD
        assert default is not None
        return PrefixStore(f"hopshard/world{self._num_worlds}", _store_of(default))

    def serves_store(self, rank: int) -> bool:
        """The other ranks lose the job's store when this process ends."""
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return self.owns_default and rank == 0 and not by_launcher

    def make_group(self, group: _C.Group, config: Config) -> dist.ProcessGroup:
        """A gloo group of some ranks.

        Collective: its members only, where ``torch.distributed.new_group`` needs all ranks.
        """
        ranks = tuple(group.ranks)
        self._num_made[ranks] += 1
        name = f"gloo/{'_'.join(map(str, ranks))}/{self._num_made[ranks]}"
        store = PrefixStore(name, self.store())
        gloo = dist.ProcessGroup.BackendType.GLOO
        made = dist.ProcessGroup(store, group.rank, group.size)
        made._set_default_backend(gloo)
        backend = dist.ProcessGroupGloo(store, group.rank, group.size, time_limit(config))
        backend._set_sequence_number_for_group()
        made._register_backend(torch.device("cpu"), gloo, backend)
        return made

    def drop(self, *, destroy_default: bool) -> None:
        """Destroys the default group if ``connect_default`` created it, else the one beside it."""
        alive = dist.is_available() and dist.is_initialized()
        if self._beside is not None and alive:
            # The program may have destroyed it before us.
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(self._beside)
        self._beside = None
        if destroy_default and self.owns_default:
            if alive:
                dist.destroy_process_group()
            self.owns_default = False

    def _next_store(self, launch: LaunchEnvironment, config: Config) -> Store:
        """A part of the job's store that no earlier world of this process has written to."""
        if self._store is None and launch.size == 1:
            self._store = dist.HashStore()  # type: ignore[attr-defined]
        elif self._store is None:
            address = (
                "env://"
                if launch.uses_env_rendezvous
                else f"tcp://{launch.master_address}:{launch.master_port}"
            )
            connected = rendezvous(address, launch.rank, launch.size, timeout=time_limit(config))
            self._store, _, _ = next(connected)
        self._num_connects += 1
        return PrefixStore(f"hopshard/{self._num_connects}", self._store)


def _store_of(group: dist.ProcessGroup) -> Store:
    store = dist.distributed_c10d._world.pg_map[group][1]
    assert store is not None
    return store


def time_limit(config: Config) -> datetime.timedelta:
    """Of torch's collectives."""
    return datetime.timedelta(seconds=config.timeout_s)


def milliseconds(config: Config) -> int:
    """Of ours."""
    return max(1, round(config.timeout_s * 1000))
