"""What a benchmark is asked to do."""

import dataclasses

import torch

from attnzoo.bench import peers
from attnzoo.bench.problem import LEVELS, MODES, Level, Mode, Problem
from attnzoo.errors import OptionError
from attnzoo.options import choice, whole
from attnzoo.registry import DTYPES


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sizes, the peers, and how long it may take.

    Args:
        threads: torch's own number where 0.
        rounds: samples of each contender, where the budget allows so many.
        budget: seconds for everything.
        unequal: times peers, too, whose outputs or pairs differ from the variant's.
    Raises:
        OptionError: a value has no meaning, a peer is unknown, or its package is missing.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    modes: tuple[Mode, ...] = ("forward", "both")
    level: Level = "kernel"
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 0
    against: tuple[str, ...] = ("dense",)
    rounds: int = 7
    budget: float = 120.0
    unequal: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "head_dim", "rounds"):
            whole(name, getattr(self, name))
        for length in self.lengths:
            whole("lengths", length, least=2)
        if not self.lengths or not self.modes:
            raise OptionError("give at least one length and one mode")
        for mode in self.modes:
            choice("mode", mode, MODES)
        choice("level", self.level, LEVELS)
        choice("dtype", self.dtype, DTYPES)
        choice("device", self.device, ("cpu", "cuda"))
        whole("threads", self.threads, least=0, most=1024)
        if not self.budget > 0:
            raise OptionError(f"budget must be some seconds, not {self.budget}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise OptionError("device is 'cuda', but torch sees no GPU on this machine: use 'cpu'")
        for name in self.against:
            peers.check(name)

    def problem(self, subject: str, mode: Mode, length: int) -> Problem:
        """One measurement of these."""
        sizes = (self.level, self.batch, self.heads, self.head_dim, self.dtype, self.device)
        return Problem(subject, mode, length, *sizes)
