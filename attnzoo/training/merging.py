"""Recipe files with their parts, and overrides, merged into sections whose values know where they stand."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from attnzoo.errors import RecipeError
from attnzoo.options import nearest
from attnzoo.training.marked_yaml import Marked, Place, Problem, read

SECTIONS = ("task", "attention", "model", "train")
EXAMPLE = "as in task: {name: needle}"


@dataclasses.dataclass
class Section:
    """What is set in one section, and where it stands."""

    place: Place
    given: dict[str, Marked] = dataclasses.field(default_factory=dict)


class Merged:
    """The sections of a recipe, and every problem met on the way; each file is read once.

    Attributes:
        complete: all files could be read, so that what is missing is missing.
    """

    def __init__(self) -> None:
        self.sections: dict[str, Section] = {}
        self.problems: list[Problem] = []
        self.complete = True
        self.seen: dict[Path, dict[str, Section]] = {}

    def file(self, path: Path, asked: Marked | None = None, above: tuple[Path, ...] = ()) -> dict[str, Section]:
        """The sections of a file over those of its parts.

        Args:
            asked: the line that wants it as a part.
            above: the files that it is a part of.
        """
        identity = Path(os.path.abspath(path))
        if asked and identity in above:
            self.problem(asked.place, f"parts: {path} is a part of itself")
            return {}
        if identity not in self.seen:
            document = self.read(path, asked)
            self.seen[identity] = self.document(document, path, (*above, identity)) if document else {}
        return {name: Section(section.place, dict(section.given)) for name, section in self.seen[identity].items()}

    def read(self, path: Path, asked: Marked | None) -> dict[str, Marked]:
        text = self.text(path, asked)
        document, problems = (None, []) if text is None else read(text, str(path))
        self.problems += problems
        if document and isinstance(document.value, dict):
            return document.value
        self.complete = False
        if text is not None and not problems:
            found = "and this is empty" if document is None or document.value is None else f"not {document}"
            self.problem(Place(str(path), 1), f"a recipe holds sections, {EXAMPLE}, {found}")
        return {}

    def document(self, document: dict[str, Marked], path: Path, above: tuple[Path, ...]) -> dict[str, Section]:
        sections: dict[str, Section] = {}
        for part in self.parts(document.pop("parts", None)):
            for name, section in self.file(Path(os.path.normpath(path.parent / str(part.value))), part, above).items():
                sections.setdefault(name, section).given.update(section.given)
        for name, content in document.items():
            if self.known(name, content) and (given := self.mapping(name, content)) is not None:
                section = sections.setdefault(name, Section(content.place))
                section.place = content.place
                section.given.update(given)
        return sections

    def parts(self, listed: Marked | None) -> list[Marked]:
        if listed is None or listed.value is None:
            return []
        if isinstance(listed.value, list) and all(isinstance(part.value, str) and part.value for part in listed.value):
            return listed.value
        self.problem(listed.place, f"parts: wants a list of files, as in parts: [model.yaml], not {listed}")
        return []

    def text(self, path: Path, asked: Marked | None) -> str | None:
        try:
            return path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            near = nearest(path.name, [file.name for file in path.parent.glob("*.y*ml")])
            reason = "there is no such file" + (f" (did you mean {path.with_name(near)}?)" if near else "")
        except UnicodeDecodeError as error:
            reason = f"is not text in UTF-8: byte {error.start} can't be read"
        except IsADirectoryError:
            reason = "is a directory: name a file in it"
        except (OSError, ValueError) as error:
            reason = f"can't be read: {getattr(error, 'strerror', None) or error}"
        if asked is None:
            raise RecipeError(f"{path}: {reason}")
        self.problem(asked.place, f"parts: {path}: {reason}")
        return None

    def override(self, text: str) -> None:
        """Puts one `section.key=value` of the command line over the files' values."""
        place, sections = Place(text, 0), self.sections
        target, equals, words = text.partition("=")
        name, dot, key = target.strip().partition(".")
        if target.startswith(("-", "+")):
            plain = text.lstrip("-+")
            self.problem(place, f"write it without '{text.removesuffix(plain)}': {plain}")
        elif not equals or bool(dot) != bool(key) or not (dot or name in SECTIONS):
            holders = [f"{section}.{text}" for section in sections if equals and name in sections[section].given]
            self.problem(place, f"write section.key=value, as in {holders[0] if holders else 'train.lr=1e-3'}")
        elif not words.strip():
            self.problem(place, f"no value after '='; write {target}=null for none")
        elif "." in key or "[" in key:
            whole = ".".join(target.replace("[", ".").split(".")[:2])
            self.problem(place, f"an override sets a whole value, as in {whole}=[1, 2]")
        elif self.known(name, Marked(None, place)):
            value, problems = read(words, text, line=0)
            self.problems += problems
            if value is None:
                if not problems:
                    self.problem(place, "no value after '='; put it in quotes if it starts with '#'")
            elif dot:
                sections.setdefault(name, Section(place)).given[key] = dataclasses.replace(value, place=place)
            elif (given := self.mapping(name, value)) is not None:
                sections[name] = Section(place, given)

    def known(self, name: str, content: Marked) -> bool:
        if name in SECTIONS:
            return True
        near = nearest(name, (*SECTIONS, "parts"))
        hint = f"did you mean '{near}'?" if near else f"there are {', '.join(SECTIONS)} and, in files, parts"
        self.problem(content.place, f"unknown section '{name}' ({hint})")
        return False

    def mapping(self, name: str, content: Marked) -> dict[str, Marked] | None:
        if isinstance(content.value, dict):
            return content.value
        if content.value is not None:
            self.problem(content.place, f"{name}: wants keys and values, {EXAMPLE}, not {content}")
            return None
        return {}

    def problem(self, place: Place, text: str) -> None:
        self.problems.append(Problem(place, text))


def merge(path: Path, overrides: Sequence[str] = ()) -> Merged:
    """Later parts over earlier ones, a file over its parts, overrides over all."""
    merged = Merged()
    merged.sections = merged.file(path)
    for text in overrides:
        merged.override(text)
    return merged
