"""`attnzoo show`: one variant, described and drawn."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.cli.screen import Json, folded, write_json, write_table
from attnzoo.options import meanings

if TYPE_CHECKING:
    from attnzoo.registry import Description

TOKENS = 24
"""Rows and columns of the drawing."""


def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A variant; with --shape options may follow, as in local:radius=256.")
    ],
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="B,N,H,D", help="Say which kernel computes B sequences, N tokens, H heads, D features each."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show one variant: its options, what it supports, its pattern; or the kernel for a shape, and why."""
    if shape is not None:
        show_kernels(name, shape, json)
        return
    from attnzoo import registry

    about = registry.describe(name)
    if json:
        write_json(as_json(about))
        return
    print(f"{about.name}: {about.summary}\n\noptions")
    meant = meanings(about.text)
    for option in about.options:
        print(f"  {option}")
        if option.name in meant:
            print(folded(meant[option.name], indent=6))
    print()
    facts = {"source": about.source, "cost": about.cost}
    facts |= {"supports": ", ".join(about.supports), "does without": ", ".join(about.waives)}
    facts["dtypes"] = ", ".join(about.dtypes)
    for title, fact in facts.items():
        if fact:
            print(folded(f"{title}: {fact}"))
    print(f"\n{drawing(name)}")


def show_kernels(subject: str, shape: str, json: bool) -> None:
    """Says which kernel a variant takes for a shape."""
    from attnzoo.bench.kernels import kernels

    found = kernels(subject, shape)
    if json:
        write_json({mode: [choice._asdict() for choice in choices] for mode, choices in found.items()})
    else:
        write_table({mode: "; ".join(f"{kernel}: {why}" for kernel, why in choices) for mode, choices in found.items()})


def as_json(about: "Description") -> dict[str, Any]:
    """A description in plain types."""
    meant = meanings(about.text)
    return {
        "name": about.name,
        "summary": about.summary,
        "options": [
            {
                "name": option.name,
                "type": option.type,
                "required": option.required,
                "default": None if option.required else option.default,
                "meaning": meant.get(option.name, ""),
            }
            for option in about.options
        ],
        "source": about.source,
        "cost": about.cost,
        "supports": list(about.supports),
        "waives": list(about.waives),
        "dtypes": list(about.dtypes),
    }


def drawing(name: str) -> str:
    """The pattern as a formula and as text, with small options, because defaults are made for long sequences."""
    from attnzoo import registry

    small: Mapping[str, Any] = next(iter(getattr(registry.find(name), "examples", ())), {})
    attention = registry.build(name, **{"d_model": 8, "num_heads": 2, **small})
    options = ", ".join(f"{option}={value!r}" for option, value in small.items())
    heading = f"{attention.pattern}" + (f"  ({options})" if options else "")
    return f"{heading}\nqueries down, keys across, # = visible\n{attention.draw(TOKENS)}"
