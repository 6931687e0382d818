"""``hopshard doctor``: what this machine offers, what it lacks, and how to get it.

Every check stands alone: one that cannot be carried out says so and ends none of the others, and a
bare machine is a healthy one. Exit code 0, always. Next: tune.py.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import ctypes.util
import fcntl
import json
import os
import pathlib
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hopshard import _C
from hopshard.config import Config
from hopshard.errors import ConfigError
from hopshard.launch_env import detect_launch
from hopshard.transports import has_efa_device

Status = Literal["ok", "missing", "warning", "info"]

FORMAT_VERSION: Final = 1
_SMALL_SHM_BYTES: Final = 1 << 30  # Containers start with 64 MiB.
_SIOCGIFADDR: Final = 0x8915
_CHILD_LIMIT_S: Final = 20
_MARKS: Final = {"ok": "[green]✓[/]", "missing": "–", "warning": "[bold yellow]![/]", "info": " "}

# How to get a backend that is not there; the reason itself comes from the backend.
_HOW_TO_GET: Final = {
    "shm": "Linux on x86-64, and CPU tensors",
    "c10d": "a torch that was built with torch.distributed",
    "mpi": "install Open MPI 4.1 with its headers (Debian: libopenmpi-dev), build hopshard again, "
    "and start the ranks by mpirun",
    "ofi": "install libfabric 1.17 or newer with its headers (Debian: libfabric-dev; on AWS it "
    "comes with the EFA installer) and build hopshard again",
    "nccl": "a machine with an NVIDIA GPU and its driver, and a CUDA build of torch, which brings "
    "NCCL; then build hopshard again",
}


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    section: str
    name: str
    status: Status
    value: str
    advice: str = ""
    """What to do, if there is anything to be done."""


def add_parser(commands: Any) -> None:
    """Adds ``hopshard doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="say what this machine offers: backends, devices, limits, and how to get the rest",
        description="Examines this machine. The exit code is 0 whatever is missing; a machine "
        "without MPI, libfabric and CUDA trains too.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Prints the report; always 0."""
    checks = examine()
    if arguments.json:
        print(json.dumps({"version": FORMAT_VERSION, "checks": [asdict(c) for c in checks]}))
    else:
        show(checks)
    return 0


def examine() -> list[Check]:
    """All checks, in the order in which they are shown."""
    parts: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("versions", _versions),
        ("backends", _backends),
        ("devices", _devices),
        ("transports", _open_mpi),
        ("transports", _libfabric),
        ("memory", _memory),
        ("cores", _cores),
        ("network", _network),
        ("this rank", _place),
        ("settings", _settings),
    ]
    checks: list[Check] = []
    for section, part in parts:
        try:
            checks += part()
        except Exception as error:  # The report is most wanted where something is odd.
            text = f"could not be examined: {type(error).__name__}: {error}"
            checks.append(Check(section, part.__name__.strip("_"), "warning", text))
    return checks


def show(checks: list[Check]) -> None:
    """Prints the checks as a table."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = ""
    for check in checks:
        if check.section != section:
            if section:
                table.add_row("", "", "")
            section = check.section
            table.add_row("", f"[bold]{section}[/]", "")
        text = escape(check.value)
        if check.advice:
            text += f"\n[dim]→ {escape(check.advice)}[/]"
        table.add_row(_MARKS[check.status], f"  {escape(check.name)}", text)
    Console(highlight=False).print(table)


# --- The checks


def _versions() -> Iterator[Check]:
    yield Check("versions", "hopshard", "info", f"{_C.__version__} (build {_C.build_id})")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Check("versions", "torch", "info", f"{torch.__version__} ({cuda})")
    yield Check("versions", "python", "info", f"{platform.python_version()} ({sys.executable})")
    yield Check("versions", "system", "info", platform.platform())


def _backends() -> Iterator[Check]:
    for backend in _C.backends():
        if backend.why_not is None:
            yield Check("backends", backend.name, "ok", f"available: {backend.summary}")
        else:
            text = f"not available: {backend.why_not}"
            advice = _HOW_TO_GET.get(backend.name, "")
            yield Check("backends", backend.name, "missing", text, advice)


def _devices() -> Iterator[Check]:
    if not torch.cuda.is_available():
        why = "no NVIDIA GPU that torch can use"
        if torch.version.cuda is None:
            why = "torch was built without CUDA"
        yield Check("devices", "GPUs", "missing", f"none: {why}; ranks train on the CPU")
    else:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            yield Check("devices", f"GPU {index}", "ok", text)
    yield Check("devices", "NCCL", *_nccl_version())
    devices = [path.name for path in pathlib.Path("/sys/class/infiniband").glob("*")]
    if has_efa_device():
        yield Check("devices", "EFA", "ok", ", ".join(sorted(devices)))
    else:
        other = f"; other RDMA devices: {', '.join(sorted(devices))}" if devices else ""
        yield Check("devices", "EFA", "missing", f"no Elastic Fabric Adapter{other}")


def _nccl_version() -> tuple[Status, str]:
    try:
        version = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError, ImportError):
        return "missing", "torch was built without NCCL"
    return "ok" if torch.cuda.is_available() else "info", ".".join(map(str, version))


def _open_mpi() -> Iterator[Check]:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        text = "no mpirun on the PATH"
        yield Check("transports", "Open MPI", "missing", text)
        return
    first_line = (_output_of([mpirun, "--version"]).splitlines() or ["no version"])[0]
    yield Check("transports", "Open MPI", "ok", f"{first_line} ({mpirun})")


def _libfabric() -> Iterator[Check]:
    name = ctypes.util.find_library("fabric") or "libfabric.so.1"
    try:
        version = ctypes.CDLL(name).fi_version
    except (OSError, AttributeError):
        yield Check("transports", "libfabric", "missing", "no libfabric that can be loaded")
        return
    version.restype = ctypes.c_uint32
    number = int(version())
    yield Check("transports", "libfabric", "ok", f"API {number >> 16}.{number & 0xFFFF} ({name})")
    if shutil.which("fi_info") is None:
        text = "not listed: the command fi_info is missing"
        yield Check("transports", "providers", "info", text, "Debian: libfabric-bin")
        return
    providers = re.findall(r"^(\S+?):?\s*$", _output_of(["fi_info", "-l"]), re.MULTILINE)
    yield Check("transports", "providers", "info", ", ".join(providers) or "none")


def _memory() -> Iterator[Check]:
    yield Check("memory", "/dev/shm", *_shared_memory())
    yield Check("memory", "memfd", *_memfd())
    yield Check("memory", "process_vm", *_process_vm())
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Check("memory", "memlock", "ok", "unlimited")
    else:
        text = f"{_size(soft)} can be locked"
        if has_efa_device():
            advice = "EFA registers memory: raise it with 'ulimit -l unlimited'"
            yield Check("memory", "memlock", "warning", text, advice)
        else:
            yield Check("memory", "memlock", "info", text)


def _shared_memory() -> tuple[Status, str, str]:
    try:
        volume = os.statvfs("/dev/shm")
    except OSError as error:
        return "warning", f"not there ({error.strerror}); shm takes anonymous memory", ""
    size = volume.f_frsize * volume.f_blocks
    text = f"{_size(size)}, {_size(volume.f_frsize * volume.f_bavail)} free"
    if not os.access("/dev/shm", os.W_OK):
        return "warning", f"{text}, but it cannot be written to", "run as a user who may"
    if size < _SMALL_SHM_BYTES:
        return "warning", text, "small, as in containers: start them with --shm-size=8g"
    return "ok", text, ""


def _memfd() -> tuple[Status, str]:
    try:
        os.close(os.memfd_create("hopshard_doctor"))
    except (OSError, AttributeError) as error:
        return "warning", f"not permitted: {error}"
    return "ok", "anonymous shared memory can be made"


# Run by a process that is no ancestor of ours, as ranks are to each other.
_READ_PEER: Final = """
import ctypes, os, sys
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
pid, address = int(sys.argv[1]), int(sys.argv[2])
buffer = ctypes.create_string_buffer(8)
here, there = Piece(ctypes.addressof(buffer), 8), Piece(address, 8)
libc = ctypes.CDLL(None, use_errno=True)
read = libc.process_vm_readv
read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong,
                 ctypes.c_ulong]
read.restype = ctypes.c_ssize_t
got = read(pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
print(buffer.raw.decode() if got == 8 else "errno " + os.strerror(ctypes.get_errno()))
"""


def _process_vm() -> tuple[Status, str, str]:
    """Whether one rank may read another's memory: buffers that are not registered need it."""
    secret = ctypes.create_string_buffer(b"hopshard", 8)
    command = [sys.executable, "-I", "-S", "-c", _READ_PEER, str(os.getpid())]
    answer = _output_of([*command, str(ctypes.addressof(secret))]).strip()
    if answer == "hopshard":
        return "ok", "a rank may read another's memory", ""
    scope = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
    advice = "containers need --cap-add SYS_PTRACE"
    with contextlib.suppress(OSError):
        if scope.read_text().strip() != "0":
            advice = f"sysctl kernel.yama.ptrace_scope=0, or {advice}"
    reason = answer.removeprefix("errno ") or "the check did not answer"
    text = f"not permitted: {reason}; buffers that are not registered cost one more copy"
    return "warning", text, advice


def _cores() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{cores} usable, load {os.getloadavg()[0]:.1f}"
    quota = _cpu_quota()
    if quota is not None:
        text += f", of which the control group grants {quota:g}"
    yield Check("cores", "cores", "info", text)
    with contextlib.suppress(ConfigError):  # "this rank" says what is wrong with the launcher.
        ranks = detect_launch(os.environ).local_size
        if ranks > (cores or 1):
            advice = "start at most one rank per core; latencies suffer most"
            yield Check("cores", "ranks here", "warning", f"{ranks} share {cores} cores", advice)


def _cpu_quota() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        limit, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    return None


def _network() -> Iterator[Check]:
    for _, name in sorted(socket.if_nameindex()):
        if name == "lo":
            continue
        folder = pathlib.Path("/sys/class/net") / name
        state = _text_of(folder / "operstate", "unknown")
        speed = _text_of(folder / "speed", "")
        words = [_address_of(name) or "no IPv4 address", state]
        if speed.isdigit() and int(speed) > 0:  # Virtual ones say -1 or nothing.
            words.append(f"{int(speed) / 1000:g} Gbit/s")
        words.append(f"MTU {_text_of(folder / 'mtu', '?')}")
        status: Status = "ok" if _address_of(name) and state != "down" else "info"
        yield Check("network", name, status, ", ".join(words))


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface[:15].encode())
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
        return socket.inet_ntoa(answer[20:24])


def _place() -> Iterator[Check]:
    given = os.environ.get("HOPSHARD_NODE_ID", "").strip()
    origin = "HOPSHARD_NODE_ID" if given else "the host name"
    yield Check("this rank", "node", "info", f"{given or socket.gethostname()} ({origin})")
    try:
        found = detect_launch(os.environ)
    except ConfigError as error:
        yield Check("this rank", "launcher", "warning", str(error))
        return
    text = f"{found.launcher}: rank {found.rank} of {found.size}"
    yield Check("this rank", "launcher", "info", text)


def _settings() -> Iterator[Check]:
    try:
        given = Config().with_environment(os.environ).given()
        _C.env()
    except ConfigError as error:
        yield Check("settings", "environment", "warning", str(error))
        return
    text = ", ".join(f"{name}={value!r}" for name, value in given.items())
    yield Check("settings", "environment", "info", text or "all at their defaults")


# --- Odds and ends


def _output_of(command: list[str]) -> str:
    """What a command prints, nothing if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHILD_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _text_of(path: pathlib.Path, default: str) -> str:
    try:
        return path.read_text().strip() or default
    except OSError:
        return default


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"
