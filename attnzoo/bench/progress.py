"""What a benchmark shows while it runs: a bar on a terminal, a plain line for each measurement elsewhere."""

import sys
from typing import Any, TextIO


class Progress:
    """Writes a line when something new is measured."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stderr
        self.total = self.done = 0

    def begin(self, total: int) -> None:
        self.total = total

    def step(self, name: str) -> None:
        """Says what is measured now."""
        self.done += 1
        print(f"{self.done}/{self.total}  {name}", file=self.out, flush=True)

    def tick(self) -> None:
        """A round is done."""

    def close(self) -> None:
        """Nothing is left open."""


class Bar(Progress):
    """Draws a bar."""

    bar: Any

    def begin(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichBar

        columns = MofNCompleteColumn(), BarColumn(bar_width=30), TimeElapsedColumn(), TextColumn("{task.description}")
        self.bar = RichBar(*columns, console=Console(stderr=True))
        self.task = self.bar.add_task("", total=total)
        self.bar.start()

    def step(self, name: str) -> None:
        self.bar.update(self.task, completed=self.done, description=name)
        self.done += 1

    def tick(self) -> None:
        self.bar.refresh()

    def close(self) -> None:
        self.bar.update(self.task, completed=self.done)
        self.bar.stop()
