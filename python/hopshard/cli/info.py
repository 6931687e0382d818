"""``hopshard info``: versions and transports, for bug reports and first checks."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

import torch

from hopshard import _C
from hopshard.world import code_version


def add_parser(commands: Any) -> None:
    """Adds ``hopshard info``."""
    parser = commands.add_parser("info", help="print versions and which backends are available")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Prints the report; always 0."""
    print(f"hopshard  {_C.__version__}  ({code_version()})")
    print(
        f"torch     {torch.__version__}  (CUDA {torch.version.cuda or 'no'}, "
        f"{torch.cuda.device_count()} devices)"
    )
    print(f"python    {platform.python_version()}  ({platform.platform()})")
    print(f"cores     {len(os.sched_getaffinity(0))}")
    print("backends")
    backends = _C.backends()
    width = max((len(backend.name) for backend in backends), default=0)
    for backend in sorted(backends, key=lambda backend: backend.name):
        why_not = backend.why_not
        text = "available" if why_not is None else f"not available: {why_not}"
        print(f"  {backend.name:<{width}}  {text}")
    return 0
