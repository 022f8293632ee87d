"""Compiled and exported: what the contract asks of one setting, in all of them, and with code generated."""

import dataclasses
import io
import shutil

import pytest
import torch

import attnzoo
from attnzoo.testing import CHECKS
from attnzoo.testing.maker import makers

VARIANTS = attnzoo.list_variants()
SETTINGS = {
    f"{name}-{make}": make
    for name in VARIANTS
    for example in attnzoo.find(name).examples
    for make in makers(attnzoo.find(name), example)
}


@pytest.mark.filterwarnings("ignore")  # what the compiler warns of
@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_of_a_compiled_module_are_the_same(name):
    attn = attnzoo.build(name, 24, 6, **{**attnzoo.find(name).examples[0], "causal": True}).double()
    torch.compiler.reset()
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    for length in (5, 9, 1):
        x = torch.randn(2, length, 24, dtype=torch.float64, requires_grad=True)
        wanted = [x, *attn.parameters()]
        found, right = (torch.autograd.grad(call(x).square().sum(), wanted) for call in (compiled, attn))
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.study
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_compiles_and_exports(setting):
    for check in ("check_compiles", "check_exports"):
        CHECKS[check](dataclasses.replace(SETTINGS[setting], first=True))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # what the compiler warns of
@pytest.mark.parametrize(
    "name", [name if name == "local" else pytest.param(name, marks=pytest.mark.study) for name in VARIANTS]
)
def test_compiled_code_gives_the_same(name):
    attn = attnzoo.build(name, 24, 6, **{**attnzoo.find(name).examples[0], "causal": True})
    torch.compiler.reset()
    compiled = torch.compile(attn, fullgraph=True)
    for length in (2, 7, 33):
        x = torch.randn(3, length, 24)
        torch.testing.assert_close(compiled(x), attn(x))


@pytest.mark.filterwarnings("ignore")  # what the exporter warns of
@pytest.mark.parametrize("name", attnzoo.list_variants(supports="documents"))
def test_documents_and_rotary_positions_export_at_every_length(name):
    settings = [{**example, "causal": True, "positions": "rotary"} for example in attnzoo.find(name).examples]
    built = (attnzoo.build(name, 24, 6, **options).eval() for options in settings)
    attn = next(attn for attn in built if "documents" in attn.supports)
    length, ids = torch.export.Dim("length", min=2), torch.arange(40)[None] // 3
    shapes = {"x": {1: length}, "documents": {1: length}}
    call = (torch.randn(1, 7, 24),), {"documents": ids[:, :7]}
    program = torch.export.export(attn, *call, dynamic_shapes=shapes).module()
    for tokens in (2, 3, 40):
        x = torch.randn(1, tokens, 24)
        torch.testing.assert_close(program(x, documents=ids[:, :tokens]), attn(x, documents=ids[:, :tokens]))


@pytest.mark.filterwarnings("ignore")  # what the exporter warns of
@pytest.mark.parametrize("name", ["gqa", "bigbird"])
def test_an_exported_program_runs_after_it_was_stored(name):
    attn = attnzoo.build(name, 24, 6, **attnzoo.find(name).examples[0]).eval()
    shapes = {"x": {1: torch.export.Dim("length", min=2)}}
    file = io.BytesIO()
    torch.export.save(torch.export.export(attn, (torch.randn(1, 5, 24),), dynamic_shapes=shapes), file)
    file.seek(0)
    program = torch.export.load(file).module()
    for length in (2, 40):
        x = torch.randn(1, length, 24)
        torch.testing.assert_close(program(x), attn(x))
