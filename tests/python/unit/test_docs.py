"""The documentation tells the truth: its programs run, its links lead somewhere, its figures are
what the meter counts, and the type stub has the names and signatures of the native module."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import math
import pathlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import hopshard as hs
import pytest
import torch
from hopshard import _C
from hopshard.testing import run_ranks

ROOT = pathlib.Path(__file__).resolve().parents[3]
STUB = ROOT / "python" / "hopshard" / "_C.pyi"
PROGRAMS = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def programs(page: str) -> list[str]:
    """The complete programs of a page: blocks that import something."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [code for code in PROGRAMS.findall(text) if re.search(r"^import ", code, re.MULTILINE)]


# --- Programs


@pytest.mark.parametrize("page", ["README.md", "docs/first_run.md", "docs/idioms.md"])
def test_programs_run_on_four_ranks_and_on_one(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = programs(page)
    assert len(found) == 1
    # hs.init joins the threads' world; a world of one needs the degree that fits it.
    for ranks, text in [(4, found[0]), (1, found[0].replace("degree=2", "degree=1"))]:
        names = run_ranks(lambda text=text: _execute(text, page), ranks, initialize=False)
        losses = [scope["loss"].item() for scope in names]
        assert all(math.isfinite(loss) for loss in losses)


def _execute(text: str, page: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, page, "exec"), scope)
    return scope


def test_the_script_of_the_readme_is_short_trains_and_runs_under_the_launcher(
    run: Callable[..., Any],
) -> None:
    (text,) = programs("README.md")
    assert len([line for line in text.splitlines() if line.strip()]) <= 15
    finished = run("-n", "4", script=text)
    assert finished.code == 0, finished.err
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", finished.out)]
    assert len(losses) == 4
    assert max(losses) < 10  # The target's variance is 64.
    assert len(set(re.findall(r"(\d+) bytes kept", finished.out))) == 1


def test_the_error_that_the_readme_shows_is_the_real_one() -> None:
    shown = re.search(r"^RuntimeError: (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert shown is not None
    hs.init()
    model = hs.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(64, 1)))
    assert model.module[1].weight.shape == (1, 64)
    with pytest.raises(RuntimeError, match=re.escape(shown[1])):
        _ = model.module[1].weight + 1


def _modules() -> list[str]:
    return [
        module.name
        for module in pkgutil.walk_packages(hs.__path__, "hopshard.")
        if not module.name.endswith(("__main__", "_exec", "._C"))
    ]


@pytest.mark.parametrize("name", ["hopshard", *_modules()])
def test_examples_in_docstrings(name: str) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # The layout, printed by init.
        failed, _ = doctest.testmod(importlib.import_module(name), verbose=False)
    assert failed == 0


# --- Links and figures


def test_links_lead_somewhere_and_generated_parts_are_up_to_date() -> None:
    finished = subprocess.run(
        [sys.executable, "tools/update_docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(pathlib.Path(hs.__path__[0]).parent)},
    )
    assert finished.returncode == 0, finished.stderr


def test_links_to_headings_name_a_heading() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
            text = (page.parent / target).read_text() if target else page.read_text()
            headings = [
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            ]
            assert anchor in headings, f"{page.name}: no heading '#{anchor}' in {target}"


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index


def _train_tiny_gpt2() -> tuple[dict[str, int], dict[str, Any]]:
    from examples.gpt2.model import GPT2, SHAPES

    model = hs.DistributedModel(GPT2(SHAPES["tiny"]), backward_passes_per_step=2)
    optimizer = hs.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    for step in range(2):
        if step == 1:  # The first one agrees on the order.
            hs.current().meter.reset()
        for _ in range(2):
            (model(tokens, targets=tokens)[1] / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(hs.current().meter.counters()), model.statistics()


def _figures(page: str) -> set[int]:
    return {
        int(number.replace(",", ""))
        for number in re.findall(r"\d[\d,]*", (ROOT / "docs" / page).read_text())
    }


def test_the_worked_examples_are_what_is_counted() -> None:
    counters, statistics = run_ranks(
        _train_tiny_gpt2, 4, ranks_per_node=2, sharded_data_parallel_degree=2
    )[0]
    sent = {
        kind: sum(value for name, value in counters.items() if f"/{kind}/sent" in name)
        for kind in ("unshard", "reduce", "second_hop", "control")
    }
    total, root, block = 3_337_216, 164_864, 793_088
    assert sent == {
        "unshard": 2 * (2 * total - root) // 2,
        "reduce": 2 * total // 2,
        "second_hop": total // 2,
        "control": 720,
    }
    assert counters["comm/sharding/all_gather/unshard/calls"] == 18
    assert counters["comm/sharding/reduce_scatter/reduce/calls"] == 10
    assert statistics["persistent_bytes"] == total
    assert statistics["pool_bytes"] == 2 * root + 4 * block
    assert {total, root, block, *sent.values()} <= _figures("algorithms.md")
    assert {total, total // 2, statistics["pool_bytes"]} <= _figures("memory.md")


# --- The type stub


def _stub_tree() -> dict[str, ast.stmt]:
    """Public names of the stub; methods as "Class.method"."""
    names: dict[str, ast.stmt] = {}

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                names[prefix + node.name] = node
                collect(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                names[prefix + node.name] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names[prefix + node.target.id] = node

    collect(ast.parse(STUB.read_text()).body, "")
    return names


def _native_tree() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for name, value in vars(_C).items():
        if name.startswith("_") and name != "__version__":
            continue
        names[name] = value
        if inspect.isclass(value) and not issubclass(value, Exception):
            kept = {"__len__", "__eq__"}
            if (value.__init__.__doc__ or "").startswith("__init__("):
                kept.add("__init__")
            for member, attribute in vars(value).items():
                if member in kept or not member.startswith("_"):
                    names[f"{name}.{member}"] = attribute
    return names


# pybind11 says what it accepts, the stub what callers should pass.
_ACCEPTED = {
    "hopshard._C.": "",
    # What pybind11 calls an int and a float; the longer forms since torch 2.15's copy of it.
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
    "typing.SupportsInt": "int",
    "typing.SupportsFloat": "float",
    "collections.abc.": "",
    "torch.distributed.distributed_c10d.Store": "TorchStore",  # We have a Store, too.
    "torch.distributed.distributed_c10d.": "",
}


def _plain(annotation: str) -> str:
    for given, ours in _ACCEPTED.items():
        annotation = annotation.replace(given, ours)
    # None that a binding takes without saying so, and containers without their contents.
    annotation = annotation.replace(" | None", "")
    return re.sub(r"^(dict|list|tuple)\b.*", r"\1", annotation)


def _signature(function: ast.FunctionDef) -> list[tuple[str, str, str]]:
    arguments = function.args
    positional = [a for a in arguments.args if a.arg != "self"]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = [
        *zip(positional, [*defaults, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return [
        (
            argument.arg,
            _plain(ast.unparse(argument.annotation)) if argument.annotation else "",
            ast.unparse(default) if default is not None else "",
        )
        for argument, default in pairs
    ] + [("return", _plain(ast.unparse(function.returns)) if function.returns else "", "")]


def test_the_stub_has_exactly_the_names_of_the_module() -> None:
    assert sorted(_stub_tree()) == sorted(_native_tree())


def test_the_stub_has_the_signatures_of_the_module() -> None:
    stub = _stub_tree()
    compared = 0
    for name, value in _native_tree().items():
        node = stub[name]
        if isinstance(value, property):
            accessor = (value.fget.__doc__ or "").strip()
            given = accessor.rpartition("-> ")[2]
            if isinstance(node, ast.FunctionDef):
                assert value.fset is None, f"{name} can be written"
                assert node.returns is not None
                assert _plain(ast.unparse(node.returns)) == _plain(given), name
            elif name != "Segment.SKIPPED":
                assert isinstance(node, ast.AnnAssign)
                assert value.fset is not None, f"{name} cannot be written"
                assert _plain(ast.unparse(node.annotation)) == _plain(given), name
        elif isinstance(node, ast.FunctionDef) and not name.endswith("__eq__"):
            text = (value.__doc__ or "").strip().splitlines()[0]
            parsed = ast.parse(f"def {text}: ...").body[0]
            assert isinstance(parsed, ast.FunctionDef)
            assert _signature(node) == _signature(parsed), name
            compared += 1
    assert compared > 90


def test_every_class_and_most_functions_of_the_stub_are_described() -> None:
    for name, node in _stub_tree().items():
        if isinstance(node, ast.ClassDef):
            assert ast.get_docstring(node), name
