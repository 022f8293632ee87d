"""How the next token is drawn from a row of logits."""

import dataclasses
import math
import random

import torch
from torch import Tensor

from attnzoo.errors import OptionError
from attnzoo.options import whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How freely tokens are drawn, and from which seed.

    Args:
        temperature: what logits are divided by; 0 takes the likeliest token always.
        top_k: draw among that many likeliest tokens only.
        top_p: draw among the fewest likeliest tokens that together are at least that likely.
    Raises:
        OptionError: a value is impossible.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise OptionError(f"temperature must be a number of at least 0, not {self.temperature}")
        if self.top_k is not None:
            whole("top_k", self.top_k)
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p must be above 0 and at most 1, which keeps every token, not {self.top_p}")
        whole("seed", self.seed, least=0)

    def generator(self, prompt: int) -> torch.Generator:
        """The random numbers of one prompt, whatever the other prompts are."""
        return torch.Generator().manual_seed(random.Random(f"{self.seed} {prompt}").getrandbits(63))

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """One token by the logits [v] of all."""
        chances = probabilities(logits, self.temperature, self.top_k, self.top_p)
        return int(torch.multinomial(chances, 1, generator=generator))


def probabilities(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """The chance of each token, float64 [v], for logits [v].

    Temperature comes first, then `top_k`, then `top_p` over what that leaves. Of tokens that are equally likely those
    with smaller ids are kept.
    """
    if temperature == 0:
        temperature, top_k = 1.0, 1
    ranked, ids = logits.double().sort(descending=True, stable=True)
    ranked = (ranked - ranked[0]) / temperature  # the difference first: a tiny temperature must not give inf - inf
    if top_k is not None:
        ranked[top_k:] = -math.inf
    chances = ranked.softmax(-1)
    if top_p < 1:
        likelier = chances.cumsum(-1) - chances
        chances = chances.masked_fill(likelier >= top_p, 0)
    return torch.zeros_like(chances).scatter(-1, ids, chances / chances.sum())
