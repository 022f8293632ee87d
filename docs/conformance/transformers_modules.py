"""Attention modules of Hugging Face transformers, under the contract.

A key_mask alone goes through the library's own mask functions. A mask is given as the library takes custom ones: in
four dimensions, causality and padding included, bool for sdpa and added floats for eager. Positions are switched off.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig, LongformerConfig, MistralConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.mistral.modeling_mistral import MistralAttention

LIBRARY = "transformers"
WINDOW = 4


def custom(mask, key_mask, before, x, backend):
    """A mask of the caller's as transformers takes it, 4-D: bool for sdpa, 0 and the lowest float for eager."""
    mask = mask[None, None] if mask.dim() == 2 else mask
    if mask.dtype != torch.bool:
        return mask
    if key_mask is not None:
        mask = mask & key_mask[:, None, None, :].bool()
    mask = mask & before
    if backend == "sdpa":
        return mask
    return torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)


class Bert(nn.Module):
    """BertSelfAttention and the linear layer of BertSelfOutput."""

    asked = "`create_bidirectional_mask` of the library; without the residual and the norm around it"

    def __init__(self, d_model, num_heads, *, dropout=0.0):
        super().__init__()
        self.config = BertConfig(
            hidden_size=d_model, num_attention_heads=num_heads, attention_probs_dropout_prob=dropout,
            attn_implementation=self.backend,
        )  # fmt: skip
        self.inner, self.out_proj = BertSelfAttention(self.config), nn.Linear(d_model, d_model)

    def forward(self, x, *, key_mask=None, mask=None):
        if mask is None:
            given = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=key_mask)
        else:
            given = custom(mask, key_mask, torch.ones((), dtype=torch.bool), x, self.backend)
        return self.out_proj(self.inner(x, attention_mask=given)[0])

    q_proj = property(lambda self: self.inner.query)
    k_proj = property(lambda self: self.inner.key)
    v_proj = property(lambda self: self.inner.value)


class BertEager(Bert):
    """BertSelfAttention, eager, and the linear layer of BertSelfOutput."""

    backend = "eager"


class BertSdpa(Bert):
    """BertSelfAttention, sdpa, and the linear layer of BertSelfOutput."""

    backend = "sdpa"


class Causal(nn.Module):
    """What the causal ones share."""

    without = frozenset({"bidirectional"})
    make_mask = staticmethod(create_causal_mask)

    def before(self, length):
        """What a query sees of a sequence, for masks of the caller's."""
        return torch.ones(length, length, dtype=torch.bool).tril()

    def given(self, x, key_mask, mask):
        if mask is not None:
            return custom(mask, key_mask, self.before(x.shape[1]), x, self.backend)
        place = torch.arange(x.shape[1])[None]
        return self.make_mask(
            config=self.config, inputs_embeds=x, attention_mask=key_mask, cache=None, position_ids=place
        )


class GPT2(Causal):
    """GPT2Attention, which is causal always."""

    asked = "`create_causal_mask` of the library"

    def __init__(self, d_model, num_heads, *, causal=True, dropout=0.0):
        super().__init__()
        if not causal:
            raise ValueError("GPT-2 is causal always")
        self.config = GPT2Config(
            n_embd=d_model, n_head=num_heads, attn_pdrop=dropout, resid_pdrop=0.0, attn_implementation=self.backend
        )
        self.inner = GPT2Attention(self.config, layer_idx=0)

    def forward(self, x, *, key_mask=None, mask=None):
        return self.inner(x, attention_mask=self.given(x, key_mask, mask))[0]

    def columns(self, part):
        layer, width = self.inner.c_attn, self.config.n_embd
        columns = slice(part * width, (part + 1) * width)
        return lambda x: F.linear(x, layer.weight[:, columns].T, layer.bias[columns])

    q_proj = property(lambda self: self.columns(0))
    k_proj = property(lambda self: self.columns(1))
    v_proj = property(lambda self: self.columns(2))
    out_proj = property(lambda self: self.inner.c_proj)


class GPT2Eager(GPT2):
    """GPT2Attention, eager."""

    backend = "eager"


class GPT2Sdpa(GPT2):
    """GPT2Attention, sdpa."""

    backend = "sdpa"


class Llama(Causal):
    """LlamaAttention with angles of zero, so that no position is in it."""

    asked = "`create_causal_mask` of the library; `position_embeddings` of angle 0"

    def __init__(self, d_model, num_heads, *, num_kv_heads=None, causal=True, dropout=0.0):
        super().__init__()
        if not causal:
            raise ValueError("Llama is causal always")
        self.config = self.configured(
            hidden_size=d_model, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads or num_heads,
            attention_dropout=dropout, attn_implementation=self.backend,
        )  # fmt: skip
        self.inner = self.built(self.config, layer_idx=0)

    configured, built = LlamaConfig, LlamaAttention

    def forward(self, x, *, key_mask=None, mask=None):
        angle = torch.zeros(1, x.shape[1], self.inner.head_dim, dtype=x.dtype, device=x.device)
        given = self.given(x, key_mask, mask)
        return self.inner(x, position_embeddings=(angle.cos(), angle.sin()), attention_mask=given)[0]

    q_proj = property(lambda self: self.inner.q_proj)
    k_proj = property(lambda self: self.inner.k_proj)
    v_proj = property(lambda self: self.inner.v_proj)
    out_proj = property(lambda self: self.inner.o_proj)


class LlamaEager(Llama):
    """LlamaAttention, eager, with angles of zero."""

    backend = "eager"
    close = 1e-5  # its softmax is float32 in every dtype


class LlamaSdpa(Llama):
    """LlamaAttention, sdpa, with angles of zero."""

    backend = "sdpa"


class Mistral(Llama):
    """MistralAttention with a sliding window of 4, angles of zero."""

    asked = "`create_sliding_window_causal_mask` of the library, `sliding_window=4`; `position_embeddings` of angle 0"
    make_mask = staticmethod(create_sliding_window_causal_mask)
    pattern = f"Local({WINDOW - 1}) & Causal()"
    built = MistralAttention

    def configured(self, **options):
        return MistralConfig(sliding_window=WINDOW, **options)

    def before(self, length):
        return torch.ones(length, length, dtype=torch.bool).tril().triu(1 - WINDOW)


class MistralEager(Mistral):
    """MistralAttention, eager, with a sliding window of 4 and angles of zero."""

    backend = "eager"
    close = 1e-5  # its softmax is float32 in every dtype


class MistralSdpa(Mistral):
    """MistralAttention, sdpa, with a sliding window of 4 and angles of zero."""

    backend = "sdpa"


class Longformer(nn.Module):
    """LongformerSelfAttention with a window of 4 and no global tokens, and a linear layer behind it."""

    asked = "`attention_window=[4]`, padded to a multiple of it as LongformerModel does; nothing there is like `mask`"
    pattern = f"Local({WINDOW // 2})"
    close = 1e-5  # its softmax is float32 in every dtype

    def __init__(self, d_model, num_heads, *, dropout=0.0):
        super().__init__()
        config = LongformerConfig(
            hidden_size=d_model, num_attention_heads=num_heads, attention_window=[WINDOW],
            attention_probs_dropout_prob=dropout, num_hidden_layers=1,
        )  # fmt: skip
        self.inner, self.out_proj = LongformerSelfAttention(config, layer_id=0), nn.Linear(d_model, d_model)
        del self.inner.query_global, self.inner.key_global, self.inner.value_global  # no global tokens here

    def forward(self, x, *, key_mask=None):
        length = x.shape[1]
        more = -length % WINDOW
        real = torch.ones(x.shape[:2], dtype=torch.long) if key_mask is None else key_mask.long()
        real = F.pad(real, (0, more))
        kind = (1.0 - real.to(x.dtype)) * -10_000  # below 0 is padding, above 0 global
        y = self.inner(
            F.pad(x, (0, 0, 0, more)), attention_mask=kind,
            is_index_masked=kind < 0, is_index_global_attn=kind > 0, is_global_attn=False,
        )[0]  # fmt: skip
        return self.out_proj(y[:, :length])

    q_proj = property(lambda self: self.inner.query)
    k_proj = property(lambda self: self.inner.key)
    v_proj = property(lambda self: self.inner.value)


MODULES = (BertEager, BertSdpa, GPT2Eager, GPT2Sdpa, LlamaEager, LlamaSdpa, MistralEager, MistralSdpa, Longformer)
