"""Where a training that stopped goes on, and with which settings."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnzoo.errors import OptionError, RecipeError
from attnzoo.options import options
from attnzoo.training.recipe import Recipe, load
from attnzoo.training.runs import RunFolder
from attnzoo.training.sections import Plain
from attnzoo.training.settings import TrainSettings

FREE = ("train.workers", "train.checkpoint_every", "train.keep_best", "train.loggers")
"""What may differ from the settings of the run, because nothing that is learned depends on it."""
DEFAULTS = {f"train.{name}": option.default for name, option in options(TrainSettings).items()}
"""What held for a run from before there was such a setting."""
ALLOWED = ("train.max_steps",)
"""What may differ if it is allowed by name."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a training begins: with nothing done, or from a checkpoint.

    Attributes:
        task: what the checkpoint says of the data.
        notes: what the user has to know.
    """

    recipe: Recipe
    step: int = 0
    checkpoint: Path | None = None
    task: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()


def find_start(folder: RunFolder, overrides: Sequence[str], allow: Sequence[str]) -> Start:
    """Reads a run's recipe and its newest good checkpoint, and holds one against the other.

    Raises:
        RecipeError: a setting differs that must not, or the run can't be resumed.
    """
    for key in allow:
        if key not in ALLOWED:
            raise OptionError(f"--allow-change {key}: of a run that has begun only {', '.join(ALLOWED)} may be changed")
    summary, newest = folder.read_summary(), folder.newest()
    recipe = load(folder.recipe, overrides)
    recipe = dataclasses.replace(
        recipe,
        name=summary.get("recipe", folder.path.resolve().parent.name),
        command=" ".join([folder.read_command(), *map(shlex.quote, overrides)]),
    )
    if newest is None:
        if folder.last.is_file() and not folder.checkpointed():
            raise RecipeError(f"{folder.path} was trained before runs could be resumed: train it again")
        refuse_changes(folder, load(folder.recipe).sections, recipe.sections, ())
        return Start(recipe, notes=["no good checkpoint is there: starting at the beginning"])
    step, checkpoint = newest
    saved, steps = checkpoint["hyper_parameters"]["recipe"], recipe.sections["train"]["max_steps"]
    granted = ["train.max_steps"] if summary.get("max_steps") == steps else []  # by the command that was interrupted
    refuse_changes(folder, saved, recipe.sections, [*allow, *granted])
    if steps < step:
        raise RecipeError(f"train.max_steps={steps} is less than the {step} steps that {folder.path} has done")
    notes = [f"resuming at step {step} of {steps}, from {folder.checkpoint(step)}"]
    if (before := saved["train"]["max_steps"]) != steps:
        notes.append(
            f"train.max_steps is {steps} instead of {before}: from here on the learning rate is that of {steps} steps, "
            "as if the run had been meant to be so long"
        )
    return Start(recipe, step, folder.checkpoint(step), checkpoint["task"], notes)


def refuse_changes(folder: RunFolder, saved: Plain, now: Plain, allowed: Sequence[str]) -> None:
    """Refuses settings that differ from those the run was trained with.

    Raises:
        RecipeError: a line for each.
    """
    keys = [f"{section}.{key}" for section in now for key in {**saved.get(section, {}), **now[section]}]
    lines = []
    for key in keys:
        section, _, name = key.partition(".")
        old, new = saved.get(section, {}).get(name, DEFAULTS.get(key)), now[section].get(name)
        if old != new and key not in (*FREE, *allowed):
            hint = f" (--allow-change {key} goes on with it)" if key in ALLOWED else ""
            lines.append(f"  {key} was {old!r} and is {new!r} now{hint}")
    if lines:
        raise RecipeError("\n".join([f"{folder.path} can't go on with other settings than it began with:", *lines]))


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What may keep a resumed run from ending in the same bits."""
    names = before.keys() & {"accelerator", "devices", "precision", "versions"}
    changed = [f"{name} {before[name]} before, {now[name]} now" for name in sorted(names) if before[name] != now[name]]
    return [f"not the same bits as without a stop: {'; '.join(changed)}"] if changed else []
