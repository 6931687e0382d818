"""The ``hopshard`` command: starts ranks, examines this machine, measures its links.

Each subcommand is a module with ``add_parser(subparsers)`` and ``execute(arguments) -> exit code``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hopshard import _C
from hopshard.cli import doctor, info, run, trace, tune
from hopshard.errors import Error

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ``hopshard`` command.

    Args:
        argv: What follows ``hopshard``. None: the process's own arguments, and the process ends
            here, because unloading torch can take seconds in which a run only seems to hang.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="hopshard",
        description="Trains models that do not fit on one device, by sharded data parallelism.",
    )
    parser.add_argument("--version", action="version", version=f"hopshard {_C.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (run, doctor, tune, trace, info):
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        code = int(arguments.execute(arguments))
    except Error as error:
        print(f"hopshard {arguments.command}: {error}", file=sys.stderr)
        code = 2
    if argv is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
