"""Batches in an order that depends on the seed and the epoch alone, whatever the number of processes."""

from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from attnzoo.tasks.task import Split, Task
from attnzoo.training.settings import TrainSettings


class Shuffled(Sampler[int]):
    """This process's share of every batch of an epoch, in one order for all processes.

    A batch is cut into as many equal slices as there are processes, so that together they train on what one would. The
    sequences left over after the last whole optimizer step wait for another epoch's order.

    Args:
        size: items in the split.
        accumulate: batches in one optimizer step.
        rank: this process, of as many as `ranks`.
    """

    def __init__(
        self, size: int, batch_size: int, *, accumulate: int = 1, seed: int = 0, rank: int = 0, ranks: int = 1
    ) -> None:
        self.size = size
        self.batch_size = batch_size
        self.batches = size // (batch_size * accumulate) * accumulate
        self.seed = seed
        self.rank = rank
        self.ranks = ranks
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches * self.batch_size // self.ranks

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.size, generator=generator)
        mine = self.batch_size // self.ranks
        for first in range(self.rank * mine, self.batches * self.batch_size, self.batch_size):
            yield from order[first : first + mine].tolist()


class Batches(pl.LightningDataModule):
    """The three splits of a task, dealt out to this process.

    Validation and test see every item once, in order; of several processes each sees as many as the others, so that up
    to one item a process is left out at the end.
    """

    def __init__(self, task: Task, settings: TrainSettings) -> None:
        super().__init__()
        self.task = task
        self.settings = settings

    def train_dataloader(self) -> DataLoader:
        items: Any = self.task.split("train")
        rank, ranks = self._place
        order = Shuffled(
            len(items),
            self.settings.batch_size,
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
        items: Any = self.task.split(split)
        rank, ranks = self._place
        return self._loader(items, range(rank, len(items) // ranks * ranks, ranks))

    def _loader(self, items: Dataset, order: Iterable[int]) -> DataLoader:
        return DataLoader(
            items,
            batch_size=self.settings.batch_size // self._place[1],
            sampler=order,
            generator=torch.Generator(),  # its own, to leave alone torch's, on which dropout depends
        )
