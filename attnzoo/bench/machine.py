"""What a measurement depends on: the machine, its versions, threads and allocator."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

import attnzoo

ALLOCATOR = ("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
THREADS = ("OMP_", "KMP_", "MKL_", "GOMP_")


def describe(device: str, packages: list[str]) -> dict[str, str]:
    """The facts to print beside figures.

    Args:
        packages: peers' packages whose versions matter.
    """
    versions = [f"Python {platform.python_version()}", f"attnzoo {attnzoo.__version__}", f"torch {torch.__version__}"]
    versions += [f"{package} {importlib.metadata.version(package)}" for package in packages]
    chip = torch.cuda.get_device_name() if device != "cpu" else _processor()
    return {
        "machine": f"{chip}, {platform.system()} {platform.machine()}",
        "versions": ", ".join(versions),
        "threads": " ".join([str(torch.get_num_threads()), *_settings(THREADS)]),
        "allocator": " ".join([" ".join(platform.libc_ver()) or "the system's", *_settings(ALLOCATOR)]),
        "date": datetime.date.today().isoformat(),
    }


def _settings(prefixes: tuple[str, ...]) -> list[str]:
    """The environment's settings that begin like this, or the word default."""
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(prefixes)]
    return found or ["(default settings)"]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or "unknown processor"
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
