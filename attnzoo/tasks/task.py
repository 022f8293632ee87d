"""What every task is: three splits, a loss and metrics."""

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from torchmetrics import MetricCollection

from attnzoo.errors import RecipeError

Split = Literal["train", "valid", "test"]

IGNORED = -100
"""A target that neither loss nor metrics look at."""


class Task(ABC):
    """Sequences of token ids with targets, and how an answer is judged.

    An item is `{"tokens": int64 [t], "target": int64 [] or [t]}`: one target where `pooling` is "first" and the answer
    stands at the first token, one per token where it is "every". Item i depends on the seed, the split and i alone.
    """

    length: int
    vocabulary: int
    classes: int
    causal: bool
    pooling: Literal["first", "every"]

    @abstractmethod
    def split(self, name: Split) -> Dataset:
        """The items of one split, by index; no text is in two splits."""

    @abstractmethod
    def metrics(self) -> MetricCollection:
        """Fresh metrics by name, to be updated with logits and target."""

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps, in plain types, so that the model can be used without the data."""
        return {}

    def shape(self) -> dict[str, Any]:
        """What a model takes from its task, as arguments."""
        return {name: getattr(self, name) for name in ("vocabulary", "length", "classes", "causal", "pooling")}

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The mean cross-entropy over the targets that count, in nats and at least float32; 0 where none counts."""
        target = batch["target"].flatten()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(target.numel(), self.classes)
        total = F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum")
        return total / (target != IGNORED).sum().clamp(min=1)


def check_length(length: int, least: int, most: int, text: str) -> int:
    """Refuses a sequence length that a text can't fill."""
    if isinstance(length, bool) or not isinstance(length, int) or not least <= length <= most:
        raise RecipeError(f"length must be a whole number from {least} to {most} on {text}, not {length!r}")
    return length
