"""Which rank am I? Read from what launchers leave in the environment.

Pure: everything takes the environment as a mapping and returns plain data. torchrun, Open MPI,
Slurm, SageMaker and a single process are known; contradictions are refused, because a rank that
guesses wrong hangs the others. Next: world.py.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hopshard.errors import ConfigError, name_ranks

_FIRST_PORT: Final = 15000  # Below the range that kernels hand out to clients (from 32768).
_NUM_PORTS: Final = 15000
_DEFAULT_PORT: Final = 29500  # torch's own default, for launchers without a job id.
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process's place in the job, as its launcher sees it."""

    launcher: str
    """For people: ``torchrun``, ``Open MPI``, ``Slurm``, ``SageMaker``, ``single process`` …"""
    rank: int
    size: int
    local_rank: int
    local_size: int
    """Ranks on this host."""
    master_address: str | None = None
    """Host of rank 0. None if the world is one process."""
    master_port: int | None = None
    uses_env_rendezvous: bool = False
    """True if torch's ``env://`` is complete, so that an agent's store can be used."""


@dataclass(frozen=True)
class Place:
    """Where one rank runs; what ranks tell each other at start-up."""

    host: str
    local_rank: int | None


def detect_launch(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Finds this process's place.

    The innermost launcher wins where nesting is normal (torchrun inside mpirun or srun); two that
    claim the same process must agree.

    Raises:
        ConfigError: incomplete, malformed or contradictory variables, or no way to know the host
            of rank 0. The text names the variables and what to set.
    """
    torch_env = _read_torch(environ)
    mpi_env = _read_open_mpi(environ)
    slurm_env = _read_slurm(environ)
    if torch_env is not None:
        if mpi_env is not None:
            _check_torch_against_mpi(environ, torch_env, mpi_env)
        found = torch_env
    elif mpi_env is not None:
        found = mpi_env
    elif slurm_env is not None:
        found = slurm_env
    else:
        found = _read_sagemaker(environ) or LaunchEnvironment("single process", 0, 1, 0, 1)
    _check_places(found)
    if found.size == 1 or found.uses_env_rendezvous:
        return found
    return LaunchEnvironment(
        found.launcher,
        found.rank,
        found.size,
        found.local_rank,
        found.local_size,
        _master_address(environ, found),
        _master_port(environ),
    )


def derive_ranks_per_node(places: Sequence[Place]) -> int:
    """Ranks of one node, from every rank's place (index = rank).

    Raises:
        ConfigError: the ranks of a host are not consecutive, or hosts before the last hold
            different numbers of ranks.
    """
    advice = (
        "Neighbouring ranks must share a node; with mpirun use '--map-by slot', with srun "
        "'--distribution=block'"
    )
    launcher_knows = all(place.local_rank is not None for place in places)
    nodes: list[list[int]] = []
    for rank, place in enumerate(places):
        if launcher_knows:
            starts_node = place.local_rank == 0
            expected = len(nodes[-1]) if nodes else 0
            moved = rank > 0 and places[rank - 1].host != place.host
            if not starts_node and (place.local_rank != expected or moved):
                raise ConfigError(
                    f"ranks are not placed node by node: rank {rank} on {place.host} has local "
                    f"rank {place.local_rank}. {advice}"
                )
        else:
            starts_node = rank == 0 or places[rank - 1].host != place.host
        if starts_node:
            nodes.append([])
        nodes[-1].append(rank)
    for host in dict.fromkeys(place.host for place in places):
        ranks = [rank for rank, place in enumerate(places) if place.host == host]
        if ranks[-1] - ranks[0] + 1 != len(ranks):
            raise ConfigError(
                f"ranks are not placed node by node: {host} holds {name_ranks(ranks)}. {advice}"
            )
    ranks_per_node = len(nodes[0])
    for number, node in enumerate(nodes):
        is_last = number == len(nodes) - 1
        if len(node) > ranks_per_node or (len(node) < ranks_per_node and not is_last):
            raise ConfigError(
                f"nodes hold different numbers of ranks: {places[0].host} {ranks_per_node}, "
                f"{places[node[0]].host} {len(node)}. Start the same number on every node; only "
                "the last may hold fewer"
            )
    return ranks_per_node


def first_slurm_host(node_list: str) -> str:
    """The first host of a Slurm node list.

    >>> first_slurm_host("gpu[07-09,12],login1")
    'gpu07'
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", node_list)
    if match is None:
        raise ConfigError(f"SLURM_JOB_NODELIST: cannot read '{node_list}'")
    return match[1] + (match[2] or "") + (match[3] or "")


def port_of_job(job_id: str) -> int:
    """A port that all ranks of a job derive alike and other jobs probably do not."""
    return _FIRST_PORT + zlib.crc32(job_id.encode()) % _NUM_PORTS


def _integer(environ: Mapping[str, str], name: str, least: int = 0) -> int | None:
    text = environ.get(name)
    if text is None or text == "":
        return None
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise ConfigError(
            f"environment variable {name}={text!r} is not an integer >= {least}; "
            "it is set by the launcher"
        )
    return int(text)


def _pair(
    environ: Mapping[str, str], rank_name: str, size_name: str, launcher: str
) -> tuple[int, int] | None:
    rank, size = _integer(environ, rank_name), _integer(environ, size_name, least=1)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        there, missing = (rank_name, size_name) if size is None else (size_name, rank_name)
        raise ConfigError(
            f"{there}={environ[there]} is set but {missing} is not. Start the program with "
            f"'hopshard run' or {launcher}, which set both, or unset {there} for a single process"
        )
    if rank >= size:
        raise ConfigError(f"{rank_name}={rank} is not below {size_name}={size}: ranks count from 0")
    return rank, size


def _read_torch(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    pair = _pair(environ, "RANK", "WORLD_SIZE", "torchrun")
    if pair is None:
        return None
    rank, size = pair
    address, port = environ.get("MASTER_ADDR"), _integer(environ, "MASTER_PORT", least=1)
    local_rank = _integer(environ, "LOCAL_RANK")
    local_size = _integer(environ, "LOCAL_WORLD_SIZE", least=1)
    mpi = _read_open_mpi(environ)
    if mpi is not None and (mpi.rank, mpi.size) == (rank, size):
        local_rank = mpi.local_rank if local_rank is None else local_rank
        local_size = mpi.local_size if local_size is None else local_size
    if local_size is None:
        # Started by hand: all on this host if rank 0 is, else one process per host.
        on_one_host = address in (None, "", "localhost", _LOOPBACK, "::1")
        local_size = size if on_one_host else max(1, (local_rank or 0) + 1)
        local_rank = (rank if on_one_host else 0) if local_rank is None else local_rank
    if local_rank is None:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={local_size} is set but LOCAL_RANK is not; start the program with "
            "'hopshard run' or torchrun, which set both"
        )
    by_agent = "TORCHELASTIC_RUN_ID" in environ
    launcher = environ.get("HOPSHARD_LAUNCHER") or ("torchrun" if by_agent else "RANK, WORLD_SIZE")
    return LaunchEnvironment(
        launcher,
        rank,
        size,
        local_rank,
        local_size,
        address or None,
        port,
        uses_env_rendezvous=bool(address) and port is not None,
    )


def _read_open_mpi(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    pair = _pair(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun")
    if pair is None:
        return None
    places = _pair(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun")
    return LaunchEnvironment("Open MPI", *pair, *(places or (0, 1)))


def _read_slurm(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    # A batch script carries SLURM_NTASKS too, but only srun's tasks are ranks: they have a step.
    if "SLURM_STEP_ID" not in environ:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    pair = _pair(environ, "SLURM_PROCID", size_name, "srun")
    if pair is None:
        return None
    rank, size = pair
    local_rank = _integer(environ, "SLURM_LOCALID") or 0
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    node = _integer(environ, "SLURM_NODEID") or 0
    counts = _expand_slurm_counts(tasks)
    if node < len(counts):
        local_size = counts[node]
    else:
        local_size = size if size <= local_rank + 1 else max(1, local_rank + 1)
    return LaunchEnvironment("Slurm", rank, size, local_rank, local_size)


def _expand_slurm_counts(text: str) -> list[int]:
    """``"4(x2),3"`` is four tasks on two nodes, then three."""
    counts: list[int] = []
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ConfigError(f"cannot read Slurm's tasks per node, '{text}'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _sagemaker_hosts(environ: Mapping[str, str]) -> list[str]:
    text = environ.get("SM_HOSTS")
    if not text:
        return []
    try:
        hosts = json.loads(text)
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(h, str) for h in hosts):
        raise ConfigError(f"SM_HOSTS={text!r} is not a JSON list of host names")
    return hosts


def _read_sagemaker(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """One process per host, where SageMaker starts the script without a launcher of ranks."""
    hosts = _sagemaker_hosts(environ)
    if not hosts:
        return None
    current = environ.get("SM_CURRENT_HOST", hosts[0] if len(hosts) == 1 else "")
    if current not in hosts:
        raise ConfigError(f"SM_CURRENT_HOST={current!r} is not among SM_HOSTS {hosts}")
    return LaunchEnvironment("SageMaker", hosts.index(current), len(hosts), 0, 1)


def _check_torch_against_mpi(
    environ: Mapping[str, str], torch_env: LaunchEnvironment, mpi_env: LaunchEnvironment
) -> None:
    if (torch_env.rank, torch_env.size) == (mpi_env.rank, mpi_env.size):
        return
    nested = (_integer(environ, "GROUP_RANK"), _integer(environ, "GROUP_WORLD_SIZE"))
    if "TORCHELASTIC_RUN_ID" in environ and (
        mpi_env.size == 1 or nested == (mpi_env.rank, mpi_env.size)
    ):
        return  # mpirun started one torchrun per host.
    raise ConfigError(
        f"two launchers disagree: RANK={torch_env.rank} WORLD_SIZE={torch_env.size}, but Open MPI "
        f"says OMPI_COMM_WORLD_RANK={mpi_env.rank} OMPI_COMM_WORLD_SIZE={mpi_env.size}. "
        "Unset RANK and WORLD_SIZE, or start without mpirun"
    )


def _check_places(found: LaunchEnvironment) -> None:
    if found.local_rank >= found.local_size or found.local_size > found.size:
        raise ConfigError(
            f"{found.launcher}: local rank {found.local_rank} of {found.local_size} does not fit "
            f"rank {found.rank} of {found.size}; check LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    if found.local_rank > found.rank:
        raise ConfigError(
            f"{found.launcher}: local rank {found.local_rank} is above rank {found.rank}; "
            "check LOCAL_RANK"
        )


def _master_address(environ: Mapping[str, str], found: LaunchEnvironment) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if found.local_size == found.size:
        return _LOOPBACK
    hosts = _sagemaker_hosts(environ)
    if hosts:
        return hosts[0]
    nodes = (
        environ.get("SLURM_STEP_NODELIST")
        or environ.get("SLURM_JOB_NODELIST")
        or environ.get("SLURM_NODELIST")
    )
    if nodes:
        return first_slurm_host(nodes)
    raise ConfigError(
        f"{found.launcher} does not say on which host rank 0 runs. Set MASTER_ADDR to it on every "
        "rank, with mpirun for example: -x MASTER_ADDR=<host of rank 0>"
    )


def _master_port(environ: Mapping[str, str]) -> int:
    port = _integer(environ, "MASTER_PORT", least=1)
    if port is not None:
        return port
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"):
        if environ.get(name):
            return port_of_job(environ[name])
    if environ.get("SLURM_JOB_ID"):
        return port_of_job(f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}")
    if environ.get("TRAINING_JOB_NAME"):
        return port_of_job(environ["TRAINING_JOB_NAME"])
    return _DEFAULT_PORT
