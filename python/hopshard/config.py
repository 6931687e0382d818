"""What a user may set, checked before anything starts.

One frozen ``Config`` per world. Names follow SMP's where it has one, with the aliases that users
of other libraries know. Unknown names and illegal values are ``ConfigError``. Next: world.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from hopshard.errors import ConfigError

_MIB: Final = 1024 * 1024

BACKENDS: Final = ("c10d", "shm", "mpi", "nccl", "ofi")
"""Transports that processes can use."""

ALIASES: Final[Mapping[str, str]] = {
    "dp_shard_size": "sharded_data_parallel_degree",
    "hybrid_shard_degree": "sharded_data_parallel_degree",
    "sdp_gradient_clipping": "gradient_clipping",
    "sdp_param_persistence_threshold": "param_persistence_threshold",
}
"""Other libraries' names and ours."""

ENVIRONMENT: Final[Mapping[str, str]] = {
    "HOPSHARD_RANKS_PER_NODE": "ranks_per_node",
    "HOPSHARD_TIMEOUT_S": "timeout_s",
    "HOPSHARD_LOG_LEVEL": "log_level",
    "HOPSHARD_BACKEND": "backend",
    "HOPSHARD_LINK_COSTS": "link_costs",
    "HOPSHARD_TRACE_FOLDER": "trace_folder",
}
"""Environment variables that fill a field which the program left at its default."""


class Config(BaseModel):
    """Settings of one world. Immutable; equal configs make equal worlds.

    All ranks must pass the same values, except where a field says otherwise.

    >>> Config(dp_shard_size=2).sharded_data_parallel_degree
    2

    Raises:
        ConfigError: an unknown name, a wrong type, a value out of range, or two names of the
            same field with different values.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    sharded_data_parallel_degree: int = Field(default=1, ge=1)
    """Ranks that share one copy of the model (p). 1 replicates it on every rank, the world size
    shards it over all. Must divide the world size. Aliases: ``dp_shard_size``,
    ``hybrid_shard_degree``."""

    backend: str = Field(
        default="auto",
        pattern=rf"^(auto|({'|'.join(BACKENDS)})(\+({'|'.join(BACKENDS)}))?)$",
        json_schema_extra={
            "legal": f"'auto', one of {', '.join(map(repr, BACKENDS))}, or one inside nodes and "
            "one between them: 'shm+c10d'"
        },
    )
    """Transport of the collectives: ``c10d`` (torch's gloo), ``shm``, ``mpi``, ``ofi`` or ``nccl``,
    or one inside nodes and one between them, such as ``shm+c10d``. ``auto`` takes the best that
    all ranks have: shared memory inside nodes, EFA or gloo between them. ``hopshard doctor`` lists
    them. Environment: ``HOPSHARD_BACKEND``."""

    link_costs: str = ""
    """File that ``hopshard tune`` wrote: what the links cost, by which flat or two-level
    collectives are chosen per call. Empty: built-in costs. Environment:
    ``HOPSHARD_LINK_COSTS``."""

    timeout_s: float = Field(default=300.0, gt=0, le=86400)
    """Seconds that one collective, or the start-up of the world, may wait for its peers before it
    raises ``TimeoutError``. Environment: ``HOPSHARD_TIMEOUT_S``."""

    ranks_per_node: int | None = Field(default=None, ge=1)
    """Ranks of one node. None: detected from the launcher. A value below the real one makes one
    host look like several nodes, to try hierarchical groups without a cluster. Environment:
    ``HOPSHARD_RANKS_PER_NODE``."""

    gradient_clipping: float = Field(default=0.0, ge=0)
    """Largest 2-norm of the whole model's gradient; it is scaled down to it inside ``step()``.
    0 is off. Alias: ``sdp_gradient_clipping``."""

    microbatches: int = Field(default=1, ge=1)
    """Parts into which ``@hs.step`` cuts each batch; gradients are synchronised across replicas
    once, after the last."""

    second_hop_bucket_bytes: int = Field(default=64 * _MIB, ge=1)
    """Most bytes of gradient shards that travel between replicas in one all-reduce. Small models
    use less, so that the first of about four can start early in the last backward. Larger buckets
    use slow links better, smaller ones overlap more."""

    prefetch_depth: int = Field(default=1, ge=0)
    """Units that are gathered ahead of their use, while others compute. Each costs the memory of
    one gathered unit; 0 gathers on demand."""

    reshard_after_forward: bool | int = Field(
        default=True,
        json_schema_extra={
            "legal": "True, False, or an integer of at least 2 that divides "
            "sharded_data_parallel_degree"
        },
    )
    """Let units go after their forward and gather them again for the backward. False saves that
    second gather and costs the memory of the whole model from forward to backward. A number k lets
    them go to a smaller group of k neighbouring ranks, such as one node: each keeps a k-th of the
    model in the dtype of the computation, and until the next ``optimizer.step()`` all further
    gathers stay inside that group."""

    param_persistence_threshold: int = Field(default=0, ge=0)
    """Parameters with fewer elements than this are gathered once per step, all together, instead of
    with their units in every forward and backward. They stay whole on every rank from the first
    forward of a step to its ``optimizer.step()``. Alias: ``sdp_param_persistence_threshold``."""

    optimizer_state_sharding: Literal["group", "world"] = "group"
    """Where the optimizer's moments lie: divided by the degree, each replica with a whole copy, or
    divided over the world. The latter saves memory and costs a broadcast of each replica's part of
    the weights after every step. Adam, AdamW and SGD."""

    optimizer_state_dtype: Literal["fp32", "bf16"] = "fp32"
    """How the optimizer's moments are kept. ``bf16`` halves their memory: they are read to fp32,
    updated there, and rounded stochastically as they are stored. Adam, AdamW and SGD, parameters
    in fp32, bf16 or fp16."""

    optimizer_state_seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Of the random bits that round moments to ``bf16``. Runs with equal seeds repeat exactly."""

    trace_folder: str = ""
    """Folder where every rank writes a trace of its models when they or the process end; see
    ``hopshard trace``. Empty: none. Ranks may differ. Environment: ``HOPSHARD_TRACE_FOLDER``."""

    simulate_delays_us: int = Field(default=0, ge=0, le=10**6)
    """For tests: above 0, every collective runs on a stream that begins up to so many microseconds
    late, as on a GPU, and memory that is not ready or no longer owned reads as NaN. What only works
    because a CPU waits comes out."""

    check_consistency: bool = True
    """Compare the model (names, shapes, initial values) across ranks when it is wrapped. The
    configuration itself is always compared."""

    log_level: Literal["debug", "info", "warning", "error", "off"] = "info"
    """Least severe message that is shown. Ranks may differ. Environment: ``HOPSHARD_LOG_LEVEL``."""

    @field_validator("reshard_after_forward")
    @classmethod
    def _check_smaller_group(cls, value: bool | int, info: ValidationInfo) -> bool | int:
        degree = info.data.get("sharded_data_parallel_degree")
        if not isinstance(value, bool) and (value < 2 or (degree or value) % value):
            raise ValueError("not a divisor of the degree")
        return value

    @property
    def secondary_degree(self) -> int:
        """Ranks that gather from secondary shards; 0: there are none."""
        k = self.reshard_after_forward
        return 0 if isinstance(k, bool) or k == self.sharded_data_parallel_degree else k

    def __init__(self, **values: Any) -> None:
        values = _resolve_names(values)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @classmethod
    def from_user(cls, config: Mapping[str, Any] | Config | None = None, **kw: Any) -> Config:
        """Builds a Config from what a program passed to ``hs.init``.

        Args:
            config: A mapping, a Config, or None for the defaults.
            **kw: Fields that override ``config``'s.

        Raises:
            ConfigError: see ``Config``.
        """
        if isinstance(config, Config):
            return cls(**{**config.given(), **_resolve_names(kw)}) if kw else config
        if config is None:
            return cls(**kw)
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"the configuration must be a mapping or a hopshard.Config, got "
                f"{type(config).__name__}: {config!r}"
            )
        strange = [key for key in config if not isinstance(key, str)]
        if strange:
            raise ConfigError(f"configuration keys must be text, got {strange[0]!r}")
        return cls(**{**_resolve_names(dict(config)), **_resolve_names(kw)})

    def given(self) -> dict[str, Any]:
        """The fields that were set explicitly."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set)}

    def with_environment(self, environ: Mapping[str, str]) -> Config:
        """Fills fields that were not given from ``ENVIRONMENT``.

        Raises:
            ConfigError: a variable holds something illegal; the text names it.
        """
        values = self.given()
        for variable, name in ENVIRONMENT.items():
            text = environ.get(variable, "").strip()
            if not text or name in values:
                continue
            value = _parse(text) if _is_number(name) else text
            try:
                Config(**{name: value})
            except ConfigError as error:
                raise ConfigError(f"environment variable {variable}: {error}") from None
            values[name] = value
        return Config(**values)

    def must_agree(self) -> dict[str, Any]:
        """The effective values that have to be equal on all ranks."""
        return self.model_dump(exclude={"log_level", "trace_folder"})


def known_keys() -> list[str]:
    """All legal names, aliases included."""
    return [*Config.model_fields, *ALIASES]


def _resolve_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces aliases by our names; refuses unknown names and contradictions."""
    resolved: dict[str, Any] = {}
    source: dict[str, str] = {}
    for key, value in values.items():
        if key not in Config.model_fields and key not in ALIASES:
            raise ConfigError(_explain_unknown(key))
        name = ALIASES.get(key, key)
        if name in resolved and (
            resolved[name] != value or type(resolved[name]) is not type(value)
        ):
            raise ConfigError(
                f"configuration keys '{source[name]}' ({resolved[name]!r}) and '{key}' "
                f"({value!r}) name the same setting and contradict each other; keep one"
            )
        resolved[name] = value
        source[name] = key
    return resolved


def _explain_unknown(key: str) -> str:
    near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.4)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return f"unknown configuration key '{key}'{hint} Known keys: {', '.join(sorted(known_keys()))}"


def _is_number(name: str) -> bool:
    return Config.model_fields[name].annotation in (int, float, int | None)


def _parse(text: str) -> Any:
    """A number where the text is one; the field decides whether it may be."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _legal(name: str) -> str:
    field = Config.model_fields[name]
    schema = Config.model_json_schema()["properties"][name]
    if "legal" in schema:
        return f"{schema['legal']} (default {field.default!r})"
    variants = schema.get("anyOf", [schema])
    words: list[str] = []
    for variant in variants:
        if "enum" in variant:
            words.append("one of " + ", ".join(repr(choice) for choice in variant["enum"]))
        elif variant["type"] == "null":
            words.append("None")
        else:
            kind = {
                "integer": "an integer",
                "number": "a number",
                "boolean": "True or False",
                "string": "text",
            }
            word = kind[variant["type"]]
            if "minimum" in variant:
                word += f" >= {variant['minimum']:g}"
            if "exclusiveMinimum" in variant:
                word += f" > {variant['exclusiveMinimum']:g}"
            if "maximum" in variant:
                word += f" and <= {variant['maximum']:g}"
            words.append(word)
    return f"{' or '.join(words)} (default {field.default!r})"


def _explain(error: ValidationError) -> str:
    parts = []
    for name in dict.fromkeys(str(detail["loc"][0]) for detail in error.errors()):
        value = next(d["input"] for d in error.errors() if d["loc"][0] == name)
        parts.append(
            f"configuration key '{name}' cannot be {value!r} ({type(value).__name__}); "
            f"legal: {_legal(name)}"
        )
    return "; ".join(parts)
