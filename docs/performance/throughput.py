"""Measures what a training costs above the same step in a bare loop of PyTorch: `make performance`.

`attnzoo train` trains a shipped recipe, with all that it does between validations. After each block of steps a bare
loop takes its turn in the same process and makes the same steps of a model of its own: the same batches, loss,
optimizer, clipping and schedule, and its losses must be the same.
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from attnzoo.bench import machine
from attnzoo.training import experiment, record
from attnzoo.training.data import Shuffled
from attnzoo.training.module import adamw, lr_factor, parameter_groups
from attnzoo.training.recipe import load
from attnzoo.training.train import train

RECIPES = ("bigbird", "vanilla", "kv_cached")
CLOCKS = {"ms": time.perf_counter, "cpu_ms": time.process_time}


class BareLoop:
    """The steps of a recipe, without anything around them.

    Attributes:
        loading: CPU seconds that loading data took.
    """

    def __init__(self, sections):
        made = experiment.build(sections)
        self.task, self.model, self.settings = made.task, made.model, made.settings
        self.optimizer = adamw(parameter_groups(self.model, self.settings.weight_decay), self.settings.lr, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: lr_factor(step, self.settings))
        items = self.task.split("train")
        order = Shuffled(len(items), self.settings.batch_size, steps=self.settings.max_steps, seed=self.settings.seed)
        self.batches = iter(DataLoader(items, batch_size=self.settings.batch_size, sampler=order))
        self.loading = 0.0

    def step(self):
        before = time.process_time()
        batch = next(self.batches)
        self.loading += time.process_time() - before
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(batch["tokens"], batch.get("key_mask")), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


class Turns:
    """Stands in for what shows the progress, to let the bare loop have its turns and to take the times of both."""

    def __init__(self, bare, block):
        self.bare, self.block = bare, block
        self.losses = []
        self.times = {"training": [], "bare loop": []}
        self.since = self.now()

    def now(self):
        return {name: clock() for name, clock in CLOCKS.items()}

    def end_turn(self, whose):
        now = self.now()
        self.times[whose].append({name: 1000 * (now[name] - self.since[name]) / self.block for name in now})
        self.since = self.now()

    def __call__(self, row):
        self.losses.append(row["train_loss"])
        if len(self.losses) < self.block or "valid_loss" in row:
            return
        self.end_turn("training")
        found = [self.bare.step() for _ in range(self.block)]
        self.end_turn("bare loop")
        torch.testing.assert_close(torch.tensor(found), torch.tensor(self.losses), rtol=1e-3, atol=1e-4)
        self.losses.clear()
        self.since = self.now()

    def close(self):
        """Nothing is left open."""


def measure(name, steps, block):
    """A row for the training, and one for the bare loop."""
    recipe = load(name, [f"train.max_steps={steps}", f"train.valid_every={steps}", "train.accelerator=cpu"])
    turns = Turns(BareLoop(recipe.sections), block)
    record.ProgressLines = lambda *_: turns
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        train(recipe, runs=Path(folder))
    times = {whose: taken[1:] for whose, taken in turns.times.items()}  # warm
    medians = {whose: {c: statistics.median(one[c] for one in taken) for c in CLOCKS} for whose, taken in times.items()}
    base = medians["bare loop"]
    spent = sum(one["cpu_ms"] for one in turns.times["bare loop"]) * block
    return [
        {"label": f"{name}, {whose}", **found, "times": found["cpu_ms"] / base["cpu_ms"],
         "loading_share": 1000 * turns.bare.loading / spent if whose == "bare loop" else None}
        for whose, found in medians.items()
    ]  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", default=",".join(RECIPES), help="shipped ones")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--block", type=int, default=10, help="steps that one makes before the other has its turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in given.recipes.split(",") for row in measure(name, given.steps, given.block)]
    print(json.dumps({"machine": machine.describe("cpu", ["lightning"]), "rows": rows}, indent=2))
