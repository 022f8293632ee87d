"""Where each peer keeps its weights: a state dict of ours, read off a module of theirs.

A map only renames, transposes, stacks and permutes, so that with `read=gradient` it turns their gradients into ours.
"""

import torch


def value(parameter):
    return parameter.detach().clone()


def gradient(parameter):
    return parameter.grad


def linear(name, layer, read=value):
    """A linear layer under our name, with its bias if it has one."""
    return {f"{name}.{kind}": read(parameter) for kind, parameter in layer.named_parameters()}


def multihead(peer, read=value):
    """torch.nn.MultiheadAttention: `in_proj` holds all queries, all keys, all values, as our `qkv_proj` does."""
    fused = {"qkv_proj.weight": read(peer.in_proj_weight), "qkv_proj.bias": read(peer.in_proj_bias)}
    return fused | linear("out_proj", peer.out_proj, read)


def bert(peer, read=value):
    """BertAttention, LongformerAttention, BigBirdAttention: the output layer is in the block that adds the residual."""
    return {
        **linear("q_proj", peer.self.query, read),
        **linear("k_proj", peer.self.key, read),
        **linear("v_proj", peer.self.value, read),
        **linear("out_proj", peer.output.dense, read),
    }


def longformer(peer, read=value):
    """LongformerAttention with its projections for global tokens."""
    return {
        **bert(peer, read),
        **linear("q_global_proj", peer.self.query_global, read),
        **linear("k_global_proj", peer.self.key_global, read),
        **linear("v_global_proj", peer.self.value_global, read),
    }


def longformer_tied(peer, read=value):
    """LongformerAttention whose global projections are copies of the others: their gradients add up to ours."""
    state = bert(peer, read)
    if read is gradient:
        for name, twin in (("q", peer.self.query_global), ("k", peer.self.key_global), ("v", peer.self.value_global)):
            for kind, part in linear(f"{name}_proj", twin, read).items():
                state[kind] = state[kind] + part
    return state


def gpt2(peer, read=value):
    """GPT2Attention: one Conv1D for queries, keys and values, whose weight is [in, out], so transposed."""
    return {
        "qkv_proj.weight": read(peer.c_attn.weight).T,
        "qkv_proj.bias": read(peer.c_attn.bias),
        "out_proj.weight": read(peer.c_proj.weight).T,
        "out_proj.bias": read(peer.c_proj.bias),
    }


def llama(peer, read=value):
    """LlamaAttention, MistralAttention: our names, but `o_proj`; rotary halves and groups of heads lie as ours do."""
    return {
        **linear("q_proj", peer.q_proj, read),
        **linear("k_proj", peer.k_proj, read),
        **linear("v_proj", peer.v_proj, read),
        **linear("out_proj", peer.o_proj, read),
    }


def x_transformers(peer, read=value, rotary=False):
    """x_transformers.Attention: no biases; query head i reads key-value head i % g, where ours reads i // (h / g).

    Its rotary embedding turns neighbours (2i, 2i + 1) where ours turns (i, i + d/2): features of q and k move.
    """
    groups, heads = peer.kv_heads, peer.heads
    order = torch.arange(heads).view(heads // groups, groups).T.flatten()  # theirs, in the order of ours
    q, k, v, out = (read(layer.weight) for layer in (peer.to_q, peer.to_k, peer.to_v, peer.to_out))
    q, k = q.unflatten(0, (heads, -1))[order], k.unflatten(0, (groups, -1))
    if rotary:
        width = q.shape[1]
        features = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
        q, k = q[:, features], k[:, features]
    out = out.unflatten(1, (heads, -1))[:, order].flatten(1)
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight")
    return dict(zip(names, (q.flatten(0, 1), k.flatten(0, 1), v, out), strict=True))
