"""What kernels cost, in counts that no busy machine changes: FLOPs, bytes that operations make, operations."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import attnzoo
from attnzoo.bench.counts import BOTH, FORWARD, visible_pairs
from attnzoo.kernels.dense import dense
from attnzoo.kernels.fused import fused
from attnzoo.scope import Scope, places
from attnzoo.variants.sparse import Sparse

HEADS, FEATURES = 2, 16
LENGTHS = 1024, 2048
SPARSE = {
    "local": {"radius": 128},
    "bigbird": {"global_blocks": 1, "random_blocks": 1},
    "random_sparse": {"keys": 128, "block": 64},
}
BLOCKS = 1.6
"""Pairs computed for each visible one, at most: blocks of 64 at both edges of a window of 257 tokens make it 1.25, and
a backward pass with one product too many is 1.14 times the work. Dense attention would compute 8 for `local` here."""


class Counter(TorchDispatchMode):
    """Counts what is dispatched: operations, FLOPs of products, and bytes of new tensors."""

    def __init__(self):
        super().__init__()
        self.operations = self.flops = self.bytes = self.largest = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        old = {id_of(tensor) for tensor in tensors(args)}
        new = [tensor.nbytes for tensor in tensors(made) if id_of(tensor) not in old]
        self.operations += 1
        self.flops += products(operation, args)
        self.bytes += sum(new)
        self.largest = max(self.largest, *new, 0)
        return made


def tensors(found):
    if isinstance(found, torch.Tensor):
        return [found]
    return [tensor for part in found for tensor in tensors(part)] if isinstance(found, list | tuple) else []


def id_of(tensor):
    return tensor.untyped_storage()._cdata


def products(operation, args):
    """FLOPs of matrix products, those within torch's fused attention too."""
    name = operation.overloadpacket.__name__
    if name in ("mm", "bmm"):
        return 2 * args[0].numel() * args[1].shape[-1]
    if name in ("addmm", "baddbmm"):
        return 2 * args[1].numel() * args[2].shape[-1]
    if "attention" in name and "backward" in name:  # grad, q, k, ...: five products
        return 10 * args[1].numel() * args[2].shape[-2]
    if "attention" in name:
        return 4 * args[0].numel() * args[1].shape[-2]
    return 0


def counted(call):
    with Counter() as counter:
        call()
    return counter


def step(attn, length, both):
    """A call of the kernel alone, after one that makes its tables."""
    scope = Scope(attn.pattern, *places(HEADS, length, length, torch.device("cpu")))
    q, k, v = (torch.randn(1, HEADS, length, FEATURES, requires_grad=both) for _ in range(3))

    def call():
        out = attn.attend(q, k, v, scope)
        if both:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    call()
    return call


def costs(name, both):
    attn = attnzoo.build(name, HEADS * FEATURES, HEADS, **SPARSE[name])
    return attn, [counted(step(attn, length, both)) for length in LENGTHS]


@pytest.mark.parametrize("both", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_kernel_computes_little_more_than_what_is_visible(name, both):
    attn, found = costs(name, both)
    for length, cost in zip(LENGTHS, found, strict=True):
        pairs = visible_pairs(attn.pattern, length, length, HEADS)
        work = pairs * FEATURES * (BOTH if both else FORWARD)
        assert 0.8 * work <= cost.flops <= BLOCKS * work, f"{cost.flops / work:.2f} times the work at {length} tokens"


@pytest.mark.parametrize("both", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_kernel_makes_bytes_and_operations_in_proportion(name, both):
    attn, (short, long) = costs(name, both)
    pairs = [visible_pairs(attn.pattern, length, length, HEADS) for length in LENGTHS]
    growth = max(2.0, pairs[1] / pairs[0])
    assert long.bytes <= 1.1 * growth * short.bytes, "bytes"
    assert long.operations <= 1.1 * growth * short.operations + 50, "operations"
    inputs = 3 * HEADS * LENGTHS[1] * FEATURES * 4
    copies = 24 if both else 8  # of each visible score and of the inputs: scores, mask, weights, and their gradients
    assert long.bytes <= copies * BLOCKS * (4 * pairs[1] + inputs)
    assert long.largest <= HEADS * LENGTHS[1] ** 2 * 4 / 4, "one tensor as large as a dense score matrix, nearly"
    assert long.operations <= (128 if both else 48) * LENGTHS[1] / 64, "operations for each 64 tokens, of all heads"


@pytest.mark.parametrize("both", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize(("name", "options"), [("gqa", {"num_kv_heads": HEADS}), ("fused_qkv", {}), ("kv_cached", {})])
def test_a_dense_module_is_fused_attention_and_four_projections(name, options, both):
    length = 256
    attn = attnzoo.build(name, HEADS * FEATURES, HEADS, **options)
    plain = attnzoo.build("gqa", HEADS * FEATURES, HEADS, num_kv_heads=HEADS)
    x = torch.randn(1, length, HEADS * FEATURES, requires_grad=both)

    def raw(x):
        q, k, v = (
            layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (plain.q_proj, plain.k_proj, plain.v_proj)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=attn.causal)
        return plain.out_proj(heads.transpose(1, 2).flatten(2))

    def call(module):
        out = module(x)
        if both:
            out.sum().backward()

    ours, theirs = counted(lambda: call(attn)), counted(lambda: call(raw))
    assert ours.flops == theirs.flops
    assert ours.operations <= theirs.operations + 15  # places, views
    assert ours.bytes <= theirs.bytes + 8 * length * HEADS * FEATURES  # places; two bytes a number of a copy
    assert ours.largest < HEADS * length**2 * 4 / 4, "no scores are written out"


@pytest.mark.parametrize("kernel", [dense, fused])
@pytest.mark.parametrize("both", [False, True], ids=["forward", "both"])
def test_a_dense_kernel_is_found_out(kernel, both, monkeypatch):
    monkeypatch.setattr(Sparse, "attend", lambda self, q, k, v, scope: kernel(q, k, v, scope))
    with pytest.raises(AssertionError, match="times the work"):
        test_a_sparse_kernel_computes_little_more_than_what_is_visible("local", both)
    with pytest.raises(AssertionError, match="bytes"):
        test_a_sparse_kernel_makes_bytes_and_operations_in_proportion("local", both)
