"""What the processes of a training do: the first one keeps what comes of it, the others follow."""

import contextlib
import shlex
import signal
import statistics
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from attnzoo.errors import TrainingError
from attnzoo.training import compiling, curves, experiment
from attnzoo.training.callbacks import Checkpoints, StepRows
from attnzoo.training.data import Batches
from attnzoo.training.loggers import Loggers
from attnzoo.training.machine import Machine
from attnzoo.training.metrics_file import MetricsFile
from attnzoo.training.module import DivergedError, TrainingModule
from attnzoo.training.progress import ProgressBar, ProgressLines
from attnzoo.training.resume import Start
from attnzoo.training.runs import RunFolder
from attnzoo.training.stopping import Interrupted, Stop
from attnzoo.training.strategies import is_loss_of_process
from attnzoo.training.trainer import make_trainer, score_test


def record(module: TrainingModule, here: Machine, folder: RunFolder, start: Start, bar: bool) -> dict[str, Any]:
    """Trains, and keeps what comes of it in the run folder, also when it stops early."""
    settings = module.experiment.settings
    summary = {**experiment.about(start.recipe, module.experiment, here), "run": str(folder.path), "status": "running"}
    scores = [f"valid_{name}" for name in ("loss", *module.valid_scores.metrics)]
    with explained(folder):
        folder.write_summary(summary)
        folder.write_recipe(start.recipe.to_yaml())
        metrics = MetricsFile(folder.metrics, ["step", "train_loss", "lr", "ms", *scores], after=start.step)
        shown = ProgressBar(settings.max_steps) if bar else ProgressLines(settings.max_steps, settings.valid_every)
        logged = Loggers()
        steps, stop = StepRows(metrics.add, shown, logged, after=start.step), Stop()

        def sync() -> None:
            metrics.sync()
            logged.sync()

        checkpoints = Checkpoints(folder, settings, stop, sync)
        summary["status"] = "failed"
        try:
            name = f"{start.recipe.name}/{folder.path.resolve().name}"
            logged.begin(settings.loggers or (), folder.path, name, start.recipe.sections, start.step)
            if settings.compile:
                print("compiling: the first steps take their time", file=sys.stderr)
            fit_and_test(module, here, start, steps, checkpoints, stop, summary)
        finally:
            shown.close()
            summary["steps"] = steps.step
            if summary["status"] != "done":
                print(how_to_go_on(folder, summary), file=sys.stderr)
            metrics.close()
            columns = folder.read_metrics()
            times = columns.get("ms", [])
            summary |= {
                "skipped_steps": steps.skipped,
                "best_step": checkpoints.best[0][1] if checkpoints.best else None,
                "ms_per_step": statistics.median(times[1:] or times) if times else None,
                "peak_memory_mib": here.peak_memory_mib(),
            }
            try:
                curves.draw(columns, folder.curves, f"{summary['recipe']}: {summary['pattern']}")
            except OSError as error:
                warnings.warn(f"can't draw {folder.curves}: {error.strerror}", stacklevel=2)
            folder.write_summary(summary)  # after the others, because it says that all is done
            logged.close(summary)  # at last, because it may wait for a network
    return summary


def how_to_go_on(folder: RunFolder, summary: dict[str, Any]) -> str:
    """What is there of a training that stopped early, and what can be done with it."""
    stopped, there = f"{summary['status']} after step {summary['steps']}", folder.checkpointed()
    if summary["status"] == "diverged":
        return f"{stopped}; the last good state is {folder.checkpoint(there[-1])}" if there else stopped
    from_step = f"step {there[-1]}" if there else "the beginning"
    return f"{stopped}; to go on from {from_step}: attnzoo train --resume {shlex.quote(str(folder.path))}"


@contextlib.contextmanager
def explained(folder: RunFolder) -> Iterator[None]:
    """Says in the user's words what stops a training from outside."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"can't write {error.filename or folder.path}: {error.strerror or error}") from error
    except RuntimeError as error:
        if is_loss_of_process(error):
            raise TrainingError("another process of this training ended, and the rest can't go on") from error
        if "DataLoader worker (pid" not in str(error):  # nor is it what happened inside one
            raise
        raise TrainingError(
            f"a process that loads data died, often for lack of memory: lower train.workers ({error})"
        ) from error


def fit_and_test(
    module: TrainingModule,
    here: Machine,
    start: Start,
    steps: StepRows,
    checkpoints: Checkpoints,
    stop: Stop,
    summary: dict[str, Any],
) -> None:
    """Trains and tests; leaves the status and the test scores in the summary."""
    settings = module.experiment.settings
    batches = Batches(module.experiment.task, settings)
    trainer = make_trainer(settings, here, steps, checkpoints, stop)
    try:
        with stop, compiling.explained():
            trainer.fit(module, datamodule=batches, ckpt_path=start.checkpoint, weights_only=True)
            test = score_test(trainer, module, batches, checkpoints.chosen)
    except DivergedError as error:
        summary |= {"status": "diverged", "message": str(error)}
    except (Interrupted, KeyboardInterrupt, SystemExit, RuntimeError) as error:
        # Lightning makes the third of the second; the fourth comes when a signal ends other processes of the training.
        if isinstance(error, RuntimeError) and stop.signal is None:
            raise
        summary["status"] = "interrupted"
        if stop.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM) from error
        raise KeyboardInterrupt from error
    else:
        summary |= {"status": "done", "test": test}


def follow(module: TrainingModule, here: Machine, start: Start) -> dict[str, Any]:
    """What all processes but the first one do."""
    stop = Stop()
    try:
        fit_and_test(module, here, start, StepRows(), Checkpoints(None, module.experiment.settings, stop), stop, {})
    except (KeyboardInterrupt, SystemExit, TrainingError):
        pass  # the first one says why
    except RuntimeError as error:
        if not is_loss_of_process(error):
            raise
    return {}
