"""`attnzoo check`: the contract, promise by promise."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.cli.screen import Json, write_json
from attnzoo.errors import OptionError, UnknownVariantError

if TYPE_CHECKING:
    from attnzoo.testing import Report


def check(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Variants, package.module:Object or file.py:Object.")
    ],
    json: Json = False,
) -> None:
    """Check that variants, or anybody's modules, keep what every variant promises."""
    reports = []
    for name in names:
        reports.append(report_of(name))
        if not json:
            print(reports[-1])
            print(advice(reports[-1], name), end="", flush=True)
    if json:
        write_json(
            [
                {"variant": report.name, **{key: getattr(outcome, key) for key in FIELDS}}
                for report in reports
                for outcome in report.outcomes
            ]
        )
    if not all(report.passed for report in reports):
        raise typer.Exit(1)


def report_of(name: str) -> "Report":
    from attnzoo import testing

    subject = load(name) if ":" in name else name
    try:
        return testing.run_checks(subject)
    except OptionError as error:
        raise OptionError(
            f"{name}: {error}. The contract needs small options to build it with: "
            'give it an attribute such as examples = ({"radius": 2},)'
        ) from error


FIELDS = ("promise", "check", "setting", "status", "asked", "detail", "smallest")


def load(source: str) -> Callable[..., Any]:
    """The object that `package.module:Object` or `file.py:Object` stands for."""
    where, _, attribute = source.rpartition(":")
    try:
        module = imported(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        found = getattr(module, attribute)
    except (Exception, SystemExit) as error:
        raise UnknownVariantError(f"{source} can't be imported: {type(error).__name__}: {error}") from error
    if not inspect.isclass(found) and not inspect.isfunction(found):
        raise UnknownVariantError(f"{source} is a {type(found).__name__}, not a class or a function")
    return found


def imported(file: Path) -> ModuleType:
    """A file as a module: by its full name where it lies in a package, so that it is not imported twice."""
    name, folder = file.stem, file.resolve().parent
    while (folder / "__init__.py").exists():
        name, folder = f"{folder.name}.{name}", folder.parent
    sys.path.insert(0, str(folder))  # as `python file.py` does, for what lies beside it
    if "." in name:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as an import does; some decorators look there
    spec.loader.exec_module(module)
    return module


def advice(report: "Report", name: str) -> str:
    """How to go on from failures."""
    if not report.failed:
        return ""
    subject = name.rpartition(":")[2] if ":" in name else f'"{name}"'
    return (
        f"\nTo debug one, decorate a test with @attnzoo.testing.parametrize({subject}) and run pytest --pdb.\n"
        "What a variant can't do by its nature it declares in its attribute `without`, and then refuses.\n"
    )
