"""Kinds of faults that others reported, where no check of the contract speaks of them; docs/trials.md has the table."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

import attnzoo
from attnzoo.tasks.task import IGNORED
from attnzoo.testing import CHECKS
from attnzoo.training import experiment, recipe, sections, train
from attnzoo.training.module import TrainingModule, parameter_groups
from attnzoo.training.recipe import load
from attnzoo.training.runs import RunFolder
from tests.test_recipe import Everything
from tests.test_registry import install  # noqa: F401 (a fixture)
from tests.test_training import few_items, tiny  # noqa: F401 (fixtures)

ROOT = Path(__file__).parents[1]
VARIANTS = attnzoo.list_variants()
FIRST = {name: getattr(attnzoo.find(name), "examples", ({},))[0] for name in VARIANTS}
EVERYTHING = {  # options with which each sees all there is, but what comes later
    "bigbird": {"block": 2, "global_blocks": 9},
    "gqa": {"num_kv_heads": 6},
    "local": {"radius": 16},
    "random_sparse": {"ratio": 1.0},
    "sparse": {"pattern": "Full()"},
}


def build(name, d_model=24, num_heads=6, *, causal=True, **options):
    torch.manual_seed(0)
    return attnzoo.build(name, d_model, num_heads, causal=causal, **options).double().eval()


def tokens(batch, length, d_model=24, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, d_model, generator=generator, dtype=torch.float64)


# Windows and scales


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("radius", [0, 1, 2, 4, 8])
def test_a_window_is_radius_tokens_to_each_side_on_every_path(radius, causal):
    attn, x = build("local", 8, 2, radius=radius, causal=causal, block=4), tokens(1, 41, 8)
    key, padded = torch.arange(41), torch.ones(1, 41, dtype=torch.bool)
    padded[:, 20] = False
    near = (key[:, None] - key).abs() <= radius
    wanted = near.tril() if causal else near

    def in_pieces(x, key_mask=None):
        cache = attn.new_cache(1, 41)
        return torch.cat([attn(piece, cache=cache) for piece in x.split((17, 1, 23), dim=1)], dim=1)

    paths = {"plain": attn, "checkpointed": lambda x, **m: checkpoint(attn, x, use_reentrant=False, **m)}
    for path, call in paths.items():
        assert torch.equal(felt(call, x), wanted), path
        seen = felt(lambda x, call=call: call(x, key_mask=padded), x)
        assert torch.equal(seen, wanted & padded), f"{path}, padded"
    if causal:
        torch.testing.assert_close(in_pieces(x), attn(x))
        earlier = x.clone()
        for token in (0, 16, 17, 18):
            earlier[:, token] += 1
            moved = (in_pieces(earlier) != in_pieces(x)).any(-1)[0]
            assert torch.equal(moved, wanted[:, token]), f"in pieces, token {token}"
            earlier[:, token] = x[:, token]


def felt(call, x):
    """Which output depends on which token, [q, k]."""
    x = x.clone().requires_grad_()
    y = call(x)
    rows = [torch.autograd.grad(y[0, i].square().sum(), x, retain_graph=True)[0][0].ne(0).any(-1) for i in range(41)]
    return torch.stack(rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_one_set_of_weights_gives_the_same_wherever_everything_is_seen(name):
    options = {} if name == "mqa" else EVERYTHING.get(name, {})
    attn, full = build(name, **options), build("gqa", num_kv_heads=1 if name == "mqa" else 6)
    attn.load_state_dict(full.state_dict())
    x = tokens(2, 17)
    torch.testing.assert_close(attn(x), full(x), rtol=0, atol=1e-10)


# Random patterns


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "options"), [("random_sparse", {"ratio": 0.1}), ("bigbird", {"block": 2, "random_blocks": 1})]
)
def test_a_drawn_pattern_keeps_the_diagonal_and_heeds_causality_and_padding(name, options, causal):
    for seed in range(20):
        attn = build(name, causal=causal, seed=seed, **options)
        key_mask = torch.rand(2, 32, generator=torch.Generator().manual_seed(seed)) > 0.3
        x, seen = tokens(2, 32), attn.visible(32)
        assert seen.diagonal(dim1=1, dim2=2).all()
        assert not (causal and seen.triu(1).any())
        weights = attn.weights(x, key_mask=key_mask)
        assert not weights[~key_mask[:, None, None].expand_as(weights)].any()
        assert attn(x, key_mask=key_mask).isfinite().all()


def test_a_drawn_pattern_is_the_same_in_every_process():
    program = (
        "import hashlib, os, torch, attnzoo; torch.manual_seed(int(os.environ['RANK']))\n"
        "drawn = [('bigbird', {'block': 2, 'seed': 5}), ('random_sparse', {'keys': 4, 'seed': 5})]\n"
        "all_causal = [(n, {**attnzoo.find(n).examples[0], 'causal': True}) for n in attnzoo.list_variants()]\n"
        "for name, options in drawn + all_causal:\n"
        "    shown = attnzoo.build(name, 24, 6, **options).visible(64)\n"
        "    print(name, hashlib.sha256(bytes(shown.flatten().tolist())).hexdigest())\n"
    )
    told = set()
    for rank in "01":
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "PYTHONHASHSEED": rank}
        command, environment = [sys.executable, "-c", program], {**os.environ, **place}
        told.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(told) == 1
    assert "bigbird" in told.pop()


@pytest.mark.parametrize("name", VARIANTS)
def test_building_draws_weights_and_nothing_else(name):
    others = np.random.get_state()[1].tolist(), random.getstate()
    torch.manual_seed(3)
    attn = attnzoo.build(name, 24, 6, causal=True, **FIRST[name])
    after = torch.get_rng_state()
    torch.manual_seed(3)
    for layer in attn.children():
        nn.Linear(layer.in_features, layer.out_features)
    assert torch.equal(torch.get_rng_state(), after)
    assert others == (np.random.get_state()[1].tolist(), random.getstate())


# Sizes and layers


@pytest.mark.parametrize("name", VARIANTS)
def test_how_much_is_computed_at_once_changes_rounding_only(name):
    for dtype, allowed in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        attn, x = build(name, **FIRST[name]).to(dtype), tokens(3, 40).to(dtype)
        y, cache = attn(x), attn.new_cache(3, 40)
        steps = torch.cat([attn(token, cache=cache) for token in x.split(1, dim=1)], dim=1)
        alone = torch.cat([attn(sequence) for sequence in x.split(1)])
        for other in (steps, alone):
            torch.testing.assert_close(other, y, rtol=0, atol=allowed)


@pytest.mark.parametrize("name", VARIANTS)
def test_layers_decode_with_a_cache_each_also_where_they_share_a_module(name):
    one, other = build(name, **FIRST[name]), build(name, **FIRST[name])
    layers = [one, other, one, one]
    talks = [tokens(2, 10, seed=seed) for seed in (1, 2)]
    caches = [[layer.new_cache(2, 10) for layer in layers] for _ in talks]

    def read(x, caches=(None,) * 4):
        for layer, cache in zip(layers, caches, strict=True):
            x = x + layer(x, cache=cache)
        return x

    found = [[], []]
    for step in range(10):
        for x, own, outputs in zip(talks, caches, found, strict=True):
            outputs.append(read(x[:, step : step + 1], own))
    for x, outputs in zip(talks, found, strict=True):
        torch.testing.assert_close(torch.cat(outputs, dim=1), read(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_samples_mapped_over_drop_weights_of_their_own(name):
    attn = build(name, dropout=0.5, **FIRST[name]).train()
    if attn.redraws:
        pytest.skip("its draws are those of one call")
    parameters = {key: value.detach() for key, value in attn.named_parameters()}

    def loss(parameters, x):
        return functional_call(attn, parameters, (x[None],)).square().sum()

    twice = tokens(1, 9).expand(2, -1, -1)
    found = vmap(grad(loss), in_dims=(None, 0), randomness="different")(parameters, twice)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert not torch.equal(*found["out_proj.weight"])


# Training


def test_a_model_evaluated_in_inference_mode_trains_afterwards(tiny):  # noqa: F811
    module = TrainingModule(tiny().sections)
    batch = default_collate([module.experiment.task.split("train")[item] for item in range(4)])
    with torch.inference_mode():
        before = module._loss(module._logits(batch), batch)
    loss = module._loss(module._logits(batch), batch)
    loss.backward()
    assert loss.item() == pytest.approx(before.item())
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_batch_without_targets_moves_no_weight_and_training_goes_on(tiny):  # noqa: F811
    module = TrainingModule(tiny().sections)
    full = default_collate([module.experiment.task.split("train")[item] for item in range(4)])
    optimizer = torch.optim.AdamW(parameter_groups(module.model, 0.0), lr=1e-2)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    for target, moves in ((torch.full_like(full["target"], IGNORED), False), (full["target"], True)):
        optimizer.zero_grad()
        loss = module._loss(module._logits(full), {**full, "target": target})
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
        assert all(parameter.isfinite().all() for parameter in module.parameters())
        changed = any(not torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())
        assert changed is moves


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
def test_checkpointing_on_two_processes_changes_nothing(tiny):  # noqa: F811
    tiny()
    losses = []
    for checkpointing in ("false", "true"):
        given = ["train.devices=2", "train.strategy=ddp", "train.accelerator=cpu", "train.max_steps=3"]
        given += [f"model.gradient_checkpointing={checkpointing}", "attention.dropout=0.1"]
        command = [sys.executable, "-m", "attnzoo", "train", "tiny.yaml", *given]
        subprocess.run(command, capture_output=True, check=True, timeout=240)
        losses.append(RunFolder(Path("runs", "tiny", str(len(losses) + 1))).read_metrics()["train_loss"])
    assert losses[0] == losses[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_are_clipped_in_16_bits_on_a_gpu(tiny):  # noqa: F811
    summary = train.train(tiny("train.precision=16-mixed", "train.accelerator=gpu", "train.clip=0.5"))
    assert summary["precision"]["effective"] == "16-mixed"
    assert summary["status"] == "done"


# Recipes


def test_a_runs_recipe_needs_no_other_file_and_gives_the_same_model(tmp_path, monkeypatch, few_items):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    Path("parts").mkdir()
    Path("parts/part.yaml").write_text("model: {d_model: 16, layers: 1, feed_forward: '${.d_model}'}\n")
    Path("parts/mine.yaml").write_text(
        "parts: [part.yaml]\ntask: {name: needle, length: 32}\n"
        "attention: {name: local, num_heads: 2, radius: '${model.layers}'}\n"
        "train: {max_steps: 1, batch_size: 8, valid_every: 1}\n"
    )
    mine = load("parts/mine.yaml")
    run = Path(train.train(mine)["run"])
    shutil.copy(run / "recipe.yaml", "elsewhere.yaml")
    shutil.rmtree("parts")
    text, again = Path("elsewhere.yaml").read_text(), load("elsewhere.yaml")
    assert "$" not in text
    assert "parts" not in again.sections
    assert (again.sections["model"]["feed_forward"], again.sections["attention"]["radius"]) == (16, 1)
    fresh, same = (experiment.build(one.sections).model.state_dict() for one in (mine, again))
    torch.testing.assert_close(fresh, same, rtol=0, atol=0)
    loaded = TrainingModule.load_from_checkpoint(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert loaded.hparams["recipe"] == again.sections


def test_a_list_is_replaced_whole(monkeypatch, tmp_path):
    """A later file's list, and the command line's, stand alone: nothing is added to the earlier one."""
    real = sections.factory
    for module in (sections, recipe):
        monkeypatch.setattr(
            module, "factory", lambda section, name="": Everything if section == "train" else real(section, name)
        )
    monkeypatch.chdir(tmp_path)
    Path("part.yaml").write_text("task: {name: needle, length: 32}\ntrain: {places: [1, 2], word: kept}\n")
    Path("mine.yaml").write_text("parts: [part.yaml]\nattention: {name: mqa, num_heads: 2}\ntrain: {places: [3]}\n")
    for overrides, wanted in ((), [3]), (("train.places=[4, 5]",), [4, 5]), (("train.places=[]",), []):
        found = load("mine.yaml", overrides).sections["train"]
        assert (found["places"], found["word"]) == (wanted, "kept")


# Registry


def test_a_module_of_variants_can_be_loaded_again():
    program = (
        "import importlib, attnzoo\n"
        "from attnzoo.variants import gqa, local\n"
        "for module in (gqa, local) * 2:\n"
        "    importlib.reload(module)\n"
        "assert attnzoo.find('gqa') is gqa.GQA and attnzoo.find('local') is local.local\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_several_broken_plugins_leave_the_good_ones_and_the_command_line_alone(install, tmp_path):  # noqa: F811
    good = "from attnzoo.variants.vanilla import Vanilla\n\n\nclass Good(Vanilla):\n    '''Good.'''\n"
    install("good", {"good": "plugin_good:Good"}, plugin_good=good)
    wrong = ("import nothing_of_this_name", "raise SystemExit(3)", "raise KeyError('x')")
    for number, source in enumerate(wrong):
        install(f"bad{number}", {f"bad{number}": f"plugin_{number}:Bad"}, **{f"plugin_{number}": source})
    with pytest.warns(UserWarning, match="is left out") as caught:
        names = attnzoo.list_variants(supports=("causal",))
    assert {*attnzoo.list_variants()} - {*names} == {"bad0", "bad1", "bad2"}
    assert [sum(f"package bad{number}" in str(one.message) for one in caught) for number in range(3)] == [1, 1, 1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    for words in (["--help"], ["list"], ["show", "good"]):
        command = [sys.executable, "-m", "attnzoo", *words]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


# The table


def known():
    """Every check of the contract, and every test by file and class."""
    names = set(CHECKS)
    for path in (ROOT / "tests").rglob("test_*.py"):
        owner = ""
        for line in path.read_text().splitlines():
            if found := re.match(r"(class|def|    def) (\w+)", line):
                kind, name = found.groups()
                owner = name if kind == "class" else "" if kind == "def" else owner
                within = f"{owner}::" if kind == "    def" else ""
                names.add(f"{path.relative_to(ROOT).as_posix()}::{within}{name}")
    return names


def test_every_check_and_test_in_the_table_of_trials_exists():
    there, rows = known(), 0
    for line in (ROOT / "docs" / "trials.md").read_text().splitlines():
        if not line.startswith("| ") or line.startswith("| kind"):
            continue
        rows += 1
        _, keepers, reports = line.strip("| ").split(" | ")
        named = re.findall(r"`([^`]+)`", keepers)
        assert named or "not yet" in keepers, f"nothing keeps this: {line}"
        assert not {*named} - there, f"there is no {sorted({*named} - there)}"
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in reports.split(", ")), reports
    assert rows > 50
