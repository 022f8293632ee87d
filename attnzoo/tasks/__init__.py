"""What a model is trained on: data, loss and metrics, one file for each task."""

import importlib

from attnzoo.errors import RecipeError
from attnzoo.options import nearest

CATALOGUE = {
    "needle": "attnzoo.tasks.needle:Needle",
    "language_model": "attnzoo.tasks.language_model:LanguageModel",
}


def find(name: str) -> type:
    """The task of this name, a class.

    Raises:
        RecipeError: no task has this name.
    """
    if name not in CATALOGUE:
        near = nearest(str(name), CATALOGUE)
        hint = f" Did you mean '{near}'?" if near else ""
        raise RecipeError(f"no task named {name!r}.{hint} There are: {', '.join(sorted(CATALOGUE))}")
    module, _, attribute = CATALOGUE[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
