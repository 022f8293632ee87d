"""Which check catches which mutant: `make mutants`."""

import logging
import sys
from collections.abc import Collection
from unittest import mock

import torch

from attnzoo import testing
from attnzoo.testing import CHECKS
from attnzoo.testing.checks import Promise
from tests.mutants import broken, changes
from tests.mutants.mutant import Mutant

Caught = dict[str, set[str]]  # for each mutant the checks that fail
TRACING = {"check_compiles", "check_exports", "check_samples_have_gradients_of_their_own"}


MUTANTS = {mutant.name: mutant for mutant in (*broken.BROKEN, *changes.CHANGES)}


def only(*checks: str):
    """A contract of these checks and no others."""
    promise = Promise("these", "", tuple(CHECKS[check] for check in checks))
    return mock.patch.object(testing, "PROMISES", (promise,))


def failing(mutant: Mutant, checks: Collection[str] = tuple(CHECKS)) -> set[str]:
    """The checks, of those named, that fail for a mutant in any setting."""
    broken.TABLES.clear()
    with only(*checks), mutant.made():
        failed: set[str] = set()
        for _, check, make in testing.cases(mutant.variant, mutant.options):
            if check.__name__ not in failed:
                try:
                    testing.run(check, make)
                except testing.NotApplicable:
                    pass
                except Exception:
                    failed.add(check.__name__)
        return failed


def alone(failed: set[str]) -> str | None:
    """The one check that catches a mutant. Where torch traces, faults that ask for numbers can't be held, so that the
    three checks of that catch many by the way: beside another they don't count."""
    others = failed - TRACING or failed
    return min(others) if len(others) == 1 else None


def table(caught: Caught) -> str:
    """A row for each mutant and a column for each check: `#` where it catches, `1` where it does so alone."""
    names = list(CHECKS)
    wide = max(map(len, caught))
    lines = [f"{number:3}  {name.removeprefix('check_')}" for number, name in enumerate(names)]
    for digit in range(2):
        lines.append(" " * wide + "  " + "".join(f"{number:2}"[digit] for number in range(len(names))))
    for mutant, failed in caught.items():
        one = alone(failed)
        marks = ("1" if name == one else "#" if name in failed else "." for name in names)
        lines.append(f"{mutant:{wide}}  " + "".join(marks))
    return "\n".join(lines)


def main() -> int:
    """Prints the matrix and its holes: mutants that nothing catches, and checks that never catch alone."""
    logging.disable()  # the compiler's
    torch.set_num_threads(1)
    caught: Caught = {}
    for name, mutant in MUTANTS.items():
        caught[name] = failing(mutant)
        print(f"{len(caught[name]):3} checks catch {name}", file=sys.stderr, flush=True)
    print(table(caught))
    elsewhere = [name for name, mutant in MUTANTS.items() if mutant.witness]
    missed = [name for name, failed in caught.items() if not failed and name not in elsewhere]
    needed = {alone(failed) for failed in caught.values()}
    idle = [check for check in CHECKS if check not in needed]
    print(
        f"\n{len(caught)} mutants\ncaught by the contract: {sum(map(bool, caught.values()))}"
        f"\nby a named test: {', '.join(elsewhere)}\nby nothing: {', '.join(missed) or 'none'}"
        f"\nchecks that never catch alone: {', '.join(idle) or 'none'}"
    )
    return bool(missed or idle)


if __name__ == "__main__":
    sys.exit(main())
