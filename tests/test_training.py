"""Training: settings, schedule, order of data, what a run leaves behind, and how it stops."""

import csv
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attnzoo import cli
from attnzoo.errors import OptionError, RecipeError
from attnzoo.tasks import needle
from attnzoo.training import curves, experiment, machine, train
from attnzoo.training.data import Shuffled
from attnzoo.training.module import TrainingModule, lr_factor, parameter_groups
from attnzoo.training.progress import ProgressLines, interval
from attnzoo.training.recipe import load
from attnzoo.training.runs import RunFolder
from attnzoo.training.settings import TrainSettings
from tests.faults.same import first_gradients

torch.set_num_threads(1)

TINY = """
task: {name: needle, length: 32}
attention: {name: local, num_heads: 2, radius: 2, global_tokens: 1, block: 4}
model: {d_model: 16, layers: 2, feed_forward: 32}
train: {max_steps: 6, batch_size: 8, lr: 1e-2, warmup_steps: 2, valid_every: 4}
"""


@pytest.fixture(autouse=True)
def few_items(monkeypatch):
    monkeypatch.setattr(needle, "SIZES", {"train": 96, "valid": 20, "test": 30})


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return lambda *overrides: load("tiny.yaml", overrides)


def columns(summary):
    return RunFolder(train.Path(summary["run"])).read_metrics()


# Settings


def test_all_that_is_impossible_is_said_at_once():
    wrong = {"max_steps": 0, "batch_size": True, "lr": 0, "weight_decay": -0.1, "clip": 0, "devices": 0, "seed": -1}
    with pytest.raises(OptionError) as caught:
        TrainSettings(**wrong, precision="16-true", strategy="dpp")
    message = str(caught.value)
    for name in (*wrong, "precision", "strategy"):
        assert f"{name} must be" in message
    assert "did you mean 'ddp'" in message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"compile": 1}, "compile must be true or false, not 1"),
        ({"cudnn_benchmark": None}, "cudnn_benchmark must be true or false, not None"),
        ({"loggers": "wandb"}, "loggers must be a list of some of 'tensorboard', 'wandb', 'mlflow' or null"),
        ({"loggers": ["tensorbord"]}, "did you mean 'tensorboard'"),
        ({"loggers": ["wandb", "wandb"]}, "names each once"),
    ],
)
def test_options_of_speed_and_loggers_are_checked(given, said):
    with pytest.raises(OptionError, match=said):
        TrainSettings(**given)


@pytest.mark.parametrize(
    "given",
    [{"clip": None}, {"warmup_steps": 0}, {"weight_decay": 0}, {"devices": "auto"}, {"lr": 1}, {"loggers": []}],
)
def test_limits_that_have_a_meaning_are_allowed(given):
    assert TrainSettings(**given)


# Schedule and optimizer


def test_the_learning_rate_peaks_in_the_last_step_of_warm_up_and_falls_to_the_end():
    settings = TrainSettings(max_steps=20, warmup_steps=5)
    factors = [lr_factor(step, settings) for step in range(20)]
    assert factors[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[4:]))
    assert 0 < factors[-1] < 0.02


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_without_warm_up_the_first_step_is_at_the_peak(warmup_steps):
    assert lr_factor(0, TrainSettings(max_steps=9, warmup_steps=warmup_steps)) == 1
    assert lr_factor(1, TrainSettings(max_steps=9, warmup_steps=warmup_steps)) < 1


def test_warm_up_counts_optimizer_steps_where_gradients_accumulate(tiny):
    summary = train.train(tiny("train.accumulate=2", "train.warmup_steps=3", "train.max_steps=5"))
    rates = columns(summary)["lr"]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2], rel=1e-4)
    assert max(rates) == rates[2]
    assert len(rates) == 5


def test_weight_decay_spares_biases_norms_and_embeddings(tiny):
    model = experiment.build(tiny().sections).model
    decayed, spared = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed_names = {names[id(parameter)] for parameter in decayed["params"]}
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    assert decayed_names == {
        name for name in names.values() if name.endswith(".weight") and "norm" not in name and "embedding" not in name
    }


def test_accumulated_batches_make_the_step_of_one_big_batch(tiny):
    kept = ["train.clip=null", "train.valid_every=1", "train.keep_best=6"]
    first = train.train(tiny("train.batch_size=8", *kept))
    second = train.train(tiny("train.batch_size=4", "train.accumulate=2", *kept))
    gradients = [first_gradients(RunFolder(train.Path(summary["run"]))) for summary in (first, second)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)
    assert max(gradient.abs().max() for gradient in gradients[0]) > 0.1, "this shows nothing"
    one, two = columns(first), columns(second)
    assert one["train_loss"] == pytest.approx(two["train_loss"], abs=2e-5)
    assert one["lr"] == two["lr"]
    assert one["train_loss"][0] != one["train_loss"][1]


def test_validation_counts_optimizer_steps_where_gradients_accumulate(tiny):
    metrics = columns(train.train(tiny("train.accumulate=2")))
    validated = [step for step, loss in zip(metrics["step"], metrics["valid_loss"], strict=True) if loss == loss]
    assert validated == [4, 6]


@pytest.mark.parametrize(("clip", "moves"), [("1e-12", False), ("null", True)])
def test_gradients_are_clipped_to_the_norm_asked_for(tiny, tmp_path, clip, moves):
    recipe = tiny(f"train.clip={clip}", "train.weight_decay=0")
    run = train.train(recipe)["run"]
    trained = torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    fresh = experiment.build(recipe.sections).model.state_dict()
    moved = max((trained[f"model.{name}"] - weight).abs().max().item() for name, weight in fresh.items())
    assert (moved > 1e-3) is moves


def test_building_an_experiment_draws_nothing_from_the_global_generator(tiny):
    before = torch.get_rng_state()
    experiment.build(tiny().sections)
    assert torch.equal(torch.get_rng_state(), before)


# Order of data


def test_processes_together_read_what_one_reads():
    alone = list(Shuffled(50, 8, steps=6, seed=3))
    shares = [Shuffled(50, 8, steps=6, seed=3, rank=rank, ranks=2) for rank in (0, 1)]
    assert len(alone) == 48 == len(set(alone))
    assert [len(list(share)) for share in shares] == [24, 24] == [len(share) for share in shares]
    for batch in range(6):
        dealt = [list(share)[4 * batch : 4 * batch + 4] for share in shares]
        assert dealt[0] + dealt[1] == alone[8 * batch : 8 * batch + 8]


def test_the_order_depends_on_seed_and_epoch_alone():
    def epochs(seed):
        torch.rand(3)  # the state of torch's generator plays no part
        order = list(Shuffled(40, 8, steps=10, seed=seed))
        assert sorted(order[:40]) == sorted(order[40:]) == list(range(40))
        return tuple(order[:40]), tuple(order[40:])

    assert epochs(0) == epochs(0)
    assert len({*epochs(0), *epochs(1)}) == 4


def test_an_epoch_ends_with_a_whole_optimizer_step():
    assert Shuffled(100, 8, steps=1, accumulate=5).batches_per_epoch == 10
    order = list(Shuffled(100, 8, steps=4, accumulate=5))
    assert len(set(order[:80])) == 80 == len(set(order[80:])) < len(set(order))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("after", [1, 3, 4, 9])
def test_what_is_done_is_not_dealt_out_again(after, accumulate):
    settings = {"steps": 10, "accumulate": accumulate, "seed": 5, "rank": 1, "ranks": 2}
    whole, rest = (Shuffled(50, 4, after=done, **settings) for done in (0, after))
    assert list(rest) == list(whole)[after * accumulate * 2 :]
    assert len(rest) == len(whole)


# What a run leaves behind


def test_a_run_folder_holds_the_recipe_the_metrics_the_summary_the_curves_and_checkpoints(tiny, tmp_path):
    recipe = tiny()
    summary = train.train(recipe)
    folder = tmp_path / "runs" / "tiny" / "1"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        ".lock", "recipe.yaml", "metrics.csv", "summary.json", "curves.png", "checkpoints/last.ckpt",
        "checkpoints/best.ckpt", "checkpoints/step-6.ckpt", "checkpoints/step-6.ckpt.sha256",
    }  # fmt: skip
    assert load(folder / "recipe.yaml") == recipe
    assert json.loads((folder / "summary.json").read_text()) == summary
    with (folder / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert list(rows[0]) == ["step", "train_loss", "lr", "ms", "valid_loss", "valid_accuracy"]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [row["step"] for row in rows if row["valid_loss"]] == ["4", "6"], "every 4 steps, and the last"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_summary_says_what_was_trained_and_what_came_out(tiny):
    recipe = tiny()
    summary = train.train(recipe)
    built = experiment.build(recipe.sections)
    expected = {"recipe": "tiny", "task": "needle", "variant": "local", "steps": 6, "status": "done", "seed": 0}
    assert {key: summary[key] for key in expected} == expected
    assert summary["precision"] == {"requested": "32-true", "effective": "32-true"}
    assert summary["parameters"] == sum(p.numel() for p in built.model.parameters())
    pattern = built.model.attentions[0].visible(32)
    assert summary["density"] == pytest.approx(pattern.float().mean().item())
    assert set(summary["test"]) == {"loss", "accuracy"}
    assert summary["ms_per_step"] > 0
    assert summary["peak_memory_mib"] > 50


def test_the_test_split_is_for_the_weights_of_the_lowest_validation_loss(tiny, tmp_path):
    recipe = tiny("train.lr=3", "train.valid_every=1", "train.warmup_steps=6", "train.clip=null")
    summary = train.train(recipe)
    losses = columns(summary)["valid_loss"]
    best = losses.index(min(losses)) + 1
    assert best < 6, "the last weights are the best: this shows nothing"
    assert summary["best_step"] == best

    checkpoint = tmp_path / summary["run"] / "checkpoints" / "best.ckpt"
    module = TrainingModule.load_from_checkpoint(checkpoint, weights_only=True).eval()
    for split, loss in (("valid", min(losses)), ("test", summary["test"]["loss"])):
        items = module.experiment.task.split(split)
        batch = torch.utils.data.default_collate([items[i] for i in range(len(items))])
        found = module.experiment.task.loss(module.model(batch["tokens"]), batch)
        assert found.item() == pytest.approx(loss, rel=1e-3), split


def test_checkpoints_hold_nothing_that_needs_trust(tiny, tmp_path):
    recipe = tiny()
    folder = tmp_path / train.train(recipe)["run"]
    for name, step in (("last", 6), ("best", None)):
        loaded = torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)
        assert loaded["hyper_parameters"] == {"recipe": recipe.sections}
        assert step in (None, loaded["global_step"])


def test_the_seed_decides_everything(tiny):
    def losses(seed):
        torch.rand(seed + 1)  # what was drawn before plays no part
        return columns(train.train(tiny(f"train.seed={seed}", "model.dropout=0.1")))["train_loss"]

    assert losses(0) == losses(0) != losses(1)


def test_training_goes_on_over_epochs(tiny):
    summary = train.train(tiny("train.batch_size=32", "train.accumulate=2", "train.max_steps=5"))
    assert summary["steps"] == 5


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precision_trains(tiny, precision):
    exact = train.train(tiny())["test"]["loss"]
    rounded = train.train(tiny(f"train.precision={precision}"))
    assert rounded["precision"] == {"requested": precision, "effective": precision}
    assert 0 < abs(rounded["test"]["loss"] - exact) < 0.1


def test_norms_the_residual_stream_and_the_loss_are_float32_under_bf16_mixed(tiny):
    module = TrainingModule(tiny().sections)
    batch = {name: tensor[None] for name, tensor in module.experiment.task.split("train")[0].items()}
    dtypes = {}
    for name, layer in module.model.named_modules():
        layer.register_forward_hook(lambda layer, given, found, name=name: dtypes.update({name: found.dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        loss = module._loss(module._logits(batch), batch)
    assert loss.dtype == torch.float32
    exact = [name for name in dtypes if "norm" in name or name in ("layers.0", "layers.1")]
    assert len(exact) == 7
    assert {dtypes[name] for name in exact} == {torch.float32}
    assert dtypes["layers.0.attention"] == dtypes["layers.0.widen"] == torch.bfloat16, "this shows nothing"


def test_16_mixed_on_a_cpu_is_bf16_mixed_and_says_so(tiny, capsys):
    summary = train.train(tiny("train.precision=16-mixed", "train.accelerator=cpu"))
    assert summary["precision"] == {"requested": "16-mixed", "effective": "bf16-mixed"}
    assert "16-mixed is computed as bf16-mixed on a CPU" in capsys.readouterr().err


def test_a_training_under_fsdp_leaves_nothing_of_its_processes_behind(tiny):
    before = dict(os.environ)
    for _ in range(2):
        assert train.train(tiny("train.strategy=fsdp", "train.accelerator=cpu"))["strategy"] == "fsdp"
        assert dict(os.environ) == before
        assert torch.get_num_threads() == 1
        assert not torch.distributed.is_initialized()


def test_runs_get_numbers_of_their_own(tmp_path):
    for taken in ("1", "7", "old", "07b"):
        (tmp_path / "mine" / taken).mkdir(parents=True)
    with ThreadPoolExecutor(8) as pool:
        claimed = [folder.path.name for folder in pool.map(lambda _: RunFolder.claim(tmp_path, "mine"), range(16))]
    assert sorted(map(int, claimed)) == list(range(8, 24))


def test_a_place_where_no_folder_can_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"can't make a run folder in .*file"):
        RunFolder.claim(tmp_path / "file", "mine")


# How a run stops


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(tiny, tmp_path, monkeypatch, capsys, bad):
    honest, calls = needle.Needle.loss, []

    def loss(task, logits, batch):
        calls.append(1)
        return honest(task, logits, batch) * (bad if len(calls) == 4 else 1)  # the first call is the rehearsal

    monkeypatch.setattr(needle.Needle, "loss", loss)
    tiny()
    assert cli.run(["train", "tiny.yaml"]) == 1
    out, err = capsys.readouterr()
    assert f"the training loss is {bad} at step 3" in err
    assert "Traceback" not in err
    summary = json.loads((tmp_path / "runs" / "tiny" / "1" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("diverged", 2)
    assert "test" not in summary
    assert "test accuracy" not in out
    assert len(calls) == 4


def test_a_validation_loss_that_is_not_finite_stops_the_run_too(tiny, monkeypatch):
    honest = needle.Needle.loss

    def loss(task, logits, batch):
        return honest(task, logits, batch) * (1 if torch.is_grad_enabled() else math.nan)

    monkeypatch.setattr(needle.Needle, "loss", loss)
    summary = train.train(tiny())
    assert summary["status"] == "diverged"
    assert "valid loss is nan after step 4" in summary["message"]


def test_what_fails_before_the_first_step_leaves_no_folder(tiny, tmp_path, monkeypatch, capsys):
    recipe = tiny("train.batch_size=97")
    with pytest.raises(RecipeError, match=r"takes 97 sequences .* the training split has 96"):
        train.train(recipe)
    monkeypatch.setattr(experiment.Transformer, "forward", lambda *_: torch.zeros(1, 3))
    with pytest.raises(RuntimeError):
        train.train(tiny())
    assert not (tmp_path / "runs").exists()


def test_a_run_that_breaks_says_so_in_its_summary(tiny, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(TrainingModule, "validation_step", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        train.train(tiny())
    summary = json.loads((tmp_path / "runs" / "tiny" / "1" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 4)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_its_status(tiny, tmp_path, sent, status):
    tiny()
    command = [sys.executable, "-m", "attnzoo", "train", "tiny.yaml", "train.max_steps=100000", "train.valid_every=50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "training in runs/tiny/1\n"
        assert process.stderr.readline().startswith("step 1/")
        process.send_signal(sent)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert out == ""
    assert "Traceback" not in err
    assert "interrupted after step" in err
    assert json.loads((tmp_path / "runs" / "tiny" / "1" / "summary.json").read_text())["status"] == "interrupted"


# Devices


def test_as_many_processes_as_torchrun_started_are_asked_for(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"torchrun started 2 processes, but train.devices \(1\) times .* is 1"):
        machine.choose(TrainSettings())
    assert machine.choose(TrainSettings(devices=2, accelerator="cpu")).strategy == "ddp"


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        ({}, 0, ("cpu", 1, "32-true")),
        ({"devices": "auto"}, 0, ("cpu", 1, "32-true")),
        ({"precision": "16-mixed"}, 0, ("cpu", 1, "bf16-mixed")),
        ({"precision": "16-mixed"}, 4, ("cuda", 1, "16-mixed")),
        ({"devices": "auto", "accelerator": "gpu"}, 4, ("cuda", 4, "32-true")),
        ({"devices": 2, "accelerator": "cpu", "precision": "16-mixed"}, 4, ("cpu", 2, "bf16-mixed")),
        ({"devices": 9}, 0, "train.devices is 9, but this machine has 8 CPU cores"),
        ({"devices": 5, "accelerator": "auto"}, 4, "train.devices is 5, but this machine has 4 GPUs"),
        ({"accelerator": "gpu"}, 0, "torch sees no GPU"),
        ({"devices": 3}, 0, "train.batch_size is 16 and can't be dealt out evenly to 3 devices"),
    ],
)
def test_the_machine_has_what_is_asked_for_or_it_is_refused(monkeypatch, settings, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    if isinstance(expected, str):
        with pytest.raises(OptionError, match=expected):
            machine.choose(TrainSettings(**settings))
    else:
        found = machine.choose(TrainSettings(**settings))
        assert (found.accelerator, found.devices, found.precision) == expected


# What is shown


@pytest.mark.parametrize("max_steps", [1, 6, 200, 1000])
@pytest.mark.parametrize("valid_every", [1, 4, 47, 50, 5000, 2**31 - 1])
def test_lines_are_few_and_in_step_with_validation(max_steps, valid_every):
    every = interval(max_steps, valid_every)
    assert max_steps / every <= 20
    validated = min(valid_every, max_steps)  # the last step always is
    assert validated % every == 0 or every % validated == 0


def test_lines_show_step_loss_scores_and_time(capsys):
    show = ProgressLines(4, 2)
    for step in range(1, 5):
        scores = {"valid_loss": 1.25, "valid_accuracy": 0.5} if step == 2 else {}
        show({"step": step, "train_loss": 2.0, "lr": 0.1, "ms": 12.4, **scores})
    assert capsys.readouterr().err.splitlines() == [
        "step 1/4  train loss 2.000  12 ms a step",
        "step 2/4  train loss 2.000  valid loss 1.250  valid accuracy 0.500  12 ms a step",
        "step 3/4  train loss 2.000  12 ms a step",
        "step 4/4  train loss 2.000  12 ms a step",
    ]


@pytest.mark.parametrize("metrics", [{}, {"step": [1.0], "train_loss": [2.0], "valid_loss": [math.nan]}])
def test_curves_are_drawn_of_runs_that_stopped_early(tmp_path, metrics):
    curves.draw(metrics, tmp_path / "curves.png", "mine")
    assert (tmp_path / "curves.png").stat().st_size > 1000
