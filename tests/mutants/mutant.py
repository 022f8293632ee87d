"""What a mutant is: a variant, a way to make it wrong, and what has to notice."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    """A variant that is wrong while it is `made`.

    `caught` names checks that must catch it. Where the contract can't, because the pattern itself is wrong and with it
    all that is right, `witness` is a test that does.
    """

    name: str
    variant: Any
    options: dict[str, Any]
    made: Callable[[], contextlib.AbstractContextManager[Any]]
    caught: tuple[str, ...] = ()
    witness: Callable[[], object] | None = None
