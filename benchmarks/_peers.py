"""What hopshard is measured beside, in the same processes.

Open MPI's own calls through ctypes, and the line rate of the network as one plain stream reaches
it. Next: collectives.py.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import socket
import statistics
import threading
import time
from typing import Any, Final

import torch
import torch.distributed as dist

_IN_PLACE: Final = ctypes.c_void_p(1)
_UNDEFINED: Final = -32766
_THREAD_MULTIPLE: Final = 3
_LIBRARY: Final = "libmpi.so.40"
_HANDLES: Final = {torch.float32: "ompi_mpi_float", torch.float64: "ompi_mpi_double"}
_STREAM_S: Final = 1.5
_STREAM_CHUNK_BYTES: Final = 1 << 20


class OpenMpi:
    """Open MPI's collectives over all ranks of mpirun, or over the first few.

    Collective: every method, and the constructor.
    """

    def __init__(self, num_ranks: int | None = None) -> None:
        # Open MPI opens its components itself, and they look for its symbols.
        self._library = ctypes.CDLL(_LIBRARY, mode=ctypes.RTLD_GLOBAL)
        flag = ctypes.c_int()
        self._call("MPI_Initialized", ctypes.byref(flag))
        if not flag.value:
            provided = ctypes.c_int()
            # hopshard's own backend may use MPI from a thread of its own in this process.
            self._call("MPI_Init_thread", None, None, _THREAD_MULTIPLE, ctypes.byref(provided))
        self._communicator = self._handle("ompi_mpi_comm_world")
        if num_ranks is not None:
            self._take_part(num_ranks)

    @staticmethod
    def why_not() -> str | None:
        """None if it can be measured in this process."""
        if "OMPI_COMM_WORLD_SIZE" not in os.environ:
            return "the ranks were not started by mpirun"
        try:
            ctypes.CDLL(_LIBRARY, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            return str(error)
        return None

    @staticmethod
    def can_reduce(dtype: torch.dtype) -> bool:
        return dtype in _HANDLES

    @property
    def version(self) -> str:
        text, length = ctypes.create_string_buffer(256), ctypes.c_int()
        self._call("MPI_Get_library_version", text, ctypes.byref(length))
        return text.value.decode().split(",")[0]

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        """In place: ``part`` is this rank's slice of ``output``."""
        count, byte = _count(part.numel() * part.element_size()), self._handle("ompi_mpi_byte")
        self._call(
            "MPI_Allgather", _IN_PLACE, 0, byte, _pointer(output), count, byte, self._communicator
        )

    def reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor) -> None:
        kind, add = self._handle(_HANDLES[whole.dtype]), self._handle("ompi_mpi_op_sum")
        count = _count(output.numel())
        self._call(
            "MPI_Reduce_scatter_block",
            *(_pointer(whole), _pointer(output), count, kind, add, self._communicator),
        )

    def all_reduce(self, tensor: torch.Tensor) -> None:
        kind, add = self._handle(_HANDLES[tensor.dtype]), self._handle("ompi_mpi_op_sum")
        self._call(
            "MPI_Allreduce",
            *(_IN_PLACE, _pointer(tensor), _count(tensor.numel()), kind, add, self._communicator),
        )

    def finish(self) -> None:
        """Call once, after everything else that uses MPI; mpirun wants to hear of it."""
        flag = ctypes.c_int()
        self._call("MPI_Finalized", ctypes.byref(flag))
        if not flag.value:
            self._call("MPI_Finalize")

    def _take_part(self, num_ranks: int) -> None:
        rank, made = ctypes.c_int(), ctypes.c_void_p()
        self._call("MPI_Comm_rank", self._communicator, ctypes.byref(rank))
        color = 0 if rank.value < num_ranks else _UNDEFINED
        self._call("MPI_Comm_split", self._communicator, color, rank.value, ctypes.byref(made))
        self._communicator = made

    def _handle(self, symbol: str) -> ctypes.c_void_p:
        """A predefined handle is the address of an object of the library."""
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self._library, symbol)))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} returned {code}")


def measure_line_rate(node: int, num_nodes: int, local_rank: int) -> float | None:
    """Bytes per second of one TCP stream out of every node and one into it, both at once.

    The first rank of each node sends to the next node's. None on a single node.

    Collective: all ranks.
    """
    if num_nodes == 1:
        return None
    is_first = local_rank == 0
    listener = socket.create_server(("", 0)) if is_first else None
    address = None
    if listener is not None:
        address = (node, _own_address(), listener.getsockname()[1])
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, address)
    rate = torch.zeros(1, dtype=torch.float64)
    if listener is not None:
        places = {place[0]: place[1:] for place in addresses if place is not None}
        rate[0] = _stream(listener, places[(node + 1) % num_nodes])
    dist.barrier()
    rates = [torch.zeros_like(rate) for _ in addresses]
    dist.all_gather(rates, rate)
    return statistics.median(value.item() for value in rates if value.item() > 0)


def interface_bytes() -> tuple[int, int]:
    """What this network namespace sent and received so far, loopback aside."""
    sent = received = 0
    for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() != "lo":
            numbers = counters.split()
            received += int(numbers[0])
            sent += int(numbers[8])
    return sent, received


def _stream(listener: socket.socket, target: tuple[str, int]) -> float:
    """Sends for a while, and measures what arrives meanwhile."""
    sender = threading.Thread(target=_send, args=(target,), daemon=True)
    sender.start()
    listener.settimeout(30)
    connection, _ = listener.accept()
    buffer = bytearray(_STREAM_CHUNK_BYTES)
    with listener, connection:
        connection.settimeout(30)
        # What the first moments bring is buffers that were empty.
        warm = time.perf_counter() + 0.2 * _STREAM_S
        while time.perf_counter() < warm and connection.recv_into(buffer):
            pass
        total, begin, end = 0, time.perf_counter(), 0.0
        while count := connection.recv_into(buffer):
            total += count
            end = time.perf_counter()
    sender.join()
    return total / (end - begin)


def _send(target: tuple[str, int]) -> None:
    chunk = bytes(_STREAM_CHUNK_BYTES)
    with socket.create_connection(target, timeout=30) as connection:
        end = time.perf_counter() + _STREAM_S
        while time.perf_counter() < end:
            connection.sendall(chunk)


def _own_address() -> str:
    """The address that other nodes reach this one at: that of the way to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _count(number: int) -> ctypes.c_int:
    if number > 2**31 - 1:
        raise ValueError(f"Open MPI 4 counts to 2^31 - 1, not {number}")
    return ctypes.c_int(number)
