"""What this machine has for a training: devices, and the precision they compute in."""

import dataclasses
import os
import resource
import sys
from importlib.util import find_spec
from typing import Literal

import torch

from attnzoo.errors import OptionError
from attnzoo.training.settings import Precision, TrainSettings

Strategy = Literal["none", "ddp", "fsdp"]
PACKAGES = {"tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""What each logger needs."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The part of this machine that a training runs on."""

    accelerator: str
    devices: int
    precision: Precision
    strategy: Strategy

    @property
    def peak_memory_of(self) -> str:
        """What `peak_memory_mib` measures here."""
        return "CUDA allocations" if self.accelerator == "cuda" else "process, with Python and torch"

    def peak_memory_mib(self) -> float:
        """The most memory in use at once since the start: of the first process, or of its GPU."""
        if self.accelerator == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def choose(settings: TrainSettings) -> Machine:
    """Finds what the settings ask for.

    Raises:
        OptionError: this machine lacks it, or the batch can't be dealt out evenly.
    """
    check_packages(settings)
    available = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    gpu = next((name for name, count in available.items() if count), None)
    if settings.accelerator == "gpu" and gpu is None:
        raise OptionError("train.accelerator is 'gpu', but torch sees no GPU on this machine: use 'auto' or 'cpu'")
    accelerator = "cpu" if gpu is None or settings.accelerator == "cpu" else gpu
    there = available.get(accelerator) or os.cpu_count() or 1
    everything = 1 if accelerator == "cpu" else there
    devices = everything if settings.devices == "auto" else settings.devices
    if devices > there:
        unit = "CPU cores" if accelerator == "cpu" else "GPUs"
        raise OptionError(f"train.devices is {devices}, but this machine has {there} {unit}")
    if settings.num_nodes > 1 and not any(name in os.environ for name in ("MASTER_ADDR", "SLURM_NTASKS")):
        raise OptionError(
            f"train.num_nodes is {settings.num_nodes}, but nothing here starts the other nodes: use torchrun or SLURM"
        )
    processes = devices * settings.num_nodes
    started = int(os.environ.get("WORLD_SIZE", processes)) if "TORCHELASTIC_RUN_ID" in os.environ else processes
    if started != processes:
        raise OptionError(
            f"torchrun started {started} processes, but train.devices ({devices}) times train.num_nodes "
            f"({settings.num_nodes}) is {processes}: make them equal"
        )
    if settings.batch_size % processes:
        raise OptionError(
            f"train.batch_size is {settings.batch_size} and can't be dealt out evenly to {processes} devices: "
            "make it a multiple of that"
        )
    on_cpu = accelerator == "cpu" and settings.precision == "16-mixed"
    alone: Strategy = "none" if processes == 1 else "ddp"
    strategy = alone if settings.strategy == "auto" else settings.strategy
    return Machine(accelerator, devices, "bf16-mixed" if on_cpu else settings.precision, strategy)


def check_packages(settings: TrainSettings) -> None:
    """Refuses loggers whose packages are missing, all in one message."""
    missing = [name for name in settings.loggers or () if not all(map(find_spec, PACKAGES[name]))]
    if missing:
        raise OptionError(
            f"train.loggers names {' and '.join(missing)}, for which a package is missing: "
            f"pip install 'attnzoo[{','.join(missing)}]'"
        )
