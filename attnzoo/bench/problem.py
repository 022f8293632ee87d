"""What is measured: a variant with its options, at one length, in one mode."""

import dataclasses
import re
from typing import Any, Literal

import torch
import yaml

from attnzoo import registry
from attnzoo.attention import Attention
from attnzoo.errors import OptionError
from attnzoo.options import unknown

Mode = Literal["forward", "both", "decode"]
Level = Literal["kernel", "module"]
MODES, LEVELS = ("forward", "both", "decode"), ("kernel", "module")
TAKEN = ("d_model", "num_heads")  # --heads and --head-dim say them for all


@dataclasses.dataclass(frozen=True)
class Problem:
    """One measurement, in plain types, so that a fresh process can be told.

    Args:
        subject: a variant and its options, as in `local:radius=256`.
        mode: "forward", "both" (and backward), or "decode" (one query against a cache of `length` tokens).
        level: "kernel" is attention of q, k and v [b, h, t, d] alone, "module" adds the projections of tokens.
    """

    subject: str
    mode: Mode
    length: int
    level: Level = "kernel"
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def queries(self) -> int:
        return 1 if self.mode == "decode" else self.length

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def build(self) -> Attention:
        """The variant, with the same weights at every call; causal where it decodes.

        Raises:
            UnknownVariantError: no variant has the name.
            OptionError: it refuses its options, or they make its output random.
        """
        name, options = read(self.subject)
        if self.mode == "decode":
            options.setdefault("causal", True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            attn = registry.build(name, d_model=self.heads * self.head_dim, num_heads=self.heads, **options)
        attn.to(self.device, self.torch_dtype).train(self.mode == "both")
        if attn.dropout or attn.redraws:
            raise OptionError(
                f"{self.subject}: what is drawn anew at each call can't be compared: leave dropout and redraw out"
            )
        return attn


def read(subject: str) -> tuple[str, dict[str, Any]]:
    """The name and the options that `local:radius=256,block=128` stands for; values as in a recipe.

    Raises:
        OptionError: it is not written like that, or sets what all share.

    >>> read("sparse:pattern=Local(1, block=64) | Global(4),causal=true")
    ('sparse', {'pattern': 'Local(1, block=64) | Global(4)', 'causal': True})
    """
    name, _, listed = subject.partition(":")
    options: dict[str, Any] = {}
    for given in re.split(r",(?![^(]*\))", listed) if listed else ():  # a comma in parentheses belongs to a pattern
        option, equals, value = given.partition("=")
        if not equals or not option.strip().isidentifier():
            raise OptionError(f"{subject}: write options as name:option=value,option=value, not {given!r}")
        if option.strip() in TAKEN:
            raise OptionError(f"{subject}: {unknown(option.strip(), ())}; --heads and --head-dim say it for all")
        try:
            options[option.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            options[option.strip()] = value
    return name.strip(), options
