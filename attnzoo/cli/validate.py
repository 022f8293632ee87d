"""`attnzoo validate`: a recipe is checked and nothing is trained."""

from typing import Annotated

import typer

from attnzoo.cli.screen import Json, write_json


def validate(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Other values.")] = None,
    json: Json = False,
) -> None:
    """Check a recipe, and print it with every default filled in."""
    from attnzoo.training.recipe import load

    loaded = load(recipe, overrides or ())
    if json:
        write_json(loaded.sections)
    else:
        print(loaded.to_yaml(), end="")
