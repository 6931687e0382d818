"""The arms of step_time.py: one training step of the same model, by hopshard and by its peers.

An arm is a name and a degree; a ``Trainer`` is what it became on one rank. Nothing is timed here.
Next: _turns.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import hopshard as hs
import torch
import torch._dynamo  # Every optimizer imports it, when it is first used.
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from examples.gpt2.model import GPT2, SHAPES, GPT2Config

MODELS: Final = {
    "tiny": SHAPES["tiny"],
    "small": GPT2Config(num_layers=8, num_heads=8, hidden=512, context=128, vocabulary_size=256),
    "11M": GPT2Config(num_layers=6, num_heads=6, hidden=384, context=128, vocabulary_size=512),
}
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_NORM: Final = 1.0
SEED: Final = 0
INSTALL_DEEPSPEED: Final = (
    "DeepSpeed is not installed; 'pip install deepspeed ninja' in this environment (it also needs "
    "a C++ compiler), or put it on PYTHONPATH"
)

OptimizerKind = Literal["adamw", "sgd"]
Step = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """What every arm of one run trains, equal on all ranks."""

    model: str
    ranks: int
    batch: int
    """Sequences per rank and micro-step."""
    accumulation: int
    """Micro-steps per step."""
    dtype: str
    """Of the computation; masters, sums and the optimizer are fp32."""
    backend: str = "auto"
    """hopshard's transport."""
    timeout_s: float = 300.0

    @property
    def config(self) -> GPT2Config:
        return MODELS[self.model]

    @property
    def tokens(self) -> int:
        """Of one step, over all ranks."""
        return self.ranks * self.accumulation * self.batch * self.config.context


@dataclass(frozen=True)
class Arm:
    """One system in one configuration."""

    name: str
    degree: int
    """Ranks that share one copy of the model."""

    @property
    def label(self) -> str:
        return f"{self.name}@{self.degree}"


@dataclass
class Trainer:
    """One arm on one rank."""

    step: Step
    """A step on these micro-batches; this rank's mean loss."""
    backend: str = "gloo"
    begin_counting: Callable[[], None] = lambda: None
    account: Callable[[], dict[str, Any]] = dict
    """What the arm itself says of bytes sent since ``begin_counting`` and of its memory."""
    close: Callable[[], None] = lambda: None


# --- Which arms


def choose_arms(
    names: Sequence[str], degrees: Sequence[int], ranks: int
) -> tuple[list[Arm], dict[str, str]]:
    """The arms that these names and degrees mean, and why others are left out."""
    arms: list[Arm] = []
    left_out: dict[str, str] = {}
    for name in names:
        kind = KINDS[name]
        for degree in degrees if kind.takes_degree else [ranks if kind.shards else 1]:
            arm = Arm(name, degree)
            why_not = _why_not(arm, ranks)
            if why_not is None:
                arms.append(arm)
            else:
                left_out[arm.label] = why_not
    return arms, left_out


def _why_not(arm: Arm, ranks: int) -> str | None:
    if arm.name == "hopshard_node" and arm.degree < 4:
        return f"hopshard_node of degree {arm.degree} is hopshard"
    if ranks % arm.degree != 0:
        return f"degree {arm.degree} does not divide {ranks} ranks"
    if arm.name.startswith("hsdp") and not 1 < arm.degree < ranks:
        same = "fsdp2" if arm.degree == ranks else "ddp"
        return f"HSDP of degree {arm.degree} over {ranks} ranks is {same}"
    if arm.name == "zero3" and importlib.util.find_spec("deepspeed") is None:
        return INSTALL_DEEPSPEED
    return None


# --- What all train


def build_model(workload: Workload) -> GPT2:
    """Equal on all ranks and for all arms."""
    torch.manual_seed(SEED)
    model = GPT2(workload.config)
    if workload.model == "11M":  # Counts its output layer.
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    if workload.dtype == "bf16":  # Values that a bf16 model holds exactly: all begin alike.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    return model


def make_batches(workload: Workload, rank: int, step: int) -> list[torch.Tensor]:
    """A rank's micro-batches of a step, the same for every arm: noisy counting."""
    config = workload.config
    generator = torch.Generator().manual_seed(step * workload.ranks + rank)
    shape = (workload.batch, config.context + 1)
    result = []
    for _ in range(workload.accumulation):
        start = torch.randint(config.vocabulary_size, (workload.batch, 1), generator=generator)
        noise = torch.randint(3, shape, generator=generator)
        result.append((start + torch.arange(shape[1]) + noise) % config.vocabulary_size)
    return result


def make_optimizer(model: nn.Module, kind: OptimizerKind) -> torch.optim.Optimizer:
    """Torch's own. All arms clip with AdamW, and none with SGD, which shows a wrong scale."""
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def run_step(
    micro_batches: Sequence[torch.Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    around: Callable[[bool], Any] = lambda is_last: contextlib.nullcontext(),
    clip: Callable[[], Any] | None = None,
) -> torch.Tensor:
    """The same few lines for every arm but DeepSpeed.

    Args:
        micro_batches: Each [batch, context + 1].
        model: Wrapped as the arm does it.
        optimizer: Likewise.
        around: Makes the context of a micro-step, from whether it is the last.
        clip: Limits the gradient before the update.
    """
    total = torch.zeros((), dtype=torch.float64)
    optimizer.zero_grad()
    for index, tokens in enumerate(micro_batches):
        with around(index == len(micro_batches) - 1):
            _, loss = model(tokens[:, :-1], targets=tokens[:, 1:])
            (loss / len(micro_batches)).backward()
        total += loss.detach().double() / len(micro_batches)
    if clip is not None:
        clip()
    optimizer.step()
    return total


# --- hopshard


def build_hopshard(arm: Arm, workload: Workload, kind: OptimizerKind) -> Trainer:
    # With "auto" the environment may still choose.
    options: dict[str, Any] = {}
    if workload.backend != "auto":
        options["backend"] = workload.backend
    if arm.name == "hopshard_gloo":
        options["backend"] = "c10d"
    if arm.name == "hopshard_keep":
        options["reshard_after_forward"] = False
    if arm.name == "hopshard_node":
        options["reshard_after_forward"] = arm.degree // 2  # Of the two nodes of the presets.
    world = hs.init(
        sharded_data_parallel_degree=arm.degree,
        gradient_clipping=MAX_NORM if kind == "adamw" else 0.0,
        log_level="warning",
        timeout_s=workload.timeout_s,
        **options,
    )
    model = hs.DistributedModel(
        # Narrow parameters have fp32 masters.
        build_model(workload).to(DTYPES[workload.dtype]),
        backward_passes_per_step=workload.accumulation,
    )
    optimizer = hs.DistributedOptimizer(make_optimizer(model, kind))
    steps = 0

    def step(micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return run_step(micro_batches, model, optimizer)

    def begin_counting() -> None:
        nonlocal steps
        steps = 0
        world.meter.reset()

    def account() -> dict[str, Any]:
        sent = {
            f"{link}_bytes": world.meter.value(f"comm/sent_{link}_bytes") // max(steps, 1)
            for link in ("intra_node", "inter_node")
        }
        peak_mib = model.statistics()["peak_bytes"] / 2**20
        return {**sent, "account_mib": round(peak_mib, 1)}

    assert world.transports is not None
    choice = world.transports.choice
    name = choice.inter_node if world.num_nodes > 1 else choice.intra_node
    if world.num_nodes > 1 and choice.intra_node != choice.inter_node:
        name = f"{choice.intra_node}+{choice.inter_node}"
    return Trainer(step, name, begin_counting, account, hs.shutdown)


# --- torch


def build_ddp(arm: Arm, workload: Workload, kind: OptimizerKind) -> Trainer:
    model = nn.parallel.DistributedDataParallel(build_model(workload))

    @contextlib.contextmanager
    def around(is_last: bool) -> Any:
        with contextlib.nullcontext() if is_last else model.no_sync(), _autocast(workload):
            yield

    return _torch_trainer(model, kind, around)


def build_no_comm(arm: Arm, workload: Workload, kind: OptimizerKind) -> Trainer:
    """Each rank for itself, with the whole optimizer step: what communication adds to."""
    around = lambda is_last: _autocast(workload)  # noqa: E731
    return _torch_trainer(build_model(workload), kind, around, backend="none")


def build_sharded(
    arm: Arm,
    workload: Workload,
    kind: OptimizerKind,
    *,
    keep: bool = False,
    two_hop: bool = False,
) -> Trainer:
    """FSDP2 over all ranks, or HSDP where the degree is less; blocks are units.

    Args:
        arm: Its degree is the size of a sharding group.
        workload: What it trains.
        kind: Of the optimizer.
        keep: Blocks stay gathered from the forward to the backward.
        two_hop: Replicas are summed once per step instead of once per micro-step.
    """
    mesh = _mesh(workload.ranks, arm.degree)
    options: dict[str, Any] = {"mesh": mesh}
    if workload.dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    # GPT2 gets FSDP2's methods from fully_shard.
    model: Any = build_model(workload)
    for block in model.h:
        fully_shard(block, reshard_after_forward=not keep, **options)
    fully_shard(model, **options)
    # As hopshard: sums travel, the mean is one division.
    for module in [*model.h, model]:
        module.set_gradient_divide_factor(workload.ranks)
        module.set_force_sum_reduction_for_comms(True)

    def around(is_last: bool) -> Any:
        if two_hop:
            model.set_requires_all_reduce(is_last)
        return contextlib.nullcontext()

    return _torch_trainer(model, kind, around)


def _torch_trainer(
    model: nn.Module,
    kind: OptimizerKind,
    around: Callable[[bool], Any],
    backend: str = "gloo",
) -> Trainer:
    optimizer = make_optimizer(model, kind)
    clip = None
    if kind == "adamw":
        clip = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()), MAX_NORM)
    step = functools.partial(run_step, model=model, optimizer=optimizer, around=around, clip=clip)
    return Trainer(step, backend)


@functools.cache
def _mesh(ranks: int, degree: int) -> Any:
    if degree == ranks:
        return init_device_mesh("cpu", (ranks,))
    shape = (ranks // degree, degree)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _autocast(workload: Workload) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=workload.dtype == "bf16")


# --- DeepSpeed


def build_zero3(arm: Arm, workload: Workload, kind: OptimizerKind) -> Trainer:
    """Its defaults, with torch's optimizer, whose like of DeepSpeed it would compile first."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # type: ignore[import-not-found]

    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    module = build_model(workload)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=make_optimizer(module, kind),
        config={
            "train_micro_batch_size_per_gpu": workload.batch,
            "gradient_accumulation_steps": workload.accumulation,
            "gradient_clipping": MAX_NORM if kind == "adamw" else 0.0,
            "bf16": {"enabled": workload.dtype == "bf16"},
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )

    def step(micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for tokens in micro_batches:
            _, loss = engine(tokens[:, :-1], targets=tokens[:, 1:])
            engine.backward(loss)  # Divides by the accumulation.
            engine.step()  # Does nothing before the last.
            total += loss.detach().double() / len(micro_batches)
        return total

    return Trainer(step, close=engine.destroy)


# --- The list


@dataclass(frozen=True)
class Kind:
    """What a name stands for."""

    build: Callable[[Arm, Workload, OptimizerKind], Trainer]
    takes_degree: bool = False
    """One arm per degree that was asked for."""
    shards: bool = True
    """Over all ranks, where it takes no degree."""


KINDS: Final = {
    "hopshard": Kind(build_hopshard, takes_degree=True),
    "hopshard_gloo": Kind(build_hopshard, takes_degree=True),
    "hopshard_keep": Kind(build_hopshard, takes_degree=True),
    "hopshard_node": Kind(build_hopshard, takes_degree=True),
    "ddp": Kind(build_ddp, shards=False),
    "fsdp2": Kind(build_sharded),
    "fsdp2_keep": Kind(functools.partial(build_sharded, keep=True)),
    "hsdp": Kind(build_sharded, takes_degree=True),
    "hsdp_two_hop": Kind(functools.partial(build_sharded, two_hop=True), takes_degree=True),
    "zero3": Kind(build_zero3),
    "no_comm": Kind(build_no_comm, shards=False),
}


def connect(store: Store, arm: Arm, rank: int, workload: Workload, limit: Any) -> None:
    """Makes torch's default process group for one arm. Collective: all ranks of the arm."""
    dist.init_process_group(
        "gloo",
        store=PrefixStore(arm.label, store),
        rank=rank,
        world_size=workload.ranks,
        timeout=limit,
    )
