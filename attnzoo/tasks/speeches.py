"""The embedded text: State of the Union speeches, each in exactly one split. See data/README.md."""

import functools
import gzip
import importlib.resources
import json
from dataclasses import dataclass

SPLIT_OF_REMAINDER = {2: "valid", 7: "test"}


@dataclass(frozen=True)
class Speech:
    """One president's message to Congress."""

    year: int
    president: str
    party: str
    text: str


@functools.cache
def speeches(split: str) -> tuple[Speech, ...]:
    """The speeches of one split, oldest first: a tenth each for "valid" and "test", the rest for "train"."""
    packed = importlib.resources.files("attnzoo.tasks").joinpath("data", "speeches.jsonl.gz").read_bytes()
    every = [Speech(**json.loads(line)) for line in gzip.decompress(packed).decode("utf-8").splitlines()]
    return tuple(speech for i, speech in enumerate(every) if SPLIT_OF_REMAINDER.get(i % 10, "train") == split)
