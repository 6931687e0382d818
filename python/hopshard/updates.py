"""How each kind of torch optimizer updates this rank's slices, and where its state lies.

``FusedAdam`` and ``FusedSgd`` keep their moments in arenas laid out like the masters and run one
native pass per parameter group; ``Pieces`` runs any element-wise torch optimizer on 1-D pieces.
Next: step.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from hopshard import _C
from hopshard.errors import ConfigError

if TYPE_CHECKING:
    from hopshard.model import DistributedModel

_PART_ALIGNMENT: Final = 32  # Elements: a cache-line pair of fp32.


def make_update(optimizer: torch.optim.Optimizer, model: DistributedModel) -> Update:
    """The fused update where it does exactly what ``optimizer`` would, else the general one."""
    groups = optimizer.param_groups
    unusual = ("amsgrad", "capturable", "differentiable")
    if not any(group.get(flag) for group in groups for flag in unusual):
        if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            return FusedAdam(optimizer, model)
        if type(optimizer) is torch.optim.SGD:
            return FusedSgd(optimizer, model)
    return Pieces(optimizer, model)


def is_initial(state: dict[str, Any]) -> bool:
    """The state is as it was when the optimizer was built: no step has been counted."""
    return "step" in state and float(state["step"]) == 0


class Update(ABC):
    """Updates the parameters of one optimizer. Parameters are indexed as in the engine."""

    writes_shards = False
    """``step`` writes the engine's ``shard_arenas``, too."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: DistributedModel) -> None:
        self.optimizer = optimizer
        self.engine = model._engine
        self.places = model._places
        self.group_of: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                index = model._index_of[id(parameter)]
                if index in self.group_of:
                    name = self.places[index].name
                    raise ConfigError(f"parameter '{name}' is in two parameter groups")
                if self.places[index].is_trainable:
                    self.group_of[index] = number

    @abstractmethod
    def step(self, scale: float) -> None:
        """One update; ``scale`` multiplies the gradients."""

    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of state on this rank."""

    @abstractmethod
    def full_state(self, index: int, *, keep: bool) -> dict[str, Any]:
        """One parameter's state, whole. Collective: the sharding group."""

    @abstractmethod
    def load_state(self, index: int, state: dict[str, Any]) -> None:
        """This rank's part of a whole state; empty: the parameter was never updated."""


class _Part:
    """What a rank updates of an arena, where replicas share the optimizer's state.

    Replicas hold the same masters. With ``optimizer_state_sharding="world"`` each keeps the moments
    of its part and updates that; the parts are then broadcast between them.
    """

    def __init__(self, numel: int, replication: _C.Communicator, divided: bool) -> None:
        size = replication.size if divided else 1
        part = -(-numel // size // _PART_ALIGNMENT) * _PART_ALIGNMENT
        self.ranges = [(min(i * part, numel), min((i + 1) * part, numel)) for i in range(size)]
        self.begin, self.end = self.ranges[replication.rank if divided else 0]
        self._replication = replication

    def of(self, arena_like: torch.Tensor) -> torch.Tensor:
        return arena_like[self.begin : self.end]

    def share(self, arena_like: torch.Tensor, begin: int, end: int, tag: str) -> None:
        """Makes elements ``begin`` to ``end`` whole on all replicas. Collective: replication."""
        if len(self.ranges) == 1:
            return
        works = []
        for owner, (first, last) in enumerate(self.ranges):
            first, last = max(first, begin), min(last, end)
            if first < last:
                works.append(self._replication.broadcast(arena_like[first:last], owner, tag=tag))
        for work in works:
            work.wait()


class _Fused(Update):
    """Moments in arenas, one native pass per run of parameters of one group and age."""

    moment_names: tuple[str, ...]

    def __init__(self, optimizer: torch.optim.Optimizer, model: DistributedModel) -> None:
        super().__init__(optimizer, model)
        masters = self.engine.master_arenas()
        self.masters = masters
        config = model.world.config
        self.divided = config.optimizer_state_sharding == "world"
        replication = self.engine.groups.replication
        self.parts = [_Part(m.numel(), replication, self.divided) for m in masters]
        # Replicas of a slice round alike, slices each in their own way.
        self.roundings: list[_C.StochasticRounding | None] = [None] * len(masters)
        if config.optimizer_state_dtype == "bf16":
            if any(master.dtype == torch.float64 for master in masters):
                raise ConfigError(
                    "optimizer_state_dtype='bf16' with fp64 parameters: only moments of fp32, bf16 "
                    "and fp16 parameters are kept in bf16; use 'fp32', which keeps those of fp64 "
                    "parameters in fp64"
                )
            self.roundings = [
                _C.StochasticRounding(
                    seed=config.optimizer_state_seed,
                    stream=self.engine.groups.sharding.rank,
                    first_element=part.begin,
                )
                for part in self.parts
            ]
        self.moments: dict[str, list[torch.Tensor]] = {name: [] for name in self.moment_names}
        # The updates of the last steps, what they were built from, and how many steps they have
        # counted that `steps` has not.
        self.updates: list[_C.ShardUpdate] = []
        self.flags = b""
        self.num_unbooked = 0
        self._steps = dict.fromkeys(self.group_of, 0)
        trainable = [i for i, place in enumerate(self.places) if place.is_trainable]
        self.by_arena = [
            [i for i in trainable if self.engine.arena_of(i) == arena]
            for arena in range(len(masters))
        ]
        self.extent = {
            i: (
                self.engine.arena_begin_of(i),
                self.engine.arena_begin_of(i) + self.places[i].piece_numel,
            )
            for i in trainable
        }

    @property
    def steps(self) -> dict[int, int]:
        """Updates so far, by parameter. Whoever asks may change them: updates are built anew."""
        if self.num_unbooked:
            for index in self.group_of:
                self._steps[index] += self.num_unbooked * self.flags[index]
            self.flags, self.num_unbooked = b"", 0
        return self._steps

    def _advance(self) -> list[_C.ShardUpdate]:
        """Counts this step for the parameters that have a gradient.

        A steady step looks at no single parameter.
        """
        flags = self.engine.gradient_flags()
        if flags == self.flags:
            for update in self.updates:
                update.advance()
        else:
            self.updates = self._updates_of(flags)
            self.flags = flags
        self.num_unbooked += 1
        return self.updates

    def _updates_of(self, has_gradient: bytes) -> list[_C.ShardUpdate]:
        steps = self.steps
        updates = []
        for part, indices in zip(self.parts, self.by_arena, strict=True):
            segments = []
            for i in indices:
                begin = max(self.extent[i][0], part.begin) - part.begin
                end = min(self.extent[i][1], part.end) - part.begin
                # A parameter without a piece here lies between its neighbours: leave it out.
                if begin < end:
                    skipped = _C.Segment.SKIPPED
                    group = self.group_of.get(i, skipped) if has_gradient[i] else skipped
                    segments.append(_C.Segment(begin, end, group, steps.get(i, 0) + 1))
            updates.append(_C.ShardUpdate(part.end - part.begin, segments))
        return updates

    def _share_masters(self) -> None:
        for part, master in zip(self.parts, self.masters, strict=True):
            part.share(master, 0, master.numel(), "weights")

    def state_bytes(self) -> int:
        return sum(moment.nbytes for moments in self.moments.values() for moment in moments)

    def full_state(self, index: int, *, keep: bool) -> dict[str, Any]:
        if self.steps.get(index, 0) == 0:
            return {}
        arena = self.engine.arena_of(index)
        state: dict[str, Any] = {}
        for name in self._used_moments(index):
            moments = self._whole(self.moments[name][arena], arena, *self.extent[index])
            full = self.engine.gather_full(moments, index, "optimizer")
            if keep:  # Torch's optimizers want moments in the dtype in which they compute.
                state[name] = full.to(self.masters[arena].dtype)
        return state

    def _whole(self, moments: torch.Tensor, arena: int, begin: int, end: int) -> torch.Tensor:
        """Laid out like the arena, and right from ``begin`` to ``end``."""
        if not self.divided:
            return moments
        whole = torch.empty_like(self.masters[arena], dtype=moments.dtype)
        self.parts[arena].of(whole).copy_(moments)
        self.parts[arena].share(whole, begin, end, "optimizer")
        return whole

    def load_state(self, index: int, state: dict[str, Any]) -> None:
        if index not in self.group_of:
            return
        arena = self.engine.arena_of(index)
        part = self.parts[arena]
        begin = max(self.extent[index][0], part.begin)
        end = min(self.extent[index][1], part.end)
        for name in self.moment_names:
            if begin >= end:
                continue
            mine = self.moments[name][arena][begin - part.begin : end - part.begin]
            if state.get(name) is None:
                mine.zero_()
            else:
                piece = self.engine.piece_from_full(index, state[name])
                first = begin - self.extent[index][0]
                mine.copy_(piece[first : first + end - begin])

    def _allocate_moments(self) -> None:
        """Does nothing where they are there."""
        for name, moments in self.moments.items():
            self.moments[name] = moments or [
                torch.zeros_like(part.of(master), dtype=torch.bfloat16 if rounding else None)
                for part, master, rounding in zip(
                    self.parts, self.masters, self.roundings, strict=True
                )
            ]

    def _used_moments(self, index: int) -> tuple[str, ...]:
        return self.moment_names


class FusedAdam(_Fused):
    """Adam and AdamW."""

    moment_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, optimizer: torch.optim.Optimizer, model: DistributedModel) -> None:
        super().__init__(optimizer, model)
        self._allocate_moments()
        self.shards = self.engine.shard_arenas()
        # fp16 shards, and those whose masters other replicas update, are copied after the step.
        self.writes_shards = not self.divided and all(
            shard is None or shard.dtype == torch.bfloat16 for shard in self.shards
        )

    def step(self, scale: float) -> None:
        settings = [
            _C.AdamSettings(
                lr=float(group["lr"]),
                beta1=float(group["betas"][0]),
                beta2=float(group["betas"][1]),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                decoupled_weight_decay=type(self.optimizer) is torch.optim.AdamW
                or bool(group.get("decoupled_weight_decay", False)),
                maximize=bool(group["maximize"]),
            )
            for group in self.optimizer.param_groups
        ]
        gradients = self.engine.gradient_arenas()
        for arena, update in enumerate(self._advance()):
            part = self.parts[arena]
            update.adam(
                part.of(self.masters[arena]),
                part.of(gradients[arena]),
                self.moments["exp_avg"][arena],
                self.moments["exp_avg_sq"][arena],
                settings,
                scale,
                self.shards[arena] if self.writes_shards else None,
                self.roundings[arena],
            )
        self._share_masters()

    def full_state(self, index: int, *, keep: bool) -> dict[str, Any]:
        state = super().full_state(index, keep=keep)
        return {"step": torch.tensor(float(self.steps[index])), **state} if state else {}

    def load_state(self, index: int, state: dict[str, Any]) -> None:
        super().load_state(index, state)
        if index in self.group_of:
            self.steps[index] = int(state.get("step", 0))


class FusedSgd(_Fused):
    """SGD with or without momentum."""

    moment_names = ("momentum_buffer",)

    def __init__(self, optimizer: torch.optim.Optimizer, model: DistributedModel) -> None:
        super().__init__(optimizer, model)
        if any(group["momentum"] for group in optimizer.param_groups):
            self._allocate_moments()  # Plain SGD has no state.

    def step(self, scale: float) -> None:
        settings = [
            _C.SgdSettings(
                lr=float(group["lr"]),
                momentum=float(group["momentum"]),
                dampening=float(group["dampening"]),
                weight_decay=float(group["weight_decay"]),
                nesterov=bool(group["nesterov"]),
                maximize=bool(group["maximize"]),
            )
            for group in self.optimizer.param_groups
        ]
        if not self.moments["momentum_buffer"] and any(s.momentum for s in settings):
            self._allocate_moments()
            self.steps.update(dict.fromkeys(self.group_of, 0))
        buffers: Sequence[torch.Tensor | None] = self.moments["momentum_buffer"] or [None] * len(
            self.masters
        )
        gradients = self.engine.gradient_arenas()
        for arena, update in enumerate(self._advance()):
            part = self.parts[arena]
            master, gradient = part.of(self.masters[arena]), part.of(gradients[arena])
            update.sgd(master, gradient, buffers[arena], settings, scale, self.roundings[arena])
        self._share_masters()

    def _used_moments(self, index: int) -> tuple[str, ...]:
        group = self.optimizer.param_groups[self.group_of[index]]
        return self.moment_names if self.moments["momentum_buffer"] and group["momentum"] else ()

    def full_state(self, index: int, *, keep: bool) -> dict[str, Any]:
        state = super().full_state(index, keep=keep)
        if state and any(self.roundings):  # Not torch's: the rounding goes on where it was.
            state["step"] = torch.tensor(float(self.steps[index]))
        return state

    def load_state(self, index: int, state: dict[str, Any]) -> None:
        if index not in self.group_of:
            return
        has_momentum = state.get("momentum_buffer") is not None
        if has_momentum:
            self._allocate_moments()
        if self.moments["momentum_buffer"]:
            super().load_state(index, state)
        self.steps[index] = int(state.get("step", 1)) if has_momentum else 0


class Pieces(Update):
    """A torch optimizer as it is, on this rank's pieces of the masters."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: DistributedModel) -> None:
        config = model.world.config
        for field, refused, legal, what in (
            ("optimizer_state_sharding", "world", "group", "divided over the world"),
            ("optimizer_state_dtype", "bf16", "fp32", "kept in bf16"),
        ):
            if getattr(config, field) == refused:
                raise ConfigError(
                    f"{field}='{refused}' with {type(optimizer).__name__}: only the state of Adam, "
                    "AdamW (without amsgrad, capturable and differentiable) and SGD is "
                    f"{what}; use '{legal}'"
                )
        super().__init__(optimizer, model)
        masters = self.engine.master_arenas()
        self.pieces: dict[int, torch.Tensor] = {
            index: self.engine.piece_of(masters[self.engine.arena_of(index)], index)
            .detach()
            .requires_grad_()
            for index in self.group_of
        }
        self.index_of = model._index_of
        # Adagrad makes its state when it is built, of whole parameters.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                initial = optimizer.state.pop(parameter, None)
                if initial:
                    self.load_state(self.index_of[id(parameter)], initial)

    def step(self, scale: float) -> None:
        gradients = self.engine.gradient_arenas()
        if scale != 1.0:
            for arena in gradients:
                arena.mul_(scale)
        has_gradient = self.engine.gradient_flags()
        for index, piece in self.pieces.items():
            piece.grad = (
                self.engine.piece_of(gradients[self.engine.arena_of(index)], index)
                if has_gradient[index]
                else None
            )
        originals = [group["params"] for group in self.optimizer.param_groups]
        try:
            for group in self.optimizer.param_groups:
                group["params"] = [
                    self.pieces[self.index_of[id(p)]]
                    for p in group["params"]
                    if self.index_of[id(p)] in self.pieces
                ]
            self.optimizer.step()
        finally:
            for group, original in zip(self.optimizer.param_groups, originals, strict=True):
                group["params"] = original
            for piece in self.pieces.values():
                piece.grad = None

    def state_bytes(self) -> int:
        return sum(
            value.nbytes
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )

    def full_state(self, index: int, *, keep: bool) -> dict[str, Any]:
        if index not in self.pieces:
            return {}
        piece = self.pieces[index]
        arena = self.engine.arena_of(index)
        state: dict[str, Any] = {}
        for name, value in self.optimizer.state.get(piece, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == piece.shape:
                # gather_full reads an arena; only this parameter's range of it is looked at.
                carrier = torch.empty_like(self.engine.master_arenas()[arena], dtype=value.dtype)
                self.engine.piece_of(carrier, index).copy_(value)
                full = self.engine.gather_full(carrier, index, "optimizer")
                if keep:
                    state[name] = full
            elif keep:  # A copy like the others: the optimizer counts on in its own.
                state[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return state

    def load_state(self, index: int, state: dict[str, Any]) -> None:
        if index not in self.pieces:
            return
        piece = self.pieces[index]
        shape = self.places[index].parameter.shape
        mine: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == shape and value.dim() > 0:
                part = self.engine.piece_from_full(index, value)
                # State of 16-bit parameters is fp32, as their masters.
                dtype = piece.dtype if value.is_floating_point() else value.dtype
                mine[name] = part.to(dtype, copy=True)
            elif isinstance(value, torch.Tensor):
                mine[name] = value.clone()
            else:
                mine[name] = value
        if mine:
            self.optimizer.state[piece] = mine
        else:
            self.optimizer.state.pop(piece, None)
