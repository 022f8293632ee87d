"""`attnzoo new`: a package that works at once, or one message and nothing written."""

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import attnzoo
from attnzoo import testing
from attnzoo.registry import _registered

FILES = {
    ".gitignore",
    "README.md",
    "attnzoo_my_window/__init__.py",
    "attnzoo_my_window/my_window.py",
    "pyproject.toml",
    "recipe.yaml",
    "tests/test_contract.py",
}


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def install(monkeypatch):
    """Puts a written package on the path with the entry points that its pyproject.toml names, as pip would."""
    before = set(sys.modules)

    def install(folder):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        information = folder / "written-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
        points = project["entry-points"]["attnzoo.variants"]
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (information / "entry_points.txt").write_text(f"[attnzoo.variants]\n{lines}")
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()

    yield install
    for module in [name for name in sys.modules if name.startswith("attnzoo_") and name not in before]:
        del sys.modules[module]


def tree(folder):
    """Every file below a folder with its text, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_text() for path in Path(folder).rglob("*") if path.is_file()}


def refused(outcome, *said):
    status, out, err = outcome
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    for words in said:
        assert words in err


# What is written


def test_it_writes_a_package_and_says_how_to_go_on(run, somewhere):
    status, out, err = run("new", "my_window")
    assert (status, err) == (0, "")
    assert [path.name for path in somewhere.iterdir()] == ["my-window"]
    written = tree("my-window")
    assert written.keys() == FILES
    assert not [text for text in written.values() for place in ("NAME", "CLASS", "DASHED") if place in text]
    assert "class MyWindowAttention(Attention):" in written["attnzoo_my_window/my_window.py"]
    assert out.splitlines()[1:] == [
        "cd my-window",
        "pip install -e '.[test]'",
        "pytest",
        "attnzoo check my_window",
        "attnzoo train recipe.yaml",
    ]


def test_into_another_folder_and_as_json(run, somewhere):
    (somewhere / "a b").mkdir()
    status, out, _ = run("new", "my_window", "--into", "a b", "--json")
    assert status == 0
    assert {*json.loads(out)} == {f"a b/my-window/{file}" for file in FILES}
    assert all(Path(file).is_file() for file in json.loads(out))
    assert "cd 'a b/second'\n" in run("new", "second", "--into", "a b")[1]


def test_the_folder_is_as_open_as_any_other(run, somewhere):
    run("new", "my_window")
    (somewhere / "plain").mkdir()
    assert (somewhere / "my-window").stat().st_mode == (somewhere / "plain").stat().st_mode


def test_to_write_loads_no_torch():
    program = "import sys; from attnzoo import cli; cli.run(['new', 'near']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert Path("near").is_dir()


@pytest.mark.usefixtures("without_annotations")
def test_what_is_written_is_a_variant_that_keeps_the_contract(run, somewhere, install):
    run("new", "my_window")
    install(somewhere / "my-window")
    assert json.loads(run("list", "my_window", "--json")[1]) == [{"name": "my_window"}]
    testing.check_variant("my_window", **attnzoo.find("my_window").examples[0], causal=True)
    told = attnzoo.describe("my_window")
    assert "arXiv" in told.source
    assert told.cost
    status, out, _ = run("show", "my_window")
    assert status == 0
    assert "MyWindowPattern(2, dilation=3)" in out
    assert run("validate", "my-window/recipe.yaml")[0] == 0


@pytest.mark.usefixtures("without_annotations")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(queries.first - keys.last <= reach)", "(queries.first - keys.last < reach)"),
        ("(keys.first - queries.last <= reach)", "(keys.first - queries.last < reach)"),
        ("(distance % gap == 0)", "(key.index % gap == 0)"),
        ("per_head = True", "per_head = False"),
    ],
)
def test_what_an_author_gets_wrong_in_it_is_caught(run, somewhere, install, monkeypatch, right, wrong):
    two = [promise for promise in testing.PROMISES if promise.title[0] in "57"]  # padding, and the pattern
    monkeypatch.setattr(testing, "PROMISES", two)
    run("new", "my_window")
    file = somewhere / "my-window" / "attnzoo_my_window" / "my_window.py"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    install(somewhere / "my-window")
    assert not testing.run_checks("my_window", **attnzoo.find("my_window").examples[0], causal=False).passed


@pytest.mark.parametrize("name", ["attention", "pattern", "scope", "none", "types", "blocks", "top_k_2d", "attnzoo"])
def test_no_name_clashes_with_what_the_package_imports(run, somewhere, install, name):
    assert run("new", name)[0] == 0
    install(somewhere / name.replace("_", "-"))
    assert attnzoo.build(name, d_model=8, num_heads=2).num_heads == 2


# What is refused


@pytest.mark.parametrize("name", ["", "Near", "my-window", "a b", "1st", "_near", "near_", "a__b", "../x", "é", "x\n"])
def test_a_name_that_is_none_is_refused(run, somewhere, name):
    refused(run("new", name), repr(name), "lower-case letters")
    assert not list(somewhere.iterdir())


@pytest.mark.parametrize("name", ["class", "lambda"])
def test_a_keyword_is_refused(run, somewhere, name):
    refused(run("new", name), repr(name), "keyword")
    assert not list(somewhere.iterdir())


def test_a_taken_name_is_refused_whoever_has_it(run, somewhere, install, monkeypatch):
    refused(run("new", "gqa"), "'gqa' is taken")
    monkeypatch.setitem(_registered, "mine", object)
    refused(run("new", "mine"), "'mine' is taken")
    assert not list(somewhere.iterdir())
    run("new", "my_window")
    install(somewhere / "my-window")
    (somewhere / "other").mkdir()
    refused(run("new", "my_window", "--into", "other"), "'my_window' is taken")
    assert not tree("other")


def test_what_exists_is_left_as_it_is(run, somewhere):
    (somewhere / "my-folder").mkdir()
    (somewhere / "my-file").write_text("mine")
    (somewhere / "my-link").symlink_to("nowhere")
    for name in ("my_folder", "my_file", "my_link"):
        refused(run("new", name), f"{name.replace('_', '-')} exists")
    assert tree(somewhere) == {"my-file": "mine"}
    assert os.readlink("my-link") == "nowhere"
    assert len(list(somewhere.iterdir())) == 3


def test_where_nothing_can_be_written_nothing_is(run, somewhere):
    (somewhere / "file").write_text("mine")
    refused(run("new", "near", "--into", "missing"), "can't write missing/near: No such file or directory")
    refused(run("new", "near", "--into", "file"), "can't write file/near: Not a directory")
    refused(run("new", "n" * 300), "can't write", "File name too long")
    assert tree(somewhere) == {"file": "mine"}
    assert len(list(somewhere.iterdir())) == 1


def test_a_disk_that_fills_up_leaves_nothing_half_written(run, somewhere, monkeypatch):
    write_text, written = Path.write_text, []

    def full_after_three(path, *arguments, **options):
        written.append(path)
        if len(written) > 3:
            raise OSError(28, "No space left on device")
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full_after_three)
    refused(run("new", "near"), "can't write near: No space left on device")
    assert len(written) == 4
    assert not list(somewhere.iterdir())


# As its reader would use it


@pytest.mark.slow
def test_it_installs_and_passes_its_own_tests(run, somewhere):
    for module in ("hatchling", "editables", "pip"):
        pytest.importorskip(module)
    run("new", "my_window")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "venv"], check=True)
    python = somewhere / "venv" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    ours = [path for path in sys.path if path.endswith("-packages")]
    lines = [str(Path(attnzoo.__file__).parents[1]), *(f"import site; site.addsitedir({path!r})" for path in ours)]
    Path(site, "ours.pth").write_text("\n".join(lines) + "\n")

    def python_m(*words):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        done = subprocess.run(
            [python, "-m", *words], cwd=somewhere / "my-window", env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python_m("pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "-e", ".[test]")
    tested = python_m("pytest", "-q", "-W", "error", "--color=no").splitlines()[-1]
    assert "passed" in tested
    assert "warning" not in tested
    assert "my_window" in python_m("attnzoo", "list").split()
    assert "the contract holds" in python_m("attnzoo", "check", "my_window")
    assert "dilation" in python_m("attnzoo", "show", "my_window")
    assert json.loads(python_m("attnzoo", "train", "recipe.yaml", "--json"))["test"]["accuracy"] > 0.9
