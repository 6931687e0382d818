"""Carries the ranks' output to ours, line by line, with ``[rank]`` in front.

Where our stream is a terminal, rank 0 gets a pseudo terminal and its bytes pass unchanged, so that
progress bars and colours look as they do without a launcher; other ranks' lines go between.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import pty
import selectors
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

StreamName = Literal["stdout", "stderr"]

_CHUNK_BYTES: Final = 1 << 16
_MAX_PENDING_BYTES: Final = 1 << 20
_TAIL_LINES: Final = 30
_QUIET_S: Final = 0.1  # No output for so long after the ranks' end means that all is here.
_ERASE_LINE: Final = b"\r\x1b[K"


@dataclass
class _Source:
    rank: int
    name: StreamName
    read_fd: int
    write_fd: int
    raw: bool
    """Passed on byte by byte (rank 0 on a terminal)."""
    pending: bytearray = field(default_factory=bytearray)


class OutputPump:
    """One thread that reads all ranks' streams. Threads: ``last_lines`` after ``close`` only."""

    def __init__(self, num_ranks: int, *, prefix: bool) -> None:
        self._prefix = prefix
        self._tails = [collections.deque[str](maxlen=_TAIL_LINES) for _ in range(num_ranks)]
        self._targets: dict[StreamName, int] = {
            "stdout": sys.stdout.fileno(),
            "stderr": sys.stderr.fileno(),
        }
        # Both usually are the same terminal, so one flag: is its cursor inside rank 0's line?
        self._line_is_open = False
        self._open_line_is_bar = False
        self._closing = threading.Event()
        self._sources = {
            (rank, name): self._open(rank, name)
            for rank in range(num_ranks)
            for name in self._targets
        }
        self._thread = threading.Thread(target=self._pump, name="hopshard-output", daemon=True)
        self._wake_read, self._wake_write = os.pipe()

    def path(self, rank: int, name: StreamName) -> str:
        """A path that a child's stream can be opened at."""
        return f"/proc/self/fd/{self._sources[rank, name].write_fd}"

    def start(self) -> None:
        """Call when the ranks have been started: the ends for writing are theirs from here on."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._thread.start()
        if any(source.raw for source in self._sources.values()):
            with contextlib.suppress(ValueError):  # Not the main thread: sizes stay as they were.
                signal.signal(signal.SIGWINCH, lambda number, frame: self._copy_window_sizes())

    def close(self) -> None:
        """Passes on what is left and stops. Call when the ranks are gone."""
        for source in self._sources.values():
            os.close(source.write_fd)
        self._closing.set()
        os.write(self._wake_write, b"x")
        if self._thread.is_alive():
            self._thread.join()
        for source in self._sources.values():
            self._flush_pending(source)
            os.close(source.read_fd)
        if self._line_is_open:
            self._write("stdout", b"\n")
        os.close(self._wake_read)
        os.close(self._wake_write)

    def last_lines(self, rank: int) -> Sequence[str]:
        """The end of a rank's stderr."""
        return tuple(self._tails[rank])

    def _open(self, rank: int, name: StreamName) -> _Source:
        target = self._targets[name]
        if rank == 0 and os.isatty(target):
            read_fd, write_fd = pty.openpty()
            tty.setraw(write_fd)  # Our own terminal turns "\n" into "\r\n"; once is enough.
            source = _Source(rank, name, read_fd, write_fd, raw=True)
            self._copy_window_size(source)
        else:
            source = _Source(rank, name, *os.pipe(), raw=False)
        os.set_blocking(source.read_fd, False)
        return source

    def _copy_window_sizes(self) -> None:
        for source in self._sources.values():
            if source.raw:
                self._copy_window_size(source)

    def _copy_window_size(self, source: _Source) -> None:
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self._targets[source.name], termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(source.read_fd, termios.TIOCSWINSZ, size)

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            for source in self._sources.values():
                selector.register(source.read_fd, selectors.EVENT_READ, source)
            selector.register(self._wake_read, selectors.EVENT_READ, None)
            closing = False
            while len(selector.get_map()) > 0:
                ready = selector.select(timeout=_QUIET_S if closing else None)
                if self._closing.is_set() and not closing:
                    selector.unregister(self._wake_read)
                    closing = True
                for key, _ in ready:
                    if key.data is not None and not self._read(key.data):
                        selector.unregister(key.fd)
                if closing and not ready:
                    return  # The agent keeps ends for writing open: no end of stream comes.

    def _read(self, source: _Source) -> bool:
        """Passes on what is there; False at the end of the stream."""
        try:
            data = os.read(source.read_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # A pseudo terminal without writers says EIO instead of nothing.
            return False
        if not data:
            return False
        if source.raw:
            self._write(source.name, data)
            self._line_is_open = not data.endswith(b"\n")
            self._open_line_is_bar = b"\r" in data.rsplit(b"\n", 1)[-1]
        source.pending += data
        while (end := source.pending.find(b"\n")) >= 0:
            self._pass_line(source, bytes(source.pending[:end]))
            del source.pending[: end + 1]
        if len(source.pending) > _MAX_PENDING_BYTES:
            # A bar that only ever returns to the start of its line: what it showed last is enough.
            del source.pending[:-_CHUNK_BYTES]
        return True

    def _flush_pending(self, source: _Source) -> None:
        if source.pending:
            self._pass_line(source, bytes(source.pending))
            source.pending.clear()

    def _pass_line(self, source: _Source, line: bytes) -> None:
        # Of a bar's many states a line keeps the last, as a terminal would.
        visible = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
        if source.name == "stderr":
            self._tails[source.rank].append(visible.decode(errors="replace"))
        if source.raw:
            return
        text = (f"[{source.rank}] ".encode() if self._prefix else b"") + visible + b"\n"
        if self._line_is_open:
            text = (_ERASE_LINE if self._open_line_is_bar else b"\n") + text
            self._line_is_open = False
        self._write(source.name, text)

    def _write(self, name: StreamName, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._targets[name], rest) :]
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:  # The reader of our output is gone; the ranks need not care.
                return
