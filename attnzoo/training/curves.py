"""curves.png: how the loss and the metrics went."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

TRAIN, VALID = "#d98e4a", "#1f4e79"


def draw(metrics: Mapping[str, Sequence[float]], path: Path, title: str) -> None:
    """Draws the training and validation loss, and beside it each metric of the validation, against optimizer steps.

    Args:
        metrics: the columns of metrics.csv; NaN where a step has no value.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # the first import on a machine reports its fonts
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = [name for name in metrics if name.startswith("valid_") and name != "valid_loss"]
    figure = Figure(figsize=(5 * (1 + len(names)), 3.6), layout="constrained", dpi=120)
    figure.suptitle(title)
    panels = figure.subplots(1, 1 + len(names), squeeze=False)[0]
    steps = metrics.get("step", [])
    if steps:
        panels[0].plot(steps, metrics["train_loss"], color=TRAIN, alpha=0.35, linewidth=1)
        panels[0].plot(steps, smooth(metrics["train_loss"]), color=TRAIN, linewidth=2, label="training")
    for name, panel in zip(("valid_loss", *names), panels, strict=True):
        pairs = zip(steps, metrics.get(name, []), strict=False)
        seen = [(step, value) for step, value in pairs if not math.isnan(value)]
        if seen:
            panel.plot(*zip(*seen, strict=True), color=VALID, marker="o", markersize=4, label="validation")
        label = "loss" if panel is panels[0] else name.replace("valid_", "validation ").replace("_", " ")
        panel.set(xlabel="optimizer step", ylabel=label, xlim=(0, max(steps, default=1) * 1.03), ylim=(0, None))
        if "accuracy" in name:
            panel.set_ylim(0, 1.02)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    if steps:
        panels[0].legend(frameon=False)
    figure.savefig(path)


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """An exponential moving mean that starts unbiased."""
    smoothed, total, mass = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        smoothed.append(total / mass)
    return smoothed
