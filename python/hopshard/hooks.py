"""Module events to the engine: the edge between torch's modules and the schedule.

Hooks sit on the modules of units and on modules that hold parameters of the root, never on the
inner modules of a unit, so that a compiled block has no graph break inside. Next: model.py.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from hopshard import _C
from hopshard.units import Unit


def attach_hooks(units: list[Unit], engine: _C.ShardEngine) -> None:
    """Reports the forwards of all units to ``engine``."""
    unit_modules = {id(unit.module) for unit in units}  # A persistent unit's is the root's.
    _attach(units[0].module, _before_root(engine), _after_root(engine))
    for index, unit in enumerate(units[1:], start=1):
        if not unit.is_persistent:
            _attach(unit.module, _before_unit(engine, index), _after_unit(engine, index))
    # Embedding, head, shared parts: gathered with the root, or by themselves when they are called
    # outside its forward.
    for holder in _holders_of_the_root(units):
        if id(holder) not in unit_modules:
            _attach(holder, _before_unit(engine, 0), _after_unit(engine, 0))


def _holders_of_the_root(units: list[Unit]) -> Iterable[nn.Module]:
    """And of persistent parameters, which come with any unit, where no unit runs around them."""
    inside = {
        id(part) for unit in units[1:] if not unit.is_persistent for part in unit.module.modules()
    }
    holders = {id(holder): holder for holder in units[0].holders}
    for unit in units:
        if unit.is_persistent:
            holders.update({id(h): h for h in unit.holders if id(h) not in inside})
    return holders.values()


def _attach(module: nn.Module, before: Any, after: Any) -> None:
    # First and last: users' own hooks see whole parameters, also those registered later.
    # always_call: the engine must know of a forward that ends in an exception.
    hooks = cast("OrderedDict[int, Any]", module._forward_hooks)
    handle = module.register_forward_hook(torch.compiler.disable(after), always_call=True)

    def before_and_last(module: nn.Module, args: Any) -> None:
        if next(reversed(hooks)) != handle.id:
            hooks.move_to_end(handle.id)
        before(module, args)

    module.register_forward_pre_hook(torch.compiler.disable(before_and_last), prepend=True)


def _before_root(engine: _C.ShardEngine) -> Any:
    def before_root_forward(module: nn.Module, args: Any) -> None:
        engine.before_root_forward()

    return before_root_forward


def _after_root(engine: _C.ShardEngine) -> Any:
    def after_root_forward(module: nn.Module, args: Any, output: Any) -> None:
        if _failed(output):
            engine.abandon_forward()
        else:
            engine.after_root_forward(list(tensors_in(output)))

    return after_root_forward


def _before_unit(engine: _C.ShardEngine, unit: int) -> Any:
    def before_forward(module: nn.Module, args: Any) -> None:
        engine.before_forward(unit)

    return before_forward


def _after_unit(engine: _C.ShardEngine, unit: int) -> Any:
    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        if _failed(output):
            engine.abandon_forward()
        else:
            engine.after_forward(unit, list(tensors_in(output)))

    return after_forward


def _failed(output: Any) -> bool:
    """Torch calls the hook with None while it handles the forward's exception."""
    return output is None and sys.exc_info()[0] is not None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors that can be reached: containers, dataclasses, plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        yield from _tensors_in(value, set())


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, str | bytes | int | float | complex | nn.Module | type):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, part.name) for part in dataclasses.fields(value)]
    else:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = [
            *getattr(value, "__dict__", {}).values(),
            *(getattr(value, name, None) for name in slots),
        ]
    for part in parts:
        yield from _tensors_in(part, seen)
