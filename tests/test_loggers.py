"""TensorBoard, Weights & Biases and MLflow: what they are told, and that no training depends on them."""

import json
import math
import os
import signal
import struct
import time
from pathlib import Path

import pytest

from attnzoo.tasks import needle
from attnzoo.training import checkpoints, loggers, machine
from attnzoo.training.recipe import load
from attnzoo.training.runs import RunFolder
from attnzoo.training.train import resume, train
from tests.faults.same import difference, outcome

for package in ("tensorboard", "wandb", "mlflow"):
    pytest.importorskip(package)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # between mlflow and sqlalchemy, say

NAMES = ("tensorboard", "wandb", "mlflow")
TINY = """
task: {name: needle, length: 16}
attention: {name: local, num_heads: 2, radius: 2, global_tokens: 1, block: 4}
model: {d_model: 8, layers: 1, feed_forward: 16, dropout: 0.2}
train: {max_steps: 6, batch_size: 4, lr: 1e-2, warmup_steps: 2, valid_every: 4}
"""


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(needle, "SIZES", {"train": 14, "valid": 4, "test": 4})
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "tiny.yaml").write_text(TINY)


def recipe(*names, **train):
    return load("tiny.yaml", [f"train.loggers=[{', '.join(names)}]", *(f"train.{key}={train[key]}" for key in train)])


def folder(number=1):
    return RunFolder(Path("runs/tiny") / str(number))


# What was logged, read back: values by name, each a list of (step, value)


def of_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.Tags()["scalars"]}


def of_wandb(run):
    found = {}
    for record in wandb_records(run):
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for name, value in items.items():
            if not name.startswith(("_", "trainer/")):
                found.setdefault(name, []).append((items["trainer/global_step"], value))
    return found


def wandb_records(run):
    """The records of all files in their order: a log as LevelDB writes it, each record a protocol buffer."""
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted((run.path / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime):
        content, at, parts = file.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if -at % 2**15 < 7 and at % 2**15:
                at += -at % 2**15
                continue
            size, kind = struct.unpack("<HB", content[at + 4 : at + 7])
            parts += content[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(parts)
                parts = b""


def mlflow_run(run, store=None):
    from mlflow import MlflowClient

    client = MlflowClient(store or f"sqlite:///{run.path.resolve() / 'mlflow.db'}")
    [experiment] = client.search_experiments(filter_string="name = 'attnzoo'")
    [found] = client.search_runs([experiment.experiment_id])
    return client, found


def of_mlflow(run, store=None):
    client, found = mlflow_run(run, store)
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return {name: [(one.step, one.value) for one in history] for name, history in histories.items()}


READ = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}


def of_file(run):
    """The same of metrics.csv."""
    columns = run.read_metrics()
    steps = [int(step) for step in columns.pop("step")]
    found = {name: [*zip(steps, values, strict=True)] for name, values in columns.items()}
    return {name: [(step, value) for step, value in pairs if value == value] for name, pairs in found.items()}


def assert_same(found, expected, but=()):
    """Compares the rows, which metrics.csv rounds."""
    for name, pairs in expected.items():
        if name not in but:
            assert [step for step, _ in found[name]] == [step for step, _ in pairs], name
            assert [v for _, v in found[name]] == pytest.approx([v for _, v in pairs], rel=1e-4), name


# A training from its beginning to its end


def test_each_gets_the_rows_of_metrics_csv_and_the_test_scores():
    summary = train(recipe(*NAMES))
    expected = of_file(folder())
    assert len(expected["train_loss"]) == 6
    assert [step for step, _ in expected["valid_loss"]] == [4, 6]
    for name in NAMES:
        assert_same(READ[name](folder()), expected)
    for name in ("tensorboard", "mlflow"):
        assert READ[name](folder())["test_loss"] == [(6, pytest.approx(summary["test"]["loss"]))]
    last = {item.key: item.value_json for record in wandb_records(folder()) for item in record.summary.update}
    assert json.loads(last["test_loss"]) == summary["test"]["loss"]


def test_each_gets_the_recipe_and_how_it_ended():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    train(recipe(*NAMES))
    config = {item.key: json.loads(item.value_json) for one in wandb_records(folder()) for item in one.config.update}
    assert config["model"]["feed_forward"] == 16
    [run] = [record.run for record in wandb_records(folder()) if record.HasField("run")]
    assert (run.project, run.display_name) == ("attnzoo", "tiny/1")
    last = {item.key: item.value_json for record in wandb_records(folder()) for item in record.summary.update}
    assert json.loads(last["status"]) == "done"

    _, found = mlflow_run(folder())
    assert found.data.params["attention/radius"] == "2"
    assert (found.info.run_name, found.info.status, found.data.tags["status"]) == ("tiny/1", "FINISHED", "done")

    events = EventAccumulator(str(folder().path / "tensorboard"))
    events.Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["attention/radius"].number_value == 2
    assert hparams["status"].string_value == "done"


def test_a_training_without_loggers_leaves_nothing_of_them():
    train(load("tiny.yaml"))
    names = {path.name for path in folder().path.iterdir()}
    assert not names & {"tensorboard", "wandb", "mlflow.db", "loggers.json"}


def test_mlflow_follows_its_environment_and_leaves_it_alone(tmp_path, monkeypatch):
    train(recipe("mlflow"))
    assert "MLFLOW_TRACKING_URI" not in os.environ
    store = f"sqlite:///{tmp_path / 'mine.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    train(recipe("mlflow"))
    assert os.environ["MLFLOW_TRACKING_URI"] == store
    assert_same(of_mlflow(folder(2), store), of_file(folder(2)))
    assert not (folder(2).path / "mlflow.db").exists()


# Resume


@pytest.mark.parametrize(("moment", "rows"), [(8, 5), (9, 6)], ids=["in a step", "in the validation after it"])
def test_a_resumed_training_goes_on_in_the_same_runs_and_ends_in_the_same_bits(monkeypatch, moment, rows):
    train(recipe(*NAMES))
    expected = outcome(folder(1))
    honest, calls = needle.Needle.loss, []

    def loss(task, logits, batch):
        calls.append(1)
        if len(calls) == moment:  # after a rehearsal, 4 steps, their validation and a step
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return honest(task, logits, batch)

    with monkeypatch.context() as patch:
        patch.setattr(needle.Needle, "loss", loss)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(*NAMES, max_steps=6, checkpoint_every=4))
    interrupted = folder(2)
    assert interrupted.checkpointed()[-1] == 4
    assert len(of_file(interrupted)["train_loss"]) == rows
    _, found = mlflow_run(interrupted)
    assert (found.info.status, found.data.tags["status"]) == ("KILLED", "interrupted")
    runs = json.loads((interrupted.path / "loggers.json").read_text())

    resume(interrupted.path)
    own = ("recipe", "files", "checkpoints")  # they name how often checkpoints are made, and the loggers' files
    for part in {*expected} - {*own}:
        assert difference(outcome(interrupted)[part], expected[part]) is None, part
    for step, checkpoint in expected["checkpoints"].items():
        assert difference(outcome(interrupted)["checkpoints"][step]["state_dict"], checkpoint["state_dict"]) is None
    assert json.loads((interrupted.path / "loggers.json").read_text()) == runs
    for name in ("tensorboard", "mlflow"):
        found = READ[name](interrupted)
        assert_same(found, of_file(interrupted), but=["ms"])
        assert [step for step, _ in found["ms"]] == [1, 2, 3, 4, 5, 6]
    begun = [record.run.run_id for record in wandb_records(interrupted) if record.HasField("run")]
    assert begun == [runs["wandb"]] * 2
    _, found = mlflow_run(interrupted)
    assert (found.info.status, found.data.tags["status"]) == ("FINISHED", "done")


def test_rows_are_on_the_disk_before_a_checkpoint_is(monkeypatch):
    from tensorboard.summary.writer.record_writer import RecordWriter

    honest, write, seen = checkpoints.save, RecordWriter.write, []

    def slowly(self, record):
        time.sleep(0.02)
        write(self, record)

    def save(checkpoint, path):
        for name in ("tensorboard", "mlflow"):
            seen.append([step for step, _ in READ[name](folder())["train_loss"]])
        honest(checkpoint, path)

    monkeypatch.setattr(RecordWriter, "write", slowly)  # which happens in a thread
    monkeypatch.setattr(checkpoints, "save", save)
    train(recipe("tensorboard", "mlflow", checkpoint_every=3))
    assert seen[:4] == [[1, 2, 3]] * 2 + [[1, 2, 3, 4]] * 2


def test_wandb_is_not_told_again_what_it_knows_of_a_resumed_run(tmp_path, monkeypatch):
    class Known:
        """A run that a server knows up to step 4."""

        def __init__(self, *_, **options):
            self.options, self.logged = options, []
            self.experiment, self.summary, self.url = self, {"trainer/global_step": 4}, "https://..."

        def log_hyperparams(self, recipe):
            pass

        def log_metrics(self, row, step):
            self.logged.append(step)

    monkeypatch.setattr(loggers, "WandbLogger", Known)
    first, second = (loggers.WeightsAndBiases(tmp_path, "tiny/1", {}, after=3) for _ in range(2))
    assert first.inner.options["id"] == second.inner.options["id"]
    for step in (4, 5, 6):
        first.log({"step": step, "train_loss": 1.0})
    assert first.inner.logged == [5, 6]


def test_loggers_may_differ_when_a_training_is_resumed():
    train(recipe("tensorboard"))
    resume(folder().path, ["train.max_steps=8", "train.loggers=[mlflow]"], allow=["train.max_steps"])
    assert [step for step, _ in of_tensorboard(folder())["train_loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in of_mlflow(folder())["train_loss"]] == [7, 8]


# What fails


@pytest.mark.parametrize("missing", [["wandb"], ["tensorboard", "mlflow"]])
def test_a_missing_package_is_refused_before_anything_is_written(run, monkeypatch, missing):
    honest = machine.find_spec
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name in missing else honest(name))
    for more in ([], ["--dry-run"]):
        status, out, err = run("train", "tiny.yaml", f"train.loggers=[{', '.join(NAMES)}]", *more)
        assert (status, out) == (2, "")
        assert f"names {' and '.join(missing)}, for which" in err
        assert f"pip install 'attnzoo[{','.join(missing)}]'" in err
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_logger_that_fails_is_left_out_with_one_warning_and_the_training_goes_on(monkeypatch, name):
    kind, told = loggers.KINDS[name], []
    honest = kind.log

    def log(self, row):
        told.append(row["step"])
        if row["step"] == 3:
            raise ConnectionError("the network is down\nand more")
        honest(self, row)

    monkeypatch.setattr(kind, "log", log)
    with pytest.warns(UserWarning, match=f"^{name} gets no more of this training, which goes on: the network is down$"):
        assert train(recipe(*NAMES))["status"] == "done"
    assert told == [1, 2, 3]
    for other in {*NAMES} - {name}:
        assert_same(READ[other](folder()), of_file(folder()))
    if name == "wandb":
        import wandb

        wandb.finish()


def test_a_logger_that_can_not_begin_is_left_out_too(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'tiny.yaml' / 'mlflow.db'}")
    with pytest.warns(UserWarning, match="mlflow gets no more of this training"):
        assert train(recipe("mlflow", "tensorboard"))["status"] == "done"
    assert_same(of_tensorboard(folder()), of_file(folder()))


@pytest.mark.slow
def test_a_server_that_is_down_is_not_waited_for(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    since = time.monotonic()
    with pytest.warns(UserWarning, match="mlflow gets no more of this training"):
        assert train(recipe("mlflow"))["status"] == "done"
    assert time.monotonic() - since < 60, "it tries for minutes, left to itself"


def test_wandb_is_left_out_where_it_would_ask_for_a_key(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.warns(UserWarning, match="^wandb gets no more of this training.*set WANDB_MODE=offline$"):
        assert train(recipe("wandb"))["status"] == "done"


@pytest.mark.parametrize("name", NAMES)
def test_a_training_interrupted_while_a_logger_begins_says_how_to_go_on(run, monkeypatch, name):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(loggers.KINDS[name], "__init__", interrupted)
    status, out, err = run("train", "tiny.yaml", f"train.loggers=[{name}]")
    assert (status, out) == (130, "")
    assert "attnzoo train --resume runs/tiny/1" in err
    assert folder().read_summary()["steps"] == 0


def test_a_training_that_diverges_says_so_to_its_loggers(monkeypatch):
    honest, calls = needle.Needle.loss, []

    def loss(task, logits, batch):
        calls.append(1)
        return honest(task, logits, batch) * (math.nan if len(calls) == 4 else 1)  # the first call is the rehearsal

    monkeypatch.setattr(needle.Needle, "loss", loss)
    assert train(recipe(*NAMES))["status"] == "diverged"
    for name in NAMES:
        assert_same(READ[name](folder()), {"train_loss": of_file(folder())["train_loss"]})
    _, found = mlflow_run(folder())
    assert (found.info.status, found.data.tags["status"]) == ("FAILED", "diverged")
