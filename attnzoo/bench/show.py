"""A report as a table in the terminal, and as files: CSV, JSON, PNG with logarithmic axes."""

import csv
import dataclasses
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnzoo.bench.report import Report, Row

COLUMNS: dict[str, Callable[[Row], str]] = {
    "mode": lambda row: row.mode,
    "length": lambda row: str(row.length),
    "": lambda row: row.label if not row.against else f"  {row.label}",
    "pairs": lambda row: f"{100 * row.pairs_share:.3g} %",
    "ms": lambda row: f"{row.time_ms:.4g}",
    "±": lambda row: f"{50 * row.spread:.0f} %",
    "CPU ms": lambda row: f"{row.cpu_ms:.4g}",
    "times": lambda row: f"{row.times_subject:.2f}",
    "GFLOP": lambda row: f"{row.gflop:.3g}",
    "of peak": lambda row: f"{100 * row.rate_share:.0f} %",
    "peak MiB": lambda row: "" if row.peak_mib is None else f"{row.peak_mib:.0f}",
}
DECODE: dict[str, Callable[[Row], str]] = {
    "tokens/s": lambda row: "" if row.tokens_a_second is None else f"{row.tokens_a_second:.0f}",
    "cache MiB": lambda row: "" if row.cache_mib is None else f"{row.cache_mib:.4g}",
}
GPU: dict[str, Callable[[Row], str]] = {"GB/s": lambda row: f"{row.gigabytes_a_second:.0f}"}


def table(report: Report) -> str:
    """The rows in columns, and below them what is to be known about them."""
    columns = dict(COLUMNS)
    columns |= DECODE if "decode" in report.settings.modes else {}
    columns |= GPU if report.settings.device != "cpu" else {}
    lines = []
    for subject in dict.fromkeys(row.subject for row in report.rows):
        rows = [row for row in report.rows if row.subject == subject]
        lines += [*_aligned([list(columns), *([cell(row) for cell in columns.values()] for row in rows)]), ""]
    return "\n".join([*lines, *_facts(report)])


def _aligned(cells: list[list[str]]) -> list[str]:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in cells[0]:
        made.add_column(title, justify="left" if title in ("mode", "") else "right", no_wrap=True)
    for line in cells[1:]:
        made.add_row(*line)
    out = io.StringIO()
    Console(file=out, width=200, color_system=None, markup=False).print(made)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def _facts(report: Report) -> list[str]:
    settings = report.settings
    told = [
        f"{settings.level} level, batch {settings.batch}, {settings.heads} heads of {settings.head_dim}, "
        f"{settings.dtype} on {settings.device}; matrix product {report.rate / 1e9:.0f} GFLOP/s",
        f"ms: median; ±: half of the middle half; times: {report.compared_by} over the variant's, both at their least; "
        "GFLOP: visible pairs only; peak MiB: above inputs and masks",
    ]
    for found in report.break_even():
        length = found["length"]
        said = f"no length up to {max(settings.lengths)}" if length is None else f"{length:.0f} tokens"
        told.append(f"faster than dense, {found['subject']} {found['mode']}: from {said}")
    told += [f"{name}: {fact}" for name, fact in report.machine.items()]
    told += _notes("refused", report.refused) + _notes("left out", report.left_out)
    return told


def _notes(title: str, notes: list[dict[str, Any]]) -> list[str]:
    """A line for each subject, peer and reason, with the modes and lengths that it is about."""
    joined: dict[tuple[str, str, str, str], list[int]] = {}
    for note in notes:
        key = (note["subject"], note["against"], note["mode"], note["reason"])
        joined.setdefault(key, []).append(note["length"])
    return [
        f"{title}: {subject}{f' against {against}' if against else ''}, {mode} {','.join(map(str, lengths))}: {reason}"
        for (subject, against, mode, reason), lengths in joined.items()
    ]


def write(report: Report, folder: Path) -> None:
    """Writes bench.csv, bench.json and bench.png."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "bench.csv").open("w", newline="") as out:
        writer = csv.DictWriter(out, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in report.rows)
    (folder / "bench.json").write_text(json.dumps(report.as_json(), indent=2, allow_nan=False) + "\n")
    draw(report, folder / "bench.png")


def draw(report: Report, path: Path) -> None:
    """Draws time and peak memory against length, a row of panels for each mode."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # the first import on a machine reports its fonts
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    modes = list(dict.fromkeys(row.mode for row in report.rows))
    figure = Figure(figsize=(11, 3.8 * max(1, len(modes))), layout="constrained", dpi=120)
    panels = figure.subplots(max(1, len(modes)), 2, squeeze=False)
    for mode, line in zip(modes, panels, strict=False):
        for panel, field, label in zip(line, ("time_ms", "peak_mib"), ("ms", "peak MiB"), strict=True):
            for (subject, name), rows in _lines(report, mode).items():
                points = [(row.length, getattr(row, field)) for row in rows if getattr(row, field)]
                if points:
                    style = {"linestyle": "--"} if name else {"linewidth": 2.5}
                    label_ = f"{rows[0].label} (for {subject})" if name else subject
                    panel.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label_, **style)
            panel.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label, title=mode)
            panel.set_xticks(report.settings.lengths, map(str, report.settings.lengths), minor=False)
            panel.set_xticks([], minor=True)
            panel.yaxis.set_major_formatter(LogFormatter())
            panel.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
            panel.grid(alpha=0.3, which="both")
    if report.rows:
        panels[0, 0].legend(frameon=False, fontsize="small")
    figure.savefig(path)


def _lines(report: Report, mode: str) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        if row.mode == mode:
            found.setdefault((row.subject, row.against), []).append(row)
    return found
