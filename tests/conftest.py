"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests import toy as toy_module
from tests.toy import Toy

# A busy machine is no failure: how long one example takes says nothing of what it shows.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

# Tests that need more than the repository and the pinned archives carry their folder's marker.
_MARKERS = {Path(__file__).parent / "router": "router"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for folder, marker in _MARKERS.items():
            if folder in item.path.parents:
                item.add_marker(marker)


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """A fresh toy bundle, its lock made, and an installed toy base."""
    return toy_module.make(tmp_path / "toy")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power: what is synchronised, and when, is read from the calls themselves."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
