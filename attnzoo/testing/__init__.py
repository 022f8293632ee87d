"""The contract that every variant keeps, for ours and for yours."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from attnzoo.errors import OptionError
from attnzoo.options import nearest
from attnzoo.registry import find
from attnzoo.testing.checks import CHECKS, PROMISES
from attnzoo.testing.foreign import Refused
from attnzoo.testing.maker import Maker, makers
from attnzoo.testing.probes import Check, NotApplicable, asked, run
from attnzoo.testing.report import Outcome, Report, Status
from attnzoo.testing.shrink import smallest

__all__ = [
    "CHECKS",
    "PROMISES",
    "Maker",
    "NotApplicable",
    "Outcome",
    "Report",
    "cases",
    "check_variant",
    "parametrize",
    "run",
    "run_checks",
]

Factory = Callable[..., nn.Module]
SHRINKING_S = 60.0  # spent on smallest inputs; a module that breaks everything has been told enough by then


def check_variant(variant: str | Factory, expected_failures: Mapping[str, str] | None = None, **options: Any) -> Report:
    """Runs the whole contract over a variant, in every causal setting it declares.

    Args:
        variant: a registered name, a class, or a function that returns an nn.Module, which need not be an Attention:
            `forward` as an Attention has it, or less, and a plain `expected` or projections of the usual names.
        expected_failures: names of checks that are known to fail, each with the reason; one that fails nowhere is a
            failure itself.
        options: run with these instead of each of the variant's `examples`.
    Raises:
        AssertionError: a promise is broken; the message is the report.
        UnknownVariantError: no variant has the name.
        OptionError: the variant can't be built with an example, or an expected failure is no check.
    """
    report = run_checks(variant, expected_failures, **options)
    if not report.passed:
        raise AssertionError(str(report))
    return report


def run_checks(variant: str | Factory, expected_failures: Mapping[str, str] | None = None, **options: Any) -> Report:
    """The same, and a broken promise is an outcome in the report, not an error."""
    excuses = _known(expected_failures)
    outcomes: list[Outcome] = []
    shown: set[str] = set()
    spent = 0.0
    for promise, check, make in cases(variant, options):
        outcome = _outcome(promise, check, make, excuses.get(check.__name__, ""))
        if outcome.status == "failed" and check.__name__ not in shown and spent < SHRINKING_S:
            started = time.perf_counter()
            shown.add(check.__name__)
            message, line = smallest(check, make)
            outcome = dataclasses.replace(outcome, detail=message or outcome.detail, smallest=line)
            spent += time.perf_counter() - started
        outcomes.append(outcome)
    return Report(variant if isinstance(variant, str) else variant.__qualname__, tuple(outcomes), excuses)


def parametrize(variant: str | Factory, expected_failures: Mapping[str, str] | None = None, **options: Any) -> Any:
    """Decorates a test function with an argument `check`, so that pytest runs it for each check in each setting.

    ```python
    @attnzoo.testing.parametrize("mine")
    def test_contract(check):
        check()
    ```

    Where a failure is expected, the case is a strict xfail.
    """
    import pytest

    excuses = _known(expected_failures)

    def case(check: Check, make: Maker) -> Callable[[], None]:
        def run_it() -> None:
            try:
                run(check, make)
            except NotApplicable as reason:
                pytest.skip(str(reason))

        return run_it

    name = variant if isinstance(variant, str) else variant.__name__
    parameters = []
    for _, check, make in cases(variant, options):
        reason = excuses.get(check.__name__)
        marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
        parameters.append(pytest.param(case(check, make), id=f"{name}-{check.__name__}-{make}", marks=marks))
    return pytest.mark.parametrize("check", parameters)


def cases(variant: str | Factory, options: Mapping[str, Any]) -> Iterator[tuple[str, Check, Maker]]:
    """Every promise, check and setting of a variant; `run(check, make)` asks one."""
    factory = find(variant) if isinstance(variant, str) else variant
    examples = [options] if options else getattr(factory, "examples", None) or [{}]
    for number, example in enumerate(examples):
        for make in makers(factory, example, first=number == 0):
            for promise in PROMISES:
                for check in promise.checks:
                    yield promise.title, check, make


def _outcome(promise: str, check: Check, make: Maker, excuse: str) -> Outcome:
    status: Status = "failed"
    try:
        run(check, make)
    except NotApplicable as reason:
        status, detail = "not applicable", str(reason)
    except (AssertionError, Refused) as error:
        detail = str(error)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
    else:
        status, detail = "held", ""
    return Outcome(promise, check.__name__, str(make), status, asked(check), detail, excuse=excuse)


def _known(expected_failures: Mapping[str, str] | None) -> dict[str, str]:
    for name in expected_failures or {}:
        if name not in CHECKS:
            near = nearest(name, CHECKS)
            raise OptionError(f"no check is named {name!r}" + (f"; did you mean {near!r}?" if near else ""))
    return dict(expected_failures or {})
