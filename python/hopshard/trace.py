"""Traces in Chrome's format: what each rank computed, gathered and reduced, and when.

A world with ``trace_folder`` writes one file per rank and model; ``hopshard trace`` makes one of
them. Open it in https://ui.perfetto.dev or chrome://tracing. Next: cli/trace.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import weakref
from typing import Any, Final

from hopshard import _C

MAX_EVENTS: Final = 200_000
"""Of one rank; what comes later is left out."""

_LANES: Final = ("compute", "gather", "hop 1", "hop 2", "step")

Json = dict[str, Any]


def start(owner: object, engine: _C.ShardEngine, folder: str, rank: int, number: int) -> None:
    """Records from here on; the file is written when ``owner`` (a model) or the process ends."""
    engine.record_timeline(MAX_EVENTS)
    path = pathlib.Path(folder) / f"rank{rank}-model{number}.json"
    weakref.finalize(owner, _write, engine, path, rank, number)


def _write(engine: _C.ShardEngine, path: pathlib.Path, rank: int, number: int) -> None:
    events = to_events(engine.take_timeline(), rank, number)
    share = engine.statistics()["hidden_share"]
    place = f"{rank}, model {number}" if number else str(rank)
    text = json.dumps({"traceEvents": events, "hidden_share": {place: share}})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def to_events(
    timeline: list[tuple[str, str, float, float]], rank: int, number: int = 0
) -> list[Json]:
    """One lane per kind of work and model, ranks as processes.

    >>> to_events([("gather", "gather h.0", 10.0, 30.0)], 0)[-1]
    {'ph': 'X', 'name': 'gather h.0', 'pid': 0, 'tid': 1, 'ts': 10.0, 'dur': 20.0}
    """
    events: list[Json] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    ]
    first_lane = number * len(_LANES)
    for lane, kind in enumerate(_LANES, start=first_lane):
        place = {"pid": rank, "tid": lane}
        name = f"{kind} of model {number}" if number else kind
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        events.append(
            {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": lane}}
        )
    for lane_name, name, begin_us, end_us in timeline:
        place = {"pid": rank, "tid": first_lane + _LANES.index(lane_name)}
        events.append(
            {"ph": "X", "name": name, **place, "ts": begin_us, "dur": round(end_us - begin_us, 3)}
        )
    return events


def merge(folder: pathlib.Path) -> Json:
    """All ranks' files as one trace; times begin at 0.

    Raises:
        FileNotFoundError: no rank has written one.
    """
    files = sorted(folder.glob("rank*.json"))
    if not files:
        raise FileNotFoundError(
            f"no rank wrote a trace to {folder}: the script built no hopshard.DistributedModel, or "
            "was killed"
        )
    events: list[Json] = []
    shares: dict[str, float] = {}
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        events += content["traceEvents"]
        shares.update(content["hidden_share"])
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    return {"traceEvents": events, "displayTimeUnit": "ms", "hidden_share": shares}
