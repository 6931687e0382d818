"""What a user gets wrong at start-up: a typed error on every rank, exit code not 0, no hang.

One script tries several mistakes in turn, because starting ranks is what costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., Any]


def _by_rank(output: str, marker: str) -> dict[int, str]:
    """What each rank printed behind ``marker``."""
    found = {}
    for line in output.splitlines():
        prefix, _, text = line.partition(marker)
        if text:
            found[int(prefix.strip("[] "))] = text
    return found


def test_every_rank_gets_the_same_config_error_and_can_go_on(run: Run) -> None:
    result = run(
        "-n",
        "3",
        script="""
            import os
            import hopshard as hs
            rank = int(os.environ["RANK"])
            cases = {
                "disagree": dict(sharded_data_parallel_degree=3 if rank == 1 else 1),
                "degree": dict(sharded_data_parallel_degree=2),
                "unknown": dict(sharded_data_parallel_degre=1),
                "type": dict(microbatches="2"),
                "aliases": dict(dp_shard_size=1, hybrid_shard_degree=3),
            }
            for name, config in cases.items():
                try:
                    hs.init(**config)
                except hs.ConfigError as error:
                    print(f"{name}: {error}".replace("\\n", " | "), flush=True)
                assert not hs.is_initialized()
            hs.init(sharded_data_parallel_degree=3)
            try:
                hs.init(sharded_data_parallel_degree=1)
            except hs.ConfigError as error:
                print(f"second: {error}", flush=True)
            hs.barrier()
            print("alive", flush=True)
        """,
    )
    assert (result.code, result.leftover_pids) == (0, []), result.err
    expected = {
        "disagree: ": "'sharded_data_parallel_degree': 1 on ranks 0,2; 3 on rank 1",
        "degree: ": "2",
        "unknown: ": "did you mean 'sharded_data_parallel_degree'?",
        "type: ": "'microbatches' cannot be '2' (str); legal: an integer >= 1",
        "aliases: ": "contradict each other",
        "second: ": "'sharded_data_parallel_degree' 3 -> 1",
    }
    for marker, text in expected.items():
        found = _by_rank(result.out, marker)
        assert sorted(found) == [0, 1, 2], (marker, result.out)
        assert len(set(found.values())) == 1
        assert text in found[0]
    assert result.out.count("alive") == 3


def test_an_uncaught_config_error_ends_the_run_with_the_text_last(run: Run) -> None:
    result = run(
        "-n",
        "2",
        script="""
            import os
            import hopshard as hs
            hs.init(timeout_s=30 + int(os.environ["RANK"]))
            print("never")
        """,
    )
    assert (result.code, result.leftover_pids) == (1, [])
    assert "never" not in result.out
    report = result.err[result.err.index("hopshard run:") :]
    assert "ranks 0-1 failed with the same error" in report
    assert "ConfigError: the ranks disagree on the configuration" in report
    assert "'timeout_s': 30.0 on rank 0; 31.0 on rank 1" in report


def test_a_peer_that_never_comes_is_a_timeout_that_names_the_limit(run: Run) -> None:
    result = run(
        "-n",
        "2",
        script="""
            import os, time
            import hopshard as hs
            if os.environ["RANK"] == "1":
                time.sleep(600)
            start = time.monotonic()
            try:
                hs.init(timeout_s=2)
            except hs.CommError as error:
                print("comm error after", time.monotonic() - start, error, flush=True)
                raise
        """,
    )
    assert (result.code, result.leftover_pids) == (1, [])
    line = _by_rank(result.out, "comm error after")[0]
    assert float(line.split()[0]) < 10
    assert "2 s" in line
