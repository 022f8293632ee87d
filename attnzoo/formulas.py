"""Patterns as text: what a pattern prints as, read back. Nothing is evaluated."""

import ast

from attnzoo.errors import OptionError
from attnzoo.options import nearest
from attnzoo.patterns import Pair, Pattern

LONGEST = 100  # a chain that can still be walked


_meant: dict[str, Pattern] = {}


def formula_of(pattern: Pattern) -> str:
    """The formula that stands for a pattern where only text can, which `meaning` keeps to; empty where there is none:
    the text reads back to another one, or stands for another one already, as after a notebook cell was run again."""
    text = str(pattern)
    try:
        return text if parse(text) == pattern == _meant.setdefault(text, pattern) else ""
    except OptionError:
        return ""


def meaning(formula: str) -> Pattern:
    """The pattern that a formula stands for."""
    return _meant.get(formula) or parse(formula)


def parse(formula: str) -> Pattern:
    """Reads a pattern from its formula, `Local(128) & Causal()` say; nothing is evaluated.

    Raises:
        OptionError: a name is no pattern, an argument is no plain number, or the text is no formula.
    """
    if not isinstance(formula, str) or formula.count("&") + formula.count("|") > LONGEST:
        raise OptionError(f"a formula is text with at most {LONGEST} of & and |, not {str(formula)[:40]!r}")
    try:
        tree = ast.parse(formula.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise OptionError(f"pattern {formula!r} is no formula: write one like 'Local(128) & Causal()'") from None
    return _read(tree, formula)


def _read(node: ast.AST, formula: str) -> Pattern:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        left, right = _read(node.left, formula), _read(node.right, formula)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise OptionError(f"pattern {formula!r}: only patterns, & and | may stand here, as in 'Local(128) | Global(4)'")
    known = {kind.__name__: kind for kind in Pattern.__subclasses__() if kind is not Pair}
    if node.func.id not in known:
        near = nearest(node.func.id, known)
        hint = f" Did you mean {near}?" if near else ""
        there = ", ".join(sorted(known))
        raise OptionError(f"pattern {formula!r}: no pattern is named {node.func.id}.{hint} There are {there}")
    try:
        values = [ast.literal_eval(value) for value in node.args]
        named = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in node.keywords}
        return known[node.func.id](*values, **named)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"pattern {formula!r}: {node.func.id}: {error}") from None
