"""Recipes: YAML whose every section is a call, checked before anything runs."""

import contextlib
import dataclasses
import inspect
import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

from attnzoo import registry
from attnzoo.errors import RecipeError
from attnzoo.options import meanings, nearest
from attnzoo.training.marked_yaml import Place, dump, refuse
from attnzoo.training.merging import merge
from attnzoo.training.sections import Checker, Plain, accepted, factory

PACKAGE = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One experiment: every value of every section, in plain Python types.

    Recipes are equal if their sections are, whatever file or command they come from.
    """

    sections: Plain
    name: str = dataclasses.field(compare=False)
    path: Path = dataclasses.field(compare=False)
    command: str = dataclasses.field(compare=False)

    def to_yaml(self) -> str:
        """The recipe as one file that needs no other, every default written out."""
        return f"# {self.command}\n{dump(self.sections)}"


def load(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe, a file or the name of a shipped one, and checks that all its sections can be built.

    Args:
        overrides: `section.key=value` each, the value in YAML.
    Raises:
        RecipeError: all that is wrong, a line for each problem, with its file, line and key.
    """
    path = find(source)
    merged = merge(path, overrides)
    checker = Checker(merged, nowhere=Place(str(path), 1))
    plain = checker.plain() if merged.sections or not merged.problems else {}
    if not (merged.problems or checker.problems):
        _build(plain, checker)
    if problems := merged.problems + checker.problems:
        raise refuse(problems)
    command = " ".join(shlex.join(["attnzoo", "train", str(source), *overrides]).split())
    return Recipe(plain, path.stem, path, command)


def shipped() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    folders = (PACKAGE / "recipes", PACKAGE.parent / "recipes")  # in a wheel, in a checkout
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def find(source: str | Path) -> Path:
    """The file of a recipe; a file wins over a shipped recipe of the same name."""
    path = Path(source)
    known = shipped()
    if str(source) in known and not path.is_file():
        return known[str(source)]
    if path.exists():
        return path
    if path.stem in known:
        raise RecipeError(f"there is no file {path}, but a shipped recipe is named '{path.stem}'")
    if path.suffix or len(path.parts) > 1:
        return path
    near = nearest(str(source), known)
    hint = f" Did you mean '{near}'?" if near else ""
    raise RecipeError(f"there is no file and no shipped recipe '{source}'.{hint} Shipped are: {', '.join(known)}")


def merged_text(name: str, file: str = "") -> str:
    """A shipped recipe and its parts as one file to start from, with what else may be set, and what each key means.

    Args:
        file: where it is going to lie, for the command in its first lines.
    """
    path = load(name).path
    checker = Checker(merge(path), nowhere=Place(str(path), 1))
    heading = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    lines = [f"# attnzoo train {file or path.name}" if "attnzoo train" in line else line for line in heading]
    for section, schema in checker.schemas().items():
        given = {key: marked.plain() for key, marked in checker.sections[section].given.items()}
        others = {key: option.default for key, option in accepted(schema).items() if key not in given}
        called = factory(section, str(given.get("name", "")))
        meaning = meanings(inspect.getdoc(called) or "")
        lines.append(f"{section}:")
        for margin, values in (("  ", given), ("  # ", others)):
            for line in dump(values).splitlines() if values else ():
                comment = meaning.get(line.partition(":")[0])
                lines.append(margin + line + (f"  # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"


def _build(plain: Plain, checker: Checker) -> None:
    """Builds what training will build, the model without memory for its weights."""
    import torch

    with checker.reporting("train"):
        factory("train")(**plain["train"])
    task = None
    with checker.reporting("task"):
        own = {key: value for key, value in plain["task"].items() if key != "name"}
        task = factory("task", plain["task"]["name"])(**own, seed=plain["train"]["seed"])
    if task is None:
        return
    attention, model = plain["attention"], plain["model"]
    positions = model["positions"] if model["positions"] in ("rotary", "alibi") else "none"
    # What can't be built without memory shows what it thinks of its options in training.
    with contextlib.suppress(RuntimeError), checker.reporting("attention", "model"), torch.device("meta"):
        registry.build(**attention, d_model=model["d_model"], causal=task.causal, positions=positions)
        with checker.reporting("model"):
            factory("model")(**task.shape(), attention=attention, **{**model, "layers": min(model["layers"], 1)})
