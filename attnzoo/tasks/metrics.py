"""How answers are scored: exact counts, summed over all batches and processes."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from attnzoo.tasks.task import IGNORED


class Accuracy(Metric):
    """The share of the targets that the largest logit names."""

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    hits: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        self.hits += (logits.argmax(-1) == target).sum()
        self.count += (target != IGNORED).sum()

    def compute(self) -> Tensor:
        return self.hits / self.count


class BitsPerCharacter(Metric):
    """The mean cross-entropy of the targets, in bits."""

    full_state_update = False
    higher_is_better = False
    is_differentiable = True
    nats: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        logits = logits.flatten(0, -2).float()
        self.nats += F.cross_entropy(logits, target.flatten(), ignore_index=IGNORED, reduction="sum")
        self.count += (target != IGNORED).sum()

    def compute(self) -> Tensor:
        return self.nats / self.count / math.log(2)
