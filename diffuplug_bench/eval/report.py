"""Write the results of ``diffuplug eval``'s tables: records, pages and a plot."""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from diffuplug_bench.word_problems.generator import eval_seeds
from dllm_plugin.commands.installation import installation


class Way(NamedTuple):
    """Name a strategy, a policy and its schedule."""

    strategy: str
    policy: str
    steps: int | None  # per block; None for policies that follow no schedule

    @property
    def name(self) -> str:
        """Return the label of the progress bar."""
        steps = f", {self.steps} steps" if self.steps else ""
        return f"{self.strategy}, {self.policy}{steps}"


class Row(NamedTuple):
    """Combine a way of decoding with its score."""

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
# Hollow and of different sizes, so that all are visible if strategies coincide.
MARKERS = (("o", 200), ("s", 130), ("^", 80), ("D", 35), ("*", 20))
READING = """\
*Tokens* are those up to and including the end of the answer. A *forward* is one denoising step of
one request, so tokens per forward does not depend on the batch. *Positions* are all that were
computed: prompts, canvases, recomputed context, and a step that was in flight when its request
ended. *Steps* are denoising steps per block for policies that follow a schedule (as many as the
block is long: one token per step); the others take as many as they need. *Seconds* are those of the
whole batch and depend on what else the machine did. In the plot a marker is a strategy and a colour
a policy."""


def reports_folder(output: str | None) -> Path:
    """Return where pages are written. Raises ValueError if it is no folder."""
    folder = FOLDER if FOLDER.is_dir() else Path()
    if output:
        folder = Path(output)
    if not folder.is_dir():
        raise ValueError(f"--output {folder} is not a folder")
    return folder


def record_of(
    benchmark: str, limit: int, dtype: str, rows: Sequence[Any], **lengths: int
) -> dict[str, Any]:
    """Return the entries of a JSON line."""
    return {
        "benchmark": benchmark,
        "problems": limit,
        "first_seed": eval_seeds(limit)[0],
        "dtype": dtype,
        **lengths,
        **installation(),
        "rows": [row._asdict() for row in rows],
    }


def software(record: dict[str, Any], *names: str) -> str:
    """Return names of software with their versions."""
    return ", ".join(f"{name} {record[name]}" for name in names)


def ending(record: dict[str, Any]) -> str:
    """Return the last lines of a page: its JSON line."""
    return f"```json\n{json.dumps(record)}\n```\n"


def check_matplotlib(what: str) -> None:
    """Raise ValueError if matplotlib is missing, before minutes are spent measuring.

    Args:
        what: subject and verb of the sentence, such as ``eval --all draws a plot``.
    """
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(
            f"{what} with matplotlib, which is not installed: pip install '.[plot]' in a clone "
            "of DiffuPlug, or pip install matplotlib"
        ) from error


def table(rows: list[Row]) -> str:
    """Format the scores as a Markdown table, aligned for terminals."""
    lines = [["strategy", "policy", "steps", "accuracy", *_headings(), "seconds"]]
    for row in rows:
        scores = (f"{row.tokens_per_forward:.2f}", f"{row.positions_per_token:.1f}")
        way = (row.strategy, row.policy, str(row.steps or "-"))
        lines.append([*way, f"{row.accuracy:.1%}", *scores, f"{row.seconds:.1f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    texts = []
    for line in lines:
        cells = [cell.ljust(n) for cell, n in zip(line, widths, strict=True)]
        texts.append(f"| {' | '.join(cells)} |")
    return "\n".join(texts)


def _headings() -> list[str]:
    return [name.replace("_", " ") for name in PANELS]


def page(rows: list[Row], record: dict[str, Any], command: str) -> str:
    """Format the report: what was run, the table, the plot and the JSON line."""
    first, number = record["first_seed"], record["problems"]
    about = {
        "command": f"`{command}`",
        "hardware": record["hardware"],
        "software": software(record, "diffuplug", "vllm", "torch", "python"),
        "problems": f"{number}, seeds {first} to {first + number - 1}; training seeds lie below",
        "decoding": f"greedy, at most {record['max_tokens']} tokens, blocks of "
        f"{record['block_length']}, threshold 0.9, factor 1; `d2f` with its adapter; one engine "
        "per strategy, policies per request",
    }
    head = "".join(f"| {name} | {value} |\n" for name, value in about.items())
    return (
        "# The bundled model under every strategy and policy\n\n"
        f"| | |\n| --- | --- |\n{head}\n{table(rows)}\n\n"
        f"![accuracy against cost](decoding.png)\n\n{READING}\n\n{ending(record)}"
    )


def plot(rows: list[Row], path: Path) -> None:
    """Draw accuracy against cost in two panels: a marker per strategy, a colour per policy."""
    figure = import_module("matplotlib.figure").Figure(figsize=(10, 9), dpi=110)
    figure.subplots_adjust(left=0.07, right=0.79, bottom=0.06, top=0.97, hspace=0.2)
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        curves.setdefault((row.strategy, row.policy), []).append(row)
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    policies = list(dict.fromkeys(row.policy for row in rows))
    for panel, column in zip(figure.subplots(len(PANELS)), PANELS, strict=True):
        for (strategy, policy), curve in curves.items():
            x = [getattr(row, column) for row in curve]
            y = [100 * row.accuracy for row in curve]
            color = f"C{policies.index(policy)}"
            marker, size = MARKERS[strategies.index(strategy) % len(MARKERS)]
            panel.plot(x, y, color=color, linewidth=0.6, alpha=0.5)
            panel.scatter(
                x, y, size, marker=marker, facecolors="none", edgecolors=color
            )
        panel.set(xscale="log", xlabel=PANELS[column], ylabel="accuracy in %")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.25)
    line = import_module("matplotlib.lines").Line2D
    handles = []
    for i, strategy in enumerate(strategies):
        style = {"marker": MARKERS[i % len(MARKERS)][0], "fillstyle": "none"}
        handles.append(line([], [], color="k", linestyle="", label=strategy, **style))
    for i, policy in enumerate(policies):
        handles.append(line([], [], color=f"C{i}", label=policy))
    figure.legend(handles=handles, loc="center right")
    figure.savefig(path)
