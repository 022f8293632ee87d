"""How several processes share a training, and how they save it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from attnzoo.errors import TrainingError
from attnzoo.training import checkpoints, durable, shards
from attnzoo.training.machine import Machine

VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"}


def make_strategy(here: Machine, num_nodes: int) -> Strategy | str:
    if here.strategy == "fsdp":
        return Sharded(here.devices * num_nodes, 1)
    return Replicated() if here.strategy == "ddp" else "auto"


@contextlib.contextmanager
def left_as_found() -> Iterator[None]:
    """Takes back what Lightning tells other processes and torch, so that another training can follow in this one."""
    before, threads = dict(os.environ), torch.get_num_threads()
    joined = torch.distributed.is_initialized()
    try:
        yield
        if torch.distributed.is_initialized() and not joined:
            torch.distributed.destroy_process_group()
    finally:
        for name in VARIABLES & os.environ.keys() - before.keys():
            del os.environ[name]
        torch.set_num_threads(threads)


@contextlib.contextmanager
def together(where: Path) -> Iterator[None]:
    """Ends all processes with one message where a file of any can't be written; each waits here for the others.

    Args:
        where: the file or its folder, as a full disk doesn't say.
    Raises:
        TrainingError: on each process.
    """
    problem = None
    try:
        yield
    except OSError as error:
        problem = f"can't write {error.filename or where}: {error.strerror or error}"
    found = [problem]
    if torch.distributed.is_initialized():
        found *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, problem)
    for problem in filter(None, found):
        raise TrainingError(problem)


def is_loss_of_process(error: RuntimeError) -> bool:
    """Whether an error says that another process of the training is gone."""
    return isinstance(error, torch.distributed.DistError) or "remote worker" in str(error)  # in gloo's words


class Replicated(DDPStrategy):
    """Every process has the whole model, and the first one saves it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        with together(Path(filepath)):
            super().save_checkpoint(checkpoint, filepath, storage_options)


class Sharded(ModelParallelStrategy):
    """FSDP2. A checkpoint is a folder in which each process has a file; torch's own format needs pickle to be read."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = Path(filepath)
        beside = path.with_name(f"{path.name}.part")
        with together(path):
            if self.is_global_zero:
                durable.remove(beside)
        with together(path):
            checkpoints.save(shards.own(checkpoint), checkpoints.part(beside, self.global_rank, self.world_size))
        with together(path):
            if self.is_global_zero:
                checkpoints.seal(beside)
                durable.remove(path)
                os.replace(beside, path)
                durable.settle(path.parent)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        checkpoint = checkpoints.load(Path(checkpoint_path), self.global_rank)
        shards.fill(get_model_state_dict(self.model), checkpoint["state_dict"])
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):  # none in a test
            state = shards.fill(get_optimizer_state_dict(self.model, optimizer), saved)
            set_optimizer_state_dict(self.model, optimizer, state)
        return checkpoint
