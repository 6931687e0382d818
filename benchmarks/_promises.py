"""What the rows of collectives.py mean: the figures that the project promises, and their goals.

Pure. A goal holds for the configuration that it was set for; elsewhere the figure has none. Next:
collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks._rows import Figure, Row, size_name

GLOO: Final = "gloo"
OPEN_MPI: Final = "open_mpi"
MEMORY: Final = "memory"
LATENCY_BYTES: Final = 4096


def make_figures(rows: Sequence[Row], line_rate: float | None) -> list[Figure]:
    """The promises of the project that these rows can speak of. Pure.

    Args:
        rows: Of one run.
        line_rate: Bytes per second of a plain stream between nodes, if there are several.
    """
    figures: list[Figure] = []
    for case in dict.fromkeys((row.op, row.bytes, row.nodes, row.ranks) for row in rows):
        found = [row for row in rows if (row.op, row.bytes, row.nodes, row.ranks) == case]
        nodes = case[2]
        figures += _across_nodes(found, line_rate) if nodes > 1 else _on_one_host(found)
    return figures


# Peer's median over ours; 4 ranks on one host, 16 and 64 MiB, fp32.
_HOST_GOALS: Final = {
    ("reduce_scatter", True): {GLOO: 25.0, OPEN_MPI: 15.0},
    ("all_gather", True): {GLOO: 12.0, OPEN_MPI: 2.5},
    ("all_reduce", True): {GLOO: 4.0, OPEN_MPI: 2.5},
    ("all_gather", False): {GLOO: 5.0},
    ("reduce_scatter", False): {GLOO: 10.0},
}
_ROOF_GOAL: Final = 0.85
# Two-level all-gather of 32 MiB at 1 Gbit/s per node, by (nodes, ranks per node).
_CLUSTER_GOALS: Final = {
    (2, 2): {GLOO: 1.45, OPEN_MPI: 1.6},
    (4, 2): {GLOO: 1.3, OPEN_MPI: 1.3},
}
_FLAT_GOAL: Final = 1.42
_LINE_RATE_GOAL: Final = 0.95


def _on_one_host(rows: Sequence[Row]) -> list[Figure]:
    figures = []
    # Of several ways to reach the memory roof, the fastest is it.
    by_backend = {row.backend: row for row in sorted(rows, key=lambda r: -r.median_ms)}
    for ours in (row for row in rows if row.backend == "shm"):
        registered = bool(ours.details.get("registered"))
        where = f"{ours.op} {size_name(ours.bytes)}, shm"
        if ours.bytes == LATENCY_BYTES:
            if OPEN_MPI in by_backend:
                peer = by_backend[OPEN_MPI]
                goal = 1.0 if ours.ranks == 2 else None
                name = f"{where}, {ours.ranks} ranks: time over {OPEN_MPI}'s"
                figures.append(_ratio(name, ours, peer, goal, better="lower"))
            continue
        where += "" if registered else ", not registered"
        promised = ours.ranks == 4 and ours.bytes in (16 * 2**20, 64 * 2**20)
        goals = _HOST_GOALS.get((ours.op, registered), {}) if promised else {}
        for name in (GLOO, OPEN_MPI):
            if name in by_backend:
                text = f"{where}: times as fast as {name}"
                figures.append(_ratio(text, ours, by_backend[name], goals.get(name)))
        if registered and MEMORY in by_backend:
            text = f"{where}: share of the memory roof"
            goal = _ROOF_GOAL if promised else None
            figures.append(_ratio(text, ours, by_backend[MEMORY], goal))
    if MEMORY in by_backend:  # What no implementation can exceed on this machine.
        roof = by_backend[MEMORY]
        for name in (GLOO, OPEN_MPI):
            if name in by_backend:
                text = f"{roof.op} {size_name(roof.bytes)}, memory roof: times as fast as {name}"
                figures.append(_ratio(text, roof, by_backend[name], None))
    return figures


def _across_nodes(rows: Sequence[Row], line_rate: float | None) -> list[Figure]:
    figures = []
    by_name = {(row.backend, row.algorithm): row for row in rows}
    for ours in (row for row in rows if row.algorithm == "hierarchical"):
        per_node = ours.ranks // ours.nodes
        where = f"{ours.op} {size_name(ours.bytes)}, {ours.backend}"
        promised = ours.op == "all_gather" and ours.bytes == 32 * 2**20
        goals = _CLUSTER_GOALS.get((ours.nodes, per_node), {}) if promised else {}
        for name in (GLOO, OPEN_MPI):
            if (name, "own") in by_name:
                text = f"{where}: times as fast as {name}"
                figures.append(_ratio(text, ours, by_name[name, "own"], goals.get(name)))
        between = ours.backend.rpartition("+")[2]
        two_by_two = (ours.nodes, per_node) == (2, 2) and ours.bytes == 32 * 2**20
        if (between, "flat") in by_name:
            goal = _FLAT_GOAL if two_by_two and ours.op == "all_gather" else None
            text = f"{where}: times as fast as flat {between}"
            figures.append(_ratio(text, ours, by_name[between, "flat"], goal))
        if between == "ofi" and ("shm+c10d", "hierarchical") in by_name:
            text = f"{where}: times as fast as shm+c10d"
            goal = 1.0 if promised else None
            peer = by_name["shm+c10d", "hierarchical"]
            figures.append(_ratio(text, ours, peer, goal))
        if ours.op != "all_reduce":
            figures += _against_the_line(ours, where, line_rate, two_by_two)
    figures += _traffic(rows)
    return figures


def _against_the_line(
    ours: Row, where: str, line_rate: float | None, promised: bool
) -> list[Figure]:
    if line_rate is None:
        return []
    crossing = crossing_bytes(ours)
    ideal_ms = crossing / line_rate * 1e3
    details = {"ours_ms": ours.median_ms, "peer_ms": round(ideal_ms, 3)}
    goal = _LINE_RATE_GOAL if promised else None
    value = ideal_ms / ours.median_ms
    return [Figure(f"{where}: share of the line rate", value, goal, "higher", details)]


def _traffic(rows: Sequence[Row]) -> list[Figure]:
    """Bytes by the interface over those of the formula; headers and acknowledgements are extra."""
    figures = []
    for row in rows:
        sent = row.details.get("node_sent_mib")
        if row.op == "all_reduce" or sent is None or row.backend in (GLOO, OPEN_MPI):
            continue
        name = f"{row.op} {size_name(row.bytes)}, {row.backend}: node's bytes over the formula's"
        figures.append(Figure(name, sent * 2**20 / crossing_bytes(row), 1.03, "lower"))
    return figures


def crossing_bytes(row: Row) -> float:
    """What one node must send: a two-level algorithm sends each byte to another node once."""
    alone = row.ranks // row.nodes if row.algorithm == "hierarchical" else 1
    return (row.ranks - alone) / row.ranks * row.bytes


def _ratio(name: str, ours: Row, peer: Row, goal: float | None, better: Any = "higher") -> Figure:
    value = peer.median_ms / ours.median_ms
    if better == "lower":
        value = 1 / value
    details = {"ours_ms": ours.median_ms, "peer_ms": peer.median_ms}
    return Figure(name, value, goal, better, details)
