"""SIGKILL to any rank in any phase: the others end, name it, and leave nothing behind.

The file is its own worker: it imports once and forks the ranks of every round, which makes a round
cost a few seconds. ``HOPSHARD_PARITY=full`` makes it a hundred rounds.
"""

from __future__ import annotations

import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
import traceback

import hopshard as hs
import pytest
import torch

SIZE = 4
TIME_LIMIT_S = 20
END_LIMIT_S = 10.0
"""Far below the time limit: peers must notice, not wait."""


def train(folder: pathlib.Path) -> None:
    """What a rank does until it is killed or learns that another was."""
    world = hs.init(sharded_data_parallel_degree=int(os.environ["DEGREE"]))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    model = hs.DistributedModel(model)
    optimizer = hs.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    (folder / f"ready{world.rank}").touch()
    while True:
        for _ in range(2):
            model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run_rank(rank: int, folder: pathlib.Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        train(folder)
    except BaseException as error:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        # As at the end of a script: init has put a hook there that tells the peers why.
        sys.excepthook(type(error), error, error.__traceback__)
    os._exit(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def play_round(number: int, backend: str, folder: pathlib.Path) -> str:
    """One set of ranks and one kill; returns what went wrong."""
    rng = random.Random(number)
    folder.mkdir()
    victim = number % SIZE
    os.environ.update(
        WORLD_SIZE=str(SIZE),
        LOCAL_WORLD_SIZE=str(SIZE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        HOPSHARD_BACKEND=backend,
        HOPSHARD_RANKS_PER_NODE=str(rng.choice([2, 4])),
        HOPSHARD_TIMEOUT_S=str(TIME_LIMIT_S),
        HOPSHARD_LOG_LEVEL="error",
        TORCH_CPP_LOG_LEVEL="ERROR",
        DEGREE=str(rng.choice([1, 2, 4])),
    )
    pids = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, folder)
        pids.append(pid)
    try:
        deadline = time.monotonic() + 60
        while not all((folder / f"ready{rank}").exists() for rank in range(SIZE)):
            if time.monotonic() > deadline:
                return "the ranks did not start"
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.15))
        os.kill(pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        waiting = dict(enumerate(pids))
        while waiting and time.monotonic() < killed + END_LIMIT_S:
            for rank, pid in list(waiting.items()):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    del waiting[rank]
            time.sleep(0.005)
        if waiting:
            return f"ranks {sorted(waiting)} still run {END_LIMIT_S} s after rank {victim} died"
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
    for rank in set(range(SIZE)) - {victim}:
        text = (folder / f"error{rank}").read_text()
        if not re.search(rf"rank(s [\d, and]*)? {victim}\b", text.splitlines()[-1]):
            return f"rank {rank} does not name rank {victim}, only: {text}"
    return ""


def main() -> None:
    backend, rounds, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    torch.set_num_threads(1)
    for number in range(rounds):
        problem = play_round(number, backend, folder / str(number))
        if problem:
            sys.exit(f"round {number}, {backend}: {problem}")
    print("all", rounds, "rounds")


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("backend", ["auto", "c10d"])
def test_the_others_end_and_name_the_dead(backend: str, tmp_path: pathlib.Path) -> None:
    rounds = 100 if os.environ.get("HOPSHARD_PARITY") == "full" else 10
    ended = subprocess.run(
        [sys.executable, __file__, backend, str(rounds), str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=30 + 12 * rounds,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"all {rounds} rounds" in ended.stdout
    assert not [name for name in os.listdir("/dev/shm") if "hopshard" in name]


if __name__ == "__main__":
    main()
