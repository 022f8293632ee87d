"""Writes docs/variants.md from the registry: `make docs`."""

from pathlib import Path

import attnzoo
from attnzoo.registry import CATALOGUE

EVERYWHERE = ("causal", "dropout", "bias", "positions")


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
        lines += [f"## {name}", "", one.text.partition("Args:")[0].strip(), ""]
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


if __name__ == "__main__":
    (Path(__file__).parent / "variants.md").write_text(variants_page())
