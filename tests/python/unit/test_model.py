"""DistributedModel: what it keeps of the user's module, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard.testing import run_ranks
from torch import nn

from tests.python.parity.harness import differ_by_rank
from tests.python.parity.models import GPT, HIDDEN, MixedDtype, Mlp, OddConv

SHARDED = {"sharded_data_parallel_degree": 2}


def on_ranks(body: Callable[[], Any], n: int = 4, **config: Any) -> list[Any]:
    return run_ranks(body, n, **{**SHARDED, **config})


def built(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return kind()


# --- what parameters are --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GPT, OddConv, MixedDtype])
def test_shape_and_kind_of_parameters_stay(kind: Callable[[], nn.Module]) -> None:
    base = built(kind)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        for (name, mine), (_, other) in zip(
            model.module.named_parameters(), base.named_parameters(), strict=True
        ):
            assert isinstance(mine, nn.Parameter), name
            assert (mine.shape, mine.dtype, mine.stride()) == (
                other.shape,
                other.dtype,
                other.stride(),
            )
            assert mine.numel() == other.numel() and mine.requires_grad == other.requires_grad
            assert mine.is_leaf and mine.device == other.device

    on_ranks(body)


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda w: w + 1,
    "matmul": lambda w: torch.ones(2, w.shape[0]) @ w,
    "print": lambda w: repr(w),
    "item": lambda w: w[0, 0].item(),
    "clone": lambda w: w.detach().clone(),
    "numpy": lambda w: w.detach().numpy() + 1,
    "list": lambda w: w.tolist(),
    "norm": lambda w: w.norm(),
    "zero": lambda w: w.data.zero_(),
    "init": lambda w: nn.init.normal_(w),
    "copy": lambda w: w.data.copy_(torch.ones(w.shape)),
    "copy_from": lambda w: torch.zeros(w.shape).copy_(w),
    "deepcopy": lambda w: copy.deepcopy(w),
    "pickle": lambda w: pickle.dumps(w),
    "save": lambda w: torch.save(w, io.BytesIO()),
    "foreach": lambda w: torch._foreach_add([w.detach()], 1.0),
    "equal": lambda w: torch.equal(w, w.detach()),
    "to": lambda w: w.double(),
    "contiguous": lambda w: w.t().contiguous(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_sharded_parameter_names_itself(read: Callable[[nn.Parameter], Any]) -> None:
    base = built(Mlp)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        weight = model.module.blocks[1].weight
        assert weight.shape == (HIDDEN, HIDDEN)
        with pytest.raises(Exception, match=r"blocks\.1\.weight.*unshard"):
            read(weight)

    on_ranks(body, 2)


def test_copies_of_a_wrapped_model_are_refused_with_the_name() -> None:
    base = built(Mlp)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        with pytest.raises(Exception, match=r"unshard|state_dict"):
            copy.deepcopy(model)
        with pytest.raises(Exception, match=r"unshard|state_dict"):
            copy.deepcopy(model.module)

    on_ranks(body, 2)


def test_attributes_and_modes_of_the_module_shine_through() -> None:
    base = built(GPT)
    base.extra = "mine"

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        assert model.extra == "mine" and model.h is model.module.h
        assert type(model.module) is GPT
        model.eval()
        assert not model.module.h[0].training
        model.train()
        assert model.module.h[0].training
        assert [n for n, _ in model.module.named_parameters()] == [
            n for n, _ in base.named_parameters()
        ]
        with pytest.raises(AttributeError, match="no_such"):
            _ = model.no_such

    on_ranks(body, 2)


# --- state dicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [lambda: GPT(tied=True), OddConv, MixedDtype])
def test_state_dict_is_that_of_the_plain_module(kind: Callable[[], nn.Module]) -> None:
    base = built(kind)

    def body() -> None:
        model = hs.DistributedModel(differ_by_rank(copy.deepcopy(base)))
        wanted = base.state_dict()
        found = model.state_dict()
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
            assert found[name].stride() == value.stride(), name
        only = model.state_dict(rank0_only=True)
        assert list(only) == (list(wanted) if hs.rank() == 0 else [])
        kept = pickle.loads(pickle.dumps(found))  # Plain tensors, free of the engine.
        fresh = kind()
        fresh.load_state_dict(kept)

    on_ranks(body, 4, ranks_per_node=2, sharded_data_parallel_degree=4)


@pytest.mark.parametrize("kind", [lambda: GPT(tied=True), OddConv, MixedDtype])
def test_load_state_dict(kind: Callable[[], nn.Module]) -> None:
    base = built(kind)
    torch.manual_seed(9)
    other = kind()

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        result = model.load_state_dict(other.state_dict())
        assert not result.missing_keys and not result.unexpected_keys
        for name, value in other.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name

    on_ranks(body)


def test_loaded_values_are_used_by_the_next_forward_also_while_gathered() -> None:
    base = built(Mlp)
    torch.manual_seed(9)
    other = Mlp()
    rows = torch.ones(3, HIDDEN)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        model(rows)  # With a graph: the root stays gathered for the backward.
        model.load_state_dict(other.state_dict())
        with torch.no_grad():
            assert torch.equal(model(rows), other(rows))

    on_ranks(body)


def test_errors_of_load_state_dict_are_torchs() -> None:
    base = built(Mlp)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        before = model.state_dict()
        entries = dict(before)
        weight = entries.pop("last.weight")
        with pytest.raises(RuntimeError, match=r"Missing key.*last\.weight"):
            model.load_state_dict(entries)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*stray"):
            model.load_state_dict({**before, "stray": weight})
        with pytest.raises(RuntimeError, match=r"size mismatch for last\.weight"):
            model.load_state_dict({**before, "last.weight": weight.t()}, strict=False)
        result = model.load_state_dict({**entries, "stray": weight}, strict=False)
        assert result.missing_keys == ["last.weight"] and result.unexpected_keys == ["stray"]
        with pytest.raises(hs.ConfigError, match="assign"):
            model.load_state_dict(before, assign=True)
        with pytest.raises(hs.ConfigError, match="prefix"):
            model.state_dict(prefix="x.")
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])

    on_ranks(body)


# --- moves ----------------------------------------------------------------------------------------


def test_a_change_of_dtype_or_device_is_refused() -> None:
    base = built(Mlp)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        assert model.to("cpu") is model and model.float() is model
        changes = (model.half, model.double, lambda: model.to(torch.bfloat16), model.bfloat16)
        for change in changes:
            with pytest.raises(hs.ConfigError, match=r"first\.weight.*before hopshard"):
                change()
        with pytest.raises(hs.ConfigError, match="before hopshard"):
            model.to("meta")
        model(torch.ones(2, HIDDEN)).sum().backward()  # Nothing was broken.

    on_ranks(body, 2)


@pytest.mark.parametrize("part", ["module", "block"])
def test_a_change_of_dtype_through_the_users_module_is_refused(part: str) -> None:
    base = built(Mlp)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        target = model.module if part == "module" else model.module.blocks[1]
        with pytest.raises(Exception, match=r"(first|blocks\.1)\.weight"):
            target.double()

    on_ranks(body, 2)


def test_buffers_may_move() -> None:
    base = built(OddConv)

    def body() -> None:
        model = hs.DistributedModel(differ_by_rank(copy.deepcopy(base)))
        assert torch.equal(model.module.shift, base.shift)  # Rank 0's.
        assert torch.equal(model.module.count, base.count)
        model.to("cpu")
        assert torch.equal(model.module.shift, base.shift)

    on_ranks(body, 2)


# --- bad input ------------------------------------------------------------------------------------


def refused(build: Callable[[], Any], text: str, error: type[Exception] = hs.ConfigError) -> None:
    def body() -> None:
        with pytest.raises(error, match=text):
            build()

    on_ranks(body, 2)


def test_a_module_without_parameters() -> None:
    refused(lambda: hs.DistributedModel(nn.ReLU()), "ReLU has no parameters")


def test_something_that_is_no_module() -> None:
    refused(lambda: hs.DistributedModel(torch.ones(2)), "not Tensor")  # type: ignore[arg-type]


@pytest.mark.parametrize("passes", [0, -1, 1.5, "2"])
def test_a_wrong_number_of_passes(passes: Any) -> None:
    refused(
        lambda: hs.DistributedModel(nn.Linear(2, 2), backward_passes_per_step=passes),
        "backward_passes_per_step",
    )


def test_wrapping_twice() -> None:
    refused(lambda: hs.DistributedModel(hs.DistributedModel(nn.Linear(2, 2))), "already")

    def same_module_again() -> None:
        module = nn.Linear(2, 2)
        kept = hs.DistributedModel(module)
        assert kept.module is module
        hs.DistributedModel(module)

    refused(same_module_again, "weight.*another DistributedModel")

    def a_part_again() -> None:
        kept = hs.DistributedModel(Mlp())
        hs.DistributedModel(nn.Sequential(kept.module.blocks[0]))

    refused(a_part_again, "0.weight.*another DistributedModel")


def test_parameters_that_share_memory() -> None:
    def build() -> None:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].weight = nn.Parameter(module[0].weight.data)
        hs.DistributedModel(module)

    refused(build, r"0\.weight.*1\.weight.*share memory")


def test_parameters_that_overlap_in_memory() -> None:
    def build() -> None:
        module = nn.Module()
        whole = torch.randn(6)
        module.a = nn.Parameter(whole[:4])
        module.b = nn.Parameter(whole[2:])
        hs.DistributedModel(module)

    refused(build, "share memory")


def test_parameters_next_to_each_other_in_one_memory_are_fine() -> None:
    def body() -> None:
        module = nn.Module()
        whole = torch.arange(6.0)
        module.a = nn.Parameter(whole[:3])
        module.b = nn.Parameter(whole[3:])
        model = hs.DistributedModel(module)
        assert torch.equal(model.state_dict()["b"], torch.tensor([3.0, 4.0, 5.0]))

    on_ranks(body, 2)


def test_parameters_on_the_meta_device() -> None:
    refused(lambda: hs.DistributedModel(nn.Linear(2, 2, device="meta")), "weight.*meta")


def test_parameters_that_cannot_be_trained() -> None:
    def build() -> None:
        module = nn.Linear(2, 2)
        module.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
        hs.DistributedModel(module)

    refused(build, "weight")


def test_a_parameter_set_after_wrapping() -> None:
    base = built(Mlp)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        with pytest.raises(hs.ConfigError, match=r"'extra' of Mlp"):
            model.module.extra = nn.Parameter(torch.ones(2))
        with pytest.raises(hs.ConfigError, match=r"'weight' of Linear"):
            model.module.first.weight = nn.Parameter(torch.ones(HIDDEN, HIDDEN))
        nn.Linear(2, 2).weight = nn.Parameter(torch.ones(2, 2))  # Other modules are free.

    on_ranks(body, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module.weight, "data", torch.ones(2, 2)),
        lambda module: setattr(module.weight, "data", torch.ones(HIDDEN, HIDDEN).double()),
    ],
    ids=["shape", "dtype"],
)
def test_a_changed_parameter_is_an_error_that_names_it(change: Callable[[Any], None]) -> None:
    base = built(Mlp)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(  # noqa: PT012 - where it shows depends on the change
            (hs.Error, RuntimeError), match=r"blocks\.1\.weight|'weight'"
        ):
            change(model.module.blocks[1])
            model(torch.ones(2, HIDDEN)).sum().backward()
            optimizer.step()

    on_ranks(body, 2)


def test_a_frozen_parameter_that_is_thawed_later() -> None:
    base = built(Mlp)
    base.blocks[1].weight.requires_grad_(False)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model.module.blocks[1].weight.requires_grad_(True)
        with pytest.raises(  # noqa: PT012
            hs.ConfigError, match=r"blocks\.1\.weight.*requires_grad"
        ):
            model(torch.ones(2, HIDDEN)).sum().backward()
            optimizer.step()

    on_ranks(body, 2)


def test_a_trainable_parameter_that_is_frozen_later_is_left_alone() -> None:
    base = built(Mlp)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model.module.blocks[1].requires_grad_(False)
        model(torch.ones(2, HIDDEN)).sum().backward()
        optimizer.step()
        after = model.state_dict()
        assert torch.equal(after["blocks.1.weight"], base.blocks[1].weight)
        assert not torch.equal(after["blocks.2.weight"], base.blocks[2].weight)

    on_ranks(body)


def test_a_forward_on_another_module() -> None:
    base = built(Mlp)

    def body() -> None:
        model = hs.DistributedModel(copy.deepcopy(base))
        optimizer = hs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        copy.deepcopy(base)(torch.ones(2, HIDDEN)).sum().backward()
        with pytest.raises(hs.ConfigError, match="another module"):
            optimizer.step()

    on_ranks(body, 2)


@pytest.mark.parametrize("what", ["shape", "name", "frozen", "passes", "units"])
def test_ranks_with_different_models(what: str) -> None:
    def body() -> None:
        odd = hs.rank() == 2
        model: nn.Module = nn.Sequential(
            nn.Linear(3, 3), nn.Linear(3, 4 if odd and what == "shape" else 3)
        )
        if what == "name":
            model = nn.ModuleDict({"b" if odd else "a": nn.Linear(3, 3)})
        if what == "frozen":
            model.requires_grad_(not odd)
        with pytest.raises(hs.ConfigError, match=r"rank.*2"):
            hs.DistributedModel(
                model,
                backward_passes_per_step=2 if odd and what == "passes" else 1,
                unit="1" if odd and what == "units" else None,
            )

    on_ranks(body)
