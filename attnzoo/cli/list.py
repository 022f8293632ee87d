"""`attnzoo list`: the names of the variants."""

from typing import Annotated

import typer

from attnzoo.cli.screen import Json, write_json


def list_(
    glob: Annotated[str, typer.Argument(metavar="GLOB", help="Only names like this, with * and ? as wildcards.")] = "*",
    supports: Annotated[
        str, typer.Option(help="Only variants that support all of these features, as in causal,cache.")
    ] = "",
    json: Json = False,
) -> None:
    """List the attention variants, installed plugins too."""
    from attnzoo import registry

    wanted = [feature.strip() for feature in supports.split(",") if feature.strip()]
    names = registry.list_variants(glob, wanted)
    if json:
        write_json([{"name": name} for name in names])
        return
    for name in names:
        print(name)
