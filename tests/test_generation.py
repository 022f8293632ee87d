"""Writing on: what is drawn, that cache, padding and batch change nothing, and the command."""

import io
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnzoo import cli
from attnzoo.errors import OptionError, RecipeError
from attnzoo.tasks.characters import encode
from attnzoo.training import checkpoints, generation
from attnzoo.training.generation import Decoder, LanguageModelRun, Text
from attnzoo.training.model import Transformer
from attnzoo.training.recipe import load
from attnzoo.training.runs import RunFolder
from attnzoo.training.sampling import Sampling, probabilities
from attnzoo.training.train import train

torch.set_num_threads(1)

CHARACTERS = ["<unk>", "\n", " ", *"abcdefghijk"]
LENGTH = 64
GREEDY = Sampling(temperature=0)
PROMPTS = ["a", "kick a bad", "", "face a big", "a"]
VARIANTS = {
    "vanilla": {},
    "gqa": {"num_kv_heads": 1},
    "local": {"radius": 3, "block": 4},
    "bigbird": {"block": 2, "window_blocks": 1, "random_blocks": 1},
    "kv_cached": {},
    "random_sparse": {"block": 2, "ratio": 0.5},
}
TIED_TO_PLACES = ("bigbird", "random_sparse")


def make(variant="vanilla", positions="rotary"):
    """A model with opinions, in float64 so that no rounding decides between two tokens."""
    torch.manual_seed(0)
    model = Transformer(
        vocabulary=len(CHARACTERS),
        length=LENGTH,
        classes=len(CHARACTERS),
        causal=True,
        pooling="every",
        attention={"name": variant, "num_heads": 2, **VARIANTS[variant]},
        d_model=16,
        feed_forward=32,
        positions=positions,
    ).double()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    return LanguageModelRun(model.eval(), CHARACTERS)


def written(run, prompts, tokens=30, sampling=GREEDY, stop=()):
    texts = [""] * len(prompts)
    for piece in run.generate(prompts, tokens=tokens, sampling=sampling, stop=stop):
        texts[piece.prompt] += piece.text
    return texts


# What is drawn


def defined(logits, temperature, top_k, top_p):
    """Temperature, top-k and top-p as they are defined, token by token."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: top_k or len(order)]
    weights = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    chances = {i: weight / sum(weights.values()) for i, weight in weights.items()}
    kept, total = [], 0.0
    for i in order:
        kept.append(i)
        total += chances[i]
        if total >= top_p:
            break
    whole = sum(chances[i] for i in kept)
    return [chances[i] / whole if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 5, 100])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_chances_are_what_their_definition_says(temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(1)
    tied = [1.0, 2.0, 1.0, 2.0, 0.0, 2.0]
    for logits in (tied, *torch.randn(5, 9, generator=generator, dtype=torch.float64).tolist()):
        found = probabilities(torch.tensor(logits), temperature, top_k, top_p)
        wanted = torch.tensor(defined(logits, temperature, top_k, top_p), dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_equally_likely_tokens_are_kept_in_their_order():
    ties = torch.tensor([1.0, 3.0, 3.0, 3.0])
    assert probabilities(ties, top_k=2).tolist() == [0, 0.5, 0.5, 0]
    assert probabilities(ties, top_k=3, top_p=0.4).tolist() == [0, 0.5, 0.5, 0]
    assert probabilities(ties, temperature=0).tolist() == [0, 1, 0, 0]
    assert probabilities(torch.zeros(2), top_p=0.5).tolist() == [1, 0]
    assert probabilities(torch.zeros(5_000), top_k=10).nonzero().flatten().tolist() == list(range(10))


def test_a_tiny_top_p_keeps_the_likeliest_and_1_keeps_all():
    logits = torch.tensor([0.0, 5.0, -80.0])
    assert probabilities(logits, top_p=5e-324).tolist() == [0, 1, 0]
    assert (probabilities(logits) > 0).all()


@pytest.mark.parametrize(
    ("temperature", "chances"), [(0, [0, 1, 0]), (5e-324, [0, 1, 0]), (1e308, [1 / 3] * 3), (1, None)]
)
def test_temperature_goes_from_the_likeliest_to_no_difference(temperature, chances):
    logits = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    wanted = logits.softmax(-1) if chances is None else torch.tensor(chances, dtype=torch.float64)
    torch.testing.assert_close(probabilities(logits, temperature), wanted)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    sampling, logits = Sampling(temperature=2.0, top_k=3), torch.tensor([0.0, 1.0, 2.0, -1.0])
    generator = sampling.generator(0)
    drawn = torch.tensor([sampling.draw(logits, generator) for _ in range(4_000)])
    found = drawn.bincount(minlength=4).double() / len(drawn)
    torch.testing.assert_close(found, probabilities(logits, 2.0, 3), rtol=0, atol=0.03)
    assert found[3] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"seed": -1},
    ],
)
def test_impossible_values_are_refused(wrong):
    with pytest.raises(OptionError, match=f"{next(iter(wrong))} must be"):
        Sampling(**wrong)


# Stop texts


def fed(text, *stop):
    """The pieces of a text that is fed character by character, and how it ended."""
    growing = Text(len(text), stop)
    pieces = []
    for character in text:
        pieces.append(growing.add(character))
        if growing.stopped:
            break
    return pieces, growing.stopped


@pytest.mark.parametrize(
    ("text", "stop", "pieces", "stopped"),
    [
        ("abc", (), ["a", "b", "c"], "length"),
        ("abcd", ("bc",), ["a", "", ""], "stop"),
        ("abab!", ("abac",), ["", "", "", "ab", "ab!"], "length"),
        ("aab", ("ab",), ["", "a", ""], "stop"),
        ("xabd", ("abcd", "b"), ["x", "", "a"], "stop"),
        ("abc", ("bc", "abc"), ["", "", ""], "stop"),
        ("xab", ("abc",), ["x", "", "ab"], "length"),
        ("ab", ("a",), [""], "stop"),
    ],
)
def test_a_text_ends_before_a_stop_text_and_no_part_of_one_is_shown(text, stop, pieces, stopped):
    assert fed(text, *stop) == (pieces, stopped)


def test_pieces_join_to_the_text_before_the_first_stop_text():
    for letters in itertools.product("ab", repeat=6):
        text = "".join(letters)
        for stop in (("aab",), ("ba", "abb"), ("abab", "bb", "aaaa")):
            ends = [text.index(one) + len(one) for one in stop if one in text]
            wanted = text
            if ends:
                first = min(ends)
                wanted = text[: min(text.index(one) for one in stop if one in text[:first])]
            assert "".join(fed(text, *stop)[0]) == wanted, (text, stop)


# What the model writes


@pytest.mark.parametrize("positions", ["rotary", "alibi", "learned"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_with_a_cache_writes_what_full_passes_write_one_at_a_time(variant, positions):
    run = make(variant, positions)
    assert run.model.supports("left_padding") is (variant not in TIED_TO_PLACES)
    for sampling in (GREEDY, Sampling(seed=2, temperature=1.5, top_p=0.95)):
        found = written(run, PROMPTS, sampling=sampling, tokens=20)
        for i, prompt in enumerate(PROMPTS):
            assert found[i] == recomputed(run, prompt, sampling, sampling.generator(i)), prompt
    assert len(set(found)) == len(PROMPTS)


def recomputed(run, prompt, sampling, generator):
    """The text by a full pass over all that is there for each token."""
    ids = encode(prompt or "\n", CHARACTERS).long()
    for _ in range(20):
        with torch.no_grad():
            logits = run.model(ids[None])[0, -1]
        logits[0] = -math.inf
        ids = torch.cat([ids, torch.tensor([sampling.draw(logits, generator)])])
    return "".join(CHARACTERS[i] for i in ids[-20:])


@pytest.mark.parametrize("variant", ["kv_cached", "local"])
def test_padding_on_the_left_moves_float32_logits_by_rounding_only(variant):
    run = make(variant, "learned")
    run.model.float()
    prompts = [encode(prompt, CHARACTERS).long() for prompt in ("a", "kick a bad")]
    together = Decoder(run.model, prompts, 9)
    alone = [Decoder(run.model, [prompt], 9) for prompt in prompts]
    for token in range(3, 12):
        wanted = torch.cat([decoder.logits() for decoder in alone])
        torch.testing.assert_close(together.logits(), wanted, rtol=1e-4, atol=1e-4)
        for decoder in alone:
            decoder.append([token])
        together.append([token, token])


def test_prompts_are_read_together_where_the_pattern_allows_and_once():
    for variant, batches in (("vanilla", [5]), ("bigbird", [1] * 5)):
        run, seen = make(variant), []
        run.model.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(tuple(given[0].shape)))
        written(run, PROMPTS, tokens=4)
        assert [batch for batch, length in seen] == [batch for batch in batches for _ in range(4)]
        longest = 10 if batches == [5] else 1
        assert [length for _, length in seen[:4]] == [longest, 1, 1, 1]


def test_a_seed_decides_a_text_whatever_else_is_written():
    run = make("gqa")
    for sampling in (Sampling(seed=3), Sampling(seed=3, temperature=2.0, top_k=9, top_p=0.95)):
        first = written(run, PROMPTS, sampling=sampling)
        torch.rand(5)  # the state of torch's generator plays no part
        assert written(run, PROMPTS, sampling=sampling) == first
        assert written(run, PROMPTS[:2], sampling=sampling) == first[:2]
        assert written(run, PROMPTS[:1], sampling=sampling) == first[:1]
        assert written(run, ["k", *PROMPTS[1:]], sampling=sampling)[1:] == first[1:]
        assert first[0] != first[4], "one prompt twice should give two texts"
    assert written(run, PROMPTS, sampling=Sampling(seed=4)) != written(run, PROMPTS, sampling=Sampling(seed=3))


def test_a_text_that_has_ended_does_not_end_the_others():
    run = make()
    free = written(run, PROMPTS, sampling=Sampling(seed=1))
    stop = free[0][5:7]
    pieces = list(run.generate(PROMPTS, tokens=30, sampling=Sampling(seed=1), stop=[stop]))
    cut = ["".join(piece.text for piece in pieces if piece.prompt == i) for i in range(len(PROMPTS))]
    assert cut == [text.partition(stop)[0] for text in free]
    assert len(set(map(len, cut))) > 1
    for i, text in enumerate(free):
        ended = "stop" if stop in text else "length"
        count = text.index(stop) + len(stop) if stop in text else 30
        assert [piece.stopped for piece in pieces if piece.prompt == i] == [None] * (count - 1) + [ended]


def test_a_piece_comes_before_the_next_is_computed_and_gradients_stay_on():
    run, calls = make(), []
    run.model.register_forward_pre_hook(lambda *_: calls.append(torch.is_inference_mode_enabled()))
    pieces = run.generate(["a"], tokens=5, sampling=GREEDY)
    for count in range(1, 6):
        assert len(next(pieces).text) == 1
        assert calls == [True] * count
        assert not torch.is_inference_mode_enabled()


def test_it_stops_computing_when_all_texts_have_ended():
    run, calls = make(), []
    first = written(run, ["a"], tokens=1)[0]
    run.model.register_forward_pre_hook(lambda *_: calls.append(1))
    [piece] = run.generate(["a"], tokens=50, sampling=GREEDY, stop=[first])
    assert (piece.text, piece.stopped, len(calls)) == ("", "stop", 1)


def test_the_unknown_character_is_never_written():
    run = make()
    with torch.no_grad():
        run.model.head.bias[0] = 1e3
    assert all(len(text) == 30 and "<" not in text for text in written(run, PROMPTS, sampling=Sampling()))


def test_characters_that_training_never_saw_are_named():
    with pytest.warns(UserWarning, match=r"not trained on 'é', '𝄞': read as unknown"):
        both = written(make(), ["aéb𝄞", "c"])
    with pytest.warns(UserWarning, match="'z'"):
        assert written(make(), ["azbz"])[0] == both[0], "all unknown ones are one"
    with pytest.warns(UserWarning, match="udcff"):  # a byte of the command line that is no UTF-8
        written(make(), ["a\udcff"])


def test_an_empty_prompt_is_a_line_break():
    run = make()
    assert written(run, [""]) == written(run, ["\n"])


def test_learned_positions_end_where_they_end():
    run = make(positions="learned")
    assert len(written(run, ["a" * 10], tokens=LENGTH - 9)[0]) == LENGTH - 9
    with pytest.raises(
        OptionError, match=r"prompt 2 has 10 characters, and 56 .* learned positions for 64; lower .* 55"
    ):
        run.generate(["a", "a" * 10], tokens=LENGTH - 8, sampling=GREEDY)
    with pytest.raises(OptionError, match=r"has 65 characters, and 1 tokens more .* shorten it to 64 or less"):
        run.generate(["a" * 65], tokens=1, sampling=GREEDY)


@pytest.mark.parametrize("positions", ["rotary", "alibi", "none"])
def test_other_positions_do_not_end(positions):
    assert len(written(make(positions=positions), ["a" * 60], tokens=40)[0]) == 40


@pytest.mark.parametrize(("wrong", "said"), [({"tokens": 0}, "tokens must be"), ({"stop": ["a", ""]}, "stop must not")])
def test_what_can_not_be_written_is_refused_before_the_first_piece(wrong, said):
    with pytest.raises(OptionError, match=said):
        make().generate(["a"], **{"tokens": 5, "sampling": GREEDY, **wrong})


# Runs and the command

TINY = """
task: {name: language_model, path: text.txt, length: 32}
attention: {name: kv_cached, num_heads: 2, num_kv_heads: 1}
model: {d_model: 16, layers: 2, feed_forward: 32, positions: rotary}
train: {max_steps: 60, batch_size: 8, lr: 1e-2, warmup_steps: 2, valid_every: 30}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of a language model, whose text is gone."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "text.txt").write_text("a bad cabbage fed a decaf\n" * 200)
        (folder / "tiny.yaml").write_text(TINY)
        train(load("tiny.yaml"))
        (folder / "text.txt").unlink()
    return folder


@pytest.fixture
def there(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return "runs/tiny/1"


def spoilt(trained, tmp_path, change):
    """A copy of the run with another checkpoint."""
    folder = RunFolder(tmp_path / "run")
    checkpoint = checkpoints.load(trained / "runs/tiny/1/checkpoints/best.ckpt")
    change(checkpoint)
    checkpoints.save(checkpoint, folder.best)
    folder.recipe.write_text("")
    return str(folder.path)


def refused(outcome, *said):
    status, out, err = outcome
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    for words in said:
        assert words in err


def test_a_run_writes_what_it_was_trained_on_without_its_text(run, there):
    status, out, err = run("generate", there, "--prompt", "a bad c", "--temperature", "0", "--tokens", "9")
    assert (status, out, err) == (0, "abbage fe\n", "")


def test_loading_takes_the_best_weights_and_else_the_last_and_draws_nothing(trained, tmp_path):
    def shifted(checkpoint):
        checkpoint["state_dict"]["model.head.bias"] += 1

    before = torch.get_rng_state()
    folder = RunFolder.open(Path(spoilt(trained, tmp_path, shifted)))
    loaded = LanguageModelRun.load(folder.path).model
    assert not loaded.training
    best = loaded.head.bias
    checkpoints.save(checkpoints.load(trained / "runs/tiny/1/checkpoints/last.ckpt"), folder.last)
    assert torch.equal(LanguageModelRun.load(folder.path).model.head.bias, best)
    folder.best.unlink()
    assert not torch.equal(LanguageModelRun.load(folder.path).model.head.bias, best)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_of_lower_precision_are_computed_with_in_float32(trained, tmp_path):
    def lower(checkpoint):
        weights = checkpoint["state_dict"]
        weights.update({name: weight.bfloat16() for name, weight in weights.items()})

    model = LanguageModelRun.load(Path(spoilt(trained, tmp_path, lower))).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_several_prompts_are_headed_blocks_and_json_is_a_list(run, there):
    given = ("generate", there, "--prompt", "a bad", "--prompt", "a de\n" + "a" * 70, "--stop", "\n", "--top-k", "2")
    status, out, err = run(*given, "--json", "--tokens", "20")
    results = json.loads(out)
    assert (status, err) == (0, "")
    assert [result["prompt"] for result in results] == ["a bad", "a de\n" + "a" * 70]
    for result in results:
        assert set(result) == {"prompt", "text", "tokens", "stopped"}
        assert result["stopped"] == ("length" if len(result["text"]) == 20 else "stop")
        assert result["tokens"] == len(result["text"]) + (result["stopped"] == "stop")
        assert "\n" not in result["text"]
    status, out, _ = run(*given, "--tokens", "20")
    assert status == 0
    blocks = {f"--- 1: 'a bad'\n{results[0]['text']}\n", f"--- 2: '...{'a' * 60}'\n{results[1]['text']}\n"}
    assert out in map("".join, itertools.permutations(blocks))


def test_a_prompt_comes_from_a_file_or_stdin_too(run, there, tmp_path, monkeypatch):
    given = ("--tokens", "7", "--seed", "5")
    wanted = run("generate", there, "--prompt", "fed a", *given)[1]
    (tmp_path / "prompt.txt").write_bytes(b"fed a\r\n")
    assert run("generate", there, "--prompt-file", str(tmp_path / "prompt.txt"), *given)[1] == wanted
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"fed a\n")))
    assert run("generate", there, "--prompt-file", "-", *given)[1] == wanted
    both = run("generate", there, "--prompt", "a", "--prompt-file", str(tmp_path / "prompt.txt"), "--json")[1]
    assert [result["prompt"] for result in json.loads(both)] == ["a", "fed a"]


def test_a_text_is_shown_as_it_is_written(there, monkeypatch):
    class Screen(io.StringIO):
        def flush(self):
            shown.append(self.getvalue())

    shown = []
    monkeypatch.setattr(sys, "stdout", Screen())
    assert cli.run(["generate", there, "--prompt", "a bad c", "--temperature", "0", "--tokens", "4"]) == 0
    assert shown[:4] == ["a", "ab", "abb", "abba"]


@pytest.mark.parametrize("given", [(), ("--prompt", "fed"), ("--json",)])
def test_ctrl_c_leaves_what_was_written_so_far(run, there, monkeypatch, given):
    honest, calls = Decoder.append, []

    def append(*given):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        honest(*given)

    monkeypatch.setattr(generation.Decoder, "append", append)
    status, out, err = run("generate", there, "--prompt", "a bad c", "--temperature", "0", *given)
    assert (status, err) == (130, "attnzoo: interrupted\n")
    if given == ("--json",):
        assert json.loads(out) == [{"prompt": "a bad c", "text": "abb", "tokens": 3, "stopped": "interrupted"}]
    else:
        assert out == ("--- 1: 'a bad c'\nabb\n--- 2: 'fed'\n a \n" if given else "abb\n")


@pytest.mark.filterwarnings("always")
def test_an_unknown_character_is_a_warning(run, there):
    status, out, err = run("generate", there, "--prompt", "añ", "--tokens", "3")
    assert (status, len(out)) == (0, 4)
    assert err == "warning: the model was not trained on 'ñ': read as unknown\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs/tiny/1"], ["no prompt: give --prompt TEXT or --prompt-file FILE"]),
        (["runs/tiny", "--prompt", "a"], ["runs/tiny has no recipe.yaml in it", "as in runs/"]),
        (["runs/tiny/2", "--prompt", "a"], ["runs/tiny/2 does not exist"]),
        (["runs/tiny/1", "--prompt", "a", "--temperature", "-1"], ["temperature must be"]),
        (["runs/tiny/1", "--prompt", "a", "--tokens", "0"], ["tokens must be"]),
        (["runs/tiny/1", "--prompt", "a", "--stop", ""], ["stop must not be empty"]),
        (["runs/tiny/1", "--prompt-file", "none.txt"], ["--prompt-file none.txt can't be read: No such file"]),
        (["runs/tiny/1", "--prompt-file", "runs"], ["--prompt-file runs can't be read"]),
        (["runs/tiny/1", "--prompt-file", "runs/tiny/1/curves.png"], ["is not text in UTF-8: see byte 0"]),
    ],
)
def test_wrong_input_is_one_message_and_status_2(run, there, arguments, said):
    refused(run("generate", *arguments), *said)


def test_a_run_that_can_not_write_says_why(run, trained, tmp_path):
    def of_another_task(checkpoint):
        checkpoint["hyper_parameters"]["recipe"]["task"]["name"] = "needle"

    def old(checkpoint):
        del checkpoint["task"]

    for number, (change, said) in enumerate(
        (
            (of_another_task, "is a run of the task needle, which writes nothing: name a run of language_model"),
            (old, "was trained before runs kept their characters: train it again with attnzoo train"),
        )
    ):
        refused(run("generate", spoilt(trained, tmp_path / str(number), change), "--prompt", "a"), said)

    folder = RunFolder(tmp_path)
    folder.recipe.write_text("")
    refused(run("generate", str(tmp_path), "--prompt", "a"), "has no checkpoint yet")
    folder.last.parent.mkdir()
    folder.last.write_bytes(b"nonsense")
    refused(run("generate", str(tmp_path), "--prompt", "a"), "last.ckpt can't be read as a checkpoint")


def test_an_attention_that_can_not_decode_says_what_does(trained, tmp_path, monkeypatch):
    from attnzoo.variants.kv_cached import KVCached

    monkeypatch.setattr(KVCached, "without", frozenset({"bidirectional", "cache"}))
    with pytest.raises(RecipeError, match="kv_cached can't decode with a cache; attnzoo list --supports causal,cache"):
        LanguageModelRun.load(trained / "runs/tiny/1")


def test_it_loads_neither_lightning_nor_metrics(there):
    program = (
        "import sys; from attnzoo import cli; "
        f"assert cli.run(['generate', {there!r}, '--prompt', 'a', '--tokens', '2']) == 0; "
        "print({'lightning', 'torchmetrics', 'omegaconf', 'matplotlib'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("set()\n"), done.stderr
