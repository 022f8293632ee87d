"""x-transformers: the same weights give what its Attention gives, with and without its fused path.

Its eager softmax is float32 in every dtype, so that only `flash=True` can be compared to the last digits of float64.
"""

import warnings
from importlib.util import find_spec

import pytest
import torch
from agreement import assert_agree, close, padded, stirred, tokens
from weight_maps import x_transformers as weights

import attnzoo

if find_spec("x_transformers"):  # without it no test here runs, see conftest.py
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)  # as it is imported
        from x_transformers.x_transformers import AlibiPositionalBias, RotaryEmbedding
        from x_transformers.x_transformers import Attention as Theirs

pytestmark = pytest.mark.peers("x_transformers")

D_MODEL, HEADS, BATCH, LENGTH = 24, 6, 3, 9
WIDTH = D_MODEL // HEADS
TOLERANCE = {True: 1e-9, False: 1e-5}
both_paths = pytest.mark.parametrize("flash", [True, False])


def pair(name="gqa", groups=HEADS, flash=True, causal=False, theirs=None, **options):
    """A variant, and their Attention; `theirs` holds options of theirs alone."""
    if name in ("gqa", "fused_qkv", "kv_cached", "local", "sparse"):
        options["num_kv_heads"] = groups
    if name != "kv_cached":
        options["causal"] = causal
    ours = attnzoo.build(name, D_MODEL, HEADS, bias=False, **options).double().eval()
    shared = {"one_kv_head": True} if groups == 1 else {"kv_heads": groups}
    peer = Theirs(D_MODEL, dim_head=WIDTH, heads=HEADS, causal=causal, flash=flash, **shared, **(theirs or {}))
    return ours, stirred(peer)


@both_paths
@pytest.mark.parametrize("right", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "groups"),
    [("vanilla", 6), ("einsum", 6), ("fused_qkv", 6), ("fused_qkv", 2), ("gqa", 6), ("gqa", 3), ("gqa", 2), ("mqa", 1)],
)
def test_attention_with_full_grouped_and_single_key_value_heads(name, groups, causal, right, flash):
    ours, theirs = pair(name, groups, flash, causal)
    key_mask = padded(BATCH, LENGTH, right=right)
    given, twin = ({"key_mask": key_mask}, {"mask": key_mask}) if right else ({}, {})
    assert_agree(
        ours,
        theirs,
        weights,
        lambda x: ours(x, **given),
        lambda x: theirs(x, **twin),
        tokens(BATCH, LENGTH, D_MODEL),
        keep=key_mask,
        tolerance=TOLERANCE[flash],
    )


@both_paths
@pytest.mark.parametrize("shape", [(LENGTH, LENGTH), (HEADS, LENGTH, LENGTH), (BATCH, HEADS, LENGTH, LENGTH)])
def test_attention_masks_in_two_three_and_four_dimensions(shape, flash):
    """True may look there too; three dimensions are heads, queries and keys, which is four with a 1 here."""
    ours, theirs = pair("gqa", 6, flash)
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.4
    allowed[..., 0] = True
    assert_agree(
        ours,
        theirs,
        weights,
        lambda x: ours(x, mask=allowed[None] if allowed.dim() == 3 else allowed),
        lambda x: theirs(x, attn_mask=allowed),
        tokens(BATCH, LENGTH, D_MODEL),
        tolerance=TOLERANCE[flash],
    )


@both_paths
@pytest.mark.parametrize("groups", [6, 2])
def test_cross_attention(groups, flash):
    ours, theirs = pair("gqa", groups, flash)
    key_mask = padded(BATCH, 5, right=2)
    assert_agree(
        ours,
        theirs,
        weights,
        lambda x, context: ours(x, context, key_mask=key_mask),
        lambda x, context: theirs(x, context=context, context_mask=key_mask),
        tokens(BATCH, LENGTH, D_MODEL),
        tokens(BATCH, 5, D_MODEL, seed=3),
        tolerance=TOLERANCE[flash],
    )


@both_paths
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [6, 2])
def test_rotary_positions(groups, causal, flash):
    """The same angles on other pairs of features; theirs are kept in float32, so we write float64 ones in."""
    ours, theirs = pair("gqa", groups, flash, causal, positions="rotary")
    rotary = RotaryEmbedding(WIDTH)
    close(rotary.inv_freq, 10_000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH), 1e-6)
    rotary.inv_freq = 10_000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    turns = rotary.forward_from_seq_len(LENGTH)
    assert_agree(
        ours,
        theirs,
        lambda peer, *read: weights(peer, *read, rotary=True),
        ours,
        lambda x: theirs(x, rotary_pos_emb=turns),
        tokens(BATCH, LENGTH, D_MODEL),
        tolerance=TOLERANCE[flash],
    )


@both_paths
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [6, 2])
def test_alibi_with_six_heads_which_are_no_power_of_two(groups, causal, flash):
    ours, theirs = pair("gqa", groups, flash, causal, positions="alibi")
    alibi = AlibiPositionalBias(HEADS).double()
    slopes = alibi.slopes.flatten()
    order = torch.arange(HEADS).view(HEADS // groups, groups).T.flatten()  # as weight_maps orders the heads
    alibi.slopes[order] = slopes.clone()[:, None, None]
    key_mask = padded(BATCH, LENGTH, right=2)
    assert_agree(
        ours,
        theirs,
        weights,
        lambda x: ours(x, key_mask=key_mask),
        lambda x: theirs(x, mask=key_mask, rel_pos=alibi),
        tokens(BATCH, LENGTH, D_MODEL),
        keep=key_mask,
        tolerance=TOLERANCE[flash],
    )


@pytest.mark.parametrize(("past", "flash"), [(0, True), (2, True), (2, False), (5, True), (5, False)])
@pytest.mark.parametrize(("name", "options"), [("local", {"block": 4}), ("sparse", {"block": 3})])
def test_max_attend_past_is_the_radius_of_a_causal_window(name, options, past, flash):
    options |= {"radius": past} if name == "local" else {"pattern": f"Local({past})"}
    ours, theirs = pair(name, 2, flash, causal=True, theirs={"max_attend_past": past}, **options)
    key_mask = padded(BATCH, LENGTH, right=2)
    assert_agree(
        ours,
        theirs,
        weights,
        lambda x: ours(x, key_mask=key_mask),
        lambda x: theirs(x, mask=key_mask),
        tokens(BATCH, LENGTH, D_MODEL),
        keep=key_mask,
        tolerance=TOLERANCE[flash],
    )


@both_paths
@pytest.mark.parametrize("name", ["gqa", "kv_cached"])
@pytest.mark.parametrize("groups", [6, 2])
def test_decoding_token_by_token_with_their_cache_and_with_ours(groups, name, flash):
    ours, theirs = pair(name, groups, flash, causal=True)
    ours.load_state_dict(weights(theirs))
    x = tokens(BATCH, LENGTH, D_MODEL)
    cache, kept = ours.new_cache(BATCH, LENGTH), None
    for token in x.split(1, dim=1):
        wanted, kept = theirs(token, cache=kept, return_intermediates=True)
        close(ours(token, cache=cache), wanted, TOLERANCE[flash])
    assert cache.length == LENGTH


# Where x-transformers differs; each test shows how, so that a change there is noticed here.


def test_grouped_heads_are_dealt_out_in_turn_there_and_lie_together_here():
    """4 query heads on 2 key-value heads: theirs read 0 1 0 1, ours 0 0 1 1, as in the paper's figure and in Llama."""
    theirs = stirred(Theirs(8, dim_head=2, heads=4, kv_heads=2, flash=True))
    for layer in (theirs.to_q, theirs.to_out):
        layer.weight.data.copy_(torch.eye(8))
    theirs.to_k.weight.data.zero_()
    theirs.to_v.weight.data.zero_()
    theirs.to_v.weight.data[2:] = 1  # values of key-value head 1 alone
    seen = theirs(torch.ones(1, 1, 8, dtype=torch.float64)).view(4, 2).ne(0).all(1)
    assert seen.tolist() == [False, True, False, True]
    ours = attnzoo.build("gqa", 8, 4, num_kv_heads=2, bias=False).double()
    ours.load_state_dict(
        {
            f"{name}_proj.weight": layer.weight
            for name, layer in zip(("q", "k", "v", "out"), layers(theirs), strict=True)
        }
    )
    seen = ours(torch.ones(1, 1, 8, dtype=torch.float64)).view(4, 2).ne(0).all(1)
    assert seen.tolist() == [False, False, True, True]


def layers(theirs):
    return theirs.to_q, theirs.to_k, theirs.to_v, theirs.to_out


@pytest.mark.parametrize(("flash", "dtype"), [(True, torch.float64), (False, torch.float32), (False, torch.float64)])
def test_a_causal_row_whose_mask_shows_only_what_is_later_is_zero_but_on_their_eager_path_a_mean_or_nan(flash, dtype):
    """3 tokens, the mask shows the last one alone: rows 0 and 1 see nothing, and eager lets them see all three.

    In float64 it gives NaN: the lowest float64 becomes minus infinity in its float32 softmax.
    """
    ours, theirs = pair("vanilla", flash=flash, causal=True)
    ours.load_state_dict(weights(theirs))
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    x, allowed = tokens(1, 3, D_MODEL).to(dtype), torch.tensor([[False, False, True]]).expand(3, 3)
    rows = theirs(x, attn_mask=allowed)[0, :2].detach()
    mean = theirs.to_out(theirs.to_v(x).mean(1)).expand(2, -1).detach()
    wanted = torch.zeros_like(mean) if flash else mean if dtype == torch.float32 else mean * torch.nan
    torch.testing.assert_close(rows, wanted, equal_nan=True)
    assert mean.abs().max() > 0.1
    assert ours(x, mask=allowed)[0, :2].eq(0).all()


@both_paths
def test_nan_in_the_padding_reaches_visible_rows_there_and_not_here(flash):
    ours, theirs = pair("vanilla", flash=flash)
    ours.load_state_dict(weights(theirs))
    x, key_mask = tokens(BATCH, LENGTH, D_MODEL), padded(BATCH, LENGTH, right=2)
    spoilt = x.masked_fill(~key_mask[:, :, None], torch.nan)
    assert theirs(spoilt, mask=key_mask)[1:][key_mask[1:]].isnan().all()
    close(ours(spoilt, key_mask=key_mask)[key_mask], ours(x, key_mask=key_mask)[key_mask])


def test_their_eager_softmax_is_float32_in_float64_modules():
    errors = {}
    for flash in (True, False):
        ours, theirs = pair("vanilla", flash=flash)
        ours.load_state_dict(weights(theirs))
        x = tokens(BATCH, LENGTH, D_MODEL)
        errors[flash] = (ours(x) - theirs(x)).abs().max().item()
    assert errors[True] < 1e-12 < 1e-9 < errors[False]
