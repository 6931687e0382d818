"""``hopshard run`` with real processes: output, exit codes, who failed, and that nothing is left.

Scripts that need no torch do without it, so that a test costs the launcher's start only.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hopshard.cli import main
from hopshard.cli.run import ranks_and_environment

Run = Callable[..., Any]

_MAX_SECONDS_TO_END = 5.0

WAIT_FOREVER = """
    import os, subprocess, sys, time
    print("pid", os.getpid(), flush=True)
    if os.environ["RANK"] == "0":
        subprocess.Popen(["sleep", "600"])  # As a data loader would, it has a process of its own.
    print("ready", flush=True)
    time.sleep(600)
"""


def _seconds_after_death(result: Any) -> float:
    died = next(line for line in result.out.splitlines() if "died at" in line)
    return result.end_time_s - float(died.split()[-1])


def test_output_arguments_and_environment(run: Run) -> None:
    result = run(
        "--emulate",
        "2x1",
        script="""
            import os, sys
            print("args", sys.argv[1:])
            names = "WORLD_SIZE LOCAL_WORLD_SIZE HOPSHARD_RANKS_PER_NODE OMP_NUM_THREADS".split()
            print(*[os.environ.get(name) for name in names])
            print("to stderr", file=sys.stderr)
            sys.stdout.write("no newline at the end")
        """,
        arguments=("--flag", "a$$b", "${local_rank}", "-n", "7"),
    )
    assert (result.code, result.leftover_pids) == (0, [])
    threads = os.environ["OMP_NUM_THREADS"]
    for rank in range(2):
        mine = [line for line in result.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [
            f"[{rank}] args ['--flag', 'a$$b', '${{local_rank}}', '-n', '7']",
            f"[{rank}] 2 2 1 {threads}",
            f"[{rank}] no newline at the end",
        ]
        assert f"[{rank}] to stderr\n" in result.err


def test_python_is_the_one_that_hopshard_is_installed_in(tmp_path: pathlib.Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "hopshard.cli", "run", "-n", "2", "python", "-c",
         "import hopshard, sys; print(sys.executable)"],
        env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count(sys.executable) == 2


def test_cores_are_shared_out_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    arguments = argparse.Namespace(ranks=3, emulate=None)
    assert ranks_and_environment(arguments)[1]["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in ranks_and_environment(arguments)[1]


def test_exit_code_of_the_failing_rank_ends_the_run(run: Run) -> None:
    result = run(
        "-n",
        "3",
        script="""
            import os, signal, sys, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A rank that is hard to stop.
            if os.environ["RANK"] != "1":
                time.sleep(600)
            time.sleep(0.5)
            print("the reason", file=sys.stderr)
            print("died at", time.time(), flush=True)
            sys.exit(3)
        """,
    )
    assert result.code == 3
    assert _seconds_after_death(result) < _MAX_SECONDS_TO_END
    assert result.leftover_pids == []
    report = result.err[result.err.index("hopshard run:") :]
    assert report.startswith("hopshard run: rank 1 failed first\n")
    assert "exit code 3" in report and "    the reason\n" in report
    assert report.endswith("ranks 0,2 were stopped\n")


def test_a_killed_rank_ends_the_others_in_mid_training(run: Run) -> None:
    result = run(
        "-n",
        "3",
        script="""
            import os, signal, time
            import torch
            import hopshard as hs
            world = hs.init(sharded_data_parallel_degree=3)
            for step in range(1000):
                if step == 5 and hs.rank() == 1:
                    print("died at", time.time(), flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                world.groups.sharding.all_reduce(torch.ones(1000), tag="train").wait()
            print("trained to the end")
        """,
    )
    assert result.code == 128 + signal.SIGKILL
    assert _seconds_after_death(result) < _MAX_SECONDS_TO_END
    assert result.leftover_pids == []
    assert "trained to the end" not in result.out
    report = result.err[result.err.index("hopshard run:") :]
    assert "rank 1 failed first" in report and "killed by SIGKILL (signal 9)" in report


def test_the_cause_is_named_not_its_consequences(run: Run) -> None:
    result = run(
        "-n",
        "3",
        script="""
            import time
            import hopshard as hs
            hs.init()
            if hs.rank() == 2:
                time.sleep(0.3)
                print("died at", time.time(), flush=True)
                raise ValueError("a mistake of the user")
            hs.barrier()
        """,
    )
    assert result.code == 1
    assert _seconds_after_death(result) < _MAX_SECONDS_TO_END
    assert result.leftover_pids == []
    report = result.err[result.err.index("hopshard run:") :]
    assert "rank 2 failed first" in report
    assert "ValueError: a mistake of the user" in report
    assert "CommError" not in report


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_no_process(start: Run, number: signal.Signals, code: int) -> None:
    running = start("-n", "2", script=WAIT_FOREVER)
    running.wait_for("ready", times=2)
    running.process.send_signal(number)
    result = running.finish(limit_s=10)
    assert (result.code, result.leftover_pids) == (code, [])
    assert f"stopped by {number.name}" in result.err.splitlines()[-1]


def test_ctrl_c_in_a_collective(start: Run) -> None:
    running = start(
        "-n",
        "2",
        script="""
            import hopshard as hs, time
            hs.init()
            print("ready", flush=True)
            if hs.rank() == 0:
                time.sleep(600)
            hs.barrier()
        """,
    )
    running.wait_for("ready", times=2)
    running.process.send_signal(signal.SIGINT)
    result = running.finish(limit_s=10)
    assert (result.code, result.leftover_pids) == (130, [])


def test_ranks_do_not_outlive_a_killed_launcher(start: Run) -> None:
    running = start("-n", "2", script=WAIT_FOREVER.replace('== "0"', '== "none"'))
    running.wait_for("ready", times=2)
    running.process.kill()
    assert running.finish(limit_s=5).leftover_pids == []


def test_a_progress_bar_on_a_terminal(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "bar.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('terminal', sys.stdout.isatty())\n"
        "    for i in range(6):\n"
        "        sys.stdout.write(f'\\rbar {i}')\n"
        "        time.sleep(0.1)\n"
        "    print()\n"
        "else:\n"
        "    time.sleep(0.3)\n"
        "    print('between')\n"
    )
    main_fd, terminal_fd = pty.openpty()
    command = [sys.executable, "-m", "hopshard.cli", "run", "-n", "2", str(script)]
    process = subprocess.Popen(command, stdin=terminal_fd, stdout=terminal_fd, stderr=terminal_fd)
    os.close(terminal_fd)
    seen = b""
    while True:
        try:
            data = os.read(main_fd, 4096)
        except OSError:  # The terminal has no users left.
            break
        seen += data
    os.close(main_fd)
    assert process.wait(10) == 0
    text = seen.decode()
    assert "terminal True\r\n" in text
    # Rank 0's bytes are untouched; the other's line first erases the bar, which then comes again.
    assert "\x1b[K[1] between\r\n" in text
    assert text.replace("\r\x1b[K[1] between\r\n", "").endswith(
        "".join(f"\rbar {i}" for i in range(6)) + "\r\n"
    )


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_other_launchers_run_the_same_script(
    run: Run, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                     "--standalone"],
        "mpirun": ["mpirun", "-n", "2", "--oversubscribe", "--allow-run-as-root",
                   "-mca", "btl", "self,vader"],
    }  # fmt: skip
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed")
    command = commands[launcher] + ([sys.executable] if launcher == "mpirun" else [])
    result = run(
        launcher=command,
        script="""
            import hopshard as hs
            world = hs.init(sharded_data_parallel_degree=2)
            hs.barrier()
            print(f"rank {hs.rank()} of {hs.size()} under {world.launcher}", flush=True)
            hs.shutdown()
        """,
    )
    assert result.code == 0, result.err
    name = {"torchrun": "torchrun", "mpirun": "Open MPI"}[launcher]
    for rank in range(2):
        # Under torchrun lines of two ranks may run into each other.
        assert f"rank {rank} of 2 under {name}" in result.out
    assert result.err.count("2 ranks = 1 node x 2 · degree 2 · 1 replica") == 1


def test_a_job_may_shut_down_and_start_again(run: Run) -> None:
    result = run(
        "-n",
        "4",
        script="""
            import hopshard as hs, torch
            for degree in (1, 2, 4, 2):
                world = hs.init(sharded_data_parallel_degree=degree)
                total = torch.ones(1)
                world.groups.world.all_reduce(total).wait()
                assert total.item() == 4 and hs.sharding_size() == degree
                hs.shutdown()
            print("done", flush=True)
        """,
    )
    assert result.code == 0, result.err
    assert result.out.count("done") == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "-n", "2", "none.py"], "there is no script 'none.py'"),
        (["run", "-n", "2"], "nothing to run"),
        (["run", "-n", "0", "x.py"], "'0' is not a number of ranks"),
        (["run", "--emulate", "2", "x.py"], "'2' is not NODESxRANKS"),
        (["run", "-n", "3", "--emulate", "2x2", "x.py"], "is 4 ranks, but -n says 3"),
        (["run", "no-such-command-anywhere"], "neither a script nor a command"),
    ],
)
def test_wrong_usage_is_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(arguments)
    except SystemExit as stop:  # argparse ends the program itself.
        code = stop.code
    assert code == 2
    assert text in capsys.readouterr().err


def test_version_and_info(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("hopshard 0.")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "torch " in text and "c10d" in text and "available" in text
