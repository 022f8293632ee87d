"""`attnzoo new`: a package to write a variant of your own in."""

import keyword
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from attnzoo.cli.screen import Json, write_json
from attnzoo.errors import NameTakenError, OptionError

SKELETON = Path(__file__).with_name("skeleton")
NEXT = """\
# The variant is attnzoo_{name}/{name}.py; its comments say what to change.
cd {folder}
pip install -e '.[test]'
pytest
attnzoo check {name}
attnzoo train recipe.yaml"""


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The variant's name, as in my_window.")],
    into: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the package's folder is made.")] = Path(),
    json: Json = False,
) -> None:
    """Write a package with a variant of your own to start from."""
    check_name(name)
    folder = into / name.replace("_", "-")
    files = skeleton(name)
    write(files, folder)
    if json:
        write_json([str(folder / file) for file in files])
    else:
        print(NEXT.format(folder=shlex.quote(str(folder)), name=name))


def check_name(name: str) -> None:
    """Refuses what can't name a new variant and its package."""
    from attnzoo import registry

    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise OptionError(
            f"a new variant's name has lower-case letters and digits, with single _ between words, and is no keyword "
            f"of Python, as in 'my_window', not {name!r}"
        )
    if registry.list_variants(name):
        raise NameTakenError(f"'{name}' is taken, as `attnzoo list` shows: choose another name")


def skeleton(name: str) -> dict[str, str]:
    """The package's files by their path in its folder."""
    words = {
        "NAME": name,
        "DASHED": name.replace("_", "-"),
        "CLASS": name.removesuffix("_attention").title().replace("_", ""),
    }
    files = {}
    for template in sorted(SKELETON.rglob("*.tmpl")):
        path, text = template.relative_to(SKELETON).with_suffix("").as_posix(), template.read_text(encoding="utf-8")
        for place, word in words.items():
            path, text = path.replace(place, word), text.replace(place, word)
        files[path] = text
    return files


def write(files: dict[str, str], folder: Path) -> None:
    """Writes all files into a new folder, or nothing."""
    if os.path.lexists(folder):
        raise OptionError(f"{folder} exists, and is left as it is: choose another name or --into another folder")
    try:
        with tempfile.TemporaryDirectory(prefix=".attnzoo-", dir=folder.parent) as scratch:
            draft = Path(scratch, folder.name)
            for file, text in files.items():
                (draft / file).parent.mkdir(parents=True, exist_ok=True)
                (draft / file).write_text(text, encoding="utf-8")
            draft.rename(folder)
    except OSError as error:
        raise OptionError(f"can't write {folder}: {error.strerror}") from error
