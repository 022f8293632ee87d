"""metrics.csv, written while a training runs and gone on with when it is resumed."""

import csv
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnzoo.training import durable


class MetricsFile:
    """metrics.csv: a row for each optimizer step.

    Args:
        after: the step that training goes on from; rows of later ones are cut off.
    """

    def __init__(self, path: Path, columns: Sequence[str], after: int = 0) -> None:
        lines = path.read_bytes().splitlines(keepends=True) if after and path.is_file() else []
        kept = {step: line for line in lines if 0 < (step := step_of(line, len(columns))) <= after}
        if len(kept) < after:
            warnings.warn(f"{path} lacks {after - len(kept)} of the {after} steps so far", stacklevel=2)
        durable.write(path, b"".join([f"{','.join(columns)}\r\n".encode(), *kept.values()]))
        self.file = path.open("a", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, columns)

    def add(self, row: Mapping[str, float]) -> None:
        self.writer.writerow({name: format(value, ".6g") for name, value in row.items()})

    def sync(self) -> None:
        """Waits until the disk has all rows."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def step_of(line: bytes, columns: int) -> int:
    """The step of a row; 0 where it is no whole row of numbers."""
    step, *numbers = line.rstrip().split(b",")
    try:
        for number in filter(None, numbers):
            float(number)
        return int(step) if line.endswith(b"\n") and len(numbers) == columns - 1 else 0
    except ValueError:
        return 0
