"""Files that are there whole or not at all, whenever the machine stops."""

import os
import shutil
from pathlib import Path


def write(path: Path, content: bytes | memoryview) -> None:
    """Writes beside the file, waits until the disk has it, and puts it in the file's place.

    Raises:
        OSError: it can't be written; what was there before still is.
    """
    beside = path.with_name(f"{path.name}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    settle(path.parent)


def point(link: Path, target: Path) -> None:
    """Makes a name lead to a file in the same folder, instead of what it led to before."""
    beside = link.with_name(f"{link.name}.part")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target.name)
    os.replace(beside, link)
    settle(link.parent)


def remove(path: Path) -> None:
    """Deletes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def settle(folder: Path) -> None:
    """Waits until the disk has the names in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
