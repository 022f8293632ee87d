"""docs/conformance: the adapters agree with what they say is right, and the page lists them all."""

import importlib.util
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

from attnzoo.testing.maker import makers
from attnzoo.testing.probes import agree, oracles, tokens

SCRIPT = Path(__file__).parent.parent / "docs" / "conformance" / "write.py"
spec = importlib.util.spec_from_file_location("conformance_page", SCRIPT)
write = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = write  # as an import does; NamedTuple looks there
spec.loader.exec_module(write)


def test_the_page_has_a_row_and_a_section_for_each_adapter():
    page = write.PAGE.read_text()
    table, sections = page.split("## The modules")
    assert re.findall(r"^attnzoo check (\S+)$", sections, re.MULTILINE) == write.sources()
    rows = re.findall(r"^\| \[[\w-]+: (\w+)\]", table, re.MULTILINE)
    assert rows == [source.rpartition(":")[2] for source in write.sources()]


@pytest.mark.parametrize("source", write.sources())
def test_an_adapter_builds_and_agrees_with_what_is_right(source):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries warn of as they are imported is theirs
        adapter, library = write.loaded(source)
        if adapter is None:
            pytest.skip(library)
        for make in makers(adapter, {}):
            attn = make()
            x = tokens(attn, length=12)  # a multiple of every window
            with torch.no_grad():
                for name, oracle in oracles(attn):
                    agree(attn(x), oracle(x), f"{make}, against {name}", make.close)
