#!/usr/bin/env python3
"""A cluster in one machine: runs a program as the ranks of several nodes on a slow network.

Each node is a network namespace with a host name of its own; a bridge joins them and ``tc tbf``
limits what enters and leaves a node. Processes, memory and /dev/shm stay common: nodes differ by
name and network only. Needs root and iproute2. How to read what it prints: benchmarks/README.md.

    sudo python benchmarks/cluster/run.py --nodes 2 --ranks-per-node 2 --rate 1gbit \
        collectives --mib 32
    sudo python benchmarks/cluster/run.py --nodes 2 --ranks-per-node 1 my_script.py --my-option
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # For the imports below.

from benchmarks._launch import base_environment, mpi_options, stop, with_torch_names

BENCHMARKS: Final = pathlib.Path(__file__).resolve().parents[1]
OWN: Final = ("collectives", "step_time")  # Those that note the network that they ran on.

# Whoever holds the lock on <token>.lock owns the names that begin with hsc<token>: what a killed
# run left is recognised by a lock that is free, whatever became of its process id.
LOCK_FOLDER: Final = pathlib.Path("/run/hopshard_cluster")
PREFIX: Final = "hsc"
NAME: Final = re.compile(rf"^{PREFIX}(\d+)(?:br|n\d+|v\d+)$")

MASTER_PORT: Final = 29500  # The namespaces are new: no port is taken in them.
INTERFACE: Final = "eth0"
MIN_BURST_BYTES: Final = 128 * 1024  # Above the 64 KiB of a segment that is cut late.
BURST_S: Final = 0.001
QUEUE_MS: Final = 20
STOP_LIMIT_S: Final = 8.0
UNITS: Final = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class ClusterError(RuntimeError):
    """The cluster cannot be built here; the text says what is missing."""


class Stopped(BaseException):
    """A signal asked this run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Plan:
    """What to build. Pure: commands come from here, so that they can be read and tested."""

    token: str
    nodes: int
    ranks_per_node: int
    rate: str | None = None
    """As tc writes it; None is as fast as the machine."""
    mtu: int | None = None
    latency_ms: float | None = None

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def bridge(self) -> str:
        return f"{PREFIX}{self.token}br"

    def namespace(self, node: int) -> str:
        return f"{PREFIX}{self.token}n{node}"

    def link(self, node: int) -> str:
        """The bridge's end of a node's cable."""
        return f"{PREFIX}{self.token}v{node}"

    @staticmethod
    def host(node: int) -> str:
        return f"node{node}"

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.{node // 250}.{node % 250 + 1}"

    def hosts_file(self) -> str:
        lines = ["127.0.0.1 localhost"]
        for node in range(self.nodes):
            # The second form is how a socket that speaks IPv6 too names its peer.
            lines += [f"{self.address(node)} {self.host(node)}"]
            lines += [f"::ffff:{self.address(node)} {self.host(node)}"]
        return "\n".join(lines) + "\n"

    def describe(self) -> str:
        text = f"{self.nodes} x {self.ranks_per_node}, {self.rate or 'unlimited rate'} per node"
        if self.latency_ms is not None:
            text += f", {self.latency_ms:g} ms"
        return text + (f", MTU {self.mtu}" if self.mtu is not None else "")

    def up(self) -> list[list[str]]:
        """Commands that build it, in order."""
        mtu = [] if self.mtu is None else ["mtu", str(self.mtu)]
        commands = [["ip", "link", "add", self.bridge, *mtu, "type", "bridge"]]
        commands.append(["ip", "link", "set", self.bridge, "up"])
        for node in range(self.nodes):
            name, link = self.namespace(node), self.link(node)
            inside = ["ip", "-n", name]
            cable = ["type", "veth", "peer", "name", INTERFACE, *mtu, "netns", name]
            commands += [
                ["ip", "netns", "add", name],
                ["ip", "link", "add", link, *mtu, *cable],
                ["ip", "link", "set", link, "master", self.bridge, "up"],
                [*inside, "addr", "add", f"{self.address(node)}/16", "dev", INTERFACE],
                [*inside, "link", "set", INTERFACE, "up"],
                [*inside, "link", "set", "lo", "up"],
            ]
            # Out of the node, and into it: several senders to one node share its link.
            commands += self._shape(["tc", "-n", name], INTERFACE)
            commands += self._shape(["tc"], link, delay=False)
        return commands

    def _shape(self, tc: list[str], device: str, delay: bool = True) -> list[list[str]]:
        commands = []
        add = [*tc, "qdisc", "add", "dev", device]
        parent = ["root"]
        if self.rate is not None:
            burst = max(MIN_BURST_BYTES, int(bits_per_second(self.rate) / 8 * BURST_S))
            tbf = ["tbf", "rate", self.rate, "burst", str(burst), "latency", f"{QUEUE_MS}ms"]
            commands.append([*add, *parent, "handle", "1:", *tbf])
            parent = ["parent", "1:1"]
        if delay and self.latency_ms is not None:
            # One way: half of a round trip is in each node's own direction out.
            netem = ["netem", "delay", f"{self.latency_ms:g}ms", "limit", "100000"]
            commands.append([*add, *parent, "handle", "10:", *netem])
        return commands


def bits_per_second(rate: str) -> float:
    """Reads a rate as tc writes it.

    >>> bits_per_second("2.5gbit")
    2500000000.0

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{rate!r} is not a rate such as 1gbit, 2.5gbit or 200mbit")
    return float(match[1]) * UNITS[match[2]]


# --- The machine


@dataclass
class Cluster:
    """The running thing. Use as a context manager: leaving it removes everything."""

    plan: Plan
    lock: IO[str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Cluster:
        try:
            for command in self.plan.up():
                _run(command)
            for node in range(self.plan.nodes):
                folder = pathlib.Path("/etc/netns") / self.plan.namespace(node)
                folder.mkdir(parents=True)
                (folder / "hosts").write_text(self.plan.hosts_file())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes of the cluster and removes its network. A second call is harmless."""
        with _signals_ignored():
            stop(self.processes, STOP_LIMIT_S)
            remove_names(self.plan.token)
            self.lock.close()
            pathlib.Path(self.lock.name).unlink(missing_ok=True)

    def sent_and_received_bytes(self, node: int) -> tuple[int, int]:
        """What left and reached a node so far, as its network interface counted."""
        name = self.plan.namespace(node)
        text = _run(["ip", "-n", name, "-s", "-j", "link", "show", INTERFACE])
        counters = json.loads(text)[0]["stats64"]
        return counters["tx"]["bytes"], counters["rx"]["bytes"]

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """The command as it is run on a node: its network, host name and hosts file."""
        rename = f'hostname {self.plan.host(node)} && exec "$@"'
        enter = ["ip", "netns", "exec", self.plan.namespace(node), "unshare", "--uts"]
        return [*enter, "sh", "-c", rename, "sh", *command]

    def run(self, command: Sequence[str], mpirun: str | None) -> int:
        """Starts the ranks and waits for them; the exit code of the first that failed."""
        environment = {
            **base_environment(),
            "MASTER_ADDR": self.plan.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "FI_TCP_IFACE": INTERFACE,
        }
        if mpirun is not None:
            with tempfile.TemporaryDirectory(prefix="hopshard_cluster_") as folder:
                return self._run_with_mpi(command, environment, mpirun, pathlib.Path(folder))
        for node in range(self.plan.nodes):
            for local_rank in range(self.plan.ranks_per_node):
                place = {
                    "RANK": str(node * self.plan.ranks_per_node + local_rank),
                    "WORLD_SIZE": str(self.plan.size),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(self.plan.ranks_per_node),
                }
                self._start(self.inside(node, command), {**environment, **place})
        return self._wait()

    def _run_with_mpi(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        mpirun: str,
        folder: pathlib.Path,
    ) -> int:
        """By mpirun, so that Open MPI can be measured in the same processes."""
        agent = folder / "agent"  # Stands in for ssh: drops options, takes HOST, runs the rest.
        namespace = f"{PREFIX}{self.plan.token}n"
        agent.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
            f'exec ip netns exec "{namespace}${{host#node}}" '
            'unshare --uts sh -c "hostname $host && $*"\n'
        )
        agent.chmod(0o755)
        hosts = [
            f"{self.plan.host(node)}:{self.plan.ranks_per_node}" for node in range(self.plan.nodes)
        ]
        options = ["--mca", "plm", "rsh", "--mca", "plm_rsh_agent", str(agent)]
        options += ["--mca", "oob_tcp_if_include", INTERFACE]
        launch = [mpirun, *options, *mpi_options(INTERFACE)]
        launch += ["-H", ",".join(hosts), "-np", str(self.plan.size)]
        self._start(self.inside(0, [*launch, *with_torch_names(command)]), environment)
        return self._wait()

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        self.processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))

    def _wait(self) -> int:
        """Until all have ended well, or one has not; the rest is ended by ``close``."""
        while True:
            codes = [process.poll() for process in self.processes]
            failed = [code for code in codes if code not in (None, 0)]
            if failed:
                return failed[0] if failed[0] > 0 else 128 - failed[0]
            if None not in codes:
                return 0
            time.sleep(0.02)


def check_machine() -> None:
    """Says what keeps this machine from emulating a cluster.

    Raises:
        ClusterError: naming everything that is missing.
    """
    missing = []
    if sys.platform != "linux":
        missing.append("Linux: network namespaces are its own")
    elif os.geteuid() != 0:
        missing.append("root: network namespaces and bridges need CAP_NET_ADMIN; try sudo")
    for tool, package in {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}.items():
        if shutil.which(tool) is None:
            missing.append(f"the command {tool!r}, from the package {package}")
    if missing:
        raise ClusterError("an emulated cluster needs " + "; and ".join(missing))


def claim_token() -> tuple[str, IO[str]]:
    """A token that no other run has, with the lock that proves it."""
    LOCK_FOLDER.mkdir(parents=True, exist_ok=True)
    number = os.getpid()
    while True:
        lock = (LOCK_FOLDER / f"{number}.lock").open("w")
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return str(number), lock
        lock.close()
        number += 100_000


def remove_leftovers() -> list[str]:
    """Removes what killed runs left behind; returns their tokens. Running ones are not touched."""
    dead = []
    for token in sorted({match[1] for match in map(NAME.match, _existing_names()) if match}):
        path = LOCK_FOLDER / f"{token}.lock"
        LOCK_FOLDER.mkdir(parents=True, exist_ok=True)
        with path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            remove_names(token)
            path.unlink(missing_ok=True)
        dead.append(token)
    return dead


def remove_names(token: str) -> None:
    """Ends the processes of a token's namespaces, then removes every name that begins with it."""
    mine = [name for name in _existing_names() if (m := NAME.match(name)) and m[1] == token]
    namespaces = [name for name in mine if re.search(r"n\d+$", name)]
    for namespace in namespaces:
        for pid in _run(["ip", "netns", "pids", namespace], check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    # Links first: while a namespace dies, its end of a cable lingers.
    for name in mine:
        if name not in namespaces:
            _run(["ip", "link", "del", name], check=False)
    for namespace in namespaces:
        _run(["ip", "netns", "del", namespace], check=False)
    for folder in pathlib.Path("/etc/netns").glob(f"{PREFIX}{token}n*"):
        shutil.rmtree(folder, ignore_errors=True)


def _existing_names() -> list[str]:
    """Namespaces, links and folders of /etc/netns."""
    links = json.loads(_run(["ip", "-j", "link", "show"]) or "[]")
    names = [link["ifname"] for link in links]
    for folder in ("/run/netns", "/var/run/netns", "/etc/netns"):
        with contextlib.suppress(FileNotFoundError):
            names += os.listdir(folder)
    return sorted(set(names))


def _run(command: Sequence[str], check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        text = f"'{' '.join(command)}' failed: {done.stderr.strip()}"
        if "netem" in command:
            text += "; this kernel has no netem, without which --latency is not possible"
        elif "Operation not permitted" in done.stderr:
            text += "; a container needs --cap-add NET_ADMIN --cap-add SYS_ADMIN"
        raise ClusterError(text)
    return done.stdout


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the network behind."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _raise_stopped(number: int, frame: Any) -> None:
    raise Stopped(number)


# --- The command


def main() -> int:
    arguments = parse_arguments()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise_stopped)
    try:
        check_machine()
        for token in remove_leftovers():
            print(f"cluster: removed what the killed run {token} left", file=sys.stderr)
        token, lock = claim_token()
        plan = Plan(
            token,
            arguments.nodes,
            arguments.ranks_per_node,
            None if arguments.rate == "none" else arguments.rate,
            arguments.mtu,
            arguments.latency_ms,
        )
        command = make_command(arguments, plan)
        mpirun = None if arguments.no_mpi else shutil.which("mpirun")
        with Cluster(plan, lock) as cluster:
            how = "mpirun" if mpirun else "ip netns exec, without Open MPI"
            print(f"cluster: {plan.describe()}; ranks started by {how}", file=sys.stderr)
            before = [cluster.sent_and_received_bytes(node) for node in range(plan.nodes)]
            code = cluster.run(command, mpirun)
            for node in range(plan.nodes):
                sent, received = (
                    after - first
                    for after, first in zip(
                        cluster.sent_and_received_bytes(node), before[node], strict=True
                    )
                )
                print(
                    f"cluster: {plan.host(node)} sent {sent / 2**20:,.1f} MiB and received "
                    f"{received / 2**20:,.1f} MiB, by its interface",
                    file=sys.stderr,
                )
            return code
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"cluster: stopped by {stopped}; nothing is left", file=sys.stderr)
        return 128 + stopped.number


def make_command(arguments: argparse.Namespace, plan: Plan) -> list[str]:
    """One rank's command line."""
    program, *rest = arguments.program
    if program in OWN:
        network = ["--network", plan.describe()]
        return [sys.executable, str(BENCHMARKS / f"{program}.py"), *rest, *network]
    if program.endswith(".py"):
        if not pathlib.Path(program).is_file():
            raise ClusterError(f"there is no script '{program}' (in {os.getcwd()})")
        return [sys.executable, program, *rest]
    if shutil.which(program) is None:
        raise ClusterError(f"'{program}' is neither a script nor a command on the PATH")
    return [program, *rest]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        usage="run.py [--nodes N] [--ranks-per-node K] [--rate RATE] [--mtu BYTES] "
        "[--latency MS] [--no-mpi] (collectives | step_time | SCRIPT.py | COMMAND) [ARGS ...]",
    )
    parser.add_argument("--nodes", type=_count, default=2)
    parser.add_argument("--ranks-per-node", type=_count, default=2)
    parser.add_argument(
        "--rate", type=_rate, default="1gbit", help="of each node, both ways; none: not limited"
    )
    parser.add_argument("--mtu", type=_count, help="bytes of a packet (default 1500)")
    parser.add_argument(
        "--latency",
        dest="latency_ms",
        type=_milliseconds,
        metavar="MS",
        help="one way between nodes; needs the kernel's netem",
    )
    parser.add_argument(
        "--no-mpi", action="store_true", help="start the ranks without mpirun, as torchrun would"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.program:
        parser.error("nothing to run; give 'collectives', 'step_time', a script or a command")
    return arguments


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or not 1 <= int(text) <= 9000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 9000")
    return int(text)


def _rate(text: str) -> str:
    if text != "none":
        try:
            bits_per_second(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _milliseconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds")
    return float(text)


if __name__ == "__main__":
    sys.exit(main())
