"""What was measured, as plain data."""

import dataclasses
import math
from typing import Any

from attnzoo.bench.contender import Contender
from attnzoo.bench.counts import flops, least_bytes
from attnzoo.bench.problem import Problem
from attnzoo.bench.settings import Settings
from attnzoo.bench.timing import Times


@dataclasses.dataclass
class Row:
    """One contender at one length in one mode.

    `against` is empty for the variant itself. `times_subject` is how many times as long as the variant it takes, by the
    fastest sample of `Report.compared_by`. `difference` is that of its output from the
    variant's, as a part of the largest number.
    """

    subject: str
    against: str
    label: str
    mode: str
    length: int
    pairs: int
    pairs_share: float
    gflop: float
    time_ms: float
    least_ms: float
    spread: float
    cpu_ms: float
    rounds: int
    times_subject: float
    rate_share: float
    gigabytes_a_second: float
    difference: float | None = None
    tokens_a_second: float | None = None
    cache_mib: float | None = None
    peak_mib: float | None = None

    @classmethod
    def of(cls, found: Contender, name: str, times: Times, subject: Times, rate: float, compared_by: str) -> "Row":
        problem, attn = found.problem, found.problem.build()
        work = flops(problem, attn, found.pairs)
        least, base = (min(each.cpu if compared_by == "CPU time" else each.wall) for each in (times, subject))
        row = cls(
            subject=problem.subject,
            against=name,
            label=found.label,
            mode=problem.mode,
            length=problem.length,
            pairs=problem.batch * found.pairs,
            pairs_share=found.pairs / (problem.heads * problem.queries * problem.length),
            gflop=work / 1e9,
            time_ms=1000 * times.median,
            least_ms=1000 * min(times.wall),
            spread=times.spread,
            cpu_ms=1000 * min(times.cpu),
            rounds=len(times.wall),
            times_subject=least / base,
            rate_share=work / min(times.wall) / rate,
            gigabytes_a_second=least_bytes(problem, attn) / min(times.wall) / 1e9,
            difference=found.difference,
        )
        if problem.mode == "decode":
            row.tokens_a_second = problem.batch / times.median
        if problem.mode == "decode" and not name:
            row.cache_mib = attn.new_cache(problem.batch, problem.length).nbytes / 2**20
        return row


@dataclasses.dataclass
class Report:
    """All rows, and what is to be known about them."""

    machine: dict[str, str]
    settings: Settings
    rate: float  # FLOPs a second of a matrix product in this dtype
    rows: list[Row] = dataclasses.field(default_factory=list)
    left_out: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    refused: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def leave_out(self, problem: Problem, against: str, reason: str) -> None:
        """Notes what was not measured, and why."""
        self.left_out.append(_note(problem, against, reason))

    def refuse(self, problem: Problem, against: str, reason: str) -> None:
        """Notes two that do not do equal work."""
        self.refused.append(_note(problem, against, reason))

    @property
    def compared_by(self) -> str:
        """Which time `times_subject` is of: with one thread CPU time, which leaves out what else the machine does."""
        return "CPU time" if self.settings.device == "cpu" and self.settings.threads == 1 else "time"

    def break_even(self) -> list[dict[str, Any]]:
        """From which length on each variant is faster than dense attention; None where at no measured one."""
        found = []
        for subject, mode in dict.fromkeys((row.subject, row.mode) for row in self.rows):
            ratios = {
                row.length: row.times_subject
                for row in self.rows
                if (row.subject, row.mode, row.against) == (subject, mode, "dense")
            }
            if ratios:
                found.append({"subject": subject, "mode": mode, "length": break_even(ratios)})
        return found

    def as_json(self) -> dict[str, Any]:
        """The whole report in plain types."""
        return {
            "machine": self.machine,
            "settings": dataclasses.asdict(self.settings),
            "matrix_gflops": self.rate / 1e9,
            "compared_by": self.compared_by,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "break_even": self.break_even(),
            "left_out": self.left_out,
            "refused": self.refused,
        }


def break_even(ratios: dict[int, float]) -> float | None:
    """The length from which dense attention takes longer, and does so at all that were measured beyond.

    Args:
        ratios: dense time over the variant's, by length; between two lengths both are taken to be powers.
    """
    lengths = sorted(ratios)
    if not lengths or ratios[lengths[-1]] < 1:
        return None
    slower = [length for length in lengths if ratios[length] < 1]
    if not slower:
        return lengths[0]
    low = slower[-1]
    high = lengths[lengths.index(low) + 1]
    part = -math.log(ratios[low]) / (math.log(ratios[high]) - math.log(ratios[low]))
    return low * (high / low) ** part


def _note(problem: Problem, against: str, reason: str) -> dict[str, Any]:
    return {
        "subject": problem.subject, "against": against, "mode": problem.mode, "length": problem.length,
        "reason": reason,
    }  # fmt: skip
