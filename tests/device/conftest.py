"""Tests that need a GPU: never run by the continuous integration, and skipped where there is none."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker here too, so that this folder also runs from a copy of it alone."""
    config.addinivalue_line("markers", "device: needs a CUDA device")
