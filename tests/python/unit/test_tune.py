"""``hopshard tune``: the fit, what is derived from it, and the command with real ranks."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import hopshard as hs
import pytest
from hopshard import _C
from hopshard.cli import main, tune
from hopshard.cli.tune import SIZES, Sample, describe_ranges, fit, two_level_ranges
from hopshard.errors import ConfigError
from hopshard.link_costs import LinkCost, LinkCosts, load_link_costs

FAST = LinkCost(alpha_us=2.0, gb_per_s=10.0)
SLOW = LinkCost(alpha_us=50.0, gb_per_s=0.12)


def exact(cost: LinkCost, ranks: int) -> list[Sample]:
    """What a link of that cost takes."""
    return [Sample(ranks, size, (ranks - 1) * _step_us(cost, size / ranks) / 1e6) for size in SIZES]


def _step_us(cost: LinkCost, num_bytes: float) -> float:
    return cost.alpha_us + num_bytes / (1e3 * cost.gb_per_s)


@pytest.mark.parametrize("cost", [FAST, SLOW, LinkCost(alpha_us=0.5, gb_per_s=400.0)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_fit_finds_what_made_the_times(cost: LinkCost, ranks: int) -> None:
    found = fit(exact(cost, ranks))
    assert found.alpha_us == pytest.approx(cost.alpha_us, rel=1e-3)
    assert found.gb_per_s == pytest.approx(cost.gb_per_s, rel=1e-3)


def test_noise_moves_the_fit_little() -> None:
    noisy = [
        Sample(s.ranks, s.num_bytes, s.seconds * (1.1 if i % 2 else 0.9))
        for i, s in enumerate(exact(SLOW, 2) * 2)
    ]
    assert fit(noisy).gb_per_s == pytest.approx(SLOW.gb_per_s, rel=0.15)
    assert fit(noisy).alpha_us == pytest.approx(SLOW.alpha_us, rel=0.25)


def test_neither_latency_nor_bandwidth_can_be_below_nothing() -> None:
    # Faster per byte the smaller it is: the line would begin below zero.
    bent = [Sample(2, size, 1e-9 * size**1.1) for size in SIZES]
    assert fit(bent).alpha_us == 0 and fit(bent).gb_per_s > 0
    flat = [Sample(2, size, 1e-3 - 1e-12 * size) for size in SIZES]
    assert fit(flat).alpha_us > 0 and fit(flat).gb_per_s > 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_times_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="times are none that a link can have"):
        fit([Sample(2, 1024, seconds)])


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(
    ("intra_node", "inter_node", "shape", "words"),
    [
        (FAST, SLOW, (2, 4), r"always"),
        (SLOW, SLOW, (2, 4), r"below [\d,]+ bytes"),
        (LinkCost(alpha_us=0, gb_per_s=5), LinkCost(alpha_us=0, gb_per_s=5), (8, 8), r"never"),
        (
            LinkCost(alpha_us=1, gb_per_s=50),
            LinkCost(alpha_us=0, gb_per_s=1),
            (2, 2),
            r"below 4,041 bytes, and from 4,167 bytes on",
        ),
    ],
)
def test_two_levels_win_where_the_predictions_say(
    op: str, intra_node: LinkCost, inter_node: LinkCost, shape: tuple[int, int], words: str
) -> None:
    costs = LinkCosts(intra_node=intra_node, inter_node=inter_node)
    ranges = two_level_ranges(costs, op, *shape)
    assert re.fullmatch(words, describe_ranges(ranges))
    edges = {edge for pair in ranges for edge in pair if edge is not None}
    native = costs.as_native()
    for num_bytes in {*edges, *(edge - 1 for edge in edges if edge), *(4**n for n in range(17))}:
        flat, two_level = (
            _C.predict_us(op, algorithm, *shape, num_bytes, native)
            for algorithm in ("flat", "hierarchical")
        )
        inside = any(begin <= num_bytes < (end or 1 << 62) for begin, end in ranges)
        assert inside == (two_level < flat), num_bytes


def test_one_rank_has_no_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "-n", "1"]) == 2
    assert "two ranks or more" in capsys.readouterr().err


def test_a_missing_folder_is_said_before_anything_is_measured(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--output", str(tmp_path / "no" / "costs.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def run_tune(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hopshard.cli", "tune", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_one_node_measures_its_own_link(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "costs.json"
    finished = run_tune("-n", "2", "--backend", "c10d", "--output", str(path))
    assert finished.returncode == 0, finished.stderr
    costs = load_link_costs(path)
    assert costs.measured["intra_node"] == "c10d"
    assert costs.measured["inter_node"] == "not measured: one node"
    assert costs.inter_node == LinkCosts().inter_node
    assert "collectives are flat" in finished.stdout


def test_two_emulated_nodes_measure_both_and_init_reads_them(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "costs.json"
    finished = run_tune("--emulate", "2x2", "--backend", "c10d", "--output", str(path))
    assert finished.returncode == 0, finished.stderr
    costs = load_link_costs(path)
    assert costs.measured["nodes"] == 2 and costs.measured["ranks_per_node"] == 2
    assert costs.measured["intra_node"] == costs.measured["inter_node"] == "c10d"
    for num_bytes in tune.SHOWN_SIZES:
        assert tune._size(num_bytes) in finished.stdout
    assert "all-gather: two-level wins" in finished.stdout
    world = hs.init(link_costs=str(path))
    assert world.config.link_costs == str(path)
