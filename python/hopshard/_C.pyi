"""Types of the native module (python/src/bind_*.cpp); tests/python/unit/test_docs.py compares.

Contracts are those of the headers in include/hopshard; what a caller must know is repeated here.
Use ``import hopshard``; this module may change with any version.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store as TorchStore

__version__: str
build_id: str
"""Version and a hash of the native sources: equal on ranks that run the same build."""
FLAT_ALIGNMENT_BYTES: int
"""Parameters start at multiples of this in a flat buffer, and so do slices."""

# Errors (core/error.hpp)

class Error(RuntimeError):
    """Base of all errors that hopshard raises on purpose."""

class ConfigError(Error):
    """The configuration or the model cannot be used as given."""

class InvalidArgument(Error):
    """A call broke its contract; raised before any byte is sent."""

class CommError(Error):
    """A collective failed: a peer died, disagreed or the transport broke."""

class TimeoutError(CommError):
    """A wait ran past its time limit."""

class ScheduleError(Error):
    """Ranks issued different collectives, or an event came in a state that does not allow it."""

class ShardedError(Error):
    """A sharded parameter or gradient was used in a way that needs the whole tensor."""

# Environment (core/env.hpp, core/log.hpp)

class Env:
    """The HOPSHARD_* variables, read once."""

    @property
    def timeout_s(self) -> float: ...
    @property
    def ranks_per_node(self) -> int | None: ...
    @property
    def log_level(self) -> str: ...

def env() -> Env:
    """The environment of this process.

    Raises:
        ConfigError: a variable holds something illegal.
    """

def env_variables() -> list[tuple[str, str, str, str]]:
    """Name, legal values, default and meaning of every variable."""

def set_log_level(name: str) -> None:
    """The level of this process, instead of HOPSHARD_LOG_LEVEL's."""

def set_process_log_rank(global_rank: int) -> None:
    """The rank that native log lines of this process show."""

# Groups and slices (topology/group_layout.hpp, layout/*.hpp)

class GroupLayout:
    """Degrees of a world and the groups that follow from them. Pure.

    Raises:
        ConfigError: the degree does not divide the world size; names the legal ones.
    """

    def __init__(self, world_size: int, ranks_per_node: int, degree: int) -> None: ...
    @property
    def world_size(self) -> int: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def degree(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def is_hierarchical(self) -> bool:
        """Every sharding group consists of at least two whole nodes of at least two ranks."""

    def node_of(self, rank: int) -> int: ...
    def local_rank_of(self, rank: int) -> int: ...
    def sharding_group(self, rank: int) -> list[int]: ...
    def replication_group(self, rank: int) -> list[int]: ...
    def intra_node_group(self, rank: int) -> list[int]: ...
    def inter_node_group(self, rank: int) -> list[int]: ...
    def slice_of(self, rank: int) -> int:
        """The slice that ``rank`` owns in its sharding group."""

class SliceOrder:
    """(node, local rank) owns slice ``local_rank * num_nodes + node``, and back. Pure."""

    def __init__(self, num_nodes: int, ranks_per_node: int) -> None: ...
    def __len__(self) -> int: ...
    def slice_of(self, node: int, local_rank: int) -> int: ...
    def place_of(self, slice: int) -> tuple[int, int]:
        """(node, local rank)."""

    def slots(self) -> list[int]:
        """Slices by group rank: the ``slots`` of a Group."""

class FlatLayout:
    """Where each parameter lies in a unit's flat buffer. All counts are elements. Pure."""

    def __init__(self, numels: Sequence[int], itemsize_bytes: int, num_slices: int) -> None: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def num_slices(self) -> int: ...
    @property
    def numel(self) -> int:
        """The whole buffer, padding included."""

    @property
    def slice_numel(self) -> int: ...
    @property
    def parameter_numel(self) -> int:
        """Elements that belong to parameters."""

    def offset_of(self, parameter: int) -> int: ...
    def numel_of(self, parameter: int) -> int: ...

class Piece:
    """A range of one parameter that lies inside one slice. All counts are elements."""

    @property
    def parameter(self) -> int: ...
    @property
    def slice(self) -> int: ...
    @property
    def parameter_begin(self) -> int: ...
    @property
    def slice_begin(self) -> int: ...
    @property
    def numel(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...

class PieceTable:
    """All pieces of one flat buffer. Pure."""

    def __init__(self, layout: FlatLayout) -> None: ...
    def in_slice(self, slice: int) -> list[Piece]: ...
    def of_parameter(self, parameter: int) -> list[Piece]: ...
    def of_range(self, parameter: int, begin: int, end: int) -> list[Piece]: ...
    def of_slice_range(self, slice: int, begin: int, end: int) -> list[Piece]: ...

# Communication (comm/*.hpp, metrics/meter.hpp)

class Group:
    """Ranks that communicate: who takes part, who I am, where chunks lie.

    Rank ``i`` of the group owns chunk ``slots[i]`` of a gathered buffer; no slots: chunk ``i``.

    Raises:
        InvalidArgument: empty, duplicate ranks, ``rank`` out of range, slots no permutation.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, slots: Sequence[int] = []
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def rank(self) -> int: ...
    @property
    def slots(self) -> list[int]: ...
    @property
    def size(self) -> int: ...
    @property
    def global_rank(self) -> int: ...
    def slot_of(self, member: int) -> int: ...

class Work:
    """A collective in flight; used by one thread.

    A Work that is dropped without ``wait`` waits by itself and only logs what went wrong.
    """

    def wait(self) -> None:
        """Waits for the result. May be called again.

        Raises:
            TimeoutError, CommError: naming backend, operation, tag, group and rank.
        """

    def test(self) -> bool:
        """True once ``wait`` would not wait for another rank. Never blocks."""

class Communicator:
    """Collective operations over one group of ranks.

    Collective: every rank of ``group`` makes the same calls in the same order. Tensors are
    contiguous; keep inputs unchanged and outputs alive until ``Work.wait``. One thread at a time
    per communicator. ``timeout_ms=0`` is the communicator's default. A group of one rank reaches
    no backend.

    Raises:
        InvalidArgument: bad arguments, before any byte is sent.
        ScheduleError: ranks made different calls, where the backend can see it.
    """

    @property
    def group(self) -> Group: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def backend(self) -> str: ...
    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, tag: str = "", timeout_ms: int = 0
    ) -> Work:
        """Puts every rank's ``input`` [n] at its slot of ``output`` [n * size].

        ``input`` may be this rank's slot of ``output``.
        """

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: str = "sum",
        tag: str = "",
        timeout_ms: int = 0,
        accumulate: bool = False,
    ) -> Work:
        """Reduces ``input`` [n * size] over the ranks; each keeps its slot as ``output`` [n].

        ``output`` may be this rank's slot of ``input``, which holds no defined value elsewhere
        afterwards. ``op`` is "sum" or "max"; ``accumulate`` also applies it to what ``output``
        held.
        """

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", tag: str = "", timeout_ms: int = 0
    ) -> Work:
        """Reduces ``tensor`` over the ranks, in place; all ranks get bit-equal results."""

    def broadcast(
        self, tensor: torch.Tensor, root: int, tag: str = "", timeout_ms: int = 0
    ) -> Work:
        """Copies group rank ``root``'s ``tensor`` to all ranks, in place."""

    def barrier(self, tag: str = "", timeout_ms: int = 0) -> None:
        """Returns when every rank of the group has called it."""

    def split(self, part: Group) -> Communicator:
        """The communicator of a part of this group. Collective: the members of the part."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zero-filled memory (uint8) that this backend moves fastest. Not collective."""

    def register_memory(self, memory: torch.Tensor) -> None:
        """Prepares memory of the caller's own; a hint. Not collective."""

    def abort(self, reason: str) -> None:
        """Wakes every rank of the group that waits, with CommError. Any thread may call it."""

class Meter:
    """Named integer counters of one rank. Any thread."""

    def __init__(self) -> None: ...
    def add(self, name: str, amount: int = 1) -> None: ...
    def record_peak(self, name: str, value: int) -> None:
        """Raises a counter to ``value`` if that is more."""

    def value(self, name: str) -> int:
        """The counter's value; 0 if nobody wrote it."""

    def counters(self) -> dict[str, int]: ...
    def reset(self) -> None: ...
    def comm_total(self, quantity: str, group: str = "", op: str = "", kind: str = "") -> int:
        """Sum of a quantity over the calls that match; "" matches all.

        Args:
            quantity: "calls", "bytes", "sent_intra_node_bytes" or "sent_inter_node_bytes".
            group: "world", "sharding" or "replication".
            op: "all_gather", "reduce_scatter", "all_reduce", "broadcast" or "barrier".
            kind: The tag's text before "/": "unshard", "reduce", "second_hop", "control", …
        """

class RecordedCall:
    """One collective as this rank issued it."""

    @property
    def op(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""

    @property
    def dtype(self) -> torch.dtype | None: ...

class CallLog:
    """The order in which a rank issued collectives. Any thread."""

    def __init__(self) -> None: ...
    def calls(self) -> list[RecordedCall]: ...
    def clear(self) -> None: ...

class LocalHub:
    """Where ranks that are threads of this process meet; the backend ``local``. Any thread."""

    def __init__(self, world_size: int, timeout_ms: int = 60000) -> None: ...
    @property
    def world_size(self) -> int: ...
    def communicator(self, group: Group) -> Communicator:
        """The calling rank's communicator; does not wait for the other ranks."""

    def abort(self, reason: str) -> None:
        """Wakes all waiting ranks of all groups with CommError; later calls fail too."""

    def rank_failed(self, global_rank: int, reason: str) -> None:
        """Says that a rank is gone: everything that needs it fails at once, naming it."""

def c10d_communicator(
    process_group: ProcessGroup,
    group: Group,
    timeout_ms: int,
    make_part: Callable[[Group], ProcessGroup] | None = None,
    world_store: Store | None = None,
    is_sole_user: bool = False,
) -> Communicator:
    """A communicator over a torch process group of the same ranks in the same order.

    ``make_part`` makes the process group of a part, for ``split``. ``world_store`` is shared by all
    groups of a world: a rank that fails in one is then not called silent in another.
    ``is_sole_user``: nobody else issues operations on ``process_group``, so calls return at once.
    """

def recording_communicator(
    inner: Communicator | None,
    group: Group,
    meter: Meter,
    ranks_per_node: int,
    log: CallLog | None = None,
) -> Communicator:
    """Counts calls and bytes of ``inner``; without one, every rank is taken to hold this data."""

def delayed_communicator(
    inner: Communicator,
    seed: int = 0,
    max_delay_us: int = 0,
    fail_at_call: int = -1,
    hang_at_call: int = -1,
    hang_limit_ms: int = 60000,
) -> Communicator:
    """``inner`` with delays and faults, for tests. Calls are counted from 0."""

def simulated_communicator(inner: Communicator, max_delay_us: int, seed: int = 0) -> Communicator:
    """``inner`` on a stream that reads and writes late; what is not yet, or no more, is NaN."""

class Store:
    """Where ranks leave addresses and keys before they are connected. Any thread."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str, timeout_ms: int) -> str:
        """Waits until the key is there.

        Raises:
            TimeoutError: nobody wrote it in time.
        """

    def prefixed(self, prefix: str) -> Store:
        """The part of the store whose keys begin with ``prefix/``."""

def copy_memory(to: torch.Tensor, source: torch.Tensor) -> None:
    """By the loops of ``shm``: past the cache if it is large. Contiguous CPU tensors, no overlap.

    Raises:
        InvalidArgument: other tensors, or different sizes in bytes.
    """

def sum_memory(to: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """``to = parts[0] + parts[1] + ...`` in one pass, by the loops of ``shm``.

    Raises:
        InvalidArgument: not contiguous, not on the CPU, no parts, or parts unlike ``to``.
    """

def memory_store() -> Store:
    """A store for ranks that are threads of this process."""

def c10d_store(store: TorchStore) -> Store:
    """torch's store as ours."""

class BackendInfo:
    """A transport, and whether it can be used here."""

    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str:
        """One line for a user who chooses."""

    @property
    def why_not(self) -> str | None:
        """None: available."""

def backends() -> list[BackendInfo]:
    """All known backends, the reference first."""

def connect_backend(name: str, store: Store, group: Group, timeout_ms: int) -> Communicator:
    """The first communicator of a group; all others are split from it.

    Collective: the group. ``store`` needs fresh keys: prefix it if a group is connected again.

    Raises:
        ConfigError: no such backend, or not available here (says why).
    """

class NodeLinkCosts:
    """What a message costs inside and between nodes; see hopshard.link_costs."""

    def __init__(
        self,
        intra_alpha_us: float,
        intra_gb_per_s: float,
        inter_alpha_us: float,
        inter_gb_per_s: float,
    ) -> None: ...

def predict_us(
    op: str,
    algorithm: str,
    num_nodes: int,
    ranks_per_node: int,
    num_bytes: int,
    costs: NodeLinkCosts,
) -> float:
    """Microseconds of a collective by the model of topology/link_cost.hpp.

    Args:
        op: "all_gather", "reduce_scatter", "all_reduce", "broadcast" or "barrier".
        algorithm: "flat" or "hierarchical".
        num_nodes: Of the group.
        ranks_per_node: Of the group.
        num_bytes: Of the whole buffer.
        costs: Of the links.
    """

def has_slice_order(group: Group, num_nodes: int, ranks_per_node: int) -> bool:
    """True if the group's slots are l * N + j for local place l on node j (D2)."""

class NodeParts:
    """How a group lies on nodes, if two levels apply to it."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def ranks_per_node(self) -> int:
        """Members of the group on each node."""

    @property
    def intra_node(self) -> Group:
        """Those on the caller's node."""

    @property
    def inter_node(self) -> Group:
        """Those with the caller's place, one per node."""

def plan_node_parts(group: Group, ranks_per_node: int) -> NodeParts | None:
    """The parts of a two-level communicator; None unless k >= 2 ranks lie on each of N >= 2 nodes.

    ``ranks_per_node`` is the world's: rank r is on node r // ranks_per_node.
    """

def hierarchical_communicator(
    group: Group,
    intra_node: Communicator,
    inter_node: Communicator,
    store: Store | None,
    timeout_ms: int,
) -> Communicator:
    """Both levels as one; they belong to it from here on."""

def selecting_communicator(
    flat: Communicator,
    hierarchical: Communicator | None,
    num_nodes: int,
    ranks_per_node: int,
    costs: NodeLinkCosts,
    algorithm: str = "auto",
    store: Store | None = None,
) -> Communicator:
    """Picks one of both per call: "auto", or always "flat" or "hierarchical" where it can."""

class ProcessGroups:
    """The communicators of one rank."""

    @property
    def world(self) -> Communicator: ...
    @property
    def sharding(self) -> Communicator: ...
    @property
    def replication(self) -> Communicator: ...
    @property
    def secondary(self) -> Communicator | None: ...

def make_process_groups(
    layout: GroupLayout,
    rank: int,
    factory: Callable[[Group], Communicator | None],
    secondary_degree: int = 0,
) -> ProcessGroups:
    """Calls ``factory`` for the caller's world, sharding, replication and secondary group.

    Args:
        layout: Of the world.
        rank: The caller's.
        factory: Connects one group.
        secondary_degree: Ranks that gather from secondary shards; 0: there are none.

    Raises:
        InvalidArgument: a rank outside the layout, or a communicator of another group.
        ConfigError: the factory returned none.
    """

def make_world_group(layout: GroupLayout, rank: int) -> Group: ...
def make_sharding_group(layout: GroupLayout, rank: int) -> Group: ...
def make_replication_group(layout: GroupLayout, rank: int) -> Group: ...

# The engine (runtime/shard_engine.hpp, runtime/shard_store.hpp)

class UnitSpec:
    """A unit as the user's model gives it."""

    def __init__(
        self,
        name: str,
        parameter_names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        is_persistent: bool = False,
        dtypes: Sequence[torch.dtype] = (),
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def parameter_names(self) -> list[str]: ...

class ParameterPlace:
    """Where one parameter is. The piece is this rank's part; ``piece_numel`` 0 if it has none."""

    @property
    def name(self) -> str: ...
    @property
    def parameter(self) -> torch.Tensor: ...
    @property
    def unit(self) -> int: ...
    @property
    def buffer(self) -> int: ...
    @property
    def is_trainable(self) -> bool: ...
    @property
    def piece_numel(self) -> int: ...
    @property
    def piece_in_parameter(self) -> int:
        """First element of the piece, in the parameter's memory order."""

class ShardEngine:
    """Carries a model's schedule out; one per model and rank.

    Collective: all ranks build it with the same units and report the same events; a rank may skip
    a unit's forward. One thread at a time. Unit 0 is the root. Parameters are numbered as in
    ``parameters``; arenas hold the trainable ones' slices, one arena per master dtype.

    Raises:
        ConfigError: a parameter on two units, on another device than the CPU, or of a dtype that
            cannot be trained.
        ScheduleError, CommError, TimeoutError, ShardedError: from any event.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        groups: ProcessGroups,
        backward_passes_per_step: int,
        second_hop_bucket_bytes: int,
        prefetch_depth: int,
        reshard_after_forward: bool = True,
        fills_idle_memory: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None: ...
    def before_root_forward(self) -> None: ...
    def after_root_forward(self, outputs: Sequence[torch.Tensor]) -> None: ...
    def before_forward(self, unit: int) -> None: ...
    def after_forward(self, unit: int, outputs: Sequence[torch.Tensor]) -> None: ...
    def abandon_forward(self) -> None:
        """A forward ended in an exception: lets everything go, tells nobody."""

    def hold_second_hop(self, hold: bool) -> None:
        """While held, a backward stops after hop 1 and does not count as a pass of the step."""

    def finish_gradients(self) -> bool:
        """Hops that any rank has outstanding, agreement and order check. Collective: the world.

        Returns:
            False, without a collective, if nothing happened since the last call.

        Raises:
            ScheduleError: ranks issued different collectives.
        """

    def zero_gradients(self) -> None: ...
    def set_loss_scale(self, scale: float) -> None:
        """Losses of the backwards to come are multiplied by it; gradient sums are without it."""

    def set_gradient_handles(self, handles: Sequence[torch.Tensor | None]) -> None:
        """What ``param.grad`` shows after a backward, by parameter; None for frozen ones."""

    def gradient_flags(self) -> bytes:
        """By parameter, 1 if some rank had a gradient: exact after ``finish_gradients``."""

    def set_gradient(self, parameter: int, full: torch.Tensor) -> None:
        """Replaces a gradient by a full tensor that is equal on all ranks. Not collective."""

    def end_step(self, stepped: bool, shards_are_written: bool = False) -> None:
        """After an optimizer step: shards follow the masters, gathered copies are dropped.

        Args:
            stepped: False: the weights did not change.
            shards_are_written: Those of ``shard_arenas`` follow already.
        """

    def weights_changed(self) -> None:
        """As ``end_step``, where something else than an optimizer wrote the masters."""

    def check_weights_may_change(self) -> None:
        """Raises ``ShardedError`` inside ``unshard``, and where a gathered copy was changed."""

    def begin_join(self) -> None: ...
    def end_join(self, failed: bool) -> None:
        """Takes part in the forwards that other ranks still run. Collective: the world."""

    def pin(self, unit: int) -> None:
        """Gathers until ``unpin``. Collective: the sharding group."""

    def unpin(self, unit: int, write_back: bool) -> None: ...
    def write_parameter(self, parameter: int, full: torch.Tensor) -> None:
        """Sets this rank's part of a parameter; ``full`` is the same on all ranks."""

    def gradient_arenas(self) -> list[torch.Tensor]:
        """Laid out like ``master_arenas``; the world's mean after ``finish_gradients``."""

    def master_arenas(self) -> list[torch.Tensor]: ...
    def shard_arenas(self) -> list[torch.Tensor | None]:
        """What gathers send, by arena, laid out like it; None where that is the master itself, or
        where dtypes are mixed."""

    def arena_of(self, parameter: int) -> int:
        """Index of the arena that holds a parameter; -1 if it is frozen."""

    def arena_begin_of(self, parameter: int) -> int:
        """First element of this rank's piece in its arena."""

    def piece_of(self, arena_like: torch.Tensor, parameter: int) -> torch.Tensor:
        """This rank's piece of a parameter in a tensor laid out like its arena: a 1-D view."""

    def piece_from_full(self, parameter: int, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a full tensor of the parameter's shape, 1-D."""

    def write_piece(self, arena_like: torch.Tensor, parameter: int, full: torch.Tensor) -> None: ...
    def gather_full(self, arena_like: torch.Tensor, parameter: int, tag: str) -> torch.Tensor:
        """The full tensor whose pieces lie in ``arena_like``. Collective: the sharding group."""

    def gather_masters(self, unit: int) -> dict[int, torch.Tensor]:
        """A unit's trainable parameters, from the masters. Collective: the sharding group."""

    @property
    def num_units(self) -> int: ...
    def unit_name(self, unit: int) -> str: ...
    @property
    def parameters(self) -> list[ParameterPlace]: ...
    def is_gathered(self, unit: int) -> bool: ...
    @property
    def groups(self) -> ProcessGroups: ...
    def forward_plan(self) -> list[int]:
        """Units in the order in which the next forward expects them."""

    def statistics(self) -> dict[str, Any]:
        """``seconds`` and ``hidden_seconds`` (gather, reduce, second_hop), ``hidden_share``,
        ``persistent_bytes``, ``pool_bytes``, ``peak_bytes``, ``pool_allocations`` and
        ``num_deviations`` of this rank."""

    def record_timeline(self, max_events: int) -> None:
        """Keeps so many events from here on."""

    def take_timeline(self) -> list[tuple[str, str, float, float]]:
        """Lane, name, begin and end in microseconds since the epoch."""

# Optimizer kernels (optim/*.hpp): 1-D contiguous CPU tensors of one dtype, float32 or float64.

class AdamSettings:
    """Hyper-parameters of torch.optim.Adam and AdamW (``decoupled_weight_decay``)."""

    def __init__(
        self,
        *,
        lr: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
    ) -> None: ...
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    maximize: bool
    def __eq__(self, other: object) -> bool: ...

class SgdSettings:
    """Hyper-parameters of torch.optim.SGD."""

    def __init__(
        self,
        *,
        lr: float = 0.001,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None: ...
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    def __eq__(self, other: object) -> bool: ...

class Segment:
    """Elements [begin, end) of an arena that share hyper-parameters and age."""

    SKIPPED: ClassVar[int]
    """``group`` of elements that are not updated this time."""

    def __init__(self, begin: int, end: int, group: int = 0, step: int = 1) -> None: ...
    begin: int
    end: int
    group: int
    step: int
    def __eq__(self, other: object) -> bool: ...

class StochasticRounding:
    """Where the random bits come from that round fp32 moments to bf16.

    They follow from these, the step and the element. ``stream`` tells apart what should not share
    bits; ``first_element`` is the index of an arena's first one.
    """

    def __init__(self, *, seed: int = 0, stream: int = 0, first_element: int = 0) -> None: ...
    def __eq__(self, other: object) -> bool: ...

class ShardUpdate:
    """The kernel calls of one step, merged once and applied to arenas of that shape.

    Raises:
        InvalidArgument: segments out of order, overlapping or outside the arena; a buffer that is
            not an arena long; a group without settings. Nothing was written then.
    """

    def __init__(self, arena_numel: int, segments: Sequence[Segment]) -> None: ...
    @property
    def arena_numel(self) -> int: ...
    @property
    def passes(self) -> list[Segment]:
        """One kernel call each."""

    def advance(self) -> None:
        """The next step of the same segments: all of them are one update older."""

    def adam(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        settings: Sequence[AdamSettings],
        grad_scale: float = 1.0,
        bf16_shard: torch.Tensor | None = None,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """``rounding``: moments are bf16, masters fp32."""

    def sgd(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        momentum_buffer: torch.Tensor | None,
        settings: Sequence[SgdSettings],
        grad_scale: float = 1.0,
        rounding: StochasticRounding | None = None,
    ) -> None: ...

def merge_segments(segments: Sequence[Segment], swallow_padding: bool = True) -> list[Segment]:
    """Joins neighbours of equal group and step; drops skipped and empty segments."""

def adam_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    settings: AdamSettings,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """One step of Adam or AdamW in place; ``step`` is 1 for the first."""

def sgd_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    settings: SgdSettings,
    first_step: bool,
    grad_scale: float = 1.0,
) -> None:
    """One step of SGD in place; ``first_step`` overwrites the momentum buffer."""

def sum_of_squares(values: torch.Tensor) -> float:
    """In double, over blocks of fixed size: bits do not depend on the CPU."""

def power_sum(values: torch.Tensor, p: float) -> float:
    """Sum of |x|^p; p = 0 counts the elements that are not 0."""

def abs_max(values: torch.Tensor) -> float:
    """Largest |x|; NaN if any element is."""

def all_finite(values: torch.Tensor) -> bool: ...
