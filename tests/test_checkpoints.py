"""Checkpoints: whole or not at all, checked before they are used, and nothing in them is executed."""

import errno
import json
import os
import re
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch

from attnzoo.errors import RecipeError
from attnzoo.tasks import needle
from attnzoo.training import checkpoints, durable, evaluate, experiment, export
from attnzoo.training.model import Transformer
from attnzoo.training.module import TrainingModule
from attnzoo.training.recipe import load
from attnzoo.training.runs import RunFolder
from attnzoo.training.train import resume, train
from tests.faults.same import difference, outcome

torch.set_num_threads(1)

TINY = """
task: {name: needle, length: 16}
attention: {name: local, num_heads: 2, radius: 2, global_tokens: 1, block: 4}
model: {d_model: 8, layers: 1, feed_forward: 16, dropout: 0.2}
train: {max_steps: 8, batch_size: 4, lr: 1e-2, warmup_steps: 2, valid_every: 2, keep_best: 2}
"""


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(needle, "SIZES", {"train": 14, "valid": 4, "test": 5})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


@pytest.fixture
def folder():
    """The run that the next `train` makes."""
    return RunFolder(Path("runs/tiny/1"))


def trained(*overrides):
    train(load("tiny.yaml", overrides))


def tell_interrupted(folder):
    folder.write_summary({**folder.read_summary(), "status": "interrupted"})


# Files


def test_a_file_is_replaced_when_the_disk_has_the_new_one(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        honest = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, honest=honest: (done.append(name), honest(*given)))
    durable.write(tmp_path / "file", b"new")
    assert done == ["fsync", "replace", "fsync"], "content, name, folder"
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_file_that_can_not_be_written_stays_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        durable.write(tmp_path / "file", b"new")
    assert [path.read_bytes() for path in tmp_path.glob("file*")] == [b"old"]


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_digest_lies_beside_each_checkpoint_as_sha256sum_writes_it(folder):
    trained()
    for step in folder.checkpointed():
        path = folder.checkpoint(step)
        digest = checkpoints.hashlib.sha256(path.read_bytes()).hexdigest()
        assert checkpoints.digest_of(path).read_text() == f"{digest}  {path.name}\n"


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_best_and_the_newest_are_kept_and_no_others(folder, keep):
    trained(f"train.keep_best={keep}", "train.lr=3", "train.warmup_steps=8", "train.max_steps=12")
    metrics = folder.read_metrics()
    losses = {step: loss for step, loss in zip(metrics["step"], metrics["valid_loss"], strict=True) if loss == loss}
    best = sorted(losses, key=losses.get)[:keep]
    assert set(folder.checkpointed()) == {*best, 12}
    assert best[0] != 12, "this shows nothing"
    assert folder.best.readlink() == Path(f"step-{best[0]:.0f}.ckpt")
    assert folder.last.readlink() == Path("step-12.ckpt")
    assert len(list(folder.last.parent.iterdir())) == 2 * len({*best, 12}) + 2
    assert folder.read_summary()["best_step"] == best[0]


def test_checkpoints_come_as_often_as_asked_and_with_each_better_validation(folder, monkeypatch):
    saved = []
    honest = checkpoints.save
    monkeypatch.setattr(checkpoints, "save", lambda *given: (saved.append(given[1].stem), honest(*given)))
    trained("train.checkpoint_every=3", "train.valid_every=100")
    assert saved == ["step-3", "step-6", "step-8"]


def test_what_a_kill_left_half_done_is_set_right(folder):
    trained()
    expected = outcome(folder)
    tell_interrupted(folder)
    folder.last.unlink()
    folder.best.unlink()
    for stray in ("step-5.ckpt.part", "step-5.ckpt.sha256", "step-7.ckpt.sha256.part"):
        (folder.last.parent / stray).write_text("half")
    resume(folder.path)
    assert difference(outcome(folder), expected) is None


# Damage


def from_step_6(path):
    """Takes another checkpoint's content, which fits its digest."""
    other = Path(str(path).replace("step-8", "step-6"))
    shutil.copy(other, path)
    digest = checkpoints.digest_of(other).read_text()
    checkpoints.digest_of(path).write_text(digest.replace(other.name, path.name))


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replaced(path):
    path.write_text("all of the people")
    checkpoints.digest_of(path).unlink()


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (truncated, "step-8.ckpt is damaged: it differs from its digest"),
        (flipped, "step-8.ckpt is damaged: it differs from its digest"),
        (replaced, "step-8.ckpt can't be read as a checkpoint"),
        (Path.unlink, "last.ckpt leads to step-8.ckpt, which is missing"),
        (from_step_6, "step-8.ckpt is damaged: it holds step 6"),
        (
            lambda path: checkpoints.save({"a": 1}, path),
            "step-8.ckpt is damaged: it holds no best, no global_step",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_newest_good_one_is_used(folder, run, harm, said):
    trained("train.keep_best=4")
    resumes_at_step_6(folder, run, folder.checkpoint(8), harm, said)


def resumes_at_step_6(folder, run, file, harm, said):
    """Asserts that a run whose file was harmed goes on from the checkpoint before, to the same end."""
    expected = outcome(folder)
    tell_interrupted(folder)
    harm(file)
    status, _, err = run("train", "--resume", str(folder.path))
    assert status == 0
    assert said in err
    assert "resuming at step 6 of 8" in err
    assert difference(outcome(folder), expected) is None


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (flipped, "0-of-1.ckpt is damaged: it differs from its digest"),
        (Path.unlink, "step-8.ckpt is damaged: a part of it is missing"),
        (lambda part: part.rename(part.with_name("0-of-2.ckpt")), "step-8.ckpt is damaged: a part of it is missing"),
        (from_step_6, "step-8.ckpt is damaged: its parts do not belong together"),
    ],
)
def test_a_damaged_part_of_a_checkpoint_in_parts_is_named_and_the_newest_good_one_is_used(folder, run, harm, said):
    trained("train.strategy=fsdp", "train.accelerator=cpu", "train.keep_best=4")
    resumes_at_step_6(folder, run, checkpoints.part(folder.checkpoint(8), 0, 1), harm, said)


@pytest.mark.filterwarnings("always")
def test_a_checkpoint_without_its_digest_is_named_and_used(folder, run):
    trained()
    checkpoints.digest_of(folder.best.resolve()).unlink()
    status, _, err = run("export", str(folder.path), "a.safetensors")
    assert status == 0
    assert "best.ckpt has no digest beside it: nobody can tell whether it is damaged" in err


@pytest.mark.filterwarnings("always")
def test_a_run_without_any_good_checkpoint_begins_again(folder, run):
    trained()
    expected = outcome(folder)
    tell_interrupted(folder)
    for step in folder.checkpointed():
        flipped(folder.checkpoint(step))
    status, _, err = run("train", "--resume", str(folder.path))
    assert status == 0
    assert "starting at the beginning" in err
    assert difference(outcome(folder), expected) is None


@pytest.mark.filterwarnings("always")
def test_a_damaged_best_checkpoint_is_named_and_the_best_of_the_others_is_tested(folder, run):
    trained("train.keep_best=1", "train.lr=3", "train.warmup_steps=8", "train.max_steps=12")
    best = folder.read_summary()["best_step"]
    assert best < 12
    tell_interrupted(folder)
    flipped(folder.best)
    for command in (["evaluate", str(folder.path)], ["export", str(folder.path), "a.safetensors"]):
        status, _, err = run(*command)
        assert status == 0
        assert "best.ckpt is damaged" in err
    status, _, err = run("train", "--resume", str(folder.path))
    assert status == 0
    assert f"step-{best}.ckpt is damaged" in err
    with warnings.catch_warnings(action="error"):
        assert folder.read_summary()["test"] == evaluate.evaluate(folder.path)["test"]


@pytest.mark.filterwarnings("always")
def test_a_finished_run_whose_last_checkpoint_is_damaged_is_trained_on_to_its_end_again(folder, run):
    trained("train.valid_every=8")
    expected = outcome(folder)
    flipped(folder.checkpoint(8))
    status, _, err = run("evaluate", str(folder.path))
    assert status == 2
    assert "attnzoo train --resume runs/tiny/1 trains what is lost again" in err
    assert run("train", "--resume", str(folder.path))[0] == 0
    assert difference(outcome(folder), expected) is None


def directory(path):
    path.unlink()
    path.mkdir()


def changed(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("metrics.csv", Path.unlink, "metrics.csv lacks 4 of the 4 steps"),
        ("metrics.csv", changed(lambda rows: rows.replace(b"2,", b"2,\xff", 1)), "metrics.csv lacks 1 of the 4"),
        ("metrics.csv", changed(lambda rows: rows + rows), ""),
        ("curves.png", directory, "can't draw runs/tiny/1/curves.png: Is a directory"),
        ("checkpoints/step-8.ckpt", directory, "step-8.ckpt is damaged: a part of it is missing"),
    ],
)
def test_what_was_done_to_other_files_costs_no_result(folder, run, name, harm, said):
    trained("train.keep_best=4")
    expected = outcome(folder)
    tell_interrupted(folder)
    flipped(folder.checkpoint(8))
    flipped(folder.checkpoint(6))
    harm(folder.path / name)
    status, _, err = run("train", "--resume", str(folder.path))
    assert status == 0
    assert said in err
    found = outcome(folder)
    assert found["summary"] == expected["summary"]
    assert difference(found["checkpoints"], expected["checkpoints"]) is None
    if not said:
        assert found["rows"] == expected["rows"]


@pytest.mark.parametrize("harm", [directory, lambda path: path.write_text("[]"), lambda path: path.write_text("{")])
def test_a_summary_that_is_none_is_refused_with_advice(folder, run, capsys, harm):
    trained()
    harm(folder.summary)
    capsys.readouterr()
    status, out, err = run("train", "--resume", str(folder.path))
    assert (status, out) == (2, "")
    assert err.startswith("attnzoo: runs/tiny/1/summary.json ")
    assert "delete it to go on" in err


class Code:
    """Makes a directory when it is unpickled without care."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_the_code_would_run():
    torch.save(Code(), "code.ckpt")
    torch.load("code.ckpt", weights_only=False)
    assert Path("executed").exists()


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("digest", [True, False])
def test_a_checkpoint_made_to_run_code_is_refused(folder, run, digest):
    trained()
    expected = outcome(folder)
    tell_interrupted(folder)
    made = {**checkpoints.load(folder.checkpoint(8)), "global_step": Code()}
    folder.best.unlink()
    for path in (folder.checkpoint(10), folder.best):
        checkpoints.save(made, path)
        if not digest:
            checkpoints.digest_of(path).unlink()
    said = "can't be read as a checkpoint, which holds tensors and plain values alone"
    for command, name in (("evaluate", "best.ckpt"), ("train --resume", "step-10.ckpt")):
        status, _, err = run(*command.split(), str(folder.path))
        assert status == 0
        assert f"{name} {said}" in err
    assert not Path("executed").exists()
    checkpoints.digest_of(folder.best).unlink(missing_ok=True)
    assert difference(outcome(folder), expected) is None


def test_a_newer_schema_is_refused(folder, run, monkeypatch):
    trained()
    tell_interrupted(folder)
    monkeypatch.setattr(checkpoints, "SCHEMA", 0)
    for command in (["train", "--resume", str(folder.path)], ["evaluate", str(folder.path)]):
        status, _, err = run(*command)
        assert status == 2
        assert "written by a newer attnzoo (schema 1, this one reads up to 0): upgrade attnzoo" in err


def test_a_run_from_before_resume_is_not_begun_again_over_its_results(folder, run):
    trained()
    old = folder.last.read_bytes()
    for file in folder.last.parent.iterdir():
        file.unlink()
    folder.last.write_bytes(old)
    tell_interrupted(folder)
    status, _, err = run("train", "--resume", str(folder.path))
    assert status == 2
    assert "was trained before runs could be resumed" in err


# What stops a training from outside


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("what", ["step-6.ckpt", "step-6.ckpt.sha256", "last.ckpt", "metrics.csv"])
def test_a_full_disk_ends_the_run_with_one_message_and_the_last_good_checkpoint(folder, run, monkeypatch, what):
    trained()
    expected = outcome(folder)
    folder = RunFolder(Path("runs/tiny/2"))
    full = []

    def until_full(honest):
        def call(file, *given):
            path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
            if full or (Path(path).name.removesuffix(".part") == what and 4 in folder.checkpointed()):
                full.append(path)
                full_disk()
            return honest(file, *given)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace"):
            patch.setattr(os, name, until_full(getattr(os, name)))
        status, _, err = run("train", "tiny.yaml")
    assert full
    assert status == 1
    assert re.search(r"^attnzoo: can't write runs/tiny/2/?.*: No space left on device$", err, re.MULTILINE)
    assert "Traceback" not in err
    assert checkpoints.load(folder.checkpoint(4))["global_step"] == 4
    resume(folder.path)
    assert difference(outcome(folder), expected) is None


@pytest.fixture
def modest():
    """Takes away root's right to write everywhere, for as long as a test runs."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_a_read_only_folder_is_refused_and_left_as_it_was(folder, run, capsys, request, somewhere):
    trained()
    tell_interrupted(folder)
    for opened in (somewhere, *somewhere.parents[:2]):
        opened.chmod(0o755)
    for locked in (folder.path, folder.last.parent, folder.path.parent):
        locked.chmod(0o555)
    before = {file: file.stat().st_mtime_ns for file in folder.path.rglob("*")}
    capsys.readouterr()
    request.getfixturevalue("modest")
    for command, said in (
        (["train", "--resume", str(folder.path)], "can't write in runs/tiny/1: Permission denied"),
        (["train", "tiny.yaml"], "can't make a run folder in runs/tiny: Permission denied"),
    ):
        status, _, err = run(*command)
        assert (status, err) == (2, f"attnzoo: {said}\n")
    assert before == {file: file.stat().st_mtime_ns for file in folder.path.rglob("*")}


def test_a_folder_where_nothing_can_be_written_is_refused(folder, run, capsys):
    trained()
    capsys.readouterr()
    (folder.path / ".lock").unlink()
    (folder.path / ".lock").mkdir()
    status, _, err = run("train", "--resume", str(folder.path))
    assert status == 2
    assert err == "attnzoo: can't write in runs/tiny/1: Is a directory\n"


def test_a_process_that_loads_data_and_dies_ends_the_run_with_one_message(folder, run, monkeypatch):
    trained("train.max_steps=4")
    expected = outcome(folder)
    honest, parent = needle.Haystacks.__getitem__, os.getpid()

    def item(split, index):
        if os.getpid() != parent and (Path("runs/tiny/2/checkpoints/step-2.ckpt")).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(split, index)

    with monkeypatch.context() as patch:
        patch.setattr(needle.Haystacks, "__getitem__", item)
        status, _, err = run("train", "tiny.yaml", "train.max_steps=4", "train.workers=1")
    assert status == 1
    assert "a process that loads data died" in err
    assert "Traceback" not in err
    again = RunFolder(Path("runs/tiny/2"))
    resume(again.path, ["train.workers=0"])
    assert outcome(again)["rows"] == expected["rows"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_weights(folder, run, monkeypatch, accumulate):
    honest = TrainingModule.on_after_backward

    def spoil(module):
        honest(module)
        if module.trainer.global_step == 4:
            module.model.head.bias.grad[0] = torch.inf

    monkeypatch.setattr(TrainingModule, "on_after_backward", spoil)
    status, _, err = run("train", "tiny.yaml", "train.checkpoint_every=1", f"train.accumulate={accumulate}")
    assert status == 1
    assert "the norm of the gradients is inf at step 5: try a lower train.lr" in err
    assert "diverged after step 4; the last good state is runs/tiny/1/checkpoints/step-4.ckpt" in err
    assert all(weight.isfinite().all() for weight in checkpoints.load(folder.last)["state_dict"].values())
    summary = folder.read_summary()
    assert (summary["status"], summary["steps"]) == ("diverged", 4)


# evaluate and export


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_evaluate_finds_what_training_found(folder, run, precision):
    trained(f"train.precision={precision}")
    summary = folder.read_summary()
    status, out, _ = run("evaluate", str(folder.path), "--json")
    assert status == 0
    found = json.loads(out)
    assert found["test"] == summary["test"]
    assert found["step"] == summary["best_step"]
    status, out, _ = run("evaluate", str(folder.path))
    assert f"test accuracy  {summary['test']['accuracy']:.4f}" in out


@pytest.mark.parametrize("verb", ["evaluate", "export"])
def test_folders_without_a_checkpoint_are_refused(folder, run, verb):
    more = ["a.safetensors"] if verb == "export" else []
    assert "does not exist: name the folder of one run" in run(verb, "nowhere", *more)[2]
    trained()
    assert "has no recipe.yaml in it" in run(verb, "runs/tiny", *more)[2]
    for file in folder.last.parent.iterdir():
        file.unlink()
    status, out, err = run(verb, str(folder.path), *more)
    assert (status, out) == (2, "")
    assert "has no checkpoint yet" in err


def test_an_exported_model_computes_the_same_and_knows_its_recipe(folder, run, monkeypatch):
    trained()
    status, out, _ = run("export", str(folder.path), "a.safetensors")
    assert (status, out) == (0, "a.safetensors\n")
    found = export.read(Path("a.safetensors"))
    sections = load("tiny.yaml").sections
    assert found["recipe"] == sections
    assert found["step"] == folder.read_summary()["best_step"]

    module = TrainingModule(sections).eval()
    module.load_state_dict(folder.load_checkpoint()["state_dict"])
    tokens = torch.randint(100, (3, 16))
    expected = module.model(tokens)
    monkeypatch.setattr(experiment.tasks, "find", None)  # needs no data
    model = export.load_model(Path("a.safetensors"))
    assert isinstance(model, Transformer)
    assert torch.equal(model(tokens), expected)


def test_what_export_did_not_write_is_refused_and_nothing_is_overwritten(folder, run):
    trained()
    Path("mine.safetensors").write_text("mine")
    status, out, err = run("export", str(folder.path), "mine.safetensors")
    assert (status, out) == (2, "")
    assert "exists, and is left as it is" in err
    assert Path("mine.safetensors").read_text() == "mine"
    assert run("export", str(folder.path), "no/such/folder.safetensors")[0] == 2
    with pytest.raises(RecipeError, match="can't be read as safetensors"):
        export.read(Path("mine.safetensors"))
    export.safetensors.torch.save_file({"a": torch.ones(2)}, "other.safetensors")
    with pytest.raises(RecipeError, match="attnzoo export did not write it"):
        export.read(Path("other.safetensors"))
