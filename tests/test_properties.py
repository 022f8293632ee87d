"""What holds for any pattern, size and mask that Hypothesis makes up; ATTNZOO_EXAMPLES=20 tries 20 times as many."""

import contextlib
import functools
import itertools
import math
import os
from unittest import mock

import hypothesis
import pytest
import torch

import attnzoo
from attnzoo import CacheError, MaskError, OptionError
from attnzoo.formulas import parse
from attnzoo.kernels import plan
from attnzoo.kernels.blocks import blocks
from attnzoo.kernels.dense import dense
from attnzoo.positions import count_visible
from attnzoo.scope import Scope, check_documents, check_key_mask, check_marked, check_mask, places
from attnzoo.shapes import Place, Span
from tests.strategies import (
    D_MODEL,
    FACTS,
    IDS,
    LONGEST,
    calls,
    decoders,
    documents_of,
    either,
    flags,
    leaves,
    noise,
    patterns,
    plain_or_not,
    relatives,
    salts,
    sequences,
    shown,
    sizes,
    table,
)

given, st = hypothesis.given, hypothesis.strategies

CPU = torch.device("cpu")
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OTHER = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
POSITIONS = ("none", "rotary", "alibi")
HEADS = 4


def examples(count):
    count *= int(os.environ.get("ATTNZOO_EXAMPLES", "1"))
    return hypothesis.settings(max_examples=count, derandomize=True, deadline=None, database=None)


def see(pattern, length, marked=None, salt=None, heads=5, start=0):
    """What is seen in a sequence whose first token stands at `start`, [b, h, q, k]."""
    head, index = torch.arange(heads)[:, None, None], torch.arange(start, start + length)
    rows, columns = (None, None) if marked is None else (marked[:, None, :, None], marked[:, None, None])
    found = pattern.sees(Place(index[:, None], head, rows, salt), Place(index, head, columns, salt))
    return found.expand(1 if marked is None else len(marked), heads, length, length)


@examples(300)
@given(patterns)
def test_a_formula_reads_back_as_the_pattern(pattern):
    again = parse(str(pattern))
    assert again == pattern
    assert hash(again) == hash(pattern)
    assert repr(again) == str(pattern)


@examples(200)
@given(either, st.lists(leaves, min_size=2, max_size=5, unique=True))
def test_a_chain_is_one_value_however_it_is_bracketed(join, chain):
    assert functools.reduce(join, chain) == functools.reduce(lambda later, one: join(one, later), reversed(chain))


@examples(200)
@given(patterns, sequences(), st.integers(0, 2 * LONGEST))
def test_a_short_mask_is_the_corner_of_a_long_one(pattern, sequence, short):
    length, marked, salt = sequence
    short = min(short, length)
    long = see(pattern, length, marked, salt)
    few = None if marked is None else marked[:, :short]
    assert torch.equal(see(pattern, short, few, salt), long[..., :short, :short])
    if salt is None:
        last = pattern.visible(short, length, 5, marked)
        assert torch.equal(last.expand(len(long), 5, short, length), long[:, :, length - short :])


@examples(400)
@given(patterns, sequences(), st.integers(1, 40))
def test_what_a_pattern_says_of_itself_is_true(pattern, sequence, start):
    length, marked, salt = sequence
    mask = see(pattern, length, marked, salt)
    later = mask.triu(1)
    assert pattern.decodes or not pattern.causal
    assert not (pattern.causal and later.any())
    assert not (pattern.decodes and (later if marked is None else later & ~marked[:, None, None]).any())
    if pattern.relative:
        assert torch.equal(see(pattern, length, marked, salt, start=start), mask)
    if not pattern.per_head:
        assert torch.equal(mask[:, :1].expand_as(mask), mask)
    if not pattern.marks:
        assert torch.equal(see(pattern, length, None, salt).expand_as(mask), mask)


@examples(400)
@given(patterns, sequences())
def test_what_a_pattern_needs_of_the_past_is_all_that_it_sees_of_it(pattern, sequence):
    length, marked, salt = sequence
    past, mask = pattern.past, see(pattern, length, marked, salt)
    query, key = torch.arange(length)[:, None], torch.arange(length)
    needed = (key < past.first) | (key > query - (length + 1 if past.last is None else past.last))
    called = torch.zeros(1, length, dtype=torch.bool) if marked is None else marked
    by_mark = called[:, None, None] | (called[:, None, :, None] & past.mutual)
    earlier = key <= query
    assert not (mask & earlier & ~(needed | by_mark)).any()
    if past.exact:
        assert mask[..., earlier & needed].all()
    if past.exact and marked is None:
        assert torch.equal(mask & earlier, (needed & earlier).expand_as(mask))


@examples(400)
@given(patterns, sequences(), st.integers(0, 2 * LONGEST), sizes, sizes)
def test_touches_is_never_less_and_covers_never_more_than_is_seen(pattern, sequence, start, tile, block):
    length, marked, salt = sequence
    rows, columns = torch.arange(start % length, length).split(tile), torch.arange(length).split(block)

    def runs(tokens, axis):
        first, last = (torch.stack([run[end] for run in tokens]).unsqueeze(axis) for end in (0, -1))
        some = None if marked is None else torch.stack([marked[:, run].any() for run in tokens]).unsqueeze(axis)
        return Span(first, last, some, salt)

    spans = runs(rows, 1), runs(columns, 0), torch.arange(5)[:, None, None]
    touched, covered = (found(*spans).expand(5, len(rows), len(columns)) for found in (pattern.touches, pattern.covers))
    mask = see(pattern, length, marked, salt)
    for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
        pairs = mask[:, :, row][..., column].flatten(2)
        assert (touched[:, i, j] | ~pairs.any(2)).all()
        assert (~covered[:, i, j] | pairs.all(2)).all()


# Kernels


def plain(q, k, v, pattern, key_mask=None, mask=None, documents=None, marked=None, score=None, salt=None):
    """A softmax over what may be looked at, written out."""
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    seen = see(pattern, keys, marked, salt, heads)
    seen = seen if key_mask is None else seen & key_mask[:, None, None]
    seen = seen if documents is None else seen & (documents[:, None, None] == documents[:, None, :, None])
    seen = seen[:, :, keys - queries :] if mask is None else seen[:, :, keys - queries :] & mask
    k, v = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (k, v))
    slopes = torch.tensor([0.0] * heads if score is None else score.slopes(), dtype=q.dtype)[:, None, None]
    distance = (torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)).abs()
    weights = (q @ k.mT / q.shape[-1] ** 0.5 - slopes * distance).exp() * seen
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, 1) @ v


def results(kernel, tensors, *rest, **said):
    """The output and the gradients of q, k and v."""
    out = kernel(*tensors, *rest, **said)
    return out, *torch.autograd.grad(out, tensors, noise(9, *out.shape))


@examples(300)
@given(calls(patterns), salts, st.integers(1, 15), st.sampled_from((2**20, 16)))
def test_dense_and_blocks_are_a_plain_softmax(call, salt, block, part):
    tensors, pattern, said = call
    wanted = results(plain, tensors, pattern, **said, salt=salt)
    batch, *sizes = *tensors[0].shape[:3], tensors[1].shape[2]
    query, key = places(*sizes, CPU, said["marked"], salt)
    scope = Scope(pattern, query, key, **{**said, "mask": check_mask(said["mask"], batch, *sizes)})
    torch.testing.assert_close(results(dense, tensors, scope), wanted)
    plan._remembered.cache_clear()
    with mock.patch.object(plan, "PART", part):  # scores computed at once
        torch.testing.assert_close(results(blocks, tensors, scope, block=block), wanted)


@examples(600)
@given(calls(plain_or_not), st.integers(1, 15), st.sampled_from((1.0, math.nan, math.inf)))
def test_attend_is_a_plain_softmax_and_what_hidden_keys_hold_is_not_felt(call, block, garbage):
    tensors, pattern, said = call
    if not pattern.relative:
        said["documents"] = None
    if not pattern.marks:
        said["marked"] = None
    wanted = results(plain, tensors, pattern, **said)
    hidden = ~said["key_mask"][:, None, :, None] if said["key_mask"] is not None else torch.tensor(False)
    dirty = [tensor.detach().masked_fill(hidden, garbage).requires_grad_() for tensor in tensors[1:]]
    found = results(attnzoo.attend, [tensors[0], *dirty], pattern, block=block, **said)
    torch.testing.assert_close(found, wanted)


# Masks


def broadcasts(shape, full):
    try:
        return torch.zeros(shape).expand(full).shape == full
    except RuntimeError:
        return False


@examples(400)
@given(st.tuples(*[st.integers(0, 3)] * 4), st.data())
def test_masks_of_the_shapes_that_mean_something_are_taken_and_all_others_refused(full, data):
    batch, _, queries, keys = full
    near = st.permutations(full) | st.tuples(*(st.sampled_from((size, 1, size + 1)) for size in full))
    ends = st.builds(lambda shape, start: shape[start:], near, st.integers(0, 4))
    shape = tuple(data.draw(ends | st.lists(st.integers(0, 3), max_size=5), "shape"))
    values = data.draw(table(*shape, below=3), "values") - 1
    tensor, bits = values.to(data.draw(st.sampled_from(WHOLE), "dtype")), values != 0
    other = bits.to(data.draw(st.sampled_from(OTHER), "other dtype"))
    of_tokens = shape == (batch, keys)
    for check, size, right in (
        (check_mask, full, shape == (queries, keys) or (len(shape) == 4 and broadcasts(shape, full))),
        (check_key_mask, (batch, keys), of_tokens),
        (check_marked, (batch, queries, keys), of_tokens and queries <= keys),
        (check_documents, (batch, queries, keys), of_tokens and queries <= keys),
    ):
        with contextlib.nullcontext() if right else pytest.raises(MaskError):
            found, wanted = check(tensor, *size), tensor if check is check_documents else bits
            assert found.dtype == wanted.dtype
            assert torch.equal(found.view(shape), wanted)
            assert check is check_documents or torch.equal(check(bits, *size), found)
        with pytest.raises(MaskError):
            check(other, *size)


# Positions, documents and decoding


@examples(200)
@given(st.integers(1, 3), st.integers(0, LONGEST), st.data())
def test_a_position_is_the_number_of_visible_tokens_of_the_document_before(batch, length, data):
    key_mask, documents = (data.draw(st.none() | kind(batch, length)) for kind in (shown, documents_of))
    found = count_visible(length, key_mask, documents, CPU).expand(batch, length)
    for row, token in itertools.product(range(batch), range(length)):
        before = [other for other in range(token) if key_mask is None or key_mask[row, other]]
        before = [other for other in before if documents is None or documents[row, other] == documents[row, token]]
        assert found[row, token] == len(before)


def build(name, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return attnzoo.build(name, D_MODEL, HEADS, **options).double().eval()


@functools.cache
def variants(feature):
    """Every registered variant with each of its examples, settings and positions, where it has a feature."""
    found = []
    for name in attnzoo.list_variants(supports=feature):
        for example, causal, positions in itertools.product(attnzoo.find(name).examples, (True, False), POSITIONS):
            with contextlib.suppress(OptionError):  # a causal setting that it does without
                found.append(build(name, causal=causal, positions=positions, **example))
    return [attn for attn in found if feature in attn.supports]


def modules(feature, formulas):
    """A registered variant with a feature, or a formula as one."""
    positions, block = st.sampled_from(POSITIONS), st.integers(1, 7)
    own = st.builds(build, st.just("sparse"), pattern=formulas, block=block, positions=positions)
    return st.deferred(lambda: st.sampled_from(variants(feature))) | own


def said_to(attn, *names):
    """Some of the facts that a call may state."""
    names = [name for name in names if name in {"key_mask", "mask"} | attn.supports]
    return st.sets(st.sampled_from(names)).map(sorted)


@examples(250)
@given(modules("documents", relatives), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_packed_documents_give_what_each_gives_alone(attn, lengths, data):
    orders = [lengths, data.draw(st.permutations(lengths), "lengths of the second sequence")]
    ids = [IDS[data.draw(st.permutations(range(len(IDS))), "ids")][: len(lengths)] for _ in orders]
    documents = torch.stack(
        [torch.repeat_interleave(*pair) for pair in zip(ids, map(torch.tensor, orders), strict=True)]
    )
    if attn.positions != "alibi" and "Local" not in str(attn.pattern):  # distances do not matter
        documents = documents[:, data.draw(st.permutations(range(documents.shape[1])), "order of tokens")]
    names = ["x", *data.draw(said_to(attn, "key_mask", "marked"), "said")]
    facts = {name: data.draw(FACTS[name](*documents.shape), name) for name in names}
    packed = attn(**facts, documents=documents)
    for row, one in itertools.product(range(2), range(len(lengths))):
        place = documents[row] == ids[row][one]
        alone = attn(**{name: fact[row : row + 1, place] for name, fact in facts.items()})
        torch.testing.assert_close(packed[row : row + 1, place], alone)


@examples(350)
@given(modules("cache", decoders), st.integers(1, 3), flags, st.data())
def test_reading_in_pieces_is_reading_at_once_whatever_is_cropped_and_reordered(attn, batch, learns, data):
    mask = noise(5, 1, HEADS, LONGEST, LONGEST) > -1
    said = data.draw(said_to(attn, "key_mask", "mask", "documents", "marked"), "said")
    late = attn.pattern.past.mutual and "marked" in said  # a token marked late looks at all before
    cache = attn.new_cache(batch, LONGEST, rewind=LONGEST if late else data.draw(st.integers(0, 4), "rewind"))
    longest = 0  # since the last crop to nothing
    facts = {name: data.draw(FACTS[name](batch, 0)) for name in ("x", *said) if name != "mask"}
    steps = st.lists(st.sampled_from(("read", "read", "read", "crop", "reorder")), min_size=3, max_size=9)
    for step in data.draw(steps, "steps"):
        start = cache.length
        longest = max(longest, start)
        if step == "crop":
            to = data.draw(st.integers(0, start), "crop to")
            if longest - to <= cache.rewind:
                cache.crop(to)
            else:
                with contextlib.suppress(CacheError):
                    cache.crop(to)
            facts = {name: fact[:, : cache.length] for name, fact in facts.items()}
        elif step == "reorder":
            index = data.draw(st.lists(st.integers(0, batch - 1), max_size=4) if batch else st.just([]), "index")
            cache.reorder(torch.tensor(index, dtype=torch.long))
            batch, facts = len(index), {name: fact[index] for name, fact in facts.items()}
        else:
            stop = start + data.draw(st.integers(0, min(4, LONGEST - start)), "read")
            new = {name: data.draw(FACTS[name](batch, stop - start), name) for name in facts}
            if start and "marked" in said and not attn.causal:
                new["marked"][:] = False  # only the first piece may have marked tokens
            silent = "key_mask" in said and data.draw(flags, "no key_mask")  # what was hidden stays hidden
            if silent:
                new["key_mask"][:] = True
            facts = {name: torch.cat([fact, new[name]], dim=1) for name, fact in facts.items()}
            square = mask[:, :, :stop, :stop] if "mask" in said else None
            rows = None if square is None else square[:, :, start:]
            piece = {name: fact for name, fact in facts.items() if not (silent and name == "key_mask")}
            with torch.set_grad_enabled(learns):
                found = attn(**{**piece, "x": new["x"]}, mask=rows, cache=cache)
            torch.testing.assert_close(found, attn(**facts, mask=square)[:, start:])
