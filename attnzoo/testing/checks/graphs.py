"""That modules can be compiled, exported, and mapped over samples: the rest of promise 15."""

import contextlib
import inspect
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from attnzoo.attention import Attention
from attnzoo.errors import NotSupportedError
from attnzoo.testing.foreign import bare
from attnzoo.testing.maker import Maker
from attnzoo.testing.probes import (
    NotApplicable,
    agree,
    askable,
    compare_with_fresh,
    refuses,
    some,
    tokens,
)
from attnzoo.testing.size import size

LENGTHS = (5, 2, 3, 4, 8, 11, 16, 17, 33, 70)  # the first is no other size, which the compiler would take it for


def check_compiles(make: Maker) -> None:
    """`torch.compile(fullgraph=True)` gives the same at ten lengths, and nothing of it sticks."""
    if not make.first:
        raise NotApplicable("it is asked of one setting of each variant")
    attn = make()
    with _compiler(), torch.no_grad():
        compiled = torch.compile(bare(attn), fullgraph=True, backend="aot_eager")
        for length in LENGTHS:
            x = tokens(attn, length)
            torch._dynamo.mark_dynamic(x, 1)
            agree(compiled(x), attn(x), f"compiled, {length} tokens, against the module itself")
    compare_with_fresh(attn, make, "after it was compiled")


def check_exports(make: Maker) -> None:
    """`torch.export` with a dynamic length gives a program that is right at every length of 2 and more."""
    if not make.first:
        raise NotApplicable("it is asked of one setting of each variant")
    attn = make()
    if "export" not in attn.supports:
        with _compiler():
            return refuses(NotSupportedError, "export, which it does without", _exported, attn)
    with _compiler():
        program = _exported(attn)
        for length in (2, 3, size.length, 33, 70):
            x, given = tokens(attn, length), askable(attn, key_mask=some(size.batch, length, seed=5))
            real = given.get("key_mask", torch.ones(x.shape[:2], dtype=torch.bool))
            y, right = program(x, **given), attn(x, **given)
            agree(y[real], right[real], f"exported at {size.length} tokens, called with {length}")
    compare_with_fresh(attn, make, "after it was exported")


def check_samples_have_gradients_of_their_own(make: Maker) -> None:
    """`torch.func.vmap` over samples gives each the gradients that it has alone."""
    attn = make()
    x, key_mask = tokens(attn), some(size.batch, size.length, seed=2)
    parameters = {name: parameter.detach() for name, parameter in attn.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, key_mask: Tensor) -> Tensor:
        return functional_call(attn, parameters, (x[None],), {"key_mask": key_mask[None]}).square().sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, key_mask)
    for sample in range(size.batch):
        attn.zero_grad()
        loss(dict(attn.named_parameters()), x[sample], key_mask[sample]).backward()
        for name, parameter in attn.named_parameters():
            agree(found[name][sample], parameter.grad, f"mapped over samples, sample {sample}: gradient of {name}")


def _exported(attn: Attention) -> torch.nn.Module:
    length, given = torch.export.Dim("length", min=2), askable(attn, key_mask=some(size.batch, size.length, seed=2))
    first = next(iter(inspect.signature(bare(attn).forward).parameters))
    shapes = {name: {1: length} for name in (first, *given)}
    return torch.export.export(bare(attn), (tokens(attn),), given, dynamic_shapes=shapes).module()


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """A compiler without a past, and none left behind; what it warns of is not ours to judge."""
    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compiler.reset()
