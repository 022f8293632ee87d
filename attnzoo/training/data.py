"""Batches in an order that the seed and their number decide, whatever the number of processes and where they begin."""

import math
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from attnzoo.tasks.task import Split, Task
from attnzoo.training.settings import TrainSettings


class Shuffled(Sampler[int]):
    """This process's share of every batch of a training, epoch after epoch, in one order for all processes.

    A batch is cut into as many equal slices as there are processes, so that together they train on what one would. The
    sequences left over after the last whole optimizer step of an epoch wait for another epoch's order.

    Args:
        size: items in the split.
        steps: optimizer steps of the training; more than an epoch has begin another.
        after: the steps that are done. They count in the length, as Lightning counts them, and are not dealt out again.
        accumulate: batches in one optimizer step.
        rank: this process, of as many as `ranks`.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        steps: int,
        after: int = 0,
        accumulate: int = 1,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.size = size
        self.batch_size = batch_size
        self.first = after * accumulate
        self.batches = steps * accumulate
        self.batches_per_epoch = size // (batch_size * accumulate) * accumulate
        self.seed = seed
        self.rank = rank
        self.ranks = ranks

    def __len__(self) -> int:
        return self.batches * self.batch_size // self.ranks

    def __iter__(self) -> Iterator[int]:
        share = self.batch_size // self.ranks
        order = None
        for batch in range(self.first, self.batches):
            epoch, place = divmod(batch, self.batches_per_epoch)
            if order is None or place == 0:
                order = self.order(epoch)
            first = place * self.batch_size + self.rank * share
            yield from order[first : first + share].tolist()

    def order(self, epoch: int) -> Tensor:
        """All items in the order of one epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.size, generator=generator)


class Share(Dataset):
    """What one process sees of a split: every `ranks`-th item.

    All shares are equally long, because processes compute in step. Where the items run out, the last one comes again
    and its `counts` is false.
    """

    def __init__(self, items: Any, rank: int, ranks: int) -> None:
        self.items = items
        self.rank = rank
        self.ranks = ranks

    def __len__(self) -> int:
        return math.ceil(len(self.items) / self.ranks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place, last = self.rank + index * self.ranks, len(self.items) - 1
        return {**self.items[min(place, last)], "counts": torch.tensor(place <= last)}


class Batches(pl.LightningDataModule):
    """The three splits of a task, dealt out to this process.

    Validation and test see every item once, in order.
    """

    def __init__(self, task: Task, settings: TrainSettings) -> None:
        super().__init__()
        self.task = task
        self.settings = settings

    def train_dataloader(self) -> DataLoader:
        items: Any = self.task.split("train")
        rank, ranks = self._place
        assert self.trainer is not None
        order = Shuffled(
            len(items),
            self.settings.batch_size,
            steps=self.settings.max_steps,
            after=self.trainer.global_step,
            accumulate=self.settings.accumulate,
            seed=self.settings.seed,
            rank=rank,
            ranks=ranks,
        )
        return self._loader(items, order)

    def val_dataloader(self) -> DataLoader:
        return self._in_order("valid")

    def test_dataloader(self) -> DataLoader:
        return self._in_order("test")

    @property
    def _place(self) -> tuple[int, int]:
        """This process and how many there are."""
        assert self.trainer is not None
        return self.trainer.global_rank, self.trainer.world_size

    def _in_order(self, split: Split) -> DataLoader:
        share = Share(self.task.split(split), *self._place)
        return self._loader(share, range(len(share)))

    def _loader(self, items: Dataset, order: Iterable[int]) -> DataLoader:
        assert self.trainer is not None
        return DataLoader(
            items,
            batch_size=self.settings.batch_size // self._place[1],
            sampler=order,
            num_workers=self.settings.workers,
            persistent_workers=self.settings.workers > 0,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
            worker_init_fn=heed_training_alone,
            generator=torch.Generator(),  # its own, to leave alone torch's, on which dropout depends
        )


def heed_training_alone(worker: int) -> None:
    """Lets a process that loads data live through a Ctrl-C, which reaches it too, until its training is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
