"""The smallest input that shows a failure."""

import dataclasses
import re
from typing import Any

import torch
from torch import Tensor

from attnzoo.registry import find
from attnzoo.testing.checks.graphs import check_compiles, check_exports
from attnzoo.testing.foreign import Refused
from attnzoo.testing.maker import Maker
from attnzoo.testing.probes import Check, NotApplicable, run
from attnzoo.testing.size import sized

LADDER: dict[str, tuple[dict[str, int], ...]] = {
    "heads": ({"heads": 1, "d_model": 2}, {"heads": 2, "d_model": 4}),
    "batch": ({"batch": 1}, {"batch": 2}),
    "length": ({"length": 1}, {"length": 2}, {"length": 3}, {"length": 5}, {"length": 8}),
    "context": ({"context": 1}, {"context": 2}, {"context": 3}, {"context": 6}),
}
UNWRITABLE = "<...>"  # stands for an argument that no code makes
SHOWN = 40  # numbers of a mask that are still printed


def smallest(check: Check, make: Maker) -> tuple[str, str]:
    """What the check says at the smallest sizes at which it still fails, and the call that it failed with, as code."""
    sizes: dict[str, int] = {}
    kind, message, line = _failure(check, make, sizes)
    for steps in LADDER.values() if check not in (check_compiles, check_exports) else ():  # a compiler takes its time
        for step in steps:
            other, smaller, call = _failure(check, make, {**sizes, **step})
            if smaller and other is kind:  # and not a refusal of sizes, in place of a wrong number
                sizes, message, line = {**sizes, **step}, smaller, call
                break
    return message, line


def _failure(check: Check, make: Maker, sizes: dict[str, int]) -> tuple[type[Exception], str, str]:
    """How a check fails at these sizes, what it says, and its last call; nothing where it holds, or where `vanilla`,
    which is sound, fails too: then the check can't be asked at such sizes."""
    watched, sound = dataclasses.replace(make, calls=[]), Maker(find("vanilla"), {}, make.causal, first=make.first)
    with sized(**sizes):
        if not sizes or _holds(check, sound):
            try:
                run(check, watched)
            except (AssertionError, Refused) as error:
                return type(error), str(error), as_code(watched)
            except Exception:
                pass
    return Exception, "", ""


def _holds(check: Check, make: Maker) -> bool:
    try:
        run(check, make)
    except NotApplicable:
        return True
    except Exception:
        return False
    return True


def as_code(make: Maker) -> str:
    """The last call of a module as a line of Python."""
    if not make.calls:
        return ""
    options, dtype, training, tokens, given = make.calls[-1]
    call = [_tensor(source) for source in tokens]
    call += [f"{name}={_tensor(value)}" for name, value in given.items() if value is not None]
    name = getattr(make.factory, "__name__", "build")
    built = f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
    built += "" if dtype == torch.float64 else f".to({dtype})"
    line = f"{built}{'' if training else '.eval()'}({', '.join(call)})"
    return line if "<" not in line else ""  # what can't be written down can't be run


def _is_noise(value: Tensor) -> bool:
    """Whether its numbers mean nothing: finite ones of ordinary size, no two of which are equal."""
    if value.is_meta or type(value) not in (Tensor, torch.nn.Parameter):  # it has none
        return True
    numbers = value.detach().flatten().double()
    return bool(numbers.isfinite().all() and (numbers.abs() < 100).all() and len(numbers.unique()) == len(numbers) > 1)


def _tensor(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value) if value is None else UNWRITABLE
    if torch._C._functorch.is_functorch_wrapped_tensor(value):  # inside vmap or grad: it has no numbers
        return UNWRITABLE
    if value.is_floating_point():
        kind = "" if value.dtype == torch.float64 else f", dtype={value.dtype}"
        kind += ', device="meta"' if value.is_meta else ""
        if value.numel() <= SHOWN and not _is_noise(value):
            numbers = re.sub(r"-?\b(inf|nan)\b", lambda found: f'float("{found[0]}")', str(value.tolist()))
            return f"torch.tensor({numbers}{kind})"
        return f"torch.randn({', '.join(map(str, value.shape))}{kind})"
    if value.numel() > SHOWN or type(value) is not Tensor:
        return UNWRITABLE
    return f"torch.tensor({value.tolist()})"
