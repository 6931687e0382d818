"""Which backend carries which group, and the communicators over it.

A choice is one backend for ranks of one node and one between nodes. Groups of one node, and groups
with one rank a node, are flat; groups of whole nodes get both, in slice order, and the algorithm
is picked per call (collectives/select.hpp). Next: world.py.
"""

from __future__ import annotations

import itertools
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch.distributed import ProcessGroup

from hopshard import _C
from hopshard.config import BACKENDS
from hopshard.errors import ConfigError, name_ranks
from hopshard.link_costs import LinkCosts

Algorithm = Literal["auto", "flat", "hierarchical"]

_ONE_HOST: Final = frozenset({"shm"})


@dataclass(frozen=True)
class Choice:
    """The backends of a world."""

    intra_node: str
    inter_node: str

    @classmethod
    def parse(cls, text: str) -> Choice:
        """From "c10d" or "shm+c10d" (inside nodes + between them); see ``Config.backend``."""
        names = text.split("+")
        if len(names) > 2 or not set(names) <= set(BACKENDS):
            raise ConfigError(
                f"backend {text!r}: legal are {', '.join(BACKENDS)}, or one inside nodes and one "
                "between them, such as 'shm+c10d'"
            )
        return cls(names[0], names[-1])

    def describe(self, num_nodes: int) -> str:
        """For people."""
        if self.intra_node == self.inter_node or num_nodes == 1:
            return self.intra_node
        return f"{self.intra_node} inside nodes, {self.inter_node} between them"


@dataclass(frozen=True)
class Offer:
    """What one rank can use; ranks tell each other at start-up."""

    host: str
    """Real host, whatever node the rank plays."""
    missing: Mapping[str, str]
    """Backends that are not available to this rank, and why."""
    has_efa: bool
    has_gpu: bool

    @classmethod
    def here(cls, host: str) -> Offer:
        """This process's."""
        missing = {info.name: info.why_not for info in _C.backends() if info.why_not is not None}
        return cls(host, missing, has_efa=has_efa_device(), has_gpu=torch.cuda.is_available())


def choose(wanted: str, offers: Sequence[Offer], node_of: Callable[[int], int]) -> Choice:
    """The backends that all ranks use, from every rank's offer (index = rank). Pure.

    Raises:
        ConfigError: a wanted backend is not available on some rank, or cannot reach its peers.
    """
    ranks = range(len(offers))
    nodes = [[*members] for _, members in itertools.groupby(ranks, node_of)]
    split_nodes = [node for node in nodes if len({offers[rank].host for rank in node}) > 1]
    if wanted == "auto":
        # Shared memory moves CPU tensors only; torch's groups move both.
        everybody = not any("shm" in offer.missing or offer.has_gpu for offer in offers)
        intra_node = "shm" if everybody and not split_nodes else "c10d"
        efa = all(offer.has_efa and "ofi" not in offer.missing for offer in offers)
        return Choice(intra_node, "ofi" if efa else "c10d")
    choice = Choice.parse(wanted)
    for name in dict.fromkeys((choice.intra_node, choice.inter_node)):
        without = [rank for rank in ranks if name in offers[rank].missing]
        if without:
            raise ConfigError(
                f"backend '{name}' is not available on {name_ranks(without)}: "
                f"{offers[without[0]].missing[name]}"
            )
    if choice.intra_node in _ONE_HOST and split_nodes:
        raise ConfigError(
            f"backend '{choice.intra_node}' reaches the ranks of one host, but "
            f"{name_ranks(split_nodes[0])} are said to share a node and run on "
            f"{', '.join(sorted({offers[rank].host for rank in split_nodes[0]}))}"
        )
    if choice.inter_node in _ONE_HOST and len({offer.host for offer in offers}) > 1:
        raise ConfigError(
            f"backend '{choice.inter_node}' cannot reach other hosts; between nodes take another: "
            f"'{choice.inter_node}+c10d'"
        )
    return choice


def has_efa_device() -> bool:
    """An Elastic Fabric Adapter is there, whether or not it can be used."""
    return any(
        (device / "device/driver").resolve().name == "efa"
        for device in pathlib.Path("/sys/class/infiniband").glob("*")
    )


class Transports:
    """Makes the communicators of one rank of a world of processes."""

    def __init__(
        self,
        choice: Choice,
        *,
        store: _C.Store,
        make_process_group: Callable[[_C.Group], ProcessGroup],
        ranks_per_node: int,
        costs: LinkCosts,
        timeout_ms: int,
    ) -> None:
        self.choice = choice
        """The backends of the world's own groups."""
        self._store = store
        self._make_process_group = make_process_group
        self._ranks_per_node = ranks_per_node
        self._costs = costs
        self._timeout_ms = timeout_ms
        self._num_connected: Counter[tuple[object, ...]] = Counter()

    def connect(
        self, group: _C.Group, choice: Choice | None = None, algorithm: Algorithm = "auto"
    ) -> _C.Communicator | None:
        """A communicator of ``group``; None for one rank, where every operation is the identity.

        Collective: the group. ``choice`` None is the world's.
        """
        choice = choice or self.choice
        if group.size == 1:
            return None
        if len({rank // self._ranks_per_node for rank in group.ranks}) == 1:
            return self._connect_flat(choice.intra_node, group)
        parts = _C.plan_node_parts(group, self._ranks_per_node)
        # Slots in the order of the ranks do for sums, which is what such groups are for.
        why_not = ""
        if parts is None:
            why_not = "it does not have two ranks or more, equally many, on each of its nodes"
        elif group.slots and not _C.has_slice_order(group, parts.num_nodes, parts.ranks_per_node):
            why_not = "its slots are not in slice order"
        if algorithm == "hierarchical" and why_not:
            raise ConfigError(f"group '{group.name}' cannot be hierarchical: {why_not}")
        flat = None
        if algorithm != "hierarchical":
            flat = self._connect_flat(choice.inter_node, group)
        if flat is not None and (algorithm == "flat" or why_not):
            return flat
        assert parts is not None
        hierarchical = _C.hierarchical_communicator(
            group,
            self._connect_flat(choice.intra_node, parts.intra_node),
            self._connect_flat(choice.inter_node, parts.inter_node),
            self._fresh_store("hierarchical", group),
            self._timeout_ms,
        )
        if flat is None:
            return hierarchical
        return _C.selecting_communicator(
            flat,
            hierarchical,
            parts.num_nodes,
            parts.ranks_per_node,
            self._costs.as_native(),
            store=self._fresh_store("selecting", group),
        )

    def _connect_flat(self, backend: str, group: _C.Group) -> _C.Communicator:
        if backend == "c10d":
            return _C.c10d_communicator(
                self._make_process_group(group),
                group,
                self._timeout_ms,
                self._make_process_group,
                self._store,
                is_sole_user=True,
            )
        store = self._fresh_store(backend, group)
        return _C.connect_backend(backend, store, group, self._timeout_ms)

    def _fresh_store(self, purpose: str, group: _C.Group) -> _C.Store:
        """Keys that nobody has used: the members connect in one order, so they count alike."""
        key = (purpose, *group.ranks)
        self._num_connected[key] += 1
        return self._store.prefixed("/".join(map(str, (*key, self._num_connected[key]))))
