"""A typed signature read as a schema: what a factory accepts, and whether a call fits."""

import copy
import dataclasses
import difflib
import functools
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping

from attnzoo.errors import OptionError

PLAIN = (bool, int, float, str, type(None))


class Required:
    """Stands where an option has no default."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = Required()


@dataclasses.dataclass(frozen=True)
class Option:
    """One parameter of a factory: its name, type hint and default."""

    name: str
    kind: typing.Any
    default: object = REQUIRED

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def type(self) -> str:
        """The type hint as a reader would write it."""
        return " | ".join(_type_name(kind) for kind in _members(self.kind))

    def __str__(self) -> str:
        return f"{self.name}: {self.type}" + ("" if self.required else f" = {self.default!r}")


def options(factory: Callable) -> dict[str, Option]:
    """Reads the options of a class or function from its typed signature.

    Raises:
        OptionError: the signature has *args or **kwargs, where misspelt options would vanish, or a parameter
            without a type.
    """
    hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    found = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise OptionError(f"{_label(factory)} takes {parameter}: list every option by name instead")
        if name not in hints:
            raise OptionError(f"{_label(factory)} has no type for '{name}': write {name}: int, say")
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        found[name] = Option(name, hints[name], default)
    return found


def check(factory: Callable, given: Mapping[str, object], label: str = "") -> None:
    """Refuses a call that does not fit the factory's signature.

    Raises:
        OptionError: an option is unknown, missing or of the wrong type; one message names all of them.
    """
    label = label or _label(factory)
    known = options(factory)
    problems = [unknown(name, known) for name in given if name not in known]
    problems += [
        f"'{name}' wants {known[name].type}, not {value!r}"
        for name, value in given.items()
        if name in known and not _fits(value, known[name].kind)
    ]
    problems += [f"'{name}' is missing" for name, option in known.items() if option.required and name not in given]
    if problems:
        raise OptionError(f"{label}: {'; '.join(problems)}. It accepts {signature(known.values())}")


def signature(accepted: Iterable[Option]) -> str:
    """The options as one line in parentheses."""
    return "(" + ", ".join(map(str, accepted)) + ")"


def unknown(name: str, known: Iterable[str]) -> str:
    """What to say about a name nobody knows, with the nearest one that somebody does."""
    near = nearest(name, known)
    return f"unknown option '{name}'" + (f" (did you mean '{near}'?)" if near else "")


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The known word that a misspelt one most likely means."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1)), None)


def meanings(text: str) -> dict[str, str]:
    """What a docstring says about each argument."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)+)", text, re.MULTILINE)
    entries = re.split(r"^ {4}(?=\w+:)", section.group(1), flags=re.MULTILINE) if section else []
    pairs = (entry.partition(":") for entry in entries if ":" in entry)
    return {option: " ".join(meaning.split()) for option, _, meaning in pairs}


def recipe_schema(factory: Callable, taken: Collection[str] = ()) -> type:
    """A dataclass to check a recipe section against: the factory's options less those taken elsewhere.

    An option that only an object of Python can fill keeps its default and is left out.

    Raises:
        OptionError: such an option has no default.
    """
    fields = []
    for option in options(factory).values():
        if option.name in taken:
            continue
        plain = tuple(member for member in _members(option.kind) if _is_plain(member))
        if set(plain) <= {type(None)}:
            if option.required:
                raise OptionError(f"{_label(factory)} needs '{option}', which no recipe can hold")
            continue
        kind: typing.Any = functools.reduce(operator.or_, plain)
        default = "???" if option.required else option.default  # OmegaConf's own mark for a value that must be given
        fields.append((option.name, kind, dataclasses.field(default_factory=functools.partial(copy.copy, default))))
    return dataclasses.make_dataclass(_label(factory), fields)


def whole(name: str, value: object, least: int = 1, most: int = 2**31 - 1) -> int:
    """Checks a count: an int, not a bool, from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if value > most:
        raise OptionError(f"{name} must be at most {most}, not {value}")
    return value


def share(name: str, value: object) -> float:
    """Checks a share: a number from 0 up to, but not including, 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise OptionError(f"{name} must be a number in [0, 1), not {value!r}")
    return float(value)


def choice(name: str, value: object, among: Collection[str]) -> str:
    """Checks a word against the words that mean something."""
    if value not in among:
        near = nearest(str(value), among)
        hint = f" (did you mean '{near}'?)" if near else ""
        raise OptionError(f"{name} must be one of {', '.join(map(repr, among))}, not {value!r}{hint}")
    return str(value)


def _label(factory: Callable) -> str:
    return getattr(factory, "__name__", repr(factory))


def _members(kind: typing.Any) -> tuple:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _is_plain(kind: typing.Any) -> bool:
    return kind in PLAIN or typing.get_origin(kind) in (typing.Literal, list, tuple, dict)


def _type_name(kind: typing.Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(map(repr, typing.get_args(kind)))
    if (origin := typing.get_origin(kind)) in (list, tuple, dict):
        return f"{origin.__name__}[{', '.join(map(_type_name, typing.get_args(kind)))}]"
    if origin is not None:
        return str(kind).replace("typing.", "")
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))


def _fits(value: object, kind: typing.Any) -> bool:
    """Whether a value is of a type; a bool is no number, an int is a fine float."""
    origin = typing.get_origin(kind)
    if kind is typing.Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in typing.get_args(kind))
    if origin is typing.Literal:
        return value in typing.get_args(kind) and not isinstance(value, bool)
    if isinstance(value, bool) and kind is not bool:
        return False
    if kind is float:
        return isinstance(value, int | float) and -math.inf < value < math.inf
    return isinstance(value, origin or kind)
