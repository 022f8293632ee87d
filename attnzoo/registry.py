"""Names to variants: our catalogue, what programs register, and what installed packages bring by entry point."""

import dataclasses
import fnmatch
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from attnzoo.errors import NameTakenError, OptionError, UnknownVariantError
from attnzoo.options import Option, check, choice, nearest, options

Factory = TypeVar("Factory", bound=Callable[..., Any])

GROUP = "attnzoo.variants"
CATALOGUE = {
    "bigbird": "attnzoo.variants.bigbird:bigbird",
    "einsum": "attnzoo.variants.einsum:Einsum",
    "fused_qkv": "attnzoo.variants.fused_qkv:FusedQKV",
    "gqa": "attnzoo.variants.gqa:GQA",
    "kv_cached": "attnzoo.variants.kv_cached:KVCached",
    "local": "attnzoo.variants.local:local",
    "mqa": "attnzoo.variants.mqa:mqa",
    "random_sparse": "attnzoo.variants.random_sparse:RandomSparse",
    "sparse": "attnzoo.variants.sparse:Sparse",
    "vanilla": "attnzoo.variants.vanilla:Vanilla",
}
EVERY_VARIANT = ("d_model", "num_heads", "causal", "dropout", "bias", "positions")
FEATURES = (
    "causal", "bidirectional", "cross", "cache", "documents", "marked",
    "left_padding", "right_padding", "length_free", "kv_heads", "weights", "compile", "export",
)  # fmt: skip
WAIVABLE = (  # what a variant may declare to do without
    "causal", "bidirectional", "cross", "cache", "documents", "marked",
    "left_padding", "right_padding", "length_free", "export",
)  # fmt: skip
DTYPES = ("float64", "float32", "bfloat16", "float16")  # which all support

_registered: dict[str, Callable[..., Any]] = {}


@dataclasses.dataclass(frozen=True)
class Description:
    """What `describe` tells about a variant."""

    name: str
    summary: str
    options: tuple[Option, ...]
    source: str
    cost: str
    supports: tuple[str, ...]
    waives: tuple[str, ...]
    dtypes: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.summary}", "", *(f"    {option}" for option in self.options), ""]
        lines += [f"{title}: {fact}" for title, fact in (("source", self.source), ("cost", self.cost)) if fact]
        return "\n".join(
            [
                *lines,
                f"supports: {', '.join(self.supports)}",
                f"waives: {', '.join(self.waives) or 'nothing'}",
                f"dtypes: {', '.join(self.dtypes)}",
            ]
        )


def register(name: str, *, examples: Iterable[Mapping[str, Any]] | None = None) -> Callable[[Factory], Factory]:
    """Registers a class or a function that returns an Attention under a name.

    Registering the same object again, as re-running a notebook cell does, replaces it.

    Args:
        examples: small options to run the contract with; they may also be an attribute `examples` of the object.
    Raises:
        NameTakenError: something else has the name.
        OptionError: the name is no lower-case word, or the signature lacks what every variant takes.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise OptionError(f"a variant's name has lower-case letters, digits and _, as in 'my_variant', not {name!r}")

    def enter(factory: Factory) -> Factory:
        missing = [option for option in EVERY_VARIANT if option not in options(factory)]
        if missing:
            raise OptionError(f"{_home(factory)}: every variant also takes {', '.join(missing)}")
        own = factory.__module__.partition(".")[0]  # a package may name its variant by another way to the same object
        plugins = [point.value for point in _plugins(name) if re.split("[.:]", point.value)[0] != own]
        holders = [CATALOGUE[name]] if name in CATALOGUE else plugins
        holders += [_home(_registered[name])] if name in _registered else []
        if any(holder != _home(factory) for holder in holders):
            raise NameTakenError(f"'{name}' is taken by {holders[0]}: give {_home(factory)} another name")
        if examples is not None:
            factory.examples = tuple(dict(example) for example in examples)  # type: ignore[attr-defined]
        _registered[name] = factory
        return factory

    return enter


def find(name: str) -> Callable[..., Any]:
    """The class or function that a name stands for.

    Raises:
        UnknownVariantError: nothing has the name, or what has it can't be imported.
        NameTakenError: two installed packages claim the name.
    """
    if name in _registered:
        return _registered[name]
    if name in CATALOGUE:
        module, _, attribute = CATALOGUE[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    points = _plugins(name)
    if not points:
        names = sorted(_names())
        near = nearest(name, names)
        hint = f" Did you mean '{near}'?" if near else ""
        raise UnknownVariantError(f"no attention variant named '{name}'.{hint} There are: {', '.join(names)}")
    if len({point.value for point in points}) > 1:
        raise NameTakenError(f"'{name}' is claimed by {' and by '.join(map(_origin, points))}: uninstall one")
    return _load(points[0])


def build(name: str, d_model: int, num_heads: int, **options: Any) -> Any:
    """Builds the variant of a name as an nn.Module.

    Args:
        options: causal=False, dropout=0.0, bias=True, positions="none" and the variant's own; `describe(name)`
            lists them.
    Raises:
        UnknownVariantError: no variant has the name, or what has it makes no Attention.
        OptionError: an option is unknown, missing, of the wrong type or impossible.
    """
    factory = find(name)
    given = {"d_model": d_model, "num_heads": num_heads, **options}
    check(factory, given, label=name)
    return _made(factory, given, name)


def list_variants(pattern: str = "*", supports: Iterable[str] = ()) -> list[str]:
    """The sorted names that fit a pattern with wildcards, and of these the ones that support all the given features.

    Raises:
        OptionError: a feature has no meaning.
    """
    supports = (supports,) if isinstance(supports, str) else supports
    wanted = {choice("supports", feature, FEATURES) for feature in supports}
    for point in _plugins():
        if point.name in CATALOGUE and point.value != CATALOGUE[point.name]:
            warnings.warn(f"'{point.name}' of {_origin(point)} is left out: the name is taken", stacklevel=2)
    names = sorted(fnmatch.filter(_names(), pattern))
    return [name for name in names if wanted <= set(_supports_or_warn(name))] if wanted else names


def describe(name: str) -> Description:
    """What a variant computes, its options, source and cost, and what it supports and waives.

    Raises:
        UnknownVariantError: no variant has the name.
    """
    factory = find(name)
    text = inspect.getdoc(factory) or ""
    supported = supports(factory)
    return Description(
        name=name,
        summary=" ".join(text.split("\n\n")[0].split()),
        options=tuple(options(factory).values()),
        source=_section(text, "Source"),
        cost=_section(text, "Cost"),
        supports=tuple(feature for feature in FEATURES if feature in supported),
        waives=tuple(feature for feature in FEATURES if feature not in supported),
        dtypes=DTYPES,
        text=text,
    )


def supports(factory: Callable[..., Any]) -> frozenset[str]:
    """The features that any setting of a variant supports, found by building it small with its examples."""
    import torch  # here, because listing names needs none

    found = {"kv_heads"} if "num_kv_heads" in options(factory) else set()
    examples: Iterable[Mapping[str, Any]] = getattr(factory, "examples", ({},))
    for example in examples:
        for causal in (False, True):
            try:
                with torch.random.fork_rng(devices=[]):  # to look at the zoo changes no experiment
                    given = {"d_model": 8, "num_heads": 2, "causal": causal, **example}
                    found |= _made(factory, given, _home(factory)).supports
            except OptionError:
                continue  # a causal setting that it does without
    return frozenset(found)


def _made(factory: Callable[..., Any], given: Mapping[str, Any], label: str) -> Any:
    try:
        module = factory(**given)
    except SystemExit as error:
        raise UnknownVariantError(f"'{label}' ends the program where it is built, with {error}") from error
    if not hasattr(module, "supports"):
        raise UnknownVariantError(f"'{label}' makes a {type(module).__name__}, not an attnzoo.Attention")
    return module


def _supports_or_warn(name: str) -> frozenset[str]:
    try:
        return supports(find(name))
    except Exception as error:
        warnings.warn(f"variant '{name}' is left out: {error}", stacklevel=3)
        return frozenset()


def _names() -> set[str]:
    return {*CATALOGUE, *_registered, *(point.name for point in _plugins())}


def _plugins(name: str | None = None) -> list[EntryPoint]:
    return sorted(point for point in entry_points(group=GROUP) if name in (None, point.name))


def _load(point: EntryPoint) -> Callable[..., Any]:
    try:
        factory = point.load()
        options(factory)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and what test runners skip with
        reason = f"{type(error).__name__}: {error}"
        raise UnknownVariantError(f"variant '{point.name}' of {_origin(point)} can't be imported: {reason}") from error
    return factory


def _origin(point: EntryPoint) -> str:
    return f"{point.value} (package {point.dist.name if point.dist else 'unknown'})"


def _home(factory: Callable[..., Any]) -> str:
    return f"{factory.__module__}:{factory.__qualname__}"


def _section(text: str, title: str) -> str:
    """One section of a docstring, such as `Source: ...`, as a single line."""
    found = re.search(rf"^{title}: (.*?)(?=\n\s*\n|\n[A-Z]\w+:|\Z)", text, re.DOTALL | re.MULTILINE)
    return " ".join(found.group(1).split()) if found else ""
