"""Exponential moving average of a model's weights, kept in slices like the weights themselves.

Next: testing.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hopshard.errors import ConfigError, ShardedError
from hopshard.model import DistributedModel


class ema:  # noqa: N801  A verb to its users, like torch.no_grad.
    """Averages trainable parameters: ``average += (1 - decay) * (weight - average)``.

    What torch's ``AveragedModel`` computes with ``get_ema_multi_avg_fn(decay)``, on this rank's
    fp32 (or fp64) slices: 4 bytes per element divided by the degree, and no communication. Call
    ``update()`` after ``optimizer.step()``. Frozen parameters and buffers are the model's own.

    Example:
        >>> import hopshard as hs, torch
        >>> world = hs.init(sharded_data_parallel_degree=1)
        >>> model = hs.DistributedModel(torch.nn.Linear(2, 1))
        >>> average = hs.ema(model, decay=0.99)
        >>> average.update()
        >>> with average.applied():
        ...     prediction = model(torch.ones(4, 2))

    Args:
        model: A wrapped model.
        decay: What stays of the average in an update, from 0 to 1.

    Raises:
        ConfigError: not a DistributedModel, or ``decay`` outside [0, 1].
    """

    def __init__(self, model: DistributedModel, decay: float = 0.999) -> None:
        if not isinstance(model, DistributedModel):
            raise ConfigError(
                f"hopshard.ema takes a DistributedModel, not {type(model).__name__}: its weights "
                "lie in slices, and so do their averages"
            )
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"decay={decay!r}: a number from 0 to 1")
        self.model = model
        self.decay = decay
        self.num_updates = 0
        self._averages = [arena.clone() for arena in self._weights()]

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the weights; the first call makes it equal to them."""
        self._check_not_applied()
        for average, weights in zip(self._averages, self._weights(), strict=True):
            if self.num_updates == 0:
                average.copy_(weights)
            else:
                average.lerp_(weights, 1.0 - self.decay)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights: to evaluate, generate or save them.

        Do not step the optimizer inside. All ranks enter and leave at the same place.
        """
        self._check_not_applied()
        self._swap()
        self.model._has_average = True
        try:
            yield
        finally:
            self._swap()
            self.model._has_average = False

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights under the unwrapped module's keys, whole. Collective: the world."""
        with self.applied():
            weights = self.model.state_dict()
        return {"weights": weights, "decay": self.decay, "num_updates": self.num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what ``state_dict`` gave, at any degree. Not collective."""
        with self.applied():  # Frozen parameters and buffers of the state are the model's too.
            self.model.load_state_dict(state_dict["weights"])
        self.decay = state_dict["decay"]
        self.num_updates = state_dict["num_updates"]

    def _weights(self) -> list[torch.Tensor]:
        return self.model._engine.master_arenas()

    @torch.no_grad()
    def _swap(self) -> None:
        self.model._engine.check_weights_may_change()
        for average, weights in zip(self._averages, self._weights(), strict=True):
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)
        self.model._engine.weights_changed()

    def _check_not_applied(self) -> None:
        if self.model._has_average:
            raise ShardedError("inside `with average.applied():` the weights are the average")
