"""How a rank ends: the launcher learns why, the peers are woken, and gloo does not hold it back.

Next: world.py.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import sys
import time
import traceback
import types
from collections.abc import Callable

from hopshard.errors import CommError

_log = logging.getLogger("hopshard")

ExceptHook = Callable[[type[BaseException], BaseException, types.TracebackType | None], object]


def reporting_excepthook(show: ExceptHook, wake_peers: Callable[[str], None]) -> ExceptHook:
    """An excepthook that also tells the launcher when and why, and calls ``wake_peers(reason)``."""

    def hook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        write_error_file(kind, error, trace)
        if issubclass(kind, KeyboardInterrupt) and "HOPSHARD_LAUNCHER" in os.environ:
            print("interrupted", file=sys.stderr)  # One line a rank instead of a traceback each.
        else:
            show(kind, error, trace)
        sys.stderr.flush()
        wake_peers(f"{kind.__name__}: {error}")

    return hook


def write_error_file(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Torch elastic's format, so that torchrun shows the cause too."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    lines = traceback.format_exception(kind, error, trace)
    now = time.time()
    report = {
        "message": {
            "message": f"{kind.__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(lines),
                "timestamp": str(int(now)),
                "time_s": now,
                "is_consequence": isinstance(error, CommError | KeyboardInterrupt),
            },
        }
    }
    # Written beside and renamed: the launcher may read at any time.
    partial = f"{path}.{os.getpid()}"
    try:
        pathlib.Path(partial).write_text(json.dumps(report))
        os.replace(partial, path)
    except OSError as problem:
        _log.warning("cannot write %s: %s", path, problem)


def await_idle_gloo(limit_s: float = 1.0) -> None:
    """Lets gloo's threads drop the tensors of finished collectives.

    They need the GIL for tensors that Python has seen, and a native thread that asks for it while
    the interpreter shuts down ends the process with SIGABRT (torch 2.11).
    """
    deadline = time.monotonic() + limit_s
    idle_looks = 0
    while idle_looks < 2 and time.monotonic() < deadline:
        states = _native_thread_states("pt_gloo_runloop")
        if not states:
            return
        idle_looks = idle_looks + 1 if set(states) == {"S"} else 0
        time.sleep(0.002)  # Without the GIL, so that a thread that waits for it can go on.


def _native_thread_states(name: str) -> list[str]:
    """Linux's one-letter state of each thread of this process with this name; elsewhere none."""
    states = []
    for folder in pathlib.Path("/proc/self/task").glob("*"):
        try:
            if (folder / "comm").read_text().strip() == name[:15]:
                states.append((folder / "stat").read_text().rsplit(")", 1)[1].split()[0])
        except OSError:  # The thread ended meanwhile.
            continue
    return states
