"""torch: the same weights give what nn.MultiheadAttention and scaled_dot_product_attention give.

In nn.MultiheadAttention True hides and float masks are added; here True may look, so bool masks are turned round.
"""

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agree, close, padded, stirred, tokens
from torch import nn
from weight_maps import multihead

import attnzoo

pytestmark = pytest.mark.peers("torch")

D_MODEL, HEADS, BATCH, LENGTH = 24, 6, 3, 7
FULL = {"vanilla": {}, "einsum": {}, "fused_qkv": {}, "gqa": {"num_kv_heads": HEADS}}
LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def pair(name, causal=False):
    ours = attnzoo.build(name, D_MODEL, HEADS, causal=causal, **FULL[name]).double().eval()
    return ours, stirred(nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True))


def random_mask(*shape, seed=2):
    """True = may look, and every query may look at the first key at least."""
    allowed = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    allowed[..., 0] = True
    return allowed


def added(allowed):
    """A float mask for torch: 0 where a query may look, minus infinity where not."""
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)


MASKED = {
    "nothing": lambda allowed: ({}, {}),
    "bool, 2-D": lambda allowed: ({"mask": allowed}, {"attn_mask": ~allowed}),
    "float, 2-D": lambda allowed: ({"mask": allowed}, {"attn_mask": added(allowed)}),
    "bool, 3-D": lambda allowed: ({"mask": allowed}, {"attn_mask": ~allowed.flatten(0, 1)}),
    "float, 3-D": lambda allowed: ({"mask": allowed}, {"attn_mask": added(allowed.flatten(0, 1))}),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("right", [0, 2])
@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("name", FULL)
def test_multihead_attention_under_every_kind_of_mask(name, mask, right, need_weights):
    ours, theirs = pair(name)
    shape = (BATCH, HEADS, LENGTH, LENGTH) if "3-D" in mask else (LENGTH, LENGTH)
    given, twin = MASKED[mask](random_mask(*shape))
    key_mask = padded(BATCH, LENGTH, right=right)
    if right:
        given["key_mask"] = key_mask
        twin["key_padding_mask"] = added(key_mask) if "float" in mask else ~key_mask  # torch wants both of one dtype
    assert_agree(
        ours,
        theirs,
        multihead,
        lambda x: ours(x, **given),
        lambda x: theirs(x, x, x, need_weights=need_weights, **twin)[0],
        tokens(BATCH, LENGTH, D_MODEL),
        keep=key_mask,
    )


@pytest.mark.parametrize("hint", [False, True])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("right", [0, 3])
@pytest.mark.parametrize("name", FULL)
def test_causal_multihead_attention(name, right, need_weights, hint):
    """Causality there is a mask, with or without the hint `is_causal` that the mask is that one."""
    ours, theirs = pair(name, causal=True)
    key_mask = padded(BATCH, LENGTH, right=right)
    assert_agree(
        ours,
        theirs,
        multihead,
        lambda x: ours(x, key_mask=key_mask if right else None),
        lambda x: theirs(
            x, x, x, attn_mask=LATER, is_causal=hint, need_weights=need_weights,
            key_padding_mask=~key_mask if right else None,
        )[0],
        tokens(BATCH, LENGTH, D_MODEL),
        keep=key_mask,
    )  # fmt: skip


@pytest.mark.parametrize("right", [0, 2])
@pytest.mark.parametrize("name", FULL)
def test_cross_attention_with_values_from_a_third_place(name, right):
    ours, theirs = pair(name)
    key_mask, allowed = padded(BATCH, 5, right=right), random_mask(LENGTH, 5)
    assert_agree(
        ours,
        theirs,
        multihead,
        lambda x, context, values: ours(x, context, values=values, key_mask=key_mask, mask=allowed),
        lambda x, context, values: theirs(x, context, values, key_padding_mask=~key_mask, attn_mask=~allowed)[0],
        tokens(BATCH, LENGTH, D_MODEL),
        tokens(BATCH, 5, D_MODEL, seed=3),
        tokens(BATCH, 5, D_MODEL, seed=4),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", FULL)
def test_the_weights_are_theirs_head_by_head_and_on_average(name, causal):
    ours, theirs = pair(name, causal)
    ours.load_state_dict(multihead(theirs))
    x, key_mask = tokens(BATCH, LENGTH, D_MODEL), padded(BATCH, LENGTH, right=2)
    given = {"key_padding_mask": ~key_mask, "attn_mask": LATER if causal else torch.zeros_like(LATER)}
    weights = ours.weights(x, key_mask=key_mask).transpose(1, 2)[key_mask]
    close(weights, theirs(x, x, x, average_attn_weights=False, **given)[1].transpose(1, 2)[key_mask])
    close(weights.mean(1), theirs(x, x, x, **given)[1][key_mask])


@pytest.mark.parametrize("name", FULL)
def test_the_fast_path_without_gradients(name):
    ours, theirs = pair(name)
    ours.load_state_dict(multihead(theirs))
    x, key_mask = tokens(BATCH, LENGTH, D_MODEL), padded(BATCH, LENGTH, right=2)
    with torch.no_grad():
        wanted = theirs(x, x, x, key_padding_mask=~key_mask, need_weights=False)[0]
        close(ours(x, key_mask=key_mask)[key_mask], wanted[key_mask])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["fused_qkv", "gqa"])
def test_grouped_heads_of_scaled_dot_product_attention(name, causal):
    ours = stirred(attnzoo.build(name, D_MODEL, HEADS, num_kv_heads=2, causal=causal))
    x = tokens(BATCH, LENGTH, D_MODEL)
    q, entries = ours.projection.self_entries(ours, x)
    heads = F.scaled_dot_product_attention(q, entries["keys"], entries["values"], is_causal=causal, enable_gqa=True)
    close(ours(x), ours.out_proj(heads.transpose(1, 2).flatten(2)))


# Where torch differs; each test shows how, so that a change there is noticed here.


@pytest.mark.parametrize("name", FULL)
def test_a_row_with_nothing_to_see_has_three_answers_in_torch_and_one_here(name):
    """NaN with weights asked, 0 without, NaN again on the path without gradients; here 0 before the output layer."""
    ours, theirs = pair(name)
    ours.load_state_dict(multihead(theirs))
    x, nothing = tokens(1, LENGTH, D_MODEL), torch.zeros(1, LENGTH, dtype=torch.bool)
    zero = theirs.out_proj.bias.detach().expand(1, LENGTH, -1)
    assert theirs(x, x, x, key_padding_mask=~nothing)[0].isnan().all()
    close(theirs(x, x, x, key_padding_mask=~nothing, need_weights=False)[0].detach(), zero)
    with torch.no_grad():
        assert theirs(x, x, x, key_padding_mask=~nothing, need_weights=False)[0].isnan().all()
        close(ours(x, key_mask=nothing), zero)
    close(ours(x, key_mask=nothing).detach(), zero)


@pytest.mark.parametrize("name", FULL)
def test_nan_in_the_padding_reaches_visible_rows_in_torch_and_not_here(name):
    ours, theirs = pair(name)
    ours.load_state_dict(multihead(theirs))
    x, key_mask = tokens(BATCH, LENGTH, D_MODEL), padded(BATCH, LENGTH, right=2)
    spoilt = x.masked_fill(~key_mask[:, :, None], torch.nan)
    for need_weights in (True, False):
        theirs_spoilt = theirs(spoilt, spoilt, spoilt, key_padding_mask=~key_mask, need_weights=need_weights)[0]
        assert theirs_spoilt[1:].isnan().all()
    close(ours(spoilt, key_mask=key_mask)[key_mask], ours(x, key_mask=key_mask)[key_mask])


def test_scaled_dot_product_attention_aligns_is_causal_to_the_start_and_we_align_to_the_end():
    """2 queries, 5 keys: there the last query sees keys 0 and 1, here all five, as decoding needs."""
    q, k, v = tokens(1, 1, 2, 4), tokens(1, 1, 5, 4, seed=2), torch.eye(5, dtype=torch.float64)[None, None]
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]
    assert (theirs > 0).tolist() == [[True, False, False, False, False], [True, True, False, False, False]]
    ours = attnzoo.attend(q, k, v, attnzoo.Causal())
    assert (ours[0, 0] > 0).tolist() == [[True, True, True, True, False], [True, True, True, True, True]]
    lower_right = torch.ones(2, 5, dtype=torch.bool).tril(3)
    close(ours, F.scaled_dot_product_attention(q, k, v, attn_mask=lower_right))


def test_is_causal_of_multihead_attention_overrules_its_mask_only_while_no_weights_are_asked():
    """The hint is trusted: under a mask that hides nothing, `need_weights` decides whether a query sees later keys."""
    _, theirs = pair("vanilla")
    x, nothing = tokens(BATCH, LENGTH, D_MODEL), torch.zeros_like(LATER)
    full = theirs(x, x, x)[0]
    causal = theirs(x, x, x, attn_mask=LATER)[0]
    close(theirs(x, x, x, attn_mask=nothing, is_causal=True, need_weights=True)[0], full)
    close(theirs(x, x, x, attn_mask=nothing, is_causal=True, need_weights=False)[0], causal)
    assert (full - causal).abs().max() > 0.1


def test_masks_of_two_dtypes_are_deprecated_in_torch_and_float_masks_refused_here():
    ours, theirs = pair("vanilla")
    x, key_mask = tokens(BATCH, LENGTH, D_MODEL), padded(BATCH, LENGTH, right=2)
    with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask is deprecated"):
        theirs(x, x, x, key_padding_mask=~key_mask, attn_mask=added(~LATER))
    with pytest.raises(attnzoo.MaskError, match=r"not torch\.float64"):
        ours(x, mask=added(~LATER))
