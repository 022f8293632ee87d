"""What a training shows while it runs: a bar on a terminal, a few plain lines elsewhere."""

import math
import statistics
import sys
from typing import TextIO

LINES = 20
"""Plain lines in one training, at most."""


class ProgressLines:
    """Writes a line from time to time, in step with the validations."""

    def __init__(self, max_steps: int, valid_every: int, out: TextIO | None = None) -> None:
        self.max_steps = max_steps
        self.out = out or sys.stderr
        self.every = interval(max_steps, valid_every)
        self.scores: dict[str, float] = {}
        self.times: list[float] = []

    def __call__(self, row: dict[str, float]) -> None:
        self.scores |= scores(row)
        self.times.append(row["ms"])
        step = int(row["step"])
        if step == 1 or step % self.every == 0 or step == self.max_steps:
            numbers = {"train_loss": row["train_loss"], **self.scores, "ms a step": statistics.median(self.times)}
            print(f"step {step}/{self.max_steps}  {in_words(numbers)}", file=self.out, flush=True)
            self.scores.clear()
            self.times.clear()

    def close(self) -> None:
        """Nothing is left open."""


class ProgressBar:
    """Draws a bar, with the latest numbers after it."""

    def __init__(self, max_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=Console(stderr=True),
        )
        self.task = self.bar.add_task("", total=max_steps, numbers="")
        self.scores: dict[str, float] = {}
        self.bar.start()

    def __call__(self, row: dict[str, float]) -> None:
        self.scores |= scores(row)
        numbers = in_words({"train_loss": row["train_loss"], **self.scores})
        self.bar.update(self.task, completed=row["step"], numbers=numbers)

    def close(self) -> None:
        self.bar.stop()


def interval(max_steps: int, valid_every: int) -> int:
    """Steps from one line to the next: a divisor or a multiple of the steps from one validation to the next."""
    least, valid_every = math.ceil(max_steps / LINES), min(valid_every, max_steps)
    if valid_every < least:
        return math.ceil(least / valid_every) * valid_every
    return next(valid_every // lines for lines in range(valid_every // least, 0, -1) if valid_every % lines == 0)


def scores(row: dict[str, float]) -> dict[str, float]:
    """The numbers of a row that a validation gave."""
    return {name: value for name, value in row.items() if name.startswith("valid_")}


def in_words(numbers: dict[str, float]) -> str:
    """Numbers by name on one line: `train loss 0.512  valid accuracy 0.981`."""
    return "  ".join(
        f"{value:.0f} {name}" if name.startswith("ms") else f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in numbers.items()
    )
