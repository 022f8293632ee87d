"""Broken variants, each with the checks that must catch it."""

import contextlib
import random
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.attention import Attention, PositionKind
from attnzoo.cache import Cache
from attnzoo.errors import NotSupportedError, OptionError
from attnzoo.kernels.dense import dense, dense_weights
from attnzoo.patterns import Causal, Full, Local, Random
from tests.mutants.mutant import Mutant
from tests.mutants.sound import Drawn, Redrawn, Sound

BROKEN: list[Mutant] = []


def caught_by(*checks):
    """Enters a broken variant with the checks that must catch it."""

    def enter(broken):
        named = tuple(f"check_{check}" for check in checks)
        BROKEN.append(Mutant(broken.__name__, broken, {}, contextlib.nullcontext, named))
        return broken

    return enter


def forwarding(change):
    """A forward that changes a call's arguments before it computes; `change(self, call)` works on the dict in place."""

    def forward(
        self, x, context=None, *, values=None, key_mask=None, mask=None, documents=None, marked=None, cache=None
    ):
        names = ("x", "context", "values", "key_mask", "mask", "documents", "marked", "cache")
        call = dict(zip(names, (x, context, values, key_mask, mask, documents, marked, cache), strict=True))
        change(self, call)
        return Attention.forward(self, call.pop("x"), call.pop("context"), **call)

    return forward


def broken_forward(name, *checks, base=Sound):
    """Enters a variant whose calls are changed by the decorated function."""

    def enter(change):
        broken = type(name, (base,), {"forward": forwarding(change), "__module__": __name__})
        globals()[name] = caught_by(*checks)(broken)  # where pickle looks for it
        return change

    return enter


# Masks


@broken_forward("MaskTurnedRound", "true_means_may_look")
def _(self, call):
    if call["mask"] is not None and call["mask"].dtype == torch.bool:
        call["mask"] = ~call["mask"]


@broken_forward("OnlyOneIsTrue", "whole_numbers_are_masks")
def _(self, call):
    for name in ("key_mask", "mask"):
        if call[name] is not None and call[name].dtype != torch.bool:
            call[name] = call[name] == 1 if not call[name].is_floating_point() else call[name]
            call[name] = (
                call[name] & (torch.arange(call[name].shape[-1]) > 1) if call[name].dtype == torch.bool else call[name]
            )


@broken_forward("FloatMasksTaken", "float_masks_are_refused")
def _(self, call):
    if call["mask"] is not None and call["mask"].is_floating_point():
        call["mask"] = call["mask"] != 0


@broken_forward("AnyShapeTaken", "other_mask_shapes_are_refused")
def _(self, call):
    if call["mask"] is not None and call["mask"].dim() == 3:
        call["mask"] = call["mask"][:, None]


@broken_forward("MeaningBySize", "equal_sizes_change_no_meaning")
def _(self, call):
    mask = call["mask"]
    if mask is not None and mask.dim() == 2 and mask.shape[0] == call["x"].shape[0]:
        call["key_mask"], call["mask"] = mask, None


@broken_forward("OneMaskOnly", "masks_combine")
def _(self, call):
    if call["key_mask"] is not None:
        call["mask"] = None


@broken_forward("FirstMaskForAll", "masks_broadcast", "sequences_are_alone")
def _(self, call):
    if call["mask"] is not None and call["mask"].dim() == 4:
        call["mask"] = call["mask"][:1]


@broken_forward("NoMaskUnderDropout", "masks_hold_under_dropout")
def _(self, call):
    if self.training and self.dropout:
        call["mask"] = None


@broken_forward("NoMaskWhenComputedAgain", "masks_hold_when_checkpointed")
def _(self, call):
    self.calls += 1
    if self.training and self.calls % 2 == 0:
        call["mask"] = None if call["mask"] is None else torch.ones_like(call["mask"])


@broken_forward("NoMaskUnderAutocast", "masks_hold_under_autocast")
def _(self, call):
    if torch.is_autocast_enabled("cpu"):
        call["mask"] = None


@caught_by("gradients_go_where_queries_look", "later_tokens_change_nothing", "later_tokens_get_no_gradient")
class MeanAdded(Sound):
    def forward(self, x, context=None, **given):
        return super().forward(x, context, **given) + 1e-3 * x.nan_to_num().mean(1, keepdim=True)


# Rows with nothing to see


@caught_by("queries_that_see_nothing_get_zero")
class MeanOfHidden(Sound):
    def attend(self, q, k, v, scope):
        k, v = (x.float().repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k, v))
        scores = (q.float() @ k.mT * q.shape[-1] ** -0.5).masked_fill(~scope.visible(), -1e9)
        return (scores.softmax(-1) @ v).to(q.dtype)


@caught_by("queries_that_see_nothing_give_no_gradient", "queries_that_see_nothing_harm_no_other")
class RepairedNaN(Sound):
    def attend(self, q, k, v, scope):
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k, v))
        hidden = torch.zeros((), dtype=q.dtype).masked_fill(~scope.visible(), -torch.inf)
        return (q @ k.mT * q.shape[-1] ** -0.5 + hidden).softmax(-1).nan_to_num() @ v


# Padding


@broken_forward(
    "PaddingIsRead",
    "padding_cannot_be_felt",
    "padding_gets_no_gradient",
    "padding_in_half_precision_cannot_be_felt",
    "padding_of_context_cannot_be_felt",
)
def _(self, call):
    if call["key_mask"] is not None and call["mask"] is None and call["cache"] is None:
        call["mask"], call["key_mask"] = call["key_mask"][:, None, None] != 0, None


@caught_by("padding_on_the_right_changes_nothing", "padding_of_context_changes_nothing")
class ScaledByLength(Sound):
    def attend(self, q, k, v, scope):
        return dense(q, k, v, scope) * scope.key_length


@broken_forward("KnowsPlaces", "padding_on_the_left_changes_nothing")
def _(self, call):
    call["x"] = call["x"] + torch.arange(call["x"].shape[1])[:, None].to(call["x"].dtype) / 10


# Numbers


@caught_by("queries_stand_at_the_end", "cached_equals_full")
class TopLeft(Sound):
    def attend(self, q, k, v, scope):
        if not self.causal:
            return dense(q, k, v, scope)
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def visible(self, query_length, key_length=None):
        shape = (1, query_length, query_length if key_length is None else key_length)
        return torch.ones(shape, dtype=torch.bool).tril() if self.causal else super().visible(query_length, key_length)


@caught_by("output_is_what_the_pattern_says")
class NoScale(Sound):
    def attend(self, q, k, v, scope):
        return dense(q * q.shape[-1] ** 0.5, k, v, scope)


@caught_by("output_is_what_the_pattern_says", "any_length")
class WindowTooNarrow(Sound):
    def sees(self):
        return Local(3)

    def attend(self, q, k, v, scope):
        near = (scope.query.index - scope.key.index).abs() < 3
        return dense(
            q,
            k,
            v,
            mock.Mock(
                visible=lambda: scope.visible() & near,
                score=scope.score,
                query=scope.query,
                key=scope.key,
                dropout=scope.dropout,
            ),
        )


@caught_by("gradients_are_those_of_the_pattern", "gradients_at_any_length")
class KeysDetached(Sound):
    def attend(self, q, k, v, scope):
        return dense(q, k.detach(), v, scope)


@caught_by("positions_are_right_with_masks")
class RotaryCountsPadding(Sound):
    def forward(self, x, context=None, **given):
        def count(length, key_mask, documents, device):
            return torch.arange(length, device=device)[None]

        with mock.patch("attnzoo.attention.count_visible", count):
            return super().forward(x, context, **given)


@broken_forward("ValuesIgnored", "cross_attention")
def _(self, call):
    call["values"] = None


@broken_forward("DocumentsIgnored", "documents_are_alone")
def _(self, call):
    call["documents"] = None


@caught_by("weights_are_those_of_the_pattern")
class WeightsOfOtherHeads(Sound):
    def weights(self, x, context=None, *, heads=None, queries=None, **given):
        return super().weights(x, context, heads=sorted(heads) if heads else heads, queries=queries, **given)


@caught_by("fewer_key_value_heads")
class TiledGroups(Sound):
    def attend(self, q, k, v, scope):
        group = self.num_heads // self.num_kv_heads
        return dense(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), scope)


@caught_by("lower_precision")
class ScoresInHalf(Sound):
    def attend(self, q, k, v, scope):
        if q.dtype == torch.float32:
            q, k = q.bfloat16().float(), k.bfloat16().float()
        return dense(q, k, v, scope)


@caught_by("gradients_in_lower_precision")
class BackwardInHalf(Sound):
    def attend(self, q, k, v, scope):
        if q.requires_grad and q.dtype == torch.float32:
            v.register_hook(lambda gradient: gradient.bfloat16().float())
        return dense(q, k, v, scope)


@caught_by("softmax_is_wide", "large_scores_stay_finite")
class HalfSoftmax(Sound):
    def attend(self, q, k, v, scope):
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if scope.score is not None:
            scores = scope.score(scores, scope.query, scope.key)
        hidden = ~scope.visible()
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        return (powers / powers.sum(-1, keepdim=True)).masked_fill(hidden, 0) @ v


# Decoding


@broken_forward("KeyMaskForgottenInCache", "cached_with_masks", "padded_prompts_decode_as_alone")
def _(self, call):
    if call["cache"] is not None and call["cache"].length:
        call["key_mask"] = None
        call["cache"]._hides = False


@broken_forward("FirstMaskStays", "cached_masks_may_change")
def _(self, call):
    cache, key_mask = call["cache"], call["key_mask"]
    if cache is not None and cache.length and key_mask is not None:
        key_mask = key_mask.clone()
        key_mask[:, : cache.length] = True
        call["key_mask"] = key_mask


@broken_forward("HiddenComesBack", "hidden_tokens_stay_hidden")
def _(self, call):
    if call["cache"] is not None:
        call["cache"]._hides = False


class Careless(Cache):
    """A cache that keeps what a refused call wrote."""

    def check(self, batch, queries):
        length, self.length = self.length, min(self.length + queries, self.max_length)
        try:
            super().check(batch, 0)
        finally:
            self.length = length if length + queries <= self.max_length else self.length
        super().check(batch, queries)


class NoWayBack(Cache):
    def crop(self, length):
        super().crop(self.length)


class KeysOnly(Cache):
    def reorder(self, index):
        values = self._entries["values"].clone()
        super().reorder(index)
        self._entries["values"] = values


class Remembering(Cache):
    """Keeps the graph of earlier calls."""

    def extended(self, new):
        joined = super().extended(new)
        if not torch.is_grad_enabled():
            return joined
        before = getattr(self, "live", {name: tensor[:, :, :0] for name, tensor in new.items()})
        self.live = {name: torch.cat([before[name], tensor], 2) for name, tensor in new.items()}
        fits = all(tensor.shape == joined[name].shape for name, tensor in self.live.items())
        return self.live if fits else joined


class Viewing(Cache):
    """Hands out views of what later calls write to."""

    def _extended(self, stored, tensor):
        stop = self.length + tensor.shape[2]
        stored[:, :, self.length : stop] = tensor.detach()
        return stored[:, :, :stop]


class NarrowCache(Cache):
    def __init__(self, entries, batch_size, max_length, dtype, device):
        super().__init__(entries, batch_size, max_length, torch.float16 if dtype.itemsize == 4 else dtype, device)


for kind, check in (
    (Careless, "refused_calls_change_no_cache"),
    (NoWayBack, "crop_and_reset"),
    (KeysOnly, "reorder"),
    (Remembering, "cached_keys_are_detached"),
    (Viewing, "queries_train_over_frozen_keys"),
    (NarrowCache, "cached_in_any_dtype"),
):

    def new_cache(self, batch_size, max_length, rewind=0, kind=kind):
        with mock.patch("attnzoo.attention.Cache", kind):
            return Attention.new_cache(self, batch_size, max_length, rewind)

    caught_by(check)(type(f"With{kind.__name__}", (Sound,), {"new_cache": new_cache, "__module__": __name__}))


@broken_forward("EmptyIsNone", "empty_cache_is_used")
def _(self, call):
    if call["cache"] is not None and call["cache"].length == 0:
        call["cache"] = None


@caught_by("caches_do_not_mix")
class OneCache(Sound):
    def new_cache(self, batch_size, max_length, rewind=0):
        if not hasattr(self, "cache"):
            self.cache = super().new_cache(batch_size, max_length, rewind)
        return self.cache


@caught_by("cache_is_refused_where_it_means_nothing")
class CacheForAll(Sound):
    def _supported(self):
        return super()._supported() | {"cache"}


# Random patterns and dropout


@caught_by("patterns_are_fixed")
class NewPatternEachCall(Drawn):
    def current_pattern(self):
        self.calls += 1
        return Random(2, seed=self.calls) & self.pattern if self.causal else Random(2, seed=self.calls)


@caught_by("random_state_is_left_alone")
class TorchDraws(Drawn):
    def attend(self, q, k, v, scope):
        torch.rand(())
        return dense(q, k, v, scope)


@caught_by("redrawn_patterns")
class DrawnElsewhere(Redrawn):
    def current_pattern(self):
        return Random(2, seed=random.randrange(2**32)) & self.pattern if self.redraws else self.pattern


@caught_by("training_changes_no_pattern")
class DenseInTraining(Drawn):
    def current_pattern(self):
        return (Causal() if self.causal else Full()) if self.training else self.pattern


@caught_by("dropout_is_for_training")
class DropoutInEval(Sound):
    def attend(self, q, k, v, scope):
        weights = F.dropout(dense_weights(q, k, scope, scope.visible()), self.dropout)
        return (weights @ v.to(weights.dtype).repeat_interleave(q.shape[1] // v.shape[1], 1)).to(v.dtype)


@caught_by("dropout_is_for_training")
class NoDropout(Sound):
    def attend(self, q, k, v, scope):
        weights = dense_weights(q, k, scope, scope.visible())
        return (weights @ v.to(weights.dtype).repeat_interleave(q.shape[1] // v.shape[1], 1)).to(v.dtype)


@caught_by("dropout_keeps_the_mean")
class DroppedWithoutScale(Sound):
    def attend(self, q, k, v, scope):
        return dense(q, k, v, scope) * (1 - scope.dropout)


@caught_by("dropout_is_the_same_in_backward")
class OtherDropsInBackward(Sound):
    def attend(self, q, k, v, scope):
        first, second = dense(q, k, v, scope), dense(q, k, v, scope)
        return second + (first - second).detach()


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


@caught_by("one_of_everything")
class Squeezed(Sound):
    def forward(self, x, context=None, **given):
        return super().forward(x, context, **given).squeeze(0)


@caught_by("inputs_in_any_layout")
class NeedsOnePiece(Sound):
    def forward(self, x, context=None, **given):
        return super().forward(x.view(-1).view(x.shape), context, **given)


@caught_by("dtype_is_kept")
class FloatOut(Sound):
    def forward(self, x, context=None, **given):
        return super().forward(x, context, **given).float()


# What sticks, and what does not travel


@broken_forward("DenseAfterAShortBatch", "calls_change_no_later_call", base=Drawn)
def _(self, call):
    if call["x"].shape[1] <= 2:
        self.pattern = Causal() if self.causal else Full()


@broken_forward("KeepsItsInput", "no_tensor_is_kept")
def _(self, call):
    self.last = call["x"]


TABLES: dict[int, Tensor] = {}


@caught_by("inference_mode_does_not_stick")
class TableByLength(Sound):
    """A learned-looking table that is made once for each length, wherever and however that is."""

    def attend(self, q, k, v, scope):
        table = TABLES.setdefault(q.shape[2], torch.ones(q.shape[2], 1, device=q.device, dtype=q.dtype))
        return dense(q * table, k, v, scope)


@caught_by("moving_does_not_stick")
class TableOfTheLastDevice(Sound):
    def attend(self, q, k, v, scope):
        if q.shape[2] not in TABLES or q.is_meta:
            TABLES[q.shape[2]] = torch.ones(q.shape[2], 1, device=q.device, dtype=q.dtype)
        return dense(q * TABLES[q.shape[2]], k, v, scope)


@broken_forward("ChangesItsInput", "inputs_are_not_modified")
def _(self, call):
    if call["mask"] is not None and call["mask"].dtype == torch.bool:
        call["mask"].logical_or_(torch.ones_like(call["mask"]))


@caught_by("state_dict_round_trip")
class BufferByLength(Sound):
    def forward(self, x, context=None, **given):
        self.register_buffer("seen", torch.ones(x.shape[1]))
        return super().forward(x, context, **given)


@caught_by("other_layout_loads")
class OneLayout(Sound):
    def prepare(self):
        self._load_state_dict_pre_hooks.clear()


@broken_forward("HoldsAFunction", "copies_and_pickles")
def _(self, call):
    self.function = lambda: None


@caught_by("converts")
class FloatTable(Sound):
    def prepare(self):
        self.register_buffer("lowest", torch.full((), -1e9))

    def forward(self, x, context=None, **given):
        return super().forward(x, context, **given) + self.lowest.isinf() + 0 * self.lowest


@caught_by("gradient_checkpointing")
class PrivateDropout(Sound):
    def attend(self, q, k, v, scope):
        self.calls += 1
        weights = dense_weights(q, k, scope, scope.visible())
        generator = torch.Generator().manual_seed(self.calls)
        kept = torch.rand(weights.shape, generator=generator) >= scope.dropout
        v = v.to(weights.dtype).repeat_interleave(q.shape[1] // v.shape[1], 1)
        return (weights * kept / (1 - scope.dropout) @ v).to(q.dtype)


@caught_by("every_parameter_learns")
class Unused(Sound):
    def prepare(self):
        self.unused = torch.nn.Parameter(torch.zeros(1))


# Options and declarations


@caught_by("impossible_heads_are_refused", "impossible_options_are_refused")
def forgiving(
    d_model: int,
    num_heads: int,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    bias: bool = True,
    positions: PositionKind = "none",
) -> Sound:
    """Makes something of any head count and any option."""
    try:
        return Sound(d_model, num_heads, causal=causal, dropout=dropout, bias=bias, positions=positions)
    except OptionError:
        return Sound(d_model, 1, causal=causal)


@caught_by("causal_is_what_was_asked_for")
class NeverCausal(Sound):
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        positions: PositionKind = "none",
    ) -> None:
        super().__init__(d_model, num_heads, dropout=dropout, bias=bias, positions=positions)


@broken_forward("PromisesDocuments", "features_are_what_is_declared")
def _(self, call):
    if call["documents"] is not None:
        raise NotSupportedError("no documents")
