"""The turns in which .ci/run reaches every nightly test."""

import pytest
from conftest import NIGHTLY_PARTS, ROOT, pytest_collection_modifyitems


def test_turns_that_follow_each_other_run_every_test_once(request, monkeypatch):
    first = int((ROOT / ".ci" / "nightly_turn").read_text())
    tests = request.session.items
    ran: list[pytest.Item] = []
    for turn in range(first, first + NIGHTLY_PARTS):
        monkeypatch.setattr(request.config.option, "nightly_turn", turn)
        part = list(tests)
        pytest_collection_modifyitems(request.config, part)
        ran += part

    assert sorted(test.nodeid for test in ran) == sorted(test.nodeid for test in tests)
