"""Which kernel a variant takes for a shape, and why."""

import torch

from attnzoo import registry
from attnzoo.attention import Attention
from attnzoo.bench.problem import read
from attnzoo.errors import OptionError
from attnzoo.kernels.fastest import Choice, explained
from attnzoo.options import whole
from attnzoo.scope import Scope, places

OWN = Choice("dense", "it is written out in the variant")


def kernels(subject: str, shape: str, dtype: torch.dtype = torch.float32) -> dict[str, list[Choice]]:
    """The choices for whole sequences in training and in eval and, where the variant decodes, for one more token.

    Args:
        subject: a variant and its options, as in `local:radius=256`.
        shape: sequences, tokens, heads and features a head, as in `1,4096,8,64`.
    Raises:
        OptionError: the shape is no four whole numbers, or the variant refuses its options.
    """
    sizes = [int(size) for size in shape.split(",") if size.strip().isdecimal()]
    if len(sizes) != 4 or len(shape.split(",")) != 4 or 0 in sizes:
        raise OptionError(
            f"shape must be sequences, tokens, heads and features a head, as in 1,4096,8,64, not {shape!r}"
        )
    batch, length, heads, head_dim = sizes
    whole("tokens", length, most=2**20)
    name, options = read(subject)
    attn = registry.build(name, d_model=heads * head_dim, num_heads=heads, **options)
    found = {
        "training": _choices(attn.train(), batch, length, length, dtype),
        "eval": _choices(attn.eval(), batch, length, length, dtype),
    }
    if "cache" in attn.supports:
        found["decoding"] = _choices(attn.eval(), batch, 1, length, dtype)
    return found


def _choices(attn: Attention, batch: int, queries: int, keys: int, dtype: torch.dtype) -> list[Choice]:
    """What the variant's own `attend` asks for, computing nothing; tried on two tokens, as it may ask nobody."""
    for q_length, k_length in ((2, 2), (queries, keys)):
        groups, features = attn.projection.stored["keys"]
        q, k = (
            torch.zeros((), dtype=dtype).expand(batch, count, length, features)
            for count, length in ((attn.num_heads, q_length), (groups, k_length))
        )
        salt = torch.zeros((), dtype=torch.long) if attn.redraws else None
        query, key = places(attn.num_heads, q_length, k_length, q.device, salt=salt)
        dropout = attn.dropout if attn.training else 0.0
        with torch.no_grad(), explained() as found:
            attn.attend(q, k, k, Scope(attn.current_pattern(), query, key, score=attn.score, dropout=dropout))
        if not found:
            break
    return list(dict.fromkeys(found)) or [OWN]
