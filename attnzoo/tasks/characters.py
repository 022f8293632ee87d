"""Text as ids of characters."""

from collections.abc import Sequence

import torch
from torch import Tensor

UNKNOWN = "<unk>"
CODE_POINTS = 0x110000


def encode(text: str, characters: Sequence[str]) -> Tensor:
    """The ids of a text's characters, int16 [t]: their places among `characters`, the first of which is `UNKNOWN` and
    stands for all that are not there.
    """
    table = torch.zeros(CODE_POINTS, dtype=torch.int16)
    for i, character in enumerate(characters[1:], start=1):
        table[ord(character)] = i
    codes = torch.frombuffer(bytearray(text.encode("utf-32-le", "surrogatepass")), dtype=torch.int32)
    return table[codes]
