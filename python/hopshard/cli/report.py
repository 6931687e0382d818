"""Who failed first, and why: the last thing a user reads when a run ends badly.

A rank that dies makes its peers fail too, milliseconds later and with longer tracebacks. The root
is found from when ranks failed and whether an error is a consequence of another rank's.
"""

from __future__ import annotations

import json
import pathlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from hopshard.errors import name_ranks


@dataclass(frozen=True)
class RaisedError:
    """What a rank's excepthook left in its error file (world.py)."""

    text: str
    time_s: float
    is_consequence: bool
    """The error says that another rank failed."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank's process ended."""

    rank: int
    pid: int
    time_s: float
    exit_code: int
    """Negative: minus the signal's number."""
    was_stopped: bool
    """Ended after the launcher had begun to stop all ranks."""
    error: RaisedError | None = None

    @property
    def shell_code(self) -> int:
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    def describe(self) -> str:
        if self.exit_code < 0:
            try:
                name = signal.Signals(-self.exit_code).name
            except ValueError:
                name = "an unknown signal"
            return f"killed by {name} (signal {-self.exit_code})"
        return f"exit code {self.exit_code}"


def find_root(ends: Sequence[RankEnd]) -> RankEnd:
    """The rank whose failure came first. Pure; ``ends`` holds failures only, at least one."""

    def order(end: RankEnd) -> tuple[bool, bool, float]:
        if end.error is None:
            return end.was_stopped, False, end.time_s
        return end.was_stopped, end.error.is_consequence, end.error.time_s

    return min(ends, key=order)


def report_failure(
    ended: Mapping[int, RankEnd],
    num_ranks: int,
    last_lines: Callable[[int], Sequence[str]],
    started_s: float,
    out: TextIO,
) -> int:
    """Writes the report and returns the exit code of the run."""
    failures = [end for end in ended.values() if end.exit_code != 0]
    if not failures:
        print("hopshard run: a rank failed, but none could be observed", file=out, flush=True)
        return 1
    root = find_root(failures)
    lines = ["", f"hopshard run: {_headline(root, failures)}"]
    lines.append(f"  pid {root.pid}, {root.describe()}, after {root.time_s - started_s:.1f} s")
    if root.exit_code == -signal.SIGKILL:
        lines.append("  SIGKILL often means that the host ran out of memory (see dmesg)")
    tail = list(last_lines(root.rank))
    if tail:
        lines.append("  last lines of its stderr:")
        lines += [f"    {line}" for line in tail]
    elif root.exit_code >= 0:
        lines.append("  it wrote nothing to stderr")
    same = _same_failure(root, failures)
    later = [f.rank for f in failures if not f.was_stopped and f.rank not in same]
    if later:
        lines.append(f"  {name_ranks(later)} failed as a consequence")
    stopped = set(range(num_ranks)) - set(same) - set(later)
    stopped -= {end.rank for end in ended.values() if end.exit_code == 0}
    if stopped:
        lines.append(f"  {name_ranks(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped")
    print("\n".join(lines), file=out, flush=True)
    return root.shell_code


def read_error_file(path: pathlib.Path) -> RaisedError | None:
    """The error that a rank recorded, if it did."""
    try:
        message = json.loads(path.read_text())["message"]
        extra = message["extraInfo"]
        return RaisedError(
            text=message["message"],
            time_s=float(extra.get("time_s", extra["timestamp"])),
            is_consequence=bool(extra.get("is_consequence", False)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # None was written, or another library's format.


def _same_failure(root: RankEnd, failures: Sequence[RankEnd]) -> list[int]:
    """Ranks that report the root's very error, such as a configuration all of them refuse."""
    if root.error is None:
        return [root.rank]
    return sorted(f.rank for f in failures if f.error and f.error.text == root.error.text)


def _headline(root: RankEnd, failures: Sequence[RankEnd]) -> str:
    same = _same_failure(root, failures)
    if len(same) > 1:
        return f"{name_ranks(same)} failed with the same error; here is rank {root.rank}'s"
    return f"rank {root.rank} failed first"
