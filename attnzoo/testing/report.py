"""What came out of the contract: held, failed or not applicable, check by check and setting by setting."""

import dataclasses
import textwrap
from typing import Literal

Status = Literal["held", "failed", "not applicable"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One check of one promise, in one setting.

    `asked` is what the check asks for. `detail` says what was done, what came out and what was right, or why the check
    does not apply. `smallest` is the smallest call that shows a failure, as a line of Python. `excuse` is the reason
    for which a failure was expected.
    """

    promise: str
    check: str
    setting: str
    status: Status
    asked: str
    detail: str = ""
    smallest: str = ""
    excuse: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """All outcomes of a variant; as text, a line for each promise and what failed below it."""

    name: str
    outcomes: tuple[Outcome, ...]
    excuses: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The failures that nobody expected."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == "failed" and not outcome.excuse)

    @property
    def unexpectedly_held(self) -> tuple[str, ...]:
        """The checks that were expected to fail and failed nowhere."""
        failed = {outcome.check for outcome in self.outcomes if outcome.status == "failed"}
        return tuple(check for check in self.excuses if check not in failed)

    @property
    def passed(self) -> bool:
        """Whether everything is as it should be."""
        return not self.failed and not self.unexpectedly_held

    def status_of(self, promise: str) -> Status:
        """One word for a promise over all its checks and settings."""
        found = {outcome.status for outcome in self.outcomes if outcome.promise == promise and not outcome.excuse}
        order: tuple[Status, ...] = ("failed", "held", "not applicable")
        return next((status for status in order if status in found), "not applicable")

    def __str__(self) -> str:
        promises = list(dict.fromkeys(outcome.promise for outcome in self.outcomes))
        width = max(map(len, promises), default=0)
        lines = [f"{self.name}: {'the contract holds' if self.passed else 'THE CONTRACT IS BROKEN'}"]
        for promise in promises:
            lines.append(f"  {promise:{width}}  {self.status_of(promise)}{self._reason(promise)}")
            lines += self._failures(promise)
        lines += [
            f"  {check} was expected to fail ({self.excuses[check]}), and holds" for check in self.unexpectedly_held
        ]
        return "\n".join(lines)

    def _reason(self, promise: str) -> str:
        """Why a promise does not apply, where it doesn't."""
        reasons = {outcome.detail for outcome in self.outcomes if outcome.promise == promise}
        return f": {'; '.join(sorted(reasons))}" if self.status_of(promise) == "not applicable" else ""

    def _failures(self, promise: str) -> list[str]:
        """Each failed check of a promise in its first setting: what it asks for, what was found, and a call to try."""
        found: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            if outcome.promise == promise and outcome.status == "failed":
                found.setdefault(outcome.check, []).append(outcome)
        lines = []
        for check, (first, *others) in found.items():
            more = f", and in {len(others)} more" if others else ""
            expected = f", as expected: {first.excuse}" if first.excuse else ""
            lines.append(f"    {check} ({first.setting}{more}){expected}")
            for title, text in (("asked", first.asked), ("found", first.detail)):
                lines += textwrap.wrap(text, 110, initial_indent=f"        {title}: ", subsequent_indent=" " * 15)
            lines += [f"        try:   {first.smallest}"] if first.smallest else []
        return lines
