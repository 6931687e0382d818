#!/usr/bin/env python3
"""Enforces who may know whom: reads every #include and every Python import of the project.

The table LAYERS is the architecture; docs/architecture.md explains it. Only the standard library
is used, so that pre-commit, ctest and a bare machine can run it.

    tools/check_layers.py              exit code 1 and one line per violation
    tools/check_layers.py --self-test  plants one violation of every rule and expects it to be found
"""

from __future__ import annotations

import argparse
import ast
import posixpath
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Layer -> layers it may include, itself aside. "schedule" is the pure part of runtime/.
CORE = {"core"}
BELOW_COMM = CORE | {"topology", "metrics", "layout"}
BELOW_COLLECTIVES = BELOW_COMM | {"comm"}
BELOW_RUNTIME = BELOW_COLLECTIVES | {"collectives"}
LAYERS: dict[str, set[str]] = {
    "core": set(),
    "topology": CORE,
    "metrics": CORE,
    "layout": CORE | {"topology"},
    "comm": BELOW_COMM,
    "collectives": BELOW_COLLECTIVES,
    "schedule": CORE | {"topology", "layout"},
    "runtime": BELOW_RUNTIME | {"schedule"},
    "optim": BELOW_COLLECTIVES,
    "checkpoint": BELOW_COLLECTIVES,
    "plan": CORE | {"topology", "layout", "schedule"},
}
# These see no tensors: their tests run for thousands of ranks without loading torch.
PURE = {"topology", "metrics", "layout", "schedule", "plan"}


@dataclass(frozen=True)
class Confined:
    """Headers that only some files may include."""

    header: str  # Regex on the included path.
    allowed: str  # Regex on the including file, relative to the root; never matches if empty.
    reason: str


CONFINED = (
    Confined(r"^torch/extension\.h$", "", "takes 25 s to compile; use narrow headers"),
    Confined(r"^ATen/ATen\.h$", "", "takes 7 s to compile; include ATen/ops/x.h"),
    Confined(r"^torch/(torch|all)\.h$", "", "takes half a minute to compile; use narrow headers"),
    Confined(r"^mpi\.h$", r"^src/comm/backends/mpi", "only the mpi backend knows MPI"),
    Confined(r"^nccl.*\.h$", r"^src/comm/backends/nccl", "only the nccl backend knows NCCL"),
    Confined(r"^rdma/", r"^src/comm/backends/ofi", "only the ofi backend knows libfabric"),
    Confined(
        r"^torch/csrc/distributed/",
        r"^(src/comm/backends/c10d|python/src/|tests/cpp/|examples/cpp/launch\.cpp$)",
        "c10d headers are outside torch's stable interface and slow; only its backend needs them",
    ),
    Confined(
        r"^torch/csrc/autograd/",
        r"^(src/runtime/grad_hooks\.cpp$|python/src/|tests/cpp/)",
        "autograd's headers are outside torch's stable interface; only grad_hooks.cpp needs them",
    ),
    Confined(
        r"^(pybind11/|Python\.h$|torch/csrc/utils/pybind\.h$|torch/csrc/Exceptions\.h$)",
        r"^python/src/",
        "the layers never name Python",
    ),
)
# What is left of torch/ after CONFINED has had its say.
TORCH_ALLOWED = (
    r"^torch/csrc/(distributed|autograd|utils/pybind\.h)|^torch/(extension|torch|all)\.h$"
)

CPP_SUFFIXES = {".hpp", ".cpp", ".h", ".cu", ".cuh"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
GETENV = re.compile(r"\b(?:secure_)?getenv\s*\(")
GETENV_ALLOWED = "src/core/env.cpp"

# Folder -> top-level modules of this project that its files may import.
PYTHON_FOLDERS: dict[str, set[str]] = {
    "python/hopshard": {"hopshard"},
    "examples": {"hopshard", "examples"},
    "benchmarks": {"hopshard", "examples", "benchmarks"},
}
PROJECT_MODULES = {"hopshard", "examples", "benchmarks", "tests", "tools"}
NATIVE = "hopshard._C"
NATIVE_ALLOWED = {"python/hopshard"}


def layer_of_path(folder: str, name: str) -> str:
    """The layer of a file `name` in src/<folder>/ or include/hopshard/<folder>/."""
    return "schedule" if folder == "runtime" and name.startswith("schedule") else folder


def layer_of_file(path: str) -> str | None:
    """The layer that a file (relative path) belongs to; None outside the layers."""
    match = re.match(r"(?:src|include/hopshard)/([^/]+)/(?:.*/)?([^/]+)$", path)
    return layer_of_path(match[1], match[2]) if match else None


def layer_of_include(path: str, header: str) -> str | None:
    """The layer that a header included by `path` belongs to; None if it is not one of ours."""
    if header.startswith(
        "."
    ):  # Beside the including file; the rest is relative to src/ or include/.
        return layer_of_file(posixpath.normpath(posixpath.join(posixpath.dirname(path), header)))
    match = re.match(r"(?:hopshard/)?([^/]+)/(?:.*/)?([^/]+)$", header)
    if match and (header.startswith("hopshard/") or match[1] in LAYERS):
        return layer_of_path(match[1], match[2])
    return None


def check_include(path: str, header: str, *, quoted: bool) -> str | None:
    """What is wrong with `path` including `header`, if anything."""
    for rule in CONFINED:
        if re.search(rule.header, header) and not (rule.allowed and re.search(rule.allowed, path)):
            return f"includes {header}: {rule.reason}"
    layer = layer_of_file(path)
    if layer is None:
        return None
    if re.match(r"(ATen|c10|torch)/", header):
        if layer in PURE:
            return f"includes {header}: {layer} is pure and sees no tensors"
        if header.startswith("torch/") and not re.search(TORCH_ALLOWED, header):
            return f"includes {header}: layers use ATen and c10 only"
        return None
    other = layer_of_include(path, header)
    if other is None:
        return f'includes "{header}": not a layer of hopshard' if quoted and "/" in header else None
    if other != layer and other not in LAYERS[layer]:
        allowed = ", ".join(sorted(LAYERS[layer])) or "nothing"
        return f"includes {header}: {layer} may include {allowed}, not {other}"
    return None


def strip_comments(text: str) -> str:
    return re.sub(
        r"//[^\n]*|/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.S
    )


def check_cpp_file(root: Path, path: Path) -> Iterator[str]:
    relative = path.relative_to(root).as_posix()
    layer = layer_of_file(relative)
    if layer is not None and layer not in LAYERS:
        yield f"{relative}: layer '{layer}' is not in the table of tools/check_layers.py"
        return
    text = path.read_text(encoding="utf-8")
    for match in INCLUDE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if problem := check_include(relative, match[2], quoted=match[1] == '"'):
            yield f"{relative}:{line}: {problem}"
    if layer is not None and relative != GETENV_ALLOWED:
        code = strip_comments(text)
        for match in GETENV.finditer(code):
            line = code.count("\n", 0, match.start()) + 1
            yield f"{relative}:{line}: reads the environment; all variables are in core/env"


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every absolute import; `from a import b` yields a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def check_python_file(root: Path, path: Path, folder: str) -> Iterator[str]:
    relative = path.relative_to(root).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=relative)
    seen: set[tuple[int, str]] = set()
    for line, module in imported_modules(tree):
        top = module.split(".")[0]
        problem = None
        if top in PROJECT_MODULES - PYTHON_FOLDERS[folder]:
            problem = (
                f"imports {top}: {folder} may import {', '.join(sorted(PYTHON_FOLDERS[folder]))}"
            )
        elif module == NATIVE and folder not in NATIVE_ALLOWED:
            problem = f"imports {NATIVE}: only python/hopshard does; use the public names"
        if problem and (line, problem) not in seen:
            seen.add((line, problem))
            yield f"{relative}:{line}: {problem}"


def check_tree(root: Path) -> list[str]:
    """All violations under `root`, one line each."""
    problems: list[str] = []
    for folder in ("include", "src", "python/src", "tests", "benchmarks", "examples"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in CPP_SUFFIXES and path.is_file():
                problems += check_cpp_file(root, path)
    for folder in PYTHON_FOLDERS:
        for path in sorted((root / folder).rglob("*.py*")):
            if path.suffix in {".py", ".pyi"}:
                problems += check_python_file(root, path, folder)
    return problems


# File, content, and a part of the message; None: must be accepted.
SELF_TEST: tuple[tuple[str, str, str | None], ...] = (
    ("src/core/a.cpp", '#include "hopshard/comm/group.hpp"', "core may include nothing, not comm"),
    ("src/comm/a.cpp", '#include "hopshard/runtime/unit.hpp"', "not runtime"),
    ("src/comm/a.cpp", '#include "collectives/detail.hpp"', "not collectives"),
    ("src/comm/backends/a.cpp", '#include "../../optim/b.hpp"', "not optim"),
    ("src/comm/backends/a.cpp", '#include "../b.hpp"', None),
    ("src/comm/a.cpp", "#include <hopshard/optim/sgd.hpp>", "not optim"),
    ("src/comm/a.cpp", '#include "hopshard/comm/group.hpp"\n#include "comm/b.hpp"', None),
    ("src/runtime/unit.cpp", '#include "hopshard/optim/adamw.hpp"', "not optim"),
    ("src/optim/a.cpp", '#include "hopshard/runtime/unit.hpp"', "not runtime"),
    ("src/optim/a.cpp", '#include "hopshard/collectives/two_hop_sync.hpp"', "not collectives"),
    ("src/runtime/unit.cpp", '#include "hopshard/runtime/schedule.hpp"', None),
    ("src/runtime/schedule.cpp", '#include "hopshard/runtime/unit.hpp"', "not runtime"),
    ("src/runtime/schedule_plan.cpp", '#include "hopshard/comm/group.hpp"', "not comm"),
    ("src/runtime/schedule.cpp", "#include <ATen/core/Tensor.h>", "schedule is pure"),
    ("include/hopshard/layout/a.hpp", "#include <c10/util/Optional.h>", "layout is pure"),
    ("include/hopshard/runtime/a.hpp", "#include <ATen/core/Tensor.h>", None),
    ("include/hopshard/runtime/a.hpp", "  #  include <ATen/ATen.h>", "ATen/ops"),
    ("tests/cpp/unit/a.cpp", "#include <ATen/ATen.h>", "ATen/ops"),
    ("python/src/a.cpp", "#include <torch/extension.h>", "25 s"),
    ("src/runtime/a.cpp", "#include <torch/csrc/jit/api/module.h>", "ATen and c10 only"),
    ("src/comm/backends/local.cpp", "#include <mpi.h>", "only the mpi backend"),
    ("src/comm/backends/mpi.cpp", "#include <mpi.h>", None),
    ("src/comm/backends/mpi/api.cpp", "#include <nccl.h>", "only the nccl backend"),
    ("src/comm/backends/shm.cpp", "#include <rdma/fabric.h>", "only the ofi backend"),
    ("src/comm/a.cpp", "#include <torch/csrc/distributed/c10d/Work.hpp>", "only its backend"),
    ("src/comm/backends/c10d.cpp", "#include <torch/csrc/distributed/c10d/Work.hpp>", None),
    ("examples/cpp/a.cpp", "#include <torch/csrc/distributed/c10d/Work.hpp>", "only its backend"),
    ("src/runtime/unit.cpp", "#include <torch/csrc/autograd/variable.h>", "only grad_hooks.cpp"),
    ("src/runtime/grad_hooks.cpp", "#include <torch/csrc/autograd/variable.h>", None),
    ("src/optim/a.cpp", "#include <pybind11/pybind11.h>", "never name Python"),
    ("src/runtime/a.cpp", "#include <Python.h>", "never name Python"),
    ("python/src/a.cpp", "#include <torch/csrc/utils/pybind.h>", None),
    ("src/magic/a.cpp", "", "layer 'magic' is not in the table"),
    ("src/comm/a.cpp", 'auto x = std::getenv("A");', "all variables are in core/env"),
    ("src/comm/a.cpp", "// not getenv(x)", None),
    ("src/core/env.cpp", 'auto x = std::getenv("A");', None),
    ("python/hopshard/a.py", "import examples.gpt2", "python/hopshard may import hopshard"),
    ("python/hopshard/a.py", "def f():\n  from tests.support import x", "may import hopshard"),
    ("python/hopshard/a.py", "from hopshard import _C", None),
    ("examples/a.py", "from hopshard import _C", "only python/hopshard does"),
    ("benchmarks/a.py", "import hopshard._C as c", "only python/hopshard does"),
    ("examples/a.py", "import hopshard as hs\nimport torch", None),
)


def self_test() -> list[str]:
    """Runs every case of SELF_TEST in a tree of its own; returns what was not as expected."""
    failures = []
    for name, content, expected in SELF_TEST:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.parent.mkdir(parents=True)
            path.write_text(content + "\n", encoding="utf-8")
            problems = check_tree(Path(folder))
        if expected is None and problems:
            failures.append(f"{name}: {content!r} should be accepted, got {problems}")
        elif expected is not None and not any(expected in problem for problem in problems):
            failures.append(f"{name}: {content!r} should be refused with {expected!r}: {problems}")
    if layers_have_cycle():
        failures.append("the table LAYERS has a cycle")
    return failures


def layers_have_cycle() -> bool:
    remaining = {layer: set(below) for layer, below in LAYERS.items()}
    while free := [layer for layer, below in remaining.items() if not below & remaining.keys()]:
        for layer in free:
            del remaining[layer]
    return bool(remaining)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--self-test", action="store_true", help="prove that the rules bite")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent)
    arguments = parser.parse_args()
    problems = self_test() if arguments.self_test else check_tree(arguments.root.resolve())
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
