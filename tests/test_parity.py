"""The same weights give what torch's own attention gives: outputs, and gradients of inputs and parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnzoo

D_MODEL, HEADS, BATCH, LENGTH = 24, 6, 2, 7
FULL = {"vanilla": {}, "einsum": {}, "fused_qkv": {}, "gqa": {"num_kv_heads": HEADS}}


def pair(name, causal=False):
    """A variant, and torch's module with the same weights; biases too, which torch starts at zero."""
    torch.manual_seed(0)
    ours = attnzoo.build(name, D_MODEL, HEADS, causal=causal, **FULL[name]).double()
    theirs = nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True, dtype=torch.float64)
    fused = attnzoo.build("fused_qkv", D_MODEL, HEADS).double()
    fused.load_state_dict(ours.state_dict())
    theirs.load_state_dict(
        {
            "in_proj_weight": fused.qkv_proj.weight.detach(),
            "in_proj_bias": fused.qkv_proj.bias.detach(),
            "out_proj.weight": ours.out_proj.weight.detach(),
            "out_proj.bias": ours.out_proj.bias.detach(),
        }
    )
    return ours, theirs


def gradients(module, x, y):
    """Of the input and of all parameters, with those of queries, keys and values joined as torch has them."""
    y.square().sum().backward()
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    if "q_proj.weight" in named:
        for kind in ("weight", "bias"):
            named[f"qkv_proj.{kind}"] = torch.cat([named.pop(f"{name}_proj.{kind}") for name in "qkv"])
    return [x.grad, *(named[key] for key in sorted(named))]


def theirs_gradients(module, x, y):
    y.square().sum().backward()
    inner = module.in_proj_bias.grad, module.in_proj_weight.grad
    return [x.grad, module.out_proj.bias.grad, module.out_proj.weight.grad, *inner]


def tokens():
    return torch.randn(BATCH, LENGTH, D_MODEL, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("mask", ["none", "key_mask", "mask", "causal", "all"])
@pytest.mark.parametrize("name", FULL)
def test_multihead_attention_of_torch(name, mask):
    """There True hides; here True may look, so every mask is turned round."""
    ours, theirs = pair(name, causal=mask in ("causal", "all"))
    x, twin = tokens(), tokens()
    twin.data.copy_(x.data)
    key_mask = torch.rand(BATCH, LENGTH) > 0.3
    key_mask[:, 0] = True  # torch gives NaN where nothing may be looked at
    allowed = (torch.rand(LENGTH, LENGTH) > 0.3) | torch.eye(LENGTH, dtype=torch.bool)
    allowed[:, 0] = True
    given, hide = {}, torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    if mask in ("key_mask", "all"):
        given["key_mask"] = key_mask
    if mask in ("mask", "all"):
        given["mask"] = allowed
        hide = ~allowed
    if mask in ("causal", "all"):
        hide = hide | torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    y = ours(x, **given)
    padding = ~key_mask if "key_mask" in given else None
    wanted, _ = theirs(twin, twin, twin, key_padding_mask=padding, attn_mask=hide)
    if padding is not None:  # what queries of padding give is nobody's business, and there torch does not hide them
        y, wanted = y[key_mask], wanted[key_mask]
    torch.testing.assert_close(y, wanted)
    ours_grads, theirs_grads = gradients(ours, x, y), theirs_gradients(theirs, twin, wanted)
    torch.testing.assert_close(ours_grads, theirs_grads)


@pytest.mark.parametrize("name", FULL)
def test_cross_attention_of_torch(name):
    ours, theirs = pair(name)
    x, context, values = (torch.randn(BATCH, n, D_MODEL, dtype=torch.float64) for n in (LENGTH, 5, 5))
    torch.testing.assert_close(ours(x, context, values=values), theirs(x, context, values)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["vanilla", "einsum", "fused_qkv", "gqa", "mqa"])
def test_scaled_dot_product_attention_of_torch(name, causal):
    options = {"num_kv_heads": 2} if name in ("fused_qkv", "gqa") else {}
    ours = attnzoo.build(name, D_MODEL, HEADS, causal=causal, **options).double()
    x = tokens()
    q, entries = ours.projection.self_entries(ours, x)
    k, v = (entries[kind].repeat_interleave(HEADS // ours.num_kv_heads, dim=1) for kind in ("keys", "values"))
    wanted = ours.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours(x), wanted)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_grouped_heads_are_full_heads_with_repeated_weights(groups):
    grouped = attnzoo.build("gqa", D_MODEL, HEADS, num_kv_heads=groups, causal=True).double()
    full = attnzoo.build("vanilla", D_MODEL, HEADS, causal=True).double()
    state = grouped.state_dict()
    for name in ("k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            heads = state[f"{name}.{kind}"].unflatten(0, (groups, D_MODEL // HEADS))
            state[f"{name}.{kind}"] = heads.repeat_interleave(HEADS // groups, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    x = tokens()
    torch.testing.assert_close(grouped(x), full(x))


@pytest.mark.parametrize("groups", [2, HEADS])
@pytest.mark.parametrize("assign", [False, True])
def test_separate_and_fused_weights_load_into_each_other_bit_for_bit(groups, assign):
    separate = attnzoo.build("gqa", D_MODEL, HEADS, num_kv_heads=groups)
    fused = attnzoo.build("fused_qkv", D_MODEL, HEADS, num_kv_heads=groups)
    before = {name: tensor.clone() for name, tensor in separate.state_dict().items()}
    given = separate.state_dict()
    fused.load_state_dict(given, strict=True, assign=assign)
    assert given.keys() == before.keys()  # the caller's dict is not rewritten
    x = torch.randn(BATCH, LENGTH, D_MODEL)
    torch.testing.assert_close(fused(x), separate(x))
    back = attnzoo.build("gqa", D_MODEL, HEADS, num_kv_heads=groups)
    back.load_state_dict(fused.state_dict(), strict=True, assign=assign)
    torch.testing.assert_close(back.state_dict(), before, rtol=0, atol=0)
    storages = {parameter.untyped_storage().data_ptr() for parameter in back.parameters()}
    assert len(storages) == len(list(back.parameters()))


def test_weights_of_other_sizes_are_named_and_not_cut_to_fit():
    fused = attnzoo.build("fused_qkv", D_MODEL, HEADS, num_kv_heads=2)
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
        attnzoo.build("vanilla", D_MODEL, HEADS).load_state_dict(fused.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
        fused.load_state_dict(attnzoo.build("vanilla", D_MODEL, HEADS).state_dict())


def test_weights_load_at_any_depth_of_a_model():
    separate, fused = (
        nn.Sequential(nn.Sequential(attnzoo.build(name, D_MODEL, HEADS))) for name in ("vanilla", "fused_qkv")
    )
    fused.load_state_dict(separate.state_dict())
    x = torch.randn(BATCH, LENGTH, D_MODEL)
    torch.testing.assert_close(fused(x), separate(x))


def test_separate_and_fused_weights_start_alike():
    separate = attnzoo.build("gqa", 256, 8, num_kv_heads=2).state_dict()
    fused = attnzoo.build("fused_qkv", 256, 8, num_kv_heads=2).state_dict()
    for kind in ("weight", "bias"):
        joined = torch.cat([separate[f"{name}_proj.{kind}"] for name in "qkv"])
        assert joined.std().item() == pytest.approx(fused[f"qkv_proj.{kind}"].std().item(), rel=0.1)
        assert joined.abs().max() <= 256**-0.5
        assert fused[f"qkv_proj.{kind}"].abs().max() <= 256**-0.5
