"""`attnzoo export`: a run's best weights as one file to pass on."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, as in runs/bigbird/1.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file, as in bigbird.safetensors.")],
) -> None:
    """Write the best weights of a run, with its recipe, as safetensors."""
    from attnzoo.training.export import export as write

    write(run, file)
    print(file)
