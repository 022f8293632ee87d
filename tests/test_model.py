"""The transformer around any attention."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from attnzoo.errors import InputError, NotSupportedError, OptionError
from attnzoo.training.model import Transformer

torch.set_num_threads(1)

VOCABULARY, LENGTH, CLASSES = 17, 12, 5


def make(*, attention=None, causal=False, pooling="first", start=0, **options):
    torch.manual_seed(start)
    return Transformer(
        vocabulary=VOCABULARY,
        length=LENGTH,
        classes=CLASSES,
        causal=causal,
        pooling=pooling,
        attention=attention or {"name": "vanilla", "num_heads": 2},
        **{"d_model": 8, "layers": 2, "feed_forward": 16, **options},
    )


def tokens(batch=3, length=LENGTH, seed=1):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def changed(ids, place):
    other = ids.clone()
    other[:, place] = (other[:, place] + 1) % VOCABULARY
    return other


def test_it_answers_from_the_first_token_or_from_every_one():
    first, every = make(), make(pooling="every")
    assert first(tokens()).shape == (3, CLASSES)
    assert every(tokens()).shape == (3, LENGTH, CLASSES)
    torch.testing.assert_close(first(tokens()), every(tokens())[:, 0])


def test_a_decoder_sees_nothing_that_comes_later_and_an_encoder_does():
    decoder, encoder = make(causal=True, pooling="every"), make(pooling="every")
    for model, sees in ((decoder, False), (encoder, True)):
        before, after = model(tokens()), model(changed(tokens(), LENGTH - 1))
        assert torch.equal(before[:, :-1], after[:, :-1]) is not sees
        assert not torch.equal(before[:, -1], after[:, -1])


def test_tokens_that_the_key_mask_hides_are_not_felt():
    model, key_mask = make(pooling="every"), torch.ones(3, LENGTH, dtype=torch.bool)
    key_mask[:, 7:] = False
    before, after = model(tokens(), key_mask), model(changed(tokens(), slice(7, None)), key_mask)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert not torch.equal(model(tokens())[:, :7], before[:, :7])


@pytest.mark.parametrize(
    ("positions", "given"), [("learned", "none"), ("none", "none"), ("rotary", "rotary"), ("alibi", "alibi")]
)
def test_positions_are_a_table_or_up_to_the_attention(positions, given):
    model = make(positions=positions)
    assert [attention.positions for attention in model.attentions] == [given, given]
    assert (model.position_embedding is not None) is (positions == "learned")


def test_the_order_of_tokens_matters_only_with_positions():
    ids = tokens()
    swapped = ids[:, [0, 2, 1, *range(3, LENGTH)]]
    for positions, matters in (("none", False), ("learned", True), ("rotary", True), ("alibi", True)):
        model = make(positions=positions).double()
        if positions == "learned":
            torch.nn.init.normal_(model.position_embedding.weight)  # it starts from zero
        assert torch.allclose(model(ids), model(swapped)) is not matters, positions


def test_only_learned_positions_limit_the_length():
    with pytest.raises(InputError, match="13 tokens in a sequence, but positions are learned for 12"):
        make()(tokens(length=13))
    assert make()(tokens(length=5)).shape == (3, CLASSES)
    assert make(positions="rotary")(tokens(length=13)).shape == (3, CLASSES)


def spread(model):
    """The model with learned positions that matter; they start from nothing."""
    torch.nn.init.normal_(model.position_embedding.weight)
    return model


@pytest.mark.parametrize("checkpointing", [False, True, "attention"])
def test_pieces_read_with_caches_give_what_the_whole_gives(checkpointing):
    model = spread(make(causal=True, pooling="every", gradient_checkpointing=checkpointing)).double()
    caches = model.new_caches(3, LENGTH)
    pieces = [model(piece, caches=caches) for piece in tokens().split([5, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens()))
    with pytest.raises(InputError, match="13 tokens in a sequence, but positions are learned for 12"):
        model(tokens(length=1), caches=caches)
    assert [cache.length for cache in caches] == [LENGTH, LENGTH]


def test_padding_on_the_left_changes_nothing_with_caches_and_without():
    model = spread(make(causal=True, pooling="every")).double()
    key_mask = torch.arange(LENGTH) >= torch.tensor([[0], [3], [8]])
    whole, caches = model(tokens(), 2 * key_mask.int()), model.new_caches(3, LENGTH)
    parts = [(0, 9), (9, 10), (10, LENGTH)]
    pieces = [model(tokens()[:, begin:end], key_mask[:, :end], caches) for begin, end in parts]
    for row, padding in enumerate((0, 3, 8)):
        alone = model(tokens()[row : row + 1, padding:])[0]
        torch.testing.assert_close(whole[row, padding:], alone)
        torch.testing.assert_close(torch.cat(pieces, dim=1)[row, padding:], alone)


def test_caches_are_for_models_with_a_next_token():
    with pytest.raises(NotSupportedError, match="answers from the first token"):
        make(causal=True).new_caches(1, 8)
    with pytest.raises(NotSupportedError, match="causal=True"):
        make(pooling="every").new_caches(1, 8)


def test_a_model_supports_what_the_attention_of_every_layer_does():
    model = make(causal=True)
    assert model.supports("cache")
    model.layers[1].attention = make().attentions[0]
    assert not model.supports("cache")


@pytest.mark.parametrize("given", [{}, {"seed": 7}])
def test_layers_draw_different_patterns_from_one_seed(given):
    attention = {"name": "bigbird", "num_heads": 2, "block": 1, "window_blocks": 1, "random_blocks": 2, **given}
    one, two = (attention.pattern for attention in make(attention=attention).attentions)
    assert one != two
    from attnzoo import build

    for layer, pattern in enumerate((one, two)):
        options = {**attention, "seed": given.get("seed", 0) + layer}
        assert build(d_model=8, **options).pattern == pattern


def test_checkpointing_changes_no_gradient_also_where_the_input_needs_none():
    def gradients(checkpointing):
        model = make(dropout=0.3, gradient_checkpointing=checkpointing)
        model.token_embedding.requires_grad_(False)
        model.position_embedding.requires_grad_(False)
        calls = Counter()
        for layer in model.layers:
            layer.widen.register_forward_pre_hook(lambda *_: calls.update(["feed-forward"]))
            layer.attention.register_forward_pre_hook(lambda *_: calls.update(["attention"]))
        torch.manual_seed(3)
        F.cross_entropy(model(tokens()), torch.tensor([0, 1, 2])).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, calls

    plain, once = gradients(False)
    assert once == {"attention": 2, "feed-forward": 2}
    assert all(gradient is not None and gradient.any() for name, gradient in plain.items() if "k_proj.bias" not in name)
    for checkpointing, twice in (
        (True, {"attention": 4, "feed-forward": 4}),
        ("attention", {"attention": 4, "feed-forward": 2}),
    ):
        recomputed, calls = gradients(checkpointing)
        assert calls == twice
        for name, gradient in plain.items():
            torch.testing.assert_close(recomputed[name], gradient, rtol=0, atol=0)


def test_every_parameter_learns():
    model = make(pooling="every")
    F.cross_entropy(model(tokens()).flatten(0, 1), torch.zeros(3 * LENGTH, dtype=torch.long)).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_dropout_is_for_training_and_reaches_embedding_branches_and_feed_forward():
    model = make(dropout=0.5)
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert rates
    assert set(rates) == {0.5}
    assert not torch.equal(model(tokens()), model(tokens()))
    kept = make()
    kept.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(tokens()), kept(tokens()))


def test_a_fresh_model_guesses():
    loss = F.cross_entropy(make(d_model=64)(tokens(batch=200)), torch.arange(200) % CLASSES)
    assert abs(loss.item() - math.log(CLASSES)) < 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, not 0"),
        ({"d_model": 0}, "d_model must be"),
        ({"feed_forward": -1}, "feed_forward must be"),
        ({"dropout": 1.0}, "dropout must be a number in"),
        ({"positions": "rotery"}, "did you mean 'rotary'"),
        ({"d_model": 9}, "num_heads"),
        ({"attention": {"name": "vanilla", "num_heads": 2, "radius": 3}}, "radius"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        make(**options)
