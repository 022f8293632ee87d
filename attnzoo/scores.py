"""What is added to the scores before the softmax."""

import dataclasses
import math

import torch
from torch import Tensor

from attnzoo.shapes import Place


class Score:
    """A term added to the scores, or a way to shape them; one with parameters is an nn.Module as well.

    It is asked for parts of the scores, and again for gradients, so the same scores and places must give the same.
    """

    by_place = False  # does it add numbers that follow from places alone, so that gradients pass it unchanged?

    def __call__(self, scores: Tensor, query: Place, key: Place) -> Tensor:
        """The scores with this term in them; both places broadcast to the shape of the scores."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(scores, query, key)")


@dataclasses.dataclass(frozen=True)
class Alibi(Score):
    """Takes slope * distance off each score, with one slope for each head; distances are between places, padding
    included.

    Source: Press et al. 2022, section 3, arXiv:2108.12409; where not causal the distance is taken to both sides.
    """

    num_heads: int

    by_place = True

    def __call__(self, scores: Tensor, query: Place, key: Place) -> Tensor:
        slopes = torch.tensor(self.slopes(), dtype=scores.dtype, device=scores.device)
        return scores - slopes[query.head] * (query.index - key.index).abs()

    def slopes(self) -> list[float]:
        """2 ** (-8 i / h) for head i of h; where h is no power of two, every other slope of the next one fills up."""
        power = 2 ** int(math.log2(self.num_heads))
        first = [2 ** (-8 * i / power) for i in range(1, power + 1)]
        between = [2 ** (-4 * i / power) for i in range(1, 2 * power, 2)]
        return first + between[: self.num_heads - power]
