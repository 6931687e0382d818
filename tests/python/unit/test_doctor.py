"""``hopshard doctor`` tells the truth, above all on a machine that has nothing."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hopshard import _C
from hopshard.cli import doctor, main


def by_name(checks: list[doctor.Check]) -> dict[str, doctor.Check]:
    return {check.name: check for check in checks}


def test_a_bare_machine_is_healthy_and_hears_how_to_get_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_library(*arguments: object, **kw: object) -> None:
        raise OSError("cannot open shared object file")

    bare = [
        SimpleNamespace(name="c10d", summary="Gloo", why_not=None),
        *[
            SimpleNamespace(name=name, summary="", why_not=f"built without {name}")
            for name in ("shm", "mpi", "ofi", "nccl")
        ],
    ]
    monkeypatch.setattr(_C, "backends", lambda: bare)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 0
    found = by_name(doctor.examine())
    assert found["c10d"].status == "ok"
    for name in ("shm", "mpi", "ofi", "nccl"):
        assert found[name].status == "missing"
        assert f"built without {name}" in found[name].value
        assert found[name].advice
    assert found["Open MPI"].value == "no mpirun on the PATH"
    assert found["libfabric"].status == "missing"
    assert found["GPUs"].status == "missing" and "train on the CPU" in found["GPUs"].value
    text = " ".join(capsys.readouterr().out.split())
    assert "built without nccl" in text and "libopenmpi-dev" in text


def test_every_backend_of_this_build_is_listed_with_its_own_reason() -> None:
    found = by_name(doctor.examine())
    for backend in _C.backends():
        check = found[backend.name]
        if backend.why_not is None:
            assert check.status == "ok" and backend.summary in check.value
        else:
            assert check.status == "missing" and backend.why_not in check.value


def test_a_check_that_fails_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("driver and library differ")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    found = by_name(doctor.examine())
    assert found["devices"].status == "warning"
    assert "RuntimeError: driver and library differ" in found["devices"].value
    assert "hopshard" in found and "environment" in found


def test_json_has_the_same_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == doctor.FORMAT_VERSION
    names = [check["name"] for check in report["checks"]]
    assert names == [check.name for check in doctor.examine()]
    fields = {"section", "name", "status", "value", "advice"}
    assert all(set(check) == fields for check in report["checks"])


def test_a_small_dev_shm_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=16000)
    monkeypatch.setattr(os, "statvfs", lambda path: volume)
    status, value, advice = doctor._shared_memory()
    assert status == "warning" and value.startswith("64.0 MiB") and "--shm-size" in advice


def test_reading_a_peers_memory_is_really_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    status, value, _ = doctor._process_vm()
    assert status in ("ok", "warning")
    assert ("not permitted: " in value) == (status == "warning")
    # An address that nobody has mapped: the truth is an error, whatever may be read elsewhere.
    monkeypatch.setattr(ctypes, "addressof", lambda memory: 8)
    status, value, advice = doctor._process_vm()
    assert status == "warning" and "not permitted: " in value and "SYS_PTRACE" in advice


def test_more_ranks_than_cores_and_bad_settings_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOPSHARD_NODE_ID", "blue")
    monkeypatch.setenv("HOPSHARD_TIMEOUT_S", "soon")
    found = by_name(doctor.examine())
    assert found["ranks here"].value == "4 share 2 cores"
    assert found["node"].value == "blue (HOPSHARD_NODE_ID)"
    assert found["launcher"].value.endswith("rank 1 of 4")
    assert found["environment"].status == "warning"
    assert "HOPSHARD_TIMEOUT_S" in found["environment"].value


def test_it_runs_as_a_command_without_any_tool(tmp_path: pathlib.Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "hopshard.cli", "doctor"],
        env={**os.environ, "PATH": str(tmp_path), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr
    assert "no mpirun on the PATH" in finished.stdout and "c10d" in finished.stdout
