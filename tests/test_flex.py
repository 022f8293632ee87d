"""FlexAttention gives what `dense` gives; on a CPU its logic is tested, on a GPU its kernels and their speed."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention

from attnzoo.kernels import flex as kernel
from attnzoo.kernels.block_mask import TILE, _remembered, block_mask
from attnzoo.kernels.dense import dense
from attnzoo.kernels.fastest import choose
from attnzoo.kernels.flex import flex, serves
from attnzoo.patterns import Causal, Full, Global, Heads, Local, Marked, Random
from attnzoo.scope import Scope, places
from attnzoo.scores import Alibi
from tests.test_kernels import GROUPS, HEADS, Slope, inputs, masks, plain_in_half, same, scope_of
from tests.test_patterns import EXPRESSIONS

CPU = torch.device("cpu")
KINDS = ["no mask", "key_mask", "mask", "mask over heads", "mask over all", "mask of one row", "everything"]
BIGBIRD = Local(1, block=64) | Global(1, block=64) | Random(1, block=64, near=1, first=1)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def with_gradients_on_a_cpu(monkeypatch):
    """Torch has a backward of plain operations for CPUs, and refuses to use it."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.parametrize("pattern", EXPRESSIONS, ids=str)
def test_any_pattern(pattern):
    for queries, keys in ((23, 23), (5, 18)):
        same(flex, *inputs(queries, keys), scope_of(pattern, queries, keys))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", [Full(), Global(2) | Local(1) & Causal(), Random(2, block=4)], ids=str)
def test_under_masks(pattern, kind):
    for queries, keys in ((13, 13), (4, 11)):
        same(flex, *inputs(queries, keys), scope_of(pattern, queries, keys, **masks(kind, queries, keys)))


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 9), (1, 1)])
def test_alibi_with_grouped_heads(groups, queries, keys):
    scope = scope_of(Local(4), queries, keys, score=Alibi(HEADS))
    same(flex, *inputs(queries, keys, groups=groups), scope)


@pytest.mark.parametrize("pattern", [Causal() | Marked(), Local(1) | Marked(mutual=True)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(14, 14), (5, 14), (200, 300)])
def test_marks(pattern, queries, keys):
    marked = torch.rand(2, keys) > 0.8
    query, key = places(HEADS, queries, keys, CPU, marked)
    same(flex, *inputs(queries, keys), Scope(pattern, query, key, marked=marked))


def test_random_patterns_of_one_call():
    for salt in (5, 2**32 - 1):
        query, key = places(HEADS, 40, 40, CPU, salt=torch.tensor(salt))
        same(flex, *inputs(40, 40), Scope(Random(2, block=4), query, key))


def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients():
    q, k, v = inputs(150, 150)
    scope = scope_of(Local(2), 150, 150, mask=torch.zeros(1, 1, 150, 1, dtype=torch.bool))
    out = flex(q, k, v, scope)
    assert not out.any()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), (q, k, v)))
    same(flex, q, k, v, scope_of(Heads(0), 150, 150))


@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (140, 300), (256, 256), (50, 70)])
@pytest.mark.parametrize("pattern", [*EXPRESSIONS, BIGBIRD, Local(130) & Causal()], ids=str)
def test_no_visible_pair_is_missing_and_whole_blocks_are_whole(pattern, queries, keys):
    seen = by_block(pattern.visible(queries, keys, 3))
    for block in (16, 64, 7):
        scope = Scope(pattern, *places(3, queries, keys, CPU))
        mask = block_mask(scope, 3, block, CPU)
        assert mask.seq_lengths == (queries, keys)
        touched, whole = mask.to_dense()[0].bool(), listed(mask.full_kv_num_blocks, mask.full_kv_indices)[0]
        assert (touched | ~seen.any(-1)).all()
        assert (~whole | seen.all(-1)).all()
        assert not (whole & listed(mask.kv_num_blocks, mask.kv_indices)[0]).any()


def test_blocks_out_of_reach_are_skipped_and_inner_ones_are_whole():
    def count(pattern, **facts):
        mask = block_mask(Scope(pattern, *places(HEADS, 1024, 1024, CPU), **facts), HEADS, 64, CPU)
        whole = 0 if mask.full_kv_num_blocks is None else int(mask.full_kv_num_blocks.sum())
        return int(mask.kv_num_blocks.sum()), whole

    assert count(Causal()) == (8, 28)
    assert count(Local(128) & Causal()) == (8 + 7, 0)
    assert count(Local(256) & Causal()) == (8 + 6, 7)
    documents = torch.arange(1024)[None] // 256
    assert count(Causal(), documents=documents) == (4 * 3, 0)
    assert count(Causal(), documents=documents.expand(3, -1)) == (3 * 4 * 3, 0)
    assert count(Causal(), key_mask=torch.ones(2, 1024, dtype=torch.bool)) == (36, 0)
    assert sum(count(BIGBIRD)) < 0.8 * HEADS * 64  # small blocks are asked for one by one


def by_block(seen):
    """A mask [1 or h, q, k] cut into blocks [h, nq, nk, pairs]; what lies beyond the end is not seen."""
    _, queries, keys = seen.shape
    seen = F.pad(seen, (0, -keys % TILE, 0, -queries % TILE))
    return seen.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE)).transpose(2, 3).flatten(3)


def listed(counts, order):
    return torch.zeros_like(order, dtype=torch.bool).scatter(
        -1, order.long(), torch.arange(order.shape[-1]) < counts[..., None]
    )


def test_masks_are_remembered_by_value_and_never_shared():
    scope = scope_of(Local(3), 300, 300)
    first, again = (block_mask(scope, HEADS, 64, CPU) for _ in range(2))
    assert first is not again
    assert first.kv_indices is again.kv_indices
    with torch.inference_mode():
        remembered = block_mask(scope_of(Local(4), 300, 300), HEADS, 64, CPU)
    assert not remembered.kv_indices.is_inference()


def test_new_lengths_compile_no_more_and_new_radii_always_can():
    def compiled(pattern, *lengths):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for length in lengths:
            q, k, v = (x.detach() for x in inputs(length, length))
            facts = masks("everything", length, length)
            torch.testing.assert_close(
                flex(q, k, v, scope_of(pattern, length, length, **facts)),
                dense(q, k, v, scope_of(pattern, length, length, **facts)),
            )
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] - before

    assert compiled(Local(31), 140, 200, 300) <= 3  # for the first length, for others, and for other numbers of blocks
    assert compiled(Local(31), 256, 384, 131, 500) == 0
    for radius in range(32, 44):  # more than torch compiles one function for
        assert compiled(Local(radius), 140) == 1


# The choice


SIZES, WIDTHS = (HEADS, 2048, 2048), (64, 64)


def test_a_gpu_gets_flex_where_it_serves():
    scope = scope_of(Local(128) & Causal(), 2048, 2048)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert serves("cuda", dtype, SIZES, WIDTHS, scope)
    assert serves("cuda", torch.bfloat16, SIZES, (48, 128), scope)
    assert serves("cuda", torch.bfloat16, SIZES, WIDTHS, scope_of(Local(128), 2048, 2048, score=Alibi(HEADS)))


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cpu"},
        {"device": "mps"},
        {"dtype": torch.float64},
        {"sizes": (HEADS, 512, 512)},
        {"sizes": (HEADS, 8, 2**20)},
        {"widths": (8, 64)},
        {"widths": (64, 256)},
        {"scope": scope_of(Local(128), 2048, 2048, dropout=0.1)},
        {"scope": scope_of(Local(128), 2048, 2048, score=Slope())},
        {"scope": scope_of(Local(128), 2048, 2048, score=Alibi(2 * HEADS))},
    ],
    ids=str,
)
def test_a_call_that_flex_does_not_serve_goes_elsewhere(change):
    call = {"device": "cuda", "dtype": torch.bfloat16, "sizes": SIZES, "widths": WIDTHS}
    assert not serves(**{**call, "scope": scope_of(Local(128), 2048, 2048), **change})


def test_a_cpu_never_gets_flex():
    q, k, v = (torch.empty(1, heads, 2048, 64) for heads in (HEADS, 2, 2))
    assert choose(q, k, v, scope_of(Local(128), 2048, 2048)).kernel == "blocks"


# On a GPU


def tensors(length, dtype, *, width=64, batch=2):
    shapes = ((batch, heads, length, width) for heads in (HEADS, 2, 2))
    return [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes]


def scope_on_gpu(pattern, length, **facts):
    return Scope(pattern, *places(HEADS, length, length, torch.device("cuda")), **facts)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["no mask", "everything", "alibi"])
@pytest.mark.parametrize("pattern", [Local(200) & Causal(), BIGBIRD, Heads(0) | Local(3) | Global(1)], ids=str)
def test_kernels_are_as_exact_as_a_plain_implementation(pattern, kind, dtype):
    for length in (1024, 1111, 1500):
        q, k, v = tensors(length, dtype)
        facts = {"score": Alibi(HEADS)} if kind == "alibi" else masks(kind, length, length)
        facts = {name: fact.cuda() if isinstance(fact, torch.Tensor) else fact for name, fact in facts.items()}
        scope = scope_on_gpu(pattern, length, **facts)
        assert choose(q, k, v, scope).kernel == "flex"
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        plain = plain_in_half if dtype.itemsize == 2 and scope.score is None else dense
        above = torch.randn_like(q)
        right, ours, theirs = (
            (out := kernel(*given, scope), *torch.autograd.grad(out, given, above.to(out.dtype)))
            for kernel, given in ((dense, wide), (flex, (q, k, v)), (plain, (q, k, v)))
        )
        for wanted, found, other in zip(right, ours, theirs, strict=True):
            scale = float(wanted.abs().max())
            assert found.isfinite().all()
            limit = 2 * float((other.nan_to_num() - wanted).abs().max()) + 1e-5 * scale
            assert float((found - wanted).abs().max()) <= limit


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("learns", [False, True])
def test_a_window_is_faster_than_all_pairs(learns):
    length = 16384
    q, k, v = (torch.randn(1, 8, length, 64, dtype=torch.bfloat16, device="cuda", requires_grad=learns) for _ in "qkv")
    scope = Scope(Local(256) & Causal(), *places(8, length, length, torch.device("cuda")))

    def sdpa(q, k, v, scope):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def time_ms(kernel):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        out = kernel(q, k, v, scope)
        if learns:
            torch.autograd.grad(out.sum(), (q, k, v))
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    rounds = [(time_ms(flex), time_ms(sdpa)) for _ in range(12)][2:]
    ours, theirs = (min(times) for times in zip(*rounds, strict=True))
    print(f"window of 256 at {length}: {ours:.2f} ms, all pairs {theirs:.2f} ms, {theirs / ours:.1f} times")
    assert ours < theirs


def test_what_torch_cannot_compile_is_computed_in_blocks_after_a_warning(monkeypatch):
    def fails(*_):
        raise torch._dynamo.exc.Unsupported("no compiler")

    monkeypatch.setattr(kernel, "_compiled", lambda *_: fails)
    monkeypatch.setattr(kernel, "_given_up", set())
    q, k, v = (torch.randn(1, heads, 20, 8) for heads in (HEADS, GROUPS, GROUPS))
    query, key = places(HEADS, 20, 20, torch.device("cpu"))
    scope = Scope(Local(3), query, key)
    with pytest.warns(UserWarning, match="so blocks compute it: no compiler"):
        out = flex(q, k, v, scope)
    torch.testing.assert_close(out, dense(q, k, v, scope))
    torch.testing.assert_close(flex(q, k, v, scope), out)  # without another warning


@pytest.mark.parametrize("documents", [None, torch.arange(300)[None] // 90], ids=["alone", "documents"])
def test_the_default_device_plays_no_part(documents):
    scope = scope_of(Local(40), 300, 300, documents=documents)
    wanted = block_mask(scope, HEADS, 64, CPU)
    _remembered.cache_clear()
    with torch.device("meta"):
        found = block_mask(scope, HEADS, 64, CPU)
    assert torch.equal(found.to_dense(), wanted.to_dense())
