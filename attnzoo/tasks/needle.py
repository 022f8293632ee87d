"""Find one fact in a long real text: which number is the pass key?"""

import bisect
import functools
import itertools
import operator
import random
import re
from collections import Counter

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchmetrics import MetricCollection

from attnzoo.tasks.metrics import Accuracy
from attnzoo.tasks.speeches import speeches
from attnzoo.tasks.task import Split, Task, check_length

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LARGER_NUMBERS = """
    ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty
    seventy eighty ninety hundred hundreds thousand thousands million millions billion billions trillion trillions
"""
PHRASE = ("the", "pass", "key", "is")
PADDING, UNKNOWN, QUESTION = "<pad>", "<unk>", "<cls>"
VOCABULARY = 4096
LEAST = 8
SIZES = {"train": 1_000_000, "valid": 500, "test": 1_000}


class Needle(Task):
    """Words of one speech with "the pass key is N" put somewhere among them; N is asked at the first token.

    The text's own number words and figures are left out, so the needle's is the only one. The first token is always the
    question, `<cls>`; the needle stands anywhere after it. The training split has a million items, drawn as they are
    asked for.

    Args:
        length: tokens in a sequence, the question and the needle included.
    Raises:
        RecipeError: length is too short for a needle, or longer than the speeches.
    Source: the passkey task of Mohtashami and Jaggi 2023, arXiv:2305.16300, as a classification over real text.
    """

    classes = len(NUMBERS)
    causal = False
    pooling = "first"

    def __init__(self, *, length: int = 512, seed: int = 0) -> None:
        longest = min(max(map(len, encoded(name))) for name in SIZES)
        self.length = check_length(length, LEAST, longest + 1 + len(PHRASE) + 1, "the speeches")
        self.seed = seed
        self.words = words()
        self.vocabulary = len(self.words)

    def split(self, name: Split) -> Dataset:
        return Haystacks(name, self.length, self.seed)

    def metrics(self) -> MetricCollection:
        return MetricCollection({"accuracy": Accuracy()})


class Haystacks(Dataset):
    """The items of one split: item i is drawn by a generator of its own."""

    def __init__(self, name: Split, length: int, seed: int) -> None:
        self.size = SIZES[name]
        self.label = f"needle {seed} {name}"
        self.length = length
        identity = {word: i for i, word in enumerate(words())}
        self.question = torch.tensor([identity[QUESTION]])
        self.needles = [torch.tensor([identity[word] for word in (*PHRASE, number)]) for number in NUMBERS]
        self.text_length = length - 1 - len(PHRASE) - 1
        self.texts = [text for text in encoded(name) if len(text) >= self.text_length]
        # Each place where a text may begin is equally likely.
        self.ends = list(itertools.accumulate(len(text) - self.text_length + 1 for text in self.texts))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = operator.index(index)
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        draw = random.Random(f"{self.label} {index}")
        answer = draw.randrange(len(NUMBERS))
        before = draw.randrange(self.text_length + 1)
        begin = draw.randrange(self.ends[-1])
        which = bisect.bisect(self.ends, begin)
        begin -= self.ends[which - 1] if which else 0
        text = self.texts[which][begin : begin + self.text_length]
        tokens = torch.cat([self.question, text[:before], self.needles[answer], text[before:]])
        return {"tokens": tokens, "target": torch.tensor(answer)}


@functools.cache
def words() -> tuple[str, ...]:
    """The vocabulary, by id: special tokens, the needle's words, the most frequent words of the training speeches."""
    fixed = (PADDING, UNKNOWN, QUESTION, *PHRASE, *NUMBERS)
    counts = Counter(word for speech in speeches("train") for word in plain_words(speech.text))
    frequent = sorted((word for word in counts if word not in fixed), key=lambda word: (-counts[word], word))
    return (*fixed, *frequent[: VOCABULARY - len(fixed)])


@functools.cache
def encoded(name: Split) -> tuple[Tensor, ...]:
    """The speeches of a split as word ids, without numbers."""
    identity = {word: i for i, word in enumerate(words())}
    texts = [plain_words(speech.text) for speech in speeches(name)]
    return tuple(torch.tensor([identity.get(word, identity[UNKNOWN]) for word in text]) for text in texts)


def plain_words(text: str) -> list[str]:
    """A text's words in lower case, less number words and figures.

    >>> plain_words("The thirty-one treaties of 1793, Congress's own")
    ['the', 'treaties', 'of', "congress's", 'own']
    """
    left_out = {*NUMBERS, *LARGER_NUMBERS.split()}
    return [word for word in re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*", text.lower()) if word not in left_out]
