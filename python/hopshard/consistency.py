"""Proves that all ranks hold the same thing, and says who differs if they do not.

Used at start-up for the configuration and the code version, and when a model is wrapped. Works
over any Communicator and exchanges JSON only, never pickles. Next: world.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from hopshard.errors import ConfigError, name_ranks

if TYPE_CHECKING:
    from hopshard._C import Communicator

_MAX_KEYS_SHOWN: Final = 5
_MAX_VALUE_CHARS: Final = 120


def check_agreement(comm: Communicator, what: str, items: Mapping[str, str]) -> None:
    """Raises on every rank if ``items`` differ between the ranks of ``comm``.

    Collective: all ranks of ``comm``. Costs one all-reduce of 16 bytes while they agree; only a
    difference makes the ranks exchange the texts.

    Args:
        comm: Any communicator.
        what: What is compared, in the reader's words, e.g. ``"configuration"``.
        items: Name to value, both text.

    Raises:
        ConfigError: naming the differing keys, their values and which ranks hold which. The text
            is the same on all ranks.
    """
    text = json.dumps(dict(items), sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "big") >> 1  # 63 bits: its negative is an int64 too.
    extremes = torch.tensor([value, -value], dtype=torch.int64)
    comm.all_reduce(extremes, op="max", tag=f"agree/{what}").wait()
    highest, lowest = int(extremes[0]), -int(extremes[1])
    if highest == lowest:
        return
    everyone = [json.loads(other) for other in exchange_texts(comm, text, tag=f"explain/{what}")]
    raise ConfigError(explain_disagreement(what, everyone, list(comm.group.ranks)))


def exchange_texts(comm: Communicator, text: str, tag: str = "exchange") -> list[str]:
    """Every rank's text, by rank of ``comm``.

    Collective: all ranks of ``comm``. Bytes: the longest text times the ranks.
    """
    data = bytearray(text.encode())
    longest = torch.tensor([len(data)], dtype=torch.int64)
    comm.all_reduce(longest, op="max", tag=f"{tag}/length").wait()
    # The length travels in front, because padding cannot be told from text.
    width = 8 + int(longest[0])
    padded = len(data).to_bytes(8, "big") + bytes(data) + bytes(width - 8 - len(data))
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    everyone = torch.empty(width * comm.size, dtype=torch.uint8)
    comm.all_gather(everyone, mine, tag=tag).wait()
    texts = []
    for slot in everyone.view(comm.size, width):
        raw = bytes(slot.tolist())
        texts.append(raw[8 : 8 + int.from_bytes(raw[:8], "big")].decode())
    return texts


def explain_disagreement(
    what: str, everyone: Sequence[Mapping[str, str]], ranks: Sequence[int]
) -> str:
    """The text of ``check_agreement``'s error. Pure."""
    keys = sorted(set().union(*everyone))
    differing = [key for key in keys if len({items.get(key) for items in everyone}) > 1]
    lines = [f"the ranks disagree on the {what}:"]
    for key in differing[:_MAX_KEYS_SHOWN]:
        holders: dict[str | None, list[int]] = {}
        for rank, items in zip(ranks, everyone, strict=True):
            holders.setdefault(items.get(key), []).append(rank)
        values = "; ".join(
            f"{_shorten(value)} on {name_ranks(members)}" for value, members in holders.items()
        )
        lines.append(f"  '{key}': {values}")
    if len(differing) > _MAX_KEYS_SHOWN:
        lines.append(f"  and {len(differing) - _MAX_KEYS_SHOWN} more")
    lines.append(f"Every rank must hold the same {what}; check what each one is given.")
    return "\n".join(lines)


def as_items(values: Mapping[str, Any]) -> dict[str, str]:
    """Values as text, for ``check_agreement``."""
    return {key: json.dumps(value, sort_keys=True) for key, value in values.items()}


def _shorten(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= _MAX_VALUE_CHARS else value[: _MAX_VALUE_CHARS - 1] + "…"
