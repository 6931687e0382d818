"""``hopshard trace -n 4 script.py``: runs a script and writes what its ranks did when."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
from typing import Any, Final

from hopshard.cli import run
from hopshard.errors import ConfigError
from hopshard.trace import merge

DEFAULT_OUTPUT: Final = "trace.json"


def add_parser(commands: Any) -> None:
    """Adds ``hopshard trace``."""
    parser = commands.add_parser(
        "trace",
        help="run a script and write a trace of its steps",
        usage="hopshard trace [-n N] [--emulate NODESxRANKS] [-o FILE] "
        "(SCRIPT.py | -m MODULE | -c CODE) [ARGS ...]",
        description="Runs the script as `hopshard run` does and writes one trace of all ranks: "
        "computation, gathers, both hops and optimizer steps as lanes. Open it in "
        "https://ui.perfetto.dev or chrome://tracing. Let the script end after a few steps.",
    )
    parser.add_argument("-o", "--output", default=DEFAULT_OUTPUT, metavar="FILE")
    run.add_arguments(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Runs, merges, and says what share of communication was hidden."""
    output = run.output_file(arguments.output)
    with tempfile.TemporaryDirectory(prefix="hopshard_trace_") as folder:
        os.environ["HOPSHARD_TRACE_FOLDER"] = folder
        code = run.execute(arguments)
        try:
            trace = merge(pathlib.Path(folder))
        except FileNotFoundError as error:
            raise ConfigError(str(error)) from None
    output.write_text(json.dumps(trace), encoding="utf-8")
    shares = trace["hidden_share"].values()
    print(
        f"{output}: {sum(e['ph'] == 'X' for e in trace['traceEvents']):,} events of {len(shares)} "
        f"ranks; at least {min(shares):.0%} to {max(shares):.0%} of communication was hidden"
    )
    return code
