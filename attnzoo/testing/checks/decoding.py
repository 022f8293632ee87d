"""Decoding with a cache: promise 9."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.attention import Attention
from attnzoo.cache import Cache
from attnzoo.errors import AttnzooError, CacheError, MaskError, NotSupportedError
from attnzoo.testing.foreign import Foreign
from attnzoo.testing.maker import Maker
from attnzoo.testing.probes import (
    NotApplicable,
    agree,
    documents_of,
    gradients,
    marked_of,
    mask_combinations,
    named,
    need,
    refuses,
    same,
    some,
    tokens,
)
from attnzoo.testing.size import size


def _pieces() -> tuple[tuple[int, ...], ...]:
    """Ways to cut a sequence."""
    n, third = size.length, size.length // 3
    few = (n - 1, 1), (1, 2, n - 3), (third, third + 1, n - 2 * third - 1), (0, third, 0, 0, n - third, 0)
    return (n,), (1,) * n, *few


def decode(attn: Attention, x: Tensor, pieces: Sequence[int], cache: Cache | None = None, **masks: Tensor) -> Tensor:
    """The outputs of a sequence read in pieces from where the cache stands, each with its part of the masks."""
    if cache is None:  # a token marked late may look at all before it, so that none may be dropped
        cache = attn.new_cache(x.shape[0], x.shape[1], rewind=x.shape[1] if "marked" in masks else 0)
    outputs = []
    for start, stop in itertools.pairwise(itertools.accumulate(pieces, initial=cache.length)):
        given = {name: _part(name, mask, start, stop) for name, mask in masks.items()}
        outputs.append(attn(x[:, start:stop], cache=cache, **given))
        assert cache.length == stop, f"after {stop} tokens the cache's length is {cache.length}"
    return torch.cat(outputs, dim=1)


def _part(name: str, mask: Tensor, start: int, stop: int) -> Tensor:
    if name != "mask":
        return mask[:, :stop]
    rows = mask if mask.shape[-2] == 1 else mask[..., start:stop, :]
    return rows if mask.shape[-1] == 1 else rows[..., :stop]


def _causal(make: Maker, **options: Any) -> Attention:
    attn = make(**options)
    need(attn, "cache")
    return attn


def check_cached_equals_full(make: Maker) -> None:
    """Decoding gives what the full pass gives, however the sequence is cut: whole, by tokens, with empty pieces. An
    empty cache is not "no cache": the caller's own is filled."""
    for positions in make.positions:
        attn = _causal(make, positions=positions)
        x = tokens(attn)
        right = attn(x)
        for pieces in _pieces():
            agree(
                decode(attn, x, pieces), right, f"positions={positions!r}, read in pieces of {pieces}, against at once"
            )
            with torch.inference_mode():
                y = decode(attn, x, pieces)
            agree(y, right, f"positions={positions!r}, read in pieces of {pieces} in inference mode, against at once")


def check_cached_with_masks(make: Maker) -> None:
    """Decoding heeds key_mask [b, length + q], mask ending in length + q, and documents, in every combination."""
    for positions in make.positions:
        attn = _causal(make, positions=positions)
        x = tokens(attn)
        for given in list(mask_combinations(attn))[0 if positions == "none" else -3 :]:
            right = attn(x, **given)
            for pieces in _pieces()[1::3]:
                what = f"positions={positions!r}, {named(given)}, read in pieces of {pieces}, against at once"
                agree(decode(attn, x, pieces, **given), right, what)


def check_cached_masks_may_change(make: Maker) -> None:
    """A later call may hide what an earlier one saw."""
    attn = _causal(make)
    x, cache = tokens(attn), attn.new_cache(size.batch, size.length)
    for start, stop in itertools.pairwise((0, 3, 4, 9, size.length)):
        key_mask = some(size.batch, stop, seed=stop)
        key_mask[:, start:] = True
        y = attn(x[:, start:stop], cache=cache, key_mask=key_mask)
        right = attn(x[:, :stop], key_mask=key_mask)[:, start:]
        agree(y, right, f"tokens {start} to {stop}, with a key_mask of their own, against the full pass with it")


def check_hidden_tokens_stay_hidden(make: Maker) -> None:
    """A token that was hidden when it was appended stays hidden, whatever later key_masks say."""
    for positions in make.positions:
        attn = _causal(make, positions=positions)
        x, key_mask = tokens(attn), some(size.batch, size.length, seed=2)
        key_mask[:, 5:] = True
        right = attn(x, key_mask=key_mask)
        for later in ("left out", "all True"):
            cache = attn.new_cache(size.batch, size.length)
            first = attn(x[:, :5].masked_fill(~key_mask[:, :5, None], torch.nan), cache=cache, key_mask=key_mask[:, :5])
            rest = [
                attn(
                    x[:, 5:8],
                    cache=cache,
                    **({} if later == "left out" else {"key_mask": torch.ones(size.batch, 8).bool()}),
                ),
                attn(
                    x[:, 8:],
                    cache=cache,
                    **({} if later == "left out" else {"key_mask": torch.ones(size.batch, size.length).bool()}),
                ),
            ]
            what = f"positions={positions!r}, tokens hidden in the prompt and later key_masks {later}"
            agree(torch.cat([first, *rest], dim=1), right, what)


def check_padded_prompts_decode_as_alone(make: Maker) -> None:
    """Prompts padded on the left to one length decode as each does alone; rotary positions count visible tokens."""
    for positions in make.positions:
        attn = _causal(make, positions=positions)
        need(attn, "left_padding")
        x, padding = tokens(attn), (0, 3, 5)
        key_mask = torch.arange(size.length) >= torch.tensor(padding)[:, None]
        y = decode(attn, x, (7, 1, 2, 1), key_mask=key_mask)
        for row, start in enumerate(padding):
            alone = attn(x[row : row + 1, start:])
            what = f"positions={positions!r}, a prompt with {start} tokens of padding on the left, against it alone"
            agree(y[row : row + 1, start:], alone, what)


def check_refused_calls_change_no_cache(make: Maker) -> None:
    """`max_length` bounds a cache, and a call that is refused leaves the cache as it was."""
    attn = _causal(make)
    x, maximum = tokens(attn), size.length - 1
    right = attn(x)
    cache = attn.new_cache(size.batch, maximum)
    assert cache.max_length == maximum, f"new_cache({size.batch}, {maximum}) has max_length {cache.max_length}"
    for start, stop in itertools.pairwise((0, 4, 5, maximum)):
        piece, length = x[:, start:stop], stop - start
        other, ones = torch.full_like(piece, 1e6), torch.ones
        refuses(
            CacheError, f"{size.length - start} tokens onto {start} of {maximum}", attn, x[:, start:] + 1, cache=cache
        )
        refuses(CacheError, "another batch size", attn, other[:1], cache=cache)
        refuses(MaskError, "a float mask", attn, other, cache=cache, mask=ones(length, stop))
        refuses(MaskError, "a mask one too long", attn, other, cache=cache, mask=ones(length, stop + 1).bool())
        refuses(
            MaskError, "a key_mask one too long", attn, other, cache=cache, key_mask=ones(size.batch, stop + 1).bool()
        )
        if start:
            what = "a key_mask of the new tokens only"
            refuses(MaskError, what, attn, other, cache=cache, key_mask=ones(size.batch, length).bool(), naming=(stop,))
        refuses(NotSupportedError, "a cache and context", attn, other, x, cache=cache)
        refuses(NotSupportedError, "a cache and values", attn, other, values=other, cache=cache)
        if "documents" not in attn.supports:
            refuses(NotSupportedError, "documents", attn, other, cache=cache, documents=documents_of(size.batch, stop))
        assert cache.length == start, f"refused calls moved the cache's length from {start} to {cache.length}"
        agree(attn(piece, cache=cache), right[:, start:stop], f"tokens {start} to {stop} after calls that were refused")


def check_crop_and_reset(make: Maker) -> None:
    """`crop` and `reset` take tokens back: what follows is as if they had never been read."""
    for positions in make.positions:
        attn = _causal(make, positions=positions)
        x, other = tokens(attn), tokens(attn, seed=6)
        key_mask = some(size.batch, size.length, seed=2)
        for kept in (7, 4, 0):
            cache = attn.new_cache(size.batch, size.length, rewind=6)
            decode(attn, other, (5, 5), cache, key_mask=key_mask)
            refuses(CacheError, "crop(11) of 10 tokens", cache.crop, 11)
            refuses(CacheError, "crop(-1)", cache.crop, -1)
            assert cache.length == 10, f"after 10 tokens and crops that were refused length is {cache.length}"
            cache.crop(kept)
            assert cache.length == kept, f"after crop({kept}) length is {cache.length}"
            mended = torch.cat([other[:, :kept], x[:, kept:]], dim=1)
            seen = key_mask.clone()
            seen[:, kept:] = True
            y = decode(attn, mended, (1, size.length - kept - 1), cache)
            agree(y, attn(mended, key_mask=seen)[:, kept:], f"positions={positions!r}, after crop({kept})")
        cache.reset()
        assert cache.length == 0, f"after reset() length is {cache.length}"
        agree(decode(attn, x, (6, 5), cache), attn(x), f"positions={positions!r}, after reset()")


def check_reorder(make: Maker) -> None:
    """`reorder` puts the sequences of a cache in another order, hidden tokens included; `nbytes` is its size."""
    attn = _causal(make)
    x, key_mask, index = tokens(attn), some(size.batch, size.length, seed=2), torch.tensor([2, 0, 0])
    key_mask[:, 5:] = True
    cache = attn.new_cache(size.batch, size.length)
    decode(attn, x[:, :5], (5,), cache, key_mask=key_mask[:, :5])
    bytes_before = cache.nbytes
    cache.reorder(index)
    assert isinstance(cache.nbytes, int) and cache.nbytes == bytes_before > 0, (
        f"nbytes is {cache.nbytes} after {bytes_before}"
    )
    y = decode(attn, x[index], (1, 5), cache)
    agree(y, attn(x, key_mask=key_mask)[index, 5:], f"after reorder({index.tolist()})")
    for wrong in (torch.tensor([0, 1, size.batch]), torch.tensor([-1, 0, 1]), torch.tensor([0.0, 1.0, 2.0])):
        refuses(AttnzooError, f"reorder({wrong.tolist()})", cache.reorder, wrong)


def check_cached_far_beyond_the_window(make: Maker) -> None:
    """Decoding goes on right when a window has left most tokens behind, hidden ones among them."""
    for positions in make.positions:
        attn = _causal(make, positions=positions)
        x, key_mask = tokens(attn, 3 * size.length), some(size.batch, 3 * size.length, seed=2)
        with torch.no_grad():
            y = decode(attn, x, (size.length, 1, 1, 1, 1, 7, 0, 1, 1, 2 * size.length - 13), key_mask=key_mask)
            agree(y, attn(x, key_mask=key_mask), f"positions={positions!r}, {x.shape[1]} tokens, against at once")


def check_marked_tokens_are_kept(make: Maker) -> None:
    """A token that was marked in the first piece is seen by all that follow, also when a window has left it."""
    attn = _causal(make)
    need(attn, "marked")
    x, marked = tokens(attn, 2 * size.length), marked_of(size.batch, 2 * size.length)
    marked[:, size.length :] = False
    cache, pieces = attn.new_cache(size.batch, 2 * size.length), (size.length, *(1,) * (size.length - 4), 4)
    agree(decode(attn, x, pieces, cache, marked=marked), attn(x, marked=marked), "tokens marked in the first piece")


def check_a_window_bounds_its_cache(make: Maker) -> None:
    """Where the pattern looks back a bounded way, `nbytes` does not grow with max_length."""
    attn, most = _with_window(make)
    small, large = (attn.new_cache(size.batch, most + 1 + more).nbytes for more in (0, 1000))
    assert small == large, f"nbytes is {small} for {most + 1} tokens at most, and {large} for {most + 1001}"


def check_crop_beyond_rewind_is_refused(make: Maker) -> None:
    """`crop` takes back `rewind` tokens; more it refuses where the window has dropped what they looked at, and crop(0)
    always works."""
    attn, most = _with_window(make)
    read, rewind = most + 7, 2
    x, other = tokens(attn, read + 3), tokens(attn, read, seed=6)
    cache = attn.new_cache(size.batch, read + 3, rewind=rewind)
    decode(attn, torch.cat([x[:, : read - rewind], other[:, :rewind]], dim=1), (read - 1, 1), cache)
    for kept in (read - rewind - 1, read - 5):
        refuses(CacheError, f"crop({kept}) of {read} tokens with rewind={rewind}", cache.crop, kept, naming=("rewind",))
    assert cache.length == read, f"after {read} tokens and crops that were refused length is {cache.length}"
    cache.crop(read - rewind)
    what = f"after crop({read - rewind}) of {read} tokens with rewind={rewind}"
    agree(decode(attn, x, (1, rewind - 1, 3), cache), attn(x)[:, read - rewind :], what)
    cache.crop(0)
    agree(decode(attn, x, (4, 1), cache), attn(x[:, :5]), "after crop(0) of a window's cache")


def _with_window(make: Maker) -> tuple[Attention, int]:
    """A variant whose pattern looks back a bounded way, and how many tokens it needs."""
    attn = _causal(make)
    past = attn.pattern.past
    if past.last is None or isinstance(attn, Foreign):
        raise NotApplicable("it may look at all that came before, or keeps what it likes")
    return attn, past.first + max(past.last, 1)


def check_cached_keys_are_detached(make: Maker) -> None:
    """A call's gradient reaches its own tokens, as without a cache, and none that were read before."""
    for training in (False, True):
        attn = _causal(make, training=training)
        pieces = [piece.clone().requires_grad_() for piece in tokens(attn).split((4, 1, size.length - 5), dim=1)]
        cache = attn.new_cache(size.batch, size.length)
        outputs = [attn(piece, cache=cache) for piece in pieces]
        for number, (piece, output) in reversed(list(enumerate(zip(pieces, outputs, strict=True)))):
            others = {str(other): pieces[other] for other in range(len(pieces)) if other != number}
            found = gradients(attn, output, own=piece, **others)
            for other in others:
                reached = found[other] is not None and bool(found[other].any())  # type: ignore[union-attr]
                assert not reached, f"the gradient of piece {number} reaches piece {other}"
            if attn.redraws:
                continue  # no other call draws what this one drew
            whole = attn(torch.cat([*(earlier.detach() for earlier in pieces[:number]), piece], dim=1))
            right = gradients(attn, whole[:, -piece.shape[1] :], own=piece)["own"]
            agree(
                found["own"], right, f"gradient of piece {number}, against the full pass with frozen tokens before it"
            )


def check_queries_train_over_frozen_keys(make: Maker) -> None:
    """Decoding can train what makes queries while what makes keys and values is frozen."""
    attn = _causal(make)
    frozen = [layer for name, layer in attn.named_children() if name in ("k_proj", "v_proj")]
    if not frozen:
        raise NotApplicable("its keys have no layer of their own")
    for layer in frozen:
        layer.requires_grad_(False)
    x = tokens(attn)
    trained = [parameter for parameter in attn.parameters() if parameter.requires_grad]
    names = [name for name, parameter in attn.named_parameters() if parameter.requires_grad]
    got, right = (torch.autograd.grad(y.square().sum(), trained) for y in (decode(attn, x, (4, 1, 6)), attn(x)))
    for name, one, other in zip(names, got, right, strict=True):
        agree(one, other, f"decoding with frozen keys, against at once: gradient of {name}")


def check_caches_do_not_mix(make: Maker) -> None:
    """Two conversations with one module share nothing."""
    attn = _causal(make)
    talks = [(tokens(attn, seed=seed), attn.new_cache(size.batch, size.length)) for seed in (1, 6)]
    outputs: list[list[Tensor]] = [[], []]
    for start, stop in itertools.pairwise((0, 4, 5, size.length)):
        for (x, cache), found in zip(talks, outputs, strict=True):
            found.append(attn(x[:, start:stop], cache=cache))
            attn(x)
    for (x, _), found in zip(talks, outputs, strict=True):
        agree(torch.cat(found, dim=1), attn(x), "two caches in turn on one module, each against the full pass")


def check_unused_places_of_a_cache_are_not_felt(make: Maker) -> None:
    """What a cache was left with behind its length, be it inf or NaN, changes no output."""
    for positions in make.positions:
        attn = _causal(make, positions=positions)
        x = tokens(attn)
        right = attn(x)
        for garbage in (torch.inf, torch.nan):
            what = f"positions={positions!r}, tokens of {garbage} read and taken back"
            for forget in ("crop", "reset"):
                cache = attn.new_cache(size.batch, size.length, rewind=size.length)
                attn(torch.full_like(x, garbage), cache=cache)
                cache.crop(0) if forget == "crop" else cache.reset()
                pieces = (1, size.length // 2, size.length - 1 - size.length // 2)
                agree(decode(attn, x, pieces, cache), right, f"{what} by {forget}")


def check_cached_in_any_dtype(make: Maker) -> None:
    """A cache holds half precision and works under autocast."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.04), (torch.float16, 0.005)):
        attn = _causal(make, dtype=dtype, positions="rotary")
        x, key_mask = tokens(attn), some(size.batch, size.length, seed=2)
        y = decode(attn, x, (4, 1, 6), key_mask=key_mask)
        assert y.dtype == dtype, f"decoding {dtype} gives {y.dtype}"
        agree(y, attn(x, key_mask=key_mask), f"decoding in {dtype}, against at once", tolerance)
    attn = _causal(make, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, right = decode(attn, tokens(attn), (4, 1, 6)), attn(tokens(attn))
    agree(y, right, "decoding under bfloat16 autocast, against at once", 0.04)
    same(decode(attn, tokens(attn), (size.length,)), decode(attn, tokens(attn), (size.length,)), "decoding twice")
