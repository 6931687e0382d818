"""The world that this process (or this thread, in tests) is a rank of.

``init`` finds the launcher, connects the ranks, proves that they agree and builds the groups of
the layout (D1), over the transports that fit, or over a ``LocalHub`` where threads act as ranks.
Next: model.py.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import hashlib
import itertools
import json
import logging
import os
import pathlib
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from hopshard import _C
from hopshard.config import Config
from hopshard.consistency import as_items, check_agreement, exchange_texts
from hopshard.endings import ExceptHook, await_idle_gloo, reporting_excepthook
from hopshard.errors import ConfigError, Error, InvalidArgument
from hopshard.launch_env import (
    Place,
    derive_ranks_per_node,
    detect_launch,
)
from hopshard.link_costs import LinkCosts, describe_link_costs, load_link_costs
from hopshard.torch_groups import TorchGroups, milliseconds
from hopshard.transports import Algorithm, Choice, Offer, Transports, choose

_log = logging.getLogger("hopshard")

_EXIT_LIMIT_S: Final = 5.0  # How long a failed rank may take to end before it is cut off.
_STORE_GRACE_S: Final = 1.0
"""How long a failed rank still serves the store, in which the others look for the reason."""
_MAX_GROUPS_SHOWN: Final = 4


@dataclass(frozen=True)
class World:
    """This rank's place, its groups and what they measure. Built by ``init``."""

    config: Config
    """The effective configuration, environment included."""
    launcher: str
    """Who started the ranks, for people."""
    layout: _C.GroupLayout
    groups: _C.ProcessGroups
    """Communicators ``world``, ``sharding`` and ``replication``; each counts into ``meter``."""
    meter: _C.Meter
    """Calls and bytes of all groups of this rank."""
    rank: int
    size: int
    local_rank: int
    """Place on its node; follows ``ranks_per_node`` where that emulates nodes."""
    local_size: int
    transports: Transports | None = None
    """Makes the communicators of processes; None where ranks are threads."""
    model_numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)
    """The models of this world, in the order of their making."""

    @property
    def node(self) -> int:
        return self.layout.node_of(self.rank)

    @property
    def num_nodes(self) -> int:
        return self.layout.node_of(self.size - 1) + 1

    def connect(
        self, backend: str, ranks: Sequence[int] | None = None, algorithm: Algorithm = "auto"
    ) -> _C.Communicator:
        """A communicator of one's own, beside those of the world; two ranks or more.

        Collective: ``ranks``.

        Args:
            backend: One name for a flat communicator, or one inside nodes and one between them
                ("shm+c10d"), whose chunks lie in slice order.
            ranks: Global ranks in ascending order; None is all.
            algorithm: "flat" or "hierarchical" for one of them at every size; "auto" picks per
                call.

        Raises:
            ConfigError: no such backend, not available here, or no two-level group.
        """
        members = list(range(self.size)) if ranks is None else list(ranks)
        if self.rank not in members or len(members) < 2:
            raise InvalidArgument(
                f"connect needs two ranks or more, this rank ({self.rank}) among them: {members}"
            )
        slots: list[int] = []
        if "+" in backend:
            # Two levels gather in place only where chunks lie in slice order.
            counts = list(Counter(map(self.layout.node_of, members)).values())
            if len(set(counts)) == 1:
                slots = _C.SliceOrder(len(counts), counts[0]).slots()
        group = _C.Group(f"{backend}{members}", members, members.index(self.rank), slots)
        if self.transports is None:
            raise ConfigError("ranks that are threads are connected by their hub only")
        made = self.transports.connect(group, Choice.parse(backend), algorithm)
        assert made is not None
        return made

    def barrier(self) -> None:
        """Returns when all ranks have called it. Collective: the world."""
        self.groups.world.barrier(tag="barrier")

    def abort(self, reason: str) -> None:
        """Wakes all ranks that wait in a collective of this world, with CommError."""
        groups = self.groups
        for communicator in (groups.world, groups.sharding, groups.replication, groups.secondary):
            with contextlib.suppress(Error):  # One broken group must not keep the others waiting.
                if communicator is not None:
                    communicator.abort(reason)


@dataclass(frozen=True)
class ThreadSeat:
    """A place for a thread that acts as a rank (see testing.run_ranks)."""

    hub: _C.LocalHub
    rank: int
    size: int
    ranks_per_node: int | None = None
    store: _C.Store | None = None
    """Shared by the threads, for backends that connect through one."""


class _ThreadState(threading.local):
    seat: ThreadSeat | None = None
    world: World | None = None


@dataclass
class _ProcessState:
    world: World | None = None
    groups: TorchGroups = field(default_factory=TorchGroups)
    excepthook: ExceptHook | None = None
    """Ours, once it is installed."""
    failed: bool = False


_thread = _ThreadState()
_process = _ProcessState()
_init_lock = threading.RLock()


def init(config: Mapping[str, Any] | Config | None = None, **kw: Any) -> World:
    """Connects this rank to the others and builds the groups.

    Uses torch's default process group if there is one, else creates it. A second call without
    arguments, or with the same configuration, returns the same world.

    Collective: all ranks of the job.

    Example:
        >>> import hopshard as hs
        >>> world = hs.init(sharded_data_parallel_degree=1)

    Args:
        config: See ``Config``; a mapping, a Config or None.
        **kw: Fields of ``Config`` that override ``config``'s.

    Raises:
        ConfigError: illegal settings, a degree that does not divide the world, ranks that
            disagree, or a world that exists with another configuration. On every rank.
        CommError: the ranks could not connect.
    """
    with contextlib.nullcontext() if _thread.seat else _init_lock:
        if _thread.seat is None:
            _set_exit_hooks()  # First of all: the launcher wants to know of every error.
        existing = _thread.world if _thread.seat else _process.world
        if existing is not None and config is None and not kw:
            return existing
        wanted = Config.from_user(config, **kw).with_environment(os.environ)
        if existing is not None:
            return _same_world(existing, wanted)
        if _thread.seat is not None:
            _thread.world = _join_hub(_thread.seat, wanted)
            return _thread.world
        _process.world = _join_processes(wanted)
        return _process.world


def shutdown() -> None:
    """Leaves the world, and destroys torch's process group if ``init`` created it.

    Does nothing without a world. Afterwards ``init`` may be called again.

    Collective: all ranks; waits for them, so that none loses a peer that it still needs.
    """
    _leave(destroy_process_group=True)


def init_again(config: Config) -> World:
    """A world with another configuration over the same processes or threads.

    Collective: all ranks. Objects of the old world must not be used any more.
    """
    existing = _find()
    if existing is not None and existing.config == config:
        return existing
    _leave(destroy_process_group=False)
    return init(config)


def take_seat(seat: ThreadSeat) -> None:
    """Lets the calling thread act as a rank; ``init`` in it joins the seat's hub."""
    _thread.seat, _thread.world = seat, None


def leave_seat() -> None:
    """The calling thread is a thread of the process again. Not collective."""
    _thread.seat = _thread.world = None


def is_initialized() -> bool:
    """True between ``init`` and ``shutdown``."""
    return _find() is not None


def current() -> World:
    """This rank's world.

    Raises:
        ConfigError: ``init`` was not called.
    """
    world = _find()
    if world is None:
        raise ConfigError("hopshard is not initialised; call hopshard.init(...) first")
    return world


def rank() -> int:
    """This rank, 0 to size() - 1."""
    return current().rank


def size() -> int:
    """Ranks of the world (n)."""
    return current().size


def local_rank() -> int:
    """This rank's place on its node."""
    return current().local_rank


def local_size() -> int:
    """Ranks on this node."""
    return current().local_size


def node() -> int:
    """This rank's node, from 0."""
    return current().node


def num_nodes() -> int:
    """Nodes of the world."""
    return current().num_nodes


def dp_rank() -> int:
    """This rank's place among those that read different data: all of them, at any degree."""
    return current().rank


def dp_size() -> int:
    """Ranks that read different data: ``size()`` at any degree."""
    return current().size


def sharding_rank() -> int:
    """This rank's place in its sharding group."""
    return int(current().groups.sharding.rank)


def sharding_size() -> int:
    """Ranks of a sharding group: the degree."""
    return int(current().groups.sharding.size)


def replication_rank() -> int:
    """Which replica of the model this rank belongs to."""
    return int(current().groups.replication.rank)


def replication_size() -> int:
    """Replicas of the model."""
    return int(current().groups.replication.size)


def tp_rank() -> int:
    """0: there is no tensor parallelism."""
    current()
    return 0


def tp_size() -> int:
    """1: there is no tensor parallelism."""
    current()
    return 1


def pp_rank() -> int:
    """0: there is no pipeline parallelism."""
    current()
    return 0


def pp_size() -> int:
    """1: there is no pipeline parallelism."""
    current()
    return 1


def barrier() -> None:
    """Returns when all ranks have called it. Collective: the world."""
    current().barrier()


def describe_layout(
    layout: _C.GroupLayout, *, launcher: str, backend: str, title: str = "hopshard"
) -> str:
    """The layout in two lines for people. Pure."""
    world_size, ranks_per_node = layout.world_size, layout.ranks_per_node
    full_nodes, rest = divmod(world_size, ranks_per_node)
    nodes = f"{full_nodes} {'node' if full_nodes == 1 else 'nodes'} x {ranks_per_node}"
    nodes += f" + 1 node x {rest}" if rest else ""
    sharding = [layout.sharding_group(r) for r in range(0, world_size, layout.degree)]
    replication = [layout.replication_group(r) for r in range(layout.degree)]
    replicas = layout.num_replicas
    shown = f"{world_size} {'rank' if world_size == 1 else 'ranks'} = {nodes}"
    return (
        f"{title}: {shown} · degree {layout.degree} · "
        f"{replicas} {'replica' if replicas == 1 else 'replicas'} · {backend} · {launcher}\n"
        f"{title}: sharding groups {_show_groups(sharding)} · "
        f"replication groups {_show_groups(replication)}"
    )


def _show_groups(groups: Sequence[Sequence[int]]) -> str:
    def show(group: Sequence[int]) -> str:
        if len(group) <= 8:
            return "{" + " ".join(map(str, group)) + "}"
        return "{" + f"{group[0]} {group[1]} … {group[-1]}" + "}"

    shown = " ".join(show(group) for group in groups[:_MAX_GROUPS_SHOWN])
    more = len(groups) - _MAX_GROUPS_SHOWN
    return f"{shown} … {more} more" if more > 0 else shown


@functools.cache
def code_version() -> str:
    """Version and a hash of all sources, native and Python; equal on all ranks of a sane job."""
    digest = hashlib.blake2b(digest_size=6)
    root = pathlib.Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return f"{_C.build_id}+py.{digest.hexdigest()}"


def _find() -> World | None:
    return _thread.world if _thread.seat is not None else _process.world


def _same_world(existing: World, wanted: Config) -> World:
    if existing.config != wanted:
        held, asked = existing.config.model_dump(), wanted.model_dump()
        changes = ", ".join(
            f"'{key}' {held[key]!r} -> {asked[key]!r}" for key in held if held[key] != asked[key]
        )
        raise ConfigError(
            f"hopshard is initialised already, with another configuration: {changes}. "
            "Call hopshard.shutdown() first"
        )
    return existing


def _join_hub(seat: ThreadSeat, config: Config) -> World:
    numbers = itertools.count()

    def connect(group: _C.Group) -> _C.Communicator:
        if config.backend == "shm" and seat.store is not None and len(group.ranks) > 1:
            # All ranks connect the same kinds of groups in the same order.
            store = seat.store.prefixed(f"{next(numbers)}/{group.ranks}/")
            return _C.connect_backend("shm", store, group, milliseconds(config))
        return seat.hub.communicator(group)

    per_node = config.ranks_per_node or seat.ranks_per_node or seat.size
    return _build(
        config,
        launcher="threads",
        rank=seat.rank,
        size=seat.size,
        find_ranks_per_node=lambda _: per_node,
        connect_world=connect,
        transports_of=lambda _: None,
    )


def _join_processes(config: Config) -> World:
    launch = detect_launch(os.environ)
    group, launch = _process.groups.connect_default(launch, config)
    if "HOPSHARD_LAUNCHER" in os.environ and _process.excepthook is not None:
        # Torch wraps it to put "[rank0]:" before each line; our launcher does that.
        sys.excepthook = _process.excepthook

    def connect_world(world: _C.Group) -> _C.Communicator:
        return _C.c10d_communicator(group, world, milliseconds(config))

    offers: list[Offer] = []

    def find_ranks_per_node(world: _C.Communicator) -> int:
        host = socket.gethostname()
        node_id = os.environ.get("HOPSHARD_NODE_ID") or None
        local_rank = launch.local_rank if launch.local_size and node_id is None else None
        mine = [node_id or host, local_rank, asdict(Offer.here(host))]
        texts = exchange_texts(world, json.dumps(mine), tag="places")
        everyone = [json.loads(text) for text in texts]
        offers[:] = [Offer(**offer) for _, _, offer in everyone]
        places = [Place(node, local) for node, local, _ in everyone]
        return config.ranks_per_node or derive_ranks_per_node(places)

    def transports_of(layout: _C.GroupLayout) -> Transports:
        return Transports(
            choose(config.backend, offers, layout.node_of),
            store=_C.c10d_store(_process.groups.store()),
            make_process_group=lambda part: _process.groups.make_group(part, config),
            ranks_per_node=layout.ranks_per_node,
            # The ranks hold equal files, or equal errors, which all of them raise here.
            costs=load_link_costs(config.link_costs) if config.link_costs else LinkCosts(),
            timeout_ms=milliseconds(config),
        )

    world = _build(
        config,
        launcher=launch.launcher,
        rank=launch.rank,
        size=launch.size,
        find_ranks_per_node=find_ranks_per_node,
        connect_world=connect_world,
        transports_of=transports_of,
    )
    _C.set_log_level(config.log_level)
    if world.rank == 0 and config.log_level in ("debug", "info"):
        assert world.transports is not None
        backend = world.transports.choice.describe(world.num_nodes)
        text = describe_layout(world.layout, launcher=launch.launcher, backend=backend)
        print(text, file=sys.stderr, flush=True)
    return world


def _build(
    config: Config,
    *,
    launcher: str,
    rank: int,
    size: int,
    find_ranks_per_node: Callable[[_C.Communicator], int],
    connect_world: Callable[[_C.Group], _C.Communicator],
    transports_of: Callable[[_C.GroupLayout], Transports | None],
) -> World:
    """The order matters: ranks that disagree on the degree would wait in different groups."""
    everyone = connect_world(_C.Group("world", list(range(size)), rank))
    agreed = {
        **as_items(config.must_agree()),
        "code version": json.dumps(code_version()),
        "link_costs file": describe_link_costs(config.link_costs),
    }
    check_agreement(everyone, "configuration", agreed)
    layout = _C.GroupLayout(
        size, find_ranks_per_node(everyone), config.sharded_data_parallel_degree
    )
    meter = _C.Meter()
    transports = transports_of(layout)

    def connect_and_record(group: _C.Group) -> _C.Communicator:
        connected = transports.connect(group) if transports else connect_world(group)
        if connected is not None and config.simulate_delays_us > 0:
            connected = _C.simulated_communicator(connected, config.simulate_delays_us)
        return _C.recording_communicator(connected, group, meter, layout.ranks_per_node)

    groups = _C.make_process_groups(
        layout, rank, connect_and_record, secondary_degree=config.secondary_degree
    )
    here = layout.node_of(rank)
    return World(
        config=config,
        launcher=launcher,
        layout=layout,
        groups=groups,
        meter=meter,
        rank=rank,
        size=size,
        local_rank=layout.local_rank_of(rank),
        local_size=sum(layout.node_of(r) == here for r in range(size)),
        transports=transports,
    )


def _leave(*, destroy_process_group: bool, wait_for_peers: bool = True) -> None:
    if _thread.seat is not None:
        world, _thread.world = _thread.world, None
        if world is not None and wait_for_peers:
            world.barrier()
        return
    with _init_lock:
        world, _process.world = _process.world, None
        try:
            if world is not None and wait_for_peers:
                world.barrier()
        finally:
            _process.groups.drop(destroy_default=destroy_process_group)


def _set_exit_hooks() -> None:
    if _process.excepthook is None:
        atexit.register(_at_exit)
        sys.excepthook = _process.excepthook = reporting_excepthook(sys.excepthook, _wake_peers)


def _wake_peers(reason: str) -> None:
    _process.failed = True
    if _process.world is not None:
        _process.world.abort(f"rank {_process.world.rank} failed: {reason}")
        if _process.groups.serves_store(_process.world.rank):
            time.sleep(_STORE_GRACE_S)


def _at_exit() -> None:
    """Ends this process even if a peer is gone: gloo's destructor waits for its queue."""
    await_idle_gloo()
    if _process.world is None and not _process.groups.owns_default:
        return
    faulthandler.dump_traceback_later(_EXIT_LIMIT_S, exit=True, file=sys.__stderr__ or 2)
    try:
        # No barrier here: the peers may be dead, or may never come.
        _leave(destroy_process_group=not _process.failed, wait_for_peers=False)
    except (Error, RuntimeError) as problem:
        _log.warning("while leaving the world: %s", problem)
    if not _process.failed:
        faulthandler.cancel_dump_traceback_later()
