"""Draw the loss curves of a training run; ``python -m training.report REPORT`` draws them later."""

import argparse
import json
from importlib import import_module
from pathlib import Path

NUMBERS, CURVE = "default_model.json", "default_model_loss.png"


def plot_losses(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Plot (step, loss) points, one panel per phase; skipped without matplotlib."""
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError:
        print("matplotlib is not installed: no loss curve drawn")
        return
    figure, panels = pyplot.subplots(1, len(curves), figsize=(9, 3.2), squeeze=False)
    for panel, (name, points) in zip(panels[0], curves.items(), strict=True):
        panel.plot([step for step, _ in points], [loss for _, loss in points], linewidth=1)
        panel.set(title=f"{name} phase", xlabel="step", ylabel="weighted loss", yscale="log")
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="folder that training wrote its JSON to")
    folder = parser.parse_args().report
    plot_losses(json.loads((folder / NUMBERS).read_text())["curves"], folder / CURVE)
