"""What Hypothesis makes up patterns, masks and calls from."""

import math
import operator

import torch
from hypothesis import strategies as st

from attnzoo import Causal, Full, Global, Heads, Local, Marked, Random
from attnzoo.scores import Alibi

D_MODEL, LONGEST = 8, 12
IDS = torch.tensor([0, 7, -1, 2**63 - 1, -(2**63)])


def table(*shape, below):
    """Whole numbers, 0 the simplest."""
    raw = st.binary(min_size=math.prod(shape), max_size=math.prod(shape))
    return raw.map(lambda raw: torch.tensor(list(raw), dtype=torch.long).view(shape) % below)


def shown(*shape):
    """A mask that hides a third, nothing at its simplest."""
    return table(*shape, below=3).map(lambda chance: chance < 2)


def marks(*shape):
    return table(*shape, below=4).map(lambda chance: chance > 2)


def documents_of(*shape):
    return table(*shape, below=len(IDS)).map(lambda place: IDS[place])


def tokens_of(*shape):
    return st.integers(0, 99).map(lambda seed: noise(seed, *shape, D_MODEL))


def noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FACTS = {"x": tokens_of, "key_mask": shown, "documents": documents_of, "marked": marks}  # by token

HUGE = 2**31 - 1
numbers, sizes, flags = st.integers(0, 4), st.sampled_from((1, 2, 3, 4, 5, 6, 7, HUGE)), st.booleans()
draws = st.sampled_from((1, 2, 3, HUGE))
random = {"block": sizes, "seed": st.integers(0, 2**32 - 1), "near": st.integers(0, 2), "first": st.integers(0, 2)}
same_anywhere = [
    st.just(Full()),
    st.just(Causal()),
    st.builds(Local, numbers),
    st.builds(Marked, mutual=flags),
    st.lists(numbers, max_size=3).map(lambda heads: Heads(*heads)),
]
tied_to_places = [
    st.builds(Local, numbers, sizes),
    st.builds(Global, numbers | st.just(HUGE), sizes),
    st.builds(Random, draws, **random),
    st.builds(Random, share=st.floats(0, 1, exclude_min=True), **random),
]
leaves = st.one_of(same_anywhere + tied_to_places)
either = st.sampled_from((operator.or_, operator.and_))


@st.composite
def formulas(draw, leaves):
    """Up to 5 patterns, joined and bracketed in any way."""
    sides = draw(st.lists(leaves, min_size=draw(st.integers(1, 3)), max_size=5))
    while len(sides) > 1:
        place = draw(st.integers(0, len(sides) - 2))
        sides[place : place + 2] = [draw(either)(*sides[place : place + 2])]
    return sides[0]


relatives, patterns = formulas(st.one_of(same_anywhere)), formulas(leaves)
decoders = patterns.map(lambda pattern: pattern if pattern.decodes else pattern & Causal())
plain_or_not = patterns | st.sampled_from((Full(), Causal()))  # each half of the time
salts = st.none() | st.integers(0, 2**32 - 1).map(torch.tensor)


@st.composite
def sequences(draw):
    """A length, the marked tokens of up to 3 sequences, and a salt."""
    length = draw(st.integers(1, 2 * LONGEST))
    return length, draw(st.none() | st.integers(1, 3).flatmap(lambda batch: marks(batch, length))), draw(salts)


@st.composite
def calls(draw, patterns):
    """q, k and v, a pattern, and what else a call may say."""
    batch, keys = draw(st.sampled_from((1, 2, 3, 1, 2, 3, 0))), draw(st.integers(0, 13))
    queries = draw(st.sampled_from((keys, min(keys, 1))) | st.integers(0, keys))
    sizes = (1, 1), (4, 2), (2, 1), (2, 2), (4, 2), (3, 1), (3, 3), (4, 2), (4, 1), (4, 4)
    heads, groups = draw(st.sampled_from(sizes))
    features, seed = draw(st.integers(1, 4)), draw(st.integers(0, 99))
    shapes = (batch, heads, queries, features), (batch, groups, keys, features), (batch, groups, keys, 3)
    tensors = [noise(seed + number, *shape).requires_grad_() for number, shape in enumerate(shapes)]
    broad = [draw(st.sampled_from((size, 1, size))) for size in (batch, heads, queries, keys)]
    said = {name: FACTS[name](batch, keys) for name in ("key_mask", "documents", "marked")}
    said |= {"mask": shown(*broad) | shown(queries, keys), "score": st.just(Alibi(heads))}
    return tensors, draw(patterns), {name: draw(st.none() | fact) for name, fact in said.items()}
