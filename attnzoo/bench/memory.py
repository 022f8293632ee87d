"""The most memory that one step takes above its inputs, in a process of its own."""

import contextlib
import ctypes
import dataclasses
import gc
import multiprocessing
import resource
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from attnzoo.bench import contender, peers
from attnzoo.bench.contender import Contender
from attnzoo.bench.peers.peer import Unfit
from attnzoo.bench.problem import Problem

SYMBOLS = "torch.fx.experimental.symbolic_shapes"  # torch imports it at the first gradient, which takes a second
SMALL = 64  # tokens of a first call, so that what is loaded once does not count


def preload(names: Iterable[str]) -> None:
    """Lets all fresh processes begin with these peers' packages imported."""
    modules = ["attnzoo.bench.memory", SYMBOLS, *(peers.find(name).__module__ for name in names)]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)


def peak_mib(problem: Problem, peer: str | None, threads: int) -> float:
    """MiB above the inputs at the peak of one step: output, gradients and all that lies between.

    On the CPU the operating system counts what a fresh process has resident. On a GPU torch's allocator counts.

    Raises:
        MemoryError: the process was ended, as the operating system does where memory is short.
    """
    if problem.device != "cpu":
        return _rise_on_gpu(made(problem, peer)) / 2**20
    return in_fresh_process(_rise_of, problem, peer, threads) / 2**20


def in_fresh_process(measure: Callable[..., int], *arguments: Any) -> int:
    """What a function of a module gives in a process of its own, forked from one that has only imported.

    Raises:
        MemoryError: the process gave nothing.
    """
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(sender, measure, *arguments))
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = "it was ended"
    process.join()
    if not isinstance(found, int):
        raise MemoryError(f"the process that measures memory gave nothing: {found}")
    return found


def made(problem: Problem, peer: str | None) -> Contender:
    """The variant of a problem, or a peer beside it."""
    return contender.subject(problem) if peer is None else contender.peer(problem, peer)


def rise(call: Callable[[], Any]) -> int:
    """By how many bytes this process grows at the peak of a call."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc gives back what was freed before, or the call would grow into that
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux starts to count the peak anew
    before = _most_resident()
    call()
    return _most_resident() - before


def _most_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _tell(sender: Any, measure: Callable[..., int], *arguments: Any) -> None:
    try:
        sender.send(measure(*arguments))
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")


def _rise_of(problem: Problem, peer: str | None, threads: int) -> int:
    torch.set_num_threads(threads)
    small = dataclasses.replace(problem, length=SMALL)
    contender.subject(small)()
    with contextlib.suppress(Unfit):
        made(small, peer)()
    return rise(made(problem, peer))


def _rise_on_gpu(step: Contender) -> int:
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
