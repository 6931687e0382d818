"""What ``param.grad`` is after a backward: the name of a gradient that lies in slices.

Full gradients are gone by then. Scripts that loop over ``p.grad``, clip with torch's own functions
or use a GradScaler still get what a single process would: norms are computed from the slices,
element-wise in-place operations act on the slices, everything else gathers the full gradient.
Next: optimizer.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hopshard import _C
from hopshard.errors import ShardedError

aten = torch.ops.aten


class GradientAccess:
    """The gradients of one model, as the handles see them.

    Collective: every function but ``names``; ranks must look at the same gradients in the same
    order, as they do when all run one script.
    """

    def __init__(self, engine: _C.ShardEngine, places: Sequence[_C.ParameterPlace]) -> None:
        # Handles live in C++ beside the engine and the parameters: strong references to either
        # would keep all for ever.
        self._engine = weakref.ref(engine)
        self.names = [place.name for place in places]
        self._dtypes = [place.parameter.dtype for place in places]
        self._arena_of = [
            engine.arena_of(index) if place.is_trainable else -1
            for index, place in enumerate(places)
        ]
        self._trainable = [i for i, arena in enumerate(self._arena_of) if arena >= 0]
        self._norms: dict[float, dict[int, torch.Tensor]] = {}

    @property
    def engine(self) -> _C.ShardEngine:
        engine = self._engine()
        if engine is None:
            raise ShardedError("this gradient belongs to a model that was deleted")
        return engine

    def finish(self) -> None:
        """Waits for the sums over the world; cached norms are of these sums."""
        if self.engine.finish_gradients():
            self._norms.clear()

    def piece(self, index: int) -> torch.Tensor:
        """This rank's part of a gradient, fp32 (fp64 for fp64 parameters); writes go through."""
        self.finish()
        return self._piece(index)

    def _piece(self, index: int) -> torch.Tensor:
        arena = self.engine.gradient_arenas()[self._arena_of[index]]
        return self.engine.piece_of(arena, index)

    def changed(self) -> None:
        self._norms.clear()

    def full(self, index: int) -> torch.Tensor:
        """The whole gradient in the parameter's dtype."""
        self.finish()
        arena = self.engine.gradient_arenas()[self._arena_of[index]]
        full = self.engine.gather_full(arena, index, "gradient")
        return full.to(self._dtypes[index])

    def norm(self, index: int, order: float) -> torch.Tensor:
        """One gradient's norm; those of all parameters travel together, once."""
        self.finish()
        if order not in self._norms:
            pieces = [self._piece(i).double() for i in self._trainable]
            totals = sum_norms(pieces, order, self.engine.groups.sharding)
            self._norms[order] = dict(zip(self._trainable, totals, strict=True))
        return self._norms[order][index].to(self._dtypes[index])


def sum_norms(
    pieces: Sequence[torch.Tensor], order: float, sharding: _C.Communicator
) -> list[torch.Tensor]:
    """Norms of tensors whose pieces lie on the ranks of ``sharding``, as fp64 scalars."""
    if order == float("inf"):
        local = [p.abs().max() if p.numel() else p.new_zeros(()) for p in pieces]
        totals = torch.stack(local)
        sharding.all_reduce(totals, op="max", tag="norm/max").wait()
        return list(totals)
    if order == 0:
        totals = torch.stack([(p != 0).sum().double() for p in pieces])
    else:
        totals = torch.stack([p.abs().pow(order).sum() for p in pieces])
    sharding.all_reduce(totals, op="sum", tag="norm/sum").wait()
    return list(totals if order == 0 else totals.pow(1.0 / order))


class ShardedGrad(torch.Tensor):
    """A parameter's gradient, in slices. Made by DistributedModel, one per parameter."""

    _access: GradientAccess
    _index: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, access: GradientAccess, index: int, parameter: torch.Tensor) -> ShardedGrad:
        grad = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
            requires_grad=False,
        )
        grad._access = access
        grad._index = index
        return grad

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = self._access.names[self._index]
        return f"ShardedGrad('{name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    def full(self) -> torch.Tensor:
        """The whole gradient, the mean over the world. Collective: the sharding group."""
        return self._access.full(self._index)

    @property
    def data(self) -> torch.Tensor:
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self:
            return  # What `p.grad.data *= 2` assigns, after it has changed the slices.
        raise ShardedError(
            f"the gradient of '{self._access.names[self._index]}' is sharded: assign p.grad, not "
            "p.grad.data"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _find(list(_written(func, args, kwargs))):
            return _apply_in_place(func, args, kwargs)
        result = func(*_gathered(args), **_gathered(kwargs))
        grads = _find((args, kwargs))
        if grads and any(part.alias_info is not None for part in func._schema.returns):
            return _as_copy(result, grads[0]._access.names[grads[0]._index])
        return result


class _Copy(torch.Tensor):
    """A view of a gathered gradient; read-only, because ``p.grad[0] = 1`` would be lost in it."""

    _whole: torch.Tensor
    _name: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, whole: torch.Tensor, name: str) -> _Copy:
        copy = torch.Tensor._make_wrapper_subclass(
            cls,
            whole.shape,
            strides=whole.stride(),
            storage_offset=whole.storage_offset(),
            dtype=whole.dtype,
            device=whole.device,
        )
        copy._whole = whole
        copy._name = name
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._whole)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in _written(func, args, kwargs):
            if isinstance(value, _Copy):
                raise ShardedError(
                    f"{func._schema.name.removeprefix('aten::')} would write into a copy of the "
                    f"gradient of '{value._name}', which is sharded: change p.grad.full() and "
                    "assign it to p.grad"
                )
        names = [leaf._name for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Copy)]
        args, kwargs = tree_map(
            lambda leaf: leaf._whole if isinstance(leaf, _Copy) else leaf, (args, kwargs)
        )
        result = func(*args, **kwargs)
        if any(
            part.alias_info is not None and not part.alias_info.is_write
            for part in func._schema.returns
        ):
            return _as_copy(result, names[0])
        return result


def _as_copy(result: Any, name: str) -> Any:
    return tree_map(lambda leaf: _Copy(leaf, name) if type(leaf) is torch.Tensor else leaf, result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes into, those in lists one by one."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else (value,)


def _gathered(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.full() if isinstance(leaf, ShardedGrad) else leaf, tree)


# Operations that touch each element by itself: on the slices they give what they give on the
# whole. Anything else in place would need the full gradient and a write-back that hides its cost.
_ELEMENTWISE = {
    "abs_", "add_", "addcdiv_", "addcmul_", "clamp_", "clamp_max_", "clamp_min_", "copy_", "div_",
    "fill_", "lerp_", "maximum_", "minimum_", "mul_", "nan_to_num_", "neg_", "pow_", "sign_",
    "sqrt_", "sub_", "zero_",
}  # fmt: skip
_ELEMENTWISE_LISTS = {f"_foreach_{name}" for name in _ELEMENTWISE}


def _apply_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix("aten::")
    target = args[0]
    targets = list(target) if isinstance(target, list | tuple) else [target]
    owners = [grad for grad in targets if isinstance(grad, ShardedGrad)]
    if not owners or len(owners) != len(targets) or name not in _ELEMENTWISE | _ELEMENTWISE_LISTS:
        first = _find((args, kwargs))[0]
        raise ShardedError(
            f"{name} cannot run on the gradient of '{first._access.names[first._index]}', which is "
            "sharded: take p.grad.full(), or assign p.grad = <a full tensor>"
        )
    owners[0]._access.finish()
    if isinstance(target, list | tuple):
        lists = [
            [_piece_for(owners[i], item) for i, item in enumerate(argument)]
            if isinstance(argument, list | tuple) and len(argument) == len(owners)
            else argument
            for argument in args
        ]
        func(*lists, **kwargs)
    else:
        owner = owners[0]
        func(
            *(_piece_for(owner, argument) for argument in args),
            **{key: _piece_for(owner, value) for key, value in kwargs.items()},
        )
    owners[0]._access.changed()
    return target if isinstance(target, torch.Tensor) else None  # Torch's lists return nothing.


def _find(tree: Any) -> list[ShardedGrad]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, ShardedGrad)]


def _piece_for(owner: ShardedGrad, value: Any) -> Any:
    """What stands for ``value`` in an operation on the owner's piece."""
    if isinstance(value, ShardedGrad):
        return value._access.piece(value._index)
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        expanded = value.expand(owner.shape)
        return owner._access.engine.piece_from_full(owner._index, expanded)
    return value


def _vector_norm(
    grad: ShardedGrad,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if not isinstance(grad, ShardedGrad) or dim is not None or keepdim:
        return NotImplemented
    norm = grad._access.norm(grad._index, float(ord))
    return norm.to(dtype) if dtype is not None else norm


def _foreach_norm(
    grads: Sequence[torch.Tensor],
    ord: float = 2,
    dtype: torch.dtype | None = None,
) -> Any:
    if not all(isinstance(grad, ShardedGrad) for grad in grads):
        return NotImplemented
    return [_vector_norm(grad, ord, dtype=dtype) for grad in grads]  # type: ignore[arg-type]


def _unscale(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> Any:
    owners = [grad for grad in grads if isinstance(grad, ShardedGrad)]
    if not owners:
        return NotImplemented
    access = owners[0]._access
    pieces = [grad._access.piece(grad._index) for grad in owners]
    for dtype in {piece.dtype for piece in pieces}:
        torch._amp_foreach_non_finite_check_and_unscale_(
            [piece for piece in pieces if piece.dtype == dtype], found_inf, inv_scale
        )
    # One rank's overflow is everyone's: else replicas would step differently.
    access.engine.groups.world.all_reduce(
        found_inf.view(-1), op="max", tag="control/found_inf"
    ).wait()
    access.changed()
    return None


def _same(grad: torch.Tensor) -> torch.Tensor:
    return grad


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.detach.default: _same,
    aten.detach_.default: _same,
    aten.alias.default: _same,
}
