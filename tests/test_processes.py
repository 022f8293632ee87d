"""Several processes train what one trains: the same gradients, weights and scores, and the same end after a stop."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnzoo.training import checkpoints, export
from attnzoo.training.data import Share
from attnzoo.training.evaluate import evaluate
from attnzoo.training.module import TrainingModule
from attnzoo.training.recipe import load
from attnzoo.training.runs import RunFolder
from attnzoo.training.train import train
from tests.faults.same import difference, first_gradients, outcome

torch.set_num_threads(1)

TINY = """
task: {name: language_model, path: text.txt, length: 8}
attention: {name: gqa, num_heads: 2, num_kv_heads: 1, bias: false}
model: {d_model: 8, layers: 2, feed_forward: 15}
train: {max_steps: 4, batch_size: 4, valid_every: 1, keep_best: 4, clip: null, accelerator: cpu}
"""
"""Without bias, because that of the keys has no gradient but rounding, which AdamW makes whole steps of."""
TEXT = "all of the people some of the time " * 43
"""Cut into 90, 5 and 5 per cent it gives 9 windows for validation and for the test: one too many for two processes."""

REPOSITORY = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors"),
]


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "text.txt").write_text(TEXT)


def folder(number):
    return RunFolder(Path("runs/tiny") / str(number))


@pytest.fixture
def start():
    """Starts a module of Python in a process of its own, or with torchrun in two; all that are left are killed."""
    started = []

    def start(*words, torchrun=False):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if torchrun else []
        command = [sys.executable, "-W", "error::UserWarning", *launcher, "-m", *words]
        there = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, **pipes, text=True, env=there, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()  # torchrun hands it on
            process.wait(timeout=30)
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


@pytest.mark.parametrize(("strategy", "clip"), [("ddp", "null"), ("fsdp", "0.5")])
def test_two_processes_train_what_one_trains(start, strategy, clip):
    words = ["train.accumulate=2", f"train.clip={clip}"]
    train(load("tiny.yaml", words))
    several = ["train.devices=2", f"train.strategy={strategy}", "--json"]
    out, _ = finish(start("attnzoo", "train", "tiny.yaml", *words, *several))
    one, two = folder(1), folder(2)
    assert json.loads(out) == two.read_summary(), "one process speaks"
    assert two.read_summary()["devices"] == 2

    for name, values in one.read_metrics().items():
        if name != "ms":
            assert values == pytest.approx(two.read_metrics()[name], abs=1e-5), name
    assert one.read_summary()["test"] == pytest.approx(two.read_summary()["test"], abs=1e-5)
    torch.testing.assert_close(first_gradients(two), first_gradients(one), rtol=0, atol=1e-6)
    weights = [checkpoints.load(run.last)["state_dict"] for run in (one, two)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)

    found = evaluate(two.path)  # on one device
    assert found["test"] == pytest.approx(two.read_summary()["test"], abs=2e-6)
    export.export(two.path, Path("two.safetensors"))
    module = TrainingModule(load("tiny.yaml").sections)
    module.load_state_dict(checkpoints.load(two.best)["state_dict"])
    tokens = torch.arange(8)[None]
    assert torch.equal(export.load_model(Path("two.safetensors"))(tokens), module.model.eval()(tokens))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 5, 6])
def test_every_item_counts_once_in_shares_of_one_length(size, ranks):
    items = [{"tokens": torch.tensor(number)} for number in range(size)]
    shares = [Share(items, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    dealt = [share[place] for share in shares for place in range(len(share))]
    assert sorted(int(item["tokens"]) for item in dealt if item["counts"]) == [*range(size)]


def test_each_process_has_its_own_dropout_the_same_random_patterns_and_the_same_scores(start):
    redraws = "attention={name: random_sparse, num_heads: 2, keys: 2, redraw: true}"
    words = ["tests.faults.ranks", "tiny.yaml", redraws, "model.dropout=0.5", "train.devices=2", "train.strategy=fsdp"]
    finish(start(*words, torchrun=True))
    assert [path.name for path in Path("runs/tiny").iterdir()] == ["1"]
    assert len(checkpoints.parts(folder(1).last)) == 2
    one, two = (json.loads(Path(f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert len(one["kept"]) == len(two["kept"]) > 0
    assert all(mine != others for mine, others in zip(one["kept"], two["kept"], strict=True))
    assert one["salts"] == two["salts"]
    assert len(set(one["salts"])) == 4, "one for each step"
    assert [row | {"ms": 0} for row in one["rows"]] == [row | {"ms": 0} for row in two["rows"]]
    assert len(one["rows"]) == 4
    assert folder(1).read_summary()["status"] == "done"


def wait_for(process, step):
    for line in process.stderr:
        if re.match(rf"step {step}/", line):
            return
    raise AssertionError(f"never at step {step}: {process.communicate()}")


def second(process):
    """The process that the first one has started."""
    [other] = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    return other


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the second process")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_that_are_killed_or_told_to_stop_go_on_as_if_nothing_had_happened(start, strategy):
    several = ["train.devices=2", f"train.strategy={strategy}", "model.dropout=0.1", "train.clip=1"]
    often = ["train.max_steps=120", "train.valid_every=40", "train.checkpoint_every=7", "train.keep_best=1"]
    command = ["attnzoo", "train", "tiny.yaml", *several, *often]
    finish(start(*command))
    go_on = ["attnzoo", "train", "--resume", str(folder(2).path)]
    for words, step, sent in ((command, 40, signal.SIGKILL), (go_on, 80, signal.SIGTERM)):
        process = start(*words)
        wait_for(process, step)
        if sent == signal.SIGKILL:
            os.killpg(process.pid, sent)
        else:
            os.kill(process.pid if strategy == "ddp" else second(process), sent)  # either tells the other one
        process.communicate(timeout=60)
        assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143}[sent]
        assert step < folder(2).checkpointed()[-1] + 10 < 130
    finish(start(*go_on))
    assert difference(outcome(folder(2)), outcome(folder(1))) is None


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the second process")
@pytest.mark.parametrize("first", [True, False])
def test_the_death_of_one_process_ends_the_other_with_one_message_at_most(start, first):
    process = start("attnzoo", "train", "tiny.yaml", "train.devices=2", "train.strategy=ddp", "train.max_steps=100000")
    wait_for(process, 1)
    os.kill(process.pid if first else second(process), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    if first:
        assert "attnzoo:" not in err
    else:
        assert process.returncode == 1
        assert err.count("attnzoo: ") == 1
        assert "attnzoo: another process of this training ended, and the rest can't go on" in err
        assert f"attnzoo train --resume {folder(1).path}" in err
    assert "Traceback" not in err
