"""How a training is stopped by a signal."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only


class Interrupted(Exception):
    """A training stopped because it was asked to, with everything saved."""


class Stop(Callback):
    """Turns a first SIGINT or SIGTERM into a wish that is met after the step, and obeys a second one at once.

    Attributes:
        signal: what arrived.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.patient = True
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._listen()  # again, because Lightning's handler talks to the other processes in the middle of a step

    def on_test_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.patient = False  # all is saved
        self._listen()
        if self.signal is not None:
            raise KeyboardInterrupt

    def asked(self, trainer: pl.Trainer) -> bool:
        """Whether any process of this training was asked to stop; then all know by which signal."""
        own = torch.tensor(self.signal or 0, device=trainer.strategy.root_device)
        found = int(trainer.strategy.reduce(own, reduce_op="max"))
        if found:  # or else one may have arrived meanwhile
            self.signal = found
        return found > 0

    def _listen(self) -> None:
        for number in self.before:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self.signal = self.signal is not None, number
        if again or not self.patient:
            raise KeyboardInterrupt
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            os.write(2, b"stopping after this step; once more stops at once\n")
