"""Where tokens stand when hidden ones do not count, and rotary embeddings at those places."""

import torch
from torch import Tensor

from attnzoo.shapes import Positions, Queries, Turns


def count_visible(
    length: int, key_mask: Tensor | None, documents: Tensor | None, device: torch.device, start: int = 0
) -> Tensor:
    """The position of each token from `start` on, [1 or b, t]: how many visible tokens of its document come before."""
    if key_mask is None and documents is None:
        return torch.arange(start, length, device=device)[None]
    if key_mask is None:
        assert documents is not None
        key_mask = torch.ones_like(documents, dtype=torch.bool)
    if documents is None:
        return (key_mask.cumsum(-1) - key_mask.long()).clamp(min=0)[:, start:]
    order = documents.argsort(dim=-1, stable=True)  # brings the tokens of a document together, in their order
    grouped, visible = documents.gather(-1, order), key_mask.gather(-1, order).long()
    before = visible.cumsum(-1) - visible
    first = torch.arange(length, device=device) == 0
    opens = first | (grouped != grouped.roll(1, -1))
    first_before = before.masked_fill(~opens, 0).cummax(-1).values
    return torch.empty_like(before).scatter_(-1, order, before - first_before)[:, start:]


def turns(positions: Positions, width: int, dtype: torch.dtype, base: float = 10_000.0) -> tuple[Turns, Turns]:
    """Cosine and sine of position * base ** (-2 i / d), each [b, 1, t, 1, d/2], for heads of d = `width` features."""
    wide = torch.promote_types(dtype, torch.float32)  # half precision can't tell far positions apart
    frequencies = base ** (-torch.arange(width // 2, device=positions.device, dtype=wide) / (width // 2))
    angles = positions[:, None, :, None, None].to(wide) * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Queries, cos: Turns, sin: Turns) -> Queries:
    """Turns feature pair (i, i + d/2) of each head, so that q @ k depends on distance alone; a head of x may hold
    several vectors of d features.

    Source: Su et al. 2021, section 3.2.2, arXiv:2104.09864, with the halves as pairs, as Llama has them.
    """
    first, second = x.unflatten(-1, (-1, 2, cos.shape[-1])).to(cos.dtype).unbind(-2)  # [b h t n d/2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-2).flatten(-3).to(x.dtype)
