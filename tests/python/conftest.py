"""What all Python tests share: one thread per rank, no world left behind, and a way to start the
``hopshard`` command that proves that no process survives it."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before torch: ranks are threads or processes.

import dataclasses
import pathlib
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator

import hopshard as hs
import pytest
import torch

torch.set_num_threads(1)

_LAUNCHERS_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "OMPI_",
    "SLURM_",
    "SM_",
    "PMIX_",
)


@pytest.fixture(autouse=True)
def clean_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests start outside any launcher and leave no world."""
    for name in list(os.environ):
        if name.startswith(("HOPSHARD_", *_LAUNCHERS_VARIABLES)):
            monkeypatch.delenv(name)
    yield
    if hs.is_initialized():
        hs.shutdown()


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that ended, and what it left."""

    code: int
    out: str
    err: str
    end_time_s: float
    leftover_pids: list[int]


class Running:
    """A command in the background. Its processes carry a mark in their environment."""

    def __init__(self, command: list[str], folder: pathlib.Path) -> None:
        self._mark = f"HOPSHARD_TEST_MARK={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        self._files = [folder / f"{value}.{stream}" for stream in ("out", "err")]
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, cwd=folder, env={**os.environ, name: value}
            )

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    def wait_for(self, text: str, times: int = 1, limit_s: float = 60) -> None:
        """Until ``text`` was printed so many times."""
        deadline = time.monotonic() + limit_s
        while self.out.count(text) < times:
            assert time.monotonic() < deadline and self.process.poll() is None, (
                f"{text!r} was not printed; stdout:\n{self.out}\n"
                f"stderr:\n{self._files[1].read_text()}"
            )
            time.sleep(0.02)

    def finish(self, limit_s: float = 90) -> Finished:
        try:
            code = self.process.wait(limit_s)
        finally:
            end = time.time()
            if self.process.poll() is None:
                self.process.kill()
            leftover = self._marked(settle_s=1.0)
            for pid in leftover:
                os.kill(pid, 9)
        return Finished(code, self.out, self._files[1].read_text(), end, leftover)

    def _marked(self, settle_s: float) -> list[int]:
        """Processes of this command that still run; the kernel may need a moment after SIGKILL."""
        deadline = time.monotonic() + settle_s
        while True:
            found = []
            for folder in pathlib.Path("/proc").iterdir():
                if folder.name.isdecimal():
                    try:
                        if self._mark.encode() in (folder / "environ").read_bytes():
                            found.append(int(folder.name))
                    except OSError:
                        continue  # It ended, or it is another user's.
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Callable[..., Running]:
    """``start("-n", "2", script="…")`` starts ``hopshard run`` with a script of that text."""

    def start_command(
        *options: str,
        script: str,
        arguments: tuple[str, ...] = (),
        launcher: list[str] | None = None,
    ) -> Running:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        launcher = launcher or [sys.executable, "-m", "hopshard.cli", "run"]
        return Running([*launcher, *options, str(path), *arguments], tmp_path)

    return start_command


@pytest.fixture
def run(start: Callable[..., Running]) -> Callable[..., Finished]:
    """Like ``start``, and waits for the end."""

    def run_command(*options: str, script: str, **kw: object) -> Finished:
        return start(*options, script=script, **kw).finish()

    return run_command
