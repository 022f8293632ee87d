"""The best checkpoint of a run on the test split."""

import dataclasses
from pathlib import Path
from typing import Any

from attnzoo.errors import RecipeError
from attnzoo.training import machine
from attnzoo.training.data import Batches
from attnzoo.training.module import TrainingModule
from attnzoo.training.runs import RunFolder
from attnzoo.training.trainer import make_trainer, quiet, score_test


def evaluate(path: Path) -> dict[str, Any]:
    """Tests a run as its training did at the end, on one device of whatever this machine has.

    Raises:
        RecipeError: there is no such run, it has no good checkpoint, or its data has changed.
    """
    checkpoint = RunFolder.open(path).load_checkpoint()
    with quiet():
        module = TrainingModule(checkpoint["hyper_parameters"]["recipe"])
        task = module.experiment.task
        if checkpoint.get("task", {}) != task.facts():
            raise RecipeError(f"the data has changed since {path} was trained on it")
        module.load_state_dict(checkpoint["state_dict"])
        settings = dataclasses.replace(
            module.experiment.settings, accelerator="auto", devices=1, num_nodes=1, strategy="auto", loggers=None
        )
        here = machine.choose(settings)
        trainer = make_trainer(settings, here)
        return {
            "run": str(path),
            "step": checkpoint["global_step"],
            "precision": {"requested": settings.precision, "effective": here.precision},
            "test": score_test(trainer, module, Batches(task, settings)),
        }
