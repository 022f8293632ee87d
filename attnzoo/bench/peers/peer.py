"""What all peers share."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from attnzoo.attention import Attention
from attnzoo.bench.problem import Problem


class Unfit(Exception):
    """A peer can't do what is asked of it, and the message says why."""


class Peer:
    """A kernel of somebody else, made for one problem; its call is what is measured.

    Args:
        attn: the variant that it stands beside, whose pattern and heads it takes over.
    Raises:
        Unfit: it has no such pattern, heads, length or mode.
    """

    label = ""
    layout: ClassVar[str] = "heads"  # of q, k, v and out: "heads" is [b, h, t, d], "tokens" is [b, t, h d]
    modes: ClassVar[tuple[str, ...]] = ("forward", "both", "decode")
    grouped: ClassVar[bool] = True  # does it take fewer key-value heads?
    whole_module: ClassVar[bool] = False  # does it project by itself, from tokens to tokens?
    pairs: int | None = None  # visible pairs of one sequence, where they are not the subject's
    compiles: ClassVar[bool] = False  # does its first call compile, so that its memory says nothing?
    baseline: ClassVar[bool] = False  # is it there to be beaten by doing less work?

    def __init__(self, attn: Attention, problem: Problem) -> None:
        if problem.mode not in self.modes:
            raise Unfit(f"has no {'backward' if problem.mode == 'both' else problem.mode}")
        if attn.num_kv_heads != attn.num_heads and not self.grouped:
            raise Unfit("knows no key-value heads that query heads share")
        if self.whole_module and problem.level != "module":
            raise Unfit("projects by itself: use --level module")
        self.prepare(attn, problem)

    def prepare(self, attn: Attention, problem: Problem) -> None:
        raise NotImplementedError

    def __call__(self, *inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def parameters(self) -> Sequence[Tensor]:
        """Its own weights, where it projects by itself."""
        return ()

    def scores(self) -> Tensor | None:
        """What it adds to the scores, to be checked by, where it sees other pairs than the subject: [h, q, k]."""
        return None
