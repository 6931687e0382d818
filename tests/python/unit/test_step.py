"""``@hs.step``: how arguments are cut and results joined. Parity is in parity/test_idioms.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks


def with_microbatches(num: int, body: Any) -> Any:
    return run_ranks(body, 1, microbatches=num)[0]


def test_tensors_are_cut_and_everything_else_passes_whole() -> None:
    seen: list[Any] = []
    same = object()

    class Pair(NamedTuple):
        a: torch.Tensor
        b: torch.Tensor

    pair = Pair(torch.arange(3), torch.arange(5))
    weight = torch.nn.Parameter(torch.ones(3))

    @hs.step
    def body(x: Any, y: Any, z: Any, *rest: Any, flag: bool = False, **more: Any) -> None:
        seen.append((x, y, z, rest, flag, more))

    def run() -> None:
        rows = torch.arange(8)
        body(rows, [rows, {"k": rows + 8}], same, pair, weight, torch.tensor(7), flag=True, t=3)

    with_microbatches(4, run)
    assert len(seen) == 4
    for i, (x, y, z, rest, flag, more) in enumerate(seen):
        assert x.tolist() == [2 * i, 2 * i + 1]
        assert y[0].tolist() == x.tolist() and y[1]["k"].tolist() == (x + 8).tolist()
        assert z is same and flag is True and more == {"t": 3}
        assert rest[0] is pair and rest[1] is weight and rest[2] == 7


def test_options() -> None:
    seen: list[Any] = []

    @hs.step(non_split_inputs=["whole"], input_split_axes={"columns": 1})
    def body(columns: torch.Tensor, whole: torch.Tensor) -> None:
        seen.append((tuple(columns.shape), tuple(whole.shape)))

    with_microbatches(2, lambda: body(torch.ones(3, 4), torch.ones(3)))
    assert seen == [((3, 2), (3,))] * 2


@pytest.mark.parametrize(
    ("value", "name"),
    [(torch.ones(5), "rows"), ([torch.ones(2), torch.ones(3)], r"rows\[1\]")],
    ids=["tensor", "list"],
)
def test_rows_that_do_not_divide(value: Any, name: str) -> None:
    @hs.step
    def body(rows: Any) -> None:
        raise AssertionError("the body must not run")

    with pytest.raises(hs.ConfigError, match=f"{name}.*2 micro-batches"):
        with_microbatches(2, lambda: body(value))


def test_results_are_collected() -> None:
    @hs.step
    def body(x: torch.Tensor) -> Any:
        return {"x": x, "sum": (x.sum(), None)}, "text"

    def run() -> None:
        (found, text) = body(torch.arange(6.0))
        assert text == "text" and found["sum"][1] is None
        assert len(found["x"].outputs) == 3
        assert found["x"].concat().tolist() == [0, 1, 2, 3, 4, 5]
        assert found["x"].stack().shape == (3, 2)
        assert found["sum"][0].reduce_mean() == 5
        assert found["sum"][0].reduce_sum() == 15

    with_microbatches(3, run)


@pytest.mark.parametrize("detach", [True, False])
def test_outputs_hold_no_graph_unless_asked(detach: bool) -> None:
    @hs.step(detach_outputs=detach)
    def body(x: torch.Tensor, w: torch.nn.Parameter) -> torch.Tensor:
        return (x * w).sum()

    def run() -> None:
        out = body(torch.ones(4), torch.nn.Parameter(torch.ones(1)))
        assert out.reduce_mean().requires_grad is not detach

    with_microbatches(2, run)


def test_an_exception_leaves_no_trace() -> None:
    from hopshard.model import _loss_scale

    @hs.step
    def body(x: torch.Tensor) -> None:
        assert _loss_scale.num_microbatches == 2
        raise ValueError("mine")

    def run() -> None:
        with pytest.raises(ValueError, match="mine"):
            body(torch.ones(4))
        assert _loss_scale.num_microbatches == 1

    with_microbatches(2, run)


def test_only_the_last_micro_batch_syncs_the_replicas() -> None:
    def run() -> int:
        torch.manual_seed(0)
        model = hs.DistributedModel(torch.nn.Linear(3, 2))

        @hs.step
        def body(x: torch.Tensor) -> None:
            model.backward(model(x).mean())

        body(torch.ones(8, 3))
        counters = hs.current().meter.counters()
        return counters["comm/replication/all_reduce/second_hop/calls"]

    assert run_ranks(run, 2, microbatches=4) == [1, 1]
