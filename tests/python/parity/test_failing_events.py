"""An error at each event of a step, one after the other: the next step is as if it had not been.

Events are those that a user's code can see: before and after the forward of each module, the
arrival of each gradient, before and after the optimizer's update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.python.parity.harness import Rank, assert_same
from tests.python.parity.models import Mlp
from tests.python.parity.test_backward_patterns import loss_of


class Events:
    """Counts them, and raises at one."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.fail_at = -1
        self.failed = ""

    def hook(self, name: str) -> Callable[..., None]:
        def event(*args: Any) -> None:
            number, self.num_seen = self.num_seen, self.num_seen + 1
            if number == self.fail_at:
                self.failed = name
                raise MemoryError(name)

        return event

    def watch(self, rank: Rank) -> None:
        for name, module in rank.module.named_modules():
            module.register_forward_pre_hook(self.hook(f"before {name}"))
            module.register_forward_hook(self.hook(f"after {name}"))
        for name, parameter in rank.module.named_parameters():
            parameter.register_hook(self.hook(f"gradient of {name}"))
            parameter.register_post_accumulate_grad_hook(self.hook(f"sum of {name}"))
        rank.optimizer.register_step_pre_hook(self.hook("before the update"))
        rank.optimizer.register_step_post_hook(self.hook("after the update"))


def one_step(rank: Rank, number: int, passes: int) -> None:
    for micro in range(passes):
        loss_of(rank.model(rank.batch(number + 100 * micro))).backward()
    rank.step()


@pytest.mark.parametrize(
    ("passes", "config"),
    [
        (1, {}),
        (2, {"prefetch_depth": 2, "second_hop_bucket_bytes": 64}),
        (1, {"reshard_after_forward": False, "param_persistence_threshold": 8}),
        (1, {"simulate_delays_us": 100}),
    ],
)
def test_the_step_after_an_error_at_any_event(passes: int, config: dict[str, Any]) -> None:
    def script(rank: Rank) -> None:
        events = Events()
        events.watch(rank)
        one_step(rank, 0, passes)
        num_events, where = events.num_seen, set()
        assert num_events == passes * (12 + 20) + 2
        for fail_at in range(num_events):
            rank.optimizer.zero_grad()
            events.num_seen, events.fail_at = 0, fail_at
            with pytest.raises(MemoryError):
                one_step(rank, fail_at, passes)
            where.add(events.failed)
            events.fail_at = -1
            rank.optimizer.zero_grad()
            one_step(rank, fail_at, passes)
            rank.record(fail_at)
        assert len(where) == 12 + 20 + 2

    torch.manual_seed(1)
    base: nn.Module = Mlp()
    assert_same(script, base, passes=passes, worlds=[(1, 1, None), (4, 2, 2), (4, 4, 2)], **config)
