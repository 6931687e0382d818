"""Launchers' environments: who am I, where is rank 0, and what is refused."""

from __future__ import annotations

import pytest
from hopshard.errors import ConfigError
from hopshard.launch_env import (
    LaunchEnvironment,
    Place,
    derive_ranks_per_node,
    detect_launch,
    first_slurm_host,
    port_of_job,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "x",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "1234567",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1", "algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "8",
    "TRAINING_JOB_NAME": "job",
}


def test_single_process() -> None:
    assert detect_launch({}) == LaunchEnvironment("single process", 0, 1, 0, 1)


def test_torchrun() -> None:
    assert detect_launch(TORCHRUN) == LaunchEnvironment(
        "torchrun", 3, 4, 1, 2, "10.0.0.1", 29400, uses_env_rendezvous=True
    )
    assert (
        detect_launch({**TORCHRUN, "HOPSHARD_LAUNCHER": "hopshard run"}).launcher == "hopshard run"
    )


def test_started_by_hand() -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2"}
    found = detect_launch(by_hand)
    assert (found.local_rank, found.local_size) == (1, 2)
    assert (found.master_address, found.master_port) == ("127.0.0.1", 29500)
    remote = {**by_hand, "MASTER_ADDR": "node-0", "MASTER_PORT": "1234"}
    found = detect_launch(remote)  # One process per host, as Kubernetes operators start them.
    assert (found.local_rank, found.local_size) == (0, 1)


def test_open_mpi_on_one_host() -> None:
    found = detect_launch(OPEN_MPI)
    assert found == LaunchEnvironment("Open MPI", 1, 4, 1, 4, "127.0.0.1", port_of_job("1234567"))
    other = detect_launch({**OPEN_MPI, "PMIX_NAMESPACE": "1234568"})
    assert other.master_port != found.master_port
    given = detect_launch({**OPEN_MPI, "MASTER_ADDR": "h", "MASTER_PORT": "99"})
    assert (given.master_address, given.master_port) == ("h", 99)


def test_open_mpi_on_several_hosts_needs_an_address() -> None:
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigError, match="-x MASTER_ADDR"):
        detect_launch(several)
    assert detect_launch({**several, "SM_HOSTS": '["algo-1"]'}).master_address == "algo-1"
    assert detect_launch({**several, "SLURM_JOB_NODELIST": "a[3-4]"}).master_address == "a3"


def test_slurm() -> None:
    found = detect_launch(SLURM)
    assert found == LaunchEnvironment("Slurm", 5, 8, 1, 4, "gpu07", port_of_job("77.0"))
    batch_script = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}
    assert detect_launch(batch_script).launcher == "single process"
    inner = detect_launch({**SLURM, **TORCHRUN})  # srun started torchrun.
    assert (inner.launcher, inner.rank) == ("torchrun", 3)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[07-09,12],x", "gpu07"),
        ("n[1,3]-ib", "n1-ib"),
        ("n-1", "n-1"),
    ],
)
def test_first_slurm_host(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


def test_sagemaker() -> None:
    alone = detect_launch(SAGEMAKER)
    assert (alone.launcher, alone.rank, alone.size, alone.local_size) == ("SageMaker", 1, 2, 1)
    assert (alone.master_address, alone.master_port) == ("algo-1", port_of_job("job"))
    under_torchrun = detect_launch({**SAGEMAKER, **TORCHRUN})
    assert under_torchrun.launcher == "torchrun"
    with pytest.raises(ConfigError, match="SM_CURRENT_HOST='algo-9'"):
        detect_launch({**SAGEMAKER, "SM_CURRENT_HOST": "algo-9"})
    with pytest.raises(ConfigError, match="SM_HOSTS"):
        detect_launch({**SAGEMAKER, "SM_HOSTS": "algo-1"})


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "3"}, "RANK=3 is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3 is set but RANK is not"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "local rank 1 of 5"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({**TORCHRUN, **OPEN_MPI}, "RANK=3 .*OMPI_COMM_WORLD_RANK=1"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({**SLURM, "SLURM_PROCID": "8"}, "SLURM_PROCID=8"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        detect_launch(environ)


def test_mpirun_that_starts_torchrun_is_no_contradiction() -> None:
    nested = {**OPEN_MPI, **TORCHRUN, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "4"}
    assert detect_launch(nested).rank == 3


def _places(*local_ranks: int | None, hosts: str) -> list[Place]:
    return [Place(host, local) for host, local in zip(hosts, local_ranks, strict=True)]


def test_ranks_per_node() -> None:
    assert derive_ranks_per_node(_places(0, hosts="a")) == 1
    assert derive_ranks_per_node(_places(0, 1, 0, 1, hosts="aabb")) == 2
    assert derive_ranks_per_node(_places(0, 1, 2, 0, hosts="aaab")) == 3
    assert derive_ranks_per_node(_places(None, None, None, None, hosts="aabb")) == 2
    # Two containers with one host name: the launcher knows better.
    assert derive_ranks_per_node(_places(0, 1, 0, 1, hosts="aaaa")) == 2


@pytest.mark.parametrize(
    ("places", "text"),
    [
        (_places(0, 0, 1, 1, hosts="abab"), "rank 2 on a has local rank 1"),
        (_places(None, None, None, None, hosts="abab"), "a holds ranks 0,2"),
        (_places(0, 0, 1, hosts="abb"), "different numbers of ranks"),
        (_places(0, 1, 0, 0, 1, hosts="aabcc"), "different numbers of ranks"),
        (_places(1, 2, hosts="aa"), "rank 0 on a has local rank 1"),
    ],
)
def test_ranks_must_be_placed_node_by_node(places: list[Place], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        derive_ranks_per_node(places)
