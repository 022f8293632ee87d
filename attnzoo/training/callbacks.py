"""What a training does beside its steps: hands on a row for each, and saves checkpoints."""

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from attnzoo.training import checkpoints, durable
from attnzoo.training.checkpoints import DamagedError
from attnzoo.training.runs import RunFolder
from attnzoo.training.settings import TrainSettings
from attnzoo.training.stopping import Interrupted, Stop
from attnzoo.training.strategies import together

Row = dict[str, float]


def validates(trainer: pl.Trainer) -> bool:
    """Whether the optimizer step that was just made is followed by a validation."""
    step = trainer.global_step
    return step * trainer.accumulate_grad_batches % trainer.val_check_interval == 0 or step >= trainer.max_steps


class StepRows(Callback):
    """Hands on one row for each optimizer step, with the scores of the validation that followed it, if one did.

    `ms` is the step's wall time with the loading of its data and without validation.

    Args:
        after: the step that training goes on from.
    Attributes:
        step: the last one that was made.
        skipped: steps whose gradients fp16's loss scaler found too large and did not use.
    """

    def __init__(self, *readers: Callable[[Row], None], after: int = 0) -> None:
        self.readers = readers
        self.row: Row | None = None
        self.losses: list[float] = []
        self.step = after
        self.skipped = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.since = time.perf_counter()
        self.scale = loss_scale(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.losses:
            self.lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["mean"])
        if len(self.losses) < trainer.accumulate_grad_batches:
            return
        now, before = time.perf_counter(), self.scale
        self.scale = loss_scale(trainer)
        self.skipped += self.scale < before
        self.step = trainer.global_step
        loss = statistics.fmean(self.losses)
        self.row = {"step": self.step, "train_loss": loss, "lr": self.lr, "ms": 1000 * (now - self.since)}
        self.since = now
        self.losses.clear()
        if self.step >= trainer.max_steps:
            trainer.should_stop = True  # makes Lightning validate now, whether or not the interval ends here
        if not validates(trainer):
            self._hand_on()

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.row is not None:
            self.row |= {name: value.item() for name, value in trainer.callback_metrics.items()}
        self._hand_on()
        self.since = time.perf_counter()

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._hand_on()

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["skipped_steps"] = self.skipped

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.skipped = checkpoint["skipped_steps"]

    def _hand_on(self) -> None:
        if self.row is not None:
            for read in self.readers:
                read(self.row)
        self.row = None


def loss_scale(trainer: pl.Trainer) -> float:
    """What fp16 multiplies the loss with at present; it falls at each step that is skipped."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()


class Checkpoints(Callback):
    """Saves the whole state from time to time, after a validation better than those before, at the end, and on a wish.

    Kept are the newest and the best ones. What is saved is complete: the rows of its steps are on the disk before.

    Args:
        folder: where the run lies; the first process knows and tells the others.
        sync: puts the rows so far on the disk.
    Attributes:
        chosen: what to test at the end: the best, or the newest where the best was damaged.
        best: loss and step of the best validations, best first.
    """

    def __init__(
        self, folder: RunFolder | None, settings: TrainSettings, stop: Stop, sync: Callable[[], None] = lambda: None
    ) -> None:
        self.given = folder
        self.every = settings.checkpoint_every or settings.valid_every
        self.keep = settings.keep_best
        self.stop = stop
        self.sync = sync
        self.best: list[tuple[float, int]] = []

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        folder = trainer.strategy.broadcast(self.given)
        assert folder is not None
        self.folder = folder

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and not validates(trainer):
            self._end_step(trainer, better=False)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        found = trainer.callback_metrics["valid_loss"].item(), trainer.global_step
        self.best = sorted([*self.best, found])[: self.keep]
        self._end_step(trainer, better=found in self.best)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["best"] = [list(found) for found in self.best]

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.best = [(loss, step) for loss, step in checkpoint["best"] if self._good(step)][: self.keep]

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self._arrange(trainer.global_step)  # again, because a run may be killed before it has
        self.chosen = self.folder.checkpoint(self.best[0][1] if self.best else trainer.global_step)

    def _good(self, step: int) -> bool:
        try:
            self.folder.load_step(step)
        except DamagedError as error:
            warnings.warn(f"{error}; it was among the best, and the best of the others is tested", stacklevel=2)
            return False
        return True

    def _end_step(self, trainer: pl.Trainer, better: bool) -> None:
        step, asked = trainer.global_step, self.stop.asked(trainer)
        if asked or better or step % self.every == 0 or step >= trainer.max_steps:
            with together(self.folder.path):
                self.sync()
            trainer.save_checkpoint(self.folder.checkpoint(step))
            with together(self.folder.path):
                if trainer.is_global_zero:
                    self._arrange(step)
        if asked:
            raise Interrupted

    def _arrange(self, last: int) -> None:
        """Gives the newest and the best their names, and deletes what is neither."""
        durable.point(self.folder.last, self.folder.checkpoint(last))
        if self.best:
            durable.point(self.folder.best, self.folder.checkpoint(self.best[0][1]))
        else:
            self.folder.best.unlink(missing_ok=True)
        kept = [self.folder.checkpoint(step) for step in (last, *(step for _, step in self.best))]
        for file in {*self.folder.last.parent.glob("step-*")} - {*kept, *map(checkpoints.digest_of, kept)}:
            durable.remove(file)
