"""Writes docs/performance.md and the table in the README: `make performance` (about twenty minutes)."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from figures import BUDGET, MEASUREMENTS, Figure, Measurement, Result

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
MEASURED = Path(__file__).with_name("measured.json")
BEGIN, END = "<!-- written by `make performance` -->\n", "<!-- up to here -->\n"
TOP = """# Speed and memory

Written by `make performance` on {date}.

| | |
|---|---|
| machine | {machine} |
| versions | {versions} |
| threads | {threads} |
| allocator | {allocator} |

Each figure can be repeated with the line given with it, after `pip install -e '.[bench]'`. What is compared takes turns
in one process, and before that its outputs and gradients are compared: peers that do not do the same work are not
timed. `dense` is the exception: it looks at all pairs, to show what a sparse pattern saves. "x" is how many times as
long as the variant the other takes, by the least CPU time of some rounds. Peak memory is above inputs and masks, in a
fresh process, as the operating system counts it. Sizes are 1 sequence, 8 heads of 64 features and float32 unless said.
"""
COLUMNS = {
    "label": "", "mode": "mode", "length": "tokens", "pairs_share": "pairs", "time_ms": "ms", "spread": "±",
    "ms": "ms", "cpu_ms": "CPU ms", "times_subject": "times", "times": "times", "rate_share": "of peak",
    "loading_share": "loading", "tokens_a_second": "tokens a second", "parameters": "parameters",
    "peak_mib": "peak MiB",
}  # fmt: skip
PERCENT = ("pairs_share", "spread", "rate_share", "loading_share")


def run(command: str) -> Result:
    """What one line prints as JSON."""
    words = shlex.split(command)
    start = [sys.executable, "-m", "attnzoo"] if words[0] == "attnzoo" else [sys.executable]
    asked = [*start, *words[1:], *(["--json"] if words[0] == "attnzoo" else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(asked, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise SystemExit(f"{command} printed nothing")
    return json.loads(done.stdout)


def value(figure: Figure, result: Result) -> tuple[str, str, str]:
    """What was measured, the goal, and whether the one meets the other, as cells."""
    found = figure.read(result)
    goal = (
        f"{'at most' if figure.at_most else 'at least'} {figure.goal:g} {figure.unit}{', a stretch' * figure.stretch}"
    )
    if found is None:
        return "not measured", goal, ""
    met = found <= figure.goal if figure.at_most else found >= figure.goal
    return f"{found:.3g} {figure.unit}", goal, "yes" if met else "no" if figure.stretch else "**no**"


def cell(name: str, number: object) -> str:
    if number is None:
        return ""
    if isinstance(number, float):
        return f"{100 * number:.3g} %" if name in PERCENT else f"{number:.4g}"
    return str(number)


def section(measurement: Measurement, result: Result) -> list[str]:
    """The line to repeat it, and all that it measured."""
    known = [name for name in COLUMNS if any(row.get(name) is not None for row in result["rows"])]
    lines = [f"## {measurement.title}", "", "```", measurement.command, "```", ""]
    lines += ["| " + " | ".join(COLUMNS[name] for name in known) + " |", "|---" * len(known) + "|"]
    lines += ["| " + " | ".join(cell(name, row.get(name)) for name in known) + " |" for row in result["rows"]]
    for note in [*result.get("refused", ()), *result.get("left_out", ())]:
        lines += ["", f"Not measured: {note['against'] or note['subject']}, {note['mode']}: {note['reason']}."]
    return [*lines, ""]


def page(results: list[tuple[Measurement, Result]]) -> str:
    """The whole page."""
    facts = results[0][1]["machine"]
    versions = dict.fromkeys(part for _, result in results for part in result["machine"]["versions"].split(", "))
    lines = [TOP.format(**{**facts, "versions": ", ".join(versions)}), "## All figures", ""]
    lines += ["| | measured | goal | met |", "|---|---|---|---|"]
    for measurement, result in results:
        lines += [f"| {one.what} | {' | '.join(value(one, result))} |" for one in measurement.figures]
    missed = [
        f"- {one.what}: {value(one, result)[0]}. {one.why}"
        for measurement, result in results
        for one in measurement.figures
        if "no" in value(one, result)[2]
    ]
    lines += ["", "## What is not met, and why", "", *(missed or ["Nothing."]), ""]
    for measurement, result in results:
        lines += section(measurement, result)
    return "\n".join(lines).rstrip() + "\n"


def table(results: list[tuple[Measurement, Result]]) -> str:
    """The README's table: the first figures, and the line for each."""
    facts = results[0][1]["machine"]
    lines = [f"{facts['machine']}, one thread, {facts['date']}; times are how long the other takes.", ""]
    lines += ["| | measured | repeat with |", "|---|---|---|"]
    for measurement, result in results:
        first = measurement.figures[0]
        command = measurement.command.removesuffix(BUDGET)
        lines.append(f"| {first.what} | {value(first, result)[0]} | `{command}` |")
    return "\n".join(lines) + "\n"


def replaced(text: str, written: str) -> str:
    """The README with a new table."""
    assert BEGIN in text, "the README has lost its markers"
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + written + END, text, flags=re.DOTALL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measures only what has this in its title, and keeps the others")
    parser.add_argument("--again", action="store_true", help="measures nothing: writes the pages from measured.json")
    given = parser.parse_args()
    kept = json.loads(MEASURED.read_text()) if MEASURED.exists() and (given.only or given.again) else {}
    start = time.monotonic()
    for measurement in MEASUREMENTS:
        if not given.again and given.only.lower() in measurement.title.lower():
            print(f"{time.monotonic() - start:4.0f} s  {measurement.title}", file=sys.stderr)
            kept[measurement.title] = run(measurement.command)
    results = [(measurement, kept[measurement.title]) for measurement in MEASUREMENTS if measurement.title in kept]
    MEASURED.write_text(json.dumps({measurement.title: result for measurement, result in results}, indent=1) + "\n")
    PAGE.write_text(page(results))
    README.write_text(replaced(README.read_text(), table(results)))
