"""How large the inputs of the checks are: pairwise distinct, so that no swapped axis passes."""

import contextlib
import dataclasses
from collections.abc import Iterator

CLOSE = 1e-9


@dataclasses.dataclass
class Size:
    """The sizes that checks build with; `context` is the length of another sequence that keys come from, `close` how
    far off a float64 result may be that only took another order of operations."""

    batch: int = 3
    length: int = 11
    context: int = 13
    d_model: int = 24
    heads: int = 6  # with num_kv_heads = 2, tiling and repeating heads differ
    close: float = CLOSE


size = Size()


@contextlib.contextmanager
def sized(**smaller: float) -> Iterator[None]:
    """Other sizes for a while."""
    before = dataclasses.asdict(size)
    vars(size).update(smaller)
    try:
        yield
    finally:
        vars(size).update(before)
