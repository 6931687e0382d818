"""Which backends a world takes: pure, from what every rank offers."""

from __future__ import annotations

import pytest
from hopshard.config import Config
from hopshard.errors import ConfigError
from hopshard.link_costs import LinkCost, LinkCosts, describe_link_costs, load_link_costs
from hopshard.transports import Choice, Offer, choose


def offers(
    *hosts: str, missing: dict[int, dict[str, str]] | None = None, **kw: bool
) -> list[Offer]:
    flags = {"has_efa": False, "has_gpu": False, **kw}
    return [Offer(host, (missing or {}).get(rank, {}), **flags) for rank, host in enumerate(hosts)]


def pairs(rank: int) -> int:
    return rank // 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (offers("a", "a", "a", "a"), Choice("shm", "c10d")),  # Two emulated nodes on one host.
        (offers("a", "a", "b", "b"), Choice("shm", "c10d")),
        (offers("a", "b", "b", "b"), Choice("c10d", "c10d")),  # Said to share a node, and do not.
        (offers("a", "a", "b", "b", missing={3: {"shm": "no"}}), Choice("c10d", "c10d")),
        (offers("a", "a", "b", "b", has_gpu=True), Choice("c10d", "c10d")),
        (offers("a", "a", "b", "b", has_efa=True), Choice("shm", "ofi")),
        (
            offers("a", "a", "b", "b", has_efa=True, missing={0: {"ofi": "no"}}),
            Choice("shm", "c10d"),
        ),
    ],
)
def test_auto_takes_what_all_ranks_have(given: list[Offer], expected: Choice) -> None:
    assert choose("auto", given, pairs) == expected


def test_a_wanted_backend_is_taken_or_refused_with_a_reason() -> None:
    given = offers("a", "a", "b", "b", missing={2: {"mpi": "built without it"}})
    assert choose("c10d", given, pairs) == Choice("c10d", "c10d")
    assert choose("shm+ofi", given, pairs) == Choice("shm", "ofi")
    with pytest.raises(ConfigError, match=r"'mpi' is not available on rank 2: built without it"):
        choose("mpi", given, pairs)
    with pytest.raises(ConfigError, match=r"cannot reach other hosts.*'shm\+c10d'"):
        choose("shm", given, pairs)
    with pytest.raises(ConfigError, match=r"ranks 0-1 are said to share a node.*a, b"):
        choose("shm+c10d", offers("a", "b", "b", "b"), pairs)
    with pytest.raises(ConfigError, match="legal are c10d, shm"):
        Choice.parse("shm+nothing")


def test_the_choice_is_described_as_people_would() -> None:
    assert Choice("shm", "c10d").describe(1) == "shm"
    assert Choice("shm", "c10d").describe(2) == "shm inside nodes, c10d between them"
    assert Choice("c10d", "c10d").describe(2) == "c10d"


def test_link_costs_are_read_back_and_bad_files_are_explained(tmp_path) -> None:
    path = tmp_path / "costs.json"
    costs = LinkCosts(inter_node=LinkCost(alpha_us=70, gb_per_s=0.125), measured={"nodes": 2})
    costs.save(path)
    assert load_link_costs(path) == costs
    assert "0.125" in describe_link_costs(str(path)) and "nodes" not in describe_link_costs(
        str(path)
    )
    path.write_text(path.read_text().replace("0.125", "-1"))
    with pytest.raises(ConfigError, match=r"costs\.json': inter_node\.gb_per_s: .*hopshard tune"):
        load_link_costs(path)
    path.write_text("no json")
    with pytest.raises(ConfigError, match="the whole file"):
        load_link_costs(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_link_costs(tmp_path / "missing.json")
    assert "cannot read" in describe_link_costs(str(tmp_path / "missing.json"))


def test_the_environment_names_the_backend() -> None:
    config = Config().with_environment({"HOPSHARD_BACKEND": "shm+c10d"})
    assert config.backend == "shm+c10d"
    assert Config(backend="c10d").with_environment({"HOPSHARD_BACKEND": "shm"}).backend == "c10d"
    with pytest.raises(ConfigError, match="HOPSHARD_BACKEND"):
        Config().with_environment({"HOPSHARD_BACKEND": "7"})
