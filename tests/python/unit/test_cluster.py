"""The emulated cluster: what it would build, what it says where it cannot, and that nothing is left
of it however a run ends."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

from benchmarks.cluster import run
from benchmarks.cluster.run import NAME, Plan, bits_per_second

PROGRAM = str(pathlib.Path(run.__file__))
WAIT = "import os, time; os.write(1, b'ready\\n'); time.sleep(120)"


def plan(**fields: object) -> Plan:
    return Plan(**{"token": "4194303", "nodes": 2, "ranks_per_node": 2, "rate": "1gbit"} | fields)


# --- The plan


def test_names_fit_an_interface_and_are_recognised() -> None:
    planned = plan(nodes=12)
    names = [planned.bridge, *map(planned.link, range(12)), *map(planned.namespace, range(12))]
    assert len(set(names)) == 25
    assert all(len(name) <= 15 for name in names)  # The kernel's limit.
    assert {NAME.match(name)[1] for name in names} == {"4194303"}  # type: ignore[index]
    assert not any(map(NAME.match, ["eth0", "hsbr0", "hsc", "hscn1", "docker0", "xhsc1n1"]))


def test_both_directions_of_every_node_are_limited() -> None:
    shaped = [command for command in plan(nodes=3).up() if "tbf" in command]
    assert len(shaped) == 6
    assert all(command[command.index("rate") + 1] == "1gbit" for command in shaped)
    out_of_nodes = {command[2] for command in shaped if command[1] == "-n"}
    assert out_of_nodes == {plan().namespace(node) for node in range(3)}
    assert not [command for command in plan(rate=None).up() if "tc" in command[0]]


def test_latency_is_below_the_limit_and_only_out_of_a_node() -> None:
    delays = [command for command in plan(latency_ms=0.5).up() if "netem" in command]
    assert len(delays) == 2
    assert all(command[1] == "-n" and command[7:9] == ["parent", "1:1"] for command in delays)
    alone = [command for command in plan(latency_ms=0.5, rate=None).up() if "netem" in command]
    assert all(command[7] == "root" for command in alone)


def test_the_mtu_is_that_of_all_devices() -> None:
    commands = [" ".join(command) for command in plan(mtu=9000).up()]
    assert sum("mtu 9000" in command for command in commands) == 3  # Bridge and both cables.
    assert sum(command.count("mtu 9000") for command in commands) == 5


def test_the_hosts_file_names_all_nodes() -> None:
    lines = plan().hosts_file().splitlines()
    assert lines[0] == "127.0.0.1 localhost"
    assert "10.77.0.1 node0" in lines and "10.77.0.2 node1" in lines


@pytest.mark.parametrize(
    ("text", "bits"), [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("200mbit", 2e8), ("64kbit", 6.4e4)]
)
def test_rates(text: str, bits: float) -> None:
    assert bits_per_second(text) == bits


@pytest.mark.parametrize("text", ["", "1", "1Gbit", "1 gbit", "-1gbit", "0gbit", "1gbit "])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        bits_per_second(text)


# --- Where it is not possible


def test_it_says_all_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = {"ip": None, "tc": None, "unshare": "/usr/bin/unshare"}
    monkeypatch.setattr(shutil, "which", found.__getitem__)
    monkeypatch.setattr(sys, "argv", ["run.py", "collectives"])
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert run.main() == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    error = capsys.readouterr().err
    assert "root" in error and "sudo" in error
    assert "'ip', from the package iproute2" in error and "'tc'" in error
    assert "unshare" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nodes", "0", "true"],
        ["--nodes", "x", "true"],
        ["--rate", "fast", "true"],
        ["--latency", "-1", "true"],
        [],
    ],
)
def test_bad_options_are_refused_before_anything_is_built(arguments: list[str]) -> None:
    finished = subprocess.run(
        [sys.executable, PROGRAM, *arguments], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 2
    assert "usage: run.py" in finished.stderr


# --- The running cluster


def leftovers() -> list[str]:
    """Names of any cluster, running or not."""
    return [name for name in run._existing_names() if NAME.match(name)]


def start(*arguments: str, mpi: bool = False) -> subprocess.Popen[str]:
    how = [] if mpi else ["--no-mpi"]
    return subprocess.Popen(
        [sys.executable, PROGRAM, *how, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def cluster() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts run.py where this machine can; elsewhere holds it to saying why it cannot."""
    probe = start("--nodes", "1", "--ranks-per-node", "1", "true")
    _, error = probe.communicate(timeout=60)
    if probe.returncode != 0:
        assert probe.returncode == 2
        assert re.search(r"cluster: .*(needs|failed: )", error), error
        pytest.skip(error.strip())
    started: list[subprocess.Popen[str]] = []

    def start_and_remember(*arguments: str, mpi: bool = False) -> subprocess.Popen[str]:
        started.append(start(*arguments, mpi=mpi))
        return started[-1]

    yield start_and_remember
    for process in started:  # Those of a test that failed half-way.
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


@pytest.mark.parametrize("mpi", [False, True])
def test_ranks_find_themselves_on_nodes(
    cluster: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path, mpi: bool
) -> None:
    # With mpi: where mpirun is missing, run.py starts the ranks without it, to the same effect.
    script = tmp_path / "who.py"
    script.write_text(
        textwrap.dedent("""
            import os, socket
            names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR".split()
            there = socket.gethostbyname("node1")
            line = " ".join([socket.gethostname(), there, *[os.environ[n] for n in names]])
            os.write(1, (line + "\\n").encode())
        """)
    )
    process = cluster("--nodes", "2", "--ranks-per-node", "2", str(script), mpi=mpi)
    out, error = process.communicate(timeout=90)
    assert process.returncode == 0, error
    assert sorted(out.split("\n")[:-1]) == [
        f"node{rank // 2} 10.77.0.2 {rank} 4 {rank % 2} 2 10.77.0.1" for rank in range(4)
    ]
    assert "node1 sent" in error


def test_what_crosses_is_counted_by_the_interface_and_held_to_the_rate(
    cluster: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "send.py"
    script.write_text(
        textwrap.dedent("""
            import os, socket, time
            if os.environ["RANK"] == "0":
                with socket.create_server(("10.77.0.1", 5000)) as server:
                    connection, _ = server.accept()
                    begin, total = time.perf_counter(), 0
                    while data := connection.recv(1 << 20):
                        total += len(data)
                    print("rate", 8e-6 * total / (time.perf_counter() - begin), total)
            else:
                for attempt in range(100):
                    try:
                        connection = socket.create_connection(("10.77.0.1", 5000))
                        break
                    except OSError:
                        time.sleep(0.05)
                connection.sendall(bytes(6 << 20))
        """)
    )
    process = cluster("--nodes", "2", "--ranks-per-node", "1", "--rate", "50mbit", str(script))
    out, error = process.communicate(timeout=90)
    assert process.returncode == 0, error
    _, megabits, total = out.split()
    assert int(total) == 6 << 20
    assert 35 < float(megabits) < 54  # 50 and what the burst adds; a loaded machine is slower.
    sent = {node: float(mib) for node, mib in re.findall(r"node(\d) sent ([\d.]+) MiB", error)}
    assert 6.0 <= sent["1"] < 6.6 and sent["0"] < 0.5


def test_the_first_failure_ends_the_run_with_its_code(
    cluster: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import os, sys, time\nos.environ['RANK'] == '1' and sys.exit(7)\n" + WAIT)
    begin = time.monotonic()
    process = cluster("--nodes", "2", "--ranks-per-node", "1", str(script))
    process.communicate(timeout=60)
    assert process.returncode == 7
    assert time.monotonic() - begin < 30
    assert not _of(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(
    cluster: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path, number: signal.Signals
) -> None:
    process, ranks = _waiting(cluster, tmp_path)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}; nothing is left" in error
    assert not _of(process)
    assert not [pid for pid in ranks if _is_alive(pid)]


def test_the_next_run_removes_what_a_killed_one_left(
    cluster: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path
) -> None:
    process, ranks = _waiting(cluster, tmp_path)
    process.kill()
    process.wait()
    assert _of(process)
    _, error = cluster("--nodes", "1", "--ranks-per-node", "1", "true").communicate(timeout=60)
    assert f"removed what the killed run {process.pid} left" in error
    assert not _of(process)
    assert not [pid for pid in ranks if _is_alive(pid)]
    process.communicate()


def test_a_running_cluster_is_left_alone_by_another(
    cluster: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path
) -> None:
    process, ranks = _waiting(cluster, tmp_path)
    before = _of(process)
    other = cluster("--nodes", "2", "--ranks-per-node", "1", "true")
    _, error = other.communicate(timeout=60)
    assert other.returncode == 0, error
    assert _of(process) == before and all(map(_is_alive, ranks))
    process.terminate()
    process.communicate(timeout=60)


def _waiting(
    cluster: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path
) -> tuple[subprocess.Popen[str], list[int]]:
    """A cluster of two ranks that wait, and their process ids."""
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    process = cluster("--nodes", "2", "--ranks-per-node", "1", str(script))
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    pids = []
    for node in range(2):
        name = Plan(str(process.pid), 2, 1).namespace(node)
        done = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        )
        pids += [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2
    return process, pids


def _of(process: subprocess.Popen[str]) -> list[str]:
    return [name for name in leftovers() if NAME.match(name)[1] == str(process.pid)]  # type: ignore[index]


def _is_alive(pid: int) -> bool:
    """A zombie of this container's init is dead."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
