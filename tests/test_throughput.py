"""What makes a training faster: compiled layers, a fused optimizer, pinned memory, cuDNN's own choice."""

import functools
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from attnzoo.tasks import needle
from attnzoo.training import checkpoints, compiling, data, experiment, trainer
from attnzoo.training.evaluate import evaluate
from attnzoo.training.export import export, load_model
from attnzoo.training.machine import Machine
from attnzoo.training.module import TrainingModule
from attnzoo.training.recipe import load
from attnzoo.training.runs import RunFolder
from attnzoo.training.settings import TrainSettings
from attnzoo.training.train import resume, train
from tests.faults.same import difference, outcome

pytestmark = [  # of torch's compiler, about itself
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

TINY = """
task: {name: needle, length: 32}
attention: {name: local, num_heads: 2, radius: 2, global_tokens: 1, block: 4}
model: {d_model: 16, layers: 2, feed_forward: 32}
train: {max_steps: 6, batch_size: 8, lr: 1e-2, warmup_steps: 2, valid_every: 2, accelerator: cpu}
"""
OWN_PATTERNS = ["attention={name: random_sparse, num_heads: 2, keys: 8}", "model.layers=5"]


@pytest.fixture(autouse=True)
def few_items(monkeypatch):
    monkeypatch.setattr(needle, "SIZES", {"train": 96, "valid": 20, "test": 30})  # their last batches are 4 and 6


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return lambda *overrides: load("tiny.yaml", overrides)


@pytest.fixture
def compiler(monkeypatch):
    """Starts without graphs; with a backend of its name in place of the real one."""

    def use(backend):
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))

    torch._dynamo.reset()
    counters.clear()
    yield use
    torch._dynamo.reset()


def folder(number=1):
    return RunFolder(trainer.Path("runs/tiny") / str(number))


def graphs():
    return counters["stats"]["unique_graphs"]


# Compiled layers


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["model.gradient_checkpointing=true"],
        ["model.gradient_checkpointing=attention"],
        ["attention={name: random_sparse, num_heads: 2, keys: 8, redraw: true}", "model.layers=1"],
        ["train.precision=bf16-mixed"],
        ["train.precision=bf16-true", "train.accumulate=2"],
        OWN_PATTERNS,
    ],
    ids=["plain", "checkpointing", "of the attention", "redraw", "bf16-mixed", "bf16-true", "own patterns"],
)
def test_compiled_layers_train_the_same_with_a_graph_for_each_kind_of_batch(tiny, compiler, given):
    plain = train(tiny(*given))
    compiler("aot_eager")
    compiled = train(tiny(*given, "train.compile=true"))
    rough = {"rel": 0.05} if any("bf16" in word for word in given) else {"rel": 1e-4}
    for name in ("train_loss", "valid_loss"):
        expected = pytest.approx(RunFolder(trainer.Path(plain["run"])).read_metrics()[name], nan_ok=True, **rough)
        assert RunFolder(trainer.Path(compiled["run"])).read_metrics()[name] == expected
    assert graphs() == compiling.KINDS * (5 if given is OWN_PATTERNS else 1)
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_have_the_same_gradients(tiny, compiler, backend, checkpointing):
    def gradients(compiled):
        built = experiment.build(tiny(f"model.gradient_checkpointing={checkpointing}").sections)
        if compiled:
            compiling.compile_layers(built.model.layers)
        batch = torch.utils.data.default_collate([built.task.split("train")[i] for i in range(8)])
        built.task.loss(built.model(batch["tokens"]), batch).backward()
        return {name: parameter.grad for name, parameter in built.model.named_parameters()}

    compiler(backend)
    plain, compiled = gradients(False), gradients(True)
    assert graphs() == 1
    assert plain.keys() == compiled.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_compiled_training_is_evaluated_exported_and_resumed_like_another(tiny, compiler, monkeypatch):
    compiler("aot_eager")
    summary = train(tiny("train.compile=true", "model.dropout=0.1"))
    expected = outcome(folder(1))
    assert not [name for name in expected["checkpoints"][6]["state_dict"] if "_orig_mod" in name]
    torch._dynamo.reset()
    counters.clear()
    assert evaluate(folder(1).path)["test"] == pytest.approx(summary["test"], abs=1e-5)
    export(folder(1).path, trainer.Path("a.safetensors"))
    assert load_model("a.safetensors")
    assert graphs() == 0, "compiled for nothing"

    honest, calls = needle.Needle.loss, []

    def loss(task, logits, batch):
        calls.append(1)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(task, logits, batch)

    with monkeypatch.context() as patch:
        patch.setattr(needle.Needle, "loss", loss)
        with pytest.raises(KeyboardInterrupt):
            train(tiny("train.compile=true", "model.dropout=0.1"))
    torch._dynamo.reset()  # as in a new process
    resume(folder(2).path)
    assert difference(outcome(folder(2)), expected) is None


def test_what_can_not_be_compiled_ends_with_one_message(tiny, compiler, run):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here\nand more")

    tiny()
    compiler(broken)
    status, out, err = run("train", "tiny.yaml", "train.compile=true")
    assert (status, out) == (1, "")
    assert "leave train.compile out (" in err
    assert "no compiler here" in err
    assert "Traceback" not in err
    assert folder().read_summary()["status"] == "failed"


def test_an_error_that_is_not_the_compiler_s_is_left_alone():
    with pytest.raises(ZeroDivisionError), compiling.explained():
        _ = 1 / 0


@pytest.mark.slow
def test_inductor_compiles_and_a_new_process_goes_on_to_the_same_bits(tiny):
    tiny()
    words = ["train.compile=true", "model.dropout=0.1", "train.max_steps=12"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(*more, kill_at=None):
        command = [sys.executable, "-m", "attnzoo", "train", *more]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=alone) as process:
            for line in process.stderr:
                if kill_at and line.startswith(f"step {kill_at}/"):
                    process.kill()
        return process.returncode

    assert start("tiny.yaml", *words) == 0
    assert start("tiny.yaml", *words, kill_at=4) == -signal.SIGKILL
    assert start("--resume", str(folder(2).path)) == 0
    assert difference(outcome(folder(2)), outcome(folder(1))) is None


@pytest.mark.study
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_compile_and_train_what_one_trains(tiny, strategy):
    tiny()
    found = []
    for given in ([], ["train.compile=true", "train.devices=2", f"train.strategy={strategy}"]):
        command = [sys.executable, "-m", "attnzoo", "train", "tiny.yaml", *given, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["test"])
    assert found[1] == pytest.approx(found[0], abs=1e-3)
    losses = [folder(number).read_metrics()["train_loss"] for number in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    weights = checkpoints.load(folder(2).last)["state_dict"]
    assert weights.keys() == checkpoints.load(folder(1).last)["state_dict"].keys()


# The optimizer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_adamw_is_fused(tiny, precision):
    train(tiny(f"train.precision={precision}"))
    [optimizer] = torch.load(folder().last, weights_only=True)["optimizer_states"]
    assert [group["fused"] for group in optimizer["param_groups"]] == [True, True]


def test_adamw_is_not_fused_where_a_scaler_undoes_its_scale_or_torch_has_no_kernel(tiny, monkeypatch):
    made = trainer.pl.Trainer

    def make(*, precision, plugins, **options):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return made(plugins=[*plugins, trainer.pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)], **options)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.pl, "Trainer", make)
        train(tiny("train.precision=16-mixed", "train.max_steps=2"))
    [scaled] = torch.load(folder(1).last, weights_only=True)["optimizer_states"]
    honest = torch.optim.AdamW

    def refusing(*given, fused=None, **options):
        if fused:
            raise RuntimeError("`fused=True` requires all the params to be floating point Tensors of supported devices")
        return honest(*given, **options)

    monkeypatch.setattr(torch.optim, "AdamW", refusing)
    train(tiny("train.max_steps=2"))
    [refused] = torch.load(folder(2).last, weights_only=True)["optimizer_states"]
    assert {group["fused"] for state in (scaled, refused) for group in state["param_groups"]} == {None}


# Loading, and cuDNN


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda", True), ("mps", False)])
def test_batches_are_pinned_for_cuda_alone(tiny, monkeypatch, device, pinned):
    given = []
    monkeypatch.setattr(data, "DataLoader", lambda *_, **options: given.append(options))
    recipe = tiny()
    batches = data.Batches(experiment.build(recipe.sections).task, TrainSettings(**recipe.sections["train"]))
    strategy = SimpleNamespace(root_device=torch.device(device))
    batches.trainer = SimpleNamespace(strategy=strategy, global_rank=0, world_size=1, global_step=0)
    for loader in (batches.train_dataloader, batches.val_dataloader, batches.test_dataloader):
        loader()
    assert [options["pin_memory"] for options in given] == [pinned] * 3


@pytest.mark.parametrize("asked", [True, False])
def test_cudnn_tries_its_algorithms_where_that_is_asked_for(monkeypatch, asked):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not asked)
    with trainer.quiet():
        trainer.make_trainer(TrainSettings(cudnn_benchmark=asked), Machine("cpu", 1, "32-true", "none"))
    assert torch.backends.cudnn.benchmark is asked


# A GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_trains_pinned_batches(tiny, compiler, monkeypatch, precision, compiled):
    pinned, used = [], []
    loaded, honest = TrainingModule.on_before_batch_transfer, TrainingModule.training_step

    def seen(self, batch, index):
        pinned.append(all(tensor.is_pinned() for tensor in batch.values()))
        return loaded(self, batch, index)

    def step(self, batch, index):
        used.append({tensor.device.type for tensor in [*batch.values(), *self.parameters()]})
        return honest(self, batch, index)

    monkeypatch.setattr(TrainingModule, "on_before_batch_transfer", seen)
    monkeypatch.setattr(TrainingModule, "training_step", step)
    given = [f"train.precision={precision}", f"train.compile={compiled}", "train.cudnn_benchmark=true"]
    summary = train(tiny("train.accelerator=gpu", *given))
    assert (summary["status"], summary["precision"]["effective"]) == ("done", precision)
    assert all(pinned)
    assert len(used) == 6
    assert used == [{"cuda"}] * 6
    [optimizer] = torch.load(folder().last, weights_only=True, map_location="cpu")["optimizer_states"]
    assert optimizer["param_groups"][0]["fused"] is (None if precision == "16-mixed" else True)
