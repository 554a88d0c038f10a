"""No stand-in of the rig takes the place of a function that a patch changes: the rig runs what is shipped."""

from __future__ import annotations

import pytest

from lab.rig.standins import patches
from tests.engine.conftest import Trees


@pytest.mark.bases
@pytest.mark.parametrize("role", patches.ROLES)
def test_no_stand_in_hides_a_patch(stock: Trees, patched: Trees, role: str) -> None:
    assert patches.touched_by(stock(role), patched(role)), "the series changes something"
    patches.check(role, stock(role), patched(role))
