"""Config: names, aliases, ranges and the texts of its errors."""

from __future__ import annotations

from typing import Any

import pytest
from hopshard.config import ALIASES, Config, known_keys
from hopshard.errors import ConfigError


def test_defaults() -> None:
    config = Config.from_user()
    assert config.sharded_data_parallel_degree == 1
    assert config.backend == "auto"
    assert config.timeout_s == 300
    assert config.ranks_per_node is None
    assert config.gradient_clipping == 0
    assert config.microbatches == 1
    assert config.second_hop_bucket_bytes == 64 * 2**20
    assert config.check_consistency


def test_every_field_explains_itself() -> None:
    for name, field in Config.model_fields.items():
        assert field.description and len(field.description) > 40, name


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases(alias: str, name: str) -> None:
    assert getattr(Config.from_user({alias: 2}), name) == 2
    assert Config(**{alias: 2}) == Config(**{name: 2})


def test_equal_aliases_are_one_setting_and_contradictions_are_refused() -> None:
    assert Config(dp_shard_size=2, hybrid_shard_degree=2).sharded_data_parallel_degree == 2
    with pytest.raises(ConfigError, match=r"'dp_shard_size' \(2\).*'hybrid_shard_degree' \(4\)"):
        Config(dp_shard_size=2, hybrid_shard_degree=4)
    with pytest.raises(ConfigError, match="contradict"):
        Config.from_user({"sharded_data_parallel_degree": 2, "dp_shard_size": 4})


def test_keyword_arguments_override_the_mapping_also_by_alias() -> None:
    config = Config.from_user({"sharded_data_parallel_degree": 2, "timeout_s": 5}, dp_shard_size=4)
    assert (config.sharded_data_parallel_degree, config.timeout_s) == (4, 5)
    assert Config.from_user(config, timeout_s=7).sharded_data_parallel_degree == 4


def test_unknown_key_names_it_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_user({"sharded_data_parallel_degre": 2})
    text = str(caught.value)
    assert "unknown configuration key 'sharded_data_parallel_degre'" in text
    assert "did you mean 'sharded_data_parallel_degree'?" in text
    assert all(key in text for key in known_keys())
    with pytest.raises(ConfigError, match="unknown configuration key 'zzzz'"):
        Config(zzzz=1)


@pytest.mark.parametrize(
    ("key", "value", "legal"),
    [
        ("sharded_data_parallel_degree", 0, "an integer >= 1"),
        ("sharded_data_parallel_degree", "2", "an integer >= 1"),
        ("sharded_data_parallel_degree", 2.0, "an integer >= 1"),
        ("sharded_data_parallel_degree", True, "an integer >= 1"),
        ("sharded_data_parallel_degree", None, "an integer >= 1"),
        ("backend", "nccl2", "'auto', one of 'c10d', 'shm'"),
        ("backend", "shm+", "'shm+c10d'"),
        ("backend", "shm+c10d+ofi", "'shm+c10d'"),
        ("timeout_s", 0, "a number > 0"),
        ("timeout_s", float("nan"), "a number > 0"),
        ("ranks_per_node", -1, "an integer >= 1 or None"),
        ("gradient_clipping", -0.5, "a number >= 0"),
        ("gradient_clipping", float("inf"), "a number >= 0"),
        ("microbatches", 0, "an integer >= 1"),
        ("second_hop_bucket_bytes", "64M", "an integer >= 1"),
        ("check_consistency", 1, "True or False"),
        ("reshard_after_forward", 0, "True, False, or an integer of at least 2 that divides"),
        ("reshard_after_forward", "node", "True, False, or an integer of at least 2"),
        ("log_level", "loud", "one of 'debug'"),
    ],
)
def test_illegal_values_name_key_value_and_what_is_legal(key: str, value: Any, legal: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_user({key: value})
    text = str(caught.value)
    assert f"'{key}'" in text and repr(value) in text and legal in text


def test_two_mistakes_are_both_named() -> None:
    with pytest.raises(
        ConfigError, match=r"'microbatches'.*'timeout_s'|'timeout_s'.*'microbatches'"
    ):
        Config(microbatches=0, timeout_s=-1)


def test_other_things_than_mappings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mapping.*int: 2"):
        Config.from_user(2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be text, got 3"):
        Config.from_user({3: 2})  # type: ignore[dict-item]


def test_frozen_and_hashable() -> None:
    config = Config()
    with pytest.raises(Exception, match="frozen"):
        config.timeout_s = 3  # type: ignore[misc]
    assert hash(config) == hash(Config())


def test_environment_fills_what_was_not_given() -> None:
    environ = {"HOPSHARD_RANKS_PER_NODE": "2", "HOPSHARD_TIMEOUT_S": "1.5"}
    config = Config().with_environment(environ)
    assert (config.ranks_per_node, config.timeout_s) == (2, 1.5)
    assert Config(ranks_per_node=4).with_environment(environ).ranks_per_node == 4
    assert Config().with_environment({"HOPSHARD_RANKS_PER_NODE": ""}) == Config()


@pytest.mark.parametrize("text", ["0", "two", "1.5", "-1"])
def test_illegal_environment_names_the_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="HOPSHARD_RANKS_PER_NODE"):
        Config().with_environment({"HOPSHARD_RANKS_PER_NODE": text})


def test_what_must_agree_leaves_out_the_log_level() -> None:
    assert Config(log_level="debug").must_agree() == Config().must_agree()
    assert Config(microbatches=2).must_agree() != Config().must_agree()


def test_a_smaller_group_divides_the_degree() -> None:
    assert Config(dp_shard_size=8, reshard_after_forward=2).secondary_degree == 2
    assert Config(dp_shard_size=8, reshard_after_forward=8).secondary_degree == 0
    assert Config(dp_shard_size=8, reshard_after_forward=False).secondary_degree == 0
    for wrong in (1, 3, 16):
        with pytest.raises(ConfigError, match="divides sharded_data_parallel_degree"):
            Config(dp_shard_size=8, reshard_after_forward=wrong)
