"""What happens beside the training: a row of numbers for each step, and checkpoints."""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from attnzoo.training.runs import RunFolder

Row = dict[str, float]


class StepRows(Callback):
    """Hands on one row for each optimizer step, with the scores of the validation that followed it, if one did.

    `ms` is the step's wall time with the loading of its data and without validation.
    """

    def __init__(self, *readers: Callable[[Row], None]) -> None:
        self.readers = readers
        self.row: Row | None = None
        self.losses: list[float] = []
        self.times: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.since = time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._hand_on()
        if not self.losses:
            self.lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["mean"])
        if len(self.losses) < trainer.accumulate_grad_batches:
            return
        now = time.perf_counter()
        self.times.append(1000 * (now - self.since))
        self.since = now
        loss = statistics.fmean(self.losses)
        self.row = {"step": trainer.global_step, "train_loss": loss, "lr": self.lr, "ms": self.times[-1]}
        self.losses.clear()
        if trainer.global_step >= trainer.max_steps:
            trainer.should_stop = True  # makes Lightning validate now, whether or not the interval ends here

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.row is not None:
            self.row |= {name: value.item() for name, value in trainer.callback_metrics.items()}
        self.since = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._hand_on()

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._hand_on()

    @property
    def ms_per_step(self) -> float | None:
        """The median step; the first one, which warms up, does not count unless it is the only one."""
        return statistics.median(self.times[1:] or self.times) if self.times else None

    def _hand_on(self) -> None:
        if self.row is not None:
            for read in self.readers:
                read(self.row)
        self.row = None


class Checkpoints(Callback):
    """After each validation saves the last state, and keeps the one with the lowest validation loss.

    Args:
        folder: where the run lies; the first process knows and tells the others.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self.given = folder
        self.best: tuple[float, int] | None = None

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        folder = trainer.strategy.broadcast(self.given)
        assert folder is not None
        self.folder = folder

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        loss = trainer.callback_metrics["valid_loss"].item()
        better = self.best is None or loss < self.best[0]
        if better:
            self.best = loss, trainer.global_step
        beside = self.folder.last.with_suffix(".part")
        trainer.save_checkpoint(beside)
        if trainer.is_global_zero:
            os.replace(beside, self.folder.last)
            if better:
                shutil.copyfile(self.folder.last, beside)
                os.replace(beside, self.folder.best)
