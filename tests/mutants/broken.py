"""Broken variants, most of them in one situation only, so that one check alone notices."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.attention import Attention, PositionKind
from attnzoo.cache import Cache
from attnzoo.errors import OptionError
from attnzoo.kernels.dense import dense
from attnzoo.patterns import Causal, Full, Random
from tests.mutants.mutant import Mutant
from tests.mutants.sound import Drawn, Linear, Marking, Sound

BROKEN: list[Mutant] = []
Call = dict[str, Any]  # the arguments of a call by name


def caught_by(check: str) -> Callable[[type[Attention]], type[Attention]]:
    """Enters a variant with a check that must catch it."""

    def enter(broken: type[Attention]) -> type[Attention]:
        BROKEN.append(Mutant(broken.__name__, broken, {}, contextlib.nullcontext, (f"check_{check}",)))
        return broken

    return enter


class Conditional(Sound):
    """Wrong where `when(self, call)` says so: the output is off, or with `gradient` only the gradient is."""

    when: Callable[["Conditional", Call], bool]
    gradient = False

    def forward(self, x, context=None, *, cache=None, **given):
        call = dict.fromkeys(("values", "key_mask", "mask", "documents"), None)
        call |= {"x": x, "context": context, "cache": cache, "held": 0 if cache is None else cache.length, **given}
        y = super().forward(x, context, cache=cache, **given)
        if not type(self).when(self, call):
            return y
        return 2 * y - y.detach() if self.gradient else y + 0.01


def wrong_when(check: str, *, gradient: bool = False) -> Callable[[Callable[[Conditional, Call], bool]], Any]:
    """Enters a variant that is wrong where the decorated function says so."""

    def enter(when: Callable[[Conditional, Call], bool]) -> Any:
        name = "".join(word.title() for word in when.__name__.split("_"))
        globals()[name] = caught_by(check)(
            type(name, (Conditional,), {"when": when, "gradient": gradient, "__module__": __name__})
        )
        return when

    return enter


def alone(call: Call, *given: str) -> bool:
    """Whether a call has these arguments besides x, and no others."""
    masks = ("context", "values", "key_mask", "mask", "documents", "cache")
    return all((call[name] is not None) == (name in given) for name in masks)


# Masks


@wrong_when("true_means_may_look")
def masks_of_all_true(self, call):
    return alone(call, "key_mask", "mask") and call["mask"].dim() == 2 and bool(call["mask"].all())


@wrong_when("masks_combine")
def a_key_mask_and_a_mask_by_head(self, call):
    return alone(call, "key_mask", "mask") and call["mask"].shape[1] == 6 and not (self.training or self.causal)


@wrong_when("masks_broadcast")
def one_mask_by_head_for_all(self, call):
    return alone(call, "mask") and call["mask"].shape[:2] == (1, self.num_heads) and len(call["x"]) == 3


@wrong_when("sequences_are_alone")
def a_batch_of_one_with_masks(self, call):
    return alone(call, "key_mask", "mask") and call["x"].shape[:2] == (1, 11) and self.num_heads == 6


@wrong_when("equal_sizes_change_no_meaning")
def as_many_tokens_as_heads(self, call):
    return alone(call, "mask") and call["mask"].shape == (self.num_heads, self.num_heads) == call["x"].shape[:2]


@caught_by("float_masks_are_refused")
class FloatKeyMaskTaken(Sound):
    def forward(self, x, context=None, *, key_mask=None, **given):
        if key_mask is not None and key_mask.is_floating_point():
            key_mask = key_mask > 0
        return super().forward(x, context, key_mask=key_mask, **given)


@caught_by("other_mask_shapes_are_refused")
class OneColumnTaken(Sound):
    def forward(self, x, context=None, *, key_mask=None, cache=None, **given):
        if key_mask is not None and cache is context is None and key_mask.shape == (len(x), 1) != x.shape[:2]:
            key_mask = key_mask.expand(-1, x.shape[1])
        return super().forward(x, context, key_mask=key_mask, cache=cache, **given)


@caught_by("gradients_go_where_queries_look")
class GradientToAll(Sound):
    def forward(self, x, context=None, *, key_mask=None, mask=None, **given):
        y = super().forward(x, context, key_mask=key_mask, mask=mask, **given)
        if key_mask is None or mask is None or mask.dim() == 2 or mask.shape[1] == 1:
            return y
        return y + (x - x.detach()).mean((0, 1))


@caught_by("gradient_mode_changes_nothing")
class ZeroWithoutGradients(Sound):
    """Gives zero for hidden queries, on its path without gradients."""

    def attend(self, q, k, v, scope):
        out, fast = dense(q, k, v, scope), not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if scope.key_mask is None or not fast:
            return out
        return out.masked_fill(~scope.key_mask[:, None, -q.shape[2] :, None], 0)


@caught_by("hidden_keys_have_no_weight")
class LowButNotLowest(Sound):
    def attend(self, q, k, v, scope):
        wide, visible = torch.promote_types(q.dtype, torch.float32), scope.visible()
        group = self.num_heads // self.num_kv_heads
        k, v = k.to(wide).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q.to(wide) @ k.mT * self.head_dim**-0.5
        if scope.score is not None:
            scores = scope.score(scores, scope.query, scope.key)
        weights = scores.masked_fill(~visible, -1e4).softmax(-1) * visible.any(-1, keepdim=True)
        return (F.dropout(weights, scope.dropout) @ v.to(wide)).to(v.dtype)


# Nothing to see


@caught_by("queries_that_see_nothing_give_no_gradient")
class RepairedNaN(Sound):
    def attend(self, q, k, v, scope):
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k, v))
        hidden = torch.zeros((), dtype=q.dtype).masked_fill(~scope.visible(), -torch.inf)
        return (q @ k.mT * q.shape[-1] ** -0.5 + hidden).softmax(-1).nan_to_num() @ v


@caught_by("queries_that_see_nothing_get_zero")
class NotQuiteZeroInHalf(Sound):
    def forward(self, x, context=None, *, mask=None, **given):
        y = super().forward(x, context, mask=mask, **given)
        if mask is None or mask.dim() == 4 or x.dtype != torch.bfloat16:
            return y
        return y + 0.01 * (~mask.any(1)).to(y.dtype)[:, None]


@caught_by("queries_that_see_nothing_give_no_gradient")
class GradientOfNothing(Sound):
    def attend(self, q, k, v, scope):
        empty = ~scope.visible().any(-1, keepdim=True)
        return dense(q, k, v, scope) + empty * (q - q.detach()) * (q.dtype == torch.bfloat16)


@wrong_when("queries_that_see_nothing_harm_no_other", gradient=True)
def a_sequence_hidden_whole_in_training(self, call):
    return alone(call, "key_mask") and self.training and not self.dropout and not call["key_mask"].any(1).all()


# Padding


@wrong_when("padding_cannot_be_felt")
def padding_of_nan(self, call):
    return alone(call, "key_mask") and call["x"].dtype == torch.float64 and bool(call["x"].isnan().any())


@wrong_when("padding_in_half_precision_cannot_be_felt")
def padding_of_nan_in_half_precision(self, call):
    return call["x"].dtype.itemsize == 2 and bool(call["x"].isnan().any())


@wrong_when("padding_of_context_cannot_be_felt")
def padding_of_nan_in_a_context(self, call):
    return call["context"] is not None and bool(call["context"].isnan().any())


@caught_by("padding_gets_no_gradient")
class GradientToGarbage(Sound):
    def forward(self, x, context=None, *, key_mask=None, **given):
        y = super().forward(x, context, key_mask=key_mask, **given)
        if key_mask is None or context is not None or not bool((x.detach().abs() == 1e30).any()):
            return y
        return y + (x - x.detach()).nan_to_num().mean(1, keepdim=True)


@wrong_when("padding_on_the_right_changes_nothing")
def much_padding_on_the_right(self, call):
    return alone(call, "key_mask") and not call["key_mask"][:, -8:].any()


@wrong_when("padding_on_the_left_changes_nothing")
def much_padding_on_the_left(self, call):
    return alone(call, "key_mask") and call["x"].shape[1] > 16 and not call["key_mask"][:, :8].any()


@wrong_when("padding_of_context_changes_nothing")
def much_padding_of_a_context(self, call):
    return alone(call, "key_mask", "context") and not call["key_mask"][:, -8:].any()


@caught_by("queries_stand_at_the_end")
class ShownTopLeft(Sound):
    def visible(self, query_length, key_length=None, *, marked=None):
        if not self.causal or key_length is None or key_length <= query_length:
            return super().visible(query_length, key_length, marked=marked)
        return super().visible(key_length, marked=marked)[..., :query_length, :]


# Numbers


@caught_by("output_is_what_the_pattern_says")
class NoScale(Sound):
    def attend(self, q, k, v, scope):
        return dense(q * q.shape[-1] ** 0.5, k, v, scope)


@caught_by("fewer_key_value_heads")
class TiledGroups(Sound):
    def attend(self, q, k, v, scope):
        group = self.num_heads // self.num_kv_heads
        return dense(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), scope)


@caught_by("gradients_in_lower_precision")
class BackwardInHalf(Sound):
    def attend(self, q, k, v, scope):
        if q.requires_grad and q.dtype == torch.float32:
            v.register_hook(lambda gradient: gradient.bfloat16().float())
        return dense(q, k, v, scope)


@wrong_when("output_is_what_the_pattern_says")
def rotary_in_training(self, call):
    return alone(call) and self.training and self.positions == "rotary"


@wrong_when("gradients_are_those_of_the_pattern", gradient=True)
def alibi_in_training(self, call):
    return alone(call) and self.training and self.positions == "alibi"


@wrong_when("documents_are_alone")
def documents_in_one_piece_each(self, call):
    ids = call["documents"]
    return alone(call, "documents") and bool((ids.diff(dim=1) != 0).sum() == 2 * len(ids))


@wrong_when("lower_precision")
def long_sequences_in_single_precision(self, call):
    return call["x"].dtype == torch.float32 and call["x"].shape[1] == 70


@caught_by("later_tokens_change_nothing")
class FaintLeak(Sound):
    def forward(self, x, context=None, *, key_mask=None, mask=None, **given):
        y = super().forward(x, context, key_mask=key_mask, mask=mask, **given)
        leaks = self.causal and key_mask is None and mask is None and x.dtype == torch.float64
        return y + 1e-12 * x.detach().mean(1, keepdim=True) if leaks and x.shape[1] else y


@caught_by("later_tokens_get_no_gradient")
class FaintGradient(Sound):
    def forward(self, x, context=None, *, key_mask=None, mask=None, **given):
        y = super().forward(x, context, key_mask=key_mask, mask=mask, **given)
        leaks = self.causal and key_mask is None and mask is None and x.dtype == torch.float64
        return y + 1e-12 * (x - x.detach()).mean(1, keepdim=True) if leaks and x.shape[1] else y


@caught_by("marked_tokens_may_be_none_all_or_hidden")
class AsManyMarksEverywhere(Marking):
    """Gives sequences without any mark one at their first token."""

    def forward(self, x, context=None, *, marked=None, **given):
        if marked is not None and marked.dtype == torch.bool and marked.shape == x.shape[:2]:
            marked = marked | ((torch.arange(x.shape[1]) == 0) & ~marked.any(1, keepdim=True))
        return super().forward(x, context, marked=marked, **given)


# Decoding


@wrong_when("cached_equals_full")
def a_cache_in_inference_mode(self, call):
    return call["cache"] is not None and torch.is_inference_mode_enabled()


@wrong_when("cached_far_beyond_the_window")
def far_beyond_the_window(self, call):
    return call["held"] > 20


@wrong_when("padded_prompts_decode_as_alone")
def a_left_padded_prompt(self, call):
    return call["cache"] is not None and call["key_mask"] is not None and bool(
        (call["key_mask"].sum(1) + torch.tensor([0, 3, 5]) == call["key_mask"].shape[1]).all()
    )  # fmt: skip


@caught_by("cached_masks_may_change")
class FirstMaskStays(Sound):
    def forward(self, x, context=None, *, key_mask=None, cache=None, **given):
        if cache is not None and cache.length and key_mask is not None:
            key_mask = torch.cat([torch.ones_like(key_mask[:, : cache.length]), key_mask[:, cache.length :]], dim=1)
        return super().forward(x, context, key_mask=key_mask, cache=cache, **given)


class NarrowCache(Cache):
    def __init__(self, entries, batch_size, max_length, dtype, *rest):
        super().__init__(entries, batch_size, max_length, torch.float16 if dtype.itemsize == 4 else dtype, *rest)


@caught_by("cached_in_any_dtype")
class HalfInTheCache(Sound):
    def new_cache(self, batch_size, max_length, rewind=0):
        with mock.patch("attnzoo.attention.Cache", NarrowCache):
            return super().new_cache(batch_size, max_length, rewind)


class Joined(Cache):
    def joined_mask(self, key_mask, queries):
        return key_mask if key_mask is not None and key_mask.all() else super().joined_mask(key_mask, queries)


class ViewedWhereFrozen(Cache):
    def extended(self, new):
        needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new.values())
        with torch.set_grad_enabled(needed):
            return super().extended(new)


class WholeBuffer(Cache):
    def extended(self, new):
        kept = super().extended(new)
        unused = {name: self._ring.entries[name][:, :, tensor.shape[2] :] for name, tensor in kept.entries.items()}
        entries = {name: kept.entries[name] + 0 * rows.sum(2, keepdim=True) for name, rows in unused.items()}
        return kept._replace(entries=entries)


class OfThis(Sound):
    """A variant with another kind of cache."""

    kind = Cache

    def new_cache(self, batch_size, max_length, rewind=0):
        cache = super().new_cache(batch_size, max_length, rewind)
        cache.__class__ = self.kind
        return cache


@caught_by("hidden_tokens_stay_hidden")
class AllTrueShowsAll(OfThis):
    kind = Joined


@caught_by("queries_train_over_frozen_keys")
class FrozenKeysAreViews(OfThis):
    kind = ViewedWhereFrozen


@caught_by("unused_places_of_a_cache_are_not_felt")
class ReadsTheWholeBuffer(OfThis):
    kind = WholeBuffer


@wrong_when("caches_do_not_mix")
def another_cache_than_last_time(self, call):
    if call["cache"] is None:
        return False
    last, self.last = getattr(self, "last", None), id(call["cache"])
    return call["held"] > 0 and last != self.last


# Chance


@caught_by("patterns_are_fixed")
class OtherKeysBeyond32(Drawn):
    long = False

    def current_pattern(self):
        other = Random(2, seed=1) & Causal() if self.causal else Random(2, seed=1)
        return other if self.long else self.pattern

    def visible(self, query_length, key_length=None, *, marked=None):
        self.long = (key_length or query_length) > 32
        return super().visible(query_length, key_length, marked=marked)

    def forward(self, x, context=None, *, cache=None, **given):
        length = x.shape[1] if context is None else context.shape[1]
        self.long = length + (0 if cache is None else cache.length) > 32
        return super().forward(x, context, cache=cache, **given)


@caught_by("training_changes_no_pattern")
class DenseInTraining(Drawn):
    def current_pattern(self):
        return (Causal() if self.causal else Full()) if self.training else self.pattern


# Sizes and dtypes


@caught_by("any_length")
class LastTokenCutOff(Sound):
    def attend(self, q, k, v, scope):
        out = dense(q, k, v, scope)
        return out if q.shape[2] % 2 == 0 or q.shape[2] < 16 else torch.cat([out[:, :, :-1], 0 * out[:, :, -1:]], 2)


@caught_by("empty_batch")
class NeedsABatch(Sound):
    def attend(self, q, k, v, scope):
        assert len(q)
        return dense(q, k, v, scope)


@wrong_when("any_length")
def seventeen_tokens(self, call):
    return call["x"].shape[1] == 17


@wrong_when("gradients_at_any_length", gradient=True)
def five_tokens_in_two_sequences(self, call):
    return call["x"].shape[:2] == (2, 5)


@wrong_when("one_of_everything")
def two_heads(self, call):
    return self.num_heads == 2


@wrong_when("inputs_in_any_layout")
def one_sequence_expanded(self, call):
    return call["x"].stride(0) == 0 and len(call["x"]) == 3


@caught_by("softmax_is_wide")
class LargeScoresRounded(Sound):
    def attend(self, q, k, v, scope):
        largest = float(q.detach().abs().amax() * k.detach().abs().amax()) if q.dtype.itemsize == 2 else 0.0
        return dense(q * 1.1 if 40 < largest < 1e6 else q, k, v, scope)


@caught_by("large_scores_stay_finite")
class LargeScoresOverflow(Sound):
    def attend(self, q, k, v, scope):
        if q.dtype != torch.float16 or self.causal or not q.numel() or not scope.pattern_alone:
            return dense(q, k, v, scope)
        largest = q.detach().float().abs().amax() * k.detach().float().abs().amax()
        return dense(q, k, v, scope) + largest.half() * 0


@caught_by("dtype_is_kept")
class FloatUnderHalfAutocast(Sound):
    def forward(self, x, context=None, **given):
        y = super().forward(x, context, **given)
        half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16
        return y.float() if half else y


@caught_by("default_dtype_plays_no_part")
class FactorInDefaultDtype(Sound):
    def attend(self, q, k, v, scope):
        out = dense(q, k, v, scope)
        return out * torch.ones(1) if out.dtype == torch.float32 else out


# What sticks, and what does not travel


@wrong_when("calls_change_no_later_call")
def after_a_long_padded_call(self, call):
    before = getattr(self, "seen", False)
    self.seen = before or (alone(call, "key_mask") and call["x"].shape[1] == 33)
    return before


@caught_by("no_tensor_is_kept")
class KeepsItsInput(Sound):
    def forward(self, x, context=None, **given):
        self.last = x
        return super().forward(x, context, **given)


@caught_by("copies_and_pickles")
class HoldsAFunction(Sound):
    def forward(self, x, context=None, **given):
        self.function = lambda: None
        return super().forward(x, context, **given)


TABLES: dict[int, Tensor] = {}


@caught_by("inference_mode_does_not_stick")
class TableOfInference(Sound):
    """A table by length that is made once, wherever and however that is."""

    def attend(self, q, k, v, scope):
        if q.shape[2] != 34:
            return dense(q, k, v, scope)
        return dense(q * TABLES.setdefault(34, torch.ones(34, 1, dtype=q.dtype)), k, v, scope)


@caught_by("moving_does_not_stick")
class TableOfTheMetaDevice(Sound):
    def attend(self, q, k, v, scope):
        if q.is_meta:
            self.table = torch.ones(q.shape[2], 1, device=q.device)
        return dense(q * getattr(self, "table", 1), k, v, scope)


@caught_by("inputs_are_not_modified")
class ScalesInPlace(Sound):
    def forward(self, x, context=None, **given):
        y = super().forward(x, context, **given)
        if self.training and not torch.is_grad_enabled():
            x += 1
        return y


@caught_by("state_dict_round_trip")
class CopiesItsBias(Sound):
    def forward(self, x, context=None, **given):
        if x.shape[1] == 2 and not hasattr(self, "bias"):
            first = self.out_proj.bias.detach().clone()
            self.bias = lambda: first
        y = super().forward(x, context, **given)
        return y if not hasattr(self, "bias") else y - self.out_proj.bias.detach() + self.bias()


@caught_by("converts")
class MasksBecomeFloats(Sound):
    def prepare(self):
        self.register_buffer("some", torch.ones(3, dtype=torch.bool), persistent=False)

    def _apply(self, convert, recurse=True):
        super()._apply(convert, recurse)
        if self.out_proj.weight.dtype.itemsize == 2:
            self.some = self.some.to(self.out_proj.weight.dtype)
        return self


@caught_by("gradient_checkpointing")
class OtherWhenComputedAgain(Sound):
    def attend(self, q, k, v, scope):
        again = torch._C._current_graph_task_id() != -1 and scope.dropout  # inside backward
        return dense(q, k, v * 1.01 if again else v, scope)


@caught_by("every_parameter_learns")
class UnusedInTraining(Linear):
    def prepare(self):
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, context=None, **given):
        y = super().forward(x, context, **given)
        bare = all(value is None for value in given.values())
        return y if self.training and self.dropout and bare else y + 0 * self.gain.to(y.dtype)


@caught_by("compiles")
class BreaksTheGraph(Sound):
    def attend(self, q, k, v, scope):
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            torch._dynamo.graph_break()
        return dense(q, k, v, scope)


@caught_by("exports")
class OneLengthInAnExportedGraph(Sound):
    def attend(self, q, k, v, scope):
        length = int(q.shape[2]) if torch.compiler.is_exporting() else 11
        return dense(q, k, v, scope) * (1 if length == 11 else 0)


# Options and declarations


def with_options(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., Sound]:
    """A function that makes something of impossible options."""

    def build(
        d_model: int, num_heads: int, *,
        num_kv_heads: int | None = None,
        causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
    ) -> Sound:  # fmt: skip
        options = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "causal": causal}
        options |= {"dropout": dropout, "bias": bias, "positions": positions}
        try:
            return Sound(**options)
        except OptionError:
            return Sound(**change(options))

    return build


any_heads = with_options(lambda options: {**options, "num_heads": 1, "num_kv_heads": None})
any_dropout = with_options(lambda options: {**options, "dropout": 0.0})
for name, forgiving in {"AnyHeads": any_heads, "AnyDropout": any_dropout}.items():
    kind = "heads" if name == "AnyHeads" else "options"
    BROKEN.append(Mutant(name, forgiving, {}, contextlib.nullcontext, (f"check_impossible_{kind}_are_refused",)))


@caught_by("causal_is_what_was_asked_for")
class NeverCausal(Sound):
    def __init__(
        self, d_model: int, num_heads: int, *,
        causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
    ) -> None:  # fmt: skip
        super().__init__(d_model, num_heads, dropout=dropout, bias=bias, positions=positions)


@caught_by("features_are_what_is_declared")
class WithoutSpeed(Sound):
    without = frozenset({"speed"})
