"""The repository keeps its own rules: names, trees and tables agree, and imports stay light."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import attnzoo
from attnzoo.options import options, recipe_schema
from attnzoo.registry import CATALOGUE

ROOT = Path(__file__).parents[1]
VARIANTS = sorted(path.stem for path in (ROOT / "attnzoo" / "variants").glob("[a-z]*.py"))


def test_the_four_ways_a_variant_is_found_agree():
    page = (ROOT / "docs" / "variants.md").read_text()
    in_docs = re.findall(r"^\| \[`(\w+)`\]", page, re.MULTILINE)
    assert VARIANTS == sorted(CATALOGUE) == attnzoo.list_variants() == in_docs


@pytest.mark.parametrize("name", VARIANTS)
def test_a_file_is_named_as_its_variant_is_registered_and_its_signature_is_its_recipe_schema(name):
    assert CATALOGUE[name].startswith(f"attnzoo.variants.{name}:")
    factory = attnzoo.find(name)
    assert factory.__module__ == f"attnzoo.variants.{name}"
    schema = recipe_schema(factory, ("d_model", "causal", "positions"))
    assert [*schema.__dataclass_fields__] == [
        o for o in options(factory) if o not in ("d_model", "causal", "positions")
    ]


@pytest.mark.parametrize("page", ["variants.md", "contract.md"])
def test_the_docs_are_what_the_docstrings_say(page):
    wanted = subprocess.run(
        [sys.executable, "-c", f"from write import PAGES; print(PAGES[{page!r}](), end='')"],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ROOT / "docs" / page).read_text() == wanted.stdout, "run `make docs`"


def test_the_tree_in_the_readme_is_the_real_one():
    tree = re.search(r"```\n(attnzoo/\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    listed = {line.split()[0] for line in tree.splitlines() if line.startswith("  ")}
    package = ROOT / "attnzoo"
    real = {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    real |= {f"{path.name}/" for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert listed == real
    for line in tree.splitlines():
        if not line.startswith("  "):
            for name in line.split()[0].split(","):
                assert (ROOT / name).exists(), name


def imported(statement):
    """The heavy packages that a statement loads in a fresh process."""
    program = f"import sys\n{statement}\nprint(*{{'torch', 'lightning', 'omegaconf', 'matplotlib'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_fresh_import_loads_nothing_heavy():
    assert imported("import attnzoo; attnzoo.list_variants()") == set()
    assert imported("import attnzoo; attnzoo.build('gqa', 8, 2, num_kv_heads=1); import attnzoo.testing") == {"torch"}


def test_every_public_name_is_there_and_listed():
    assert all(getattr(attnzoo, name) is not None for name in attnzoo.__all__)
    assert set(attnzoo.__all__) <= set(dir(attnzoo))
    with pytest.raises(AttributeError, match="no attribute 'biuld'"):
        _ = attnzoo.biuld


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_opens_with_the_command_that_runs_it(path):
    assert f"# attnzoo train recipes/{path.name}\n" in path.read_text()


def test_every_variant_has_a_recipe():
    from attnzoo.training.recipe import load

    used = {load(path).sections["attention"]["name"] for path in (ROOT / "recipes").glob("*.yaml")}
    assert used == set(VARIANTS)
