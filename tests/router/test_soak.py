"""A short soak of the patched router, and that the soak itself can fail."""

from __future__ import annotations

from typing import Any

import pytest

from lab.router.build import Result
from lab.router.soak import faults, soak


def test_random_faults_on_both_legs_leave_nothing_behind(built: dict[str, Result]) -> None:
    rows = soak(built["patched"], 60.0, 64, 7)
    print(rows)
    assert faults(rows) == []
    assert all(row["requests"] > 200 and len(row["ends"]) >= 5 for row in rows)


GOOD = {"flags": "f", "ends": {"200": 9}, "busy": 0, "loads": (0, 0), "memory_warm": 100 << 20, "memory_end": 120 << 20}


@pytest.mark.parametrize(
    "bad", [{"ends": {"without an end": 1}}, {"busy": 1}, {"loads": (0, 1)}, {"memory_end": 200 << 20}]
)
def test_a_soak_that_leaves_something_behind_is_a_fault(bad: dict[str, Any]) -> None:
    assert faults([GOOD]) == []
    assert len(faults([GOOD | bad])) == 1
