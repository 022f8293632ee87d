"""Caches: what they keep, count and refuse, and what a decoding step costs; the contract covers the rest."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnzoo
from attnzoo.errors import CacheError, OptionError
from attnzoo.kernels import fused as fused_kernel


def module(name="gqa", **options):
    torch.manual_seed(0)
    options = {"num_kv_heads": 2, **options} if name == "gqa" else options
    return attnzoo.build(name, d_model=24, num_heads=6, **options).double().eval()


def tokens(length=7, batch=2):
    return torch.randn(batch, length, 24, dtype=torch.float64)


def read(attention, x, pieces, cache, **given):
    """The outputs of a sequence read in pieces from where the cache stands."""
    outputs = []
    for length in pieces:
        start, stop = cache.length, cache.length + length
        outputs.append(attention(x[:, start:stop], cache=cache, **{k: v[:, :stop] for k, v in given.items()}))
    return torch.cat(outputs, dim=1)


def test_a_cache_of_another_attention_or_batch_or_dtype_is_refused_and_left_alone():
    attention = module(causal=True)
    cache = attention.new_cache(batch_size=2, max_length=9)
    attention(tokens(3), cache=cache)
    for call, says in (
        (lambda: attention(tokens(3, batch=3), cache=cache), "batch_size=2, and the call has 3"),
        (lambda: attention(tokens(7), cache=cache), "holds 3 of max_length=9.*max_length=10 or more"),
        (lambda: module("vanilla", causal=True)(tokens(3), cache=cache), "other heads"),
        (lambda: cache.crop(4), "0 to the 3"),
        (lambda: cache.crop(-1), "crop"),
        (lambda: cache.reorder(torch.tensor([0, 2])), "whole numbers below 2"),
    ):
        with pytest.raises(CacheError, match=says):
            call()
        assert cache.length == 3
    half = attention.bfloat16()
    small = half.new_cache(batch_size=2, max_length=4)
    with pytest.raises(CacheError, match=r"bfloat16.*float64"):
        half.double()(tokens(2), cache=small)


def test_a_failing_kernel_leaves_the_cache_as_it_was(monkeypatch):
    attention = module(causal=True)
    cache = attention.new_cache(batch_size=2, max_length=9)
    x = tokens(5)
    whole = attention(x)
    attention(x[:, :3], cache=cache)
    monkeypatch.setattr(type(attention), "attend", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attention(x[:, :2], cache=cache)
    monkeypatch.undo()
    torch.testing.assert_close(attention(x[:, 3:], cache=cache), whole[:, 3:])


def test_own_keys_keep_their_gradient_and_earlier_ones_do_not():
    attention, x = module(causal=True), tokens(6).requires_grad_()
    cache = attention.new_cache(batch_size=2, max_length=6)
    attention(x[:, :4], cache=cache)
    grad = torch.autograd.grad(attention(x[:, 4:], cache=cache).sum(), x)[0]
    assert not grad[:, :4].any()
    assert grad[:, 4].any()
    prompt = attention.new_cache(batch_size=2, max_length=6)
    torch.testing.assert_close(
        torch.autograd.grad(attention(x, cache=prompt).square().sum(), x),
        torch.autograd.grad(attention(x).square().sum(), x),
    )


def test_reorder_moves_keys_values_and_what_is_hidden():
    attention, x = module(causal=True, positions="rotary"), tokens(6, batch=3)
    key_mask = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    order = torch.tensor([2, 0, 0, 1])
    cache = attention.new_cache(batch_size=3, max_length=6)
    attention(x[:, :4], cache=cache, key_mask=key_mask[:, :4])
    cache.reorder(order)
    torch.testing.assert_close(
        attention(x[order, 4:], cache=cache), attention(x[order], key_mask=key_mask[order])[:, 4:]
    )


def test_a_cache_counts_its_bytes_and_takes_the_dtype_of_autocast():
    attention = attnzoo.build("gqa", d_model=24, num_heads=6, num_kv_heads=2, causal=True)
    assert attention.new_cache(batch_size=3, max_length=10).nbytes == 3 * 10 * 2 * 2 * 4 * 4 + 10 * 8
    with torch.autocast("cpu", torch.bfloat16):
        cache = attention.new_cache(batch_size=2, max_length=10)
        assert cache.dtype == torch.bfloat16
        attention(torch.randn(2, 3, 24), cache=cache)
    for bad in (
        {"batch_size": 0, "max_length": 3},
        {"batch_size": 1, "max_length": 0},
        {"batch_size": 1, "max_length": 3, "rewind": -1},
    ):
        with pytest.raises(OptionError):
            attention.new_cache(**bad)


def test_a_cache_born_in_inference_mode_serves_training_too():
    attention, x = module(causal=True), tokens(6)
    with torch.inference_mode():
        cache = attention.new_cache(batch_size=2, max_length=6)
        attention(x[:, :3], cache=cache)
        cache.reorder(torch.tensor([0, 1]))
    torch.testing.assert_close(attention(x[:, 3:], cache=cache), attention(x)[:, 3:])


# Rings


def test_a_window_keeps_its_first_tokens_the_window_and_rewind():
    attention = module("local", radius=4, global_tokens=3, causal=True)
    row = 2 * 6 * 4 * 8 * 2 + 8  # keys and values of six heads in two sequences, and which token it is
    for rewind, rows in ((0, 8), (5, 13), (92, 100)):
        cache, x = attention.new_cache(batch_size=2, max_length=100, rewind=rewind), tokens(60)
        torch.testing.assert_close(read(attention, x, (20, *(1,) * 20, 20), cache), attention(x))
        assert (cache.nbytes, cache.length) == (rows * row, 60)


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        ("Local(2, block=4) | Global(1, block=5)", 17),
        ("Local(9) & (Local(1) | Global(2))", 4),
        ("Random(1) & Local(3)", 4),
        ("(Heads(0) & Local(5)) | Local(1)", 6),
        ("Heads(0) | Local(1)", 50),
        ("Random(1) | Local(1)", 50),
        ("Full()", 50),
    ],
)
def test_a_pattern_keeps_what_it_may_look_at(pattern, rows):
    attention = module("sparse", pattern=pattern, causal=True)
    cache, x = attention.new_cache(batch_size=2, max_length=50), tokens(50)
    torch.testing.assert_close(read(attention, x, (1,) * 50, cache), attention(x))
    assert cache.nbytes == rows * (2 * 6 * 4 * 8 * 2 + 8)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_long_pieces_onto_a_ring_are_computed_in_parts(monkeypatch, mode):
    monkeypatch.setattr(fused_kernel, "PART", 5)
    attention = module("local", radius=3, global_tokens=1, positions="alibi", causal=True)
    x, given = tokens(60), {"key_mask": torch.rand(2, 60) > 0.2, "marked": torch.zeros(2, 60, dtype=torch.bool)}
    given["marked"][1, 5] = True
    cache = attention.new_cache(batch_size=2, max_length=60)
    with mode():
        y = read(attention, x, (9, 21, 1, 29), cache, **given)
    torch.testing.assert_close(y, attention(x, **given))


def test_crop_says_what_rewind_would_have_done():
    attention = module("local", radius=4, causal=True)
    cache, x = attention.new_cache(batch_size=2, max_length=40, rewind=3), tokens(40)
    read(attention, x, (20,), cache)
    with pytest.raises(CacheError, match=r"crop\(12\) of 20 tokens.*rewind=8 would"):
        cache.crop(12)
    enough = attention.new_cache(batch_size=2, max_length=40, rewind=8)
    read(attention, x, (20,), enough)
    enough.crop(12)
    torch.testing.assert_close(read(attention, x, (1, 5), enough), attention(x[:, :18])[:, 12:])


def test_drafts_are_taken_back_again_and_again():
    attention, x = module("local", radius=4, causal=True, positions="rotary"), tokens(40)
    cache = attention.new_cache(batch_size=2, max_length=44, rewind=4)
    right = attention(x)
    read(attention, x, (7,), cache)
    while cache.length < 36:
        start = cache.length
        drafts = torch.cat([x[:, start : start + 2], 100 * tokens(2)], dim=1)
        torch.testing.assert_close(attention(drafts, cache=cache)[:, :2], right[:, start : start + 2])
        cache.crop(start + 1 + start % 2)


def test_marks_that_ask_for_dropped_tokens_are_refused_and_change_nothing():
    attention, x = module("local", radius=2, causal=True), tokens(12)
    marked = torch.zeros(2, 12, dtype=torch.bool)
    marked[0, 1] = True
    cache = attention.new_cache(batch_size=2, max_length=12)
    read(attention, x, (7,), cache, marked=marked)
    for token, says in ((3, "token 3 is marked now and was dropped"), (7, "token 7 .* would look at .*rewind=12")):
        more = marked.clone()
        more[1, token] = True
        with pytest.raises(CacheError, match=says):
            read(attention, x, (2,), cache, marked=more)
        assert cache.length == 7
    torch.testing.assert_close(read(attention, x, (1, 4), cache, marked=marked), attention(x, marked=marked)[:, 7:])
    whole = attention.new_cache(batch_size=2, max_length=12, rewind=12)
    marked[1, 9] = True
    torch.testing.assert_close(read(attention, x, (7, 1, 4), whole, marked=marked), attention(x, marked=marked))


def test_a_ring_of_another_window_is_refused():
    narrow, wide = (module("local", radius=radius, causal=True) for radius in (2, 5))
    with pytest.raises(CacheError, match="looks less far back"):
        wide(tokens(3), cache=narrow.new_cache(batch_size=2, max_length=30))
    narrow(tokens(3), cache=wide.new_cache(batch_size=2, max_length=30))


# What a step costs


class Allocated(TorchDispatchMode):
    """Counts the bytes of all tensors that are made, views of others left out."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.nbytes += tensor.nbytes
        return made


def allocated(attention, length, queries=1, **given):
    """The bytes made by one more step on a cache of `length` tokens."""
    cache = attention.new_cache(batch_size=2, max_length=length + queries, rewind=0)
    x = torch.randn(2, length + queries, 64).to(cache.dtype)
    with torch.no_grad():
        attention(x[:, :length], cache=cache, **{name: fact[:, :length] for name, fact in given.items()})
        with Allocated() as counted:
            attention(x[:, length:], cache=cache)
    return counted.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"),
    [("kv_cached", {}), ("gqa", {"num_kv_heads": 2, "positions": "rotary"}), ("local", {"radius": 40})],
)
def test_a_step_makes_nothing_that_grows_with_the_cache(name, options, dtype):
    attention = attnzoo.build(name, 64, 8, causal=True, **options).to(dtype).eval()
    assert allocated(attention, 30) == allocated(attention, 300) < 12000


@pytest.mark.parametrize("queries", [1, 4])
def test_padding_and_more_queries_copy_no_keys(queries):
    attention = attnzoo.build("gqa", 64, 2, num_kv_heads=1, causal=True).eval()
    key_mask = torch.ones(2, 2000, dtype=torch.bool)
    key_mask[0, :7] = False
    short, long = (allocated(attention, length, queries, key_mask=key_mask) for length in (1000, 2000))
    assert long - short < 1000 * 2 * 32 * 4 / 2  # half of the keys alone


@pytest.mark.parametrize("queries", [1, 4])
def test_a_group_reads_its_keys_once_as_they_are_stored(monkeypatch, queries):
    attention, seen = attnzoo.build("gqa", 64, 8, num_kv_heads=2, causal=True).eval(), []
    inner = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *call, **named: seen.append(call) or inner(*call, **named),
    )
    cache, x = attention.new_cache(batch_size=2, max_length=40), torch.randn(2, 34, 64)
    with torch.no_grad():
        y = read(attention, x, (30, queries), cache)
    q, k, v, *_ = seen[-1]
    assert q.shape == (2, 2, 4 * queries, 8)
    assert k.shape == v.shape == (2, 2, 30 + queries, 8)
    assert {k.data_ptr(), v.data_ptr()} == {stored.data_ptr() for stored in cache._ring.entries.values()}
    torch.testing.assert_close(y, attention(x[:, : 30 + queries]), atol=1e-5, rtol=1e-5)


# Compiled


@pytest.mark.filterwarnings("ignore")  # what the compiler warns of
@pytest.mark.parametrize("rewind", [0, 2])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kv_cached", {"num_kv_heads": 2}),
        ("gqa", {"num_kv_heads": 2, "positions": "rotary"}),
        ("local", {"radius": 4, "global_tokens": 1}),
        ("bigbird", {"block": 2}),
    ],
)
def test_a_compiled_step_is_not_compiled_again_for_each_token(name, options, rewind):
    torch.compiler.reset()
    attention, x = attnzoo.build(name, 24, 6, causal=True, **options).eval(), torch.randn(2, 40, 24)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    cache, outputs = attention.new_cache(batch_size=2, max_length=41, rewind=rewind), []
    with torch.no_grad():
        outputs.append(attention(x[:, :3], cache=cache))
        for step in range(3, 40):
            again = step > 11  # the ring is full, and some length has been seen twice
            with torch.compiler.set_stance("fail_on_recompile" if again else "default"):
                outputs.append(compiled(x[:, step : step + 1], cache=cache))
        torch.testing.assert_close(torch.cat(outputs, dim=1), attention(x))
    torch.compiler.reset()


def test_marked_tokens_that_leave_the_window_are_kept_detached():
    attn = attnzoo.build("local", d_model=16, num_heads=2, radius=2, causal=True).eval()
    cache, pieces = attn.new_cache(1, 100), []
    for token in range(12):
        pieces.append(torch.randn(1, 1, 16, requires_grad=True))
        y = attn(pieces[-1], cache=cache, marked=torch.tensor([[place == 1 for place in range(token + 1)]]))
        y.sum().backward()
    assert not any(tensor.requires_grad for tensor in copy.deepcopy(cache)._ring.entries.values())
    grads = [piece.grad.clone() for piece in pieces]
    attn(torch.randn(1, 1, 16), cache=cache, marked=None).sum().backward()
    torch.testing.assert_close([piece.grad for piece in pieces], grads)  # earlier ones get nothing


@pytest.mark.parametrize("where", ["attend", "out_proj"])
def test_a_call_that_fails_late_changes_nothing(where, monkeypatch):
    attn = attnzoo.build("local", d_model=16, num_heads=2, radius=2, causal=True).eval()
    cache, x = attn.new_cache(1, 100), torch.randn(1, 9, 16)
    with torch.no_grad():
        for token in x[:, :8].split(1, dim=1):
            attn(token, cache=cache)
        with monkeypatch.context() as broken:
            place, name = (attn, "attend") if where == "attend" else (attn.out_proj, "forward")
            broken.setattr(place, name, _fail)
            with pytest.raises(ZeroDivisionError):
                attn(x[:, 8:], cache=cache)
        assert cache.length == 8
        attn(x[:, :0], cache=cache, key_mask=torch.ones(1, 8, dtype=torch.bool))
        torch.testing.assert_close(attn(x[:, 8:], cache=cache), attn(x)[:, 8:])


def _fail(*_):
    raise ZeroDivisionError
