"""Agreement between ranks: silent when equal, the same clear text on all ranks when not."""

from __future__ import annotations

import hopshard as hs
import pytest
from hopshard.consistency import (
    as_items,
    check_agreement,
    exchange_texts,
    explain_disagreement,
)
from hopshard.errors import ConfigError, format_ranks
from hopshard.testing import run_ranks
from hopshard.world import current


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([4], "4"), ([0, 1], "0-1"), ([7, 0, 2, 1, 3], "0-3,7"), ([0, 2, 4], "0,2,4")],
)
def test_format_ranks(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_explanation_names_keys_values_and_ranks() -> None:
    everyone = [
        {"a": "1", "b": "x"},
        {"a": "1", "b": "x"},
        {"a": "2", "b": "x"},
        {"b": "x", "c": "3"},
    ]
    text = explain_disagreement("model", everyone, [0, 1, 2, 7])
    assert "disagree on the model" in text
    assert "'a': 1 on ranks 0-1; 2 on rank 2; absent on rank 7" in text
    assert "'c': absent on ranks 0-2; 3 on rank 7" in text
    assert "'b'" not in text


def test_explanation_stays_short() -> None:
    everyone = [{f"k{i}": str(i) for i in range(30)}, {f"k{i}": "x" * 5000 for i in range(30)}]
    text = explain_disagreement("model", everyone, [0, 1])
    assert "and 25 more" in text and len(text) < 2000


def test_equal_items_cost_one_small_all_reduce() -> None:
    def body() -> dict[str, int]:
        world = current()
        check_agreement(world.groups.world, "model", {"a": "1"})
        return dict(world.meter.counters())

    for counters in run_ranks(body, 3):
        calls = {key: n for key, n in counters.items() if key.endswith("/calls")}
        assert calls == {"comm/world/all_reduce/agree/calls": 1}
        assert counters["comm/world/all_reduce/agree/bytes"] == 16


def test_disagreement_is_the_same_error_on_all_ranks() -> None:
    def body() -> str:
        items = as_items({"degree": 4 if hs.rank() == 2 else 2, "same": [1, 2]})
        with pytest.raises(ConfigError) as caught:
            check_agreement(current().groups.world, "configuration", items)
        return str(caught.value)

    texts = run_ranks(body, 4)
    assert len(set(texts)) == 1
    assert "'degree': 2 on ranks 0-1,3; 4 on rank 2" in texts[0]
    assert "same" not in texts[0].replace("same configuration", "")


def test_works_over_a_subgroup_and_names_global_ranks() -> None:
    def body() -> str:
        with pytest.raises(ConfigError) as caught:
            check_agreement(current().groups.replication, "model", {"rank": str(hs.rank())})
        return str(caught.value)

    texts = run_ranks(body, 4, sharded_data_parallel_degree=2)
    assert "0 on rank 0; 2 on rank 2" in texts[0] and "1 on rank 1; 3 on rank 3" in texts[1]


def test_texts_of_any_length_arrive_unchanged() -> None:
    texts = ["", "a\0b", "ü€" * 1000, " trailing  "]
    received = run_ranks(lambda: exchange_texts(current().groups.world, texts[hs.rank()]), 4)
    assert received == [texts] * 4
