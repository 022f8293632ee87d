"""One training, from a recipe to a run folder, or on from where it stopped."""

import contextlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from attnzoo.errors import RecipeError
from attnzoo.training import experiment, machine
from attnzoo.training.machine import Machine
from attnzoo.training.module import TrainingModule
from attnzoo.training.recipe import Recipe
from attnzoo.training.record import follow, record
from attnzoo.training.resume import Start, differences, find_start
from attnzoo.training.runs import RunFolder
from attnzoo.training.strategies import left_as_found
from attnzoo.training.trainer import quiet

RANK: int = rank_zero_only.rank  # type: ignore[attr-defined]
"""Which of the processes of one training this is."""


def train(recipe: Recipe, *, runs: Path = Path("runs"), bar: bool = False) -> dict[str, Any]:
    """Trains what a recipe describes and tests the weights of the lowest validation loss.

    The run folder is made when everything else has been built and one sequence has passed through, so that a recipe
    which can't work leaves nothing behind. Of several processes the first one writes; the others return an empty
    summary.

    Args:
        runs: where run folders are made, in a folder named after the recipe.
        bar: draw a progress bar instead of writing lines, both to stderr.
    Raises:
        TrainingError: the training can't go on; the last good checkpoint is there.
        AttnzooError: the recipe can't work, here or at all.
        KeyboardInterrupt: the training was interrupted; its summary says so.
        SystemExit: the training was told to terminate.
    """
    with quiet(), left_as_found():
        start = Start(recipe)
        module, here = build(start)
        if RANK > 0:
            return follow(module, here, start)
        folder = RunFolder.claim(runs, recipe.name)
        print(f"training in {folder.path}", file=sys.stderr)
        with folder.lock():
            return record(module, here, folder, start, bar)


def resume(
    path: Path, overrides: Sequence[str] = (), *, allow: Sequence[str] = (), bar: bool = False
) -> dict[str, Any]:
    """Goes on with a training from its newest good checkpoint, to the same end as if it had never stopped.

    Args:
        path: the folder of the run.
        overrides: `section.key=value` each, of what may differ.
        allow: keys that may differ although the result then does too.
        bar: draw a progress bar instead of writing lines, both to stderr.
    Raises:
        RecipeError: there is no such run, another process trains in it, or a setting differs that must not.
        TrainingError, KeyboardInterrupt, SystemExit: as in `train`.
    """
    folder = RunFolder.open(path)
    with quiet(), left_as_found(), folder.lock() if RANK == 0 else contextlib.nullcontext():
        if RANK > 0:
            warnings.simplefilter("ignore")  # the first process says it
        start = find_start(folder, overrides, allow)
        before, steps = folder.read_summary(), start.recipe.sections["train"]["max_steps"]
        if before.get("status") == "done" and start.step >= steps:
            print(f"{path} is done, all {steps} steps: nothing is left to do", file=sys.stderr)
            return before if RANK == 0 else {}
        module, here = build(start)
        if RANK > 0:
            return follow(module, here, start)
        for note in (*start.notes, *differences(before, experiment.about(start.recipe, module.experiment, here))):
            print(note, file=sys.stderr)
        return record(module, here, folder, start, bar)


def build(start: Start) -> tuple[TrainingModule, Machine]:
    """What is trained, and on what."""
    module = TrainingModule(start.recipe.sections)
    settings = module.experiment.settings
    here = machine.choose(settings)
    module.experiment.rehearse()
    if start.task is not None and start.task != module.experiment.task.facts():
        raise RecipeError("the data has changed since the run began: it can't go on as it would have")
    if RANK == 0 and here.precision != settings.precision:
        print(f"precision {settings.precision} is computed as {here.precision} on a CPU", file=sys.stderr)
    return module, here
