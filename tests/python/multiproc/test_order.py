"""Ranks that do not do the same, in real processes: an error that names both, no mixed data."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest

Run = Callable[..., Any]

SETUP = """
    import os, torch, hopshard as hs
    from torch import nn
    hs.init(sharded_data_parallel_degree=2)
    rank = hs.rank()
    def report(error):
        print("raised", rank, type(error).__name__, str(error).replace(chr(10), " "), flush=True)
"""

CASES = {
    # Equal sizes: the transport alone would mix the two units' weights.
    "other_units": """
        net = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        model = hs.DistributedModel(net)
        try:
            with torch.no_grad():
                net[rank](torch.ones(2, 8))
        except hs.ScheduleError as error:
            report(error)
    """,
    "other_units_unsharded": """
        net = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        model = hs.DistributedModel(net)
        try:
            with hs.unshard(net[rank]):
                pass
        except hs.ScheduleError as error:
            report(error)
    """,
    # Other sizes: Gloo alone would end the process.
    "a_backward_left_out": """
        model = hs.DistributedModel(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)))
        loss = model(torch.ones(2, 8)).sum()
        try:
            if rank == 0:
                loss.backward()
            else:
                model(torch.ones(2, 8))
        except hs.ScheduleError as error:
            report(error)
    """,
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_that_do_not_do_the_same(run: Run, case: str) -> None:
    finished = run("-n", "2", script=dedent(SETUP) + dedent(case) + "os._exit(0)\n")
    assert finished.code == 0, finished.err
    for rank in range(2):
        line = next(text for text in finished.out.splitlines() if f"raised {rank}" in text)
        assert "ScheduleError" in line
        assert "rank 0: all_gather" in line or "rank 0: reduce_scatter" in line, line
        assert "rank 1: all_gather" in line, line
