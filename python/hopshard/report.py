"""Turns the folder of a run into one page: ``report.html`` and ``loss.png``.

The page loads nothing from anywhere: figures are inline SVG that takes the page's text
colour, so that it reads in light and dark. What it draws is what run_log.py wrote.
"""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hopshard.layout_picture import COLOURS, count, describe_layout, draw_layout, layout_of
from hopshard.run_log import Run, flatten, is_number, read_run

REPORT_FILE = "report.html"
LOSS_FILE = "loss.png"

QUIET = "#8a8f98"
# Matplotlib wants a real colour; the page replaces this one by its own text colour.
INK = "#012345"

PARTS = {  # Keys of `split_ms`; the first one lies at the bottom of the stack.
    "compute": "compute",
    "gather": "gather parameters",
    "reduce": "reduce in the group (hop 1)",
    "second_hop": "reduce across groups (hop 2)",
    "optimizer": "optimizer",
}
PART_COLOURS = {
    "gather": COLOURS[0],
    "compute": QUIET,
    "reduce": COLOURS[2],
    "second_hop": COLOURS[1],
    "optimizer": COLOURS[3],
}
LINKS = {"intra_node": "inside a node", "inter_node": "between nodes"}
LINK_COLOURS = {"intra_node": COLOURS[0], "inter_node": COLOURS[1]}


def write_report(run_dir: str | Path) -> Path:
    """Writes ``report.html`` and ``loss.png`` into the folder of a run.

    Works on a run that is still going or died; a section without numbers says so.

    Args:
        run_dir: A folder written by `RunLog`.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: The folder is not a run.
    """
    folder = Path(run_dir)
    run = read_run(folder)
    page = render_report(run, title=str(run.facts.get("name", folder.resolve().name)))
    path = folder / REPORT_FILE
    path.write_text(page, encoding="utf-8")
    save_loss_figure(run, folder / LOSS_FILE)
    return path


def render_report(run: Run, title: str) -> str:
    """The page as text; nothing is written."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = format_bytes
    facts = run.facts
    return environment.get_template("report.html.j2").render(
        title=title,
        lead=describe_run(facts),
        sample=facts.get("sample", ""),
        prompt=str(facts.get("prompt", "")).strip(),
        data=facts.get("data", ""),
        tiles=summarize(run),
        loss=Markup(draw_loss(run)),
        split=Markup(draw_split(run)),
        split_rows=split_rows(run),
        memory=Markup(draw_memory(run)),
        memory_rows=memory_rows(run),
        traffic=Markup(draw_traffic(run)),
        traffic_rows=traffic_rows(run),
        layout=Markup(draw_layout(facts)),
        layout_text=describe_layout(facts),
        settings=sorted(flatten(facts.get("settings", {})).items()),
        columns=table_columns(run.records),
        rows=[flatten(record) for record in run.records],
        show=show_value,
    )


# ---- Numbers ---------------------------------------------------------------------------


def describe_run(facts: dict[str, Any]) -> str:
    """What was trained, on how many ranks, when; only what the run says."""
    parts = [str(facts["model"])] if facts.get("model") else []
    if is_number(facts.get("num_parameters")):
        parts.append(f"{facts['num_parameters']:,} parameters")
    layout = layout_of(facts)
    if layout is not None:
        parts.append(f"{count(layout[0], 'rank')}, degree {layout[2]}")
    if facts.get("started"):
        parts.append(str(facts["started"]))
    return " · ".join(parts)


@dataclass(frozen=True)
class Tile:
    """One number at the top of the page."""

    label: str
    value: str
    note: str = ""


def summarize(run: Run) -> list[Tile]:
    """What a reader wants to know first; numbers that the run lacks are left out."""
    tiles: list[Tile] = []
    _, losses = run.series("loss")
    _, val_losses = run.series("val_loss")
    if val_losses:
        first = run.facts.get("first_val_loss")
        note = "nats per byte" + (f", from {first:.2f}" if is_number(first) else "")
        tiles.append(Tile("validation loss", f"{val_losses[-1]:.3f}", note))
    elif losses:
        tiles.append(Tile("training loss", f"{losses[-1]:.3f}", f"from {losses[0]:.2f}"))
    _, speeds = run.series("tokens_per_s")
    if speeds:
        tiles.append(
            Tile("speed", f"{statistics.median(speeds):,.0f}", "tokens per second, all ranks")
        )
    _, step_ms = run.series("step_ms")
    if step_ms:
        tiles.append(Tile("step", f"{statistics.median(step_ms):,.0f} ms", "median"))
    _, peaks = run.series("peak_bytes")
    if peaks:
        tiles.append(Tile("peak memory", format_bytes(max(peaks)), "per rank, by the engine"))
    _, crossing = run.series("bytes_sent.inter_node")
    if crossing:
        median_bytes = format_bytes(statistics.median(crossing))
        tiles.append(Tile("between nodes", median_bytes, "sent per rank and step"))
    if is_number(run.facts.get("hidden_share")):
        share = f"{run.facts['hidden_share']:.0%}"
        tiles.append(Tile("communication hidden", share, "at least; beside the computation"))
    if is_number(run.facts.get("seconds")):
        duration = timedelta(seconds=round(run.facts["seconds"]))
        last_step = run.records[-1]["step"] if run.records else 0
        tiles.append(Tile("training time", str(duration), f"{last_step:,} steps"))
    return tiles


def split_rows(run: Run) -> list[tuple[str, str, float, float]]:
    """Colour, part, mean milliseconds, share of the step; the largest first."""
    means = {
        part: statistics.fmean(values)
        for part in PARTS
        if (values := run.series(f"split_ms.{part}")[1])
    }
    total = sum(means.values()) or 1.0
    rows = [(PART_COLOURS[part], PARTS[part], ms, ms / total) for part, ms in means.items()]
    return sorted(rows, key=lambda row: -row[2])


def memory_rows(run: Run) -> list[tuple[str, float]]:
    """What the engine accounts for, beside what one rank would hold without sharding."""
    rows: list[tuple[str, float]] = []
    _, peaks = run.series("peak_bytes")
    if peaks:
        rows.append(("peak of this rank", max(peaks)))
    _, persistent = run.series("persistent_bytes")
    if persistent:
        rows.append(("kept all the time", persistent[-1]))
    if is_number(run.facts.get("unsharded_bytes")):
        rows.append(("the same without sharding", run.facts["unsharded_bytes"]))
    return rows


def traffic_rows(run: Run) -> list[tuple[str, str, float, float]]:
    """Colour, link, median bytes per step, share."""
    medians = {
        link: statistics.median(values)
        for link in LINKS
        if (values := run.series(f"bytes_sent.{link}")[1])
    }
    total = sum(medians.values()) or 1.0
    return [(LINK_COLOURS[link], LINKS[link], n, n / total) for link, n in medians.items()]


def table_columns(records: Sequence[dict[str, Any]]) -> list[str]:
    """All keys of all records, in the order in which they first appear."""
    return list(dict.fromkeys(key for record in records for key in flatten(record)))


def format_bytes(count: float) -> str:
    """Decimal units, three digits: 7.41 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def show_value(key: str, value: Any) -> str:
    """A cell of the table; a missing or non-finite number is a dash."""
    if value is None or value == "":
        return "–"
    if not is_number(value):
        return str(value)
    if "bytes" in key:
        return format_bytes(value)
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2e}" if 0 < abs(value) < 0.001 else f"{value:.3f}"


# ---- Figures ---------------------------------------------------------------------------


def draw_loss(run: Run) -> str:
    """Loss curves as inline SVG."""
    figure, axes = new_figure()
    plot_loss(axes, run)
    return to_svg(figure, "loss", "Training and validation loss by step")


def plot_loss(axes: Axes, run: Run) -> None:
    """Training and validation on one pair of axes; the page and the picture share it."""
    steps, losses = run.series("loss")
    axes.plot(steps, losses, color=COLOURS[0], linewidth=1.4, label="training")
    steps, losses = run.series("val_loss")
    if is_number(run.facts.get("first_val_loss")):
        steps, losses = [0, *steps], [run.facts["first_val_loss"], *losses]
    if steps:
        axes.plot(
            steps, losses, color=COLOURS[1], marker="o", markersize=4, linewidth=1.4,
            label="validation",
        )  # fmt: skip
        axes.annotate(
            f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(0, 8),
            textcoords="offset points", ha="right", color=COLOURS[1], weight="bold",
        )  # fmt: skip
    axes.set_ylabel("nats per byte")
    finish(axes)


def draw_split(run: Run) -> str:
    """Stacked areas: where the time of a step goes."""
    series = {part: run.series(f"split_ms.{part}") for part in PARTS}
    series = {part: xy for part, xy in series.items() if xy[0]}
    if not series:
        return ""
    # Parts that appear only in some records would shift the stack: keep the common steps.
    common = sorted(set.intersection(*(set(steps) for steps, _ in series.values())))
    stacks = [[dict(zip(*xy, strict=True))[step] for step in common] for xy in series.values()]
    figure, axes = new_figure()
    axes.stackplot(
        common, *stacks, labels=[PARTS[part] for part in series],
        colors=[PART_COLOURS[part] for part in series], alpha=0.85, linewidth=0,
    )  # fmt: skip
    axes.set_ylabel("ms per step")
    axes.set_ylim(bottom=0)
    finish(axes, reverse_legend=True)
    return to_svg(figure, "split", "Time of a step by part")


def draw_memory(run: Run) -> str:
    """The engine's account over the run, against what one rank would hold unsharded."""
    steps, peaks = run.series("peak_bytes")
    if not steps:
        return ""
    figure, axes = new_figure()
    axes.plot(steps, in_mb(peaks), color=COLOURS[0], linewidth=1.6, label="peak of this rank")
    steps, persistent = run.series("persistent_bytes")
    if steps:
        axes.plot(
            steps, in_mb(persistent), color=COLOURS[2], linewidth=1.6, label="kept all the time"
        )
    if is_number(run.facts.get("unsharded_bytes")):
        axes.axhline(
            run.facts["unsharded_bytes"] / 1e6, color=QUIET, linestyle=(0, (4, 3)),
            linewidth=1.2, label="the same without sharding",
        )  # fmt: skip
    axes.set_ylabel("MB")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    finish(axes)
    return to_svg(figure, "memory", "Memory of this rank")


def draw_traffic(run: Run) -> str:
    """Bytes that this rank sends in a step, by link."""
    series = {link: run.series(f"bytes_sent.{link}") for link in LINKS}
    if not any(steps for steps, _ in series.values()):
        return ""
    figure, axes = new_figure()
    for link, (steps, values) in series.items():
        axes.plot(
            steps, in_mb(values), color=LINK_COLOURS[link], linewidth=1.6,
            label=f"{LINKS[link]}",
        )  # fmt: skip
    axes.set_ylabel("MB per step")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    finish(axes)
    return to_svg(figure, "traffic", "Bytes sent by this rank in a step")


def save_loss_figure(run: Run, path: Path) -> None:
    """The loss curve as a picture of its own, on white."""
    with rc_context({"font.size": 11}):
        figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        plot_loss(axes, run)
        axes.set_title(str(run.facts.get("name", "loss")))
        figure.savefig(path, format="png")


def in_mb(values: Sequence[float]) -> list[float]:
    """Bytes as megabytes, for an axis."""
    return [value / 1e6 for value in values]


def new_figure() -> tuple[Figure, Axes]:
    """A transparent figure in the ink that `to_svg` replaces."""
    with rc_context(
        {
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "font.family": "sans-serif",
            "font.size": 10,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    ):
        figure = Figure(figsize=(8.4, 3.2), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
    return figure, axes


def finish(axes: Axes, reverse_legend: bool = False) -> None:
    """What all figures share: the step below, few lines, the legend outside of the data."""
    axes.set_xlabel("step")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=QUIET, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        if reverse_legend:  # As the layers lie above one another.
            handles, labels = handles[::-1], labels[::-1]
        ink = axes.xaxis.label.get_color()
        axes.legend(
            handles, labels, frameon=False, labelcolor=ink, fontsize=9, loc="upper left",
            bbox_to_anchor=(1.0, 1.0), borderaxespad=0,
        )  # fmt: skip


def to_svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an element for the middle of a page, in the page's colour and font."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(
            buffer, format="svg",
            metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
        )  # fmt: skip
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)  # Known to the parser of the page.
    svg = svg.replace("xlink:href", "href").replace(INK, "currentColor")
    # Several figures share one page, and matplotlib numbers each from one.
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?)\sheight="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
