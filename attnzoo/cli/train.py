"""`attnzoo train`: from a recipe to a run folder, or on from where a run stopped."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.cli.screen import Json, write_json, write_table

if TYPE_CHECKING:
    from attnzoo.training.recipe import Recipe


def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Other values, as in train.max_steps=400."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run that stopped, as in runs/bigbird/1.")
    ] = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION.KEY", help="With --resume: train.max_steps may be another than before."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take; train and write nothing.")
    ] = False,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    json: Json = False,
) -> None:
    """Train what a recipe describes, and test it."""
    words = [word for word in (recipe, *(overrides or ())) if word is not None]
    bar = sys.stderr.isatty() and not json
    if resume is not None:
        if words and "=" not in words[0]:
            raise typer.BadParameter(f"--resume goes on with the recipe of the run; leave out {words[0]}")
        if dry_run:
            raise typer.BadParameter("--dry-run and --resume exclude each other")
        from attnzoo.training.train import resume as go_on

        summary = go_on(resume, words, allow=allow_change or (), bar=bar)
    elif recipe is None:
        raise typer.BadParameter("name a RECIPE, or a run to go on with by --resume RUN")
    elif allow_change:
        raise typer.BadParameter("--allow-change belongs to --resume")
    else:
        from attnzoo.training.recipe import load

        loaded = load(recipe, overrides or ())
        if dry_run:
            summary = rehearse(loaded)
        else:
            from attnzoo.training.train import train as run

            summary = run(loaded, runs=runs, bar=bar)
    if json and summary:
        write_json(summary)
    elif summary:
        write_table(rows(summary))
    if dry_run:
        print("attnzoo: all is well; nothing was trained or written", file=sys.stderr)
    if summary.get("status") == "diverged":
        print(f"attnzoo: {summary['message']}", file=sys.stderr)
        raise typer.Exit(1)


def rehearse(recipe: "Recipe") -> dict[str, Any]:
    """What a training would be; nothing is trained or written."""
    from attnzoo.training import costs, experiment, machine

    built = experiment.build(recipe.sections)
    here = machine.choose(built.settings)
    return {**experiment.about(recipe, built, here), **costs.count(built, here), "status": "dry run"}


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
    if "flops_per_step" in summary:
        found["work"] = f"{scaled(summary['flops_per_step'], 'FLOP', 1000, ' kMGTPE')} a step"
        found["memory"] = memory(**summary["memory_mib"], devices=summary["devices"])
    if summary.get("ms_per_step") is not None:
        found["time"] = f"{summary['ms_per_step']:.0f} ms a step, {summary['steps']} steps"
        found["peak memory"] = f"{summary['peak_memory_mib']:.0f} MiB ({summary['peak_memory_of']})"
    if "run" in summary:
        found["run"] = summary["run"]
    return found


def memory(weights_gradients_optimizer: float, activations: float, devices: int) -> str:
    """What a step holds at once, in MiB, as a reader would say it."""
    total, held, computed = (
        scaled(mib * 2**20, "B", 1024, (" ", "Ki", "Mi", "Gi", "Ti"))
        for mib in (weights_gradients_optimizer + activations, weights_gradients_optimizer, activations)
    )
    each = " on each device" if devices > 1 else ""
    return f"about {total}{each}: {held} for weights, gradients and optimizer, {computed} for activations"


def scaled(amount: float, unit: str, step: int, prefixes: Sequence[str]) -> str:
    """An amount with the largest prefix of which there is one at least."""
    power = 0
    while amount >= step and power + 1 < len(prefixes):
        amount, power = amount / step, power + 1
    return f"{amount:.{0 if amount >= 10 else 1}f} {prefixes[power].strip()}{unit}"
