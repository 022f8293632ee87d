"""`attnzoo recipes`: the recipes that come with the package, and copies of them to start from."""

from pathlib import Path
from typing import Annotated

import typer

from attnzoo.cli.screen import Json, write_json, write_table
from attnzoo.errors import RecipeError

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def recipes(context: typer.Context, json: Json = False) -> None:
    """List the shipped recipes, or copy one."""
    if context.invoked_subcommand:
        return
    from attnzoo.training.recipe import shipped

    summaries = {name: summary(path) for name, path in shipped().items()}
    if json:
        write_json([{"name": name, "summary": text} for name, text in summaries.items()])
    else:
        write_table(summaries)


@app.command(no_args_is_help=True)
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A shipped recipe.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file.")],
) -> None:
    """Copy a recipe to a file of your own, to start from."""
    from attnzoo.training.recipe import merged_text

    text = merged_text(name, str(file))
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError:
        raise RecipeError(f"{file} exists, and is left as it is: choose another name") from None
    except OSError as error:
        raise RecipeError(f"can't write {file}: {error.strerror}") from error
    print(file)


def summary(path: Path) -> str:
    """A recipe's first comment line."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
