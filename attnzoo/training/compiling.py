"""Layers that torch compiles before they are trained."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from attnzoo.errors import TrainingError

KINDS = 4
"""Graphs of one layer: of a training batch, of a validation batch, and of the last ones of two splits."""


def compile_layers(layers: nn.ModuleList) -> None:
    """Compiles each layer in its place, so that its parameters keep their names; once is enough.

    Each kind of batch gets a graph for its own size. One graph for all sizes would be compiled when the second size
    comes, and which batches it computes would depend on where a training was resumed.
    """
    fresh = [layer for layer in layers if layer._compiled_call_impl is None]
    config = torch._dynamo.config
    config.recompile_limit += KINDS * len(fresh)  # because all layers have one limit, and each may have its own pattern
    config.accumulated_recompile_limit += KINDS * len(fresh)
    for layer in fresh:
        layer.compile(dynamic=False)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Says in the user's words that torch can't compile.

    Raises:
        TrainingError: it can't.
    """
    try:
        yield
    except Exception as error:
        kinds = [kind.__module__ for kind in type(error).__mro__]
        if not any(kind.startswith(("torch._dynamo.", "torch._inductor.")) for kind in kinds):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = " ".join(lines[: 1 + lines[0].endswith(":")])
        raise TrainingError(f"torch can't compile this model here: leave train.compile out ({reason})") from error
