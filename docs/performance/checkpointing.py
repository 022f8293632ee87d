"""Measures what recomputing in backward costs, and the memory it saves: `make performance`.

A causal model of 6 layers, 512 features and 8 heads reads one sequence of 2048 tokens; one step is forward, loss and
backward. Peak memory is above the model and its gradients, in a fresh process.
"""

import argparse
import json

import torch
import torch.nn.functional as F

from attnzoo.bench import machine, memory
from attnzoo.bench.timing import Watch, take_turns
from attnzoo.training.model import Checkpointing, Transformer

LENGTH, WORDS = 2048, 1000
VARIANTS = {"gqa": {"num_kv_heads": 8}, "vanilla": {}}
KINDS: dict[str, Checkpointing] = {"all kept": False, "each layer again": True, "attention again": "attention"}


def made(variant: str, again: Checkpointing, length: int = LENGTH):
    """One step of a model, ready to be called."""
    torch.manual_seed(0)
    model = Transformer(
        vocabulary=WORDS, length=LENGTH, classes=WORDS, causal=True, pooling="every",
        attention={"name": variant, "num_heads": 8, **VARIANTS[variant]},
        d_model=512, layers=6, feed_forward=2048, gradient_checkpointing=again,
    )  # fmt: skip
    tokens = torch.randint(WORDS, (1, length + 1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[0, 1:])
        loss.backward()
        return loss.item()

    return step


def rise(variant: str, again: Checkpointing) -> int:
    """The bytes of one step, after a step on few tokens."""
    torch.set_num_threads(1)
    made(variant, again, length=8)()
    return memory.rise(made(variant, again))


def measure(variant: str, rounds: int) -> list[dict[str, object]]:
    """A row for each kind; the loss of their first step must be the same."""
    steps = {name: made(variant, again) for name, again in KINDS.items()}
    losses = [step() for step in steps.values()]
    assert max(losses) - min(losses) < 1e-5, losses
    times = take_turns(steps, Watch(), rounds, float("inf"))
    base = min(times["all kept"].cpu)
    steps.clear()
    return [
        {
            "label": name,
            "ms": 1000 * times[name].median,
            "cpu_ms": 1000 * min(times[name].cpu),
            "times": min(times[name].cpu) / base,
            "peak_mib": memory.in_fresh_process(rise, variant, again) / 2**20,
        }
        for name, again in KINDS.items()
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, default="gqa")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"machine": machine.describe("cpu", []), "rows": measure(given.variant, given.rounds)}, indent=2))
