"""How a model is cut: a pure function of the module tree."""

from __future__ import annotations

import pytest
import torch
from hopshard import ConfigError
from hopshard.units import split_into_units
from torch import nn

from tests.python.parity.models import GPT, Attention, Block


def cut(module: nn.Module, unit: object = None) -> dict[str, list[str]]:
    return {found.name: found.parameter_names for found in split_into_units(module, unit)}


def test_items_of_a_module_list_are_units_and_the_rest_is_the_root() -> None:
    units = cut(GPT())
    assert list(units) == ["root", "h.0", "h.1", "h.2"]
    assert units["root"] == [
        "token.weight",
        "position.weight",
        "norm.weight",
        "norm.bias",
        "head.weight",
    ]
    assert all(name.startswith("h.1.") for name in units["h.1"])


def test_small_parameters_make_a_last_unit_of_their_own() -> None:
    units = split_into_units(GPT(), persistence_threshold=16)
    assert [unit.name for unit in units] == ["root", "h.0", "h.1", "h.2", "persistent"]
    assert [unit.is_persistent for unit in units] == [False] * 4 + [True]
    for unit in units:
        for parameter in unit.parameters:
            assert (parameter.numel() < 16) == unit.is_persistent
    # Units that only had small ones are gone.
    everything = split_into_units(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), None, 100)
    assert [unit.name for unit in everything] == ["root", "persistent"]


def test_every_parameter_is_in_one_unit() -> None:
    for unit in (None, Block, "h.*.mlp", [Attention, "token"], lambda name, module: True):
        model = GPT(tied=True)
        found = [p for names in cut(model, unit).values() for p in names]
        assert sorted(found) == sorted(name for name, _ in model.named_parameters())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = layer(x)
        return x


def test_inner_lists_are_parts_of_their_block() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(Nested() for _ in range(2))})
    assert list(cut(model)) == ["root", "blocks.0", "blocks.1"]


def test_containers_without_a_forward_are_no_units() -> None:
    rows = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2))
    assert list(cut(nn.ModuleDict({"rows": rows}))) == ["root", "rows.0.0", "rows.1.0"]


def test_without_lists_units_are_cut_by_size() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    assert list(cut(model)) == ["root", *(str(i) for i in range(10))]
    assert cut(model)["root"] == []
    # A single module cannot be cut: it is one unit however large.
    assert cut(nn.Linear(3, 3)) == {"root": ["weight", "bias"]}


@pytest.mark.parametrize(
    ("unit", "names"),
    [
        (Attention, ["h.0.attention", "h.1.attention", "h.2.attention"]),
        ("h.[01]", ["h.0", "h.1"]),
        (lambda name, module: isinstance(module, nn.Embedding), ["token", "position"]),
        (["position", Attention], ["position", "h.0.attention", "h.1.attention", "h.2.attention"]),
    ],
)
def test_units_as_the_user_chooses(unit: object, names: list[str]) -> None:
    assert list(cut(GPT(), unit)) == ["root", *names]


def test_a_unit_in_a_unit_takes_its_parameters_out() -> None:
    units = cut(GPT(), [Block, Attention])
    assert all("attention" not in name for name in units["h.0"])
    assert all("attention" in name for name in units["h.0.attention"])


def test_parameters_of_several_units_are_the_roots() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
            self.blocks[2].weight = self.blocks[0].weight

    units = split_into_units(Tied())
    assert [unit.name for unit in units] == ["root", "blocks.0", "blocks.1", "blocks.2"]
    assert units[0].parameter_names == ["blocks.0.weight"]
    assert units[3].parameter_names == ["blocks.2.bias"]
    assert len(units[0].holders) == 2  # Both must gather it.


def test_one_block_twice_in_a_list_is_one_unit() -> None:
    block = nn.Linear(3, 3)
    units = cut(nn.ModuleDict({"blocks": nn.ModuleList([block, block, nn.Linear(3, 3)])}))
    assert units == {
        "root": [],
        "blocks.0": ["blocks.0.weight", "blocks.0.bias"],
        "blocks.2": ["blocks.2.weight", "blocks.2.bias"],
    }


@pytest.mark.parametrize("unit", ["layers.*", nn.Conv2d, lambda name, module: False])
def test_a_choice_that_matches_nothing(unit: object) -> None:
    with pytest.raises(ConfigError, match=r"matches no submodule.*token"):
        cut(GPT(), unit)


def test_a_choice_of_a_wrong_type() -> None:
    with pytest.raises(ConfigError, match="neither a module class"):
        cut(GPT(), 3)


def test_a_module_without_parameters() -> None:
    with pytest.raises(ConfigError, match=r"ReLU has no parameters"):
        cut(nn.ReLU())
