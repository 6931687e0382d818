"""``hopshard run -n 4 script.py``: one process per rank on this host, under torchrun's own agent.

This file reads the command line and supervises; streams.py carries the ranks' output, report.py
says who failed. For several hosts use torchrun, mpirun or srun: the same script works there.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, PContext
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from hopshard.cli.report import RankEnd, read_error_file, report_failure
from hopshard.cli.streams import OutputPump
from hopshard.errors import ConfigError

# A rank that died ends the others within 5 s: what these add up to stays below.
_MONITOR_INTERVAL_S: Final = 0.1
_GRACE_S: Final = 0.5  # Ranks that fail for the same reason may say so themselves.
_STOP_LIMIT_S: Final = 1.5  # Between asking to end and SIGKILL.

_EXEC: Final = str(pathlib.Path(__file__).with_name("_exec.py"))


def add_parser(commands: Any) -> None:
    """Adds ``hopshard run``."""
    parser = commands.add_parser(
        "run",
        help="start a script as several ranks on this host",
        usage="hopshard run [-n N] [--emulate NODESxRANKS] [--no-prefix] "
        "(SCRIPT.py | -m MODULE | -c CODE | COMMAND) [ARGS ...]",
        description="Starts the program once per rank on this host and ends all ranks when one "
        "fails. For several hosts use torchrun, mpirun or srun with the same script.",
    )
    add_arguments(parser)
    parser.set_defaults(execute=execute)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks of what."""
    parser.add_argument(
        "-n", "--ranks", type=positive, metavar="N", help="number of ranks (default 1)"
    )
    parser.add_argument(
        "--emulate",
        type=nodes_by_ranks,
        metavar="NODESxRANKS",
        help="let this host look like several nodes, e.g. 2x2; also sets the number of ranks",
    )
    parser.add_argument(
        "--no-prefix", action="store_true", help="do not put [rank] before each line"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    how.add_argument(
        "-c", dest="code", metavar="CODE", help="run a program text, as python -c does"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def output_file(text: str) -> pathlib.Path:
    """What ``--output`` names, absolute.

    Raises:
        ConfigError: its folder is not there: better known before the ranks run.
    """
    output = pathlib.Path(text).absolute()
    if not output.parent.is_dir():
        raise ConfigError(f"--output {text}: there is no folder '{output.parent}'")
    return output


def execute(arguments: argparse.Namespace) -> int:
    """Runs the ranks and returns the exit code of the whole: 0, or the first failing rank's."""
    num_ranks, environment = ranks_and_environment(arguments)
    command = _command(arguments)
    os.environ.update(environment)
    _quieten_agent()
    with tempfile.TemporaryDirectory(prefix="hopshard_run_") as folder:
        pump = OutputPump(num_ranks, prefix=not arguments.no_prefix)
        return _Supervisor(num_ranks, command, pathlib.Path(folder), pump).run()


@dataclass
class _Supervisor:
    """One run: the agent, the output of its ranks, and how each of them ended."""

    num_ranks: int
    command: list[str]
    folder: pathlib.Path
    pump: OutputPump
    pids: dict[int, int] = field(default_factory=dict)
    ended: dict[int, RankEnd] = field(default_factory=dict)
    stopping: bool = False
    started_s: float = field(default_factory=time.time)

    def run(self) -> int:
        interrupted: signal.Signals | None = None
        failed = False
        signal.signal(signal.SIGTERM, _raise_signal_exception)
        signal.signal(signal.SIGINT, _raise_signal_exception)
        try:
            failed = self._run_agent()
        except SignalException as caught:
            interrupted = caught.sigval
        finally:
            # A second Ctrl-C must not keep the ranks alive.
            for caught_signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(caught_signal, signal.SIG_IGN)
            self._kill_leftovers()
            self.pump.close()
        if interrupted is not None:
            print(f"hopshard run: stopped by {interrupted.name}; no rank is left", file=sys.stderr)
            return 128 + int(interrupted)
        if failed:
            return report_failure(
                self.ended, self.num_ranks, self.pump.last_lines, self.started_s, sys.stderr
            )
        return 0

    def _run_agent(self) -> bool:
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint="127.0.0.1:0",  # Loopback, and a port that is free.
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
        )
        handler = rendezvous_registry.get_rendezvous_handler(parameters)
        spec = WorkerSpec(
            role="rank",
            local_world_size=self.num_ranks,
            entrypoint=sys.executable,
            # The agent substitutes ${local_rank} in arguments; the user's "$" are none of those.
            args=tuple(part.replace("$", "$$") for part in self.command),
            rdzv_handler=handler,
            max_restarts=0,
            monitor_interval=_MONITOR_INTERVAL_S,
            local_addr="127.0.0.1",
        )
        try:
            return bool(_Agent(spec, _Logs(self.folder, self.pump), self).run().is_failed())
        finally:
            handler.shutdown()

    def watch(self, context: PContext) -> None:
        """Called by the agent once its processes run."""
        self.pids = context.pids()
        self.pump.start()
        for rank, pid in self.pids.items():
            threading.Thread(target=self._await_end, args=(rank, pid), daemon=True).start()
        # The agent gives ranks 30 s to end, and stops them while they still say what is wrong.
        context.close = functools.partial(self._close, context.close)  # type: ignore[method-assign]

    def _await_end(self, rank: int, pid: int) -> None:
        """Notes when and how a rank ended; the agent reaps it."""
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # Reaped between two looks; the agent knows how it ended.
            return
        if status is None:
            return
        exited = status.si_code == os.CLD_EXITED
        self.ended[rank] = RankEnd(
            rank=rank,
            pid=pid,
            time_s=time.time(),
            exit_code=status.si_status if exited else -status.si_status,
            was_stopped=self.stopping,
            error=read_error_file(self.folder / f"{rank}.json"),
        )

    def _close(
        self, close: Any, death_sig: signal.Signals | None = None, timeout: float = _STOP_LIMIT_S
    ) -> None:
        if death_sig in (None, signal.SIGTERM) and not self.stopping:
            deadline = time.monotonic() + _GRACE_S
            while len(self.ended) < self.num_ranks and time.monotonic() < deadline:
                time.sleep(0.02)
        self.stopping = True
        close(death_sig=death_sig, timeout=min(timeout, _STOP_LIMIT_S))

    def _kill_leftovers(self) -> None:
        """Ranks lead process groups of their own: this also ends what they started."""
        for pid in self.pids.values():
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


class _Agent(LocalElasticAgent):
    """torchrun's agent, with the supervisor looking at its processes."""

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, supervisor: _Supervisor) -> None:
        super().__init__(spec, logs)
        self._supervisor = supervisor

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started = super()._start_workers(worker_group)
        assert self._pcontext is not None
        self._supervisor.watch(self._pcontext)
        return started


class _Logs(LogsSpecs):
    """Sends the ranks' streams into the pump instead of files."""

    def __init__(self, folder: pathlib.Path, pump: OutputPump) -> None:
        super().__init__()
        self._folder = folder
        self._pump = pump

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        error_files = {rank: str(self._folder / f"{rank}.json") for rank in envs}
        for rank, path in error_files.items():
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = path
        return LogsDest(
            stdouts={rank: self._pump.path(rank, "stdout") for rank in envs},
            stderrs={rank: self._pump.path(rank, "stderr") for rank in envs},
            error_files=error_files,
        )

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)


def _quieten_agent() -> None:
    """The agent's own warnings tell in many lines what report.py says in five."""
    if os.environ.get("HOPSHARD_LOG_LEVEL") == "debug":
        return
    for name in list(logging.root.manager.loggerDict):  # Each of them has a level of its own.
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def ranks_and_environment(arguments: argparse.Namespace) -> tuple[int, dict[str, str]]:
    """How many ranks to start, and what their environment gets beside the agent's."""
    environment = {"HOPSHARD_LAUNCHER": "hopshard run", "PYTHONUNBUFFERED": "1"}
    num_ranks: int = arguments.ranks or 1
    if arguments.emulate is not None:
        nodes, per_node = arguments.emulate
        if arguments.ranks is not None and arguments.ranks != nodes * per_node:
            raise ConfigError(
                f"--emulate {nodes}x{per_node} is {nodes * per_node} ranks, but -n says "
                f"{arguments.ranks}; leave one of them out"
            )
        num_ranks = nodes * per_node
        environment["HOPSHARD_RANKS_PER_NODE"] = str(per_node)
    if not os.environ.get("OMP_NUM_THREADS"):
        cores = len(os.sched_getaffinity(0))
        environment["OMP_NUM_THREADS"] = str(max(1, cores // num_ranks))
    return num_ranks, environment


def _command(arguments: argparse.Namespace) -> list[str]:
    """The arguments of this Python that become one rank."""
    program: list[str] = list(arguments.program)
    if program[:1] == ["--"]:
        program = program[1:]
    python = [sys.executable, "-u"]
    if arguments.module is not None:
        target = [*python, "-m", arguments.module, *program]
    elif arguments.code is not None:
        target = [*python, "-c", arguments.code, *program]
    elif not program:
        raise ConfigError("nothing to run; give a script, -m MODULE or -c CODE")
    elif program[0] in ("python", "python3"):
        # The one that hopshard is installed in, also where its environment is not activated.
        target = [*python, *program[1:]]
    elif program[0].endswith(".py") or _is_plain_file(program[0]):
        if not os.path.isfile(program[0]):
            raise ConfigError(f"there is no script '{program[0]}' (in {os.getcwd()})")
        target = [*python, *program]
    elif shutil.which(program[0]):
        target = program
    else:
        raise ConfigError(f"'{program[0]}' is neither a script nor a command on the PATH")
    return ["-I", "-S", _EXEC, str(os.getpid()), *target]


def _is_plain_file(path: str) -> bool:
    return os.path.isfile(path) and not os.access(path, os.X_OK)


def positive(text: str) -> int:
    """A number of ranks, for argparse."""
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks of at least 1")
    return int(text)


def nodes_by_ranks(text: str) -> tuple[int, int]:
    """``2x4`` is two nodes of four ranks, for argparse."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or int(match[1]) < 1 or int(match[2]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODESxRANKS, e.g. 2x2")
    return int(match[1]), int(match[2])


def _raise_signal_exception(number: int, frame: Any) -> None:
    caught = signal.Signals(number)
    raise SignalException(f"got {caught.name}", sigval=caught)
