"""Something happens before a given line of a training: it is killed, or gets a signal."""

import random
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from attnzoo import training

TRAINING = str(Path(training.__file__).parent)
WRITES = ("durable.py", "checkpoints.py", "callbacks.py", "runs.py", "strategies.py")
"""Where a run folder changes: half of the moments are drawn from these files."""


class Watch:
    """Counts the lines of attnzoo.training that a call runs while a run folder is there.

    Args:
        folder: the run folder.
        moments: counts of lines.
        happens: is called before each of those lines, with a name for the place.
    """

    def __init__(
        self, folder: Path, moments: Sequence[int] = (), happens: Callable[[str], object] = lambda _: None
    ) -> None:
        self.folder = folder
        self.moments = set(moments)
        self.happens = happens
        self.lines = 0
        self.writes: list[int] = []

    def call(self, call: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(before)

    def draw(self, number: int, seed: int) -> list[int]:
        """Moments of the call that was counted: half anywhere in it, half where its folder changes."""
        chance = random.Random(seed)
        writing = chance.sample(self.writes, number // 2)
        others = sorted({*range(1, self.lines + 1)} - {*writing})
        return sorted([*writing, *chance.sample(others, number - number // 2)])

    def _enter(self, frame, event, argument):
        return self._step if frame.f_code.co_filename.startswith(TRAINING) else None

    def _step(self, frame, event, argument):
        if event == "line" and (self.folder / "recipe.yaml").exists():
            self.lines += 1
            file = Path(frame.f_code.co_filename).name
            if file in WRITES:
                self.writes.append(self.lines)
            if self.lines in self.moments:
                self.happens(f"{self.lines}-{file}-{frame.f_lineno}")
        return self._step


def leave(folder: Path, copies: Path) -> Callable[[str], object]:
    """Copies a folder as a `kill -9` leaves it: without what Python still buffers, and no `finally` has run."""
    return lambda place: shutil.copytree(folder, copies / place, symlinks=True)
