"""The tasks: what their items hold, that they repeat, and how answers are scored."""

import math
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from attnzoo import tasks
from attnzoo.errors import RecipeError
from attnzoo.tasks.language_model import LanguageModel
from attnzoo.tasks.metrics import Accuracy, BitsPerCharacter
from attnzoo.tasks.needle import LARGER_NUMBERS, NUMBERS, Needle, encoded, plain_words
from attnzoo.tasks.speeches import speeches
from attnzoo.tasks.task import IGNORED

SPLITS = ("train", "valid", "test")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in ("tokens", "target"))


def write(path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_catalogue():
    assert tasks.find("needle") is Needle
    assert tasks.find("language_model") is LanguageModel
    with pytest.raises(RecipeError, match=r"no task named 'nedle'\. Did you mean 'needle'\?"):
        tasks.find("nedle")


def test_the_catalogue_needs_no_torch():
    code = "import sys, attnzoo.tasks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_each_speech_is_in_one_split():
    found = [speech for split in SPLITS for speech in speeches(split)]
    assert len(found) == len({speech.text for speech in found}) == 30
    assert [len(speeches(split)) for split in SPLITS] == [24, 3, 3]
    assert [speech.year for speech in speeches("test")] == [1849, 1929, 2006]
    assert min(len(speech.text.split()) for speech in found) > 1_800
    assert speeches("valid")[0].president == "James Madison"


@pytest.mark.parametrize("make", [Needle, LanguageModel])
def test_items_depend_on_seed_split_and_index_alone(make):
    task, again, other = make(length=64, seed=3), make(length=64, seed=3), make(length=64, seed=4)
    for split in SPLITS:
        items, repeated = task.split(split), again.split(split)
        last = len(items) - 1
        assert same(items[last], repeated[last])
        assert same(items[0], repeated[0])
        assert not same(items[0], items[1])
    assert not same(task.split("train")[0], other.split("train")[0])


@pytest.mark.parametrize("make", [Needle, LanguageModel])
def test_shape_and_size_of_a_split(make):
    task = make(length=50)
    for split in SPLITS:
        items = task.split(split)
        seen = [items[i] for i in (0, 1, len(items) - 1)]
        for item in seen:
            assert item["tokens"].dtype == item["target"].dtype == torch.int64
            assert item["tokens"].shape == (50,)
            assert item["target"].shape == (() if task.pooling == "first" else (50,))
            assert 0 <= item["tokens"].min() <= item["tokens"].max() < task.vocabulary
            assert 0 <= item["target"].min() <= item["target"].max() < task.classes
        for beyond in (-1, len(items)):
            with pytest.raises(IndexError):
                items[beyond]
    assert len(task.split("train")) == 1_000_000
    assert 200 < len(task.split("valid")) <= 500 < len(task.split("test")) <= 1_000


@pytest.mark.parametrize("make", [Needle, LanguageModel])
def test_global_random_state_is_left_alone(make):
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    task = make(length=64)
    for split in SPLITS:
        task.split(split)[5]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert (np.random.get_state()[1] == states[2]).all()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("length", [8, 129])
def test_one_needle_and_no_other_number(split, length):
    task = Needle(length=length)
    items = task.split(split)
    numbers = {*NUMBERS, *LARGER_NUMBERS.split()}
    answers, places = Counter(), set()
    for i in range(400):
        text = [task.words[token] for token in items[i]["tokens"].tolist()]
        answer = NUMBERS[items[i]["target"]]
        assert text[0] == "<cls>"
        assert text.count("<cls>") == 1
        assert [word for word in text if word in numbers or any(map(str.isdigit, word))] == [answer]
        place = text.index(answer)
        assert text[place - 4 : place] == ["the", "pass", "key", "is"]
        assert place >= 5
        answers[answer] += 1
        places.add(place)
    assert set(answers) == set(NUMBERS)
    assert min(answers.values()) > 15  # 40 are expected, with a deviation of 6
    assert min(places) <= 5 + length // 10
    assert max(places) >= length - 1 - length // 10


def test_the_rest_of_a_haystack_is_a_stretch_of_one_speech_of_its_split():
    task = Needle(length=100)
    for split in SPLITS:
        texts = [" ".join(map(str, text.tolist())) for text in encoded(split)]
        items = task.split(split)
        for i in range(20):
            tokens = items[i]["tokens"].tolist()
            place = next(j for j, token in enumerate(tokens) if task.words[token] in NUMBERS)
            stretch = " ".join(map(str, tokens[1 : place - 4] + tokens[place + 1 :]))
            assert sum(f" {stretch} " in f" {text} " for text in texts) == 1


def test_no_speech_asks_for_a_pass_key():
    for split in SPLITS:
        assert not any("pass key" in " ".join(plain_words(speech.text)) for speech in speeches(split))


def test_words_come_from_the_training_speeches():
    known = {word for speech in speeches("train") for word in plain_words(speech.text)}
    task = Needle()
    assert task.vocabulary == len(set(task.words)) == 4_096
    assert {*task.words[7 + len(NUMBERS) :]} <= known
    assert task.length == 512


@pytest.mark.parametrize("length", [0, 7, -1, 1_000_000, True, 64.0, None])
def test_needle_refuses_a_length(length):
    with pytest.raises(RecipeError, match=rf"length must be a whole number from 8 to 1\d{{4}} .*not {length!r}"):
        Needle(length=length)


def test_the_longest_needle_that_is_offered_works():
    with pytest.raises(RecipeError) as refused:
        Needle(length=1_000_000)
    longest = int(str(refused.value).split(" to ")[1].split()[0])
    task = Needle(length=longest)
    assert all(task.split(split)[3]["tokens"].shape == (longest,) for split in SPLITS)
    with pytest.raises(RecipeError):
        Needle(length=longest + 1)


def test_a_characters_target_is_the_next_character():
    task = LanguageModel(length=40)
    whole = {split: "\n\n".join(speech.text for speech in speeches(split)) for split in SPLITS}
    for split in SPLITS:
        item = task.split(split)[7]
        assert torch.equal(item["tokens"][1:], item["target"][:-1])
        shown = "".join(task.characters[i] for i in [*item["tokens"].tolist(), item["target"][-1].item()])
        if split == "train":
            assert shown in whole[split]
    first, second = task.split("test")[0], task.split("test")[1]
    assert "".join(task.characters[i] for i in first["tokens"].tolist()) == whole["test"][:40]
    assert second["tokens"][0] == task.encode(whole["test"][len(whole["test"]) // 40 // 1_000 * 40])[0]


def test_windows_cover_a_short_text_once(tmp_path):
    text = "".join(chr(ord("a") + i % 23) for i in range(2_000))
    task = LanguageModel(path=write(tmp_path / "text.txt", text), length=33)
    valid = task.split("valid")
    assert len(valid) == 99 // 33
    shown = "".join(task.characters[i] for item in (valid[0], valid[1], valid[2]) for i in item["tokens"].tolist())
    assert shown == text[1_800:1_899]


def test_a_file_of_ones_own(tmp_path):
    text = "To be, or not to be: that is the question. " * 90 + "ß" * 500
    path = write(tmp_path / "hamlet.txt", text)
    task = LanguageModel(path=path, length=16)
    assert task.vocabulary == task.classes == len(task.characters)
    assert task.characters[0] == "<unk>"
    assert set(task.characters[1:]) == set(text[: len(text) * 90 // 100])
    assert (task.causal, task.pooling) == (True, "every")
    test = task.split("test")[0]
    assert (test["tokens"] == task.encode("ß")).all()
    assert {len(task.parts[split]) for split in ("valid", "test")} <= {len(text) // 20, len(text) // 20 + 1}


def test_characters_unknown_to_training_are_unknown(tmp_path):
    task = LanguageModel(path=write(tmp_path / "text.txt", "ab" * 900 + "é" * 200), length=16)
    assert task.characters == ("<unk>", "a", "b")
    assert (task.split("test")[0]["target"] == 0).all()
    assert task.encode("abé𝄞").tolist() == [1, 2, 0, 0]


def test_a_vocabulary_has_a_limit(tmp_path):
    rare = "".join(chr(0x4E00 + i) for i in range(2_000))
    task = LanguageModel(path=write(tmp_path / "text.txt", rare + "xy" * 4_000), length=16)
    assert task.vocabulary == 1_024
    assert {"x", "y"} <= set(task.characters)


def test_a_byte_order_mark_is_no_character(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbf" + b"abc\r\n" * 200)
    task = LanguageModel(path=str(tmp_path / "text.txt"), length=8)
    assert task.characters == ("<unk>", "\n", "a", "b", "c")


def test_language_model_refuses_what_is_no_text(tmp_path):
    (tmp_path / "latin.txt").write_bytes("déjà vu ".encode("latin-1") * 100)
    refused = {
        str(tmp_path): "is a directory",
        "": "is a directory",
        str(tmp_path / "none.txt"): "there is no file",
        str(tmp_path / "latin.txt"): "is not text in UTF-8",
        "/dev/null": "must be a text file",
        "a\0b": "can't be read",
        write(tmp_path / "empty.txt", ""): "too short for any sequence",
    }
    for path, why in refused.items():
        with pytest.raises(RecipeError, match=why) as error:
            LanguageModel(path=path)
        assert path in str(error.value)


def test_language_model_says_which_length_a_text_can_fill(tmp_path):
    path = write(tmp_path / "short.txt", "x" * 5_000)
    with pytest.raises(RecipeError, match=r"from 2 to 249 on .*short\.txt \(5,000 characters, 250 in .*, not 512"):
        LanguageModel(path=path)
    assert len(LanguageModel(path=path, length=249).split("test")) == 1
    for length in (0, 1, True, 250):
        with pytest.raises(RecipeError):
            LanguageModel(path=path, length=length)
    with pytest.raises(RecipeError, match="from 2 to"):
        LanguageModel(length=10_000_000)


@pytest.mark.parametrize("task", [Needle(length=8), LanguageModel(length=8)], ids=["first", "every"])
def test_loss(task):
    shape = (3,) if task.pooling == "first" else (3, 8)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, task.classes, generator=generator, requires_grad=True)
    target = torch.randint(task.classes, shape, generator=generator)
    target[0] = IGNORED
    loss = task.loss(logits, {"target": target})
    kept = logits.double()[1:].log_softmax(-1).gather(-1, target[1:, ..., None])
    torch.testing.assert_close(loss.double(), -kept.mean())
    loss.backward()
    assert logits.grad[0].abs().max() == 0 < logits.grad[1:].abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_batch_without_targets_costs_nothing(dtype):
    task = LanguageModel(length=8)
    logits = torch.full((2, 8, task.classes), 3.0, dtype=dtype, requires_grad=True)
    loss = task.loss(logits, {"target": torch.full((2, 8), IGNORED)})
    loss.backward()
    assert loss == 0
    assert loss.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_metrics_leave_out_what_is_ignored():
    task = LanguageModel(length=8)
    metrics = task.metrics()
    assert set(metrics.keys()) == {"bits_per_character", "accuracy"}
    logits = torch.zeros(2, 4, task.classes)
    target = torch.tensor([[0, 0, 1, IGNORED], [IGNORED] * 4])
    metrics.update(logits, target)
    metrics.update(logits[:1], torch.tensor([[0, 2, 3, IGNORED]]))
    values = metrics.compute()
    assert values["accuracy"].item() == pytest.approx(3 / 6)
    assert values["bits_per_character"].item() == pytest.approx(math.log2(task.classes), rel=1e-6)


def test_metrics_are_exact_in_half_precision():
    logits = torch.zeros(4_096, 3, dtype=torch.bfloat16)
    metric = BitsPerCharacter()
    metric.update(logits, torch.zeros(4_096, dtype=torch.int64))
    assert metric.compute().item() == pytest.approx(math.log2(3), rel=1e-5)
    assert metric.compute().dtype == torch.float32


def test_metrics_sum_over_processes():
    """What DDP does: states of all processes are summed, then the quotient is taken."""
    first, second, whole = Accuracy(), Accuracy(), Accuracy()
    logits, target = torch.eye(4)[[0, 1, 2, 3, 3]], torch.tensor([0, 1, 0, 0, IGNORED])
    first.update(logits[:1], target[:1])
    second.update(logits[1:], target[1:])
    whole.update(logits, target)
    assert all(reduce is torch.sum or reduce.__name__ == "dim_zero_sum" for reduce in first._reductions.values())
    assert (first.hits + second.hits) / (first.count + second.count) == whole.compute() == 0.5
    assert Needle(length=8).metrics().keys() == {"accuracy": None}.keys()
