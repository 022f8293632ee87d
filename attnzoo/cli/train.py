"""`attnzoo train`: from a recipe to a run folder."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.cli.screen import Json, write_json, write_table


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Other values, as in train.max_steps=400."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Build everything, train and write nothing.")] = False,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    json: Json = False,
) -> None:
    """Train what a recipe describes, and test it."""
    from attnzoo.training.recipe import load

    loaded = load(recipe, overrides or ())
    if dry_run:
        from attnzoo.training import experiment, machine

        built = experiment.build(loaded.sections)
        here = machine.choose(built.settings)
        built.rehearse()
        summary = {**experiment.about(loaded, built, here), "status": "dry run"}
    else:
        from attnzoo.training.train import train as run

        summary = run(loaded, runs=runs, bar=sys.stderr.isatty() and not json)
    if json and summary:
        write_json(summary)
    elif summary:
        write_table(rows(summary))
    if dry_run:
        print("attnzoo: all is well; nothing was trained or written", file=sys.stderr)
    if summary.get("status") == "diverged":
        print(f"attnzoo: {summary['message']}", file=sys.stderr)
        raise typer.Exit(1)


def rows(summary: dict[str, Any]) -> dict[str, str]:
    """The summary as a short table."""
    requested, effective = summary["precision"].values()
    found = {
        **{f"test {name.replace('_', ' ')}": f"{value:.4f}" for name, value in summary.get("test", {}).items()},
        "variant": summary["variant"],
        "pattern": summary["pattern"],
        "density": f"{100 * summary['density']:.1f} % of the pairs visible",
        "parameters": f"{summary['parameters']:,}",
        "precision": effective if requested == effective else f"{effective} (instead of {requested})",
    }
    if summary.get("ms_per_step") is not None:
        found["time"] = f"{summary['ms_per_step']:.0f} ms a step, {summary['steps']} steps"
        found["peak memory"] = f"{summary['peak_memory_mib']:.0f} MiB ({summary['peak_memory_of']})"
    if "run" in summary:
        found["run"] = summary["run"]
    return found
