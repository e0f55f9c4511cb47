"""Write up a training run: loss curves, and its scores as a Markdown table.

    python -m training.report REPORT

prints the table and the numbers of a run that wrote to the folder REPORT, draws its curves again,
and ends with 1 if a loop answers too few problems for the model to be shipped.
"""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

NUMBERS, CURVE = "default_model.json", "default_model_loss.png"
# Accuracy of every loop, by the end of its name; the last is of problems in sentences.
LEAST = {"json": 0.95, "others": 0.98, "": 0.99}
COLUMNS = (
    "loop",
    "block",
    "correct",
    "exact",
    "tokens",
    "forwards",
    "tokens per forward",
)


def read_numbers(folder: Path) -> dict[str, Any]:
    """Read what a run wrote to its folder."""
    return dict(json.loads((folder / NUMBERS).read_text(encoding="utf-8")))


def write_numbers(folder: Path, numbers: dict[str, Any]) -> None:
    """Write the numbers of a run, replacing those that are there."""
    (folder / NUMBERS).write_text(json.dumps(numbers), encoding="utf-8")


def plot_losses(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Plot (step, loss) points, one panel per phase; skipped without matplotlib."""
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError:
        print("matplotlib is not installed: no loss curve drawn")
        return
    figure, panels = pyplot.subplots(1, len(curves), figsize=(9, 3.2), squeeze=False)
    for panel, (name, points) in zip(panels[0], curves.items(), strict=True):
        panel.plot(
            [step for step, _ in points], [loss for _, loss in points], linewidth=1
        )
        panel.set(
            title=f"{name} phase", xlabel="step", ylabel="weighted loss", yscale="log"
        )
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def score_table(scores: dict[str, dict[str, Any]]) -> str:
    """Format scores as a Markdown table, a row per loop, form and precision."""
    lines = [" | ".join(COLUMNS), " | ".join(["---"] * len(COLUMNS))]
    for name, score in scores.items():
        count = score["problems"]
        cells = [
            name.replace("_", " "),
            score["block"],
            round(score["accuracy"] * count),
            round(score["exact_text"] * count),
            f"{score['tokens']:,}",
            f"{score['forwards']:,}",
            f"{score['tokens_per_forward']:.1f}",
        ]
        if (
            score["forwards"] == count * score["max_new_tokens"]
        ):  # whole canvases, token by token
            cells[-2:] = [f"{score['max_new_tokens']} each", "1 by construction"]
        lines.append(" | ".join(map(str, cells)))
    return "\n".join(f"| {line} |" for line in lines)


def shortfalls(scores: dict[str, dict[str, Any]]) -> list[str]:
    """Name the loops whose accuracy is too low."""
    least = {}
    for name in scores:
        end = name.removesuffix("_bf16").rpartition("_")[2]
        least[name] = LEAST.get(end, LEAST[""])
    return [
        f"{name}: {score['accuracy']:.1%}, at least {least[name]:.0%} wanted"
        for name, score in scores.items()
        if score["accuracy"] < least[name]
    ]


def main() -> int:
    """Print table, numbers and shortfalls, and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="folder that training wrote to")
    folder = parser.parse_args().report
    numbers = read_numbers(folder)
    curves = numbers.pop("curves")
    plot_losses(curves, folder / CURVE)
    print(f"{score_table(numbers['scores'])}\n\n```json\n{json.dumps(numbers)}\n```")
    found = shortfalls(numbers["scores"])
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
