"""What a message costs on each kind of link: measured by ``hopshard tune``, read by ``init``.

Flat or two-level collectives are chosen per call by these (topology/link_cost.hpp). Next:
transports.py.
"""

from __future__ import annotations

import pathlib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hopshard import _C
from hopshard.errors import ConfigError


class LinkCost(BaseModel):
    """A message of b bytes takes ``alpha_us + b / (1000 * gb_per_s)`` microseconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    alpha_us: float = Field(ge=0)
    """Microseconds of one step, whatever its size."""
    gb_per_s: float = Field(gt=0)
    """10^9 bytes a second: of one rank inside a node, of the node's whole link between nodes."""


class LinkCosts(BaseModel):
    """Both levels; the defaults are a host's memory and a 10 Gbit/s network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    intra_node: LinkCost = LinkCost(alpha_us=10.0, gb_per_s=5.0)
    inter_node: LinkCost = LinkCost(alpha_us=50.0, gb_per_s=1.2)
    measured: dict[str, str | int | float] = {}
    """How it was measured, for people: backends, layout, date, versions."""

    def as_native(self) -> _C.NodeLinkCosts:
        """For the native chooser."""
        return _C.NodeLinkCosts(
            intra_alpha_us=self.intra_node.alpha_us,
            intra_gb_per_s=self.intra_node.gb_per_s,
            inter_alpha_us=self.inter_node.alpha_us,
            inter_gb_per_s=self.inter_node.gb_per_s,
        )

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the file that ``load_link_costs`` reads."""
        pathlib.Path(path).write_text(self.model_dump_json(indent=2) + "\n")


def load_link_costs(path: str | pathlib.Path) -> LinkCosts:
    """Reads a file that ``hopshard tune`` wrote.

    Raises:
        ConfigError: it cannot be read, or a field is not legal; names both.
    """
    try:
        return LinkCosts.model_validate_json(pathlib.Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"link costs: cannot read '{path}': {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise ConfigError(
            f"link costs '{path}': {where}: {first['msg']}; 'hopshard tune --output {path}' makes "
            "a new one"
        ) from None


def describe_link_costs(path: str) -> str:
    """What ``path`` holds, or why it cannot be read, as text that ranks compare."""
    if not path:
        return "built-in"
    try:
        return load_link_costs(path).model_dump_json(exclude={"measured"})
    except ConfigError as error:
        return str(error)
