"""What a rank of a training run holds: as the kernel counts it, and as docs/memory.md predicts.

Shared memory is counted by shares (PSS): four ranks that map one segment hold a quarter each. Next:
step_time.py.
"""

from __future__ import annotations

import pathlib
import threading
from typing import Any, Final

import hopshard as hs
import torch
from hopshard.units import Unit, split_into_units

from benchmarks._arms import Arm, Workload, build_model, make_batches

_SMAPS: Final = pathlib.Path("/proc/self/smaps_rollup")
_INTERVAL_S: Final = 0.004  # Short beside a unit's computation, long beside a look.
_ALIGNMENT_BYTES: Final = 128
_MASTER_BYTES: Final = 4
_STATE_BYTES: Final = {"fp32": 16, "bf16": 18}
"""Per element of a slice: master, gradient sum, two moments; a narrow shard too."""


def pss_bytes() -> int:
    """This process's share of the memory that it maps.

    Raises:
        OSError: the kernel does not tell.
    """
    for line in _SMAPS.read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_SMAPS} has no line 'Pss:'")


class PeakPss:
    """The largest PSS inside a ``with`` block, above what it was at the beginning.

    A thread looks again and again: what lasts less than some milliseconds may escape it.
    """

    def __init__(self) -> None:
        self._base = self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def peak_bytes(self) -> int:
        return self._peak - self._base

    def __enter__(self) -> PeakPss:
        self._base = self._peak = pss_bytes()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._peak = max(self._peak, pss_bytes())


def formula_bytes(workload: Workload, degree: int) -> int:
    """What docs/memory.md says that hopshard holds at most, activations aside."""
    itemsize = 2 if workload.dtype == "bf16" else 4
    root, *blocks = split_into_units(build_model(workload))
    # Parameters begin at multiples of 128 bytes in a flat buffer, and so do slices.
    aligned = _ALIGNMENT_BYTES // itemsize

    def flat_numel(unit: Unit) -> int:
        whole = sum(_round_up(parameter.numel(), aligned) for parameter in unit.parameters)
        return _round_up(whole, aligned * degree)

    root_numel, *numels = map(flat_numel, (root, *blocks))
    kept = (root_numel + sum(numels)) // degree * _STATE_BYTES[workload.dtype]
    # Blocks are pooled by size; of each unit's buffers one or two are gradients.
    depth = hs.Config().prefetch_depth
    pool = root_numel * (itemsize + _MASTER_BYTES)
    for numel in set(numels):
        pool += numel * ((1 + depth) * itemsize + 2 * _MASTER_BYTES)
    return kept + pool


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def activation_bytes(workload: Workload) -> int:
    """What one micro-step keeps for its backward, parameters aside; the same for every arm."""
    model = build_model(workload)
    if workload.dtype == "bf16":
        model.bfloat16()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, Any]] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # Alive: no address comes twice.
        return tensor

    tokens = make_batches(workload, 0, 0)[0]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(tokens[:, :-1], targets=tokens[:, 1:])
    return sum(size for size, _ in kept.values())


def predict(workload: Workload, arm: Arm) -> dict[str, float]:
    """Fields of a row, in MiB."""
    fields = {"activation_mib": activation_bytes(workload)}
    if arm.name in ("hopshard", "hopshard_gloo"):
        fields["formula_mib"] = formula_bytes(workload, arm.degree)
    return {name: round(value / 2**20, 1) for name, value in fields.items()}
