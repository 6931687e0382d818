"""In which dtype a model computes and reduces, and the scale of its losses. Next: model.py."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hopshard.errors import ConfigError

_PARAM_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REDUCE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """Mixed precision of one DistributedModel. The first four names are FSDP2's.

    Masters, gradient sums and the optimizer are fp32 whatever is chosen here (fp64 for fp64
    parameters), and masters begin with the digits that the module's parameters had. Buffers keep
    their dtype.

    Example:
        >>> import hopshard as hs, torch
        >>> precision = hs.Precision(
        ...     param_dtype=torch.bfloat16, overrides={torch.nn.LayerNorm: torch.float32}
        ... )

    Raises:
        ConfigError: a dtype or a scale that is not possible; the text names it.
    """

    param_dtype: torch.dtype | None = None
    """Of the computation: what gathers move and parameters become at wrapping. None: what each
    parameter has."""

    reduce_dtype: torch.dtype = torch.float32
    """In which gradients travel, in both hops. They are added in fp32 whatever it is."""

    output_dtype: torch.dtype | None = None
    """To which the model's floating-point outputs are cast. None: not."""

    cast_forward_inputs: bool = True
    """Cast floating-point arguments of the model, of its units and of modules with an override to
    their dtype, also in tuples, lists and dicts; not inside other objects."""

    overrides: Mapping[type[nn.Module] | str, torch.dtype] = field(default_factory=dict)
    """Another dtype for modules of a class, or whose name matches a pattern (``"*.norm_*"``), and
    what is in them; the last entry that matches a module counts. Their floating-point outputs are
    cast back."""

    loss_scale: float | Literal["dynamic"] | None = None
    """Factor of the loss in ``model.backward(loss)``, for fp16: small gradients would be zero. Sums
    are without it. ``step()`` then leaves the weights alone, on all ranks, when any gradient is not
    finite. ``"dynamic"``: halved then, and doubled after 2000 good steps."""

    initial_loss_scale: float = 2.0**16
    """Where ``"dynamic"`` begins."""

    def __post_init__(self) -> None:
        chosen = {"param_dtype": self.param_dtype, "output_dtype": self.output_dtype}
        chosen |= {f"overrides[{key!r}]": dtype for key, dtype in self.overrides.items()}
        for name, dtype in chosen.items():
            if dtype not in _PARAM_DTYPES and not (
                dtype is None and name in Precision.__annotations__
            ):
                raise ConfigError(f"{name}={dtype!r}; legal: {_names(_PARAM_DTYPES)}")
        if self.reduce_dtype not in _REDUCE_DTYPES:
            raise ConfigError(
                f"reduce_dtype={self.reduce_dtype!r}; legal: {_names(_REDUCE_DTYPES)}"
            )
        for key in self.overrides:
            if not (isinstance(key, str) or (isinstance(key, type) and issubclass(key, nn.Module))):
                raise ConfigError(
                    f"overrides: {key!r} is neither a module class nor a name pattern"
                )
        for name in ("loss_scale", "initial_loss_scale"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_scale = is_number and math.isfinite(value) and value > 0
            if not is_scale and not (name == "loss_scale" and value in (None, "dynamic")):
                raise ConfigError(f"{name}={value!r}; legal: a number > 0, 'dynamic' or None")

    def dtype_of(
        self, name: str, module: nn.Module, outer: torch.dtype | None
    ) -> torch.dtype | None:
        """Of a module whose parent's is ``outer``."""
        for key, dtype in reversed(list(self.overrides.items())):
            if _matches(key, name, module):
                return dtype
        return outer


def dtypes_of_parameters(precision: Precision, module: nn.Module) -> dict[int, torch.dtype]:
    """The dtype of the computation of each parameter, by id.

    Raises:
        ConfigError: two modules share a parameter and have different dtypes, or an override
            matches no module.
    """
    dtypes: dict[int, torch.dtype] = {}
    unused = set(precision.overrides)
    for name, member, dtype, _ in _walk(precision, module):
        unused -= {key for key in unused if _matches(key, name, member)}
        for part, parameter in member.named_parameters(recurse=False):
            wanted = (
                dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            )
            if dtypes.setdefault(id(parameter), wanted) != wanted:
                raise ConfigError(
                    f"parameter '{name}.{part}' is {wanted} here and {dtypes[id(parameter)]} in "
                    "another module that shares it; give both modules one dtype"
                )
    if unused:
        raise ConfigError(f"overrides: {next(iter(unused))!r} matches no module of the model")
    return dtypes


def attach_casts(precision: Precision, module: nn.Module, unit_modules: set[int]) -> None:
    """Casts where the dtype changes: into the model, its units and overrides, and back."""
    for name, member, dtype, outer in _walk(precision, module):
        is_border = bool(name) and dtype != outer
        if dtype is not None and precision.cast_forward_inputs:
            if is_border or not name or id(member) in unit_modules:
                _cast_inputs(member, dtype)
            if is_border and outer is not None:
                _cast_outputs(member, outer)
    if precision.output_dtype is not None:
        _cast_outputs(module, precision.output_dtype)


class LossScaler:
    """The factor of the losses, and what becomes of it."""

    growth_factor = 2.0
    backoff_factor = 0.5
    growth_interval = 2000

    def __init__(self, precision: Precision) -> None:
        wanted = precision.loss_scale
        self.is_dynamic = not isinstance(wanted, int | float)
        self.scale = float(
            wanted if isinstance(wanted, int | float) else precision.initial_loss_scale
        )
        self.num_good_steps = 0
        """Since the last change."""
        self.num_skipped_steps = 0
        self._stepped: set[int] | None = None
        """Optimizers that stepped since the last loss, by id; None: there was no loss."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        self._stepped = set()
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale

    def check_scaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step.

        Raises:
            ConfigError: the gradients cannot come from a scaled loss.
        """
        if self._stepped is None or id(optimizer) in self._stepped:
            raise ConfigError(
                "Precision(loss_scale=...) is set, and no loss was scaled since the last step: "
                "call model.backward(loss) instead of loss.backward()"
            )

    def update(self, optimizer: torch.optim.Optimizer, is_finite: bool) -> None:
        """After a step, or one that was left out because a gradient is not finite."""
        if self._stepped is None:
            return
        is_first = not self._stepped
        self._stepped.add(id(optimizer))
        if not is_first:
            return
        self.num_skipped_steps += not is_finite
        if not self.is_dynamic:
            return
        self.num_good_steps = self.num_good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale *= self.backoff_factor
        elif self.num_good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.num_good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        names = ("scale", "num_good_steps", "num_skipped_steps")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.state_dict():
            if name != "scale" or self.is_dynamic:  # A fixed one is the program's.
                setattr(self, name, state[name])


def _walk(
    precision: Precision, module: nn.Module
) -> Iterator[tuple[str, nn.Module, torch.dtype | None, torch.dtype | None]]:
    """Every module with its name, its dtype and its parent's."""

    def visit(name: str, member: nn.Module, outer: torch.dtype | None) -> Iterator[Any]:
        dtype = precision.dtype_of(name, member, outer)
        yield name, member, dtype, outer
        for part, child in member.named_children():
            yield from visit(f"{name}.{part}" if name else part, child, dtype)

    yield from visit("", module, precision.param_dtype)


def _matches(key: type[nn.Module] | str, name: str, module: nn.Module) -> bool:
    if isinstance(key, str):
        return fnmatch.fnmatchcase(name, key)
    return isinstance(module, key)


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(_to(dtype), args), tree_map(_to(dtype), kwargs)

    module.register_forward_pre_hook(cast, with_kwargs=True)


def _cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    def cast(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(_to(dtype), output)

    module.register_forward_hook(cast)


def _to(dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        is_other = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_other and leaf.dtype != dtype else leaf

    return cast


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))
