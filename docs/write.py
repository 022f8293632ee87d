"""Writes docs/variants.md from the registry and docs/contract.md from the checks: `make docs`."""

import re
from pathlib import Path

import attnzoo
from attnzoo.registry import CATALOGUE, WAIVABLE
from attnzoo.testing import PROMISES
from attnzoo.testing.probes import asked

EVERYWHERE = ("causal", "dropout", "bias", "positions")

CONTRACT = """\
# The contract

What every variant promises, and the checks that hold it to that. This page is written from the checks by `make docs`.

```
attnzoo check gqa                              # a registered variant
attnzoo check my_package.module:MyAttention    # or anybody's module
attnzoo check my_file.py:MyAttention --json    # in a file, as data
```

```python
attnzoo.testing.check_variant("gqa")  # a report, or an AssertionError


@attnzoo.testing.parametrize("gqa")  # a pytest case for each check, example and causal setting
def test_gqa(check):
    check()
```

What is right comes from two places: the variant's own definition `expected`, and attention written anew from what
`visible` shows, which shares no kernel, no mask handling and no positions with what it judges. Numbers are compared
in float64, unless the check is about another dtype. All sizes of an input differ from each other, so that no swapped
axis passes: 3 sequences of 11 tokens, 13 tokens of context, 24 features, 6 heads. Where a check fails, it is asked
again of ever smaller inputs, and the report shows the last call at the smallest sizes that still fail, as a line of
Python.

A variant may declare, in its attribute `without`, that it does without: {waivable}. What it declares is verified both
ways: a check fails where a variant refuses what it supports, and where it takes what it does without. Nothing else
can be waived, so rows without anything to see, padding, precision and state are the same for all.

## A module that is no attnzoo variant

Any `nn.Module` can be checked whose constructor takes `d_model` and `num_heads` (and, if it has them, `causal`,
`dropout` and others), and whose `forward(x, context=None, *, values, key_mask, mask, documents, marked, cache)` takes
these arguments or some of them. What it supports is read from that signature, less its own `without`. It says what is
right by a method `expected(x, ...)` that computes plainly what `forward` must give, or by projections named `q_proj
k_proj v_proj out_proj` (or `qkv_proj out_proj`), and by an attribute `pattern` where its queries see less than
everything. It may also have `examples` of small options, `new_cache(batch_size, max_length)` whose result counts its
tokens in `length`, `close` (how near to float64 it computes, where that is not 1e-9) and `backward = False` where it
has none. Any error it raises counts as the one that the contract asks for, and what it gives for hidden queries is not
looked at.

## The promises

Axes are b sequences, q queries, k keys, h heads, e features. True in a mask means "may look".
"""


def contract_page() -> str:
    """The page: each promise in words, then its checks."""
    lines = [CONTRACT.format(waivable=", ".join(f"`{feature}`" for feature in WAIVABLE))]
    for promise in PROMISES:
        lines += [f"### {promise.title}", "", promise.text, "", "| check | holds that |", "|---|---|"]
        for check in promise.checks:
            text = asked(check).replace("|", r"\|")
            lines.append(f"| `{check.__name__}` | {text} |")
        lines.append("")
    return "\n".join(lines)


def variants_page() -> str:
    """The page: a table of all variants, then each with its options, source, cost and pattern."""
    told = {name: attnzoo.describe(name) for name in sorted(CATALOGUE)}
    lines = [
        "# The variants",
        "",
        "Written from the docstrings by `make docs`.",
        "Every variant also takes `d_model num_heads causal dropout bias positions`.",
        "",
        "| variant | computes | supports |",
        "|---|---|---|",
    ]
    for name, one in told.items():
        summary = one.summary.replace("|", r"\|")  # or it would end the cell
        lines.append(f"| [`{name}`](#{name}) | {summary} | {', '.join(one.supports)} |")
    lines.append("")
    for name, one in told.items():
        own = [str(option) for option in one.options if option.name not in ("d_model", "num_heads", *EVERYWHERE)]
        lines += [f"## {name}", "", re.split(r"\n\s*(?=Args:|Raises:|Source:|Cost:)", one.text)[0].strip(), ""]
        lines += ["```", *own, "```", ""] if own else []
        lines += [
            f"Source: {one.source}",
            "",
            f"Cost: {one.cost}",
            "",
            f"Does without: {', '.join(one.waives) or 'nothing'}.",
            "",
        ]
    return "\n".join(lines)


PAGES = {"variants.md": variants_page, "contract.md": contract_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page())
