"""docs/performance: each line runs, each figure is read from what it prints, and the page shows them all."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from attnzoo.bench import bench, peers
from attnzoo.bench.problem import read
from attnzoo.bench.report import Report

HERE = Path(__file__).parent.parent / "docs" / "performance"
sys.path.insert(0, str(HERE))
import write  # noqa: E402
from figures import MEASUREMENTS  # noqa: E402

sys.path.remove(str(HERE))
BENCHES = [one for one in MEASUREMENTS if one.command.startswith("attnzoo bench")]


def test_a_figure_that_is_missed_has_a_reason():
    kept = json.loads(write.MEASURED.read_text())
    for measurement in MEASUREMENTS:
        for figure in measurement.figures:
            assert figure.why or write.value(figure, kept[measurement.title])[2] == "yes", figure.what


def test_the_page_and_the_readme_show_every_measurement():
    page, readme = write.PAGE.read_text(), write.README.read_text()
    for measurement in MEASUREMENTS:
        assert f"## {measurement.title}\n\n```\n{measurement.command}\n```\n" in page
        for figure in measurement.figures:
            assert f"| {figure.what} |" in page
        assert f"| {measurement.figures[0].what} |" in readme


@pytest.mark.parametrize("measurement", BENCHES, ids=lambda measurement: measurement.title)
def test_a_line_measures_what_its_figures_read(measurement, run, monkeypatch):
    """Runs the line without measuring: rows of each variant and peer take their place in the list times."""
    monkeypatch.setattr(peers, "find_spec", lambda package: True)

    def rows_only(subjects, settings, progress):
        report = Report({}, settings, 1e9)
        report.as_json = lambda: {
            "rows": [
                {
                    "mode": mode,
                    "length": length,
                    "against": against,
                    "times_subject": place + 1.0,
                    "peak_mib": length / 64,
                }
                for mode in settings.modes
                for length in settings.lengths
                for subject in subjects
                for place, against in enumerate(("", *settings.against))
            ]
        }
        for subject in subjects:
            read(subject)
            settings.problem(subject, settings.modes[0], 512).build()
        return report

    monkeypatch.setattr(bench, "run", rows_only)
    status, out, err = run(*shlex.split(measurement.command)[1:], "--json")
    assert (status, err) == (0, "")
    for figure in measurement.figures:
        found, goal, met = write.value(figure, json.loads(out))
        assert found != "not measured", figure.what
        assert goal.startswith("at most" if figure.at_most else "at least")
        assert met in ("yes", "no" if figure.stretch else "**no**")


def test_a_figure_is_met_or_not_and_may_be_missing():
    figure = next(one for one in BENCHES if "128" in one.title).figures[0]
    rows = [{"mode": "both", "length": 4096, "against": "dense", "times_subject": times} for times in (9.5, 9.25)]
    assert write.value(figure, {"rows": rows}) == ("9.25 x", "at least 9 x", "yes")
    rows[0]["times_subject"] = 8.0
    assert write.value(figure, {"rows": rows}) == ("8 x", "at least 9 x", "**no**")
    assert write.value(figure, {"rows": []}) == ("not measured", "at least 9 x", "")


def test_the_table_of_the_readme_is_replaced_between_its_marks():
    text = f"before\n{write.BEGIN}old\n{write.END}after\n"
    assert write.replaced(text, "new \\1\n") == f"before\n{write.BEGIN}new \\1\n{write.END}after\n"
