"""Exact resume: a training stopped at any moment ends in the same bits as one that was not."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from attnzoo.errors import RecipeError
from attnzoo.tasks import needle
from attnzoo.training import trainer
from attnzoo.training.module import TrainingModule, lr_factor
from attnzoo.training.recipe import load
from attnzoo.training.resume import refuse_changes
from attnzoo.training.runs import RunFolder
from attnzoo.training.settings import TrainSettings
from attnzoo.training.train import resume, train
from tests.faults.kills import Watch, leave
from tests.faults.same import difference, outcome

torch.set_num_threads(1)

TINY = """
task: {name: needle, length: 16}
attention: {name: local, num_heads: 2, radius: 2, global_tokens: 1, block: 4}
model: {d_model: 8, layers: 1, feed_forward: 16, dropout: 0.2}
train: {max_steps: 7, batch_size: 4, lr: 1e-2, warmup_steps: 2, valid_every: 3, checkpoint_every: 2}
"""
SETTINGS = {
    "epochs": [],
    "accumulation": ["train.accumulate=2", "train.keep_best=2", "model.gradient_checkpointing=true"],
    "bf16": ["train.precision=bf16-mixed", "train.checkpoint_every=5", "model.gradient_checkpointing=true"],
    "fp16": ["train.precision=16-mixed"],
    "redraw": [
        "attention={name: random_sparse, num_heads: 2, keys: 8, redraw: true, dropout: 0.2}",
        "train.valid_every=4",
        "train.checkpoint_every=1",
    ],
    "fsdp": ["train.strategy=fsdp", "train.accelerator=cpu", "train.keep_best=2"],
    "workers": ["train.workers=1", "train.max_steps=4"],
}


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(needle, "SIZES", {"train": 14, "valid": 4, "test": 4})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


@pytest.fixture
def real_fp16(monkeypatch):
    """Computes in fp16 on the CPU, with a loss scale that the first steps have to lower."""
    made = trainer.pl.Trainer

    def make(*, precision, plugins, **options):
        fp16 = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3))
        return made(plugins=[*plugins, fp16], **options)

    monkeypatch.setattr(trainer.pl, "Trainer", make)


def folder(number=1):
    return RunFolder(Path("runs/tiny") / str(number))


def steps(run):
    return [int(step) for step in run.read_metrics()["step"]]


# Kills at any moment


def differ_after_kills(tmp_path, overrides, number, seed):
    """Asserts that a training ends the same after each of so many kills; gives what it ends with."""
    recipe = load("tiny.yaml", overrides)
    counted = Watch(folder(1).path)
    counted.call(lambda: train(recipe))
    expected = outcome(folder(1))
    killed = Watch(folder(2).path, counted.draw(number, seed), leave(folder(2).path, tmp_path / "killed"))
    killed.call(lambda: train(recipe))
    assert difference(outcome(folder(2)), expected) is None
    copies = sorted((tmp_path / "killed").iterdir())
    assert len(copies) == number
    for copy in copies:
        resume(copy)
        assert difference(outcome(RunFolder(copy)), expected) is None, copy.name
        shutil.rmtree(copy)
    return expected


@pytest.mark.parametrize("settings", ["epochs", "accumulation", "bf16", "redraw", "fsdp", "workers"])
def test_a_kill_at_any_moment_changes_nothing(tmp_path, settings):
    differ_after_kills(tmp_path, SETTINGS[settings], number=4 if settings == "workers" else 8, seed=0)


def test_a_kill_changes_nothing_where_fp16_scales_its_loss(tmp_path, real_fp16):
    expected = differ_after_kills(tmp_path, SETTINGS["fp16"], number=4, seed=0)
    assert 0 < expected["summary"]["skipped_steps"] < 7


@pytest.mark.study
@pytest.mark.parametrize("settings", ["epochs", "accumulation", "bf16", "redraw", "fsdp", "workers"])
def test_forty_kills_each_change_nothing(tmp_path, settings):
    differ_after_kills(tmp_path, SETTINGS[settings], number=40, seed=1)


def test_a_run_that_was_made_longer_is_killed_like_any_other(tmp_path):
    train(load("tiny.yaml"))
    shutil.copytree(folder(1).path, folder(2).path, symlinks=True)

    def lengthen(path):
        resume(path, ["train.max_steps=10"], allow=["train.max_steps"])

    counted = Watch(folder(1).path)
    counted.call(lambda: lengthen(folder(1).path))
    expected = outcome(folder(1))
    killed = Watch(folder(2).path, counted.draw(8, seed=0), leave(folder(2).path, tmp_path / "killed"))
    killed.call(lambda: lengthen(folder(2).path))
    begun = 0
    for copy in (tmp_path / "killed").iterdir():
        if "max_steps: 10" in (copy / "recipe.yaml").read_text():
            begun += 1
            resume(copy)  # what was allowed once stays allowed
        else:
            lengthen(copy)
        assert difference(outcome(RunFolder(copy)), expected) is None, copy.name
    assert begun >= 4


@pytest.fixture
def plain_ctrl_c():
    """Python's own handler, which a job in the background of a shell is started without: there Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_at_any_moment_changes_nothing(plain_ctrl_c):
    recipe = load("tiny.yaml")
    counted = Watch(folder(1).path)
    counted.call(lambda: train(recipe))
    expected = outcome(folder(1))
    for number, moment in enumerate(counted.draw(8, seed=2), start=2):
        watch = Watch(folder(number).path, [moment], lambda _: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            watch.call(lambda: train(recipe))
        resume(folder(number).path)
        assert difference(outcome(folder(number)), expected) is None, number


@pytest.mark.parametrize("moment", [3, 5])
def test_a_wish_to_stop_is_met_after_the_step_and_a_second_one_at_once(monkeypatch, capfd, moment):
    """A step that has begun is finished and saved, unless the wish is repeated."""
    for wishes, saved in ((1, moment), (2, {3: 2, 5: 4}[moment])):
        honest, calls = needle.Needle.loss, []

        def loss(task, logits, batch, honest=honest, calls=calls, wishes=wishes):
            calls.append(torch.is_grad_enabled())
            if sum(calls) == moment and calls[-1]:
                for _ in range(wishes):
                    os.kill(os.getpid(), signal.SIGINT)
            return honest(task, logits, batch)

        with monkeypatch.context() as patch:
            patch.setattr(needle.Needle, "loss", loss)
            with pytest.raises(KeyboardInterrupt):
                train(load("tiny.yaml"))
        run = folder(wishes)
        assert run.checkpointed()[-1] == saved
        assert run.read_summary()["status"] == "interrupted"
        assert f"to go on from step {saved}: attnzoo train --resume {run.path}" in capfd.readouterr().err


def test_a_wish_to_stop_is_met_at_once_while_testing(monkeypatch):
    train(load("tiny.yaml"))
    expected, reached = outcome(folder(1)), []

    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(1)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingModule, "test_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(load("tiny.yaml"))
    assert not reached
    assert folder(2).read_summary()["status"] == "interrupted"
    resume(folder(2).path)
    assert difference(outcome(folder(2)), expected) is None


# Real processes

LANGUAGE = """
task: {name: language_model, path: text.txt, length: 8}
attention: {name: gqa, num_heads: 2, num_kv_heads: 1, dropout: 0.1}
model: {d_model: 8, layers: 1, feed_forward: 16}
train: {max_steps: 200, batch_size: 4, valid_every: 40, checkpoint_every: 7, accelerator: cpu}
"""


@pytest.fixture
def start(tmp_path):
    """Starts `attnzoo ...` in a process of its own; all that are left are killed at the end."""
    (tmp_path / "tiny.yaml").write_text(LANGUAGE)
    (tmp_path / "text.txt").write_text("all of the people some of the time " * 40)
    started = []

    def start(*words):
        command = [sys.executable, "-m", "attnzoo", *words]
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, **pipes, text=True, env=alone, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(process, step):
    for line in process.stderr:
        if re.match(rf"step {step}/", line):
            return
    raise AssertionError(f"never at step {step}: {process.communicate()}")


@pytest.mark.slow
def test_a_process_that_is_killed_or_told_to_stop_goes_on_as_if_nothing_had_happened(start):
    train(load("tiny.yaml"))
    expected = outcome(folder(1))
    for number, (sent, step, words) in enumerate(
        [
            (signal.SIGKILL, 1, []),
            (signal.SIGKILL, 100, ["train.workers=1"]),
            (signal.SIGINT, 60, ["train.workers=1"]),
            (signal.SIGTERM, 140, ["train.workers=1"]),
        ],
        start=2,
    ):
        run = folder(number)
        process = start("train", "tiny.yaml", *words)
        wait_for(process, step)
        if words:  # two processes in one folder
            with pytest.raises(RecipeError, match="another process trains in"):
                resume(run.path)
        send = os.kill if sent == signal.SIGKILL else os.killpg  # to those that load data too, as a terminal does
        send(process.pid, sent)
        _, err = process.communicate(timeout=60)
        assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[sent]
        if sent != signal.SIGKILL:
            assert "Traceback" not in err
            assert f"attnzoo train --resume {run.path}" in err
        if sent == signal.SIGINT:
            assert run.checkpointed()[-1] == steps(run)[-1], "saved where it stopped"
        resume(run.path, [word.replace("=1", "=0") for word in words])
        found = outcome(run)
        assert difference(without_workers(found), without_workers(expected)) is None, sent


def without_workers(found):
    """Loading data in other processes is no difference, and the recipe says who loaded it."""
    for checkpoint in found["checkpoints"].values():
        checkpoint["hyper_parameters"]["recipe"]["train"].pop("workers", None)
    return {name: value for name, value in found.items() if name != "recipe"}


# What is resumed, and with what


def test_a_finished_run_says_so_and_is_left_alone(run):
    assert run("train", "tiny.yaml")[0] == 0
    before = {file: file.stat().st_mtime_ns for file in folder().path.rglob("*.*") if file.name != ".lock"}
    status, _, err = run("train", "--resume", "runs/tiny/1")
    assert (status, err) == (0, "runs/tiny/1 is done, all 7 steps: nothing is left to do\n")
    assert before == {file: file.stat().st_mtime_ns for file in before}


def test_more_steps_have_to_be_allowed_and_then_follow_the_longer_schedule(run):
    assert run("train", "tiny.yaml")[0] == 0
    longer = ["train", "--resume", "runs/tiny/1", "train.max_steps=12"]
    status, out, err = run(*longer)
    assert (status, out) == (2, "")
    assert "train.max_steps was 7 and is 12 now (--allow-change train.max_steps goes on with it)" in err
    assert outcome(folder())["summary"]["steps"] == 7

    status, _, err = run(*longer, "--allow-change", "train.max_steps")
    assert status == 0
    assert "train.max_steps is 12 instead of 7: from here on the learning rate is that of 12 steps" in err
    assert steps(folder()) == [*range(1, 13)]
    rates = folder().read_metrics()["lr"]
    for length, before in ((7, range(7)), (12, range(7, 12))):
        settings = TrainSettings(max_steps=length, warmup_steps=2)
        assert [rates[step] for step in before] == pytest.approx(
            [1e-2 * lr_factor(step, settings) for step in before], rel=1e-4
        )
    assert load("runs/tiny/1/recipe.yaml").sections["train"]["max_steps"] == 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.lr=0.5"], "train.lr was 0.01 and is 0.5 now"),
        (["attention.radius=1", "train.seed=4"], "attention.radius was 2 and is 1 now\n  train.seed was 0 and is 4"),
        (["train.lr=0.5", "--allow-change", "train.lr"], "only train.max_steps may be changed"),
        (["train.max_steps=3", "--allow-change", "train.max_steps"], "less than the 7 steps"),
        (["tiny.yaml"], "leave out tiny.yaml"),
        (["train.sed=3"], "did you mean 'seed'"),
        (["--dry-run"], "exclude each other"),
    ],
)
def test_other_settings_are_refused_by_name(run, words, said):
    assert run("train", "tiny.yaml")[0] == 0
    before = folder().summary.read_bytes(), folder().metrics.read_bytes()
    status, out, err = run("train", "--resume", "runs/tiny/1", *words)
    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert before == (folder().summary.read_bytes(), folder().metrics.read_bytes())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume", "nowhere"], "nowhere does not exist"),
        (["--resume", "runs"], "has no recipe.yaml in it"),
        (["tiny.yaml", "--allow-change", "train.max_steps"], "--allow-change belongs to --resume"),
        (["--json"], "name a RECIPE, or a run to go on with"),
    ],
)
def test_what_is_no_run_is_refused(run, words, said):
    Path("runs").mkdir()
    status, out, err = run("train", *words)
    assert (status, out) == (2, "")
    assert said in err.replace("\n", " ")


def test_a_run_from_before_a_setting_had_its_default():
    now = load("tiny.yaml").sections
    saved = {**now, "train": {name: value for name, value in now["train"].items() if name != "compile"}}
    refuse_changes(folder(), saved, now, ())
    with pytest.raises(RecipeError, match=r"train.compile was False and is True now"):
        refuse_changes(folder(), saved, load("tiny.yaml", ["train.compile=true"]).sections, ())


def test_a_recipe_edited_in_the_run_folder_is_refused(run):
    assert run("train", "tiny.yaml")[0] == 0
    folder().recipe.write_text(folder().recipe.read_text().replace("dropout: 0.2", "dropout: 0.3"))
    status, _, err = run("train", "--resume", "runs/tiny/1")
    assert status == 2
    assert "model.dropout was 0.2 and is 0.3 now" in err


def test_changed_data_is_refused(tmp_path, run):
    (tmp_path / "tiny.yaml").write_text(LANGUAGE.replace("200", "4"))
    (tmp_path / "text.txt").write_text("all of the people some of the time " * 40)
    assert run("train", "tiny.yaml")[0] == 0
    (tmp_path / "text.txt").write_text("all of the people mose of the time " * 40)
    words = ["train.max_steps=6", "--allow-change", "train.max_steps"]
    status, _, err = run("train", "--resume", "runs/tiny/1", *words)
    assert status == 2
    assert "the data has changed" in err


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(capsys):
    train(load("tiny.yaml"))
    expected = outcome(folder())
    shutil.rmtree(folder().path / "checkpoints")
    folder().summary.unlink()
    resume(folder().path)
    assert "starting at the beginning" in capsys.readouterr().err
    assert difference(outcome(folder()), expected) is None


def test_another_version_is_named(capsys):
    train(load("tiny.yaml"))
    summary = folder().read_summary()
    folder().write_summary({**summary, "status": "interrupted", "versions": {**summary["versions"], "torch": "1.0"}})
    resume(folder().path)
    assert "not the same bits as without a stop: versions" in capsys.readouterr().err
