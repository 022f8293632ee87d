"""Peers come with the extra `peers`: without it their tests skip, or fail where ATTNZOO_PEERS=1 asks for them."""

import os
from importlib.util import find_spec

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configs here, never downloaded


def pytest_runtest_setup(item):
    for mark in item.iter_markers("peers"):
        missing = [library for library in mark.args if find_spec(library) is None]
        if missing:
            reason = f"{', '.join(missing)} not installed: pip install -e '.[peers]'"
            if os.environ.get("ATTNZOO_PEERS") == "1":
                pytest.fail(f"{reason}, or deselect with -m 'not peers'; ATTNZOO_PEERS=1 lets none be skipped")
            pytest.skip(reason)
