"""Changes to the package's own lines, each a fault that somebody could write, and the variant that shows it."""

import contextlib
import doctest
import functools
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnzoo.kernels import fused as fused_kernel
from attnzoo.kernels import plan
from attnzoo.kernels.blocks import blocks
from attnzoo.kernels.fused import fused
from tests.mutants.mutant import Mutant
from tests.mutants.sound import Marking

LOCAL = ("local", {"radius": 4, "block": 3})
NARROW = ("local", {"radius": 1, "block": 2})
GLOBAL = ("local", {"radius": 1, "global_tokens": 2, "block": 4, "num_kv_heads": 2})
BIGBIRD = ("bigbird", {"block": 2, "random_blocks": 1})
BIGBIRD_IN_GROUPS = ("bigbird", {"block": 2, "random_blocks": 1, "num_kv_heads": 2})
RANDOM = ("random_sparse", {"keys": 4, "block": 2})
REDRAW = ("random_sparse", {"keys": 3, "redraw": True})
GQA = ("gqa", {"num_kv_heads": 2})
FUSED = ("fused_qkv", {"num_kv_heads": 2})
VANILLA = ("vanilla", {})
CACHED = ("kv_cached", {"num_kv_heads": 2})
MARKING = (Marking, {})
PREFIX = ("sparse", {"pattern": "Causal() | Marked()", "block": 4})


@contextlib.contextmanager
def _changed(place: str, texts: list[tuple[str, str]]) -> Iterator[None]:
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(f"attnzoo.{module}")
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    found = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
    function = inspect.unwrap(found)
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]
    for old, new in texts:
        assert source.count(old) == 1, f"{place} has {source.count(old)} times {old!r}"
        source = source.replace(old, new)
    names: dict[str, Any] = {}
    exec("class Home:\n" + textwrap.indent(source, "    "), function.__globals__, names)
    changed = vars(names["Home"])[function.__name__]
    before, function.__code__ = function.__code__, changed.__code__
    try:
        yield
    finally:
        function.__code__ = before


@contextlib.contextmanager
def _made(places: dict[str, list[tuple[str, str]]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for place, texts in places.items():
            stack.enter_context(_changed(place, texts))
        for module in (fused_kernel, plan):
            stack.callback(module._remembered.cache_clear)
            module._remembered.cache_clear()
        yield


def pictures() -> None:
    """The pictures of patterns, typed by hand in their docstrings."""
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(importlib.import_module("attnzoo.patterns")):
        runner.run(test, out=lambda _: None)
    assert not runner.summarize(verbose=False).failed


def half_gradients(kernel: Callable[..., torch.Tensor]) -> None:
    """Gradients in half precision, at a length where sums in half precision show."""
    tests = importlib.import_module("tests.test_kernels")
    tests.test_gradients_in_half_precision_are_as_good_as_a_plain_implementations(kernel, torch.bfloat16)


def asserting(module: str, test: str) -> Callable[[], None]:
    """A test of another file."""
    return lambda: getattr(importlib.import_module(module), test)()


def _change(
    name: str, variant: tuple[Any, dict[str, Any]], *texts: str,
    caught: tuple[str, ...] = (), witness: Callable[[], object] | None = None,
) -> Mutant:  # fmt: skip
    """A mutant in which, in a function at `module:function` or `module:Class.method`, a text stands for another; they
    follow each other: place, old, new, place, old, new ..."""
    places: dict[str, list[tuple[str, str]]] = {}
    for place, old, new in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
        places.setdefault(place, []).append((old, new))
    checks = tuple(f"check_{check}" for check in caught)
    return Mutant(name, *variant, functools.partial(_made, places), checks, witness)


CHANGES = [
    # Which pairs
    _change(
        "window one too narrow, kernel and pattern alike", LOCAL,
        "patterns:Local.sees", "(query.index - key.index).abs() <=", "(query.index - key.index).abs() <",
        "patterns:Local.touches", "(before <= self.radius) & (after <=", "(before < self.radius) & (after <",
        "patterns:Local.covers", "(before <= self.radius) & (after <=", "(before < self.radius) & (after <",
        witness=pictures,
    ),
    _change(
        "heads draw alike, kernel and pattern alike", BIGBIRD,
        "patterns:Random.sees", "stretch, query.head)", "stretch, 0 * query.head)",
        witness=asserting(
            "tests.test_patterns", "test_draws_are_distinct_spread_out_and_their_own_for_each_head_seed_and_row"
        ),
    ),
    _change(
        "window too narrow in the block table", LOCAL,
        "patterns:Local.touches", "(before <= self.radius) & (after <=", "(before < self.radius) & (after <",
        caught=("cached_equals_full",),
    ),
    _change(
        "window too wide in whole blocks", ("sparse", {"pattern": "Local(4) | Random(1, block=4, near=1)", "block": 4}),
        "patterns:Local.covers", "keys.last // self.block - queries.first", "keys.first // self.block - queries.first",
        caught=("gradients_are_those_of_the_pattern",),
    ),
    _change(
        "causal blocks leak", LOCAL,
        "patterns:Causal.covers", "keys.last <= queries.first", "keys.first <= queries.first",
        caught=("cached_equals_full",),
    ),
    _change(
        "causal blocks cut the diagonal", LOCAL,
        "patterns:Causal.touches", "keys.first <=", "keys.last <=",
        caught=("cached_with_masks",),
    ),
    _change(
        "whole blocks count as global", GLOBAL,
        "patterns:Global.covers", "queries.last <", "queries.first <",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "marks only of the first sequence", NARROW,
        "kernels.plan:runs", "[1].any(0)", "[1][0].bool()",
        caught=("masks_combine",),
    ),
    _change(
        "marked queries see nothing more", LOCAL,
        "patterns:Marked.sees", "query.marked | key.marked if", "key.marked if",
        witness=pictures,
    ),
    _change(
        "drawn blocks missed", RANDOM,
        "patterns:Random.touches", "for query in rows for key", "for query in rows[:0] for key",
        caught=("any_length",),
    ),
    _change(
        "union where both must hold", LOCAL,
        "patterns:Pair.touches", "self.join(", "torch.logical_and(",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "top-left causality", GQA,
        "kernels.fused:fused", "q.shape[2] == k.shape[2]:", "q.shape[2] > 1:",
        caught=("cached_equals_full",),
    ),
    _change(
        "queries stand at the start", CACHED,
        "scope:places", "torch.arange(key_length - query_length, key_length,", "torch.arange(query_length,",
        caught=("cached_equals_full",),
    ),
    _change(
        "two queries count as the last", CACHED,
        "scope:Scope.all_visible", "query_length <= 1", "query_length <= 2",
        caught=("cached_equals_full",),
    ),
    _change(
        "marks of the first keys for the last queries", MARKING,
        "scope:places", "marked[:, None, key_length - query_length :, None]", "marked[:, None, :query_length, None]",
        caught=("cached_with_masks",),
    ),
    # Masks
    _change(
        "mask turned round", VANILLA,
        "scope:Scope._less", "seen & mask", "seen & ~mask",
        caught=("masks_combine",),
    ),
    _change(
        "mask forgotten", VANILLA,
        "scope:Scope._less", "seen & mask", "seen",
        caught=("masks_combine",),
    ),
    _change(
        "mask forgotten in runs of keys", LOCAL,
        "kernels.parts:Rows._masks", "if scope.mask is not None:", "if False:",
        caught=("masks_combine",),
    ),
    _change(
        "first mask for all sequences", LOCAL,
        "kernels.parts:Rows._masks", "scope.mask[(slice(None),", "scope.mask[(slice(1),",
        caught=("masks_combine",),
    ),
    _change(
        "mask of the wrong head", LOCAL,
        "kernels.parts:Rows._masks", "(self.heads, self.rows, run)", "(slice(1), self.rows, run)",
        caught=("masks_combine",),
    ),
    _change(
        "mask forgotten in single blocks", BIGBIRD,
        "scope:Scope.less", "mask = mask[:, head, row, column]", "mask = None",
        caught=("masks_combine",),
    ),
    _change(
        "mask rows not moved to the end", BIGBIRD,
        "scope:Scope.less", "query.index - offset", "query.index",
        caught=("cached_with_masks",),
    ),
    _change(
        "key mask forgotten", VANILLA,
        "scope:Scope._less", "seen & self.key_mask[:, key.index]", "seen",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "documents forgotten in runs of keys", GQA,
        "kernels.parts:Rows._masks", "if scope.documents is not None:", "if False:",
        caught=("masks_combine",),
    ),
    _change(
        "documents forgotten", VANILLA,
        "scope:Scope._less", "self.documents[:, query.index] ==", "self.documents[:, key.index] ==",
        caught=("masks_combine",),
    ),
    _change(
        "only one is true", VANILLA,
        "scope:_as_bool", "mask != 0", "mask == 1",
        caught=("whole_numbers_are_masks",),
    ),
    _change(
        "float masks taken", VANILLA,
        "scope:_as_bool",
        "(torch.bool, *WHOLE)",
        "(torch.bool, *WHOLE, torch.float32, torch.float64, torch.float16, torch.bfloat16)",
        caught=("float_masks_are_refused",),
    ),
    _change(
        "a square mask by batch", VANILLA,
        "scope:check_mask",
        "if mask.shape == full[2:]:",
        "if mask.shape == (batch, keys) and batch == queries:\n        return mask[:, None, None]\n    if "
        "mask.shape == full[2:]:",
        caught=("cached_with_masks",),
    ),
    _change(
        "three axes taken as batch", VANILLA,
        "scope:check_mask",
        "if mask.shape == full[2:]:",
        "if mask.dim() == 3 and mask.shape[1:] == full[2:] and len(mask) == batch:\n        return mask[:, "
        "None]\n    if mask.shape == full[2:]:",
        caught=("other_mask_shapes_are_refused",),
    ),
    _change(
        "one column for all keys", VANILLA,
        "scope:_by_token", "mask.shape != (batch, keys)", "mask.shape not in ((batch, keys), (batch, 1))",
        caught=("other_mask_shapes_are_refused",),
    ),
    # Nothing to see, and padding
    _change(
        "nothing to see gives the mean", VANILLA,
        "variants.vanilla:Vanilla.attend", ".softmax(dim=-1).masked_fill(hidden, 0)", ".softmax(dim=-1)",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "nothing to see gives all, fused", GQA,
        "kernels.fused:fused", "out if seen is None else out.masked_fill(~seen, 0)", "out",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "padding projected as it is", GQA,
        "attention:Attention._open",
        "self.projection.self_entries(self, _hide(x, own))",
        "self.projection.self_entries(self, x)",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "padding of a context projected as it is", GQA,
        "attention:Attention._open", "_hide(values, own)", "values",
        caught=("padding_of_context_cannot_be_felt",),
    ),
    _change(
        "padding of a block is seen", BIGBIRD,
        "kernels.plan:_Planner._gathered", "partial |= filled_up[1] & (blocks == last_block)", "pass",
        caught=("output_is_what_the_pattern_says",),
    ),
    # Numbers
    _change(
        "scale left out", VANILLA,
        "variants.vanilla:Vanilla.attend", "/ math.sqrt(self.head_dim)", "",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "scale of the model's width", GQA,
        "kernels.fused:fused", "dtype, shared = q.dtype,", "q = q * 6 ** -0.5; dtype, shared = q.dtype,",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "groups tiled", FUSED,
        "projections:Fused.self_entries",
        "self.split(q)",
        "self.split(q).unflatten(1, (-1, self.groups)).transpose(1, 2).flatten(1, 2)",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "groups tiled in blocks", BIGBIRD_IN_GROUPS,
        "kernels.plan:_Planner._gathered", "head // self.group", "head % (self.heads // self.group)",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "heads read in another order in blocks", GLOBAL,
        "kernels.parts:Rows.queries", "x[:, self.heads, self.rows]", "x[:, self.heads, self.rows].flip(1)",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "one mask for all of a shape", LOCAL,
        "kernels.plan:_Planner._kept", "hidden.cpu().numpy().tobytes(), hidden.shape", "b'', hidden.shape",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "the last key of a run left out", LOCAL,
        "kernels.plan:_Planner._trimmed", "int(by_any[-1]) + 1", "max(1, int(by_any[-1]))",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "another pattern in a graph", LOCAL,
        "kernels.operator:_call", "meaning(formula)", "meaning('Full()')",
        caught=("compiles",),
    ),
    _change(
        "heads interleaved on the way out", GQA,
        "projections:Projection.output", "heads.transpose(1, 2)", "heads.permute(0, 2, 3, 1)",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "keys detached", VANILLA,
        "variants.vanilla:Vanilla.attend", "k.to(wide)", "k.to(wide).detach()",
        caught=("gradients_are_those_of_the_pattern",),
    ),
    _change(
        "keys detached in blocks", LOCAL,
        "kernels.products:gradients", "some.add(part, some_k, narrow, weights.queries)", "pass",
        caught=("gradients_are_those_of_the_pattern",),
    ),
    _change(
        "values from the context", VANILLA,
        "attention:Attention._open", "_hide(values, own)", "_hide(context, own)",
        caught=("cross_attention",),
    ),
    _change(
        "rotary turned the other way for keys", GQA,
        "attention:Attention._open",
        "rotate(x, *turn) for x",
        "rotate(x, turn[0], turn[1] * (1 if x is q else -1)) for x",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "rotary counts padding", GQA,
        "positions:count_visible",
        "(key_mask.cumsum(-1) - key_mask.long()).clamp(min=0)",
        "torch.arange(length, device=device)[None]",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "documents go on counting", GQA,
        "positions:count_visible", "before - first_before", "before",
        caught=("cached_with_masks",),
    ),
    _change(
        "no distance for later keys", GQA,
        "scores:Alibi.__call__", ".abs()", ".clamp(min=0)",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "no score in blocks", LOCAL,
        "kernels.products:_Sequences.weights", "if self.scope.score is not None:", "if False:",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "weights of other heads", VANILLA,
        "attention:Attention.weights", "q[:, head][:, :, query]", "q[:, head.sort().values][:, :, query]",
        caught=("weights_are_those_of_the_pattern",),
    ),
    _change(
        "documents joined where they are shown", VANILLA,
        "attention:Attention._open", "documents = check_documents(documents, batch, queries, keys)", "documents = None",
        caught=("masks_combine",),
    ),
    # Precision
    _change(
        "softmax in half precision", VANILLA,
        "variants.vanilla:Vanilla.attend", "torch.promote_types(q.dtype, torch.float32)", "q.dtype",
        caught=("softmax_is_wide",),
    ),
    _change(
        "scores of bfloat16 precision", VANILLA,
        "variants.vanilla:Vanilla.attend", "scores = q.to(wide)", "scores = q.bfloat16().to(wide)",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "gradients summed in half precision", LOCAL,
        "kernels.products:gradients", "dtype=_wide(x)", "dtype=x.dtype",
        witness=functools.partial(half_gradients, functools.partial(blocks, block=4)),
    ),
    _change(
        "half precision on a CPU", GQA,
        "kernels.fused:fused", "q, k, v = q.float(), k.float(), v.float()", "pass",
        witness=functools.partial(half_gradients, fused),
    ),
    _change(
        "single precision for doubles", LOCAL,
        "kernels.products:_wide", "torch.promote_types(x.dtype, torch.float32)", "torch.float32",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "output left in single precision", VANILLA,
        "variants.vanilla:Vanilla.attend", ".to(v.dtype)", ".float()",
        caught=("output_is_what_the_pattern_says",),
    ),
    # Decoding
    _change(
        "cache off by one", CACHED,
        "ring:Ring.read", "[:, :, :rows]", "[:, :, 1 : rows + 1]",
        caught=("cached_equals_full",),
    ),
    _change(
        "rotary starts anew at each piece", CACHED,
        "attention:Attention._open", "x.device, before)", "x.device)[:, : x.shape[1]]",
        caught=("cached_equals_full",),
    ),
    _change(
        "hidden tokens come back", CACHED,
        "cache:Cache.commit", "if self._hidden is not None:", "if False:",
        caught=("hidden_tokens_stay_hidden",),
    ),
    _change(
        "later masks ignored", CACHED,
        "cache:Cache.joined_mask", "seen & key_mask", "seen",
        caught=("cached_with_masks",),
    ),
    _change(
        "a refused call counts", CACHED,
        "cache:Cache.check",
        "if batch != self.batch_size:",
        "self._ring.length += queries * (batch != self.batch_size)\n    if batch != self.batch_size:",
        caught=("refused_calls_change_no_cache",),
    ),
    _change(
        "crop forgets nothing", CACHED,
        "ring:Ring.crop", "self.length = length", "pass",
        caught=("crop_and_reset",),
    ),
    _change(
        "crop to anywhere", CACHED,
        "cache:Cache.crop", "0 <= length <= self.length", "0 <= length",
        caught=("crop_and_reset",),
    ),
    _change(
        "values stay when reordered", CACHED,
        "ring:Ring.reorder",
        "stored.index_select(0, index) for",
        'stored.index_select(0, index if name == "keys" else torch.arange(len(stored))) for',
        caught=("reorder",),
    ),
    _change(
        "hidden tokens stay when reordered", CACHED,
        "cache:Cache.reorder", "self._hidden.index_select(0, index)", "self._hidden",
        caught=("reorder",),
    ),
    _change(
        "marked tokens dropped", LOCAL,
        "ring:Ring.append", "if leaving:", "if False:",
        caught=("marked_tokens_are_kept",),
    ),
    _change(
        "a note for each token that may come", LOCAL,
        "cache:Cache.__init__",
        "self._hidden: Tensor | None = None",
        "self._hidden = torch.inference_mode(False)(torch.zeros)(batch_size, max_length, dtype=torch.bool)",
        caught=("a_window_bounds_its_cache",),
    ),
    _change(
        "crop to where the window was dropped", LOCAL,
        "cache:Cache.crop", "ring.first < length < least", "False",
        caught=("crop_beyond_rewind_is_refused",),
    ),
    _change(
        "own keys detached", CACHED,
        "ring:Ring.read", "tensor], dim=2)", "tensor.detach()], dim=2)",
        caught=("cached_keys_are_detached",),
    ),
    _change(
        "buffers of inference mode", CACHED,
        "ring:Ring.__init__",
        "torch.inference_mode(False)",
        "torch.inference_mode(torch.is_inference_mode_enabled())",
        caught=("inference_mode_does_not_stick",),
    ),
    _change(
        "an empty cache is none", CACHED,
        "attention:Attention.forward", "if cache is not None:", "if cache is not None and cache.length:",
        caught=("cached_equals_full",),
    ),
    _change(
        "marks after the first piece", PREFIX,
        "attention:Attention._open", "and before and not self.causal", "and False",
        caught=("cached_with_masks",),
    ),
    # Chance
    _change(
        "dropout in eval", VANILLA,
        "attention:Attention._open", "self.dropout if self.training else 0.0", "self.dropout",
        caught=("random_state_is_left_alone",),
    ),
    _change(
        "no dropout", VANILLA,
        "variants.vanilla:Vanilla.attend", "F.dropout(weights, scope.dropout)", "weights",
        caught=("dropout_is_for_training",),
    ),
    _change(
        "no dropout in blocks", LOCAL,
        "kernels.products:_Sequences.weights", "if self.scope.dropout:", "if False:",
        caught=("dropout_is_for_training",),
    ),
    _change(
        "dropout without its scale in blocks", LOCAL,
        "kernels.products:_Sequences.weights", " / (1 - self.scope.dropout)", "",
        caught=("dropout_keeps_the_mean",),
    ),
    _change(
        "other drops in backward", LOCAL,
        "kernels.products:_Sequences.weights", "generator=generator, ", "",
        caught=("dropout_is_the_same_in_backward",),
    ),
    _change(
        "nothing drawn anew", REDRAW,
        "attention:Attention._open", "if self.redraws else None", "if False else None",
        caught=("redrawn_patterns",),
    ),
    _change(
        "drawn anew in eval", REDRAW,
        "attention:Attention._open", "if self.redraws else None", "if True else None",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "drawn from Python's generator", REDRAW,
        "attention:Attention._salt",
        'torch.randint(2**32, (), device="cpu")',
        "torch.tensor(__import__('random').randrange(2**32))",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "torch's state advanced", RANDOM,
        "patterns:Random.sees", "query_block, key_block =", "torch.rand(()); query_block, key_block =",
        caught=("random_state_is_left_alone",),
    ),
    _change(
        "a draw that depends on the length", RANDOM,
        "patterns:Random.sees", "_hash(self.seed,", "_hash(self.seed + int(key.index.max()),",
        caught=("cached_equals_full",),
    ),
    _change(
        "dense in training", ('random_sparse', {'keys': 2, 'train_only': True}),
        "variants.random_sparse:RandomSparse.current_pattern", "not self.training", "self.training",
        witness=asserting("tests.test_attention", "test_train_only_looks_at_everything_in_eval"),
    ),
    # Sizes and travel
    _change(
        "blocks not filled up", BIGBIRD,
        "kernels.products:_cut",
        "F.pad(x, (0, 0, 0, missing)) if missing else x",
        "x[:, :, : x.shape[2] + missing - size] if missing else x",
        caught=("output_is_what_the_pattern_says",),
    ),
    _change(
        "an empty piece fails", LOCAL,
        "kernels.fastest:choose", "q.numel() == 0 or keys == 0", "False",
        "kernels.blocks:applies", " and q.numel() > 0 and k.shape[2] > 0", "",
        caught=("cached_equals_full",),
    ),
    _change(
        "blocks alone in a graph", LOCAL,
        "kernels.blocks:applies", "torch.compiler.is_compiling() or ", "",
        caught=("compiles",),
    ),
    _change(
        "no way through torch.func", LOCAL,
        "kernels.blocks:applies", "level is not None and level() is not None", "False",
        caught=("samples_have_gradients_of_their_own",),
    ),
    _change(
        "keys and values swapped on loading", FUSED,
        "projections:Fused.adapt",
        '[f"{prefix}{name}.{kind}" for name in SEPARATE]',
        '[f"{prefix}{name}.{kind}" for name in ("q_proj", "v_proj", "k_proj")]',
        caught=("other_layout_loads",),
    ),
    _change(
        "keys and values swapped when fused", FUSED,
        "projections:Fused.self_entries", "q, k, v =", "q, v, k =",
        caught=("output_is_what_the_pattern_says",),
    ),
]  # fmt: skip
