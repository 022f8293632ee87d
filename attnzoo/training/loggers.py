"""TensorBoard, Weights & Biases and MLflow: each gets what goes to metrics.csv, and never stops a training."""

import json
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from attnzoo.training import durable
from attnzoo.training.sections import Plain

PROJECT = "attnzoo"
Row = dict[str, float]


class Loggers:
    """Hands rows on to all loggers of a training; one that fails is left out from then on, with a warning."""

    def __init__(self) -> None:
        self.loggers: dict[str, Logger] = {}

    def begin(self, names: Sequence[str], folder: Path, title: str, recipe: Plain, after: int) -> None:
        """Tells the loggers which training it is.

        Args:
            names: as in `train.loggers`.
            folder: of the run.
            title: what the run is called.
            after: the step that training goes on from.
        """
        for name in names:
            self._try(name, self._begin, name, folder, title, recipe, after)

    def __call__(self, row: Row) -> None:
        for name, logger in list(self.loggers.items()):
            self._try(name, logger.log, row)

    def sync(self) -> None:
        """Waits until all that was logged is where it belongs, as far as a logger can be told to."""
        for name, logger in list(self.loggers.items()):
            self._try(name, logger.sync)

    def close(self, summary: dict[str, Any]) -> None:
        """Says how the training ended."""
        for name, logger in list(self.loggers.items()):
            self._try(name, logger.end, summary)

    def _begin(self, name: str, folder: Path, title: str, recipe: Plain, after: int) -> None:
        self.loggers[name] = KINDS[name](folder, title, recipe, after)

    def _try(self, name: str, call: Callable[..., None], *given: Any) -> None:
        try:
            call(*given)
        except Exception as error:  # whatever it is, the training is worth more
            self.loggers.pop(name, None)
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            warnings.warn(f"{name} gets no more of this training, which goes on: {reason}", stacklevel=4)


class Logger(Protocol):
    """Where the rows of one training go."""

    def log(self, row: Row) -> None: ...

    def sync(self) -> None: ...

    def end(self, summary: dict[str, Any]) -> None: ...


class TensorBoard:
    """Event files in `tensorboard/`; what is resumed hides the later steps of before."""

    def __init__(self, folder: Path, title: str, recipe: Plain, after: int) -> None:
        self.recipe = recipe
        self.inner = TensorBoardLogger(
            folder, name="", version="tensorboard", default_hp_metric=False, purge_step=after + 1
        )

    def log(self, row: Row) -> None:
        self.inner.log_metrics(scores(row), int(row["step"]))

    def sync(self) -> None:
        self.inner.experiment.flush()

    def end(self, summary: dict[str, Any]) -> None:
        found = {"steps": float(summary["steps"]), **tested(summary)}  # its table of recipes has no row without a score
        self.inner.log_hyperparams({**self.recipe, "status": summary["status"]}, found, summary["steps"])
        self.inner.finalize("success")


class WeightsAndBiases:
    """A run of the project `attnzoo`, its files in `wandb/`; what is resumed goes on in the same run."""

    def __init__(self, folder: Path, title: str, recipe: Plain, after: int) -> None:
        import wandb

        offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
        if not offline and wandb.api.api_key is None:  # or it would ask, in the middle of the progress
            raise PermissionError("it has no key: run `wandb login`, or set WANDB_MODE=offline")
        run = known_run(folder, "wandb") or secrets.token_hex(4)
        remember_run(folder, "wandb", run)
        quiet = wandb.Settings(console="off", silent=True)  # or it would print to stdout, and read along there
        self.inner = WandbLogger(title, folder.resolve(), project=PROJECT, id=run, settings=quiet)
        self.inner.log_hyperparams(recipe)
        self.last = self.inner.experiment.summary.get("trainer/global_step") or 0
        print(f"wandb: {self.inner.experiment.url or folder / 'wandb'}", file=sys.stderr)

    def log(self, row: Row) -> None:
        if row["step"] > self.last:  # or it was logged before the stop
            self.inner.log_metrics(scores(row), int(row["step"]))

    def sync(self) -> None:
        """It sends in its own time: a kill can cost the last rows."""

    def end(self, summary: dict[str, Any]) -> None:
        self.inner.experiment.summary.update({"status": summary["status"], **tested(summary)})
        self.inner.experiment.finish(exit_code=int(summary["status"] != "done"))


class MLflow:
    """A run of the experiment `attnzoo`, at MLFLOW_TRACKING_URI or in `mlflow.db`; what is resumed goes on in it."""

    def __init__(self, folder: Path, title: str, recipe: Plain, after: int) -> None:
        for name, few in (("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"), ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")):
            os.environ.setdefault(name, few)  # a training must not wait minutes for a server that is down
        given = os.environ.get("MLFLOW_TRACKING_URI")
        run = known_run(folder, "mlflow")
        store = given or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        try:
            self.inner = MLFlowLogger(PROJECT, title, store, run_id=run)
            self.client = self.inner.experiment
        finally:  # because it sets this for the whole process
            if given is None:
                os.environ.pop("MLFLOW_TRACKING_URI", None)
        self.run = str(self.inner.run_id)
        self.last: dict[str, int] = {}
        if run is None:
            remember_run(folder, "mlflow", self.run)
            self.inner.log_hyperparams(recipe)
        else:
            self.client.update_run(run, status="RUNNING")
            for name in self.client.get_run(run).data.metrics:
                self.last[name] = max(one.step for one in self.client.get_metric_history(run, name))

    def log(self, row: Row) -> None:
        step = int(row["step"])
        fresh = {name: value for name, value in scores(row).items() if step > self.last.get(name, 0)}
        if fresh:  # the others were logged before the stop
            self.inner.log_metrics(fresh, step)

    def sync(self) -> None:
        """Each row is in its database at once."""

    def end(self, summary: dict[str, Any]) -> None:
        if found := tested(summary):
            self.inner.log_metrics(found, summary["steps"])
        self.client.set_tag(self.run, "status", summary["status"])
        self.inner.finalize({"done": "FINISHED", "interrupted": "KILLED"}.get(summary["status"], "FAILED"))


KINDS: dict[str, Callable[[Path, str, Plain, int], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def scores(row: Row) -> Row:
    """A row without its step."""
    return {name: value for name, value in row.items() if name != "step"}


def tested(summary: dict[str, Any]) -> Row:
    """The test scores, if there are any yet."""
    return {f"test_{name}": value for name, value in summary.get("test", {}).items()}


def known_run(folder: Path, name: str) -> str | None:
    """The id that a logger gave this training."""
    file = folder / "loggers.json"
    return json.loads(file.read_text()).get(name) if file.exists() else None


def remember_run(folder: Path, name: str, run: str) -> None:
    file = folder / "loggers.json"
    runs = json.loads(file.read_text()) if file.exists() else {}
    durable.write(file, f"{json.dumps({**runs, name: run}, indent=2)}\n".encode())
