"""DistributedOptimizer: a torch optimizer that updates this rank's slices.

Adam, AdamW and SGD run as fused native passes over the arenas; other element-wise optimizers run
as they are, on this rank's pieces of the parameters. Next: updates.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from hopshard import _C
from hopshard.consistency import check_agreement
from hopshard.errors import ConfigError, ShardedError
from hopshard.gradients import sum_norms
from hopshard.model import DistributedModel, owner_of
from hopshard.updates import Pieces, Update, is_initial, make_update

# Optimizers whose update of an element depends on that element's gradient and state alone: on a
# piece they do what they do on the whole.
_ELEMENTWISE: Final = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip


class DistributedOptimizer(torch.optim.Optimizer):
    """Steps a model whose gradients and weights lie in slices.

    ``param_groups`` are those of the wrapped optimizer: what an LR scheduler, built over either,
    writes there takes effect. ``step()`` finishes outstanding sums over the world, clips if the
    configuration says so (``gradient_clipping``), and updates.

    Collective: building it, ``step``, ``clip_grad_norm``, ``state_dict``.

    Args:
        optimizer: A torch optimizer over parameters of one DistributedModel, not used yet.
        elementwise: Your word that an optimizer that hopshard does not know updates each element
            by itself (no norms, factors or shapes of whole parameters).

    Raises:
        ConfigError: parameters outside the model or in two groups, a used optimizer, or one that
            is not known to be element-wise, or ranks with other optimizers or hyper-parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, elementwise: bool = False) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"DistributedOptimizer takes a torch optimizer, not {type(optimizer).__name__}"
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise ConfigError("this optimizer is a DistributedOptimizer already: wrap it once")
        kind = type(optimizer)
        known = kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE
        if not known and not elementwise:
            raise ConfigError(
                f"{kind.__name__} is not known to be element-wise: on slices it may do something "
                "else than on whole parameters. If each element's update depends on that element "
                "alone, say DistributedOptimizer(optimizer, elementwise=True). Known: "
                + ", ".join(_ELEMENTWISE)
            )
        if any(not is_initial(state) for state in optimizer.state.values()):
            raise ConfigError(
                f"this {kind.__name__} has stepped already: its state is of whole parameters. "
                "Build it after DistributedModel, and load a state with load_state_dict()"
            )
        self.optimizer = optimizer
        self._model = _model_of(optimizer.param_groups)
        self._engine = self._model._engine
        self._check_parameters(optimizer.param_groups)
        # The groups are the same dict objects: hyper-parameters stay live in both.
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._update: Update = make_update(optimizer, self._model)
        self._saw_gradient = False
        self.seconds = 0.0
        """Time spent in updates so far, without waiting for gradients."""
        self._model._optimizers.add(self)
        self._check_agreement()
        self._forward_calls_of(optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_update"):
            raise ConfigError("add parameter groups to the optimizer before DistributedOptimizer")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights from the world's mean gradients. Collective: the world.

        With ``Precision(loss_scale=...)`` nothing is updated where a gradient is not finite;
        ``model.loss_scaler`` counts that.

        Raises:
            ScheduleError: ranks ran different units; no weight was changed.
            ConfigError: no parameter of the model ever got a gradient, or a loss scale is set and
                ``model.backward`` was not called.
            ShardedError: inside ``unshard`` or ``ema.applied``, or a parameter was changed in place
                while it was gathered; nothing was updated.
        """
        if self._model._has_average:
            raise ShardedError(
                "optimizer.step() inside `with average.applied():` would train the average; leave "
                "it first"
            )
        self._engine.check_weights_may_change()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaler = self._model.loss_scaler
        if scaler is not None:
            scaler.check_scaled(self)
        self._engine.finish_gradients()
        self._check_gradients()
        limit = self._model.world.config.gradient_clipping
        # All ranks have the same sums, so they agree on whether a value is not finite.
        norm = self._norm(2.0) if limit > 0 or scaler is not None else 0.0
        if scaler is not None:
            scaler.update(self, math.isfinite(norm))
            self._model._follow_loss_scale()
            if not math.isfinite(norm):
                self._engine.end_step(False)
                self.optimizer._opt_called = True  # type: ignore[attr-defined]
                return loss
        scale = self._clip_scale(norm, limit) if limit > 0 else 1.0
        if not math.isfinite(scale):  # As in a single process, every weight becomes NaN.
            self._scale_gradients(scale)
            scale = 1.0
        start = time.perf_counter()
        self._update.step(scale)
        self._engine.end_step(True, self._update.writes_shards)
        self.seconds += time.perf_counter() - start
        # LR schedulers built over the wrapped optimizer watch its step(), which a fused update
        # does not call.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def state_bytes(self) -> int:
        """Bytes of this rank's part of the optimizer state."""
        return self._update.state_bytes()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients of the model, those of unfinished passes too.

        Args:
            set_to_none: False: gradients become zero, and a parameter that gets none later still
                decays and moves by its momentum, as in torch.
        """
        if set_to_none:
            self._engine.zero_gradients()
        else:
            self.optimizer.zero_grad(set_to_none=False)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm over the model is at most ``max_norm``.

        Collective: the world.

        Returns:
            The norm before clipping, equal on all ranks.
        """
        self._engine.finish_gradients()
        norm = self._norm(norm_type)
        scale = self._clip_scale(norm, max_norm)
        if scale != 1.0:
            self._scale_gradients(scale)
        return torch.tensor(norm)

    clip_grad_norm_ = clip_grad_norm

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Whole moments in torch's format: what the optimizer of a single process would save.

        Collective: the world. One tensor is gathered at a time.
        """
        indices, groups = self._number_parameters()
        state = {
            number: self._update.full_state(
                index, keep=not rank0_only or self._model.world.rank == 0
            )
            for index, number in indices.items()
        }
        if rank0_only and self._model.world.rank != 0:
            return {}
        whole = {"state": {n: s for n, s in sorted(state.items()) if s}, "param_groups": groups}
        if self._model.loss_scaler is not None:
            whole["loss_scaler"] = self._model.loss_scaler.state_dict()
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a single process's state dict; each rank keeps its slices."""
        indices, groups = self._number_parameters()
        saved = state_dict["param_groups"]
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
            raise ConfigError(
                "the state dict has other parameter groups: "
                f"{[len(g['params']) for g in saved]} parameters, here "
                f"{[len(g['params']) for g in groups]}"
            )
        number_of = {
            mine: theirs
            for group, other in zip(groups, saved, strict=True)
            for mine, theirs in zip(group["params"], other["params"], strict=True)
        }
        for index, number in indices.items():
            self._update.load_state(index, state_dict["state"].get(number_of[number], {}))
        for group, other in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in other.items() if key != "params"})
        scaler = self._model.loss_scaler
        if scaler is not None and "loss_scaler" in state_dict:
            scaler.load_state_dict(state_dict["loss_scaler"])
            self._model._follow_loss_scale()

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def _number_parameters(self) -> tuple[dict[int, int], list[dict[str, Any]]]:
        """Engine index -> torch's number, and the groups with numbers for parameters."""
        indices: dict[int, int] = {}
        groups = []
        for group in self.param_groups:
            numbers = []
            for parameter in group["params"]:
                number = len(indices)
                indices[self._model._index_of[id(parameter)]] = number
                numbers.append(number)
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
        return indices, groups

    def _check_parameters(self, groups: list[dict[str, Any]]) -> None:
        for number, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                if owner_of(parameter) is not self._model:
                    raise ConfigError(
                        f"parameter {place} of group {number}, shape {tuple(parameter.shape)}, "
                        "does not belong to the DistributedModel: build the optimizer from "
                        "model.parameters(), after wrapping"
                    )

    def _check_agreement(self) -> None:
        """Ranks that step differently would drift apart without any error."""
        world = self._model.world
        if not world.config.check_consistency:
            return
        items = {"class": type(self.optimizer).__name__}
        for number, group in enumerate(self.param_groups):
            names = [
                self._model._places[self._model._index_of[id(parameter)]].name
                for parameter in group["params"]
            ]
            items[f"group {number}"] = f"{len(names)} parameters, first {names[:1]}"
            for key, value in sorted(group.items()):
                if key != "params":
                    items[f"group {number} {key}"] = repr(value)
        check_agreement(world.groups.world, "optimizer", items)

    def _forward_calls_of(self, optimizer: torch.optim.Optimizer) -> None:
        """The handle that the user kept must not look like an optimizer that never stepped."""
        optimizer.state_dict = self.state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = self.load_state_dict  # type: ignore[method-assign]
        optimizer.add_param_group = self.add_param_group  # type: ignore[method-assign]
        if not isinstance(self._update, Pieces):  # Those call the wrapped step(), hooks included.
            self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
            self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks

    def _check_gradients(self) -> None:
        if self._saw_gradient:
            return
        self._saw_gradient = any(self._engine.gradient_flags())
        if not self._saw_gradient:
            raise ConfigError(
                "no parameter of the wrapped model has a gradient: the loss must come from a "
                "forward of DistributedModel (or its .module), not of another module, and "
                "backward() must run before step()"
            )

    def _norm(self, norm_type: float) -> float:
        arenas = self._engine.gradient_arenas()
        if norm_type == 2.0:
            squares = [sum(_C.sum_of_squares(arena) for arena in arenas)]
            total = torch.tensor(squares, dtype=torch.float64)
            self._engine.groups.sharding.all_reduce(total, op="sum", tag="norm/sum").wait()
            return float(total.sqrt())
        parts = sum_norms(
            [arena.double() for arena in arenas], norm_type, self._engine.groups.sharding
        )
        return float(torch.linalg.vector_norm(torch.stack(parts), norm_type))

    def _scale_gradients(self, scale: float) -> None:
        for arena in self._engine.gradient_arenas():
            arena.mul_(scale)
        self._model._gradients.changed()

    @staticmethod
    def _clip_scale(norm: float, max_norm: float) -> float:
        scale = max_norm / (norm + 1e-6)  # torch.nn.utils.clip_grad_norm_'s formula.
        return scale if math.isnan(scale) else min(scale, 1.0)


def _model_of(groups: list[dict[str, Any]]) -> DistributedModel:
    for group in groups:
        for parameter in group["params"]:
            model = owner_of(parameter)
            if model is not None:
                return model
    raise ConfigError(
        "none of the optimizer's parameters belongs to a DistributedModel: wrap the module first, "
        "then build the optimizer from model.parameters()"
    )
