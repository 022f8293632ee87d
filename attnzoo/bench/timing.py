"""Seconds: contenders take turns in one process, so that what slows the machine slows all of them."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

LEAST = 0.01
"""Seconds that one sample lasts at least; faster calls are repeated in it."""


class Watch:
    """Wall and CPU seconds of calls on the CPU."""

    def __call__(self, call: Callable[[], Any], repeats: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats


class EventWatch:
    """Seconds of calls on a GPU, between two of its events, and CPU seconds to launch them.

    Args:
        cuda: `torch.cuda`.
    """

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def __call__(self, call: Callable[[], Any], repeats: int) -> tuple[float, float]:
        start, stop = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self.cuda.synchronize()
        cpu = time.process_time()
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        cpu = time.process_time() - cpu
        self.cuda.synchronize()
        return start.elapsed_time(stop) / 1000 / repeats, cpu / repeats


@dataclasses.dataclass
class Times:
    """The samples of one contender, in seconds a call."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.wall)

    @property
    def spread(self) -> float:
        """The middle half of the samples, as a part of the median."""
        if len(self.wall) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.wall, n=4, method="inclusive")
        return (high - low) / self.median


def take_turns(
    calls: Mapping[str, Callable[[], Any]],
    watch: Callable[[Callable[[], Any], int], tuple[float, float]],
    rounds: int,
    deadline: float,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Calls each in turn, A B A B, for some rounds; fewer where the deadline passes, but one always.

    Args:
        calls: each was called before, so that nothing is first.
        deadline: on the clock of `time.monotonic`.
    """
    repeats = {name: _repeats(call, watch) for name, call in calls.items()}
    times = {name: Times() for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wall, cpu = watch(call, repeats[name])
            times[name].wall.append(wall)
            times[name].cpu.append(cpu)
        tick()
        if time.monotonic() >= deadline:
            break
    return times


def _repeats(call: Callable[[], Any], watch: Callable[..., tuple[float, float]]) -> int:
    """How often a call fits into a sample."""
    return max(1, math.ceil(LEAST / max(watch(call, 1)[0], 1e-7)))
