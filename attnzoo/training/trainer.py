"""Lightning's Trainer, as every training and evaluation here uses it."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.warnings import PossibleUserWarning

from attnzoo.training import checkpoints
from attnzoo.training.machine import Machine
from attnzoo.training.settings import TrainSettings
from attnzoo.training.strategies import make_strategy


class CheckpointFiles(TorchCheckpointIO):
    """Writes checkpoints durably with a digest, and reads only what holds no code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        checkpoints.save(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return checkpoints.load(Path(path))


def make_trainer(settings: TrainSettings, here: Machine, *callbacks: pl.Callback) -> pl.Trainer:
    return pl.Trainer(
        accelerator=here.accelerator,
        devices=here.devices,
        num_nodes=settings.num_nodes,
        strategy=make_strategy(here, settings.num_nodes),
        precision=here.precision,
        benchmark=settings.cudnn_benchmark,
        max_steps=settings.max_steps,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip,
        val_check_interval=settings.valid_every * settings.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,
        callbacks=list(callbacks),
        plugins=[CheckpointFiles()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def score_test(
    trainer: pl.Trainer, module: pl.LightningModule, batches: pl.LightningDataModule, checkpoint: Path | None = None
) -> dict[str, float]:
    """The scores on the test split, of a checkpoint or of the module as it is.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    try:
        [scores] = trainer.test(module, datamodule=batches, ckpt_path=checkpoint, weights_only=True, verbose=False)
    except SystemExit as error:  # which Lightning makes of it
        raise KeyboardInterrupt from error
    return {name.removeprefix("test_"): round(value, 6) for name, value in scores.items()}


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
            # which holds for logits too; nothing here changes those in place
            warnings.filterwarnings("ignore", message=".*returned a view tensor")
            # which is so where fp16 skips the first step
            warnings.filterwarnings("ignore", message=".*`lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
