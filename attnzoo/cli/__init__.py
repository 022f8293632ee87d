"""The command line: `attnzoo VERB`, one file per verb."""

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import attnzoo
from attnzoo.cli import bench, check, evaluate, export, generate, list, new, recipes, show, train, validate
from attnzoo.errors import AttnzooError, TrainingError

UsageError: Any = typer.BadParameter.__base__  # what typer raises for any wrong use, and does not export

app = typer.Typer(
    name="attnzoo",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help, in a quarter of the time
)
VERBS = (
    train.train, evaluate.evaluate, generate.generate, export.export, list.list_, show.show, check.check, bench.bench,
    validate.validate, new.new,
)  # fmt: skip
for verb in VERBS:
    app.command(name=verb.__name__.rstrip("_"), no_args_is_help=verb not in (list.list_, bench.bench))(verb)
app.add_typer(recipes.app, name="recipes")


@app.callback(invoke_without_command=True)
def attnzoo_(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; goes anywhere.")] = False,
) -> None:
    """A zoo of attention variants: list them, check them, measure them, train them."""
    if version:
        print(attnzoo.__version__)


def main() -> None:
    """The `attnzoo` command."""
    # Torch's threads spin while they wait, which makes a step a hundred times slower where something else runs too.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command and gives its exit status: 0 done, 1 the work failed, 2 wrong input, 130 interrupted."""
    debug = "--debug" in arguments
    command = typer.main.get_command(app)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        try:
            with command.make_context("attnzoo", [word for word in arguments if word != "--debug"]) as context:
                command.invoke(context)
            if sys.stdout is not None:  # the user may have closed it
                sys.stdout.flush()
        except typer.Exit as done:
            return done.exit_code
        except UsageError as error:
            error.show()
            return 2
        except BrokenPipeError:  # the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except KeyboardInterrupt:
            print("attnzoo: interrupted", file=sys.stderr)
            return 130
        except TrainingError as error:
            return failed(str(error), 1, debug)
        except AttnzooError as error:
            return failed(str(error), 2, debug)
        except Exception as error:
            hint = "" if debug else " (--debug shows where)"
            return failed(f"{type(error).__name__}: {error}{hint}", 1, debug)
    return 0


def failed(message: str, status: int, debug: bool) -> int:
    """Says what went wrong, with the traceback only if it was asked for."""
    if debug:
        traceback.print_exc()
    print(f"attnzoo: {message}", file=sys.stderr)
    return status
