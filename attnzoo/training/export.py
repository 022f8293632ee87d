"""A trained model as one safetensors file, which holds its recipe and needs no data to be built again."""

import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

import attnzoo
from attnzoo.errors import RecipeError
from attnzoo.training import durable
from attnzoo.training.model import Transformer
from attnzoo.training.runs import RunFolder

FACTS = ("recipe", "shape", "task", "step")
"""The metadata, each as JSON: all sections; what the model takes from its task; what else is needed to use it."""


def export(path: Path, file: Path) -> None:
    """Writes the best weights of a run.

    Raises:
        RecipeError: there is no such run, it has no good checkpoint, or the file exists or can't be written.
    """
    checkpoint = RunFolder.open(path).load_checkpoint()
    if "shape" not in checkpoint:
        raise RecipeError(f"{path} was trained before runs could be exported: train it again")
    if file.exists():
        raise RecipeError(f"{file} exists, and is left as it is: choose another name")
    facts = {
        "recipe": checkpoint["hyper_parameters"]["recipe"],
        "shape": checkpoint["shape"],
        "task": checkpoint["task"],
        "step": checkpoint["global_step"],
    }
    metadata = {name: json.dumps(fact) for name, fact in facts.items()}
    weights = {name.removeprefix("model."): tensor.contiguous() for name, tensor in checkpoint["state_dict"].items()}
    content = safetensors.torch.save(weights, {**metadata, "format": "pt", "attnzoo": attnzoo.__version__})
    try:
        durable.write(file, content)
    except OSError as error:
        raise RecipeError(f"can't write {file}: {error.strerror}") from error


def read(file: Path) -> dict[str, Any]:
    """What an exported file holds: `weights`, and its metadata by name.

    Raises:
        RecipeError: it can't be read, or `attnzoo export` did not write it.
    """
    try:
        with safetensors.safe_open(file, "pt") as content:
            metadata = content.metadata() or {}
            weights = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        return {"weights": weights, **{name: json.loads(metadata[name]) for name in FACTS}}
    except KeyError as error:
        raise RecipeError(f"{file} has no {error} in its metadata: attnzoo export did not write it") from error
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise RecipeError(f"{file} can't be read as safetensors: {error}") from error


def load_model(file: Path) -> Transformer:
    """The model of an exported file, in eval mode.

    Raises:
        RecipeError: it can't be read, or `attnzoo export` did not write it.
    """
    found = read(file)
    model = Transformer(**found["shape"], **found["recipe"]["model"], attention=found["recipe"]["attention"])
    model.load_state_dict(found["weights"])
    return model.eval()
