"""Measures decoding with whole models, token by token from one token on: `make performance`.

All have 6 layers of 512 features, 8 heads, a feed-forward network of 2048 and 1000 words, random weights, float32, and
take the likeliest word. They take turns of some tokens in one process. Before, each is checked against itself: the
words it decodes with its cache must be those of a full pass.
"""

import argparse
import json
import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configs, never downloaded

import torch
from torch import nn

from attnzoo.bench import machine
from attnzoo.training.model import Transformer

WORDS, WIDTH, HEADS, LAYERS, INNER = 1000, 512, 8, 6, 2048
CHECKED = 24  # tokens that are compared with a full pass


class Ours:
    """The model that recipes train, around a variant, with the caches that it makes."""

    def __init__(self, name, batch, longest, **options):
        self.model = Transformer(
            vocabulary=WORDS, length=longest, classes=WORDS, causal=True, pooling="every", d_model=WIDTH,
            layers=LAYERS, feed_forward=INNER, attention={"name": name, "num_heads": HEADS, **options},
        ).eval()  # fmt: skip
        self.batch, self.longest = batch, longest

    def start(self):
        self.caches = self.model.new_caches(self.batch, self.longest)

    def step(self, words):
        return self.model(words[:, -1:], caches=self.caches)

    def full(self, words):
        return self.model(words)


class Grown(list):
    """Keys and values of one layer, that `torch.cat` makes longer at each token."""

    @property
    def length(self):
        return self[0].shape[2] if self else 0


class Concatenated(nn.Module):
    """Attention with such a cache."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, key_mask=None, cache=None):
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if cache is not None:
            cache[:] = [torch.cat(two, dim=2) for two in zip(cache, (k, v), strict=True)] if cache else [k, v]
            k, v = cache
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        return self.out(out.transpose(1, 2).flatten(2))


class Cat(Ours):
    """The same model around `Concatenated`."""

    def __init__(self, batch, longest):
        super().__init__("kv_cached", batch, longest)
        for layer in self.model.layers:
            layer.attention = Concatenated()

    def start(self):
        self.caches = [Grown() for _ in range(LAYERS)]


class HuggingFace:
    """A causal model of transformers with its dynamic cache."""

    def __init__(self, kind, batch, longest):
        import transformers

        sizes = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
        if kind == "gpt2":
            sizes |= {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": longest}
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
        else:  # three matrices in place of two, so narrower ones
            sizes |= {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
            sizes |= {"intermediate_size": INNER * 2 // 3, "max_position_embeddings": longest}
            self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
        self.make_cache = lambda: transformers.DynamicCache(config=self.model.config)

    def start(self):
        self.cache = self.make_cache()

    def step(self, words):
        return self.model(input_ids=words[:, -1:], cache=self.cache, use_cache=True).logits

    def full(self, words):
        return self.model(input_ids=words, use_cache=False).logits


class XTransformers:
    """A decoder of x-transformers with its cache, called as its own `generate` does."""

    def __init__(self, batch, longest):
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=WIDTH // HEADS, attn_flash=True)
        self.model = TransformerWrapper(num_tokens=WORDS, max_seq_len=longest, attn_layers=layers).eval()

    def start(self):
        self.cache = None

    def step(self, words):
        logits, self.cache = self.model(words, return_intermediates=True, cache=self.cache)
        return logits

    def full(self, words):
        return self.model(words)


MODELS = {
    "kv_cached": lambda *sizes: Ours("kv_cached", *sizes),
    "gqa:num_kv_heads=2": lambda *sizes: Ours("gqa", *sizes, num_kv_heads=2),
    "torch.cat": Cat,
    "transformers GPT-2": lambda *sizes: HuggingFace("gpt2", *sizes),
    "transformers Llama": lambda *sizes: HuggingFace("llama", *sizes),
    "x-transformers": XTransformers,
}


def longer(model, words):
    """The words with the likeliest next one."""
    return torch.cat([words, model.step(words)[:, -1].argmax(-1, keepdim=True)], dim=1)


def check(name, model, batch):
    """Decoding with the cache must give what a full pass gives."""
    model.start()
    words = torch.arange(batch)[:, None]
    for _ in range(CHECKED):
        logits = model.step(words)
        torch.testing.assert_close(logits[:, -1], model.full(words)[:, -1], rtol=1e-3, atol=1e-3, msg=f"{name} differs")
        words = torch.cat([words, logits[:, -1].argmax(-1, keepdim=True)], dim=1)


def measure(names, batch, tokens, rounds, turn):
    """A row for each model: tokens a CPU second, the best of some rounds."""
    torch.manual_seed(0)
    models = {name: MODELS[name](batch, tokens + 1) for name in names}
    for name, model in models.items():
        check(name, model, batch)
    taken = {name: [] for name in names}
    for _ in range(rounds):
        words, seconds = {}, dict.fromkeys(names, 0.0)
        for name, model in models.items():
            model.start()
            words[name] = torch.arange(batch)[:, None]
        for start in range(0, tokens, turn):
            for name, model in models.items():
                before = time.process_time()
                for _ in range(min(turn, tokens - start)):
                    words[name] = longer(model, words[name])
                seconds[name] += time.process_time() - before
        for name in names:
            taken[name].append(seconds[name])
    return [
        {
            "label": name,
            "batch": batch,
            "tokens": tokens,
            "parameters": sum(parameter.numel() for parameter in models[name].model.parameters()),
            "tokens_a_second": batch * tokens / min(seconds),
        }
        for name, seconds in taken.items()
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="some of " + ", ".join(MODELS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn", type=int, default=32, help="tokens that one decodes before the next has its turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = measure(given.models.split(","), given.batch, given.tokens, given.rounds, given.turn)
    packages = [name for name in ("transformers", "x-transformers") if name.partition("-")[0] in given.models]
    print(json.dumps({"machine": machine.describe("cpu", packages), "rows": rows}, indent=2))
