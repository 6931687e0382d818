"""How a model is cut into units: the parameters that travel together.

A unit is a submodule, usually one block. What no unit holds, and what several share, belongs to
the root (unit 0), which stays gathered from the start of the forward to the end of the backward.
Next: hooks.py.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from hopshard.errors import ConfigError

UnitChoice = (
    type[nn.Module] | str | Callable[[str, nn.Module], bool] | Sequence["type[nn.Module] | str"]
)
"""A module class, a pattern of module names (``"transformer.h.*"``), a predicate of name and
module, or a sequence of classes and patterns."""

_PERSISTENT: Final = "<persistent>"  # No module has such a name.
_MAX_PARTS: Final = 8  # Without repeated blocks: units of at most an eighth of the model.


@dataclass
class Unit:
    """Parameters that travel together, and the module whose forward needs them."""

    name: str
    module: nn.Module
    parameter_names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    holders: list[nn.Module] = field(default_factory=list)
    """Modules that directly hold one of the parameters."""
    is_persistent: bool = False
    """Small parameters of all units, gathered once per step."""


def split_into_units(
    module: nn.Module, unit: UnitChoice | None = None, persistence_threshold: int = 0
) -> list[Unit]:
    """Cuts ``module``; the root comes first, then the units in the order of ``named_modules``.

    Args:
        module: The user's model.
        unit: What makes a unit. None: the items of ``nn.ModuleList``s; if there are none,
            submodules of at most an eighth of the parameters. Never a container without a forward
            of its own, nor a part of one of torch's own layers.
        persistence_threshold: Parameters with fewer elements make a last, persistent unit.

    Raises:
        ConfigError: no parameters, or ``unit`` matches no module with parameters.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if not names:
        raise ConfigError(
            f"{type(module).__name__} has no parameters: there is nothing to shard or to train"
        )
    chosen = {
        id(member): name
        for name, member in _choose(module, unit)
        if any(True for _ in member.parameters())
    }
    if unit is not None and not chosen:
        raise ConfigError(
            f"unit={unit!r} matches no submodule with parameters; module names are "
            + ", ".join(name for name, _ in list(module.named_modules())[1:6])
            + ", …"
        )

    units: dict[str, Unit] = {"": Unit("root", module)}
    for name, member in module.named_modules():
        if id(member) in chosen and member is not module:
            units[name] = Unit(name, member)

    owners: dict[int, set[str]] = {}
    holders: dict[int, list[nn.Module]] = {}
    for holder, unit_name in _walk(module, chosen):
        for parameter in holder._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(unit_name)
                holders.setdefault(id(parameter), []).append(holder)

    for name, parameter in module.named_parameters():
        owned_by = owners[id(parameter)]
        # A parameter that two units use must be there for both: the root always is.
        owner = units[next(iter(owned_by))] if len(owned_by) == 1 else units[""]
        if parameter.numel() < persistence_threshold:
            owner = units.setdefault(_PERSISTENT, Unit("persistent", module, is_persistent=True))
        owner.parameter_names.append(name)
        owner.parameters.append(parameter)
        for holder in holders[id(parameter)]:
            if not any(holder is known for known in owner.holders):
                owner.holders.append(holder)
    return [found for found in units.values() if found.parameters or found.module is module]


def _choose(module: nn.Module, unit: UnitChoice | None) -> Iterator[tuple[str, nn.Module]]:
    if unit is None:
        blocks = list(_repeated_blocks(module, ""))
        yield from blocks or _parts_by_size(module, "", _numel(module) / _MAX_PARTS)
        return
    matches = _matcher(unit)
    for name, member in module.named_modules():
        if member is not module and matches(name, member):
            yield name, member


def _matcher(unit: UnitChoice) -> Callable[[str, nn.Module], bool]:
    if isinstance(unit, type):
        return lambda name, member: isinstance(member, unit)
    if isinstance(unit, str):
        return lambda name, member: fnmatch.fnmatchcase(name, unit)
    if isinstance(unit, Sequence):
        matchers = [_matcher(choice) for choice in unit]
        return lambda name, member: any(matches(name, member) for matches in matchers)
    if callable(unit):
        return unit
    raise ConfigError(
        f"unit={unit!r} is neither a module class, a name pattern, a predicate nor a sequence of "
        "them"
    )


def _repeated_blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The items of ModuleLists that run by themselves, outermost lists only."""
    for name, child in module.named_children():
        in_list = isinstance(module, nn.ModuleList)
        if in_list and _has_forward(child) and any(True for _ in child.parameters()):
            yield prefix + name, child
        else:
            yield from _repeated_blocks(child, f"{prefix}{name}.")


def _parts_by_size(
    module: nn.Module, prefix: str, target_numel: float
) -> Iterator[tuple[str, nn.Module]]:
    if _reads_its_parts(module):
        return
    for name, child in module.named_children():
        numel = _numel(child)
        has_parts = any(_numel(part) > 0 for part in child.children())
        is_whole = numel <= target_numel or not has_parts or _reads_its_parts(child)
        if numel > 0 and is_whole and _has_forward(child):
            yield prefix + name, child
        else:
            yield from _parts_by_size(child, f"{prefix}{name}.", target_numel)


def _has_forward(module: nn.Module) -> bool:
    """False for ParameterList, ModuleDict and their like, which are only looked into."""
    return type(module).forward is not nn.Module.forward


def _reads_its_parts(module: nn.Module) -> bool:
    """Torch's own layers, such as MultiheadAttention, use weights of parts they do not call."""
    return (
        type(module).__module__.startswith("torch.nn.modules")
        and not isinstance(module, nn.Sequential)
        and _has_forward(module)
    )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _walk(module: nn.Module, chosen: dict[int, str]) -> Iterator[tuple[nn.Module, str]]:
    """Every module with the unit it is in; more than once if it is reached in several units."""
    seen: set[tuple[int, str]] = set()
    names = {id(member): name for name, member in module.named_modules()}

    def visit(member: nn.Module, unit_name: str) -> Iterator[tuple[nn.Module, str]]:
        if id(member) in chosen and member is not module:
            unit_name = names[id(member)]
        if (id(member), unit_name) in seen:
            return
        seen.add((id(member), unit_name))
        yield member, unit_name
        for child in member.children():
            yield from visit(child, unit_name)

    yield from visit(module, "")
