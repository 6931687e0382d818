"""The errors that hopshard raises on purpose, and how their texts name ranks.

The types live in the native core, so that C++ and Python raise the same ones. Catch ``Error`` for
all of them. Next: config.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from hopshard._C import (
    CommError,
    ConfigError,
    Error,
    InvalidArgument,
    ScheduleError,
    ShardedError,
    TimeoutError,
)

__all__ = [
    "CommError",
    "ConfigError",
    "Error",
    "InvalidArgument",
    "ScheduleError",
    "ShardedError",
    "TimeoutError",
    "format_ranks",
]


def format_ranks(ranks: Iterable[int]) -> str:
    """Writes ranks as short ranges.

    >>> format_ranks([3, 0, 1, 2, 7])
    '0-3,7'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def name_ranks(ranks: Iterable[int]) -> str:
    """``"rank 3"`` or ``"ranks 0-2,5"``."""
    members = sorted(set(ranks))
    return f"{'rank' if len(members) == 1 else 'ranks'} {format_ranks(members)}"
