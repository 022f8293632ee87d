"""Checkpoints: a dict of tensors and plain values with a digest beside it, or a folder of such files."""

import hashlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attnzoo.errors import RecipeError
from attnzoo.training import durable, shards

SCHEMA = 1
"""What a checkpoint holds, by number: raised when older code could misread it."""


SEAL = "parts.sha256"


class DamagedError(RecipeError):
    """A checkpoint is not what was saved."""


def save(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Writes a checkpoint and its digest; the digest first, so that no checkpoint is without.

    Raises:
        OSError: the disk is full, or can't be written.
    """
    content = io.BytesIO()  # because torch doesn't survive a disk that gets full while it writes
    torch.save({**checkpoint, "schema": SCHEMA}, content)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        durable.remove(path)
    digest = hashlib.sha256(content.getbuffer()).hexdigest()
    durable.write(digest_of(path), f"{digest}  {path.name}\n".encode())
    durable.write(path, content.getbuffer())


def part(folder: Path, rank: int, ranks: int) -> Path:
    """The file of one process in a checkpoint that several have written."""
    return folder / f"{rank}-of-{ranks}.ckpt"


def load(path: Path, rank: int | None = None) -> dict[str, Any]:
    """A checkpoint with its tensors on the CPU; nothing in it is executed.

    Args:
        rank: of a checkpoint in parts, only the part of this process; None joins them. All parts are checked.
    Raises:
        DamagedError: it is missing, differs from its digest, or holds more than tensors and plain values.
        RecipeError: a newer version of attnzoo wrote it.
    """
    if not path.is_dir():
        return decode(path, read(path))
    if rank is None:
        return shards.join([decode(file, read(file)) for file in parts(path)])
    files = parts(path)
    [content] = [content for number, content in enumerate(map(read, files)) if number == rank]
    return decode(files[rank], content)


def seal(folder: Path) -> None:
    """Writes what tells that all parts in a folder belong together: a digest of their digests."""
    durable.write(folder / SEAL, _sealed(folder).encode())


def parts(folder: Path) -> list[Path]:
    """The files of a checkpoint in parts, by rank.

    Raises:
        DamagedError: one is missing, or comes from elsewhere.
    """
    ranks = len(list(folder.glob("*-of-*.ckpt")))
    files = [part(folder, rank, ranks) for rank in range(ranks)]
    if not files or not all(file.is_file() for file in files):
        raise DamagedError(f"{folder} is damaged: a part of it is missing")
    if not (folder / SEAL).is_file() or (folder / SEAL).read_text(errors="replace") != _sealed(folder):
        raise DamagedError(f"{folder} is damaged: its parts do not belong together")
    return files


def read(path: Path) -> bytes:
    """A file as it was saved, as its digest tells."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    except OSError as error:
        raise DamagedError(f"{path} can't be read: {error.strerror}") from error
    digest = digest_of(path.resolve())
    if digest.is_file() and hashlib.sha256(content).hexdigest() != digest.read_bytes()[:64].decode(errors="replace"):
        raise DamagedError(f"{path} is damaged: it differs from its digest in {digest.name}")
    return content


def decode(path: Path, content: bytes) -> dict[str, Any]:
    """What a file holds; warns where it has no digest."""
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
    if not digest_of(path.resolve()).is_file():
        warnings.warn(f"{path} has no digest beside it: nobody can tell whether it is damaged", stacklevel=3)
    return checkpoint


def _sealed(folder: Path) -> str:
    digests = sorted(folder.glob("*.ckpt.sha256"))
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in digests)


def digest_of(path: Path) -> Path:
    """The file with a checkpoint's digest, as `sha256sum -c` reads it."""
    return path.with_name(f"{path.name}.sha256")
