"""Torch process groups under a world: the default one, the sub-groups, and their store.

Groups are made in Python, because torch's wheels bring no gloo headers; ``_C.c10d_communicator``
takes them from there. Next: world.py.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable

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
        self._made: list[dist.ProcessGroup] = []
        # Kept until the process ends: rank 0 may serve it to the others.
        self._store: Store | None = None
        self._num_connects = 0

    def connect_default(
        self, launch: LaunchEnvironment, config: Config
    ) -> tuple[dist.ProcessGroup, LaunchEnvironment]:
        """Torch's default group, created if there is none, or a gloo one beside it."""
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
            beside = dist.new_group(backend="gloo", timeout=time_limit(config))
            self._made.append(beside)
            return beside, launch
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

    def connect_sub_groups(
        self, layout: _C.GroupLayout, everyone: dist.ProcessGroup, rank: int, config: Config
    ) -> Callable[[_C.Group], _C.Communicator | None]:
        """Creates all groups on all ranks, in one order, as torch requires."""
        size = layout.world_size
        members = [layout.sharding_group(r) for r in range(0, size, layout.degree)]
        members += [layout.replication_group(r) for r in range(layout.degree)]
        known: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(size)): everyone}
        for ranks in map(tuple, members):
            if len(ranks) > 1 and ranks not in known:
                made = dist.new_group(list(ranks), backend="gloo", timeout=time_limit(config))
                if rank in ranks:
                    known[ranks] = made
                    self._made.append(made)

        def connect(group: _C.Group) -> _C.Communicator | None:
            process_group = known.get(tuple(group.ranks))
            if process_group is None:
                return None  # One rank: every operation is the identity.
            return _C.c10d_communicator(process_group, group, milliseconds(config))

        return connect

    def drop(self, *, destroy_default: bool) -> None:
        """Destroys the sub-groups, and the default group if ``connect_default`` created it."""
        alive = dist.is_available() and dist.is_initialized()
        for group in reversed(self._made):
            if alive:
                with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                    dist.destroy_process_group(
                        group
                    )  # The program may have destroyed it before us.
        self._made.clear()
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


def time_limit(config: Config) -> datetime.timedelta:
    """Of torch's collectives."""
    return datetime.timedelta(seconds=config.timeout_s)


def milliseconds(config: Config) -> int:
    """Of ours."""
    return max(1, round(config.timeout_s * 1000))
