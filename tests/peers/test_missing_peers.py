"""A peer that is not installed is never passed over in silence."""

from types import SimpleNamespace

import pytest
from conftest import pytest_runtest_setup


def test_a_missing_peer_skips_with_a_reason_and_fails_where_all_peers_are_asked_for(monkeypatch):
    item = SimpleNamespace(iter_markers=lambda name: [pytest.mark.peers("torch", "no_such_library").mark])
    monkeypatch.delenv("ATTNZOO_PEERS", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"^no_such_library not installed: pip install -e '.\[peers\]'$"):
        pytest_runtest_setup(item)
    monkeypatch.setenv("ATTNZOO_PEERS", "1")
    with pytest.raises(pytest.fail.Exception, match=r"no_such_library not installed.*-m 'not peers'"):
        pytest_runtest_setup(item)
