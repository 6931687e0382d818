"""hopshard without Python: what `cmake --install` leaves is enough for projects of one's own, and
the GPT-2 in C++ has the losses of the one in Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILT = ROOT / "build" / "release"  # By `make build`, which `make test` begins with.
EXAMPLES = ROOT / "examples"
LAUNCHER = [sys.executable, "-m", "hopshard.cli", "run"]
STEPS = 20
OPTIONS = ["--seed", "1", "--steps", str(STEPS), "--batch-size", "2", "--context", "32"]
OPTIONS += ["--log-every", "1", "--eval-every", "8"]
WARNINGS = "-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wold-style-cast "
WARNINGS += "-Wno-missing-field-initializers -Werror"


def run(*command: object, limit_s: float, **environment: str) -> str:
    ended = subprocess.run(
        list(map(str, command)), check=False, capture_output=True, text=True, timeout=limit_s,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert ended.returncode == 0, f"{command}:\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cpp")


@pytest.fixture(scope="module")
def prefix(folder: Path) -> Path:
    # Headers are installed from the sources: older libraries would not fit them.
    layers = ["hopshard_runtime", "hopshard_optim"]
    plan = run("cmake", "--build", BUILT, "--target", *layers, "--", "-n", limit_s=60)
    assert "no work to do" in plan, f"{BUILT} is older than the sources; run 'make build' first"
    path = folder / "prefix"
    run("cmake", "--install", BUILT, "--component", "devel", "--prefix", path, limit_s=60)
    return path


@pytest.fixture(scope="module")
def programs(folder: Path, prefix: Path) -> Path:
    """The build folder of all C++ examples."""
    build = folder / "build"
    options = {
        "CMAKE_PREFIX_PATH": prefix,
        "Python_EXECUTABLE": sys.executable,
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_FLAGS": WARNINGS,
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache" if shutil.which("ccache") else "",
    }
    given = [f"-D{name}={value}" for name, value in options.items()]
    said = run("cmake", "-G", "Ninja", "-S", EXAMPLES, "-B", build, *given, limit_s=120)
    assert "CMake Warning" not in said
    # Paths below this folder count as relative ones: it is another one each time.
    run("cmake", "--build", build, limit_s=280, CCACHE_BASEDIR=str(folder))
    return build


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(
        "\n\n".join(f"Paragraph {i} says that {i} follows {i - 1}." for i in range(999))
    )
    return path


@pytest.fixture(scope="module")
def tokens(folder: Path, text: Path) -> Path:
    path = folder / "tokens"
    run(sys.executable, EXAMPLES / "gpt2" / "data.py", path, "--data", text, limit_s=60)
    return path


def test_every_public_header_is_installed(prefix: Path) -> None:
    def headers(root: Path) -> set[Path]:
        return {path.relative_to(root) for path in root.rglob("*.hpp")}

    assert headers(prefix / "include") == headers(ROOT / "include")


def test_a_project_of_ones_own_finds_hopshard(programs: Path) -> None:
    lines = run(programs / "consumer" / "consumer", limit_s=60).splitlines()
    assert re.fullmatch(r"hopshard \d+\.\d+\.\d+", lines[0])
    kept = [re.search(r"keeps (\d+) of 6000 elements of weight", line) for line in lines[1:]]
    numels = [int(match[1]) for match in kept if match is not None]
    assert len(numels) == 4
    assert numels[:2] == numels[2:]
    assert numels[0] + numels[1] == 6000
    assert all(line.endswith("their sums are 1.7997e+07 and 60") for line in lines[1:])


@pytest.mark.parametrize(("ranks", "degree"), [(1, 1), (4, 2)])
def test_gpt2_in_cpp_has_the_losses_of_python(
    ranks: int, degree: int, programs: Path, text: Path, tokens: Path, tmp_path: Path
) -> None:
    launcher = [*LAUNCHER, "-n", ranks] if ranks > 1 else []
    options = [*OPTIONS, "--degree", degree]
    said = run(*launcher, programs / "cpp" / "train_gpt2", *options, "--data", tokens, limit_s=120)
    run(
        *(launcher or [sys.executable]), EXAMPLES / "gpt2" / "train.py", *options, "--data", text,
        "--max-seconds", 0, "--sample-bytes", 0, "--runs", tmp_path, "--name", "run",
        limit_s=240,
    )  # fmt: skip

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["world_size"], facts["degree"]) == (ranks, degree)
    expected = [facts["first_val_loss"]]
    for record in records:
        expected += [record[key] for key in ("loss", "val_loss") if key in record]
    losses = [float(loss) for loss in re.findall(r" · (?:loss|validation) ([\d.]+)", said)]
    assert len(losses) == 1 + STEPS + 3  # Validated before, after 8, 16 and all steps.
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[-1] < losses[0] - 1


def test_a_rank_that_fails_ends_the_run(programs: Path, tokens: Path) -> None:
    ended = subprocess.run(
        [*LAUNCHER, "-n", "2", str(programs / "cpp" / "train_gpt2"), "--data", str(tokens),
         "--context", "1000000"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "holds too few bytes for context 1000000" in ended.stderr
