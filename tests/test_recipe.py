"""Recipes: what is read, what is refused, and where the message points."""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal

import pytest

import attnzoo
from attnzoo import registry, tasks
from attnzoo.errors import RecipeError
from attnzoo.training import recipe, sections
from attnzoo.training.marked_yaml import dump, read

MINIMAL = "task: {name: needle, length: 64}\nattention: {name: gqa, num_heads: 4, num_kv_heads: 2}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test works in a folder of its own, so that messages show short paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text, file="x.yaml"):
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return file


def load(text, *overrides):
    return recipe.load(write(text), overrides).sections


def problems(text, *overrides):
    """The lines of the error that a recipe ends in."""
    with pytest.raises(RecipeError) as caught:
        load(text, *overrides)
    return str(caught.value).splitlines()


def problem(text, *overrides):
    (line,) = problems(text, *overrides)
    return line


class Everything:
    """Takes a value of every type that a section may hold."""

    def __init__(
        self,
        *,
        seed: int = 0,
        word: str = "w",
        maybe: str | None = None,
        number: float = 0.5,
        limit: float | None = None,
        flag: bool = False,
        again: bool | Literal["some"] = False,
        kind: Literal["a", "no", "32", "16-mixed"] = "a",
        level: Literal[1, 2] = 1,
        devices: int | Literal["auto"] = "auto",
        either: int | str = 3,
        places: list[int] = [],  # noqa: B006
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        pass


@pytest.fixture
def everything(monkeypatch):
    """Makes `train` a section with every type; gives what it holds for some lines of YAML."""
    real = sections.factory
    for module in (sections, recipe):
        monkeypatch.setattr(
            module, "factory", lambda section, name="": Everything if section == "train" else real(section, name)
        )

    def values(lines):
        return load(MINIMAL + f"train:\n{textwrap.indent(lines, '  ')}\n")["train"]

    return values


class TestShipped:
    def test_every_variant_has_one(self):
        shipped = recipe.shipped()
        assert list(shipped) == sorted(shipped)
        assert set(registry.CATALOGUE) <= set(shipped)
        assert "local_without_global" in shipped

    @pytest.mark.parametrize("name", recipe.shipped())
    def test_loads_and_repeats_itself(self, name):
        loaded = recipe.load(name)
        assert loaded.name == name
        assert list(loaded.sections) == ["task", "attention", "model", "train"]
        assert loaded.path.read_text().splitlines()[1] == f"# attnzoo train recipes/{name}.yaml"
        again = recipe.load(write(loaded.to_yaml(), "elsewhere/again.yaml"))
        assert again == loaded
        copied = recipe.merged_text(name, "mine.yaml")
        assert "\n# attnzoo train mine.yaml\n" in copied
        assert recipe.load(write(copied, "mine.yaml")) == loaded

    def test_all_but_kv_cached_differ_in_the_attention_alone(self):
        first, *others = [recipe.load(name).sections for name in recipe.shipped() if name != "kv_cached"]
        for other in others:
            assert {**other, "attention": None} == {**first, "attention": None}

    def test_a_copy_lists_what_else_may_be_set(self):
        copied = recipe.merged_text("bigbird")
        assert "  block: 16  # tokens a block.\n" in copied
        assert re.search(r"^  # seed: 0  # of the weights, ", copied, re.MULTILINE)
        assert "parts" not in copied

    def test_a_copy_takes_what_its_comments_offer(self):
        opened = re.sub("^  # ", "  ", recipe.merged_text("bigbird"), flags=re.MULTILINE)
        assert recipe.load(write(opened)) == recipe.load("bigbird")

    def test_name_that_is_none(self):
        with pytest.raises(RecipeError, match=r"no shipped recipe 'bigbrd'\. Did you mean 'bigbird'\?"):
            recipe.load("bigbrd")
        with pytest.raises(RecipeError, match=r"Did you mean 'bigbird'\?"):
            recipe.merged_text("bigbrd")
        with pytest.raises(
            RecipeError, match=r"no file recipes/bigbird.yaml, but a shipped recipe is named 'bigbird'$"
        ):
            recipe.load("recipes/bigbird.yaml")

    def test_a_file_wins_over_a_name_and_a_folder_does_not(self):
        Path("gqa").mkdir()
        assert recipe.load("gqa").path == recipe.shipped()["gqa"]
        write(MINIMAL, "local")
        assert recipe.load("local").sections["attention"]["name"] == "gqa"


class TestFiles:
    def test_missing(self):
        write(MINIMAL, "recipes/mine.yaml")
        with pytest.raises(
            RecipeError, match=r"^recipes/mien.yaml: there is no such file \(did you mean recipes/mine.yaml"
        ):
            recipe.load("recipes/mien.yaml")

    def test_directory(self):
        Path("some").mkdir()
        with pytest.raises(RecipeError, match=r"^some: is a directory"):
            recipe.load("some")

    def test_not_text(self):
        Path("x.yaml").write_bytes(b"task: {name: \xff}")
        with pytest.raises(RecipeError, match=r"^x.yaml: is not text in UTF-8: byte 13"):
            recipe.load("x.yaml")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_unreadable(self):
        Path(write(MINIMAL)).chmod(0)
        with pytest.raises(RecipeError, match=r"^x.yaml: can't be read: Permission denied"):
            recipe.load("x.yaml")

    def test_byte_order_mark(self):
        Path("x.yaml").write_text(MINIMAL, encoding="utf-8-sig")
        assert recipe.load("x.yaml").sections["task"]["name"] == "needle"

    @pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n"])
    def test_empty(self, text):
        assert problem(text) == "x.yaml:1: a recipe holds sections, as in task: {name: needle}, and this is empty"

    @pytest.mark.parametrize(("text", "found"), [("hello\n", "'hello'"), ("- a\n- b\n", "['a', 'b']"), ("3", "3")])
    def test_not_a_mapping(self, text, found):
        assert problem(text) == f"x.yaml:1: a recipe holds sections, as in task: {{name: needle}}, not {found}"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("train: {lr: 1", "x.yaml:4: not valid YAML: while parsing a flow mapping"),
            ("train:\n\tlr: 1", "x.yaml:4: not valid YAML: .*tabs"),
            ("train: lr: 1", "x.yaml:3: not valid YAML: mapping values are not allowed here"),
            ("train: {lr: *rate}", "x.yaml:3: not valid YAML: '\\*rate' can't stand here"),
            ("train: {lr: !!python/name:os.system }", "x.yaml:3: not valid YAML: .*os.system' can't stand here"),
            ("train: {lr: !!float 1}", "x.yaml:3: not valid YAML: .*float' can't stand here"),
            ("train: {lr: \a}", "x.yaml:3: not valid YAML: the character"),
            ("--- \ntrain: {}", "x.yaml:3: not valid YAML: expected a single document"),
            ("train: {lr: " + "[" * 3000, "x.yaml:1: not valid YAML: nested too deeply"),
        ],
    )
    def test_syntax(self, line, message):
        assert re.match(message, problem(f"{MINIMAL}{line}\n"))

    def test_key_given_twice_names_both_lines(self):
        text = """\
            task: {name: needle, length: 64}
            attention: {name: mqa, num_heads: 4}
            model:
              d_model: 32
              layers: 1
              d_model: 64
            task: {name: needle}
            """
        assert problems(text) == [
            "x.yaml:6: model.d_model: given twice, first in line 4",
            "x.yaml:7: task: given twice, first in line 1",
        ]

    def test_key_that_is_no_word(self):
        assert problem(MINIMAL + "train:\n  [a, b]: 1\n") == "x.yaml:4: train: a key must be a word"

    def test_section_that_is_no_mapping(self):
        assert problem(MINIMAL + "train: 5\n").startswith("x.yaml:3: train: wants keys and values")

    def test_section_left_empty(self):
        assert load(MINIMAL + "train:\nmodel: {}\n") == load(MINIMAL)

    def test_unknown_section(self):
        assert problem(MINIMAL + "trian: {lr: 1}\n") == "x.yaml:3: unknown section 'trian' (did you mean 'train'?)"
        assert "there are task, attention, model, train" in problem(MINIMAL + "sweep: {train.lr: [1, 2]}\n")

    def test_many_digits(self):
        found = problem(MINIMAL + f"train: {{seed: {'9' * 5000}}}\n")
        assert found.startswith("x.yaml:3: train.seed: wants int, not '999")
        assert len(found) < 200


class TestParts:
    def test_later_wins_then_the_file_itself(self):
        write("model: {d_model: 32, layers: 1}\ntrain: {lr: 0.1, max_steps: 1}\n", "parts/one.yaml")
        write("train: {lr: 0.2, batch_size: 2}\n", "parts/two.yaml")
        loaded = load(MINIMAL + "parts: [parts/one.yaml, parts/two.yaml]\ntrain: {batch_size: 3}\n")
        assert (loaded["model"]["d_model"], loaded["model"]["layers"]) == (32, 1)
        assert [loaded["train"][key] for key in ("lr", "max_steps", "batch_size")] == [0.2, 1, 3]

    def test_relative_to_the_file_that_names_them(self):
        write("parts: [../b/base.yaml]\n" + MINIMAL, "a/deep/x.yaml")
        write("parts: [more.yaml]\n", "a/b/base.yaml")
        write("train: {max_steps: 7}\n", "a/b/more.yaml")
        assert recipe.load("a/deep/x.yaml").sections["train"]["max_steps"] == 7

    def test_shared_by_two(self):
        write("parts: [base.yaml]\ntrain: {lr: 0.2}\n", "one.yaml")
        write("parts: [base.yaml]\n", "two.yaml")
        write("train: {lr: 0.1}\n", "base.yaml")
        assert load(MINIMAL + "parts: [one.yaml, two.yaml]\n")["train"]["lr"] == 0.1

    def test_errors_point_at_the_file_that_wins(self):
        write("train:\n  lr: abc\n  max_steps: x\n", "one.yaml")
        found = problems(MINIMAL + "parts: [one.yaml]\ntrain: {lr: def}\n")
        assert found == [
            "one.yaml:3: train.max_steps: wants int, not 'x'",
            "x.yaml:4: train.lr: wants float, not 'def'",
        ]

    def test_missing(self):
        write("train: {}\n", "configs/quick.yaml")
        assert problem(MINIMAL + "parts:\n  - configs/quick.yaml\n  - configs/quik.yaml\n") == (
            "x.yaml:5: parts: configs/quik.yaml: there is no such file (did you mean configs/quick.yaml?)"
        )

    def test_missing_part_hides_what_it_may_hold(self):
        assert problem("parts: [gone.yaml]\ntask: {name: needle}\n").startswith(
            "x.yaml:1: parts: gone.yaml: there is no such file"
        )

    def test_part_of_itself(self):
        write("parts: [x.yaml]\n", "y.yaml")
        assert problem(MINIMAL + "parts: [y.yaml]\n") == "y.yaml:1: parts: x.yaml is a part of itself"

    @pytest.mark.parametrize("parts", ["one.yaml", "[1]", "{a: b}", "['']"])
    def test_no_list_of_files(self, parts):
        assert problem(f"{MINIMAL}parts: {parts}\n").startswith("x.yaml:3: parts: wants a list of files")

    def test_many_shared_parts_are_read_once_each(self, monkeypatch):
        for i in range(40):
            write(f"parts: [{i + 1}.yaml, {i + 1}.yaml]\n", f"{i}.yaml")
        write("train: {lr: 0.1}\n", "40.yaml")
        assert load(MINIMAL + "parts: [0.yaml]\n")["train"]["lr"] == 0.1


class TestValues:
    def test_defaults_come_from_the_signatures(self):
        loaded = load(MINIMAL)
        assert loaded["task"] == {"name": "needle", "length": 64}
        assert loaded["attention"] == {"name": "gqa", "num_heads": 4, "num_kv_heads": 2, "dropout": 0.0, "bias": True}
        assert loaded["model"]["positions"] == "learned"
        assert loaded["train"]["seed"] == 0

    @pytest.mark.parametrize(
        ("line", "value"),
        [
            *(
                (f"word: {word}", word)
                for word in ("no", "yes", "on", "Off", "010", "1:30", "1e-3", "2024-01-01", "true", "12")
            ),
            ("maybe: null", None),
            ("maybe: ~", None),
            ("maybe: 'null'", "null"),
            ("maybe: no", "no"),
            *((f"number: {text}", 1e-3) for text in ("1e-3", "1E-3", "0.001", "'1e-3'", ".001", "1.0e-3", "+1e-3")),
            ("number: 2", 2.0),
            ("limit: 2", 2.0),
            ("limit: null", None),
            ("seed: '16'", 16),
            ("seed: -3", -3),
            ("flag: yes", True),
            ("flag: off", False),
            ("flag: True", True),
            ("again: some", "some"),
            ("again: 'some'", "some"),
            ("again: true", True),
            ("again: off", False),
            ("kind: no", "no"),
            ("kind: 16-mixed", "16-mixed"),
            ("kind: 32", "32"),
            ("level: 2", 2),
            ("devices: 2", 2),
            ("devices: auto", "auto"),
            ("either: 010", "010"),
            ("either: 10", 10),
            ("places: [1, 2]", [1, 2]),
            ("places: []", []),
            ("betas: [1, 0.5]", (1.0, 0.5)),
            ("number: ${train.seed}", 0.0),
            ("number: ${.seed}", 0.0),
            ("word: runs/${task.name}-${train.seed}", "runs/needle-0"),
            ("places: [1, '${model.layers}']", [1, 2]),
        ],
    )
    def test_read(self, everything, line, value):
        key = line.partition(":")[0]
        found = everything(line)[key]
        assert (found, type(found)) == (value, type(value))

    @pytest.mark.parametrize(
        "line",
        [
            *(
                f"seed: {text}"
                for text in ("true", "1.0", "1e3", "abc", "010", "'010'", "1:30", "null", "[1]", "{a: 1}", "''")
            ),
            *(f"number: {text}" for text in ("true", "abc", "null", "1:30", "010", "[0.5]", "1" + "0" * 400)),
            *(f"flag: {text}" for text in ("1", "0", "2", "'1'", "1.0", "maybe", "null")),
            *(f"again: {text}" for text in ("1", "0", "1.0", "sme", "null", "[some]")),
            *(f"word: {text}" for text in ("null", "[a]", "{a: b}")),
            *(f"kind: {text}" for text in ("b", "null", "16", "true")),
            *(f"level: {text}" for text in ("3", "true", "1.0")),
            *(f"devices: {text}" for text in ("true", "1.5", "many", "null")),
            *(f"places: {text}" for text in ("1", "[a]", "[1.5]", "[true]", "[[1]]", "null", "{a: 1}")),
            *(f"betas: {text}" for text in ("[1]", "[1, 2, 3]", "[a, b]", "0.9")),
            "seed: ${train.kind}",
            "seed: ${train.flag}",
            "word: ${train.maybe}",
        ],
    )
    def test_refused(self, everything, line):
        key = line.partition(":")[0]
        with pytest.raises(RecipeError, match=rf"^x.yaml:4: train.{key}: wants .*, not ") as caught:
            everything(line)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600

    @pytest.mark.parametrize(
        "line", [f"number: {text}" for text in ("nan", ".nan", "inf", "-inf", "1e999", "'Infinity'")]
    )
    def test_must_be_finite(self, everything, line):
        with pytest.raises(RecipeError, match=r"^x.yaml:4: train.number: (must be a finite number|wants float), not "):
            everything(line)

    def test_near_word(self, everything):
        with pytest.raises(
            RecipeError, match=r"wants 'a' \| 'no' \| '32' \| '16-mixed', not '16-mixd' \(did you mean '16-mixed'\?\)"
        ):
            everything("kind: 16-mixd")
        with pytest.raises(RecipeError, match=r"wants bool \| 'some', not 'sme' \(did you mean 'some'\?\)$"):
            everything("again: sme")

    @pytest.mark.parametrize(
        ("given", "hint"),
        [
            ("precision=bf16", "'bf16-mixed'"),
            ("precision=16-true", "'16-mixed'"),
            ("precision=fp32", "'32-true'"),
            ("precision=bf16-mixd", "'bf16-mixed'"),
            ("loggers=wandb", "'[wandb]'"),
        ],
    )
    def test_other_words_for_what_is_meant(self, given, hint):
        with pytest.raises(RecipeError, match=rf"did you mean {re.escape(hint)}\?"):
            recipe.load("bigbird", [f"train.{given}"])

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("${train.sed}", r"names no value \(did you mean 'train.seed'\?\)"),
            ("${d_model}", r"names no value \(did you mean 'model.d_model'\?\)"),
            ("${attention.d_model}", "names no value"),
            ("${train.seed}", "has no value"),
            ("${oc.env:HOME}", "is not understood"),
            ("${oc.eval:1+1}", "is not understood"),
            ("${model.d_model", "is not understood"),
            ("'\\${model.d_model}'", "is not understood"),
            ("${}", "is not understood"),
            ("???", "has no value"),
        ],
    )
    def test_references_that_lead_nowhere(self, everything, value, message):
        with pytest.raises(RecipeError, match=rf"^x.yaml:4: train.seed: .*{message}"):
            everything(f"seed: {value}")

    def test_references_between_sections(self):
        loaded = load(
            MINIMAL + "model: {d_model: 32, feed_forward: '${.d_model}', layers: '${attention.num_kv_heads}'}\n"
        )
        assert loaded["model"]["feed_forward"] == 32
        assert loaded["model"]["layers"] == 2

    def test_plain_types_go_out_and_come_back(self, everything):
        source = "places: [1, 2]\nbetas: [0.5, 1]\nword: 1e-3\nmaybe: no\nnumber: 1e-5\neither: '10'\n"
        values = everything(source)
        kinds = {
            type(leaf) for value in values.values() for leaf in (value if isinstance(value, list | tuple) else [value])
        }
        assert kinds <= {int, float, str, bool, type(None)}
        assert {type(value) for value in values.values()} <= kinds | {list, tuple}
        loaded = recipe.load("x.yaml")
        assert recipe.load(write(loaded.to_yaml(), "again.yaml")) == loaded


class TestSections:
    def test_everything_wrong_is_said_at_once_in_order(self):
        write("model:\n  widht: 3\n  layers: two\n", "a.yaml")
        found = problems(
            """\
            parts: [a.yaml]
            task: {name: needel}
            attention: {name: bigbird, blok: 16, causal: true}
            train:
              lr: abc
              stepz: 10
            extra: 1
            """,
            "train.seed=x",
            "model.d_model",
        )
        starts = [
            "a.yaml:2: model.widht: unknown key",
            "a.yaml:3: model.layers: wants int, not 'two'",
            "x.yaml:2: task.name: no task named 'needel'. Did you mean 'needle'?",
            "x.yaml:3: attention.blok: unknown key (did you mean 'block'?); bigbird accepts (num_heads: int, block",
            "x.yaml:3: attention.causal: can't be set here: it comes from the task",
            "x.yaml:3: attention.num_heads: is missing",
            "x.yaml:5: train.lr: wants float, not 'abc'",
            "x.yaml:6: train.stepz: unknown key",
            "x.yaml:7: unknown section 'extra'",
            "override 'model.d_model': write section.key=value",
            "override 'train.seed=x': train.seed: wants int, not 'x'",
        ]
        for line, start in itertools.zip_longest(found, starts, fillvalue=""):
            assert line.startswith(start)

    @pytest.mark.parametrize(
        ("section", "key", "origin"),
        [
            ("attention", "d_model", "model.d_model"),
            ("attention", "causal", "the task"),
            ("attention", "positions", "model.positions"),
            ("task", "seed", "train.seed"),
            ("model", "vocabulary", "the task"),
            ("model", "length", "the task"),
            ("model", "classes", "the task"),
            ("model", "causal", "the task"),
            ("model", "pooling", "the task"),
        ],
    )
    def test_taken_from_elsewhere(self, section, key, origin):
        found = problem(MINIMAL, f"{section}.{key}=1")
        assert found == f"override '{section}.{key}=1': {section}.{key}: can't be set here: it comes from {origin}"

    def test_model_attention_is_a_section(self):
        assert "it is a section of its own" in problem(MINIMAL + "model: {attention: gqa}\n")

    def test_name_is_missing(self):
        assert problems("train: {max_steps: 3}\n") == [
            "x.yaml:1: attention.name: is missing, as in attention: {name: gqa}",
            "x.yaml:1: task.name: is missing, as in task: {name: needle}",
        ]
        assert problem("task: {name: needle}\nattention:\n  num_heads: 4\n").startswith(
            "x.yaml:2: attention.name: is missing"
        )

    @pytest.mark.parametrize("name", ["gpa", "[gqa]", "true", "os:system", "${task.name}"])
    def test_unknown_variant(self, name):
        found = problem(f"task: {{name: needle, length: 64}}\nattention:\n  name: {name}\n  num_heads: 4\n")
        assert found.startswith("x.yaml:3: attention.name: no attention variant named")

    def test_unknown_variant_names_the_nearest(self):
        assert "Did you mean 'gqa'?" in problem(MINIMAL, "attention.name=gpa")

    def test_required_option(self):
        found = problem("task: {name: needle, length: 64}\nattention: {name: gqa, num_heads: 4}\n")
        assert found.startswith(
            "x.yaml:2: attention.num_kv_heads: is missing; gqa accepts (num_heads: int, num_kv_heads: int,"
        )

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("attention.num_heads=3", "attention.num_heads: "),
            ("attention.num_kv_heads=8", "attention.num_kv_heads: "),
            ("attention.num_heads=0", "attention.num_heads: "),
            ("model.d_model=0", "model.d_model: "),
            ("model.layers=0", "model.layers: must be a whole number of at least 1, not 0"),
            ("model.d_model=1" + "0" * 30, "model.d_model: must be below 2**63, not 1000000000"),
            ("model.dropout=1.5", "model.dropout: "),
            ("attention.dropout=1.5", "attention.dropout: "),
            ("train.max_steps=0", "train.max_steps: must be a whole number of at least 1, not 0"),
            ("task.length=2", "task.length: must be a whole number from"),
            ("task={name: language_model, path: gone.txt}", "task.path: "),
        ],
    )
    def test_what_does_not_fit(self, override, message):
        assert problem(MINIMAL, override).startswith(f"override {override!r}: {message}")

    def test_what_does_not_fit_is_said_at_once(self):
        found = problems(MINIMAL + "train:\n  lr: 0\n  max_steps: 0\n", "model.layers=0")
        assert [line.partition(": must")[0] for line in found] == [
            "x.yaml:4: train.lr",
            "x.yaml:5: train.max_steps",
            "override 'model.layers=0': model.layers",
        ]

    def test_a_variant_that_cannot_do_the_task(self):
        text = "task: {name: needle, length: 64}\nattention: {name: kv_cached, num_heads: 4}\n"
        assert problem(text).startswith("x.yaml:2: attention: kv_cached is causal only")

    def test_alibi_and_rotary_reach_the_attention(self):
        assert load(MINIMAL, "model.positions=rotary")["model"]["positions"] == "rotary"
        assert load(MINIMAL, "model.positions=alibi")["model"]["positions"] == "alibi"
        found = problem(MINIMAL, "model.positions=rotary", "model.d_model=12")
        assert found.startswith("x.yaml:2: attention.num_heads: rotary positions need an even head_dim")

    def test_a_variant_of_someone_else(self, monkeypatch):
        class Mine:
            def __init__(
                self,
                d_model: int,
                num_heads: int,
                *,
                reach: tuple[int, ...] = (1, 2),
                hook: Path | None = None,
                pattern: Path | str = "near",
                causal: bool = False,
                dropout: float = 0.0,
                bias: bool = True,
                positions: str = "none",
            ) -> None:
                if reach == (3,):
                    raise ValueError("reach 3 is too far")

        monkeypatch.setitem(registry._registered, "mine", Mine)
        attention = recipe.factory
        text = "task: {name: needle, length: 64}\nattention: {name: mine, num_heads: 4, reach: [3]}\n"
        assert attention("attention", "mine") is Mine
        assert problem(text) == "x.yaml:2: attention.reach: reach 3 is too far"
        assert problem(text, "attention.hook=x", "attention.reach=[1]").startswith("override 'attention.hook=x'")


class TestOverrides:
    def test_values(self):
        loaded = load(
            MINIMAL, "train.lr=1e-4", "train.lr=2e-4", "model.d_model = 32", "train.clip=null", "attention.bias=no"
        )
        assert (loaded["train"]["lr"], loaded["train"]["clip"]) == (2e-4, None)
        assert (loaded["model"]["d_model"], loaded["attention"]["bias"]) == (32, False)

    def test_a_formula(self):
        text = "task: {name: needle, length: 64}\nattention: {name: sparse, num_heads: 4}\n"
        loaded = load(text, "attention.pattern=Local(16) | Global(1) & Causal()")
        assert loaded["attention"]["pattern"] == "Local(16) | Global(1) & Causal()"

    def test_a_whole_section_is_replaced(self):
        loaded = load(MINIMAL, "attention={name: mqa, num_heads: 2}", "attention.bias=false")
        assert loaded["attention"] == {"name": "mqa", "num_heads": 2, "dropout": 0.0, "bias": False}

    def test_a_section_the_file_does_not_have(self):
        assert load(MINIMAL, "train={max_steps: 3}")["train"]["max_steps"] == 3

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("--train.lr=1", "write it without '--': train.lr=1"),
            ("+train.lr=1", "write it without '+': train.lr=1"),
            ("train.lr", "write section.key=value, as in train.lr=1e-3"),
            ("", "write section.key=value, as in train.lr=1e-3"),
            ("=", "write section.key=value, as in train.lr=1e-3"),
            ("train.=1", "write section.key=value, as in train.lr=1e-3"),
            ("num_heads=2", "write section.key=value, as in attention.num_heads=2"),
            ("train.lr=", "no value after '='; write train.lr=null for none"),
            ("train.lr=#1", "no value after '='; put it in quotes if it starts with '#'"),
            ("train.lr=[1", "not valid YAML: "),
            ("train.lr=abc", "train.lr: wants float, not 'abc'"),
            ("train.lr={a: 1, a: 2}", "a: given twice"),
            (
                "train.max_step=1",
                "train.max_step: unknown key (did you mean 'max_steps'?); train accepts (max_steps: int",
            ),
            ("trian.lr=1", "unknown section 'trian' (did you mean 'train'?)"),
            ("sweep.x=1", "unknown section 'sweep'"),
            ("parts.x=1", "unknown section 'parts'"),
            ("train.betas.0=1", "an override sets a whole value, as in train.betas=[1, 2]"),
            ("train.betas[0]=1", "an override sets a whole value, as in train.betas=[1, 2]"),
            ("model=small", "model: wants keys and values"),
        ],
    )
    def test_refused(self, override, message):
        assert problems(MINIMAL, override)[0].startswith(f"override {override!r}: {message}")


class TestRecipe:
    def test_opens_with_its_command(self):
        loaded = recipe.load(write(MINIMAL), ["task={name: needle,\n length: 64}", "train.max_steps=3"])
        assert loaded.to_yaml().splitlines()[0] == (
            "# attnzoo train x.yaml 'task={name: needle, length: 64}' train.max_steps=3"
        )
        assert recipe.load(write(loaded.to_yaml(), "again.yaml")) == loaded

    def test_is_frozen_and_compares_by_its_sections(self):
        one, other = recipe.load(write(MINIMAL)), recipe.load(write(MINIMAL, "y.yaml"))
        assert (one.name, other.name) == ("x", "y")
        assert one == other
        assert one != recipe.load("y.yaml", ["train.seed=1"])
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.name = "z"

    def test_sections_fit_what_they_call(self):
        loaded = load(MINIMAL)
        task = tasks.find("needle")(length=loaded["task"]["length"], seed=0)
        model = recipe.factory("model")(
            vocabulary=task.vocabulary,
            length=task.length,
            classes=task.classes,
            causal=task.causal,
            pooling=task.pooling,
            attention=loaded["attention"],
            **loaded["model"],
        )
        assert isinstance(model.layers[0].attention, attnzoo.Attention)

    def test_reading_files_needs_no_torch(self):
        write(MINIMAL)
        code = """
            import sys
            from attnzoo.training import merging, recipe
            merging.merge(next(iter(recipe.shipped().values())))
            assert "torch" not in sys.modules
            recipe.load("x.yaml")
            assert "torch" in sys.modules
            assert "lightning" not in sys.modules
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


class TestMarkedYaml:
    def test_a_list_in_two_places_is_written_twice(self):
        shared = [1, 2]
        document, found = read(dump({"a": shared, "b": shared}), "x")
        assert not found
        assert document.plain() == {"a": [1, 2], "b": [1, 2]}

    @pytest.mark.parametrize(
        "value",
        [
            "no",
            "010",
            "1e-3",
            "1:30",
            "null",
            "~",
            "",
            "true",
            "3",
            ".5",
            "2024-01-01",
            "a: b",
            "# a",
            "*a",
            "&a",
            "!a",
            "é\n",
            " a",
        ],
    )
    def test_words_come_back(self, value):
        text = dump({"a": {"b": value, "c": [value, {"d": value}]}})
        document, found = read(text, "x")
        assert not found
        assert document.plain() == {"a": {"b": value, "c": [value, {"d": value}]}}

    @pytest.mark.parametrize("value", [0, -3, 12345678901234567890, 0.1, 1e-5, 1e22, -2.5e-300, True, False, None])
    def test_numbers_come_back(self, value):
        document, _ = read(dump({"a": value}), "x")
        assert document.plain() == {"a": value}
        assert type(document.plain()["a"]) is type(value)


def test_a_required_value_of_the_wrong_type_is_one_problem():
    text = "task: {name: needle}\nattention: {name: vanilla, num_heads: true}\n"
    assert problem(text) == "x.yaml:2: attention.num_heads: wants int, not True"
