"""What is computed again in backward: the same gradients, of fewer bytes."""

import pytest
import torch

from attnzoo.errors import OptionError
from attnzoo.training import experiment, model
from attnzoo.training.costs import CostCounter
from attnzoo.training.recipe import load, shipped

LENGTH, D_MODEL, FEED_FORWARD, HEADS, BATCH = 96, 16, 32, 4, 2
SMALL = (f"task.length={LENGTH}", f"model.d_model={D_MODEL}", f"model.feed_forward={FEED_FORWARD}")
DROPOUT = ("model.dropout=0.2", "attention.dropout=0.2")


def build(name, again, *overrides):
    overrides = (*SMALL, f"model.gradient_checkpointing={again}", *overrides)
    return experiment.build(load(name, overrides).sections).model.train()


def tokens_of(built):
    return torch.randint(built.token_embedding.num_embeddings, (BATCH, LENGTH), generator=torch.manual_seed(5))


def gradients(built, key_mask, autocast):
    tokens = tokens_of(built)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = built(tokens, key_mask)
    logits.float().logsumexp(-1).sum().backward()
    return {name: parameter.grad for name, parameter in built.named_parameters()}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("dropout", [(), DROPOUT], ids=["all", "dropout"])
@pytest.mark.parametrize(
    ("name", "options"), [*((name, ()) for name in shipped()), ("random_sparse", ("attention.redraw=true",))]
)
def test_gradients_are_the_same(name, options, dropout, padded, autocast):
    key_mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 37]]) if padded else None
    kept, whole, attention = (
        gradients(build(name, again, *options, *dropout), key_mask, autocast)
        for again in ("false", "true", "attention")
    )
    assert all(kept[f"layers.{layer}.attention.out_proj.weight"].any() for layer in (0, 1))
    for parameter, gradient in kept.items():
        torch.testing.assert_close(whole[parameter], gradient, rtol=0, atol=1e-6)
        torch.testing.assert_close(attention[parameter], gradient, rtol=0, atol=1e-6)


def bytes_of(name, again, layers):
    """What is kept for backward, and the most at once in forward and backward."""
    built = build(name, again, f"model.layers={layers}")
    tokens = tokens_of(built)
    built(tokens)  # makes the tables that kernels remember
    with CostCounter() as counter:
        out = built(tokens)
        kept = counter.held
        out.sum().backward()
    return kept, counter.peak


def of_a_layer(name, again):
    """By how much one more layer raises either."""
    return [more - fewer for more, fewer in zip(bytes_of(name, again, 5), bytes_of(name, again, 4), strict=True)]


@pytest.mark.parametrize("name", ["vanilla", "bigbird", "gqa"])
def test_a_layer_keeps_its_input_or_what_its_feed_forward_needs_or_all(name):
    of_tokens = BATCH * LENGTH * 4
    hidden, inner = of_tokens * D_MODEL, of_tokens * FEED_FORWARD
    # the input; the sum, normalised, with mean and deviation; the feed-forward before its activation and after it
    fed = 3 * hidden + 2 * of_tokens + 2 * inner
    assert of_a_layer(name, "true")[0] == hidden
    assert of_a_layer(name, "attention")[0] == fed
    queries_and_keys = hidden * 3 // 2
    assert of_a_layer(name, "false")[0] > fed + queries_and_keys


def test_the_peak_of_a_model_with_scores_written_out_grows_by_no_scores():
    weights = BATCH * HEADS * LENGTH**2 * 4
    assert of_a_layer("vanilla", "false")[1] > weights
    assert of_a_layer("vanilla", "attention")[1] < weights / 3
    assert of_a_layer("vanilla", "true")[1] < weights / 10


@pytest.mark.parametrize("again", ["true", "attention"])
def test_nothing_is_computed_again_without_gradients_or_with_caches(again, monkeypatch):
    built = build("kv_cached", again)
    tokens = tokens_of(built)
    monkeypatch.setattr(model, "checkpoint", lambda *_, **__: pytest.fail("checkpointed"))
    with torch.no_grad():
        built(tokens)
    built(tokens, caches=built.new_caches(BATCH, LENGTH)).sum().backward()
    with pytest.raises(pytest.fail.Exception, match="checkpointed"):
        built(tokens)


@pytest.mark.parametrize("again", ["atention", 1, 0, None, "true"])
def test_what_is_neither_is_refused(again):
    with pytest.raises(OptionError, match=f"must be true, false or 'attention', not {again!r}"):
        model.Transformer(
            vocabulary=3,
            length=4,
            classes=2,
            causal=False,
            pooling="first",
            attention={"name": "vanilla", "num_heads": 2},
            gradient_checkpointing=again,
        )
