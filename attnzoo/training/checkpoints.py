"""Checkpoint files: a dict of tensors and plain values, with a digest beside it."""

import hashlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attnzoo.errors import RecipeError
from attnzoo.training import durable

SCHEMA = 1
"""What a checkpoint holds, by number: raised when older code could misread it."""


class DamagedError(RecipeError):
    """A checkpoint is not what was saved."""


def save(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Writes a checkpoint and its digest; the digest first, so that no checkpoint is without.

    Raises:
        OSError: the disk is full, or can't be written.
    """
    content = io.BytesIO()  # because torch doesn't survive a disk that gets full while it writes
    torch.save({**checkpoint, "schema": SCHEMA}, content)
    path.parent.mkdir(exist_ok=True)
    digest = hashlib.sha256(content.getbuffer()).hexdigest()
    durable.write(digest_of(path), f"{digest}  {path.name}\n".encode())
    durable.write(path, content.getbuffer())


def load(path: Path) -> dict[str, Any]:
    """A checkpoint with its tensors on the CPU; nothing in it is executed.

    Raises:
        DamagedError: it is missing, differs from its digest, or holds more than tensors and plain values.
        RecipeError: a newer version of attnzoo wrote it.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    except OSError as error:
        raise DamagedError(f"{path} can't be read: {error.strerror}") from error
    digest = digest_of(path.resolve())
    if digest.is_file() and hashlib.sha256(content).hexdigest() != digest.read_bytes()[:64].decode(errors="replace"):
        raise DamagedError(f"{path} is damaged: it differs from its digest in {digest.name}")
    try:
        with warnings.catch_warnings(action="ignore"):
            checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        schema = int(checkpoint.get("schema", 0))
    except Exception as error:  # what is no checkpoint fails in many ways
        raise DamagedError(
            f"{path} can't be read as a checkpoint, which holds tensors and plain values alone: {type(error).__name__}"
        ) from error
    if schema > SCHEMA:
        raise RecipeError(
            f"{path} was written by a newer attnzoo (schema {schema}, this one reads up to {SCHEMA}): upgrade attnzoo"
        )
    return checkpoint


def digest_of(path: Path) -> Path:
    """The file with a checkpoint's digest, as `sha256sum -c` reads it."""
    return path.with_name(f"{path.name}.sha256")
