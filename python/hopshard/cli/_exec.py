"""Becomes one rank's program: ``python _exec.py <launcher's pid> <command ...>``.

Run by path with ``-I -S``, so that it costs milliseconds and imports nothing of hopshard. What it
sets survives exec: the kernel kills the rank if the launcher is gone, even by SIGKILL.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:  # It died before the line above.
            sys.exit(1)
    if os.environ.get("LOCAL_RANK") != "0":
        # Only one process can read the terminal.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    os.execvp(command[0], command)


main()
