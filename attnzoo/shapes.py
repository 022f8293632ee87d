"""The alphabet of axes, the tensors that go by a role, and the places they stand at.

b batch, q queries, k keys, h query heads, g key-value heads, d head features, f features of a value head, e model
features, t tokens where queries and keys are the same.
"""

import dataclasses

from jaxtyping import Float, Int
from torch import Tensor

Tokens = Float[Tensor, "b t e"]
Queries = Float[Tensor, "b h q d"]
Keys = Float[Tensor, "b g k d"]
Values = Float[Tensor, "b g k f"]
Heads = Float[Tensor, "b h q f"]
Scores = Float[Tensor, "b h q k"]
Positions = Int[Tensor, "#b t"]
Turns = Float[Tensor, "#b 1 t 1 c"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where tokens stand: their index from the start of the sequence, and the head that looks.

    `marked` says which of them are marked in this call, the batch in front. `salt` is a number drawn for this call,
    which random patterns mix in.
    """

    index: Tensor
    head: Tensor
    marked: Tensor | None = None
    salt: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Span:
    """Runs of tokens, by the index of their first and last one; `marked` where any of a run is, in any sequence."""

    first: Tensor
    last: Tensor
    marked: Tensor | None = None
    salt: Tensor | None = None
