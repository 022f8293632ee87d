"""Writes docs/conformance.md: `make conformance`."""

import argparse
import datetime
import importlib.metadata
import importlib.util
import platform
import re
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PAGE = HERE.parent / "conformance.md"
CONVENTIONS = {  # what these ask for is a choice of ours, that a module may make otherwise
    "check_whole_numbers_are_masks",
    "check_float_masks_are_refused",
    "check_other_mask_shapes_are_refused",
    "check_impossible_heads_are_refused",
    "check_impossible_options_are_refused",
}
RAISED = re.compile(r"^\w*(Error|Exception|Unsupported|Refused)\w*: ")
MARKS = {"number": "**✗**", "error": "E", "convention": "c", "held": "✓", "not applicable": "·"}
TITLES = {"number": "Results that differ", "error": "Calls that raise", "convention": "Conventions"}
TOP = """# Attention modules under the contract

Written by `make conformance` on {date}: Python {python}, {versions}, CPU, one thread.

attnzoo's contract is a set of checks that any `nn.Module` can be put under. This page puts modules under it that
others publish, through adapters of a few lines, which translate arguments and the polarity of masks as the
documentation of each library says, and repair nothing. They lie in [docs/conformance/](conformance/), a file for each
library.

## How to read it

Each cell is a promise, over all its checks, causal and not:

| | |
|---|---|
| ✓ | held |
| **✗** | a result differs from what the promise says: other numbers, NaN, a dependence on hidden tokens |
| E | a call that the promise covers raises an error |
| c | convention: the only deviation is a choice that attnzoo made and others need not make |
| · | not applicable: the module has no such argument or option, or declares to do without |

*Convention* is that attnzoo refuses float masks and masks of any shape but [q, k] and four dimensions, takes masks of
whole numbers, and refuses impossible head counts, such as 0, when a module is built. A module that adds float masks to
its scores does what its documentation says. Most libraries do not claim either what a column asks, such as that NaN in
a padded token reaches no other. What is right is computed in float64 from the module's own weights. What a module gives
for queries that are padding themselves is not looked at. One cause can show under several promises: a NaN where a query
sees nothing (4) is found again wherever masks leave such a query (3, 7, 8, 12, 15).

The smallest call of each deviation was made at random weights of seed 0, in float64 unless its dtype says otherwise.
Where a check compares two calls, it is the last one.

## Repeat it

`pip install -e '.[conformance]'`, then the line given with each module, such as

```
attnzoo check docs/conformance/torch_modules.py:MultiheadAttention
```

`make conformance` writes the page anew. timm is not in that extra, as it needs the torchvision that fits your torch.

If an adapter does not use a library as it is meant to be used, or a version has changed what is said here, please
correct it: an adapter is one small class, and an issue or a pull request with a better one is welcome.
"""


class Finding(NamedTuple):
    """A check that failed, in its first setting."""

    kind: str
    check: str
    setting: str
    more: int
    asked: str
    detail: str
    smallest: str


class Result(NamedTuple):
    """What is told about a module."""

    cells: dict[str, str]
    findings: list[Finding]


def adapters() -> dict[str, list[str]]:
    """The names in MODULES of each file, read without importing it."""
    found = {}
    for file in sorted(HERE.glob("*_modules.py")):
        listed = re.search(r"^MODULES = \(([^)]*)\)", file.read_text(), re.MULTILINE)
        assert listed, f"{file.name} has no MODULES"
        found[file.name] = [name for name in re.split(r"[,\s]+", listed[1]) if name]
    return found


def sources(only: str = "") -> list[str]:
    """Every adapter as `attnzoo check` takes it."""
    names = [f"docs/conformance/{file}:{name}" for file, names in adapters().items() for name in names]
    return [name for name in names if only in name]


def loaded(source: str):
    """The adapter's class, and its library's name; (None, reason) where the library is missing."""
    from attnzoo.cli.check import load
    from attnzoo.errors import UnknownVariantError

    try:
        found = load(str(HERE.parent.parent / source.partition(":")[0]) + ":" + source.partition(":")[2])
    except UnknownVariantError as error:
        if "ModuleNotFoundError" in str(error):
            return None, str(error).rpartition("ModuleNotFoundError: ")[2]
        raise
    return found, sys.modules[found.__module__].LIBRARY


def examine(source: str) -> Result:
    """Runs the contract over an adapter or a variant."""
    import torch

    from attnzoo.testing import run_checks

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = run_checks(loaded(source)[0] if ":" in source else source).outcomes
    kinds: dict[str, set[str]] = {}
    first: dict[str, Finding] = {}
    for one in outcomes:
        kind = one.status if one.status != "failed" else kind_of(one.check, one.detail)
        kinds.setdefault(one.promise, set()).add(kind)
        if one.status == "failed":
            if one.check in first:
                first[one.check] = first[one.check]._replace(more=first[one.check].more + 1)
            else:
                first[one.check] = Finding(kind, one.check, one.setting, 0, one.asked, cut(one.detail), one.smallest)
    cells = {
        promise: next(kind for kind in MARKS if kind in found)
        for promise, found in kinds.items()
        if promise[0].isdigit()
    }
    return Result(cells, list(first.values()))


def kind_of(check: str, detail: str) -> str:
    if check in CONVENTIONS or "it was accepted, and a" in detail:
        return "convention"
    return "error" if RAISED.match(detail) else "number"


def cut(detail: str, most: int = 220) -> str:
    """A message in one line, without what differs from machine to machine."""
    line = " ".join(detail.split())
    line = re.sub(r"(/[\w.+-]+)+/([\w.+-]+)", r"\2", re.sub(r"0x[0-9a-f]+", "0x", line))
    return line if len(line) <= most else line[:most].rpartition(" ")[0] + " ..."


def section(source: str, result: Result) -> list[str]:
    """What was asked of a module, and each deviation with the smallest call that shows it."""
    kind, library = loaded(source)
    lines = [f"### {title(source, library)}", "", (kind.__doc__ or "").strip().splitlines()[0], ""]
    close = getattr(kind, "close", 1e-9)
    lines += [f"Asked: {kind.asked}.", ""]
    if close != 1e-9:
        lines += [
            f"Its float64 results were compared within {close:g}, as it computes its softmax in float32 always.",
            "",
        ]
    if not getattr(kind, "backward", True):
        lines += ["It has no backward on CPU; what needs gradients was not asked.", ""]
    lines += ["```", f"attnzoo check {source}", "```", ""]
    if not result.findings:
        lines += ["No deviation.", ""]
    for kind_, heading in TITLES.items():
        found = [one for one in result.findings if one.kind == kind_]
        lines += [f"{heading}:", ""] if found else []
        for one in found:
            more = f", and in {one.more} more" if one.more else ""
            lines += [f"- `{one.check}` ({one.setting}{more}): {one.asked}", f"  - found: {code(one.detail)}"]
            lines += [f"  - smallest: `{one.smallest}`"] if one.smallest and kind_ != "convention" else []
        lines += [""] if found else []
    return lines


def code(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<").replace("*", r"\*").replace("_", r"\_")


def title(source: str, library: str) -> str:
    return f"{library}: {source.rpartition(':')[2]}"


def row(name: str, cells: dict[str, str], promises: list[str]) -> str:
    return f"| {name} | " + " | ".join(MARKS[cells[promise]] for promise in promises) + " |"


def page(jobs: int, only: str = "") -> str:
    """The whole page."""
    import torch

    import attnzoo
    from attnzoo.registry import CATALOGUE

    found = {source: loaded(source) for source in sources(only)}
    missing = {source: reason for source, (kind, reason) in found.items() if kind is None}
    theirs, ours = [source for source in found if source not in missing], sorted(CATALOGUE)
    with ProcessPoolExecutor(jobs) as pool:
        results = dict(zip([*theirs, *ours], pool.map(examine, [*theirs, *ours]), strict=True))
    libraries = list(dict.fromkeys(found[source][1] for source in theirs))
    versions = [f"attnzoo {attnzoo.__version__}", f"torch {torch.__version__}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in libraries if name != "torch"]
    promises = list(results[theirs[0]].cells)
    numbers = [promise.partition(".")[0] for promise in promises]
    top = TOP.format(
        date=datetime.date.today().isoformat(), python=platform.python_version(), versions=", ".join(versions)
    )
    lines = [top, "## The matrix", "", f"| module | {' | '.join(numbers)} |", "|---" * (len(numbers) + 1) + "|"]
    for source in theirs:
        name = title(source, found[source][1])
        anchor = re.sub(r"[^\w\- ]", "", name).lower().replace(" ", "-")
        lines.append(row(f"[{name}](#{anchor})", results[source].cells, promises))
    lines += [row(f"attnzoo: `{name}`", results[name].cells, promises) for name in ours]
    lines += ["", *(f"{promise}  " for promise in promises), ""]
    if missing:
        lines += ["Not run here, as a library is missing:", ""]
        lines += [f"- `{source}`: {reason}" for source, reason in missing.items()] + [""]
    lines += ["## The modules", ""]
    for source in theirs:
        lines += section(source, results[source])
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="how many modules are checked at a time")
    parser.add_argument("--only", default="", help="only adapters whose name holds this; prints the page")
    given = parser.parse_args()
    if given.only:
        print(page(given.jobs, given.only))
    else:
        PAGE.write_text(page(given.jobs))
