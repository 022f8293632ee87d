"""What verbs write to stdout."""

import json
import shutil
import textwrap
from collections.abc import Mapping
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Machine-readable results on stdout.")]


def write_json(result: Any) -> None:
    """Writes a result as JSON."""
    print(json.dumps(result, indent=2, allow_nan=False))


def write_table(rows: Mapping[str, object]) -> None:
    """Writes two columns, names and values."""
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


def folded(text: str, indent: int = 0) -> str:
    """Text in lines no wider than the terminal."""
    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.fill(text, width, initial_indent=" " * indent, subsequent_indent=" " * (indent or 2))
