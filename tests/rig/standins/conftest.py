"""Shared by the tests of the stand-ins: a place for seeded random numbers."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20261129)
