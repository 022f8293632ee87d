"""The command line: results on stdout, messages on stderr, an exit status, and nothing heavy imported for nothing."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import attnzoo
from attnzoo import testing
from attnzoo.cli.train import memory, scaled
from attnzoo.tasks import needle
from attnzoo.testing import PROMISES
from attnzoo.training.recipe import load

torch.set_num_threads(1)

TINY = """
task: {name: needle, length: 32}
attention: {name: local, num_heads: 2, radius: 2, global_tokens: 1, block: 4}
model: {d_model: 16, layers: 2, feed_forward: 32}
train: {max_steps: 4, batch_size: 8, valid_every: 2}
"""


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(needle, "SIZES", {"train": 96, "valid": 20, "test": 30})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def refused(outcome, *said):
    status, out, err = outcome
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    for words in said:
        assert words in err
    assert not os.path.exists("runs")


# Imports


def loaded_by(*commands):
    """Which of the slow packages are loaded after running the commands in a fresh process."""
    heavy = {"torch", "numpy", "lightning", "omegaconf", "rich", "matplotlib"}
    program = (
        f"import sys; from attnzoo import cli; print([cli.run(words) for words in {commands!r}], file=sys.stderr); "
        f"print('loaded', *sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == str([0] * len(commands))
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_help_list_and_recipes_load_nothing_slow():
    assert loaded_by(["--help"], ["--version"], ["train", "--help"], ["list"], ["list", "l*", "--json"]) == set()
    assert "torch" not in loaded_by(["recipes"])


def test_no_verb_but_train_loads_lightning():
    commands = (
        ["list", "--supports", "cache"],
        ["show", "gqa"],
        ["validate", "gqa"],
        ["recipes", "copy", "gqa", "g.yaml"],
    )
    dry = ["train", "tiny.yaml", "--dry-run"], ["check", "mqa"]
    loaded = loaded_by(*commands, dry[0])
    assert "torch" in loaded
    assert not loaded & {"lightning", "rich"}


# The zoo


def test_list_names_the_variants(run):
    status, out, err = run("list")
    assert (status, err) == (0, "")
    assert out.split() == attnzoo.list_variants()
    assert run("list", "l*")[1] == "local\n"
    assert run("list", "nothing*")[:2] == (0, "")


def test_list_filters_by_what_is_supported(run):
    status, out, _ = run("list", "--supports", "cross, cache", "--json")
    assert status == 0
    assert json.loads(out) == [{"name": name} for name in attnzoo.list_variants(supports=("cross", "cache"))]
    refused(run("list", "--supports", "cach"), "did you mean 'cache'")


def test_show_tells_options_with_their_meaning_and_draws_the_pattern(run):
    status, out, _ = run("show", "local")
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith("local: ")
    option = next(i for i, line in enumerate(lines) if line.startswith("  radius: int = 128"))
    assert "distance" in lines[option + 1] or "tokens" in lines[option + 1]
    drawn = attnzoo.build("local", 8, 2, **attnzoo.find("local").examples[0]).draw(24)
    assert out.endswith(f"# = visible\n{drawn}\n")
    for fact in ("source: Beltagy", "cost: O(", "supports: causal"):
        assert fact in out


def test_show_says_which_kernel_computes_a_shape(run):
    status, out, _ = run("show", "local:radius=64,causal=true", "--shape", "1,1024,4,8", "--json")
    found = {mode: [choice["kernel"] for choice in choices] for mode, choices in json.loads(out).items()}
    assert (status, found) == (0, {"training": ["blocks"], "eval": ["blocks"], "decoding": ["fused"]})
    assert "written out in the variant" in run("show", "vanilla", "--shape", "1,1000000,4,8")[1]
    assert run("show", "local", "--shape", "1,99999999999,8,64")[0] == 2
    for shape in ("1,2,3", "1,2,3,x", "0,2,3,4"):
        status, out, err = run("show", "vanilla", "--shape", shape)
        assert (status, out) == (2, "")
        assert "as in 1,4096,8,64" in err


@pytest.mark.parametrize("name", attnzoo.list_variants())
def test_show_works_for_every_variant(run, name):
    assert run("show", name)[0] == 0
    status, out, _ = run("show", name, "--json")
    about = json.loads(out)
    assert (status, about["name"]) == (0, name)
    assert [option["name"] for option in about["options"]][:2] == ["d_model", "num_heads"]


def test_an_unknown_variant_gets_the_nearest_name(run):
    for verb in ("show", "check"):
        refused(run(verb, "gpa"), "no attention variant named 'gpa'", "Did you mean 'gqa'?")


# The contract

BROKEN = '''
from attnzoo.attention import Attention, PositionKind
from attnzoo.patterns import Full
from attnzoo.projections import Separate

class Broken(Attention):
    """Lets tokens look at themselves only, and says they see everything."""

    def __init__(self, d_model: int, num_heads: int, *, causal: bool = False, dropout: float = 0.0, bias: bool = True,
                 positions: PositionKind = "none"):
        super().__init__(Separate(d_model, num_heads, bias=bias), Full(), dropout=dropout, positions=positions)

    def attend(self, q, k, v, scope):
        return v

class Needy(Broken):
    """Has an option without a default."""

    def __init__(self, d_model: int, num_heads: int, *, reach: int, causal: bool = False, dropout: float = 0.0,
                 bias: bool = True, positions: PositionKind = "none"):
        super().__init__(d_model, num_heads)
'''


@pytest.fixture
def one_promise(monkeypatch):
    """Cuts the contract down to a few quick checks."""
    monkeypatch.setattr(testing, "PROMISES", PROMISES[:1])
    return PROMISES[0].title


def test_check_shows_each_promise(run, one_promise):
    status, out, _ = run("check", "mqa")
    assert status == 0
    assert "mqa: the contract holds" in out
    assert f"{one_promise}  held" in out
    status, out, _ = run("check", "mqa", "--json")
    outcomes = json.loads(out)
    assert status == 0
    assert {outcome["status"] for outcome in outcomes} == {"held"}
    assert set(outcomes[0]) == {
        "variant", "promise", "check", "setting", "status", "asked", "detail", "smallest",
    }  # fmt: skip
    status, out, _ = run("check", "mqa", "vanilla")
    assert (status, out.count("the contract holds")) == (0, 2)


def test_a_broken_promise_is_status_1_and_advice(run, one_promise, somewhere):
    (somewhere / "broken.py").write_text(BROKEN)
    status, out, err = run("check", "broken.py:Broken")
    assert (status, err) == (1, "")
    assert f"{one_promise}  failed" in out
    told = " ".join(out.split())
    assert (
        "check_true_means_may_look (causal=False, and in 1 more) asked: True in a mask means that a query may" in told
    )
    assert "found: " in told
    assert "try: Broken(d_model=2, num_heads=1, causal=False).eval()(torch.randn(" in told
    assert "pytest --pdb" in out
    status, out, _ = run("check", "broken.py:Broken", "--json")
    assert status == 1
    assert "failed" in {outcome["status"] for outcome in json.loads(out)}


def test_a_file_of_a_package_is_imported_under_its_full_name(run, one_promise, somewhere):
    assert run("check", str(Path(attnzoo.__file__).with_name("variants") / "mqa.py") + ":mqa")[0] == 0
    (somewhere / "pack").mkdir()
    (somewhere / "pack" / "__init__.py").write_text("")
    (somewhere / "pack" / "base.py").write_text("from attnzoo.variants.vanilla import Vanilla\n")
    (somewhere / "pack" / "mine.py").write_text("from .base import Vanilla\n\n\nclass Mine(Vanilla):\n    pass\n")
    assert run("check", "pack/mine.py:Mine")[0] == 0


def test_what_can_not_be_checked_is_refused(run, somewhere):
    (somewhere / "broken.py").write_text(BROKEN)
    (somewhere / "exits.py").write_text("raise SystemExit(3)")
    refused(run("check", "broken.py:Broke"), "broken.py:Broke can't be imported", "AttributeError")
    refused(run("check", "exits.py:X"), "can't be imported: SystemExit")
    refused(run("check", "missing.py:X"), "can't be imported: FileNotFoundError")
    refused(run("check", "no.such.module:X"), "No module named 'no'")
    refused(run("check", "os:path"), "os:path is a module, not a class or a function")
    refused(run("check", "broken.py:Needy"), "'reach' is missing", "examples = ")


# Recipes


def test_recipes_lists_each_with_a_line(run):
    status, out, _ = run("recipes")
    assert status == 0
    assert {line.split()[0] for line in out.splitlines()} >= set(attnzoo.list_variants())
    assert all(len(line.split()) > 4 for line in out.splitlines())
    names = [recipe["name"] for recipe in json.loads(run("recipes", "--json")[1])]
    assert names == [line.split()[0] for line in out.splitlines()]


def test_a_copied_recipe_is_the_same_and_no_file_is_overwritten(run, somewhere):
    assert run("recipes", "copy", "bigbird", "mine.yaml") == (0, "mine.yaml\n", "")
    assert load("mine.yaml") == load("bigbird")
    (somewhere / "mine.yaml").write_text("precious")
    refused(run("recipes", "copy", "gqa", "mine.yaml"), "mine.yaml exists")
    assert (somewhere / "mine.yaml").read_text() == "precious"
    refused(run("recipes", "copy", "gqa", "no/folder.yaml"), "can't write no/folder.yaml")
    refused(run("recipes", "copy", "bigbrid", "other.yaml"), "Did you mean 'bigbird'?")
    assert not (somewhere / "other.yaml").exists()


def test_validate_shows_every_value(run, somewhere):
    status, out, _ = run("validate", "tiny.yaml", "train.seed=3")
    (somewhere / "again.yaml").write_text(out)
    assert status == 0
    assert load("again.yaml") == load("tiny.yaml", ["train.seed=3"])
    assert json.loads(run("validate", "tiny.yaml", "--json")[1]) == load("tiny.yaml").sections
    refused(run("validate", "tiny.yaml", "train.sed=3"), "train.sed", "did you mean 'seed'")


# Training


def test_train_ends_with_a_table_and_progress_goes_to_stderr(run, somewhere):
    status, out, err = run("train", "tiny.yaml")
    assert status == 0
    table = {line[:15].strip(): line[15:] for line in out.splitlines()}
    rows = "test loss,test accuracy,variant,pattern,density,parameters,precision,time,peak memory,run"
    assert ",".join(table) == rows
    assert "% of the pairs visible" in table["density"]
    assert "ms a step, 4 steps" in table["time"]
    assert (somewhere / table["run"] / "summary.json").exists()
    assert err.startswith("training in runs/")
    assert "\nstep 1/4  train loss" in err


def test_train_with_json_writes_the_summary_and_nothing_else(run, somewhere):
    status, out, err = run("train", "tiny.yaml", "--json", "--runs", "elsewhere")
    summary = json.loads(out)
    assert status == 0
    assert summary["run"] == os.path.join("elsewhere", "tiny", "1")
    assert summary == json.loads((somewhere / summary["run"] / "summary.json").read_text())
    assert "step 4/4" in err


def test_a_dry_run_builds_everything_and_writes_nothing(run):
    status, out, err = run("train", "tiny.yaml", "--dry-run", "train.precision=16-mixed")
    assert status == 0
    table = {line[:12].strip(): line[12:] for line in out.splitlines()}
    assert list(table) == ["variant", "pattern", "density", "parameters", "precision", "work", "memory"]
    assert re.fullmatch(r"[\d.]+ MFLOP a step", table["work"])
    sizes = r"about [\d.]+ MiB: [\d.]+ MiB for weights, gradients and optimizer, [\d.]+ [KM]iB for activations"
    assert re.fullmatch(sizes, table["memory"])
    assert "bf16-mixed (instead of 16-mixed)" in out
    assert "nothing was trained or written" in err
    summary = json.loads(run("train", "tiny.yaml", "--dry-run", "--json")[1])
    assert summary["status"] == "dry run"
    assert summary["flops_per_step"] > 0
    assert set(summary["memory_mib"]) == {"weights_gradients_optimizer", "activations"}
    assert not os.path.exists("runs")


def test_costs_are_shown_in_units_that_fit():
    assert [scaled(amount, "FLOP", 1000, " kMG") for amount in (7, 9940, 999_000, 2e9, 3e13)] == [
        "7.0 FLOP", "9.9 kFLOP", "999 kFLOP", "2.0 GFLOP", "30000 GFLOP",
    ]  # fmt: skip
    said = "about 2.0 GiB on each device: 12 MiB for weights, gradients and optimizer, 2.0 GiB for activations"
    assert memory(12, 2036, devices=2) == said


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bigbrid"], ["bigbrid", "Did you mean 'bigbird'?"]),
        (["no/such.yaml"], ["no/such.yaml"]),
        (["."], ["."]),
        (["empty.yaml"], ["empty.yaml"]),
        (["list.yaml"], ["list.yaml"]),
        (["tiny.yaml", "train.max_steps=0"], ["max_steps", "at least 1"]),
        (["tiny.yaml", "train.maxsteps=5"], ["did you mean 'max_steps'"]),
        (["tiny.yaml", "train.lr=fast"], ["train.lr"]),
        (["tiny.yaml", "train.devices=4096"], ["train.devices is 4096, but this machine has"]),
        (["tiny.yaml", "attention.name=locl"], ["Did you mean 'local'?"]),
        (["tiny.yaml", "attention.causal=true"], ["attention.causal", "comes from the task"]),
        (["tiny.yaml", "attention.num_heads=3"], ["num_heads"]),
        (["tiny.yaml", "attention.name=kv_cached"], ["radius"]),
        (["tiny.yaml", "train.batch_size=1000"], ["1000 sequences"]),
        (["tiny.yaml", "train.precision=16-true"], ["train.precision"]),
        (["nothing.yaml"], ["task.name: is missing", "attention.name: is missing"]),
        (["tiny.yaml", "train.num_nodes=2"], ["train.num_nodes is 2", "torchrun or SLURM"]),
        (["tiny.yaml", "train.seed=9223372036854775"], ["train.seed: must be at most"]),
        (["tiny.yaml", "train.lr=1e38"], ["train.lr: must be at most 1e+30"]),
        (["kv_cached", "task.path=empty.yaml"], ["override 'task.path=empty.yaml': task.path", "too short"]),
        (["random_sparse", "attention.ratio=2"], ["attention.ratio", "(0, 1]"]),
    ],
)
def test_wrong_input_is_one_message_status_2_and_no_run(run, somewhere, arguments, said, dry):
    (somewhere / "empty.yaml").write_text("")
    (somewhere / "nothing.yaml").write_text("{}")
    (somewhere / "list.yaml").write_text("- 1\n- 2\n")
    refused(run("train", *arguments, *dry), *said)


# Any verb


def test_wrong_usage_is_status_2(run):
    refused(run("trian", "tiny.yaml"), "No such command 'trian'")
    refused(run("train", "tiny.yaml", "--dryrun"), "No such option")
    assert run("train")[0] == 2
    assert run("train", "--help")[0] == 0


def test_debug_shows_the_traceback_wherever_it_stands(run):
    for arguments in (["--debug", "show", "gpa"], ["show", "gpa", "--debug"]):
        status, _, err = run(*arguments)
        assert status == 2
        assert err.startswith("Traceback")
        assert "no attention variant named 'gpa'" in err.splitlines()[-1]


def test_an_error_of_ours_is_status_1_and_no_traceback(run, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(attnzoo.registry, "describe", broken)
    assert run("show", "gqa") == (1, "", "attnzoo: RuntimeError: out of luck (--debug shows where)\n")


def test_ctrl_c_is_status_130(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(attnzoo.registry, "describe", interrupted)
    assert run("show", "gqa") == (130, "", "attnzoo: interrupted\n")


def test_a_warning_is_one_line(run, monkeypatch):
    def warned(*_):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("variant 'x' is left out", stacklevel=1)
        return ["y"]

    monkeypatch.setattr(attnzoo.registry, "list_variants", warned)
    assert run("list") == (0, "y\n", "warning: variant 'x' is left out\n")


def test_a_reader_that_closes_early_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "attnzoo", "list"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "attnzoo", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{attnzoo.__version__}\n")
