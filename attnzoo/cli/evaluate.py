"""`attnzoo evaluate`: a run's best checkpoint on the test split."""

from pathlib import Path
from typing import Annotated

import typer

from attnzoo.cli.screen import Json, write_json, write_table


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, as in runs/bigbird/1.")],
    json: Json = False,
) -> None:
    """Test the best checkpoint of a run."""
    from attnzoo.training.evaluate import evaluate as test

    found = test(run)
    if json:
        write_json(found)
    else:
        scores = {f"test {name.replace('_', ' ')}": f"{value:.4f}" for name, value in found["test"].items()}
        write_table({**scores, "weights of": f"step {found['step']}", "run": found["run"]})
