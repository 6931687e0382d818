"""The one form of all benchmarks: a table for people and ``{meta, rows, figures}`` for machines.

A row is what was measured, a figure what it means beside a goal. Pure but for ``machine`` and
``commit``, which look at where this runs. Next: _launch.py, then the benchmarks themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import hopshard as hs
import torch
from rich.console import Console
from rich.table import Table

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
_WIDTH: Final = 200


@dataclass(frozen=True)
class Row:
    """One way of doing one operation. Times are of the slowest rank."""

    op: str
    backend: str
    algorithm: str
    nodes: int
    ranks: int
    bytes: int
    """Of the whole buffer: an all-gather's output, a reduce-scatter's input."""
    median_ms: float
    p95_ms: float
    bus_gb_s: float | None
    """See ``bus_factor``; None where the operation is no collective."""
    samples: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    """What only some rows have; written beside the fields above."""

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values.pop("details"), **values}


@dataclass(frozen=True)
class Figure:
    """A number that the project promises, or wants to know."""

    name: str
    value: float
    """NaN: it could not be measured; ``note`` among the details says why."""
    goal: float | None
    """None: no goal holds in this configuration."""
    better: Literal["higher", "lower"]
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        # A goal is met as it is printed: what rounds to it has reached it.
        value = round(self.value, 4)
        return value >= self.goal if self.better == "higher" else value <= self.goal

    def to_json(self) -> dict[str, Any]:
        value = None if math.isnan(self.value) else round(self.value, 4)
        fixed = {"name": self.name, "value": value, "goal": self.goal}
        return {**self.details, **fixed, "better": self.better, "met": self.met}


@dataclass
class Results:
    """What one run of a benchmark found."""

    meta: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "meta": self.meta,
            "rows": [row.to_json() for row in self.rows],
            "figures": [figure.to_json() for figure in self.figures],
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        text = json.dumps(self.to_json(), indent=1) + "\n"
        pathlib.Path(path).write_text(text, encoding="utf-8")

    def missed(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.met is False]

    def show(self) -> None:
        """Prints both tables; a missed goal is said, not left out."""
        # mpirun's pseudo terminal has no size and is no terminal of a person.
        force = False if "OMPI_COMM_WORLD_RANK" in os.environ else None
        width = max(_WIDTH, shutil.get_terminal_size().columns)
        console = Console(width=width, highlight=False, force_terminal=force)
        for rows in _by_texts(self.rows):
            console.print(_row_table(rows))
        if self.figures:
            console.print(_figure_table(self.figures))
            judged = [figure for figure in self.figures if figure.goal is not None]
            if judged:
                met = len(judged) - len(self.missed())
                console.print(f"{met} of {len(judged)} goals met")


def summarise(
    op: str,
    backend: str,
    algorithm: str,
    places: tuple[int, int],
    num_bytes: int,
    samples_s: Sequence[float],
    details: Mapping[str, Any] | None = None,
) -> Row:
    """A row from samples in seconds. ``places``: nodes and ranks."""
    nodes, ranks = places
    median = statistics.median(samples_s)
    factor = bus_factor(op, ranks)
    return Row(
        op,
        backend,
        algorithm,
        nodes,
        ranks,
        num_bytes,
        round(median * 1e3, 4),
        round(p95(samples_s) * 1e3, 4),
        None if factor is None else round(factor * num_bytes / median / 1e9, 3),
        len(samples_s),
        details or {},
    )


def bus_factor(op: str, ranks: int) -> float | None:
    """Share of the buffer that a rank must send and receive; times bytes per second it is GB/s.

    >>> bus_factor("all_reduce", 4)
    1.5
    """
    share = (ranks - 1) / ranks
    return {"all_gather": share, "reduce_scatter": share, "all_reduce": 2 * share}.get(op)


def p95(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]


def make_meta(benchmark: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What ran where, without which a row says nothing."""
    return {
        "benchmark": benchmark,
        "config": dict(config),
        "commit": commit(),
        "machine": machine(),
    }


def commit() -> str:
    """The commit, "+changes" if the tree differs from it, or what stands for it outside git."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return f"none, version {hs.__version__}"
    return head.strip() + ("+changes" if changed.strip() else "")


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def size_name(num_bytes: int) -> str:
    """``"4 KiB"``, ``"64 MiB"``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def _by_texts(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in more than numbers are easier to read apart."""
    parts: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        texts = (value for value in row.details.values() if isinstance(value, str))
        parts.setdefault(tuple(texts), []).append(row)
    return list(parts.values()) or [[]]


def _row_table(rows: Sequence[Row]) -> Table:
    # What is the same in all rows is said once.
    names = {key for row in rows for key, value in row.details.items() if value is not None}
    texts = {name: {row.details.get(name) for row in rows} for name in sorted(names)}
    common = {
        name: text
        for name, (text, *others) in texts.items()
        if len(rows) > 1 and not others and type(text) in (str, int)
    }
    title = ", ".join(["Measured", *(f"{name} {text}" for name, text in common.items())])
    table = Table(title=title, title_justify="left")
    for name in ("op", "bytes", "backend", "algorithm"):
        table.add_column(name, no_wrap=True)
    for name in ("nodes x ranks", "median ms", "p95 ms"):
        table.add_column(name, justify="right", no_wrap=True)
    has_bus = any(row.bus_gb_s is not None for row in rows)
    if has_bus:
        table.add_column("bus GB/s", justify="right", no_wrap=True)
    extra = sorted(names - set(common))
    for name in extra:
        table.add_column(name.replace("_", " "), justify="right", min_width=9, overflow="fold")
    previous: tuple[str, int] | None = None
    for row in rows:
        if previous not in (None, (row.op, row.bytes)):
            table.add_section()
        previous = (row.op, row.bytes)
        table.add_row(
            row.op,
            size_name(row.bytes),
            row.backend,
            row.algorithm,
            f"{row.nodes} x {row.ranks // row.nodes}",
            f"{row.median_ms:,.3f}",
            f"{row.p95_ms:,.3f}",
            *(["" if row.bus_gb_s is None else f"{row.bus_gb_s:.2f}"] if has_bus else []),
            *(_cell(row.details.get(name)) for name in extra),
        )
    return table


def _figure_table(figures: Sequence[Figure]) -> Table:
    table = Table(title="Figures", title_justify="left")
    table.add_column("figure")
    extra = list(dict.fromkeys(key for figure in figures for key in figure.details))
    for name in (*(name.replace("_", " ") for name in extra), "value", "goal"):
        table.add_column(name, justify="right")
    table.add_column("")
    words = {True: "met", False: "[bold red]MISSED[/]", None: ""}
    for figure in figures:
        sign = "≥" if figure.better == "higher" else "≤"
        table.add_row(
            figure.name,
            *(_cell(figure.details.get(name)) for name in extra),
            "–" if math.isnan(figure.value) else f"{figure.value:.2f}",
            "–" if figure.goal is None else f"{sign} {figure.goal:g}",
            words[figure.met],
        )
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number:.4g}" for key, number in value.items())
    if isinstance(value, float):
        return f"{value:,.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"
    return str(value)
