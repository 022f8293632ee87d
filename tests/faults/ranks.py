"""A training in which each process writes down what it drew and measured, in rank-0.json and so on.

torchrun --standalone --nproc-per-node 2 -m tests.faults.ranks RECIPE [SECTION.KEY=VALUE ...]
"""

import json
import os
import sys
from pathlib import Path

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from attnzoo.attention import Attention
from attnzoo.training.callbacks import StepRows
from attnzoo.training.recipe import load
from attnzoo.training.train import train


class Notes:
    """What one process drew and measured."""

    def __init__(self) -> None:
        self.kept: list[list[bool]] = []
        self.salts: list[int] = []
        self.rows: list[dict[str, float]] = []

    def note(self, module, inputs, output):
        if module.training and isinstance(module, nn.Dropout):
            self.kept.append((output != 0).flatten().tolist())
        if module.training and isinstance(module, Attention):
            self.salts.append(int(module.salt))


if __name__ == "__main__":
    notes, honest = Notes(), StepRows.__init__
    register_module_forward_hook(notes.note)
    StepRows.__init__ = lambda rows, *readers, after=0: honest(rows, *readers, notes.rows.append, after=after)
    train(load(sys.argv[1], sys.argv[2:]))
    Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(vars(notes)))
