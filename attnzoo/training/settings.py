"""How a model is trained: the `train` section of a recipe."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Literal

from attnzoo.errors import OptionError
from attnzoo.options import choice, whole

Precision = Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true"]
Logger = Literal["tensorboard", "wandb", "mlflow"]

LEAST = {
    "max_steps": 1,
    "batch_size": 1,
    "accumulate": 1,
    "warmup_steps": 0,
    "num_nodes": 1,
    "seed": 0,
    "valid_every": 1,
    "keep_best": 1,
    "workers": 0,
}
"""The smallest value of each whole number."""
LARGEST = 1e30
"""The largest value of the other numbers, which float32 can still multiply."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a model is trained.

    Args:
        max_steps: optimizer steps.
        batch_size: sequences in one batch, over all devices together, so that more devices train the same model.
        accumulate: batches whose gradients make one optimizer step.
        lr: the highest learning rate, reached at step `warmup_steps` and then lowered along a cosine towards 0.
        weight_decay: on weight matrices; not on biases, norms and embeddings.
        clip: the largest norm of all gradients together; null leaves them as they are.
        warmup_steps: the step with the highest learning rate.
        precision: "32-true", "bf16-mixed", "16-mixed", which is a GPU's and which a CPU computes as "bf16-mixed", or
            "bf16-true".
        accelerator: "cpu", "gpu", or "auto" for a GPU where there is one.
        devices: GPUs, or processes on a CPU; "auto" takes every GPU, or one process.
        num_nodes: machines, each with as many devices.
        strategy: "ddp" has the whole model in each process, "fsdp" a part; "auto" is "ddp" for several.
        seed: of the weights, the data, its order and all that is drawn.
        valid_every: optimizer steps from one validation to the next; the last step is always validated.
        checkpoint_every: optimizer steps from one checkpoint to the next; null: as many as `valid_every`.
        keep_best: checkpoints of the lowest validation losses to keep, besides the newest.
        workers: processes that load data beside each training process.
        compile: compile each layer with `torch.compile`, which takes its time at the first steps.
        cudnn_benchmark: let cuDNN try its algorithms and take the fastest, which may differ from run to run.
        loggers: some of [tensorboard, wandb, mlflow], which get each row of metrics.csv too; each needs the extra of
            its name.
    Raises:
        OptionError: a value is impossible; one message names all of them.
    """

    max_steps: int = 300
    batch_size: int = 16
    accumulate: int = 1
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 20
    clip: float | None = 1.0
    precision: Precision = "32-true"
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int | Literal["auto"] = 1
    num_nodes: int = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    seed: int = 0
    valid_every: int = 50
    checkpoint_every: int | None = None
    keep_best: int = 1
    workers: int = 0
    compile: bool = False
    cudnn_benchmark: bool = False
    loggers: list[Logger] | None = None

    def __post_init__(self) -> None:
        problems = [str(problem) for problem in self._problems()]
        if problems:
            raise OptionError("; ".join(problems))

    def _problems(self) -> Iterator[OptionError]:
        kinds = typing.get_type_hints(type(self))
        checks: list[tuple] = [(whole, name, least) for name, least in LEAST.items()]
        checks += [(_number, name, below) for name, below in (("lr", False), ("weight_decay", True))]
        checks += [(choice, name, typing.get_args(kinds[name])) for name in ("precision", "accelerator", "strategy")]
        if self.clip is not None:
            checks.append((_number, "clip", False))
        if self.checkpoint_every is not None:
            checks.append((whole, "checkpoint_every", 1))
        if self.loggers is not None:
            checks.append((_words, "loggers", typing.get_args(Logger)))
        if self.devices != "auto":
            checks.append((whole, "devices", 1))
        checks += [(_yes_or_no, name, None) for name in ("compile", "cudnn_benchmark")]
        for check, name, limit in checks:
            try:
                check(name, getattr(self, name), limit)
            except OptionError as problem:
                yield problem


def _yes_or_no(name: str, value: object, _: None) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be true or false, not {value!r}")


def _words(name: str, value: object, among: tuple[str, ...]) -> None:
    """Checks a list of words that mean something, each once."""
    if not isinstance(value, list):
        raise OptionError(f"{name} must be a list of some of {', '.join(map(repr, among))} or null, not {value!r}")
    for word in value:
        choice(name, word, among)
    if len(set(value)) < len(value):
        raise OptionError(f"{name} must be a list that names each once, not {value!r}")


def _number(name: str, value: object, zero_too: bool) -> None:
    """Checks a finite number above 0, or 0 where that has a meaning."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero_too):
        limit = "of at least 0" if zero_too else "above 0"
        raise OptionError(f"{name} must be a number {limit}{' or null' * (name == 'clip')}, not {value!r}")
    if number > LARGEST:
        raise OptionError(f"{name} must be at most {LARGEST:.0e}, not {value!r}")
