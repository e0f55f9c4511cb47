"""Write the results of ``diffuplug eval --all``: a table, a page around it and a plot."""

import json
from importlib import import_module
from itertools import product
from math import hypot
from pathlib import Path
from typing import Any, NamedTuple


class Way(NamedTuple):
    """Name one way of decoding."""

    strategy: str
    policy: str
    steps: int | None  # per block; None for policies that follow no schedule

    @property
    def name(self) -> str:
        """Return the label of the progress bar."""
        steps = f", {self.steps} steps" if self.steps else ""
        return f"{self.strategy}, {self.policy}{steps}"


class Row(NamedTuple):
    """Hold a way of decoding and its score."""

    strategy: str
    policy: str
    steps: int | None
    accuracy: float
    tokens_per_forward: float
    positions_per_token: float
    seconds: float


FOLDER = Path("benchmarks/reports")
PANELS = {
    "tokens_per_forward": "tokens per forward (more is better)",
    "positions_per_token": "computed positions per token (fewer is better)",
}
# Hollow and of different sizes, so that all are visible where strategies coincide.
MARKERS = (("o", 200), ("s", 130), ("^", 80), ("D", 35), ("*", 20))
NEAR_X, NEAR_Y = (
    1.2,
    0.004,
)  # points this near share a label: ratio of x, difference of accuracy
MARKER = 14  # size of the largest marker, in points
# Where a label may stand, in points from what it names: above, below, then to the sides.
HEIGHTS = (*range(12, 100, 6), *range(-90, -17, 6))
PLACES = sorted(product(range(-120, 121, 10), HEIGHTS), key=lambda place: hypot(*place))
READING = """\
*Tokens* are those up to and including the end of the answer. A *forward* is one denoising step of
one request, so tokens per forward does not depend on the batch. *Positions* are all that were
computed: prompts, canvases, recomputed context, and a step that was in flight when its request
ended. *Steps* are denoising steps per block for policies that follow a schedule (as many as the
block is long: one token per step); the others take as many as they need. *Seconds* are those of the
whole batch and depend on what else the machine did. In the plot *all but X* are all policies with a
schedule but X, and a label in black names points of several strategies."""


def reports_folder(output: str | None) -> Path:
    """Return where pages are written. Raises ValueError if it is no folder."""
    folder = Path(output) if output else FOLDER if FOLDER.is_dir() else Path()
    if not folder.is_dir():
        raise ValueError(f"--output {folder} is not a folder")
    return folder


def check_matplotlib() -> None:
    """Raise ValueError if matplotlib is missing, before minutes are spent decoding."""
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(
            "eval --all draws a plot with matplotlib, which is not installed: "
            "pip install '.[plot]' in a clone of DiffuPlug, or pip install matplotlib"
        ) from error


def table(rows: list[Row]) -> str:
    """Format the scores as a Markdown table, aligned for terminals."""
    titles = ("strategy", "policy", "steps", "accuracy", *_headings(), "seconds")
    cells = [
        (
            row.strategy,
            row.policy,
            str(row.steps or "-"),
            f"{row.accuracy:.1%}",
            f"{row.tokens_per_forward:.2f}",
            f"{row.positions_per_token:.1f}",
            f"{row.seconds:.1f}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    lines = [titles, ["-" * width for width in widths], *cells]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def _headings() -> list[str]:
    return [name.replace("_", " ") for name in PANELS]


def page(rows: list[Row], record: dict[str, Any], command: str) -> str:
    """Format the report: what was run, the table, the plot and the JSON line."""
    first, number = record["first_seed"], record["problems"]
    about = {
        "command": f"`{command}`",
        "hardware": record["hardware"],
        "software": ", ".join(
            f"{name} {record[name]}"
            for name in ("diffuplug", "vllm", "torch", "python")
        ),
        "problems": f"{number}, seeds {first} to {first + number - 1}; training seeds lie below",
        "decoding": f"greedy, at most {record['max_tokens']} tokens, blocks of "
        f"{record['block_length']}, threshold 0.9, factor 1; `d2f` with its adapter; one engine "
        "per strategy, policies per request",
    }
    head = "".join(f"| {name} | {value} |\n" for name, value in about.items())
    return (
        "# The bundled model under every strategy and policy\n\n"
        f"| | |\n| --- | --- |\n{head}\n{table(rows)}\n\n"
        f"![accuracy against cost](decoding.png)\n\n{READING}\n\n"
        f"```json\n{json.dumps(record)}\n```\n"
    )


def plot(rows: list[Row], path: Path) -> None:
    """Draw accuracy against cost in two panels, with one marker per strategy.

    Points that coincide share one label, which names their policies.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=(10, 9), dpi=110)
    # Fixed margins, so that labels stay where they were placed.
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.06, top=0.94, hspace=0.17)
    panels = figure.subplots(len(PANELS))
    worst = 100 * min(row.accuracy for row in rows)
    low = min(98.0, worst - 1 - 0.1 * (100 - worst))
    high = 100 + 0.5 * (100 - low)  # room for labels
    for panel, (column, title) in zip(panels, PANELS.items(), strict=True):
        _draw(panel, rows, column)
        panel.set(xscale="log", xlabel=title, ylabel="accuracy in %", ylim=(low, high))
        panel.set_yticks([tick for tick in panel.get_yticks() if low <= tick <= 100])
        panel.margins(x=0.13)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.25)
        panel.autoscale_view()  # labels need the final positions of the points
        _label(panel, rows, column)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, ncols=len(MARKERS), loc="upper center")
    figure.savefig(path)


def _draw(panel: Any, rows: list[Row], column: str) -> None:
    """Draw markers, and a thin line through the step counts of each scheduled policy."""
    by_strategy: dict[str, list[Row]] = {}
    for row in rows:
        by_strategy.setdefault(row.strategy, []).append(row)
    colors = _colors(rows)
    for (strategy, group), (marker, size) in zip(
        by_strategy.items(), MARKERS, strict=False
    ):
        color = colors[strategy]
        curves: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for row in group:
            point = (getattr(row, column), 100 * row.accuracy)
            curves.setdefault((row.policy, row.steps is None), []).append(point)
        for curve in curves.values():
            panel.plot(*zip(*curve, strict=True), color=color, linewidth=0.6, alpha=0.5)
        points = zip(
            *(point for curve in curves.values() for point in curve), strict=True
        )
        panel.scatter(
            *points,
            size,
            marker=marker,
            facecolors="none",
            edgecolors=color,
            label=strategy,
        )


def _label(panel: Any, rows: list[Row], column: str) -> None:
    """Label every cluster of points with its policies, at the nearest free place."""
    colors = _colors(rows)
    taken = [
        _marker_box(panel, getattr(row, column), 100 * row.accuracy) for row in rows
    ]
    for cluster in _clusters(rows, column):
        middle = cluster[len(cluster) // 2]
        point = (getattr(middle, column), 100 * middle.accuracy)
        one_strategy = len({row.strategy for row in cluster}) == 1
        color = colors[middle.strategy] if one_strategy else "black"
        style = {
            "textcoords": "offset points",
            "ha": "center",
            "fontsize": 8,
            "color": color,
        }
        text = panel.annotate(_policies(cluster, rows), point, (0, 0), **style)
        for place in PLACES:
            text.set_position(place)
            box = text.get_window_extent().padded(3)
            inside = all(panel.bbox.contains(*corner) for corner in (box.min, box.max))
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": color}
        panel.annotate("", point, place, textcoords="offset points", arrowprops=line)


def _colors(rows: list[Row]) -> dict[str, str]:
    return {
        name: f"C{i}"
        for i, name in enumerate(dict.fromkeys(row.strategy for row in rows))
    }


def _marker_box(panel: Any, x: float, y: float) -> Any:
    x, y = panel.transData.transform((x, y))
    reach = MARKER / 2 * panel.figure.dpi / 72
    create = import_module("matplotlib.transforms").Bbox.from_extents
    return create(x - reach, y - reach, x + reach, y + reach)


def _clusters(rows: list[Row], column: str) -> list[list[Row]]:
    """Group rows whose points coincide in the plot."""
    found: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: float(getattr(row, column))):
        for cluster in found:
            ratio = getattr(row, column) / max(getattr(cluster[0], column), 1e-9)
            if ratio < NEAR_X and abs(row.accuracy - cluster[0].accuracy) < NEAR_Y:
                cluster.append(row)
                break
        else:
            found.append([row])
    return found


def _policies(cluster: list[Row], rows: list[Row]) -> str:
    """Format the label of a cluster: ``threshold, factor; all but random, 8 steps``."""
    scheduled = dict.fromkeys(row.policy for row in rows if row.steps)
    found: dict[int | None, set[str]] = {}
    for row in cluster:
        found.setdefault(row.steps, set()).add(row.policy)
    names = []
    for steps, policies in found.items():
        name = ", ".join(
            dict.fromkeys(row.policy for row in rows if row.policy in policies)
        )
        missing = [policy for policy in scheduled if policy not in policies]
        if steps and len(missing) < 2 < len(
            policies
        ):  # a full list would be as wide as the plot
            name = f"all but {missing[0]}" if missing else "all scheduled"
        names.append(f"{name}, {steps} steps" if steps else name)
    return "; ".join(names)
