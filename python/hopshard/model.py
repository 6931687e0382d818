"""DistributedModel: a module whose parameters, gradients and optimizer state lie in slices.

Composes units, hooks and the native engine; knows no collective itself. Next: optimizer.py.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    _IncompatibleKeys,
    register_module_parameter_registration_hook,
)

from hopshard import _C, trace, world
from hopshard.consistency import check_agreement
from hopshard.errors import ConfigError
from hopshard.gradients import GradientAccess, ShardedGrad
from hopshard.hooks import attach_hooks
from hopshard.precision import LossScaler, Precision, attach_casts, dtypes_of_parameters
from hopshard.units import Unit, UnitChoice, split_into_units

if TYPE_CHECKING:
    from hopshard.optimizer import DistributedOptimizer

_ModelT = TypeVar("_ModelT", bound="DistributedModel")

# Where a parameter belongs: an attribute of the parameter, so that optimizers and unshard() find
# the model from what the user has in hand.
_OWNER = "_hopshard_owner"

_models: weakref.WeakSet[DistributedModel] = weakref.WeakSet()
_models_lock = threading.Lock()
_wrapped_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _LossScale(threading.local):
    num_microbatches: int = 1


_loss_scale = _LossScale()


class DistributedModel(nn.Module):
    """Keeps one slice of each unit on this rank; gathers the rest while it computes.

    A unit is a submodule whose parameters travel together. A backward reduces gradients inside
    the sharding group (hop 1); after ``backward_passes_per_step`` of them the replication groups
    sum the slices (hop 2). Gradients are the mean over the world. The loss is not divided by the
    number of passes: the script does that.

    Between uses parameters are placeholders: shape and dtype are right, and an access to their
    values raises an error that names the parameter; ``with hopshard.unshard(module):`` makes them
    whole.

    Collective: all ranks build and call the model in the same order.

    Example:
        >>> import hopshard as hs, torch
        >>> world = hs.init(sharded_data_parallel_degree=1)
        >>> model = hs.DistributedModel(torch.nn.Linear(2, 1))
        >>> optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.ones(4, 2)).mean().backward()
        >>> optimizer.step()

    Args:
        module: The model, on this rank's device. Rank 0's values become everyone's. It stays
            usable as ``.module``; its class and names do not change.
        unit: What makes a unit: a module class, a pattern of module names, a predicate
            ``(name, module) -> bool`` or a sequence of classes and patterns. None: the items of
            ``nn.ModuleList``; without any, submodules by size.
        backward_passes_per_step: Backward passes that make one optimizer step.
        precision: Dtypes of computation and reduction, loss scaling. None: the module's own dtypes,
            gradients travel in fp32.

    Raises:
        ConfigError: no parameters, a second wrapping, parameters that share memory without being
            the same object, or ranks that hold different models.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        unit: UnitChoice | None = None,
        backward_passes_per_step: int = 1,
        precision: Precision | None = None,
    ) -> None:
        super().__init__()
        current = world.current()
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"DistributedModel takes a torch.nn.Module, not {type(module).__name__}"
            )
        _check_not_wrapped(module)
        _check_no_shared_memory(module)
        if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
            raise ConfigError(
                f"backward_passes_per_step={backward_passes_per_step!r}: an integer of at least 1"
            )
        precision = Precision() if precision is None else precision
        if not isinstance(precision, Precision):
            raise ConfigError(
                f"precision takes a hopshard.Precision, not {type(precision).__name__}"
            )
        units = split_into_units(module, unit, current.config.param_persistence_threshold)
        dtypes = dtypes_of_parameters(precision, module)
        if current.config.check_consistency:
            description = _describe(module, units, backward_passes_per_step)
            description["precision"] = repr(precision)
            check_agreement(current.groups.world, "model", description)

        self.module = module
        self.world = current
        self.backward_passes_per_step = backward_passes_per_step
        self.precision = precision
        self.loss_scaler = None if precision.loss_scale is None else LossScaler(precision)
        self._units = units
        self._narrowed = {
            id(parameter): parameter.dtype
            for unit in units
            for parameter in unit.parameters
            if dtypes[id(parameter)] != parameter.dtype
        }
        """Parameters that got another dtype, by id, and the one that they had."""
        self._has_average = False
        """An average took the place of the weights; see ema.py."""
        self._optimizers: weakref.WeakSet[DistributedOptimizer] = weakref.WeakSet()
        self._engine = _C.ShardEngine(
            [
                _C.UnitSpec(
                    u.name,
                    u.parameter_names,
                    u.parameters,
                    u.is_persistent,
                    [dtypes[id(parameter)] for parameter in u.parameters],
                )
                for u in units
            ],
            current.groups,
            backward_passes_per_step,
            current.config.second_hop_bucket_bytes,
            current.config.prefetch_depth,
            bool(current.config.reshard_after_forward),
            current.config.simulate_delays_us > 0,
            None if precision.reduce_dtype == torch.float32 else precision.reduce_dtype,
        )
        self._follow_loss_scale()
        if current.config.trace_folder:
            number = next(current.model_numbers)
            trace.start(self, self._engine, current.config.trace_folder, current.rank, number)
        self._places = self._engine.parameters  # Every access to the engine's makes a new list.
        self._index_of = {id(place.parameter): i for i, place in enumerate(self._places)}
        self._gradients = GradientAccess(self._engine, self._places)
        self._engine.set_gradient_handles(
            [
                ShardedGrad(self._gradients, index, place.parameter) if place.is_trainable else None
                for index, place in enumerate(self._places)
            ]
        )
        for place in self._places:
            setattr(place.parameter, _OWNER, weakref.ref(self))
        self._broadcast_buffers()
        attach_casts(precision, module, {id(u.module) for u in units if not u.is_persistent})
        attach_hooks(units, self._engine)
        for member in module.modules():
            _wrapped_modules.add(member)
        with _models_lock:
            _models.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """``loss.backward(gradient)``; inside ``@hopshard.step`` the mean over micro-batches.

        With ``Precision(loss_scale=...)`` the loss is scaled, so this must be called then.
        """
        if _loss_scale.num_microbatches > 1:
            loss = loss / _loss_scale.num_microbatches
        if self.loss_scaler is not None:
            loss = self.loss_scaler.scaled(loss)
        loss.backward(gradient)

    def _follow_loss_scale(self) -> None:
        if self.loss_scaler is not None:
            self._engine.set_loss_scale(self.loss_scaler.scale)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, a backward stops after hop 1 and does not count as a pass of the step."""
        self._engine.hold_second_hop(True)
        try:
            yield
        finally:
            self._engine.hold_second_hop(False)

    def state_dict(  # type: ignore[override]
        self, *args: Any, rank0_only: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Whole parameters under the unwrapped module's keys; one unit is gathered at a time.

        Collective: the world.

        Args:
            *args: None are legal: torch's are for submodules.
            rank0_only: The other ranks take part but get an empty dict.
            **kwargs: None are legal.
        """
        if args or kwargs:
            raise ConfigError(
                "DistributedModel.state_dict takes only rank0_only: prefixes and destinations are "
                "for submodules, which are sharded"
            )
        entries: dict[str, Any] = self.module.state_dict(keep_vars=True)
        wanted = not rank0_only or self.world.rank == 0
        whole: dict[int, torch.Tensor] = {}
        for index, unit in enumerate(self._units):
            self._engine.pin(index)
            try:
                if wanted:
                    for parameter in unit.parameters:
                        dtype = self._narrowed.get(id(parameter), parameter.dtype)
                        whole[id(parameter)] = parameter.detach().to(dtype, copy=True)
            finally:
                self._engine.unpin(index, write_back=False)
            if any(id(parameter) in self._narrowed for parameter in unit.parameters):
                # The masters have more digits than what is gathered for the computation.
                for place, values in self._engine.gather_masters(index).items():
                    key = id(self._places[place].parameter)
                    if key in self._narrowed:
                        whole[key] = values.to(self._narrowed[key])
        if not wanted:
            return {}
        return {
            name: whole.get(id(value), value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in entries.items()
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Takes whole parameters under the unwrapped module's keys; each rank keeps its slices.

        Not collective, but every rank must load the same values.

        Raises:
            RuntimeError: keys or shapes do not fit, as in torch.
            ConfigError: ``assign``, which would replace the sharded parameters.
        """
        if assign:
            raise ConfigError("load_state_dict(assign=True) would replace the sharded parameters")
        entries: dict[str, Any] = self.module.state_dict(keep_vars=True)
        missing = [name for name in entries if name not in state_dict]
        unexpected = [name for name in state_dict if name not in entries]
        problems = []
        if strict and missing:
            problems.append(f"Missing key(s): {', '.join(missing)}.")
        if strict and unexpected:
            problems.append(f"Unexpected key(s): {', '.join(unexpected)}.")
        problems += [
            f"size mismatch for {name}: {tuple(state_dict[name].shape)} in the state dict, "
            f"{tuple(value.shape)} in the model."
            for name, value in entries.items()
            if name in state_dict
            and isinstance(value, torch.Tensor)
            and state_dict[name].shape != value.shape
        ]
        if problems:
            kind = type(self.module).__name__
            raise RuntimeError(
                f"Error(s) in loading state_dict for {kind}:\n\t" + "\n\t".join(problems)
            )
        for name, value in entries.items():
            if name not in state_dict:
                continue
            if id(value) in self._index_of:
                self._engine.write_parameter(self._index_of[id(value)], state_dict[name])
            elif isinstance(value, torch.Tensor):
                with torch.no_grad():
                    value.copy_(state_dict[name])
            else:
                owner = self.module.get_submodule(name.removesuffix("_extra_state").rstrip("."))
                owner.set_extra_state(state_dict[name])
        return _IncompatibleKeys(missing, unexpected)

    def statistics(self) -> dict[str, Any]:
        """What this rank holds and did so far.

        Returns:
            ``persistent_bytes`` (weights and gradients in slices), ``optimizer_bytes``,
            ``pool_bytes`` (gathered units, flat gradients, idle buffers), ``peak_bytes`` (the most
            of the three together), ``seconds`` by part that the computation stood still,
            ``hidden_seconds`` that collectives ran beside it and ``hidden_share`` of the two (lower
            bounds: up to when each was last seen running), ``pool_allocations`` (constant in a
            steady step) and ``num_deviations`` (units outside the order of the first step).
        """
        statistics = dict(self._engine.statistics())
        optimizers = list(self._optimizers)
        statistics["optimizer_bytes"] = sum(o.state_bytes() for o in optimizers)
        statistics["peak_bytes"] += statistics["optimizer_bytes"]
        statistics["seconds"]["optimizer"] = sum(o.seconds for o in optimizers)
        return statistics

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients; as ``DistributedOptimizer.zero_grad``."""
        if set_to_none:
            self._engine.zero_gradients()
        else:
            super().zero_grad(set_to_none=False)

    def _apply(
        self: _ModelT, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> _ModelT:
        kept: dict[tuple[torch.dtype, torch.device], bool] = {}
        for place in self._places:
            kind = (place.parameter.dtype, place.parameter.device)
            if kind not in kept:
                result = fn(torch.empty(0, dtype=kind[0], device=kind[1]))
                kept[kind] = (result.dtype, result.device) == kind
            if not kept[kind]:
                raise ConfigError(
                    f"parameter '{place.name}' cannot change dtype or device after wrapping: call "
                    "module.to(...) before hopshard.DistributedModel(module)"
                )
        for member in self.module.modules():
            for name, buffer in member._buffers.items():
                if buffer is not None:
                    member._buffers[name] = fn(buffer)
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "a DistributedModel cannot be pickled or copied: its parameters lie in slices on all "
            "ranks. Save model.state_dict(), which is whole, on one rank"
        )

    def _broadcast_buffers(self) -> None:
        for name, buffer in self.module.named_buffers():
            values = buffer.detach().clone(memory_format=torch.contiguous_format)
            tag = f"initial/{name}"
            self.world.groups.world.broadcast(values.view(-1), 0, tag=tag).wait()
            with torch.no_grad():
                buffer.copy_(values)


@contextmanager
def unshard(module: nn.Module | nn.Parameter, *, write_back: bool = True) -> Iterator[None]:
    """Makes the parameters of ``module`` (a model, a submodule or a parameter) whole inside.

    Changes made inside are kept, if all ranks make the same ones.

    Collective: the sharding group; all ranks enter and leave.

    Args:
        module: Part of a wrapped model, or the model.
        write_back: Keep changes; False if there are none.

    Raises:
        ConfigError: nothing in ``module`` belongs to a wrapped model.
    """
    parameters = [module] if isinstance(module, nn.Parameter) else list(module.parameters())
    units: dict[DistributedModel, set[int]] = {}
    for parameter in parameters:
        model = owner_of(parameter)
        if model is not None:
            place = model._places[model._index_of[id(parameter)]]
            units.setdefault(model, set()).add(place.unit)
    if not units:
        raise ConfigError(
            f"unshard: no parameter of this {type(module).__name__} belongs to a DistributedModel"
        )
    pinned: list[tuple[DistributedModel, int]] = []
    succeeded = False
    try:
        for model, indices in units.items():
            for index in sorted(indices):
                model._engine.pin(index)
                pinned.append((model, index))
        yield
        succeeded = True
    finally:
        for model, index in pinned:
            model._engine.unpin(index, write_back=write_back and succeeded)


@contextmanager
def accumulate() -> Iterator[None]:
    """Inside, backward passes of all models of this world stop after hop 1."""
    current = world.current()
    with _models_lock:
        models = [model for model in _models if model.world is current]
    for model in models:
        model._engine.hold_second_hop(True)
    try:
        yield
    finally:
        for model in models:
            model._engine.hold_second_hop(False)


@contextmanager
def join(model: DistributedModel) -> Iterator[None]:
    """Inside, ranks may run different numbers of forwards without a backward (generation).

    Who leaves first goes on taking part in the gathers of those that still run, until all have
    left. Only forwards of the whole model count: no ``unshard``, no submodule by itself. Units run
    in the order of the first training forward; before there was one, in the order in which they
    are declared.

    Collective: the world; all ranks enter and leave.

    Example:
        >>> import hopshard as hs, torch
        >>> world = hs.init(sharded_data_parallel_degree=1)
        >>> model = hs.DistributedModel(torch.nn.Linear(2, 2))
        >>> x = torch.ones(1, 2)
        >>> with hs.join(model), torch.no_grad():
        ...     for _ in range(3 + hs.rank()):
        ...         x = model(x)

    Raises:
        ConfigError: not a DistributedModel.
        ScheduleError: inside, a forward with gradients, of a submodule, or in another order.
        CommError: another rank left with an error; the text names it.
    """
    if not isinstance(model, DistributedModel):
        raise ConfigError(f"join takes a DistributedModel, not {type(model).__name__}")
    model._engine.begin_join()
    try:
        yield
    except BaseException:
        model._engine.end_join(True)
        raise
    model._engine.end_join(False)


def full_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient of a parameter, the world's mean, for logs and checks.

    After the backward passes of a step and before ``zero_grad``. None if no rank has one.

    Collective: the world; it finishes outstanding sums as ``optimizer.step()`` would.

    Raises:
        ConfigError: the parameter belongs to no DistributedModel, or is frozen.
    """
    model = owner_of(parameter)
    if model is None:
        raise ConfigError("full_grad: this parameter belongs to no DistributedModel")
    index = model._index_of[id(parameter)]
    if not model._places[index].is_trainable:
        raise ConfigError(f"full_grad: parameter '{model._places[index].name}' is frozen")
    model._gradients.finish()
    return model._gradients.full(index) if model._engine.gradient_flags()[index] else None


@contextmanager
def mean_over_microbatches(num_microbatches: int) -> Iterator[None]:
    """Inside, ``DistributedModel.backward`` divides the loss by ``num_microbatches``."""
    outer, _loss_scale.num_microbatches = _loss_scale.num_microbatches, num_microbatches
    try:
        yield
    finally:
        _loss_scale.num_microbatches = outer


def owner_of(parameter: torch.Tensor) -> DistributedModel | None:
    """The model that holds ``parameter`` in slices, if any does."""
    reference = getattr(parameter, _OWNER, None)
    return reference() if reference is not None else None


def _check_not_wrapped(module: nn.Module) -> None:
    for name, member in module.named_modules():
        if isinstance(member, DistributedModel | nn.parallel.DistributedDataParallel):
            raise ConfigError(
                f"'{name or type(member).__name__}' is a {type(member).__name__} already: wrap the "
                "plain module once"
            )
    for name, parameter in module.named_parameters():
        if owner_of(parameter) is not None:
            raise ConfigError(f"parameter '{name}' belongs to another DistributedModel already")


def _check_no_shared_memory(module: nn.Module) -> None:
    ranges: list[tuple[int, int, str]] = []
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter '{name}' is lazy and has no shape yet: run the module once before "
                "hopshard.DistributedModel(module)"
            )
        if parameter.is_meta:
            raise ConfigError(f"parameter '{name}' is on the meta device and has no values")
        if parameter.numel() == 0:
            continue
        # Of strided views, such as two columns of one tensor, only the first elements are compared.
        extent = 1 + sum(
            (n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True)
        )
        nbytes = parameter.element_size() * (extent if extent == parameter.numel() else 1)
        ranges.append((parameter.data_ptr(), parameter.data_ptr() + nbytes, name))
    ranges.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(ranges):
        if begin < end:
            raise ConfigError(
                f"parameters '{name}' and '{other}' share memory but are two objects; tie them by "
                "assigning the same nn.Parameter"
            )


def _describe(
    module: nn.Module, units: list[Unit], backward_passes_per_step: int
) -> dict[str, str]:
    items = {"backward_passes_per_step": str(backward_passes_per_step)}
    for name, buffer in module.named_buffers():
        dtype = str(buffer.dtype).removeprefix("torch.")
        items[name] = f"{dtype} {tuple(buffer.shape)} buffer"
    for unit in units:
        for name, parameter in zip(unit.parameter_names, unit.parameters, strict=True):
            dtype = str(parameter.dtype).removeprefix("torch.")
            trainable = "trainable" if parameter.requires_grad else "frozen"
            items[name] = f"{dtype} {tuple(parameter.shape)} {trainable}, unit {unit.name}"
    return items


def _refuse_new_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    if module in _wrapped_modules:
        raise ConfigError(
            f"parameter '{name}' of {type(module).__name__} was set after wrapping; build the "
            "model first, or change values inside `with hopshard.unshard(module):`"
        )


register_module_parameter_registration_hook(_refuse_new_parameter)
