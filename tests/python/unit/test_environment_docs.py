"""The environment table and the code must say the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NAME = re.compile(r"\bHOPSHARD_[A-Z0-9_]+\b")


def test_generated_parts_and_links_are_up_to_date() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "update_docs.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_every_variable_named_in_python_is_documented() -> None:
    documented = set(NAME.findall((ROOT / "docs" / "environment.md").read_text(encoding="utf-8")))
    assert "HOPSHARD_TIMEOUT_S" in documented
    for path in (ROOT / "python" / "hopshard").rglob("*.py"):
        named = set(NAME.findall(path.read_text(encoding="utf-8")))
        assert named <= documented, f"{path}: {sorted(named - documented)} not in the table"


def test_illegal_value_raises_config_error_that_names_it() -> None:
    code = """if True:
        import hopshard
        from hopshard import _C
        try:
            _C.env()
        except hopshard.ConfigError as error:
            print(error)
    """
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HOPSHARD_TIMEOUT_S": "soon"},
    )
    assert "HOPSHARD_TIMEOUT_S='soon'" in result.stdout
    assert "number of seconds" in result.stdout
