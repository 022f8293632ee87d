"""One training, from a recipe to a run folder."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.warnings import PossibleUserWarning

from attnzoo.training import curves, experiment, machine
from attnzoo.training.callbacks import Checkpoints, StepRows
from attnzoo.training.data import Batches
from attnzoo.training.machine import Machine
from attnzoo.training.module import DivergedError, TrainingModule
from attnzoo.training.progress import ProgressBar, ProgressLines
from attnzoo.training.recipe import Recipe
from attnzoo.training.runs import MetricsFile, RunFolder
from attnzoo.training.settings import TrainSettings

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
        AttnzooError: the recipe can't work, here or at all.
        KeyboardInterrupt: the training was interrupted; its summary says so.
        SystemExit: the training was told to terminate.
    """
    with quiet():
        module = TrainingModule(recipe.sections)
        settings = module.experiment.settings
        here = machine.choose(settings)
        module.experiment.rehearse()
        if RANK > 0:
            fit_and_test(module, here, StepRows(), Checkpoints(None), {})
            return {}
        if here.precision != settings.precision:
            print(f"precision {settings.precision} is computed as {here.precision} on a CPU", file=sys.stderr)
        folder = RunFolder.claim(runs, recipe.name)
        folder.recipe.write_text(recipe.to_yaml(), encoding="utf-8")
        summary = {**experiment.about(recipe, module.experiment, here), "run": str(folder.path), "status": "running"}
        folder.write_summary(summary)
        return record(module, here, folder, summary, bar)


def record(
    module: TrainingModule, here: Machine, folder: RunFolder, summary: dict[str, Any], bar: bool
) -> dict[str, Any]:
    """Trains, and keeps what comes of it in the run folder, also when it stops early."""
    settings = module.experiment.settings
    scores = [f"valid_{name}" for name in ("loss", *module.valid_scores.metrics)]
    metrics = MetricsFile(folder.metrics, ["step", "train_loss", "lr", "ms", *scores])
    shown = ProgressBar(settings.max_steps) if bar else ProgressLines(settings.max_steps, settings.valid_every)
    steps, checkpoints = StepRows(metrics.add, shown), Checkpoints(folder)
    summary["status"] = "failed"
    try:
        fit_and_test(module, here, steps, checkpoints, summary)
    finally:
        shown.close()
        metrics.close()
        summary |= {
            "steps": len(steps.times),
            "best_step": checkpoints.best and checkpoints.best[1],
            "ms_per_step": steps.ms_per_step,
            "peak_memory_mib": here.peak_memory_mib(),
        }
        folder.write_summary(summary)
        curves.draw(folder.read_metrics(), folder.curves, f"{summary['recipe']}: {summary['pattern']}")
        if summary["status"] != "done":
            print(f"{summary['status']} after step {summary['steps']}; see {folder.path}", file=sys.stderr)
    return summary


def fit_and_test(
    module: TrainingModule, here: Machine, steps: StepRows, checkpoints: Checkpoints, summary: dict[str, Any]
) -> None:
    """Trains and tests; leaves the status and the test scores in the summary."""
    settings = module.experiment.settings
    batches = Batches(module.experiment.task, settings)
    trainer = make_trainer(settings, here, steps, checkpoints)
    torch.manual_seed(settings.seed + RANK)  # so that dropout differs by process
    try:
        trainer.fit(module, datamodule=batches)
        best = checkpoints.folder.best
        [scores] = trainer.test(module, datamodule=batches, ckpt_path=best, weights_only=True, verbose=False)
    except DivergedError as error:
        summary |= {"status": "diverged", "message": str(error)}
    except SystemExit as error:  # which Lightning makes of a signal
        summary["status"] = "interrupted"
        if trainer.received_sigterm:
            raise SystemExit(143) from error
        raise KeyboardInterrupt from error
    else:
        test = {name.removeprefix("test_"): round(value, 6) for name, value in scores.items()}
        summary |= {"status": "done", "test": test}


def make_trainer(settings: TrainSettings, here: Machine, *callbacks: pl.Callback) -> pl.Trainer:
    return pl.Trainer(
        accelerator=here.accelerator,
        devices=here.devices,
        num_nodes=settings.num_nodes,
        strategy=make_strategy(settings, here),
        precision=here.precision,
        max_steps=settings.max_steps,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip,
        val_check_interval=settings.valid_every * settings.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def make_strategy(settings: TrainSettings, here: Machine) -> Strategy | str:
    if settings.strategy == "fsdp":
        return ModelParallelStrategy(here.devices * settings.num_nodes, 1, save_distributed_checkpoint=False)
    return DDPStrategy() if settings.strategy == "ddp" else "auto"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Lightning from advising on what is chosen here on purpose."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
