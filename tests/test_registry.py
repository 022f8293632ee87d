"""The registry: names, plugins, and what it says of a variant."""

import json
import subprocess
import sys
import textwrap

import pytest

import attnzoo
from attnzoo import NameTakenError, OptionError, UnknownVariantError
from attnzoo.registry import _registered

PLUGIN = '''
"""A variant in a package of its own."""

from attnzoo.attention import Attention, PositionKind
from attnzoo.kernels.blocks import blocks
from attnzoo.patterns import Local
from attnzoo.projections import Separate


class Near(Attention):
    """Looks at direct neighbours."""

    examples = ({"reach": 2},)

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        reach: int = 1,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        positions: PositionKind = "none",
    ) -> None:
        projection = Separate(d_model, num_heads, bias=bias)
        super().__init__(projection, Local(reach), causal=causal, dropout=dropout, positions=positions)

    def attend(self, q, k, v, scope):
        return blocks(q, k, v, scope, block=4)
'''

RECIPE = """
task: {name: needle, length: 32}
attention: {name: near, num_heads: 2, reach: 3}
model: {d_model: 16, layers: 1, feed_forward: 16}
train: {max_steps: 2, batch_size: 2, valid_every: 2}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution with entry points, as pip would leave it on the path."""

    def install(name, points, **modules):
        information = tmp_path / f"{name}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "".join(f"{variant} = {value}\n" for variant, value in points.items())
        (information / "entry_points.txt").write_text(f"[attnzoo.variants]\n{lines}")
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    before = dict(_registered)
    yield install
    _registered.clear()
    _registered.update(before)
    for module in [name for name in sys.modules if name.startswith("plugin_")]:
        del sys.modules[module]


def toy(**changes):
    """A function that would do as a variant."""

    def build_toy(
        d_model: int,
        num_heads: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        positions: str = "none",
    ):
        return attnzoo.build("vanilla", d_model, num_heads, causal=causal)

    for name, value in changes.items():
        setattr(build_toy, name, value)
    return build_toy


@pytest.fixture
def forget():
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)


def test_names_are_sorted_and_take_wildcards():
    names = attnzoo.list_variants()
    assert names == sorted(names)
    assert {"vanilla", "einsum", "fused_qkv", "mqa", "gqa", "local", "bigbird", "random_sparse", "kv_cached"} <= set(
        names
    )
    assert attnzoo.list_variants("*qa") == ["gqa", "mqa"]
    assert attnzoo.list_variants("nothing*") == []


def test_supports_filters_by_what_was_built():
    assert set(attnzoo.list_variants(supports=("cross",))) == {"vanilla", "einsum", "fused_qkv", "gqa", "mqa", "sparse"}
    assert attnzoo.list_variants(supports=("causal", "cache")) == attnzoo.list_variants()
    assert "kv_cached" not in attnzoo.list_variants(supports=("bidirectional",))
    with pytest.raises(OptionError, match="did you mean 'causal'"):
        attnzoo.list_variants(supports=("casual",))


def test_an_unknown_name_gets_the_nearest_and_the_list():
    with pytest.raises(UnknownVariantError, match=r"no attention variant named 'gpa'. Did you mean 'gqa'\?.*vanilla"):
        attnzoo.build("gpa", d_model=8, num_heads=2)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "gqa",
            {"num_kv_head": 2},
            r"unknown option 'num_kv_head' \(did you mean 'num_kv_heads'\?\).*'num_kv_heads' is missing",
        ),
        ("gqa", {"num_kv_heads": 3}, "num_kv_heads = 3 does not divide num_heads = 4"),
        ("gqa", {"num_kv_heads": 8}, "num_kv_heads = 8 does not divide num_heads = 4"),
        ("gqa", {"num_kv_heads": True}, "'num_kv_heads' wants int, not True"),
        ("gqa", {"num_kv_heads": 2.0}, "'num_kv_heads' wants int, not 2.0"),
        ("vanilla", {"dropout": 1.0}, r"dropout must be a number in \[0, 1\)"),
        ("vanilla", {"dropout": float("nan")}, "dropout"),
        ("vanilla", {"positions": "rotari"}, "rotari"),
        ("vanilla", {"causal": 1}, "'causal' wants bool, not 1"),
        ("local", {"radius": -1}, "radius must be a whole number of at least 0"),
        ("local", {"block": 0}, "block"),
        ("bigbird", {"window_blocks": 2}, "window_blocks must be odd.*1 or 3"),
        ("bigbird", {"seed": -1}, "seed"),
        ("random_sparse", {"keys": 5, "block": 2}, "keys = 5 must be a multiple of block = 2"),
        ("random_sparse", {"ratio": 1.5}, "ratio must be"),
        ("kv_cached", {"causal": False}, "causal only"),
        ("sparse", {"pattern": "Locl(2)"}, "Did you mean Local"),
    ],
)
def test_an_impossible_option_is_named_with_what_would_do(name, options, says):
    with pytest.raises(OptionError, match=f"(?s){says}"):
        attnzoo.build(name, d_model=16, num_heads=4, **options)


@pytest.mark.parametrize("heads", [0, -1, True, 3, 17])
@pytest.mark.parametrize("name", ["vanilla", "fused_qkv", "mqa", "bigbird"])
def test_impossible_head_counts_are_refused_by_name_and_by_class(name, heads):
    with pytest.raises(OptionError, match="num_heads"):
        attnzoo.build(name, d_model=16, num_heads=heads)
    with pytest.raises(OptionError, match="num_heads"):
        attnzoo.find(name)(16, heads)


def test_registering_again_replaces_and_another_owner_is_refused(forget):
    first, again = toy(), toy()
    attnzoo.register("toy", examples=({},))(first)
    attnzoo.register("toy")(again)
    assert attnzoo.find("toy") is again
    with pytest.raises(NameTakenError, match=r"'toy' is taken by .*toy\.<locals>\.build_toy"):
        attnzoo.register("toy")(toy(__qualname__="other"))
    with pytest.raises(NameTakenError, match=r"'gqa' is taken by attnzoo.variants.gqa:GQA"):
        attnzoo.register("gqa")(toy())


@pytest.mark.parametrize("name", ["", "Gqa", "my-variant", "a b", "1st"])
def test_names_that_would_differ_by_case_or_dash_are_refused(name):
    with pytest.raises(OptionError, match="lower-case"):
        attnzoo.register(name)(toy())


def test_a_signature_that_swallows_or_lacks_options_is_refused(forget):
    def swallows(d_model: int, num_heads: int, **options: int) -> None: ...

    def lacks(d_model: int, num_heads: int, *, causal: bool = False) -> None: ...

    def untyped(d_model, num_heads): ...

    with pytest.raises(OptionError, match=r"\*\*options"):
        attnzoo.register("swallows")(swallows)
    with pytest.raises(OptionError, match="also takes dropout, bias, positions"):
        attnzoo.register("lacks")(lacks)
    with pytest.raises(OptionError, match="no type for 'd_model'"):
        attnzoo.register("untyped")(untyped)


def test_describe_tells_all_and_what_is_supported_is_derived():
    told = attnzoo.describe("local")
    assert told.summary.startswith("Sliding-window attention")
    assert "Beltagy" in told.source
    assert told.cost.startswith("O(t radius e) time, O(t e) memory")
    assert [option.name for option in told.options][:3] == ["d_model", "num_heads", "radius"]
    assert {"causal", "cache", "documents", "kv_heads"} <= set(told.supports)
    assert "cross" in told.waives
    assert "radius: int = 128" in str(told)


@pytest.mark.parametrize("name", attnzoo.list_variants())
def test_every_docstring_has_a_summary_a_source_and_a_cost(name):
    told = attnzoo.describe(name)
    assert told.summary.endswith(".")
    assert "arXiv" in told.source
    assert told.cost


def test_a_plugin_is_listed_without_import_and_imported_alone(install):
    folder = install("good", {"near": "plugin_near:Near"}, plugin_near=PLUGIN)
    assert "near" in attnzoo.list_variants()
    assert "plugin_near" not in sys.modules
    assert attnzoo.build("near", d_model=8, num_heads=2, reach=2).pattern == attnzoo.Local(2)
    assert (folder / "plugin_near.py").exists()


@pytest.mark.parametrize(
    ("value", "source", "says"),
    [
        ("plugin_bad:Near", "import nothing_of_this_name", "ModuleNotFoundError"),
        ("plugin_bad:Near", "raise SystemExit(3)", "SystemExit"),
        ("plugin_bad:Near", "x = 1", "AttributeError"),
        ("plugin_bad:x", "x = 1", "OptionError|TypeError"),
        ("plugin_gone:Near", "", "ModuleNotFoundError"),
    ],
)
def test_a_broken_plugin_is_one_named_warning_and_harms_nothing_else(install, value, source, says):
    install("bad", {"bad": value}, plugin_bad=source)
    assert {"bad", "gqa"} <= set(attnzoo.list_variants())
    with pytest.warns(UserWarning, match=r"'bad'.*package bad") as caught:
        names = attnzoo.list_variants(supports=("causal",))
    assert len(caught) == 1
    assert "bad" not in names
    assert "gqa" in names
    with pytest.raises(UnknownVariantError, match=f"(?s)'bad'.*package bad.*({says})"):
        attnzoo.build("bad", d_model=8, num_heads=2)


def test_a_plugin_that_makes_no_module_is_named(install):
    source = (
        PLUGIN
        + """

def seven(
    d_model: int, num_heads: int, *, causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: str = ""
) -> int:
    return 7
"""
    )
    install("odd", {"odd": "plugin_odd:seven"}, plugin_odd=source)
    with pytest.raises(UnknownVariantError, match=r"'odd' makes a int, not an attnzoo\.Attention"):
        attnzoo.build("odd", d_model=8, num_heads=2)
    with pytest.warns(UserWarning, match=r"'odd' is left out: .*makes a int"):
        assert "odd" not in attnzoo.list_variants(supports="causal")


def test_a_plugin_that_ends_the_program_harms_nothing_else(install):
    source = PLUGIN.replace("        projection = Sep", "        raise SystemExit(9)\n        projection = Sep")
    install("ends", {"ends": "plugin_ends:Near"}, plugin_ends=source)
    with pytest.raises(UnknownVariantError, match="'ends' ends the program where it is built"):
        attnzoo.build("ends", d_model=8, num_heads=2)
    with pytest.warns(UserWarning, match="'ends' is left out"):
        assert "gqa" in attnzoo.list_variants(supports="causal")


def test_two_plugins_with_one_name_are_told_apart_in_either_order(install):
    install("one", {"near": "plugin_one:Near"}, plugin_one=PLUGIN)
    install("two", {"near": "plugin_two:Near"}, plugin_two=PLUGIN)
    with pytest.raises(NameTakenError, match=r"(?s)plugin_one:Near \(package one\).*plugin_two:Near \(package two\)"):
        attnzoo.find("near")


def test_a_plugin_with_one_of_our_names_is_left_out_with_a_warning(install):
    install("thief", {"gqa": "plugin_near:Near"}, plugin_near=PLUGIN)
    with pytest.warns(UserWarning, match=r"'gqa' of plugin_near:Near \(package thief\).*is taken"):
        assert attnzoo.list_variants().count("gqa") == 1
    assert attnzoo.find("gqa").__name__ == "GQA"


def test_a_package_outside_is_checked_and_trained_without_a_change_here(install):
    folder = install("good", {"near": "plugin_near:Near"}, plugin_near=PLUGIN)
    (folder / "near.yaml").write_text(RECIPE)

    def attnzoo_command(*words):
        import os

        paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths}
        command = [sys.executable, "-m", "attnzoo", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "near" in {variant["name"] for variant in json.loads(attnzoo_command("list", "--json"))}
    assert "held" in attnzoo_command("check", "near")
    assert json.loads(attnzoo_command("train", "near.yaml", "--json"))["variant"] == "near"


def test_a_plugin_may_name_its_variant_through_a_re_export(install):
    core = PLUGIN.replace("class Near", "@register('near')\nclass Near").replace(
        "from attnzoo.projections", "from attnzoo.registry import register\nfrom attnzoo.projections"
    )
    folder = install("good", {"near": "plugin_pack:Near"})
    (folder / "plugin_pack").mkdir()
    (folder / "plugin_pack" / "core.py").write_text(core)
    (folder / "plugin_pack" / "__init__.py").write_text("from plugin_pack.core import Near\n")
    assert attnzoo.build("near", d_model=8, num_heads=2).pattern == attnzoo.Local(1)


def test_to_look_at_the_zoo_changes_no_experiment():
    import torch

    before = torch.get_rng_state()
    attnzoo.describe("bigbird")
    attnzoo.list_variants(supports="cache")
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_beyond_reason_are_refused_at_once():
    for name, options in (
        ("local", {"radius": 10**30}),
        ("random_sparse", {"keys": 2**62}),
        ("vanilla", {"dropout": 10**400}),
    ):
        with pytest.raises(OptionError, match=f"{next(iter(options))}"):
            attnzoo.build(name, 24, 6, **options)
    with pytest.raises(OptionError, match="num_heads = 7 does not divide"):
        attnzoo.build("vanilla", 2**30, 7)
