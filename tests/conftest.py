"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import toy as toy_module
from tests.toy import Toy


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """A fresh toy bundle, its lock made, and an installed toy base."""
    return toy_module.make(tmp_path / "toy")
