"""`attnzoo generate`: a language model writes on from prompts."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.cli.screen import Json, write_json
from attnzoo.errors import OptionError

if TYPE_CHECKING:
    from attnzoo.training.generation import Piece

Result = dict[str, Any]
LONG = 60
"""Characters of a prompt that are shown above its text."""


def generate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a language model's run, as in runs/kv_cached/1.")
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="What to write on from; an empty one is a line break. Can be repeated."),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A file that is a prompt, without its last line break; - is stdin."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="The most characters to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="Below 1 likely characters get likelier, above 1 less so; 0 takes the likeliest.")
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among this many likeliest characters.")] = None,
    top_p: Annotated[
        float, typer.Option(help="Draw among the fewest likeliest characters that together are this likely.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; a line break is $'\\n' in bash. Can be repeated."),
    ] = None,
    json: Json = False,
) -> None:
    """Write on from a prompt with a trained language model; prints what follows the prompt."""
    from attnzoo.training.generation import LanguageModelRun
    from attnzoo.training.sampling import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    prompts = [*(prompt or ()), *([] if prompt_file is None else [read(prompt_file)])]
    if not prompts:
        raise OptionError("no prompt: give --prompt TEXT or --prompt-file FILE")
    pieces = LanguageModelRun.load(run).generate(prompts, tokens=tokens, sampling=sampling, stop=stop or ())
    if json or len(prompts) > 1:
        gather(pieces, prompts, json)
    else:
        stream(pieces)


def read(file: str) -> str:
    """The text of a file, or of stdin, without its last line break."""
    if file == "-" and sys.stdin is None:
        raise OptionError("--prompt-file - reads stdin, and stdin is closed")
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"--prompt-file {file} is not text in UTF-8: see byte {error.start}") from None
    except OSError as error:
        raise OptionError(f"--prompt-file {file} can't be read: {error.strerror}") from None
    return text.removesuffix("\n")


def stream(pieces: Iterable["Piece"]) -> None:
    """Prints one text while it is written."""
    try:
        for piece in pieces:
            print(piece.text, end="", flush=True)
    finally:
        print(flush=True)


def gather(pieces: Iterable["Piece"], prompts: list[str], json: bool) -> None:
    """Prints each text when it is finished, or all as JSON; those that were interrupted too."""
    results: list[Result] = [
        {"prompt": prompt, "text": "", "tokens": 0, "stopped": "interrupted"} for prompt in prompts
    ]
    try:
        for piece in pieces:
            result = results[piece.prompt]
            result["text"] += piece.text
            result["tokens"] += 1
            if piece.stopped:
                result["stopped"] = piece.stopped
                if not json:
                    write_block(piece.prompt + 1, result)
    finally:
        if json:
            write_json(results)
        else:
            for number, result in enumerate(results, start=1):
                if result["tokens"] and result["stopped"] == "interrupted":
                    write_block(number, result)


def write_block(number: int, result: Result) -> None:
    """Prints a text below its prompt, of which the end has to do where it is long."""
    prompt = result["prompt"] if len(result["prompt"]) <= LONG else f"...{result['prompt'][-LONG:]}"
    print(f"--- {number}: {prompt!r}\n{result['text']}", flush=True)
