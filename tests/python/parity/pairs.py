"""A small set of cases in which every pair of values of two factors occurs (all-pairs)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def full_product(
    factors: Mapping[str, Sequence[Any]], is_legal: Callable[[Case], bool]
) -> list[Case]:
    cases = (
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    )
    return [case for case in cases if is_legal(case)]


def all_pairs(factors: Mapping[str, Sequence[Any]], is_legal: Callable[[Case], bool]) -> list[Case]:
    """Greedy and deterministic: always the case that adds the most pairs, the first of equals.

    Pairs that no legal case has are left out.
    """
    candidates = full_product(factors, is_legal)
    numbers: dict[Any, int] = {}
    masks = []
    for case in candidates:
        mask = 0
        for pair in itertools.combinations(case.items(), 2):
            mask |= 1 << numbers.setdefault(pair, len(numbers))
        masks.append(mask)
    missing = (1 << len(numbers)) - 1
    chosen = []
    while missing:
        best = max(range(len(masks)), key=lambda i: ((masks[i] & missing).bit_count(), -i))
        chosen.append(candidates[best])
        missing &= ~masks[best]
    return chosen
