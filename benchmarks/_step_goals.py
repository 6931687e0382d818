"""What the rows of step_time.py mean: the promises of the project, their goals, the peers beside.

Pure. A case is one run in which arms take turns; a goal holds for the case that it was set for.
Next: step_time.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks._rows import Figure, Row

ONE_HOST: Final = "one host"
FAST: Final = "2 x 2, 1gbit per node"
SLOW: Final = "2 x 2, 200mbit per node"


@dataclass(frozen=True)
class Case:
    """What the rows of one interleaved run have in common."""

    network: str
    dtype: str
    accumulation: int
    ranks: int = 4

    def __str__(self) -> str:
        where = self.network
        if where == ONE_HOST:
            where = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{where}, {self.dtype}, accumulation {self.accumulation}"


ArmKey = tuple[str, int]
"""An arm's name and degree."""


@dataclass(frozen=True)
class Promise:
    """One of our numbers over one of a peer's, or of the memory formula's, and its goal."""

    case: Case
    ours: ArmKey
    base: ArmKey
    goal: float
    quantity: str = "median_ms"
    """Or a detail of the row. Where ``base`` is ``ours``: over the sum of ``over``."""
    over: tuple[str, ...] = ()
    known: Mapping[str, float] = field(default_factory=dict)
    """Peers over the base when the goal was set; a base in MiB where memory is promised."""

    @property
    def name(self) -> str:
        ours = _label(self.ours)
        if self.over:
            words = {"peak_mib": "peak memory", "account_mib": "memory by account"}
            return f"{ours}: {words[self.quantity]} over {' + '.join(self.over)}"
        what = "step" if self.quantity == "median_ms" else "peak memory"
        return f"{self.case}: {what} of {ours} over {_label(self.base)}"


_SINGLE: Final = Case(ONE_HOST, "fp32", 1)
_FOURFOLD: Final = Case(ONE_HOST, "fp32", 4)
_BF16: Final = Case(ONE_HOST, "bf16", 1)
_ALONE: Final = Case(ONE_HOST, "fp32", 1, ranks=1)
_FAST: Final = Case(FAST, "fp32", 4)
_FAST_SINGLE: Final = Case(FAST, "fp32", 1)
_SLOW: Final = Case(SLOW, "fp32", 4)

_TWO: Final = ("hopshard", 2)
_FOUR: Final = ("hopshard", 4)
_NODE: Final = ("hopshard_node", 4)
_FSDP2: Final = ("fsdp2", 4)
_KEEP: Final = ("fsdp2_keep", 4)
_HSDP: Final = ("hsdp", 2)
_KNOWN_SINGLE: Final = {"ddp": 0.70, "hsdp": 0.99, "zero3": 1.08, "no_comm": 0.57}
_KNOWN_FOURFOLD: Final = {"ddp": 0.59, "hsdp": 1.05, "hsdp_two_hop": 0.96, "zero3": 1.15}
_KNOWN_FAST: Final = {"hsdp": 0.68, "hsdp_two_hop": 0.50, "zero3": 0.95}
_FORMULA: Final = ("formula_mib", "activation_mib")

LOCAL: Final = (
    Promise(_SINGLE, _FOUR, _FSDP2, 0.57, known=_KNOWN_SINGLE),
    Promise(_FOURFOLD, _TWO, _FSDP2, 0.58, known=_KNOWN_FOURFOLD),
    Promise(_FOURFOLD, _FOUR, _FSDP2, 0.58, known=_KNOWN_FOURFOLD),
    Promise(_BF16, _FOUR, _FSDP2, 0.65, known={"ddp": 0.70, "zero3": 0.85}),
    Promise(_SINGLE, ("hopshard_gloo", 4), _FSDP2, 0.90),
    Promise(_SINGLE, ("hopshard_gloo", 2), _HSDP, 0.90),
    Promise(_FOURFOLD, ("hopshard_gloo", 4), _FSDP2, 0.90),
    Promise(_FOURFOLD, ("hopshard_gloo", 2), _HSDP, 0.90),
    Promise(_SINGLE, _FOUR, _FSDP2, 0.65, "peak_mib", known={"fsdp2_mib": 335}),
    Promise(_SINGLE, _TWO, _HSDP, 0.65, "peak_mib", known={"hsdp_mib": 378}),
    Promise(_SINGLE, _FOUR, _FOUR, 1.10, "peak_mib", over=_FORMULA),
    Promise(_SINGLE, _TWO, _TWO, 1.10, "peak_mib", over=_FORMULA),
    Promise(_SINGLE, _FOUR, _FOUR, 1.10, "account_mib", over=_FORMULA[:1]),
    Promise(_SINGLE, _TWO, _TWO, 1.10, "account_mib", over=_FORMULA[:1]),
    Promise(_ALONE, ("hopshard", 1), ("no_comm", 1), 1.02),
)
CLUSTER: Final = (
    Promise(_FAST, _TWO, _FSDP2, 0.33, known=_KNOWN_FAST),
    Promise(_SLOW, _TWO, _FSDP2, 0.14, known={"hsdp": 0.40, "hsdp_two_hop": 0.19}),
    Promise(_FAST_SINGLE, _FOUR, _FSDP2, 0.45),
    Promise(_FAST, _FOUR, _FSDP2, 0.43),
    Promise(_FAST, _FOUR, _KEEP, 0.43),
    Promise(_FAST_SINGLE, _NODE, _FSDP2, 0.45),
    Promise(_FAST, _NODE, _FSDP2, 0.43),
    Promise(_FAST, _NODE, _KEEP, 0.43),
)


def make_figures(
    promises: Sequence[Promise],
    rows: Sequence[Row],
    reasons: Mapping[str, str],
    *,
    holds: bool,
) -> list[Figure]:
    """A figure per promise, measured or not. Pure.

    Args:
        promises: All that this run has to speak of.
        rows: What it measured.
        reasons: By case or arm ("zero3@4"): why there are no rows.
        holds: The workload is the one that the goals were set for.
    """
    found: dict[Case, dict[ArmKey, Row]] = {_case_of(row): {} for row in rows}
    for row in rows:
        found[_case_of(row)][row.algorithm, row.details["degree"]] = row
    return [_figure(p, found.get(p.case, {}), reasons, holds) for p in promises]


def promises_about(rows: Sequence[Row]) -> list[Promise]:
    """Those whose both sides were measured. Pure."""
    have = {(_case_of(row), row.algorithm, row.details["degree"]): row for row in rows}
    chosen = []
    for promise in (*LOCAL, *CLUSTER):
        ours, base = (have.get((promise.case, *key)) for key in (promise.ours, promise.base))
        if ours is not None and base is not None and _value(ours, promise.quantity) is not None:
            chosen.append(promise)
    return chosen


def other_figures(rows: Sequence[Row], promised: Sequence[Promise]) -> list[Figure]:
    """Every arm of hopshard over every peer of its case that no promise speaks of. Pure."""
    known = {(p.case, p.ours, p.base) for p in promised if p.quantity == "median_ms"}
    figures = []
    for ours in (row for row in rows if _is_ours(row)):
        for peer in rows:
            case, key, base = _case_of(ours), _key(ours), _key(peer)
            if _is_ours(peer) or _case_of(peer) != case or (case, key, base) in known:
                continue
            name = f"{case}: step of {_label(key)} over {_label(base)}"
            details = {"ours_ms": ours.median_ms, "peer_ms": peer.median_ms}
            figures.append(Figure(name, ours.median_ms / peer.median_ms, None, "lower", details))
    return figures


def _figure(
    promise: Promise, found: Mapping[ArmKey, Row], reasons: Mapping[str, str], holds: bool
) -> Figure:
    ours, base = found.get(promise.ours), found.get(promise.base)
    value, details = math.nan, dict[str, Any]()
    mine = None if ours is None else _value(ours, promise.quantity)
    theirs = None if base is None else _value(base, promise.quantity)
    if promise.over and ours is not None:
        parts = [_value(ours, name) for name in promise.over]
        theirs = None if None in parts else sum(part for part in parts if part is not None)
    unit = "ms" if promise.quantity == "median_ms" else "mib"
    if mine is not None and theirs is not None:
        value = mine / theirs
        details |= {f"ours_{unit}": mine, f"peer_{unit}": round(theirs, 3)}
    else:
        details["note"] = _why_nothing(promise, mine is None, reasons)
    if not promise.over:
        details["peers"] = _peers_beside(promise, found, theirs)
        details["peers_known"] = dict(promise.known)
    return Figure(promise.name, value, promise.goal if holds else None, "lower", details)


def _peers_beside(
    promise: Promise, found: Mapping[ArmKey, Row], base: float | None
) -> dict[str, float]:
    if base is None:
        return {}
    ratios = {}
    for key, row in found.items():
        value = _value(row, promise.quantity)
        if not _is_ours(row) and key != promise.base and value is not None:
            ratios[row.algorithm] = round(value / base, 3)
    return ratios


def _why_nothing(promise: Promise, ours_is_missing: bool, reasons: Mapping[str, str]) -> str:
    key = _label(promise.ours if ours_is_missing else promise.base)
    for name in (str(promise.case), key):
        if name in reasons:
            return f"not measured: {reasons[name]}"
    return f"not measured: {key} was not asked for"


def _case_of(row: Row) -> Case:
    details = row.details
    return Case(details["network"], details["dtype"], details["accumulation"], row.ranks)


def _key(row: Row) -> ArmKey:
    return row.algorithm, row.details["degree"]


def _label(key: ArmKey) -> str:
    return f"{key[0]}@{key[1]}"


def _is_ours(row: Row) -> bool:
    return row.algorithm.startswith("hopshard")


def _value(row: Row, quantity: str) -> float | None:
    value = row.median_ms if quantity == "median_ms" else row.details.get(quantity)
    return None if value is None else float(value)
