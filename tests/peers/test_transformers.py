"""Hugging Face transformers: the same weights give what its attention modules give, and whole models with ours inside.

Models are built from configs with random weights. Masks are made by the library's own functions, from the same [b, k]
masks that ours take as `key_mask`: True, or 1, is a real token. Outputs are compared at real tokens.
"""

import copy
from importlib.util import find_spec

import pytest
import torch
from agreement import assert_agree, close, padded, separated, stirred, tokens
from torch import nn
from weight_maps import bert, gpt2, gradient, llama, longformer, longformer_tied

import attnzoo

if find_spec("transformers"):  # without it no test here runs, see conftest.py
    import numpy as np
    from transformers import (
        BertConfig,
        BertModel,
        BigBirdConfig,
        BigBirdModel,
        DynamicCache,
        GPT2Config,
        LlamaConfig,
        LlamaForCausalLM,
        LongformerConfig,
        MistralConfig,
        MistralForCausalLM,
    )
    from transformers.masking_utils import (
        create_bidirectional_mask,
        create_causal_mask,
        create_sliding_window_causal_mask,
        sliding_window_bidirectional_mask_function,
        sliding_window_causal_mask_function,
    )
    from transformers.models.bert.modeling_bert import BertAttention
    from transformers.models.big_bird.modeling_big_bird import BigBirdAttention
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
    from transformers.models.longformer.modeling_longformer import LongformerAttention
    from transformers.models.mistral.modeling_mistral import MistralAttention

pytestmark = pytest.mark.peers("transformers")

D_MODEL, HEADS, BATCH, LENGTH = 24, 6, 3, 10
SIZES = {"hidden_size": D_MODEL, "num_attention_heads": HEADS, "intermediate_size": 32, "vocab_size": 37}
ROOM = {"num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FLOAT32 = 1e-5  # where theirs has a softmax, a norm or angles in float32, whatever the module's dtype
DTYPE = {
    "sdpa": torch.float64,
    "eager": torch.float32,
}  # of Llama and its family, whose eager softmax is float32 always
TOLERANCE = {"sdpa": 1e-9, "eager": FLOAT32}
FULL = {"vanilla": {}, "einsum": {}, "fused_qkv": {}, "gqa": {"num_kv_heads": HEADS}}
both_backends = pytest.mark.parametrize("backend", ["eager", "sdpa"])
every_padding = pytest.mark.parametrize("padding", [{}, {"right": 3}, {"left": 3}], ids=["none", "right", "left"])


def given(padding):
    """A key mask as ours and as theirs take it; None where there is no padding."""
    return padded(BATCH, LENGTH, **padding) if padding else None


def kept(key_mask):
    return padded(BATCH, LENGTH) if key_mask is None else key_mask


# Bert


def bert_pair(name, backend, cross=False):
    config = BertConfig(**SIZES, **ROOM, attn_implementation=backend)
    ours = attnzoo.build(name, D_MODEL, HEADS, **FULL[name]).double().eval()
    return ours, stirred(BertAttention(config, is_cross_attention=cross)), config


@every_padding
@both_backends
@pytest.mark.parametrize("name", FULL)
def test_bert_attention(name, backend, padding):
    ours, theirs, config = bert_pair(name, backend)
    key_mask = given(padding)

    def their_call(x):
        mask = create_bidirectional_mask(config=config, inputs_embeds=x, attention_mask=key_mask)
        return theirs.output.dense(theirs.self(x, attention_mask=mask)[0])

    x = tokens(BATCH, LENGTH, D_MODEL)
    assert_agree(ours, theirs, bert, lambda x: ours(x, key_mask=key_mask), their_call, x, keep=kept(key_mask))


@both_backends
@pytest.mark.parametrize("name", FULL)
def test_bert_cross_attention(name, backend):
    ours, theirs, config = bert_pair(name, backend, cross=True)
    key_mask = padded(BATCH, 7, right=2)

    def their_call(x, context):
        mask = create_bidirectional_mask(
            config=config, inputs_embeds=x, attention_mask=key_mask, encoder_hidden_states=context
        )
        heads, _ = theirs.self(x, encoder_hidden_states=context, attention_mask=mask)
        return theirs.output.dense(heads)

    assert_agree(
        ours,
        theirs,
        bert,
        lambda x, context: ours(x, context, key_mask=key_mask),
        their_call,
        tokens(BATCH, LENGTH, D_MODEL),
        tokens(BATCH, 7, D_MODEL, seed=3),
    )


@pytest.mark.parametrize("name", FULL)
def test_the_weights_are_those_of_bert(name):
    ours, theirs, config = bert_pair(name, "eager")
    ours.load_state_dict(bert(theirs))
    x, key_mask = tokens(BATCH, LENGTH, D_MODEL), padded(BATCH, LENGTH, right=3)
    mask = create_bidirectional_mask(config=config, inputs_embeds=x, attention_mask=key_mask)
    wanted = theirs.self(x, attention_mask=mask)[1]
    close(ours.weights(x, key_mask=key_mask).transpose(1, 2)[key_mask], wanted.transpose(1, 2)[key_mask])


class InBert(nn.Module):
    """Ours where BertSelfAttention stood; the output layer is in it, so that BertSelfOutput.dense becomes identity."""

    def __init__(self, attn, key_mask):
        super().__init__()
        self.attn, self.key_mask = attn, key_mask

    def forward(self, hidden_states, **_):
        return self.attn(hidden_states, key_mask=self.key_mask), None


@every_padding
@both_backends
@pytest.mark.parametrize("name", FULL)
def test_a_bert_with_our_attention_inside(name, backend, padding):
    theirs = stirred(BertModel(BertConfig(**SIZES, **ROOM, attn_implementation=backend)))
    mixed, key_mask, ids = copy.deepcopy(theirs), given(padding), word_ids()
    for layer in mixed.encoder.layer:
        attn = attnzoo.build(name, D_MODEL, HEADS, **FULL[name]).double().eval()
        attn.load_state_dict(bert(layer.attention))
        layer.attention.self, layer.attention.output.dense = InBert(attn, key_mask), nn.Identity()
    found = [model(ids, attention_mask=key_mask).last_hidden_state[kept(key_mask)] for model in (mixed, theirs)]
    close(*found)
    assert_same_gradients(mixed, theirs, found)
    for layer, twin in zip(mixed.encoder.layer, theirs.encoder.layer, strict=True):
        assert_gradients_of_attention(layer.attention.self.attn, bert(twin.attention, gradient))


def word_ids(length=LENGTH):
    return torch.randint(3, SIZES["vocab_size"], (BATCH, length), generator=torch.Generator().manual_seed(5))


def assert_same_gradients(mixed, theirs, found, tolerance=1e-9):
    """Of every parameter outside the attentions, embeddings among them."""
    for y in found:
        (y * torch.arange(y.numel(), dtype=y.dtype).sin().view_as(y)).sum().backward()
    theirs = dict(theirs.named_parameters())
    shared = {name: p.grad for name, p in mixed.named_parameters() if name in theirs and p.grad is not None}
    close(shared, {name: theirs[name].grad for name in shared}, tolerance)
    assert any("embed" in name for name in shared)


def assert_gradients_of_attention(attn, wanted, tolerance=1e-9):
    gradients = separated({name: p.grad for name, p in attn.named_parameters()}, attn.projection.rows)
    close(gradients, separated(wanted, attn.projection.rows), tolerance)


# GPT-2


@every_padding
@both_backends
def test_gpt2_attention(backend, padding):
    config = GPT2Config(n_embd=D_MODEL, n_head=HEADS, n_layer=1, n_positions=64, attn_implementation=backend)
    theirs = stirred(GPT2Attention(config, layer_idx=0))
    ours = attnzoo.build("fused_qkv", D_MODEL, HEADS, causal=True).double().eval()
    key_mask = given(padding)

    def their_call(x):
        mask = create_causal_mask(config=config, inputs_embeds=x, attention_mask=key_mask, cache=None)
        return theirs(x, attention_mask=mask)[0]

    x = tokens(BATCH, LENGTH, D_MODEL)
    assert_agree(ours, theirs, gpt2, lambda x: ours(x, key_mask=key_mask), their_call, x, keep=kept(key_mask))


# Llama


class ExactAngles(nn.Module):
    """LlamaRotaryEmbedding in float64; theirs takes frequencies and angles in float32 whatever the dtype."""

    def __init__(self, width, base=10_000.0):
        super().__init__()
        self.frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def forward(self, x, position_ids):
        angles = torch.cat([position_ids[..., None] * self.frequencies] * 2, dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def counted(length=LENGTH):
    """Positions as their models count them: padding included."""
    return torch.arange(length)[None]


def llama_pair(backend, groups, name="gqa", mistral=None, **options):
    """Ours and LlamaAttention, or MistralAttention with that sliding window."""
    sizes = SIZES | {"num_key_value_heads": groups, "attn_implementation": backend}
    if mistral is None:
        config = LlamaConfig(**sizes, **ROOM, attention_bias=True)
        theirs = LlamaAttention(config, layer_idx=0)
    else:
        config = MistralConfig(**sizes, **ROOM, sliding_window=mistral)
        theirs = MistralAttention(config, layer_idx=0)
    bias = theirs.q_proj.bias is not None
    options = {"causal": True, "positions": "rotary", "bias": bias, "num_kv_heads": groups} | options
    ours, dtype = attnzoo.build(name, D_MODEL, HEADS, **options).eval(), DTYPE[backend]
    return ours.to(dtype), stirred(theirs).to(dtype), config


def llama_call(theirs, config, key_mask, angles=None, make_mask=None, cache=None):
    """Their attention as their model calls it; positions go on where the cache ends."""
    angles, make_mask = angles or ExactAngles(theirs.head_dim), make_mask or create_causal_mask

    def call(x):
        before = 0 if cache is None else cache.get_seq_length()
        place = counted(before + x.shape[1])[:, before:]
        mask = make_mask(config=config, inputs_embeds=x, attention_mask=key_mask, cache=cache, position_ids=place)
        return theirs(x, position_embeddings=angles(x, place), attention_mask=mask, cache=cache)[0]

    return call


@every_padding
@both_backends
@pytest.mark.parametrize(("name", "groups"), [("gqa", 6), ("gqa", 2), ("gqa", 1), ("fused_qkv", 2), ("kv_cached", 2)])
def test_llama_attention_with_grouped_heads_and_rotary_positions(name, groups, backend, padding):
    ours, theirs, config = llama_pair(backend, groups, name)
    key_mask = given(padding)
    assert_agree(
        ours,
        theirs,
        llama,
        lambda x: ours(x, key_mask=key_mask),
        llama_call(theirs, config, key_mask),
        tokens(BATCH, LENGTH, D_MODEL).to(DTYPE[backend]),
        keep=kept(key_mask),
        tolerance=TOLERANCE[backend],
    )


@both_backends
def test_the_angles_of_llama_are_ours_up_to_float32(backend):
    ours, theirs, config = llama_pair(backend, 2)
    angles = LlamaRotaryEmbedding(config)
    x = tokens(BATCH, LENGTH, D_MODEL).to(DTYPE[backend])
    for mine, wanted in zip(ExactAngles(theirs.head_dim)(x, counted()), angles(x, counted()), strict=True):
        close(mine, wanted, 1e-6)
    assert_agree(ours, theirs, llama, ours, llama_call(theirs, config, None, angles), x, tolerance=FLOAT32)


@every_padding
@both_backends
@pytest.mark.parametrize("pieces", [(1,) * LENGTH, (4, 1, 1, 3, 1)])
@pytest.mark.parametrize("name", ["gqa", "kv_cached"])
def test_decoding_with_our_cache_is_llama_with_its_dynamic_cache(name, pieces, backend, padding):
    ours, theirs, config = llama_pair(backend, 2, name)
    ours.load_state_dict(llama(theirs))
    x, key_mask = tokens(BATCH, LENGTH, D_MODEL).to(DTYPE[backend]), given(padding)
    mine, other = ours.new_cache(BATCH, LENGTH), DynamicCache(config=config)
    for piece in x.split(pieces, dim=1):
        seen = mine.length + piece.shape[1]
        upto = None if key_mask is None else key_mask[:, :seen]
        now = kept(key_mask)[:, mine.length : seen]
        y = ours(piece, key_mask=upto, cache=mine)
        wanted = llama_call(theirs, config, upto, cache=other)(piece)
        if now.any():
            close(y[now], wanted[now], TOLERANCE[backend])
    assert mine.length == other.get_seq_length() == LENGTH


class InLlama(nn.Module):
    """Ours where LlamaAttention stood; it makes masks, positions and cache itself."""

    def __init__(self, attn, key_mask=None):
        super().__init__()
        self.attn, self.key_mask, self.cache = attn, key_mask, None

    def forward(self, hidden_states, **_):
        return self.attn(hidden_states, key_mask=self.key_mask, cache=self.cache), None


def exact(model):
    """A language model of theirs in float64, its angles too."""
    model = stirred(model)
    model.model.rotary_emb = ExactAngles(D_MODEL // HEADS)
    return model


def with_ours_inside(theirs, name, key_mask=None, **options):
    mixed = copy.deepcopy(theirs)
    for layer in mixed.model.layers:
        attn = attnzoo.build(name, D_MODEL, HEADS, causal=True, positions="rotary", bias=False, **options)
        attn.load_state_dict(llama(layer.self_attn))
        layer.self_attn = InLlama(attn.double().eval(), key_mask)
    return mixed


@every_padding
@pytest.mark.parametrize("groups", [6, 2])
def test_a_llama_with_our_attention_inside(groups, padding):
    """Logits and the gradients of every parameter; their RMSNorm is float32, in both, which rounds differences up."""
    theirs = exact(LlamaForCausalLM(LlamaConfig(**SIZES, **ROOM, num_key_value_heads=groups)))
    key_mask, ids = given(padding), word_ids()
    mixed = with_ours_inside(theirs, "gqa", key_mask, num_kv_heads=groups)
    found = [model(ids, attention_mask=key_mask, use_cache=False).logits[kept(key_mask)] for model in (mixed, theirs)]
    close(*found, FLOAT32)
    assert_same_gradients(mixed, theirs, found, FLOAT32)
    for layer, twin in zip(mixed.model.layers, theirs.model.layers, strict=True):
        assert_gradients_of_attention(layer.self_attn.attn, llama(twin.self_attn, gradient), FLOAT32)


def test_a_llama_with_our_attention_inside_decodes_token_by_token_as_with_its_own():
    theirs = exact(LlamaForCausalLM(LlamaConfig(**SIZES, **ROOM, num_key_value_heads=2)))
    mixed, ids, cache = with_ours_inside(theirs, "gqa", num_kv_heads=2), word_ids(), DynamicCache(config=theirs.config)
    for layer in mixed.model.layers:
        layer.self_attn.cache = layer.self_attn.attn.new_cache(BATCH, LENGTH)
    with torch.no_grad():
        for piece in ids.split((4, 1, 1, 1, 1, 1, 1), dim=1):
            close(mixed(piece, use_cache=False).logits, theirs(piece, cache=cache, use_cache=True).logits, FLOAT32)


# Mistral: sliding_window = w sees the token itself and w - 1 before it, so radius = w - 1


@every_padding
@both_backends
@pytest.mark.parametrize("window", [1, 4, 20])
@pytest.mark.parametrize("name", ["local", "sparse"])
def test_the_sliding_window_of_mistral_is_a_causal_window_of_that_radius_less_one(name, window, backend, padding):
    options = {"radius": window - 1} if name == "local" else {"pattern": f"Local({window - 1})"}
    ours, theirs, config = llama_pair(backend, 2, name, mistral=window, block=3, **options)
    key_mask = given(padding)
    assert_agree(
        ours,
        theirs,
        llama,
        lambda x: ours(x, key_mask=key_mask),
        llama_call(theirs, config, key_mask, make_mask=create_sliding_window_causal_mask),
        tokens(BATCH, LENGTH, D_MODEL).to(DTYPE[backend]),
        keep=kept(key_mask),
        tolerance=TOLERANCE[backend],
    )


@pytest.mark.parametrize("pieces", [(1,) * LENGTH, (7, 1, 1, 1), (2, 4, 1, 3)])
def test_a_mistral_with_our_window_inside_decodes_as_with_its_own_also_after_a_prompt_longer_than_the_window(pieces):
    theirs = exact(MistralForCausalLM(MistralConfig(**SIZES, **ROOM, num_key_value_heads=2, sliding_window=4)))
    mixed, ids, cache = with_ours_inside(theirs, "local", radius=3, num_kv_heads=2), word_ids(), None
    with torch.no_grad():
        whole = theirs(ids, use_cache=False).logits
        close(mixed(ids, use_cache=False).logits, whole, FLOAT32)
        for layer in mixed.model.layers:
            layer.self_attn.cache = layer.self_attn.attn.new_cache(BATCH, LENGTH)
        cache = DynamicCache(config=theirs.config)
        ours, own = [], []
        for piece in ids.split(pieces, dim=1):
            ours.append(mixed(piece, use_cache=False).logits)
            own.append(theirs(piece, cache=cache, use_cache=True).logits)
    close(torch.cat(ours, dim=1), whole, FLOAT32)
    close(torch.cat(own, dim=1), whole, FLOAT32)


# Longformer: attention_window = w sees w / 2 to each side and the token itself, so radius = w // 2


def longformer_pair(window, **options):
    config = LongformerConfig(**SIZES, **ROOM, attention_window=[window], attention_probs_dropout_prob=0.0)
    ours = attnzoo.build("local", D_MODEL, HEADS, radius=window // 2, block=3, **options).eval()
    return ours, stirred(LongformerAttention(config)).float()


def longformer_call(theirs, key_mask, global_tokens=0, marked=None):
    """LongformerSelfAttention as LongformerModel calls it: padding is negative, global tokens positive, the rest 0."""
    kind = torch.zeros(key_mask.shape) if marked is None else marked * 10_000.0
    kind[:, :global_tokens] = 10_000
    kind[~key_mask] = -10_000

    def call(x):
        heads = theirs.self(
            x, attention_mask=kind, is_index_masked=kind < 0, is_index_global_attn=kind > 0,
            is_global_attn=bool((kind > 0).any()),
        )[0]  # fmt: skip
        return theirs.output.dense(heads)

    return call


@pytest.mark.parametrize("right", [0, 3])
@pytest.mark.parametrize("window", [4, 6])
def test_longformer_attention_without_global_tokens(window, right):
    """In float32, as its softmax is; a length that is a multiple of the window, as it wants."""
    ours, theirs = longformer_pair(window)
    key_mask = padded(BATCH, 12, right=right)

    def our_call(x):
        return ours(x, key_mask=key_mask)

    x = tokens(BATCH, 12, D_MODEL).float()
    assert_agree(ours, theirs, bert, our_call, longformer_call(theirs, key_mask), x, keep=key_mask, tolerance=FLOAT32)


@pytest.mark.parametrize("right", [0, 3])
@pytest.mark.parametrize("global_tokens", [1, 3])
@pytest.mark.parametrize("window", [4, 6])
def test_longformer_attention_with_global_tokens_that_use_the_same_projections(window, global_tokens, right):
    """Theirs have projections of their own: here these are copies, and the gradients of both add up to ours."""
    ours, theirs = longformer_pair(window, global_tokens=global_tokens)
    for name in ("query", "key", "value"):
        getattr(theirs.self, f"{name}_global").load_state_dict(getattr(theirs.self, name).state_dict())
    key_mask = padded(BATCH, 12, right=right)
    assert_agree(
        ours,
        theirs,
        longformer_tied,
        lambda x: ours(x, key_mask=key_mask),
        longformer_call(theirs, key_mask, global_tokens),
        tokens(BATCH, 12, D_MODEL).float(),
        keep=key_mask,
        tolerance=FLOAT32,
    )


def global_and_padded(right):
    """Which tokens are global, other numbers of them in each sequence and none in one, and which are no padding."""
    marked = torch.zeros(BATCH, 12, dtype=torch.bool)
    marked[0, [0, 5]] = marked[2, [1, 2, 7]] = True
    return marked, padded(BATCH, 12, right=right)


@pytest.mark.parametrize("right", [0, 3])
@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("window", [4, 6])
def test_longformer_attention_with_projections_of_their_own_for_global_tokens(window, first, right):
    """Of the first tokens, all global here and there, or of marked ones, and of both."""
    ours, theirs = longformer_pair(window, global_tokens=first, global_projections=True)
    marked, key_mask = global_and_padded(right)
    x = tokens(BATCH, 12, D_MODEL).float()
    for given in [{"marked": marked}, {}] if first else [{"marked": marked}]:
        assert_agree(
            ours,
            theirs,
            longformer,
            lambda x, given=given: ours(x, key_mask=key_mask, **given),
            longformer_call(theirs, key_mask, first, **given),
            x,
            keep=key_mask,
            tolerance=FLOAT32,
        )


@pytest.mark.parametrize("right", [0, 3])
def test_the_weights_of_global_tokens_are_those_of_longformer(right):
    ours, theirs = longformer_pair(4, global_projections=True)
    ours.load_state_dict(longformer(theirs))
    marked, key_mask = global_and_padded(right)
    x = tokens(BATCH, 12, D_MODEL).float()
    weights, wanted = ours.weights(x, key_mask=key_mask, marked=marked), global_weights(theirs, x, marked, key_mask)
    for sequence in (0, 2):  # in 1 there is none
        rows = marked[sequence]
        close(weights[sequence][:, rows], wanted[sequence, :, : rows.sum()], FLOAT32)


def global_weights(theirs, x, marked, key_mask):
    """[b, h, n, k], of the n global tokens of the sequence that has most."""
    hidden = ~key_mask
    shared = {"is_index_masked": hidden, "is_index_global_attn": marked, "is_global_attn": True}
    return theirs.self(x, attention_mask=marked.float() - hidden.float(), **shared, output_attentions=True)[2]


# BigBird


BLOCK, BLOCKS = 2, 8


def bigbird_config(**options):
    quiet = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "sep_token_id": 2}
    sizes = SIZES | ROOM | quiet | {"block_size": BLOCK, "num_random_blocks": 1, "attention_type": "block_sparse"}
    return BigBirdConfig(**(sizes | options))


def bigbird_call(theirs, key_mask):
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(key_mask.double(), BLOCK)
    masks = {"band_mask": band, "from_mask": rows, "to_mask": columns}

    def call(x):
        heads, _ = theirs.self(x, **masks, from_blocked_mask=blocked, to_blocked_mask=blocked)
        return theirs.output.dense(heads)

    return call


def bigbird_key_mask(hole=True):
    """All of the last block is padding, as it is global in theirs and not in ours; in one sequence a hole as well."""
    key_mask = padded(BATCH, BLOCK * BLOCKS)
    key_mask[:, -BLOCK:] = False
    key_mask[1, 5] = not hole
    return key_mask


def assert_bigbirds_agree(ours, theirs):
    key_mask = bigbird_key_mask()
    assert_agree(
        ours,
        theirs,
        bert,
        lambda x: ours(x, key_mask=key_mask),
        bigbird_call(theirs, key_mask),
        tokens(BATCH, BLOCK * BLOCKS, D_MODEL),
        keep=key_mask,
    )


def test_bigbird_without_its_random_blocks(monkeypatch):
    """Window and first global block are ours. num_random_blocks=0 is no configuration of theirs (see below), so their
    own mask of random blocks is made to hide all of them."""
    theirs = stirred(BigBirdAttention(bigbird_config(), seed=0))
    ours = attnzoo.build("bigbird", D_MODEL, HEADS, block=BLOCK, random_blocks=0).double().eval()
    inner = theirs.self._create_rand_mask_from_inputs
    monkeypatch.setattr(theirs.self, "_create_rand_mask_from_inputs", lambda *a: torch.zeros_like(inner(*a)))
    assert_bigbirds_agree(ours, theirs)


@pytest.mark.parametrize("seed", [0, 1])
def test_bigbird_with_our_random_blocks(monkeypatch, seed):
    """Our draws written into theirs: a row of ours has any number of them, so theirs gets room for the most, and its
    mask hides the room that is left."""
    pattern = {"block": BLOCK, "random_blocks": 1, "seed": seed}
    ours = attnzoo.build("bigbird", D_MODEL, HEADS, **pattern).double().eval()
    fixed = attnzoo.build("bigbird", D_MODEL, HEADS, **pattern | {"random_blocks": 0}).visible(BLOCK * BLOCKS)
    drawn = (ours.visible(BLOCK * BLOCKS) & ~fixed)[:, ::BLOCK, ::BLOCK][:, 1:-1]  # [h, blocks - 2, blocks]
    room = int(drawn.sum(-1).max())
    assert room > 1
    used, places = drawn.long().sort(dim=-1, descending=True, stable=True)
    used, places = used[..., :room], places[..., :room]
    theirs = stirred(BigBirdAttention(bigbird_config(num_random_blocks=room), seed=0))
    inner = theirs.self._create_rand_mask_from_inputs
    shown = used.repeat_interleave(BLOCK, dim=-1)[None, :, :, None]
    monkeypatch.setattr(theirs.self, "_create_rand_mask_from_inputs", lambda *a: inner(*a) * shown)
    monkeypatch.setattr(theirs.self, "_bigbird_block_rand_mask_with_head", lambda **_: list(places.numpy()))
    assert_bigbirds_agree(ours, theirs)


@pytest.fixture
def numpy_state():
    """Their training draws from NumPy's global state, and seeds it."""
    state = np.random.get_state()
    yield
    np.random.set_state(state)


@pytest.mark.usefixtures("numpy_state")
@pytest.mark.parametrize("name", ["vanilla", "sparse"])
def test_bigbird_in_training_with_its_random_blocks_as_a_mask_here(monkeypatch, name):
    """Nothing of theirs is changed, only written down: last block global, random blocks of each head."""
    theirs = stirred(BigBirdAttention(bigbird_config(), seed=0)).train()
    draw, drawn = theirs.self._bigbird_block_rand_mask_with_head, []
    monkeypatch.setattr(
        theirs.self, "_bigbird_block_rand_mask_with_head", lambda **call: drawn.append(draw(**call)) or drawn[-1]
    )
    key_mask = padded(BATCH, BLOCK * BLOCKS, right=3)
    call = bigbird_call(theirs, key_mask)
    call(tokens(BATCH, BLOCK * BLOCKS, D_MODEL))  # the same draws at every call, as each one seeds anew
    row, column = torch.arange(BLOCKS)[:, None], torch.arange(BLOCKS)
    seen = ((row - column).abs() <= 1) | (row % (BLOCKS - 1) == 0) | (column % (BLOCKS - 1) == 0)
    seen = seen.repeat(HEADS, 1, 1)
    for head, rows in enumerate(drawn[0]):
        for i, blocks in enumerate(rows, start=1):
            seen[head, i, blocks.tolist()] = True
    mask = seen.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[None]
    options = {"pattern": "Full()", "block": 3} if name == "sparse" else {}
    ours = attnzoo.build(name, D_MODEL, HEADS, **options).double()
    x = tokens(BATCH, BLOCK * BLOCKS, D_MODEL)
    assert_agree(ours, theirs, bert, lambda x: ours(x, key_mask=key_mask, mask=mask), call, x, keep=key_mask)
    assert not (seen[0] == seen).all()  # heads do draw different blocks


# Where transformers differs; each test shows how, so that a change there is noticed here.


@both_backends
def test_a_sequence_of_padding_alone_is_zero_here_and_in_one_of_two_backends_of_bert(backend):
    """Eager gives the mean of the hidden values, sdpa 0."""
    ours, theirs, config = bert_pair("vanilla", backend)
    ours.load_state_dict(bert(theirs))
    x, nothing = tokens(1, 3, D_MODEL), torch.zeros(1, 3, dtype=torch.bool)
    mask = create_bidirectional_mask(config=config, inputs_embeds=x, attention_mask=nothing)
    heads = theirs.self(x, attention_mask=mask)[0].detach()
    mean = theirs.self.value(x).mean(1, keepdim=True).expand(1, 3, -1).detach()
    assert mean.abs().max() > 0.1
    close(heads, mean if backend == "eager" else torch.zeros_like(mean))
    close(ours(x, key_mask=nothing), theirs.output.dense(torch.zeros_like(x)))


@pytest.mark.parametrize(
    ("backend", "dtype"), [("sdpa", torch.float64), ("eager", torch.float32), ("eager", torch.float64)]
)
def test_a_causal_row_of_padding_is_zero_here_and_in_sdpa_llama_but_a_mean_or_nan_in_eager(backend, dtype):
    """Padding on the left, so that row 0 of 3 sees nothing: in eager it sees all three, later ones too.

    In float64 eager gives NaN, as the lowest float64 becomes minus infinity in a float32 softmax, and so do the
    gradients of queries, keys and values, although the row is padding and its output is not used.
    """
    ours, theirs, config = llama_pair(backend, HEADS)
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    ours.load_state_dict(llama(theirs))
    x, key_mask = tokens(1, 3, D_MODEL).to(dtype), torch.tensor([[False, True, True]])
    rows = llama_call(theirs, config, key_mask)(x)[0]
    mean, zero = theirs.o_proj(theirs.v_proj(x).mean(1))[0].detach(), theirs.o_proj.bias.detach()
    assert (mean - zero).abs().max() > 0.1
    wanted = zero if backend == "sdpa" else mean if dtype == torch.float32 else mean * torch.nan
    torch.testing.assert_close(rows[0].detach(), wanted, equal_nan=True)
    torch.testing.assert_close(ours(x, key_mask=key_mask)[0, 0].detach(), zero)
    rows[1:].sum().backward()
    for layer in (theirs.q_proj, theirs.k_proj, theirs.v_proj):
        assert layer.weight.grad.isnan().any() == wanted.isnan().any()


@both_backends
def test_nan_in_the_padding_reaches_visible_rows_of_bert_and_llama_and_not_here(backend):
    x, key_mask = tokens(BATCH, LENGTH, D_MODEL), padded(BATCH, LENGTH, left=2)
    spoilt = x.masked_fill(~key_mask[:, :, None], torch.nan)
    ours, theirs, config = bert_pair("vanilla", backend)
    ours.load_state_dict(bert(theirs))
    mask = create_bidirectional_mask(config=config, inputs_embeds=x, attention_mask=key_mask)
    assert theirs.self(spoilt, attention_mask=mask)[0][1:].isnan().all()
    close(ours(spoilt, key_mask=key_mask)[key_mask], ours(x, key_mask=key_mask)[key_mask])
    ours, theirs, config = llama_pair(backend, 2)
    x, spoilt = x.to(DTYPE[backend]), spoilt.to(DTYPE[backend])
    assert llama_call(theirs, config, key_mask)(spoilt)[1:].isnan().all()
    close(ours(spoilt, key_mask=key_mask)[key_mask], ours(x, key_mask=key_mask)[key_mask])


def test_rotary_positions_count_padding_in_the_middle_there_and_only_visible_tokens_here():
    """One hidden token between others: theirs agrees once it is told to count as tokenizers do, cumsum of the mask."""
    ours, theirs, config = llama_pair("sdpa", 2)
    ours.load_state_dict(llama(theirs))
    x, key_mask = tokens(1, 4, D_MODEL), torch.tensor([[True, False, True, True]])
    angles, y = ExactAngles(theirs.head_dim), ours(x, key_mask=key_mask)[key_mask]
    mask = create_causal_mask(config=config, inputs_embeds=x, attention_mask=key_mask, cache=None)
    by_default, told = (
        theirs(x, position_embeddings=angles(x, place), attention_mask=mask)[0][key_mask]
        for place in (counted(4), key_mask.cumsum(-1) - 1)
    )
    assert (y - by_default).abs().max() > 0.01
    close(y, told)


def test_sliding_window_counts_the_token_itself_when_causal_and_not_when_bidirectional():
    """sliding_window = 3 of one library: 3 keys with causality, radius 2; 7 keys without, radius 3."""
    query, key = torch.tensor(4), torch.arange(9)
    causal, both = (
        function(0, 0, query, key)
        for function in (sliding_window_causal_mask_function(3), sliding_window_bidirectional_mask_function(3))
    )
    assert causal.tolist() == (attnzoo.Local(2) & attnzoo.Causal()).visible(9)[0, 4].tolist()
    assert both.tolist() == attnzoo.Local(3).visible(9)[0, 4].tolist()
    assert (int(causal.sum()), int(both.sum())) == (3, 7)


def test_attention_window_of_longformer_is_an_even_number_and_sees_one_key_more():
    """attention_window = 8 sees 9 keys, so our radius is 4; where keys are equal, each has a weight of 1 / 9."""
    ours, theirs = longformer_pair(8)
    nn.init.zeros_(theirs.self.query.weight)
    nn.init.zeros_(theirs.self.query.bias)
    ours.load_state_dict(bert(theirs))
    x, kind = tokens(1, 16, D_MODEL).float(), torch.zeros(1, 16)
    shared = {"is_index_masked": kind < 0, "is_index_global_attn": kind > 0, "is_global_attn": False}
    weights = theirs.self(x, attention_mask=kind, **shared, output_attentions=True)[1][0, 8]
    close(weights, torch.full((HEADS, 9), 1 / 9), 1e-6)
    close(ours.weights(x, queries=[8])[0, :, 0, 4:13], torch.full((HEADS, 9), 1 / 9), 1e-6)


def test_longformer_takes_only_some_lengths_and_windows_and_we_take_all():
    """A length that is no multiple of the window is for LongformerModel to pad; attention_window = 2 never runs."""
    key_mask, x = padded(1, 12), tokens(1, 12, D_MODEL).float()
    for window, error in ((8, "multiple of 8"), (2, "expanded size of the tensor")):
        ours, theirs = longformer_pair(window)
        with pytest.raises((AssertionError, RuntimeError), match=error):
            longformer_call(theirs, key_mask)(x)
        assert ours(x).isfinite().all()


def test_the_gradients_of_longformer_are_nan_in_float64_where_a_window_holds_padding_alone():
    """Row 11 of 12, padding whose window of 4 holds padding alone: its output is set to 0, but after the softmax."""
    ours, theirs = longformer_pair(4)
    ours.load_state_dict(bert(theirs))
    key_mask, x = padded(2, 12, right=3), tokens(2, 12, D_MODEL)
    longformer_call(theirs.double(), key_mask)(x)[key_mask].sum().backward()
    assert theirs.self.value.weight.grad.isfinite().all()
    assert theirs.self.key.weight.grad.isnan().any()
    ours.double()(x, key_mask=key_mask)[key_mask].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


def test_nan_in_the_padding_reaches_the_visible_rows_of_longformer_whose_window_holds_it_and_not_here():
    """Padding at 9, 10, 11 of 12 and a radius of 3: rows 6, 7 and 8 are visible and NaN."""
    ours, theirs = longformer_pair(6)
    ours.load_state_dict(bert(theirs))
    key_mask = padded(2, 12, right=3)
    x = tokens(2, 12, D_MODEL).float()
    spoilt = x.masked_fill(~key_mask[:, :, None], torch.nan)
    assert longformer_call(theirs, key_mask)(spoilt)[1, :9].isnan().all(-1).tolist() == [False] * 6 + [True] * 3
    close(ours(spoilt, key_mask=key_mask)[key_mask], ours(x, key_mask=key_mask)[key_mask], 1e-6)


@pytest.mark.usefixtures("numpy_state")
def test_the_random_blocks_of_bigbird_are_all_block_0_in_eval_which_then_counts_twice():
    """So a middle row weighs block 0 double: attention with log 2 added to its scores gives the same."""
    theirs = stirred(BigBirdAttention(bigbird_config(), seed=0))
    drawn = theirs.self._bigbird_block_rand_mask_with_head(BLOCK * 8, BLOCK * 8, BLOCK, BLOCK, HEADS, [14, 16], [1, 0])
    assert all((rows == 0).all() for rows in drawn)
    ours = attnzoo.build("bigbird", D_MODEL, HEADS, block=BLOCK, random_blocks=0).double().eval()
    ours.load_state_dict(bert(theirs))
    x, key_mask = tokens(BATCH, BLOCK * BLOCKS, D_MODEL), bigbird_key_mask()
    wanted = bigbird_call(theirs, key_mask)(x)[key_mask].detach()
    assert (ours(x, key_mask=key_mask)[key_mask] - wanted).abs().max() > 0.1
    ours.score = Doubled()
    close(ours(x, key_mask=key_mask)[key_mask].detach(), wanted)
    training = theirs.train()
    assert (bigbird_call(training, key_mask)(x)[key_mask] - wanted).abs().max() > 0.1  # train is another attention


class Doubled:
    """Adds log 2 to the scores of block 0, but for queries of the first block, which have no random blocks."""

    def __call__(self, scores, query, key):
        return scores + ((key.index < BLOCK) & (query.index >= BLOCK)) * torch.tensor(2.0, dtype=scores.dtype).log()


def test_the_weights_that_bigbird_returns_in_eval_do_not_sum_to_one():
    """The random block overwrites the global block 0 where it should add to it."""
    theirs = stirred(BigBirdAttention(bigbird_config(), seed=0))
    key_mask = padded(1, BLOCK * BLOCKS)
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(key_mask.double(), BLOCK)
    masks = {"band_mask": band, "from_mask": rows, "to_mask": columns}
    x = tokens(1, BLOCK * BLOCKS, D_MODEL)
    total = theirs.self(x, **masks, from_blocked_mask=blocked, to_blocked_mask=blocked)[1].sum(-1)[0, 0]
    one = torch.ones(BLOCK, dtype=torch.float64)
    close(total[:BLOCK].detach(), one)
    close(total[-BLOCK:].detach(), one)
    assert total[BLOCK:-BLOCK].min() < 0.9


def test_bigbird_without_random_blocks_is_no_configuration():
    theirs = stirred(BigBirdAttention(bigbird_config(num_random_blocks=0), seed=0))
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        bigbird_call(theirs, bigbird_key_mask())(tokens(BATCH, BLOCK * BLOCKS, D_MODEL))


@pytest.mark.usefixtures("numpy_state")
def test_each_training_call_of_bigbird_seeds_numpy_for_everybody():
    theirs = stirred(BigBirdAttention(bigbird_config(), seed=0))
    after = []
    for training in (False, True):
        for seed in (5, 9):
            np.random.seed(seed)
            bigbird_call(theirs.train(training), bigbird_key_mask())(tokens(BATCH, BLOCK * BLOCKS, D_MODEL))
            after.append(np.random.rand())
    assert after[0] != after[1]
    assert after[2] == after[3]


def test_one_short_batch_makes_a_bigbird_dense_for_good():
    theirs = stirred(BigBirdModel(bigbird_config()))
    ids = word_ids(20)
    before = theirs(ids).last_hidden_state
    assert theirs.attention_type == "block_sparse"
    theirs(ids[:, :6])
    assert theirs.attention_type == "original_full"
    assert (theirs(ids).last_hidden_state - before).abs().max() > 0.01
