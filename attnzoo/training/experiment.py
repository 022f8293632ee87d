"""What the sections of a recipe build: a task, a model and how it is trained."""

import dataclasses
import platform
import statistics
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

import attnzoo
from attnzoo import tasks
from attnzoo.errors import RecipeError
from attnzoo.tasks.task import Task
from attnzoo.training.machine import Machine
from attnzoo.training.model import Transformer
from attnzoo.training.settings import TrainSettings

if TYPE_CHECKING:
    from attnzoo.training.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A task, a fresh model for it, and the settings it is trained with."""

    task: Task
    model: Transformer
    settings: TrainSettings

    @property
    def parameters(self) -> int:
        """How many numbers the model learns."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def density(self) -> float:
        """The share of all pairs of tokens that is visible at the task's length, over heads and layers."""
        return statistics.fmean(attention.density(self.task.length) for attention in self.model.attentions)

    @property
    def pattern(self) -> str:
        """The first layer's pattern as a formula."""
        return str(self.model.attentions[0].pattern)

    def rehearse(self) -> None:
        """Computes the loss of one sequence, so that what can't work fails before anything is written."""
        item = self.task.split("train")[0]
        batch = {name: tensor.unsqueeze(0) for name, tensor in item.items()}
        training = self.model.training
        with torch.no_grad():
            self.task.loss(self.model.eval()(batch["tokens"], batch.get("key_mask")), batch)
        self.model.train(training)


def build(sections: Mapping[str, Mapping[str, Any]]) -> Experiment:
    """Builds what a recipe describes; the weights depend on its seed and not on what was drawn before.

    Raises:
        RecipeError: the training split is smaller than one optimizer step.
    """
    settings = TrainSettings(**sections["train"])
    options = dict(sections["task"])
    task = tasks.find(options.pop("name"))(seed=settings.seed, **options)
    needed, there = settings.batch_size * settings.accumulate, len(task.split("train"))
    if there < needed:
        raise RecipeError(
            f"one optimizer step takes {needed} sequences (batch_size times accumulate), "
            f"but the training split has {there}: lower train.batch_size or train.accumulate"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Transformer(**task.shape(), attention=sections["attention"], **sections["model"])
    return Experiment(task, model, settings)


def about(recipe: "Recipe", experiment: Experiment, machine: Machine) -> dict[str, Any]:
    """The part of a run's summary that is known before the first step."""
    settings = experiment.settings
    return {
        "recipe": recipe.name,
        "task": recipe.sections["task"]["name"],
        "variant": recipe.sections["attention"]["name"],
        "pattern": experiment.pattern,
        "density": experiment.density,
        "parameters": experiment.parameters,
        "seed": settings.seed,
        "max_steps": settings.max_steps,
        "precision": {"requested": settings.precision, "effective": machine.precision},
        "accelerator": machine.accelerator,
        "devices": machine.devices * settings.num_nodes,
        "strategy": machine.strategy,
        "peak_memory_of": machine.peak_memory_of,
        "versions": {
            "attnzoo": attnzoo.__version__,
            "torch": torch.__version__,
            "lightning": metadata.version("lightning"),
            "python": platform.python_version(),
        },
    }
