"""The group layout as a picture and in words: nodes, ranks, sharding and replication groups.

Pure: the facts of a run in, text out. Next: report.py, which puts it on the page.
"""

from __future__ import annotations

from typing import Any

# Mid-tones that stand out from a white and from a nearly black page.
COLOURS = ("#3b82d6", "#e0803a", "#2f9e6e", "#b05cc0", "#c9a227", "#d9536f", "#4aa5b5", "#8a7a66")

MAX_DRAWN_NODES = 16
MAX_DRAWN_RANKS_PER_NODE = 16


def layout_of(facts: dict[str, Any]) -> tuple[int, int, int] | None:
    """World size, ranks per node, degree; None where the run does not say."""
    world_size, ranks_per_node, degree = (
        value if isinstance(value, int) and value >= 1 else 0
        for value in (facts.get(key) for key in ("world_size", "ranks_per_node", "degree"))
    )
    if 0 in (world_size, ranks_per_node, degree):
        return None
    return world_size, min(ranks_per_node, world_size), min(degree, world_size)


def describe_layout(facts: dict[str, Any]) -> str:
    """The layout in one sentence."""
    layout = layout_of(facts)
    if layout is None:
        return ""
    world_size, ranks_per_node, degree = layout
    nodes = -(-world_size // ranks_per_node)
    replicas = world_size // degree
    return (
        f"{count(world_size, 'rank')} on {count(nodes, 'node')}: "
        f"{count(replicas, 'sharding group')} of {count(degree, 'rank')}. "
        f"Each rank keeps 1/{degree} of the model"
        + (
            f", and {replicas} ranks keep the same slice: they sum gradients once per step."
            if replicas > 1
            else "; there is one replica, so there is no second hop."
        )
    )


def count(number: int, word: str) -> str:
    """Number and word, as in: 1 rank, 2 ranks."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def draw_layout(facts: dict[str, Any]) -> str:
    """Nodes, ranks, sharding groups by colour and letter, replication groups as links.

    Sharding groups are blocks of `degree` consecutive ranks; the ranks at one place of
    each block form a replication group.
    """
    layout = layout_of(facts)
    if layout is None:
        return ""
    world_size, ranks_per_node, degree = layout
    num_nodes = -(-world_size // ranks_per_node)
    drawn_nodes = min(num_nodes, MAX_DRAWN_NODES)
    drawn_per_node = min(ranks_per_node, MAX_DRAWN_RANKS_PER_NODE)

    pitch, radius, pad, foot, gap = 64, 22, 14, 26, 52
    columns = min(drawn_per_node, 8)
    rows = -(-drawn_per_node // columns)
    node_width, node_height = columns * pitch + 2 * pad, pad + rows * pitch + foot
    fitting = max(1, 1000 // (node_width + gap))
    node_rows = -(-drawn_nodes // fitting)
    per_row = -(-drawn_nodes // node_rows)  # Rows of equal length.
    arc = 44  # Room above the nodes for the links.
    width = per_row * (node_width + gap) - gap + 8
    height = arc + node_rows * (node_height + gap) - gap + 8

    centres: dict[int, tuple[float, float]] = {}
    boxes: list[str] = []
    labels: list[str] = []
    for node in range(drawn_nodes):
        left = 4 + node % per_row * (node_width + gap)
        top = arc + node // per_row * (node_height + gap)
        boxes.append(
            f'<rect class="node" x="{left}" y="{top}" width="{node_width}" '
            f'height="{node_height}" rx="12"/>'
        )
        labels.append(
            f'<text class="label" x="{left + pad}" y="{top + node_height - 10}">node {node}</text>'
        )
        for local_rank in range(drawn_per_node):
            rank = node * ranks_per_node + local_rank
            if rank < world_size:
                centres[rank] = (
                    left + pad + (local_rank % columns + 0.5) * pitch,
                    top + pad + (local_rank // columns + 0.5) * pitch,
                )

    links = [
        draw_link(centres[rank], centres[rank + degree], rank, degree, radius)
        for rank in centres
        if rank + degree in centres
    ]
    circles: list[str] = []
    for rank, (x, y) in centres.items():
        group, place = divmod(rank, degree)
        colour = COLOURS[group % len(COLOURS)]
        circles.append(
            f"<g><title>rank {rank}: sharding group {group_letter(group)}, slice holder "
            f"{place + 1} of {degree}</title>"
            f'<circle class="rank" cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>'
            f'<text class="rank-number" x="{x:.1f}" y="{y:.1f}">{rank}</text>'
            f'<text class="rank-group" x="{x:.1f}" y="{y + 13:.1f}">{group_letter(group)}</text>'
            "</g>"
        )
    left_out = ""
    if len(centres) < world_size:
        left_out = f'<p class="note">{len(centres)} of {world_size} ranks are drawn.</p>'
    return (
        f'<svg role="img" aria-label="Group layout" viewBox="0 0 {width} {height}" '
        f'class="layout" style="max-width: {width}px">'
        + "".join(boxes + links + labels + circles)
        + f"</svg>{left_out}"
    )


def draw_link(
    start: tuple[float, float], end: tuple[float, float], rank: int, degree: int, radius: int
) -> str:
    """A curve over the ranks that lie between two members of a replication group."""
    (x1, y1), (x2, y2) = start, end
    # Links of neighbouring places differ in height, or they would lie on one another.
    lift = 26 + 16 * (rank % degree % 3) if y1 == y2 else 0
    middle_x, middle_y = (x1 + x2) / 2, min(y1, y2) - radius - 1.6 * lift if lift else (y1 + y2) / 2
    if lift:
        y1, y2 = y1 - radius, y2 - radius
    return (
        f'<path class="link" d="M {x1:.1f} {y1:.1f} Q {middle_x:.1f} {middle_y:.1f} '
        f'{x2:.1f} {y2:.1f}"><title>ranks {rank} and {rank + degree} keep the same slice'
        "</title></path>"
    )


def group_letter(group: int) -> str:
    """Name of a sharding group: A, B, … Z, AA, AB and so on."""
    letters = ""
    group += 1
    while group:
        group, rest = divmod(group - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters
