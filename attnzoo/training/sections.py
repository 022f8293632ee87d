"""Sections checked against the signatures of what they call."""

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException, ValidationError

from attnzoo import registry, tasks
from attnzoo.errors import AttnzooError
from attnzoo.options import Option, nearest, recipe_schema, signature
from attnzoo.training.marked_yaml import Marked, Place, Problem
from attnzoo.training.merging import SECTIONS, Merged, Section

NAMED = {"task": "needle", "attention": "gqa"}
"""The sections with a name, and an example of it."""

TAKEN = {
    "task": {"seed": "comes from train.seed"},
    "attention": {
        "d_model": "comes from model.d_model",
        "causal": "comes from the task",
        "positions": "comes from model.positions",
    },
    "model": {
        **dict.fromkeys(("vocabulary", "length", "classes", "causal", "pooling"), "comes from the task"),
        "attention": "is a section of its own",
    },
    "train": {},
}
REFERENCE = re.compile(r"(?<!\\)\$\{\.*\w+(\.\w+)*\}")
PRECISIONS = {
    **dict.fromkeys(("32", "fp32"), "32-true"),
    **dict.fromkeys(("16", "fp16", "16-true"), "16-mixed"),
    "bf16": "bf16-mixed",
}
"""What to take instead of other words for a precision; half precision throughout would train to NaN."""
YES, NO = ("true", "yes", "on"), ("false", "no", "off")

Plain = dict[str, dict[str, typing.Any]]


def factory(section: str, name: str = "") -> Callable[..., typing.Any]:
    """What a section calls: the task or variant of its name, the model, or the training settings."""
    if section == "task":
        return tasks.find(name)
    if section == "attention":
        return registry.find(name)
    if section == "model":
        from attnzoo.training.model import Transformer  # here, because it imports torch

        return Transformer
    from attnzoo.training.settings import TrainSettings

    return TrainSettings


def accepted(schema: type) -> dict[str, Option]:
    """The options of a section's schema."""
    found = {}
    for field in dataclasses.fields(schema):
        default = field.default_factory() if callable(field.default_factory) else field.default
        found[field.name] = Option(field.name, field.type, *(() if default == "???" else (default,)))
    return found


class Checker:
    """Holds sections against signatures and collects what does not fit."""

    def __init__(self, merged: Merged, nowhere: Place) -> None:
        self.sections = {name: merged.sections.get(name) or Section(nowhere) for name in SECTIONS}
        self.complete = merged.complete
        self.problems: list[Problem] = []

    def schemas(self) -> dict[str, type]:
        """The dataclass of each section's values, less the sections that call something unknown."""
        found = {}
        for section in SECTIONS:
            given = self.sections[section].given.get("name")
            if section in NAMED and (given is None or given.value is None):
                self.missing(section, "name", f", as in {section}: {{name: {NAMED[section]}}}")
                continue
            try:
                name = (given.text or str(given)) if given and section in NAMED else ""
                schema = recipe_schema(factory(section, name), TAKEN[section])
                OmegaConf.structured(schema)
                own = [("name", str, name)] if section in NAMED else []
                found[section] = dataclasses.make_dataclass(section, own, bases=(schema,))
            except AttnzooError as error:
                self.problem(section, "name", str(error))
            except OmegaConfBaseException as error:
                self.problem(section, "name", f"can't be used in a recipe: {_first_line(error)}")
        return found

    def plain(self) -> Plain:
        """Every value in plain Python types, resolved, defaults included; without meaning if there are problems."""
        schemas = self.schemas()
        config = OmegaConf.create({section: OmegaConf.structured(schema) for section, schema in schemas.items()})
        known = {section: accepted(schema) for section, schema in schemas.items()}
        for section, options in known.items():
            self.fill(section, options, config)
        if len(known) < len(SECTIONS):
            return {}  # what refers to a section that nobody knows can't be judged
        return {section: dict(self.resolved(section, options, config)) for section, options in known.items()}

    def fill(self, section: str, options: Mapping[str, Option], config: DictConfig) -> None:
        given = self.sections[section].given
        caller = config[section].name if section in NAMED else section
        accepts = f"; {caller} accepts {signature(option for key, option in options.items() if key != 'name')}"
        for key, marked in given.items():
            if key in TAKEN[section]:
                self.problem(section, key, f"can't be set here: it {TAKEN[section][key]}")
            elif key not in options:
                near = nearest(key, options)
                self.problem(section, key, "unknown key" + (f" (did you mean '{near}'?)" if near else "") + accepts)
            elif wrong := key != "name" and self.put(config, f"{section}.{key}", marked, options[key]):
                self.problem(section, key, wrong)
        for key, option in options.items():
            if option.required and key not in given:
                self.missing(section, key, accepts)

    def put(self, config: DictConfig, key: str, marked: Marked, option: Option) -> str | None:
        """Sets one value, and says what is wrong with it, if anything."""
        try:
            value = _meant(marked, option.kind)
            for word in _leaves(value):
                if isinstance(word, str) and "${" in REFERENCE.sub("", word):
                    return f"{word!r} is not understood: ${{...}} names another value, as in ${{model.d_model}}"
                if isinstance(word, int) and abs(word) >= 2**63:
                    return f"must be below 2**63, not {marked}"
            OmegaConf.update(config, key, value, merge=False)
        except (OmegaConfBaseException, ValueError, TypeError, OverflowError):
            return _wants(option, marked)
        return None

    def resolved(self, section: str, options: Mapping[str, Option], config: DictConfig) -> Iterator[tuple[str, object]]:
        for key in sorted(options, key=lambda key: key != "name"):
            marked = self.sections[section].given.get(key) or Marked(None, self.sections[section].place)
            try:
                value = config[section][key]
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
                if any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in _leaves(value)):
                    self.problem(section, key, f"must be a finite number, not {marked}")
                yield key, value
            except ValidationError as error:
                reason = _first_line(error).removeprefix(f"While dereferencing interpolation '{marked.text}': ")
                self.problem(section, key, f"{_wants(options[key], marked)}: {reason}")
            except InterpolationKeyError:
                near = nearest(
                    str(marked).strip("'${.}"), [f"{name}.{key}" for name in SECTIONS for key in config[name]]
                )
                self.problem(section, key, f"{marked} names no value" + (f" (did you mean '{near}'?)" if near else ""))
            except OmegaConfBaseException as error:
                if key in self.sections[section].given and not self.reported(section, key):
                    self.problem(section, key, f"{marked} has no value: {_first_line(error)}")

    def reported(self, section: str, key: str) -> bool:
        return any(problem.text.startswith(f"{section}.{key}: ") for problem in self.problems)

    def missing(self, section: str, key: str, hint: str) -> None:
        if self.complete:
            self.problem(section, key, "is missing" + hint)

    def problem(self, section: str, key: str, text: str) -> None:
        """Notes a problem where the key is set, or else where its section begins."""
        given = self.sections[section].given
        place = given[key].place if key in given else self.sections[section].place
        self.problems.append(Problem(place, f"{section}.{key}: {text}" if key else f"{section}: {text}"))

    @contextlib.contextmanager
    def reporting(self, section: str, *others: str) -> Iterator[None]:
        """Turns an error into problems at the keys it speaks of, in this section or in others; else at the section."""
        try:
            yield
        except (AttnzooError, ValueError) as error:
            clauses = str(error).split("; ")
            if not all(clause.partition(" ")[0] in self.sections[section].given for clause in clauses):
                clauses = [str(error)]
            for clause in clauses:
                names = (
                    (name, key) for name in (section, *others) for key in _spoken_of(clause, self.sections[name].given)
                )
                where, key = next(names, (section, ""))
                self.problem(where, key, re.sub(rf"^{key}(: | (?=must ))", "", clause))


def _spoken_of(text: str, keys: Iterable[str]) -> list[str]:
    """The keys that a text names, in its order."""
    words = re.findall(r"\w+", text)
    return sorted((key for key in keys if key in words and key != "name"), key=words.index)


def _meant(marked: Marked, kind: typing.Any) -> object:
    """The value as its type asks for it: a word is the text as it stands, a number is no yes or no."""
    value = marked.plain()
    if value is None or marked.text is None or "${" in marked.text:
        return value
    members = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    literals = [member for member in members if typing.get_origin(member) is typing.Literal]
    words = [word for literal in literals for word in typing.get_args(literal)]
    if marked.text in words or (str in members and type(value) not in members):
        return marked.text
    if isinstance(value, str) and str not in members and re.fullmatch(r"[-+]?0[0-9_]+", value):
        raise ValueError("a leading zero means octal to some readers")
    if bool in members and str not in members:
        if (word := str(value).lower()) in YES + NO:
            return word in YES
        if kind is bool:
            raise ValueError("a number is no yes or no")
    return float(value) if type(value) is int and float in members and int not in members else value


def _wants(option: Option, marked: Marked) -> str:
    word, words = marked.text or "", re.findall(r"'([^']*)'", option.type)
    near = PRECISIONS[word] if PRECISIONS.get(word) in words else nearest(word, words)
    if near and "list[" in option.type:
        near = f"[{near}]"
    return f"wants {option.type}, not {marked}" + (f" (did you mean '{near}'?)" if near else "")


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
