"""Starts a benchmark once per rank.

By mpirun where it is, so that Open MPI can be measured in the same processes, else as plain
processes with torch's variables. Next: _peers.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

TIMED_OUT: Final = 124  # As coreutils' timeout.
_GRACE_S: Final = 8.0  # mpirun removes its shared memory when it is asked to end.


def is_rank() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ


def mpi_options(interface: str | None = None) -> list[str]:
    """Open MPI's transports, pinned: shared memory in a node, TCP over two sockets between."""
    options = ["--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1"]
    options += ["--mca", "btl", "self,vader,tcp", "--mca", "btl_tcp_links", "2"]
    options += ["--mca", "btl_base_warn_component_unused", "0"]
    options += ["--mca", "mpi_yield_when_idle", "1"]
    return options + ([] if interface is None else ["--mca", "btl_tcp_if_include", interface])


def with_torch_names(command: Sequence[str]) -> list[str]:
    """A rank of mpirun that finds torch's variables beside Open MPI's."""
    pairs = {"RANK": "RANK", "WORLD_SIZE": "SIZE"}
    pairs |= {"LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
    exports = " ".join(f"{ours}=$OMPI_COMM_WORLD_{theirs}" for ours, theirs in pairs.items())
    return ["sh", "-c", f'export {exports}; exec "$@"', "sh", *command]


def base_environment() -> dict[str, str]:
    """This process's, with one thread per rank unless the user said otherwise."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **root}


def start_ranks(
    command: Sequence[str],
    num_ranks: int,
    use_mpi: bool = True,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> int:
    """Runs the command as that many ranks of this host; the exit code of the first that failed.

    Args:
        command: One rank's.
        num_ranks: How many.
        use_mpi: By mpirun, where it is.
        environment: What ranks get besides this process's.
        limit_s: All are ended after so long, and the code is ``TIMED_OUT``.
    """
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    environment = {**base_environment(), **(environment or {}), **rendezvous}
    mpirun = shutil.which("mpirun") if use_mpi else None
    if mpirun is not None:
        launch = [mpirun, *mpi_options(), "-np", str(num_ranks), *with_torch_names(command)]
        return wait_for_all([subprocess.Popen(launch, env=environment)], limit_s)
    processes = []
    for rank in range(num_ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        place |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        processes.append(subprocess.Popen(command, env={**environment, **place}))
    return wait_for_all(processes, limit_s)


def python_command(file: str) -> list[str]:
    """This very command line, for a rank."""
    return [sys.executable, file, *sys.argv[1:]]


def wait_for_all(
    processes: Sequence[subprocess.Popen[Any]],
    limit_s: float | None = None,
    grace_s: float = _GRACE_S,
) -> int:
    """Until all have ended well, or one has not, or the time is over; then ends the rest."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    old = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [code for code in codes if code not in (None, 0)]
            if failed or None not in codes:
                return next((c if c > 0 else 128 - c for c in failed if c is not None), 0)
            if deadline is not None and time.monotonic() > deadline:
                return TIMED_OUT
            time.sleep(0.02)
    finally:
        stop(processes, grace_s)
        signal.signal(signal.SIGTERM, old)


def stop(processes: Sequence[subprocess.Popen[Any]], grace_s: float = _GRACE_S) -> None:
    """Asks all to end, then ends them."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
