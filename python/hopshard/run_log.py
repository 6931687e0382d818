"""The record of one run: facts that hold for all of it, and one line per logged step.

A run is a folder: ``run.json`` (facts), ``metrics.jsonl`` (one object a line, the truth),
``metrics.csv`` (the same as a table, written at the end). Nothing here draws: report.py.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeGuard

FACTS_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
TABLE_FILE = "metrics.csv"
DERIVED_FILES = (TABLE_FILE, "report.html", "loss.png")

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run as read from its folder.

    Attributes:
        facts: What does not change from step to step: shape, world, degree, sample text.
        records: One per line of metrics.jsonl, in order.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of the records that hold a finite number at `key`.

        Args:
            key: A dot steps into a nested object, e.g. ``bytes_sent.inter_node``.
        """
        steps: list[int] = []
        values: list[float] = []
        for record in self.records:
            value = flatten(record).get(key)
            if is_number(value) and math.isfinite(value):
                steps.append(int(record["step"]))
                values.append(float(value))
        return steps, values


class RunLog:
    """Writes the record of a run on one rank; on the others every call does nothing.

    Each record reaches the file when it is written, so a run that dies leaves all its lines.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with RunLog(folder, facts={"degree": 2}) as log:
        ...     log.write({"step": 1, "loss": 5.5})
        >>> read_run(folder).records
        [{'step': 1, 'loss': 5.5}]

    Args:
        folder: Made if needed. An earlier run in it is replaced, its report too.
        facts: Kept in ``run.json``; `add_facts` adds to them.
        enabled: False on all ranks but one.
    """

    def __init__(
        self, folder: str | Path, facts: Mapping[str, Any] | None = None, enabled: bool = True
    ) -> None:
        self.folder = Path(folder)
        self._facts: dict[str, Any] = dict(facts or {})
        self._enabled = enabled
        self._file: TextIO | None = None
        if not enabled:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in DERIVED_FILES:  # An old report beside new numbers would mislead.
            (self.folder / name).unlink(missing_ok=True)
        self._file = (self.folder / METRICS_FILE).open("w", encoding="utf-8", buffering=1)
        self._write_facts()

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one object; ``step`` is required. Non-finite numbers become null."""
        if "step" not in record:
            raise ValueError(f"a record needs a 'step': {sorted(record)}")
        if self._file is not None:
            self._file.write(json.dumps(to_json(record), allow_nan=False) + "\n")

    def add_facts(self, **facts: Any) -> None:
        """Adds to ``run.json`` what is known only later, also after `close`."""
        self._facts.update(facts)
        if self._enabled:
            self._write_facts()

    def close(self) -> None:
        """Ends the run and writes ``metrics.csv``; a second call does nothing."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        write_table(self.folder / TABLE_FILE, read_run(self.folder).records)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write_facts(self) -> None:
        # Renamed into place, so that a reader never sees half of it.
        partial = self.folder / (FACTS_FILE + ".partial")
        text = json.dumps(to_json(self._facts), indent=2, allow_nan=False)
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, self.folder / FACTS_FILE)


def read_run(folder: str | Path) -> Run:
    """Reads a run that has ended, still goes on, or died.

    Raises:
        FileNotFoundError: The folder holds no ``metrics.jsonl``.
        ValueError: A line other than the last is not a record; the message names it.
    """
    folder = Path(folder)
    path = folder / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a run: it holds no {METRICS_FILE}")
    facts_path = folder / FACTS_FILE
    facts = json.loads(facts_path.read_text(encoding="utf-8")) if facts_path.is_file() else {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "step" not in record:
                raise ValueError("not an object with a 'step'")
        except ValueError as error:
            if number == len(lines):  # A process that died while it wrote leaves half a line.
                break
            raise ValueError(f"{path}, line {number}: {error}") from None
        records.append(record)
    return Run(facts=facts, records=records)


def write_table(path: Path, records: list[Record]) -> None:
    """The records as CSV; nested keys are joined by dots, a missing value is empty."""
    rows = [flatten(record) for record in records]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it can be drawn; booleans are not numbers here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def to_json(value: Any) -> Any:
    """Only what JSON holds: paths become text, non-finite numbers null."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float)):
        return value
    if hasattr(value, "item"):  # A tensor or NumPy scalar.
        return to_json(value.item())
    return str(value)
