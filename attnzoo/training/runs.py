"""The folder of one run: what is in it, and how it gets its number."""

import csv
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from attnzoo.errors import RecipeError


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """`runs/<recipe>/<n>/` and the files in it."""

    path: Path

    @classmethod
    def claim(cls, runs: Path, recipe: str) -> Self:
        """Makes the folder with the next free number; of several processes each gets one of its own.

        Raises:
            RecipeError: the folder can't be made there.
        """
        series = runs / recipe
        try:
            series.mkdir(parents=True, exist_ok=True)
            number = 1 + max((int(entry.name) for entry in series.iterdir() if entry.name.isdecimal()), default=0)
            while True:
                try:
                    (series / str(number)).mkdir()
                except FileExistsError:
                    number += 1
                else:
                    return cls(series / str(number))
        except OSError as error:
            raise RecipeError(f"can't make a run folder in {series}: {error.strerror}") from error

    @classmethod
    def open(cls, path: Path) -> Self:
        """The folder of a run that is there.

        Raises:
            RecipeError: it is not.
        """
        folder = cls(path)
        if not folder.recipe.is_file():
            what = "has no recipe.yaml in it" if path.exists() else "does not exist"
            raise RecipeError(f"{path} {what}: name the folder of one run, as in runs/kv_cached/1")
        return folder

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def last(self) -> Path:
        return self.path / "checkpoints" / "last.ckpt"

    @property
    def best(self) -> Path:
        return self.path / "checkpoints" / "best.ckpt"

    def load_checkpoint(self) -> dict[str, Any]:
        """The checkpoint of the lowest validation loss, or else the last: tensors on the CPU, and plain values.

        Raises:
            RecipeError: there is none, or it can't be read.
        """
        file = next((file for file in (self.best, self.last) if file.is_file()), None)
        if file is None:
            raise RecipeError(f"{self.path} has no checkpoint yet: the first one is saved at step train.valid_every")
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file fails in many ways
            raise RecipeError(f"{file} can't be read as a checkpoint: {type(error).__name__}") from error

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces the summary whole, so that a reader never sees half of one."""
        beside = self.summary.with_suffix(".part")
        beside.write_text(json.dumps(finite(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(beside, self.summary)

    def read_metrics(self) -> dict[str, list[float]]:
        """The columns of metrics.csv; NaN where a step has no value."""
        with self.metrics.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        names = rows[0] if rows else {}
        return {name: [float(row[name] or math.nan) for row in rows] for name in names}


class MetricsFile:
    """metrics.csv: a row for each optimizer step."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.file = path.open("w", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, columns)
        self.writer.writeheader()

    def add(self, row: Mapping[str, float]) -> None:
        self.writer.writerow({name: format(value, ".6g") for name, value in row.items()})
        if any(name.startswith("valid_") for name in row):
            self.file.flush()

    def close(self) -> None:
        self.file.close()


def finite(value: Any) -> Any:
    """The same with None for every number that JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
