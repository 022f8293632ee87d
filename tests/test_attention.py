"""The module's own doors: tokens, weights, visible, caches, projections and positions; the contract covers the rest."""

import pytest
import torch

import attnzoo
from attnzoo import CacheError, InputError, MaskError, NotSupportedError, OptionError
from attnzoo.positions import count_visible, rotate, turns


def module(name="gqa", **options):
    options = {"num_kv_heads": 2, **options} if name == "gqa" else options
    return attnzoo.build(name, d_model=24, num_heads=6, **options).double().eval()


def tokens(length=7, batch=2):
    return torch.randn(batch, length, 24, dtype=torch.float64)


@pytest.mark.parametrize(
    "bad", [torch.zeros(7, 24), torch.zeros(2, 7, 23), torch.zeros(2, 7), [[1.0]], torch.zeros(2, 1, 7, 24)]
)
def test_tokens_of_another_shape_are_named(bad):
    with pytest.raises(InputError, match=r"x must be \[batch, length, d_model\] = \[batch, length, 24\], not"):
        module()(bad)


def test_context_and_values_must_fit_each_other():
    attention, x = module(), tokens()
    with pytest.raises(InputError, match=r"context must be .*\[2, length, 24\], not \[3, 7, 24\]"):
        attention(x, tokens(batch=3))
    with pytest.raises(InputError, match=r"values must be .*\[2, 5, 24\], not \[2, 4, 24\]"):
        attention(x, tokens(5), values=tokens(4))


def test_values_may_come_from_a_third_place():
    for name in ("gqa", "fused_qkv"):
        attention = module(name)
        x, context, other = tokens(), tokens(5), tokens(5)
        torch.testing.assert_close(attention(x, context, values=context), attention(x, context))
        moved = attention(x, context, values=other) - attention(x, context)
        assert moved.abs().max() > 1e-3
        torch.testing.assert_close(attention(x, x), attention(x))


@pytest.mark.parametrize("options", [{"causal": True}, {"positions": "rotary"}, {"positions": "alibi"}])
def test_context_is_refused_where_positions_matter(options):
    with pytest.raises(NotSupportedError, match="knows positions"):
        module(**options)(tokens(), tokens(5))


def test_weights_of_some_heads_and_queries_are_those_of_all():
    for name, options in (
        ("gqa", {"positions": "rotary"}),
        ("bigbird", {"block": 2}),
        ("vanilla", {"positions": "alibi"}),
    ):
        attention, x, key_mask = module(name, **options), tokens(11), torch.rand(2, 11) > 0.3
        mask = torch.rand(2, 6, 11, 11) > 0.2
        every = attention.weights(x, key_mask=key_mask, mask=mask)
        assert every.shape == (2, 6, 11, 11)
        some = attention.weights(x, key_mask=key_mask, mask=mask, heads=[4, 0], queries=[10, -2, 3])
        torch.testing.assert_close(some, every[:, [4, 0]][:, :, [10, 9, 3]])
        v = attention.projection.split(attention.v_proj(x.masked_fill(~key_mask[..., None], 0)))
        v = v.repeat_interleave(6 // attention.num_kv_heads, dim=1)
        joined = attention.out_proj((every @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(joined, attention(x, key_mask=key_mask, mask=mask))
    with pytest.raises(InputError, match="heads must be whole numbers, at least one and all below 6"):
        attention.weights(x, heads=[6])
    for heads in ([], 5, ["1"], [1.0], [True], torch.ones(6, dtype=torch.bool)):
        with pytest.raises(InputError, match="heads must be whole numbers"):
            attention.weights(x, heads=heads)
    assert attention.weights(x, heads=torch.tensor([1])).shape[1] == 1


def test_redraw_is_not_known_before_it_is_drawn():
    attention = module("random_sparse", keys=3, redraw=True)
    assert torch.equal(attention.visible(9), attention.visible(9))
    attention.train()
    for ask in (lambda: attention.visible(9), lambda: attention.weights(tokens())):
        with pytest.raises(NotSupportedError, match="eval"):
            ask()
    x = tokens(30)
    assert not torch.equal(attention(x), attention(x))


def test_redraw_is_the_same_again_when_checkpointing_computes_it_again():
    attention = module("random_sparse", keys=3, redraw=True, dropout=0.2).train()
    x = tokens(30).requires_grad_()
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        y = torch.utils.checkpoint.checkpoint(attention, x, use_reentrant=False) if checkpointed else attention(x)
        grads.append(torch.autograd.grad(y.square().sum(), [x, *attention.parameters()]))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_train_only_looks_at_everything_in_eval():
    attention = module("random_sparse", keys=2, train_only=True)
    assert attention.visible(9).all()
    assert not attention.train().visible(9).all()
    assert attention.density(9) < 1


def test_an_adapter_put_in_place_of_a_layer_is_used():
    for name, layer in (("gqa", "k_proj"), ("fused_qkv", "qkv_proj")):
        attention, x = module(name), tokens()
        before = attention(x)
        inner = getattr(attention, layer)
        setattr(
            attention,
            layer,
            torch.nn.Sequential(inner, torch.nn.Linear(inner.out_features, inner.out_features).double()),
        )
        assert (attention(x) - before).abs().max() > 1e-3
        torch.testing.assert_close(attention(x, x.clone()), attention(x))


def test_positions_count_visible_tokens_of_a_document():
    key_mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [3, 5, 3, 5, 5, 3]])
    device = torch.device("cpu")
    assert count_visible(3, None, None, device).tolist() == [[0, 1, 2]]
    assert count_visible(6, key_mask, None, device).tolist() == [[0, 0, 1, 2, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert count_visible(6, None, documents, device).tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 1, 1, 2, 2]]
    assert count_visible(6, key_mask, documents, device).tolist() == [[0, 0, 1, 0, 0, 1], [0, 0, 1, 1, 2, 2]]


def test_rotary_turns_each_pair_by_position_times_frequency():
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 5000]])
    turned = rotate(x, *turns(positions, 4, x.dtype))
    for row, position in enumerate((0, 1, 5000)):
        for pair in (0, 1):
            angle = torch.tensor(position / 10_000 ** (pair / 2), dtype=torch.float64)
            first, second = x[0, 0, row, pair], x[0, 0, row, pair + 2]
            torch.testing.assert_close(turned[0, 0, row, pair], first * angle.cos() - second * angle.sin())
            torch.testing.assert_close(turned[0, 0, row, pair + 2], second * angle.cos() + first * angle.sin())
    half = rotate(x.bfloat16(), *turns(positions, 4, torch.bfloat16))
    right = rotate(x.bfloat16().double(), *turns(positions, 4, torch.float64))
    torch.testing.assert_close(half.double(), right, atol=2e-2, rtol=1e-2)


def test_rotary_needs_pairs():
    with pytest.raises(OptionError, match="even head_dim, not 3"):
        attnzoo.build("vanilla", d_model=18, num_heads=6, positions="rotary")


def test_a_seed_beyond_its_range_and_a_class_called_directly_are_checked_alike():
    with pytest.raises(OptionError, match="dropout"):
        attnzoo.find("vanilla")(24, 6, dropout=2)
    with pytest.raises(OptionError, match="positions must be one of"):
        attnzoo.find("vanilla")(24, 6, positions="sideways")


@pytest.mark.parametrize("options", [{"num_kv_heads": 2}, {"name": "sparse", "pattern": "Full()", "block": 4}])
def test_context_may_be_shorter_than_the_queries(options):
    attention, x, context = module(**options), tokens(13), tokens(11)
    mask = torch.rand(2, 6, 13, 11) > 0.3
    weights = attention.weights(x, context, mask=mask)
    assert weights.shape == (2, 6, 13, 11)
    assert not weights[~mask].any()
    v = attention.projection.split(attention.v_proj(context)).repeat_interleave(6 // attention.num_kv_heads, dim=1)
    wanted = attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, context, mask=mask), wanted)
    with pytest.raises(MaskError, match="13 queries have only 11"):
        attention(x, context, documents=torch.zeros(2, 11, dtype=torch.long))


def test_on_the_meta_device_shapes_come_out():
    for name in ("vanilla", "gqa"):
        assert module(name).to("meta")(tokens().to("meta")).shape == (2, 7, 24)


def test_what_is_no_cache_and_no_length_is_named():
    with pytest.raises(CacheError, match="new_cache"):
        module(causal=True)(tokens(), cache={})
    with pytest.raises(OptionError, match="query_length"):
        module().visible(-1)
    for ask in (module().density, module().draw):
        with pytest.raises(OptionError, match="length"):
            ask(-1)
    with pytest.raises(InputError, match="head must be"):
        module().draw(8, head=99)
    with pytest.raises(InputError, match="embed token ids first"):
        module()(torch.zeros(2, 7, 24, dtype=torch.long))


@pytest.mark.parametrize("name", ["gqa", "fused_qkv"])
def test_padding_is_not_felt_where_only_values_come_from_elsewhere(name):
    attention, x, values = module(name), tokens(), tokens()
    key_mask = (torch.arange(7) < 5).expand(2, -1)
    dirty = x.masked_fill(~key_mask[..., None], torch.nan).requires_grad_()
    for context in (None, dirty):
        y = attention(dirty, context, values=values, key_mask=key_mask)
        grads = torch.autograd.grad(y[:, :5].square().sum(), [dirty, *attention.parameters()])
        assert all(grad.isfinite().all() for grad in grads)
        assert not grads[0][:, 5:].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
def test_global_projections_that_are_copies_of_the_others_change_nothing(positions, causal):
    options = {"radius": 1, "global_tokens": 1, "block": 3, "num_kv_heads": 2, "positions": positions, "causal": causal}
    one, two = module("local", **options), module("local", **options, global_projections=True)
    state = one.state_dict()
    two.load_state_dict(state | {n.replace("_proj", "_global_proj"): state[n] for n in state if "out" not in n})
    x, marked = tokens(11), torch.rand(2, 11) > 0.7
    given = {"marked": marked, "key_mask": torch.rand(2, 11) > 0.2, "mask": torch.rand(2, 6, 11, 11) > 0.2}
    torch.testing.assert_close(two(x, **given), one(x, **given))
    chosen = given | {"heads": [4, 0], "queries": [0, -1, 5]}
    torch.testing.assert_close(two.weights(x, **chosen), one.weights(x, **chosen))
    assert two(x[:0]).shape == (0, 11, 24)


def test_the_queries_of_global_tokens_alone_use_the_global_projections():
    attention, x = module("local", radius=2, block=3, global_projections=True), tokens(11)
    marked = torch.zeros(2, 11, dtype=torch.bool)
    marked[0, [0, 7]] = True
    before, cached = attention(x, marked=marked), attention.projection.stored
    assert cached == {"keys": (6, 8), "values": (6, 8)}  # of head_dim 4
    for name in ("q", "k", "v"):
        torch.nn.init.normal_(getattr(attention, f"{name}_global_proj").weight)
        after = attention(x, marked=marked)
        assert torch.equal((after != before).any(-1), marked), name
    y = attention(x)  # where none is global they still get a gradient, of 0
    assert not any(grad.any() for grad in torch.autograd.grad(y.sum(), [*attention.parameters()][8:]))


def test_what_would_be_ignored_is_refused():
    with pytest.raises(OptionError, match="hides all later tokens but marked ones"):
        attnzoo.build("sparse", 8, 2, pattern="Causal() | Marked()", causal=True)
    q, marked = torch.randn(1, 2, 5, 4), torch.ones(1, 5, dtype=torch.bool)
    with pytest.raises(NotSupportedError, match="join Marked"):
        attnzoo.attend(q, q, q, attnzoo.Local(1), marked=marked)
