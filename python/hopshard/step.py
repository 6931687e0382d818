"""``@hopshard.step``: a function that runs once per micro-batch, as SMP's.

Next: testing.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from hopshard import world
from hopshard.errors import ConfigError
from hopshard.model import accumulate, mean_over_microbatches

_P = ParamSpec("_P")
_T = TypeVar("_T")


class StepOutput(Generic[_T]):
    """What one place of a step function's result was in each micro-batch."""

    def __init__(self, outputs: Sequence[_T]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> Any:
        """Mean over the micro-batches."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self) -> Any:
        """Sum over the micro-batches."""
        outputs: list[Any] = self.outputs
        return sum(outputs[1:], start=outputs[0])

    def concat(self, axis: int = 0) -> torch.Tensor:
        """The micro-batches' tensors one after the other along ``axis``."""
        return torch.cat(self._tensors(), dim=axis)

    def stack(self, axis: int = 0) -> torch.Tensor:
        """The micro-batches' tensors along a new ``axis``."""
        return torch.stack(self._tensors(), dim=axis)

    def _tensors(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = [o for o in self.outputs if isinstance(o, torch.Tensor)]
        if len(tensors) != len(self.outputs):
            raise ConfigError("only tensors can be joined; this output holds other values")
        return tensors

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Runs ``function`` once per micro-batch (``microbatches`` of the configuration).

    Tensors in the arguments, also inside lists, tuples and dicts, are cut along axis 0 into equal
    parts; everything else is passed on whole. ``model.backward(loss)`` inside averages over the
    micro-batches, and only the last of them counts as a backward pass of the step.

    Args:
        function: The body; the decorator may also be called with the options below only.
        non_split_inputs: Names of arguments that every micro-batch gets whole.
        input_split_axes: Axis by argument name, where it is not 0.
        detach_outputs: Free the graph behind the outputs.

    Returns:
        A function with the same arguments whose result has a ``StepOutput`` in place of every
        tensor.

    Raises:
        ConfigError: a tensor's axis is not divisible by the number of micro-batches.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(body)

        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> Any:
            num = world.current().config.microbatches
            bound = signature.bind(*args, **kwargs)
            axes = input_split_axes or {}
            parts = {
                name: [value] * num
                if name in non_split_inputs
                else _split(value, num, axes.get(name, 0), name)
                for name, value in bound.arguments.items()
            }
            results = []
            with mean_over_microbatches(num):
                for i in range(num):
                    bound.arguments.update({name: values[i] for name, values in parts.items()})
                    with accumulate() if i < num - 1 else nullcontext():
                        result = body(*bound.args, **bound.kwargs)
                    results.append(_detached(result) if detach_outputs else result)
            return _collect(results)

        return run

    return decorate(function) if function is not None else decorate


def _split(value: Any, num: int, axis: int, name: str) -> list[Any]:
    if num == 1:
        return [value]
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        if value.dim() == 0:
            return [value] * num
        if value.size(axis) % num != 0:
            raise ConfigError(
                f"argument '{name}': {value.size(axis)} rows on axis {axis} do not divide into "
                f"{num} micro-batches"
            )
        return list(value.chunk(num, dim=axis))
    if isinstance(value, Mapping):
        split = {key: _split(item, num, axis, f"{name}[{key!r}]") for key, item in value.items()}
        return [{key: items[i] for key, items in split.items()} for i in range(num)]
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [_split(item, num, axis, f"{name}[{i}]") for i, item in enumerate(value)]
        return [type(value)(item[i] for item in items) for i in range(num)]
    return [value] * num


def _detached(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, Mapping):
        return {key: _detached(item) for key, item in result.items()}
    if isinstance(result, list | tuple) and not hasattr(result, "_fields"):
        return type(result)(_detached(item) for item in result)
    return result


def _collect(results: list[Any]) -> Any:
    first = results[0]
    if isinstance(first, torch.Tensor):
        return StepOutput(results)
    if isinstance(first, Mapping):
        return {key: _collect([result[key] for result in results]) for key in first}
    if isinstance(first, list | tuple) and not hasattr(first, "_fields"):
        return type(first)(_collect(list(items)) for items in zip(*results, strict=True))
    return first
