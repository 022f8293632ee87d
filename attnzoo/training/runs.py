"""The folder of one run: what is in it, how it gets its number, and who may write there."""

import contextlib
import csv
import dataclasses
import fcntl
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from attnzoo.errors import RecipeError
from attnzoo.training import checkpoints, durable
from attnzoo.training.checkpoints import DamagedError


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
        """A name for the newest checkpoint."""
        return self.path / "checkpoints" / "last.ckpt"

    @property
    def best(self) -> Path:
        """A name for the checkpoint of the lowest validation loss."""
        return self.path / "checkpoints" / "best.ckpt"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of one optimizer step."""
        return self.path / "checkpoints" / f"step-{step}.ckpt"

    def checkpointed(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        names = (file.stem.removeprefix("step-") for file in self.last.parent.glob("step-*.ckpt"))
        return sorted(int(name) for name in names if name.isdecimal())

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """The last step whose checkpoint is good, and what it or its first part holds; warns of those that are not."""
        if self.last.is_symlink() and not self.last.exists():
            warnings.warn(f"{self.last} leads to {self.last.readlink()}, which is missing", stacklevel=2)
        for step in reversed(self.checkpointed()):
            with warned():
                return step, self.load_step(step)
        return None

    def load_step(self, step: int) -> dict[str, Any]:
        """What the checkpoint of a step holds, or its first part.

        Raises:
            DamagedError: it is missing, damaged, or another one.
        """
        path = self.checkpoint(step)
        found = checkpoints.load(path, rank=0)
        if missing := {"global_step", "hyper_parameters", "task", "best"} - found.keys():
            raise DamagedError(f"{path} is damaged: it holds no {', no '.join(sorted(missing))}")
        if found["global_step"] != step:
            raise DamagedError(f"{path} is damaged: it holds step {found['global_step']}")
        return found

    def load_checkpoint(self) -> dict[str, Any]:
        """The checkpoint of the lowest validation loss, or else the last: tensors on the CPU, and plain values.

        Warns of one that is there and can't be used.

        Raises:
            RecipeError: there is none, or none can be read.
        """
        there = [file for file in (self.best, self.last) if file.is_symlink() or file.exists()]
        if not there:
            raise RecipeError(f"{self.path} has no checkpoint yet: the first one is saved at step train.valid_every")
        for file in there[:-1]:
            with warned():
                return checkpoints.load(file)
        try:
            return checkpoints.load(there[-1])
        except DamagedError as error:
            raise RecipeError(f"{error}; attnzoo train --resume {self.path} trains what is lost again") from error

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other processes from training in this folder until this one is done, or dead.

        Raises:
            RecipeError: another one does, or nothing can be written here.
        """
        try:
            file = (self.path / ".lock").open("w")
        except OSError as error:
            raise RecipeError(f"can't write in {self.path}: {error.strerror}") from error
        with file:
            try:
                # Not flock: what a data-loader worker inherits would outlive this process for a while.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RecipeError(f"another process trains in {self.path}: wait until it is done, or stop it") from None
            yield

    def write_recipe(self, text: str) -> None:
        durable.write(self.recipe, text.encode())

    def read_command(self) -> str:
        """The command that made the run, which stands above its recipe."""
        return self.recipe.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        durable.write(self.summary, f"{json.dumps(finite(summary), indent=2, allow_nan=False)}\n".encode())

    def read_summary(self) -> dict[str, Any]:
        """The summary; empty where there is none yet."""
        try:
            found = json.loads(self.summary.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RecipeError(f"{self.summary} can't be read as JSON: {error}; delete it to go on") from error
        if not isinstance(found, dict):
            raise RecipeError(f"{self.summary} holds no summary; delete it to go on")
        return found

    def read_metrics(self) -> dict[str, list[float]]:
        """The columns of metrics.csv; NaN where a step has no value."""
        with self.metrics.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        names = rows[0] if rows else {}
        return {name: [float(row[name] or math.nan) for row in rows] for name in names}


@contextlib.contextmanager
def warned() -> Iterator[None]:
    """Makes a damaged checkpoint a warning."""
    try:
        yield
    except DamagedError as error:
        warnings.warn(str(error), stacklevel=4)


def finite(value: Any) -> Any:
    """The same with None for every number that JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
