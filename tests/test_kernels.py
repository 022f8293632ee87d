"""Every kernel gives what `dense` gives, forward and backward; `dense` against a plain loop."""

import math
import threading

import pytest
import torch

from attnzoo import NotSupportedError, attend, build
from attnzoo.kernels import plan as plan_kernel
from attnzoo.kernels.blocks import blocks
from attnzoo.kernels.dense import dense
from attnzoo.kernels.fastest import choose, explained, fastest
from attnzoo.kernels.fused import fused
from attnzoo.kernels.plan import plan
from attnzoo.patterns import Causal, Full, Global, Local, Marked, Random
from attnzoo.scope import Scope, places
from attnzoo.scores import Alibi, Score
from tests.test_patterns import EXPRESSIONS

HEADS, GROUPS, FEATURES, WIDTH = 6, 2, 5, 3


def inputs(queries, keys, batch=2, heads=HEADS, groups=GROUPS, dtype=torch.float64):
    shapes = (batch, heads, queries, FEATURES), (batch, groups, keys, FEATURES), (batch, groups, keys, WIDTH)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def scope_of(pattern, queries, keys, **facts):
    query, key = places(HEADS, queries, keys, torch.device("cpu"))
    return Scope(pattern, query, key, **facts)


def masks(kind, queries, keys, batch=2):
    key_mask = torch.rand(batch, keys) > 0.4
    mask = torch.rand(batch, HEADS, queries, keys) > 0.3
    return {
        "no mask": {},
        "key_mask": {"key_mask": key_mask},
        "mask": {"mask": mask},
        "mask over heads": {"mask": mask[:, :1]},
        "mask over all": {"mask": mask[:1, :1]},
        "mask of one row": {"mask": mask[:, :, :1]},
        "everything": {"key_mask": key_mask, "mask": mask, "documents": torch.arange(keys).expand(batch, -1) // 6},
    }[kind]


def same(kernel, q, k, v, scope, **options):
    """Output and all gradients against the definition."""
    out, wanted = kernel(q, k, v, scope, **options), dense(q, k, v, scope)
    torch.testing.assert_close(out, wanted)
    above = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), above), torch.autograd.grad(wanted, (q, k, v), above)
    )


def test_dense_is_what_a_plain_loop_over_queries_says():
    queries, keys = 5, 9
    q, k, v = (tensor.detach() for tensor in inputs(queries, keys))
    facts = masks("everything", queries, keys)
    facts["key_mask"][1] = False  # nothing to see
    pattern = Local(3) & Causal()
    out = dense(q, k, v, scope_of(pattern, queries, keys, **facts))
    for b in range(2):
        for h in range(HEADS):
            for i in range(queries):
                at = i + keys - queries
                ids = facts["documents"][b]
                seen = [
                    j
                    for j in range(at - 3, at + 1)
                    if j >= 0 and facts["key_mask"][b, j] and facts["mask"][b, h, i, j] and ids[j] == ids[at]
                ]
                powers = [math.exp(float(q[b, h, i] @ k[b, h // 3, j]) / math.sqrt(FEATURES)) for j in seen]
                wanted = sum(
                    (p / sum(powers) * v[b, h // 3, j] for p, j in zip(powers, seen, strict=True)), torch.zeros(WIDTH)
                )
                torch.testing.assert_close(out[b, h, i], wanted.to(out.dtype))


@pytest.mark.parametrize("pattern", EXPRESSIONS, ids=str)
def test_blocks_over_any_pattern(pattern):
    for (queries, keys), block in (((23, 23), 4), ((5, 18), 8), ((1, 17), 4)):
        same(blocks, *inputs(queries, keys), scope_of(pattern, queries, keys), block=block)


@pytest.mark.parametrize(
    "kind", ["key_mask", "mask", "mask over heads", "mask over all", "mask of one row", "everything"]
)
@pytest.mark.parametrize("pattern", [Local(3), Global(2) | Local(1) & Causal(), Random(2, block=4)], ids=str)
def test_blocks_under_masks(pattern, kind):
    for queries, keys in ((13, 13), (4, 11)):
        same(blocks, *inputs(queries, keys), scope_of(pattern, queries, keys, **masks(kind, queries, keys)), block=4)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 12, 63, 64, 65])
def test_blocks_of_any_length(length):
    same(blocks, *inputs(length, length), scope_of(Local(2) | Global(1), length, length), block=4)


@pytest.mark.parametrize("kind", ["no mask", "key_mask", "mask", "mask over heads", "mask of one row", "everything"])
@pytest.mark.parametrize("pattern", [Full(), Causal(), Local(2)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 7), (3, 8), (1, 1)])
def test_fused_under_masks(pattern, kind, queries, keys):
    same(fused, *inputs(queries, keys), scope_of(pattern, queries, keys, **masks(kind, queries, keys)))


def test_fused_without_groups_and_with_one():
    for groups in (HEADS, 1):
        for queries in (1, 7):
            same(fused, *inputs(queries, 7, groups=groups), scope_of(Causal(), queries, 7))


class Slope(Score, torch.nn.Module):
    """A learned slope for each head."""

    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.randn(HEADS, dtype=torch.float64))
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, scores, query, key):
        return scores + self.slope[query.head] * (query.index - key.index)

    __call__ = torch.nn.Module.__call__


@pytest.mark.parametrize("kernel", [blocks, fused])
def test_a_score_enters_every_kernel_with_its_parameters(kernel):
    q, k, v = inputs(11, 11)
    same(kernel, q, k, v, scope_of(Local(4), 11, 11, score=Alibi(HEADS)))
    score = Slope()
    scope = scope_of(Local(4), 11, 11, score=score)
    same(kernel, q, k, v, scope)
    grads = [torch.autograd.grad(run(q, k, v, scope).square().sum(), score.slope)[0] for run in (kernel, dense)]
    torch.testing.assert_close(*grads)


def test_alibi_slopes_are_the_papers():
    assert Alibi(8).slopes() == [2.0**-i for i in range(1, 9)]
    assert Alibi(6).slopes() == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    scores = Alibi(8)(torch.zeros(1, 8, 2, 5), *places(8, 2, 5, torch.device("cpu")))
    assert scores[0, 0].tolist() == [[-1.5, -1.0, -0.5, 0.0, -0.5], [-2.0, -1.5, -1.0, -0.5, 0.0]]


def test_blocks_passes_gradcheck_with_masks_score_and_dropout():
    q, k, v = inputs(5, 5, batch=1)
    facts = masks("everything", 5, 5, batch=1)
    scope = scope_of(Local(1) | Global(1), 5, 5, score=Alibi(HEADS), dropout=0.3, **facts)

    def seeded(*tensors):
        torch.manual_seed(0)  # the same keys are dropped each time
        return blocks(*tensors, scope, block=3)

    assert torch.autograd.gradcheck(seeded, (q, k, v))


@pytest.mark.parametrize("kernel", [dense, fused, blocks])
def test_dropout_keeps_the_mean_and_drops_single_weights(kernel):
    q, k = (tensor.detach().expand(2000, -1, -1, -1) for tensor in inputs(6, 6, batch=1)[:2])
    v = torch.eye(6, dtype=torch.float64).expand(2000, GROUPS, 6, 6)  # the output is the weights
    draws = kernel(q, k, v, scope_of(Full(), 6, 6, dropout=0.4))
    wanted = dense(q[:1], k[:1], v[:1], scope_of(Full(), 6, 6))[0]
    assert ((draws == 0).double().mean(0) - 0.4).abs().max() < 0.06
    torch.testing.assert_close(draws.mean(0), wanted, atol=0.03, rtol=0)
    torch.testing.assert_close(draws.max(0).values, wanted / 0.6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_in_float32(dtype):
    q, k, v = (tensor.detach() for tensor in inputs(64, 64, dtype=dtype))
    wanted = dense(*(tensor.double() for tensor in (q, k, v)), scope_of(Local(40), 64, 64))
    for kernel in (dense, blocks):
        out = kernel(q, k, v, scope_of(Local(40), 64, 64))
        assert out.dtype == dtype
        assert (out - wanted).abs().max() <= torch.finfo(dtype).eps * wanted.abs().max()


def test_attend_takes_the_kernel_that_fits_and_hides_what_the_key_mask_hides():
    q, k, v = inputs(9, 9)
    for pattern in (Full(), Causal(), Local(2) & Causal()):
        key_mask = torch.rand(2, 9) > 0.3
        dirty = [tensor.detach().masked_fill(~key_mask[:, None, :, None], float("nan")) for tensor in (k, v)]
        wanted = dense(q, k, v, scope_of(pattern, 9, 9, key_mask=key_mask))
        torch.testing.assert_close(attend(q, *dirty, pattern, key_mask=key_mask), wanted)
        torch.testing.assert_close(attend(q, k, v, pattern, key_mask=key_mask.long()), wanted)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ([(2, 6, 5), (2, 2, 5, 4), (2, 2, 5, 4)], "4-D"),
        ([(2, 6, 5, 4), (2, 4, 5, 4), (2, 4, 5, 4)], "divide"),
        ([(2, 6, 5, 4), (2, 2, 5, 3), (2, 2, 5, 4)], "agree"),
        ([(2, 6, 5, 4), (2, 2, 5, 4), (2, 2, 6, 4)], "agree"),
        ([(2, 6, 5, 4), (2, 2, 4, 4), (2, 2, 4, 4)], "5 queries do not fit into 4 keys"),
    ],
)
def test_attend_names_shapes_that_do_not_fit(sizes, says):
    with pytest.raises(ValueError, match=says):
        attend(*(torch.zeros(size) for size in sizes), Causal())


def test_attend_refuses_documents_where_places_matter():
    q, k, v = inputs(5, 5)
    with pytest.raises(NotSupportedError, match="places of the whole sequence"):
        attend(q, k, v, Global(1), documents=torch.zeros(2, 5, dtype=torch.long))


def test_gradients_under_autocast_are_those_without():
    q, k, v = inputs(20, 20, dtype=torch.float32)
    out = blocks(q, k, v, scope_of(Local(4), 20, 20)).square().sum()
    wanted = torch.autograd.grad(out, (q, k, v), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(torch.autograd.grad(out, (q, k, v)), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", range(4))
def test_blocks_differentiates_what_asks_for_it_and_nothing_else(frozen):
    score = Slope()
    tensors = [*inputs(9, 9), score.slope]
    tensors[frozen].requires_grad_(False)
    learns = [tensor for tensor in tensors if tensor.requires_grad]
    scope = scope_of(Local(2), 9, 9, score=score)
    grads = [torch.autograd.grad(run(*tensors[:3], scope).square().sum(), learns) for run in (blocks, dense)]
    torch.testing.assert_close(*grads)


def test_blocks_computes_again_with_the_parameters_of_the_call():
    score, other = Slope(), torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    q, k, v = inputs(9, 9)

    class Model(torch.nn.Module):
        def __init__(self, kernel):
            super().__init__()
            self.score, self.kernel = score, kernel

        def forward(self):
            return self.kernel(q, k, v, scope_of(Local(2), 9, 9, score=self.score))

    grads = []
    for kernel in (blocks, dense):
        out = torch.func.functional_call(Model(kernel), {"score.slope": other}, ())
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v, other)))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("pattern", [Local(1), Random(2, block=4)], ids=str)
def test_a_score_is_asked_only_for_places_that_exist(pattern):
    class Table(Score):
        def __call__(self, scores, query, key):
            return scores + torch.arange(39, dtype=scores.dtype)[key.index]

    same(blocks, *inputs(39, 39), scope_of(pattern, 39, 39, score=Table()), block=4)


@pytest.mark.parametrize("pattern", [Local(2) | Marked(), Random(2, block=4) | Marked()], ids=str)
def test_a_score_knows_which_tokens_are_marked(pattern):
    class More(Score):
        def __call__(self, scores, query, key):
            return scores + key.marked - 2.0 * query.marked * key.marked

    marked = torch.rand(2, 30) < 0.3
    query, key = places(HEADS, 30, 30, torch.device("cpu"), marked)
    same(blocks, *inputs(30, 30), Scope(pattern, query, key, marked=marked, score=More()), block=4)


@pytest.mark.parametrize("module", [False, True])
def test_a_score_may_compute_with_tensors_that_are_no_parameters(module):
    class Bias(Score):
        def __init__(self, numbers):
            super().__init__()
            self.numbers = numbers

        def forward(self, scores, query, key):
            return scores + self.numbers[query.head]

        __call__ = forward

    made = type("Layer", (Bias, torch.nn.Module), {}) if module else Bias
    (q, k, v), grads = (tensor.detach() for tensor in inputs(9, 9)), []
    for kernel in (blocks, dense):
        numbers = torch.linspace(0, 1, HEADS, dtype=torch.float64).requires_grad_()
        kernel(q, k, v, scope_of(Local(2), 9, 9, score=made((numbers * 2).sin()))).square().sum().backward()
        grads.append(numbers.grad)
    assert grads[0] is not None
    torch.testing.assert_close(*grads)


def test_a_score_may_write_to_what_it_gets():
    class Less(Score):
        def __call__(self, scores, query, key):
            scores -= (query.index - key.index).abs()
            return scores

    q, k, v = inputs(9, 9)
    scope, right = (scope_of(Local(3), 9, 9, score=score) for score in (Less(), DistanceOff()))
    out, wanted = blocks(q, k, v, scope), dense(q, k, v, right)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted)))


class DistanceOff(Score):
    def __call__(self, scores, query, key):
        return scores - (query.index - key.index).abs()


def test_a_learned_score_serves_several_threads():
    """Each gets its gradient, and the module keeps its parameters."""
    score, (q, k, v) = Slope(), (tensor.detach() for tensor in inputs(60, 60))

    def work():
        for _ in range(8):
            blocks(q, k, v, scope_of(Local(4), 60, 60, score=score), block=4).square().sum().backward()

    totals = []
    for at_once in (False, True):
        score.slope.grad = None
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
            if not at_once:
                thread.join()
        for thread in threads:
            thread.join()
        totals.append(score.slope.grad)
    torch.testing.assert_close(*totals)
    assert isinstance(score.slope, torch.nn.Parameter)


def test_the_default_device_plays_no_part():
    q, k, v = inputs(40, 40)
    wanted = blocks(q, k, v, scope_of(Local(3) | Random(1, block=4), 40, 40), block=4)
    documents = torch.arange(40).expand(2, -1) // 9
    packed = blocks(q, k, v, scope_of(Local(3), 40, 40, documents=documents), block=4)
    scopes = scope_of(Local(3) | Random(1, block=4), 40, 40), scope_of(Local(3), 40, 40, documents=documents)
    plan_kernel._remembered.cache_clear()
    with torch.device("meta"):
        torch.testing.assert_close(blocks(q, k, v, scopes[0], block=4), wanted)
        torch.testing.assert_close(blocks(q, k, v, scopes[1], block=4), packed)


def test_what_is_explained_in_one_thread_is_computed_in_another():
    q, k, v = (tensor.detach() for tensor in inputs(9, 9))
    scope, outs = scope_of(Local(2), 9, 9), []
    with explained():
        thread = threading.Thread(target=lambda: outs.append(fastest(q, k, v, scope)))
        thread.start()
        thread.join()
    torch.testing.assert_close(outs[0], dense(q, k, v, scope))


@pytest.mark.filterwarnings("ignore")  # what the tracer warns of
@pytest.mark.parametrize("name", ["gqa", "local", "bigbird"])
def test_modules_can_be_traced(name):
    attn = build(name, d_model=8, num_heads=2, **({"num_kv_heads": 1} if name == "gqa" else {})).eval()
    x = torch.randn(1, 300, 8)
    torch.testing.assert_close(torch.jit.trace(attn, (x,))(x), attn(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", [fused, blocks])
def test_gradients_in_half_precision_are_as_good_as_a_plain_implementations(kernel, dtype):
    torch.manual_seed(0)
    sizes = (HEADS, GROUPS, GROUPS)
    q, k, v = (torch.randn(1, heads, 300, 64, dtype=dtype, requires_grad=True) for heads in sizes)
    scope = scope_of(Causal(), 300, 300)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    right = torch.autograd.grad(dense(*wide, scope).sum(), wide)
    errors = []
    for run in (kernel, plain_in_half):
        grads = torch.autograd.grad(run(q, k, v, scope).sum(), (q, k, v))
        errors.append([float((grad - exact).abs().max()) for grad, exact in zip(grads, right, strict=True)])
    for ours, plain, exact in zip(*errors, right, strict=True):
        assert ours <= 2 * plain + 1e-5 * float(exact.abs().max())


def plain_in_half(q, k, v, scope):
    """As one would write it: products in half precision, softmax in float32."""
    k, v = (tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).float().masked_fill(~scope.visible(), -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def test_second_derivatives_are_refused_also_beside_a_residual():
    attn = build("local", d_model=8, num_heads=2, radius=2, block=4)
    x = torch.randn(1, 5, 8, requires_grad=True)
    with pytest.raises(NotSupportedError, match="first derivatives only"):
        torch.autograd.grad((x + attn(x)).square().sum(), x, create_graph=True)


def test_a_block_larger_than_the_sequence_is_no_larger():
    same(blocks, *inputs(5, 5), scope_of(Local(1), 5, 5), block=10**9)


@pytest.mark.parametrize(("change", "says"), [({"block": 0}, "block"), ({"pattern": "Local(1)"}, "pattern must be")])
def test_attend_names_what_is_no_pattern_and_no_block(change, says):
    q, k, v = inputs(5, 5)
    with pytest.raises(ValueError, match=says):
        attend(q, k, v, **{"pattern": Local(1), **change})
    with pytest.raises(ValueError, match="one dtype"):
        attend(q, k.float(), v)


@pytest.mark.parametrize("fact", ["key_mask", "mask", "documents"])
def test_a_mask_that_is_changed_before_backward_is_noticed(fact):
    q, k, v = inputs(9, 9)
    facts = masks("everything", 9, 9)
    facts["documents"] = facts["documents"].clone()
    out = blocks(q, k, v, scope_of(Local(2), 9, 9, **facts)).square().sum()
    facts[fact].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize(
    ("pattern", "length", "facts", "kernel"),
    [
        (Causal(), 4096, {}, "fused"),
        (Causal(), 32, {"dropout": 0.1}, "fused"),
        (Causal(), 1024, {"dropout": 0.1}, "blocks"),
        (Causal(), 32, {"score": Alibi(HEADS)}, "dense"),
        (Causal(), 1024, {"score": Alibi(HEADS)}, "blocks"),
        (Causal(), 1024, {"documents": torch.arange(1024)[None] // 300}, "blocks"),
        (Local(64), 1024, {}, "blocks"),
        (Local(64), 100, {}, "fused"),
        (Local(64), 100, {"dropout": 0.1}, "blocks"),
        (Random(4), 4096, {}, "blocks"),  # touches nearly all, but a mask of all pairs would be large
        (Local(64), 0, {}, "dense"),
    ],
)
def test_the_kernel_is_chosen_by_what_the_scope_needs_and_by_size(pattern, length, facts, kernel):
    q, k = torch.zeros(1, HEADS, length, 8), torch.zeros(1, GROUPS, length, 8)
    scope = scope_of(pattern, length, length, **facts)
    assert choose(q, k, k, scope).kernel == kernel
    with explained() as choices:
        fastest(q, k, k, scope)
    assert choices == [choose(q, k, k, scope)]


def test_one_query_needs_no_plan():
    scope = scope_of(Local(64), 1, 1024)
    k = torch.zeros(1, GROUPS, 1024, 8)
    assert choose(torch.zeros(1, HEADS, 1, 8), k, k, scope).kernel == "fused"


@pytest.mark.parametrize(
    "pattern", [Local(40), Local(9) | Global(3), Random(1, block=16), Causal() & Local(70)], ids=str
)
def test_every_choice_gives_the_same(pattern):
    for length in (33, 90, 200):
        q, k, v = inputs(length, length)
        wanted = fastest(q, k, v, scope_of(pattern, length, length), block=16)
        torch.testing.assert_close(blocks(q, k, v, scope_of(pattern, length, length), block=16), wanted)
        torch.testing.assert_close(dense(q, k, v, scope_of(pattern, length, length)), wanted)


@pytest.mark.parametrize("batch", [1, 3])
def test_blocks_under_marks(batch):
    """Marks differ between sequences, and reach rows and columns beyond the window."""
    marked = torch.zeros(batch, 23, dtype=torch.bool)
    marked[torch.arange(batch), 5 * torch.arange(batch) + 2] = True
    for pattern in (Local(2) | Marked(mutual=True), Causal() | Marked(), Random(1, block=4) | Marked(mutual=True)):
        query, key = places(HEADS, 23, 23, torch.device("cpu"), marked)
        same(blocks, *inputs(23, 23, batch=batch), Scope(pattern, query, key, marked=marked), block=4)


def test_many_sequences_are_computed_some_at_a_time():
    facts = masks("everything", 200, 200, batch=40)
    scope = scope_of(Local(60), 200, 200, score=Alibi(HEADS), **facts)
    same(blocks, *inputs(200, 200, batch=40), scope)


def test_plans_are_remembered_by_value_and_hold_one_mask_for_all_alike():
    remembered = scope_of(Local(100), 5000, 5000)
    made = plan(remembered, HEADS, GROUPS, 64, torch.device("cpu"))
    assert plan(scope_of(Local(100), 5000, 5000), HEADS, GROUPS, 64, torch.device("cpu")) is made
    hidden = {part.hidden.untyped_storage().data_ptr() for rows in made.parts for part in rows.partial}
    assert len(hidden) <= 10
