"""Write on: the next character of the speeches, or of a text of yours."""

import hashlib
import operator
import random
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from torchmetrics import MetricCollection

from attnzoo.errors import RecipeError
from attnzoo.tasks.characters import UNKNOWN, encode
from attnzoo.tasks.metrics import Accuracy, BitsPerCharacter
from attnzoo.tasks.speeches import speeches
from attnzoo.tasks.task import Split, Task, check_length

VOCABULARY = 1024
LEAST = 2
MOST_WINDOWS = {"train": 1_000_000, "valid": 500, "test": 1_000}


class LanguageModel(Task):
    """Predicts each next character, on the embedded speeches or on a text file.

    A file is cut, in order, into 90 % for training, 5 % for validation and 5 % for the test; the speeches are split by
    speech. Training takes windows at random places; validation and test take windows side by side, at most 500 and
    1,000 of them, spread over the whole part. Characters that training never saw count as one unknown.

    Args:
        path: a text file in UTF-8; without it, the embedded speeches.
        length: characters in a sequence.
    Raises:
        RecipeError: the file can't be read as text, or is too short for sequences of this length.
    """

    causal = True
    pooling = "every"

    def __init__(self, *, path: str | None = None, length: int = 512, seed: int = 0) -> None:
        parts = embedded_parts() if path is None else file_parts(path)
        shortest = min(map(len, parts.values()))
        source = f"the text, of which {shortest:,} characters are in the smallest split"
        if path is not None:
            source = f"{path} ({sum(map(len, parts.values())):,} characters, {shortest:,} in the smallest split)"
        if shortest <= LEAST:
            raise RecipeError(f"{'path: ' if path else ''}the text is too short for any sequence: {source}")
        self.length = check_length(length, LEAST, shortest - 1, source)
        self.seed = seed
        self.digest = hashlib.sha256("\0".join(parts.values()).encode()).hexdigest()
        frequent = Counter(parts["train"]).most_common(VOCABULARY - 1)
        self.characters = (UNKNOWN, *sorted(character for character, _ in frequent))
        self.vocabulary = self.classes = len(self.characters)
        self.parts = {name: self.encode(part) for name, part in parts.items()}

    def encode(self, text: str) -> Tensor:
        """The ids of a text's characters, int16 [t]; 0 where a character is not in the vocabulary."""
        return encode(text, self.characters)

    def facts(self) -> dict[str, Any]:
        return {"characters": list(self.characters), "sha256": self.digest}

    def split(self, name: Split) -> Dataset:
        if name == "train":
            return RandomWindows(self.parts[name], self.length, f"language_model {self.seed} {name}")
        return Windows(self.parts[name], self.length, MOST_WINDOWS[name])

    def metrics(self) -> MetricCollection:
        return MetricCollection({"bits_per_character": BitsPerCharacter(), "accuracy": Accuracy()})


class Windows(Dataset):
    """Windows side by side; where there are more than `most`, that many at even distances."""

    def __init__(self, text: Tensor, length: int, most: int) -> None:
        self.text = text
        self.length = length
        self.places = (len(text) - 1) // length
        self.size = min(most, self.places)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = operator.index(index)
        if not 0 <= index < self.size:
            raise IndexError(f"window {index} of {self.size}")
        begin = self.begin(index)
        window = self.text[begin : begin + self.length + 1].long()
        return {"tokens": window[:-1], "target": window[1:]}

    def begin(self, index: int) -> int:
        return index * self.places // self.size * self.length


class RandomWindows(Windows):
    """A million windows at random places; window i is drawn by a generator of its own."""

    def __init__(self, text: Tensor, length: int, label: str) -> None:
        super().__init__(text, length, MOST_WINDOWS["train"])
        self.size = MOST_WINDOWS["train"]
        self.label = label

    def begin(self, index: int) -> int:
        return random.Random(f"{self.label} {index}").randrange(len(self.text) - self.length)


def embedded_parts() -> dict[str, str]:
    return {name: "\n\n".join(speech.text for speech in speeches(name)) for name in MOST_WINDOWS}


def file_parts(path: str) -> dict[str, str]:
    file = Path(path).expanduser()
    if file.exists() and not file.is_file():
        raise RecipeError(f"path must be a text file, and {path!r} is {'a directory' if file.is_dir() else 'none'}")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"path: {path} is not text in UTF-8 (see byte {error.start}); convert it first") from None
    except FileNotFoundError:
        raise RecipeError(f"path: there is no file {path} (looked for {file.absolute()})") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"path: {path} can't be read: {error}") from None
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    return {"train": text[:first], "valid": text[first:second], "test": text[second:]}
