"""YAML whose values remember where they stand."""

import dataclasses
import re
import reprlib
import typing
from collections.abc import Iterable

import yaml
from yaml.composer import ComposerError

from attnzoo.errors import RecipeError


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of a file; line 0 is an override of the command line."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else f"override {self.file!r}"


@dataclasses.dataclass(frozen=True)
class Marked:
    """A value, its place, and for a scalar the text it was read from; what a mapping or a list holds is marked too."""

    value: object
    place: Place
    text: str | None = None

    def plain(self) -> object:
        """The value without marks."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return [item.plain() for item in self.value] if isinstance(self.value, list) else self.value

    def __str__(self) -> str:
        """The value as a message quotes it."""
        short = reprlib.Repr()
        short.maxstring = short.maxother = 80
        return short.repr(self.plain())


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is wrong, and where."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def refuse(problems: Iterable[Problem]) -> RecipeError:
    """One error that says everything, files and lines in order and overrides last."""
    places = [(not problem.place.line, problem.place.file, problem.place.line, str(problem)) for problem in problems]
    return RecipeError("\n".join(text for *_, text in sorted(set(places))))


class Loader(yaml.SafeLoader):
    """Reads `no`, `010`, `1:30` and dates as the words they are; refuses tags and aliases: there are parts."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, list]] = {}

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event = self.peek_event()
        found = f"*{event.anchor}" if isinstance(event, yaml.AliasEvent) else getattr(event, "tag", None)
        if found:
            raise ComposerError(
                None, None, f"'{found}' can't stand here: write the value out, or quote it", event.start_mark
            )
        return super().compose_node(parent, index)


class Dumper(yaml.SafeDumper):
    """Quotes whatever this loader or another would not read back as a word."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    "float": (r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?", list("-+.0123456789")),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    for _side in (Loader, Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def read(text: str, file: str, line: int = 1) -> tuple[Marked | None, list[Problem]]:
    """Reads one YAML document; None where there is nothing in it or nothing that can be read."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        problems: list[Problem] = []
        return (None if node is None else _mark(loader, node, file, line, "", problems)), problems
    except yaml.MarkedYAMLError as error:
        at = (error.problem_mark or error.context_mark).line
        words = f"{error.context}: {error.problem}" if error.context else str(error.problem)
        if r"'\t'" in words:
            words += "; indent with spaces, not with tabs"
    except yaml.reader.ReaderError as error:
        at, words = text.count("\n", 0, error.position), f"the character {chr(error.character)!r} can't stand in YAML"
    except RecursionError:
        at, words = 0, "nested too deeply"
    return None, [Problem(Place(file, line and at + line), f"not valid YAML: {words}")]


def dump(value: object) -> str:
    """Writes plain values so that `read` gives them back."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _mark(loader: Loader, node: yaml.Node, file: str, line: int, path: str, problems: list[Problem]) -> Marked:
    place = Place(file, line and node.start_mark.line + line)
    if isinstance(node, yaml.SequenceNode):
        return Marked([_mark(loader, item, file, line, path, problems) for item in node.value], place)
    if isinstance(node, yaml.ScalarNode):
        try:
            return Marked(loader.construct_object(node), place, node.value)
        except ValueError:  # an integer of thousands of digits
            return Marked(node.value, place, node.value)
    found: dict[str, Marked] = {}
    for key, item in node.value:
        here = Place(file, line and key.start_mark.line + line)
        if not isinstance(key, yaml.ScalarNode):
            problems.append(Problem(here, f"{path or 'the file'}: a key must be a word"))
            continue
        name = f"{path}.{key.value}" if path else key.value
        value = _mark(loader, item, file, line, name, problems)
        if key.value in found:
            problems.append(Problem(here, f"{name}: given twice, first in line {found[key.value].place.line}"))
        else:
            found[key.value] = dataclasses.replace(value, place=here)
    return Marked(found, place)
