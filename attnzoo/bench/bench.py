"""The benchmark: for each variant, mode and length, equal work first, then time in turns, then memory."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import torch

from attnzoo.bench import agreement, contender, machine, memory, peers
from attnzoo.bench.contender import Contender
from attnzoo.bench.counts import matrix_rate
from attnzoo.bench.peers.peer import Unfit
from attnzoo.bench.problem import Problem
from attnzoo.bench.progress import Progress
from attnzoo.bench.report import Report, Row
from attnzoo.bench.settings import Settings
from attnzoo.bench.timing import EventWatch, Times, Watch, take_turns

NO_TIME = "no time left in the budget"


def run(subjects: Sequence[str], settings: Settings, progress: Progress) -> Report:
    """Measures the variants, `local:radius=256` say, and the peers beside each.

    Raises:
        UnknownVariantError: no variant has the name.
        OptionError: a variant refuses its options.
    """
    asked = [(mode, name) for mode in settings.modes for name in subjects]
    for mode, name in asked:
        settings.problem(name, mode, min(settings.lengths)).build()
    with _threads(settings.threads):
        return _Run(dataclasses.replace(settings, threads=torch.get_num_threads()), progress).measure(asked)


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings, self.progress = settings, progress
        self.end = time.monotonic() + settings.budget
        self.watch = Watch() if settings.device == "cpu" else EventWatch(torch.cuda)
        packages = {peers.CATALOGUE[name][1].replace("_", "-") for name in settings.against} - {"torch"}
        self.rate = matrix_rate(getattr(torch, settings.dtype), settings.device, min(0.5, settings.budget / 20))
        self.report = Report(machine.describe(settings.device, sorted(packages)), settings, self.rate)
        self.took: dict[tuple[str, str], tuple[int, float]] = {}  # by mode and subject: a length, and a round
        memory.preload(settings.against)

    def measure(self, asked: Sequence[tuple[str, str]]) -> Report:
        problems = [
            self.settings.problem(name, mode, length)  # type: ignore[arg-type]
            for mode, name in asked
            for length in sorted(self.settings.lengths)
        ]
        self.progress.begin(len(problems))
        try:
            for place, problem in enumerate(problems):
                self.progress.step(f"{problem.subject} {problem.mode} {problem.length}")
                # Longer ones take more of what is left.
                left, weight = self.end - time.monotonic(), problem.length / sum(p.length for p in problems[place:])
                self._group(problem, left * weight)
        finally:
            self.progress.close()
        return self.report

    def _group(self, problem: Problem, seconds: float) -> None:
        """One variant and its peers at one length, within some seconds: a third of them is for memory."""
        if self._expected(problem) > self.end - time.monotonic():
            self.report.leave_out(problem, "", NO_TIME)
            return
        start = time.monotonic()
        contenders = self._contenders(problem)
        if not contenders:
            return
        times = take_turns(contenders, self.watch, self.settings.rounds, start + seconds * 2 / 3, self.progress.tick)
        self.took[problem.mode, problem.subject] = problem.length, sum(max(each.wall) for each in times.values())
        rows = {name: self._row(name, found, times) for name, found in contenders.items()}
        compiled = {name for name, found in contenders.items() if found.kernel is not None and found.kernel.compiles}
        contenders.clear()  # what they hold is no memory of the others
        for name, row in rows.items():
            if name in compiled:
                self.report.leave_out(problem, name, "peak memory: it would be that of the compiler")
            elif times[name].median > max(start + seconds - time.monotonic(), (self.end - time.monotonic()) / 4):
                self.report.leave_out(problem, name, f"peak memory: {NO_TIME}")
            else:
                row.peak_mib = memory.peak_mib(problem, name or None, self.settings.threads)
            self.report.rows.append(row)

    def _contenders(self, problem: Problem) -> dict[str, Contender]:
        """The variant, by the name "", and the peers that do the same; none where the variant does something else."""
        try:
            first = contender.subject(problem)
            if (problem.mode, problem.subject) not in self.took:
                agreement.check_definition(problem)
        except Unfit as reason:
            self.report.leave_out(problem, "", str(reason))
            return {}
        except agreement.Unequal as how:
            self.report.refuse(problem, "its definition", str(how))
            return {}
        found, wanted = {"": first}, first.results()
        for name in self.settings.against:
            try:
                peer = contender.peer(problem, name)
                peer.difference = agreement.check_peer(peer, name, first, wanted)
                found[name] = peer
            except Unfit as reason:
                self.report.leave_out(problem, name, str(reason))
            except agreement.Unequal as how:
                if self.settings.unequal:
                    peer.difference = agreement.difference(peer.results(), wanted)[0]
                    found[name] = peer
                else:
                    self.report.refuse(problem, name, str(how))
            except Exception as error:  # a peer that fails harms nobody else
                self.report.leave_out(problem, name, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
        return found

    def _expected(self, problem: Problem) -> float:
        """Seconds that one round and the calls before it will take, judged by a shorter length; most grow with the
        square.
        """
        length, seconds = self.took.get((problem.mode, problem.subject), (problem.length, 0.0))
        return 3 * seconds * (problem.length / length) ** 2

    def _row(self, name: str, found: Contender, times: dict[str, Times]) -> Row:
        return Row.of(found, name, times[name], times[""], self.rate, self.report.compared_by)
