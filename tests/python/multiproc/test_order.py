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


def setup_on(backend: str) -> str:
    return dedent(SETUP).replace("degree=2", f"degree=2, backend='{backend}'")


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


def test_training_goes_on_after_a_disagreement(run: Run) -> None:
    """Nothing of it comes back later, out of ``zero_grad`` or the next step."""
    case = """
        torch.manual_seed(0)
        net = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        model = hs.DistributedModel(nn.Sequential(*net), unit=nn.Linear)
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.ones(2, 8)
        for leaves_out in (False, True, False):
            try:
                loss = model(x).square().mean()
                if not leaves_out or rank == 0:
                    loss.backward()
                else:
                    model(x)
            except hs.ScheduleError as error:
                report(error)
            else:
                optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            print("loss", rank, float(model(x).square().mean()), flush=True)
        os._exit(0)
    """
    finished = run("-n", "2", script=setup_on("c10d") + dedent(case))
    assert finished.code == 0, finished.err
    lines = finished.out.splitlines()
    assert sum("raised" in line for line in lines) == 2, finished.out
    losses = {line.split()[-1] for line in lines if "loss" in line and "raised" not in line}
    assert len(losses) == 1, finished.out


@pytest.mark.parametrize("backend", ["c10d", "shm"])
def test_inference_mode(run: Run, backend: str) -> None:
    """Transports write on threads of their own, which are not in it."""
    case = """
        model = hs.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), unit=nn.Linear)
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.ones(2, 8)
        for _ in range(2):
            with torch.inference_mode():
                before = model(x).clone()
                with hs.join(model):
                    for _ in range(1 + rank):
                        model(x)
                model.state_dict()
            out = model(x)
            assert torch.equal(out, before)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert not torch.equal(model(x), before)
        print("done", rank, flush=True)
    """
    finished = run("-n", "2", script=setup_on(backend) + dedent(case))
    assert finished.code == 0, finished.err
    assert finished.out.count("done") == 2
