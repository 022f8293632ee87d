"""Patterns: formulas, algebra, prefix stability, and what runs of tokens touch and cover. Pictures are doctests."""

import dataclasses
import random

import pytest
import torch

from attnzoo import attend, build
from attnzoo.errors import OptionError
from attnzoo.formulas import formula_of, meaning, parse
from attnzoo.patterns import Both, Causal, Either, Full, Global, Heads, Local, Pattern, Random
from attnzoo.shapes import Place, Span

PATTERNS = [
    Full(),
    Causal(),
    Local(0),
    Local(3),
    Local(1, block=4),
    Global(2),
    Global(1, block=4),
    Heads(0, 2),
    Heads(*range(300)),
    Random(2),
    Random(3, block=4, seed=7, near=1, first=1),
    Random(share=0.25),
    Local(2) & Causal(),
    (Local(1, block=4) | Global(1, block=4) | Random(1, block=4, near=1, first=1)) & Causal(),
    Heads(0, 1) | Local(2) | (Global(1) & Causal()),
]


def expression(chance: random.Random, depth: int = 3) -> Pattern:
    """A random pattern, so that combinations nobody thought of are tried too."""
    if depth == 0 or chance.random() < 0.3:
        return chance.choice(PATTERNS)
    left, right = expression(chance, depth - 1), expression(chance, depth - 1)
    return left & right if chance.random() < 0.5 else left | right


EXPRESSIONS = [*PATTERNS, *(expression(random.Random(seed)) for seed in range(20))]


@pytest.mark.parametrize("pattern", EXPRESSIONS, ids=str)
def test_prints_as_a_formula_that_parses_back(pattern):
    again = parse(str(pattern))
    assert again == pattern
    assert hash(again) == hash(pattern)
    assert repr(again) == str(pattern)


@pytest.mark.parametrize("pattern", EXPRESSIONS, ids=str)
def test_a_short_mask_is_the_corner_of_a_long_one(pattern):
    long = pattern.visible(29, num_heads=3)
    for length in (1, 2, 7, 8, 28):
        assert torch.equal(pattern.visible(length, num_heads=3), long[:, :length, :length])


@pytest.mark.parametrize("pattern", EXPRESSIONS, ids=str)
def test_queries_stand_at_the_end_of_the_keys(pattern):
    whole = pattern.visible(13, num_heads=3)
    assert torch.equal(pattern.visible(5, 13, num_heads=3), whole[:, 8:])


@pytest.mark.parametrize("pattern", EXPRESSIONS, ids=str)
@pytest.mark.parametrize(("tile", "block"), [(1, 4), (4, 4), (3, 5), (8, 8), (16, 2)])
def test_touches_is_no_less_and_covers_no_more_than_the_mask(pattern, tile, block):
    length = 27
    mask = pattern.visible(length, num_heads=3).expand(3, -1, -1)
    queries, keys = torch.arange(0, length, tile), torch.arange(0, length, block)
    spans = (
        Span(queries[:, None], (queries[:, None] + tile).clamp(max=length) - 1),
        Span(keys, (keys + block).clamp(max=length) - 1),
    )
    head = torch.arange(3)[:, None, None]
    size = (3, len(queries), len(keys))
    touched, covered = (ask(*spans, head).expand(size) for ask in (pattern.touches, pattern.covers))
    for row, query in enumerate(queries):
        for column, key in enumerate(keys):
            seen = mask[:, query : query + tile, key : key + block].flatten(1)
            assert (touched[:, row, column] | ~seen.any(-1)).all()
            assert (~covered[:, row, column] | seen.all(-1)).all()


@pytest.mark.parametrize("pattern", EXPRESSIONS, ids=str)
def test_what_a_pattern_says_of_itself_is_true(pattern):
    mask = pattern.visible(24, num_heads=3).expand(3, -1, -1)
    if pattern.causal:
        assert not mask.triu(1).any()
    if pattern.relative:
        assert torch.equal(mask[:, 1:, 1:], mask[:, :-1, :-1])
    if not pattern.per_head:
        assert torch.equal(mask[0], mask[1])
    assert pattern.density(24, 3) == pytest.approx(mask.double().mean().item())


def test_algebra_keeps_values_small():
    assert Full() & Local(2) == Local(2) == Local(2) & Full()
    assert Full() | Local(2) == Full() == Local(2) | Full()
    assert Local(2) & Local(2) == Local(2) | Local(2) == Local(2)
    chain = Local(2) | (Global(1) | Heads(0))
    assert chain == (Local(2) | Global(1)) | Heads(0) == Either(Either(Local(2), Global(1)), Heads(0))
    assert str((Local(2) | Global(1)) & Causal()) == "(Local(2) | Global(1)) & Causal()"
    assert isinstance(parse("Local(2) & Causal() | Global(1)"), Either)
    assert isinstance(parse("(Local(2) | Global(1)) & Causal()"), Both)


def test_draws_are_distinct_spread_out_and_their_own_for_each_head_seed_and_row():
    length, draws = 400, 5
    mask = (Random(draws, seed=3) & Causal()).visible(length, num_heads=2)
    counts = mask.sum(-1)
    assert torch.equal(counts, (torch.arange(length) + 1).clamp(max=draws + 1).expand(2, -1))
    assert not torch.equal(mask[0], mask[1])
    assert not torch.equal(mask, (Random(draws, seed=4) & Causal()).visible(length, num_heads=2))
    late = mask[:, 200:, :200].double().mean(dim=(0, 1))  # where the last half of the rows look in the first half
    assert late.view(10, 20).mean(-1).max() < 2 * late.mean()
    assert late.view(10, 20).mean(-1).min() > late.mean() / 2


def test_seeing_is_mutual_and_leaves_out_window_and_global_blocks():
    pattern = Random(2, block=2, seed=1, near=1, first=1)
    mask = pattern.visible(40, num_heads=2)
    assert torch.equal(mask, mask.transpose(1, 2))
    blocks = mask[:, ::2, ::2].clone()
    blocks.diagonal(dim1=1, dim2=2).zero_()
    assert not blocks[:, :, 0].any()
    assert not blocks.diagonal(1, 1, 2).any()


def test_a_share_draws_that_share():
    counts = (Random(share=0.25) & Causal()).visible(41, num_heads=1).sum(-1)[0] - 1
    assert counts.tolist() == [-(-row // 4) for row in range(41)]


def test_no_product_overflows_at_two_billion_tokens():
    last, head = torch.tensor(2**31), torch.tensor(1)
    keys = torch.arange(2**31 - 1000, 2**31)
    assert Random(share=1.0, seed=2**32 - 1).sees(Place(last, head), Place(keys, head)).all()
    assert not Random(2, near=2000).sees(Place(last, head), Place(keys, head)).any()


@pytest.mark.parametrize(
    ("formula", "says"),
    [
        ("Locl(3)", "Did you mean Local?"),
        ("Local('a')", "whole number"),
        ("Local(-1)", "at least 0"),
        ("Local(True)", "whole number"),
        ("Local(2, radus=1)", "radus"),
        ("Random()", "either draws"),
        ("Random(2, share=0.5)", "either draws"),
        ("Random(share=0.0)", r"\(0, 1\]"),
        ("Random(1, seed=-1)", "at least 0"),
        ("Random(1, seed=4294967296)", r"below 2\*\*32"),
        ("1 + 1", "only patterns"),
        ("Local", "only patterns"),
        ("Local(2).radius", "only patterns"),
        ("__import__('os')", "no pattern is named"),
        ("Local(open('x'))", "Local"),
        ("Local(2) &", "no formula"),
        ("", "no formula"),
        ("(" * 500, "no formula"),
        ("Local(1) & " * 500 + "Full()", "at most 100 of"),
        (5, "at most 100 of"),
    ],
)
def test_a_wrong_formula_gets_one_clear_message(formula, says):
    with pytest.raises(OptionError, match=says):
        parse(formula)


def test_a_pattern_of_ones_own_works_everywhere_with_one_method():
    @dataclasses.dataclass(frozen=True, repr=False)
    class Strided(Pattern):
        step: int

        def sees(self, query, key):
            return (query.index - key.index) % self.step == 0

    pattern = parse("Strided(3) & Causal()")
    assert pattern == Strided(3) & Causal()
    assert pattern.draw(4) == "# . . .\n. # . .\n. . # .\n# . . #"


def test_a_formula_means_the_pattern_that_it_was_asked_for():
    """Running a notebook cell again makes a second class of the same name."""

    def cell(step):
        @dataclasses.dataclass(frozen=True, repr=False)
        class EveryNth(Pattern):
            def sees(self, query, key):
                return (query.index - key.index) % step == 0

        return EveryNth()

    first = cell(2)
    assert meaning(formula_of(first)) is first
    second = cell(3)
    assert formula_of(first) == formula_of(second) == ""
    assert meaning("EveryNth()") is first
    assert meaning(formula_of(Local(3) & Causal())) == Local(3) & Causal()


def test_a_pattern_that_cannot_be_hashed_is_refused():
    @dataclasses.dataclass
    class Listed(Pattern):
        places: list[int]

    with pytest.raises(OptionError, match="frozen dataclass"):
        build("sparse", d_model=8, num_heads=2, pattern=Listed([1]))
    q = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ValueError, match="hashed"):
        attend(q, q, q, Listed([1]))
