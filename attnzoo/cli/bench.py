"""`attnzoo bench`: time, memory and work against length, beside peers."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.cli.screen import Json, write_json
from attnzoo.errors import OptionError


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Variants, options after a colon: local:radius=256,causal=true."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens.")] = "512,1024,2048,4096",
    mode: Annotated[str, typer.Option(help="Of forward, both (with backward), decode.")] = "forward,both",
    against: Annotated[
        str,
        typer.Option(
            help="Of dense, sdpa, sdpa-repeat, flex, nn-mha, hf-longformer, hf-bigbird, local-attention, "
            "x-transformers; '' for none."
        ),
    ] = "dense",
    level: Annotated[str, typer.Option(help="kernel (q, k and v) or module (with projections).")] = "kernel",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Features a head.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of float64, float32, bfloat16, float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves it to torch.")] = 0,
    rounds: Annotated[int, typer.Option(help="Samples of each, in turns.")] = 7,
    budget: Annotated[float, typer.Option(help="Seconds for everything: first rounds are dropped.")] = 120.0,
    unequal: Annotated[bool, typer.Option("--unequal", help="Time peers whose outputs or pairs differ, too.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for bench.csv, bench.json and bench.png.")] = None,
    json: Json = False,
) -> None:
    """Measure variants: time, memory and work against length, beside peers that do the same."""
    from attnzoo.bench import bench as benchmark
    from attnzoo.bench import show
    from attnzoo.bench.progress import Bar, Progress
    from attnzoo.bench.settings import Settings

    settings = Settings(
        lengths=tuple(listed("lengths", lengths, int)),
        modes=tuple(listed("mode", mode)),
        level=level,  # type: ignore[arg-type]
        batch=batch,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        threads=threads,
        against=tuple(listed("against", against)),
        rounds=rounds,
        budget=budget,
        unequal=unequal,
    )
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"--out {out} is no folder to write to: {error.strerror}") from None
    progress = Bar() if sys.stderr.isatty() and not json else Progress()
    report = benchmark.run(names or everything(), settings, progress)
    if out is not None:
        show.write(report, out)
    if json:
        write_json(report.as_json())
    else:
        print(show.table(report))
    if report.refused:
        print("attnzoo: some do not do equal work, and were not timed (--unequal times them)", file=sys.stderr)
        raise typer.Exit(1)


def listed(name: str, text: str, kind: Callable[[str], Any] = str) -> list[Any]:
    """The parts of a list with commas.

    Raises:
        OptionError: one is of another kind.
    """
    try:
        return list(dict.fromkeys(kind(part.strip()) for part in text.split(",") if part.strip()))
    except ValueError:
        raise OptionError(f"{name} must be whole numbers with commas between them, not {text!r}") from None


def everything() -> list[str]:
    """The variants that need no options of their own."""
    from attnzoo import registry

    needed = {
        name: [o.name for o in registry.describe(name).options if o.required and o.name not in ("d_model", "num_heads")]
        for name in registry.list_variants()
    }
    others = [
        f"{name}:{','.join(f'{option}=...' for option in options)}" for name, options in needed.items() if options
    ]
    if others:
        print(f"attnzoo: left out, as they need options: {' '.join(others)}", file=sys.stderr)
    return [name for name, options in needed.items() if not options]
