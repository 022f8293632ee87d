"""What this machine has for a training: devices, and the precision they compute in."""

import dataclasses
import os
import resource
import sys

import torch

from attnzoo.errors import OptionError
from attnzoo.training.settings import Precision, TrainSettings


@dataclasses.dataclass(frozen=True)
class Machine:
    """The part of this machine that a training runs on."""

    accelerator: str
    devices: int
    precision: Precision

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
    if settings.batch_size % (devices * settings.num_nodes):
        raise OptionError(
            f"train.batch_size is {settings.batch_size} and can't be dealt out evenly to "
            f"{devices * settings.num_nodes} devices: make it a multiple of that"
        )
    on_cpu = accelerator == "cpu" and settings.precision == "16-mixed"
    return Machine(accelerator, devices, "bf16-mixed" if on_cpu else settings.precision)
