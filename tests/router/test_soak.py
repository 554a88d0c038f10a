"""A short soak of the patched router, and that the soak itself can fail."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lab.router.build import Result
from lab.router.harness import ONE_SHOT
from lab.router.soak import Load, faults, half, soak


def test_random_faults_on_both_legs_leave_nothing_behind(built: dict[str, Result]) -> None:
    rows = soak(built["patched"], 60.0, 64, 7)
    print(rows)
    assert faults(rows) == []
    assert all(row["requests"] > 200 and len(row["ends"]) >= 5 for row in rows)


def test_trees_that_grow_with_every_new_prompt_are_found(built: dict[str, Result]) -> None:
    row = half(built["patched"], ONE_SHOT, 0.0, 64, 8, trees=(), warm=500)
    print(row)
    assert row["grown"] > 4000 * row["judged"]
    assert "memory grew" in " ".join(faults([{"flags": "trees without a bound"} | row]))


def test_growth_is_what_lies_between_the_first_and_the_last_quarter_and_no_single_sample() -> None:
    load = Load(until=0.0, least=0, memory=[(100 * index, 5000 + 10 * index) for index in range(40)])
    assert load.growth() == (3000, 300)
    load.memory[-1] = (3900, 10**9)
    assert load.growth() == (3000, 300)


def test_the_clients_go_on_until_both_the_time_and_the_requests_are_there() -> None:
    assert not Load(until=1e18, least=0).over
    assert not Load(until=0.0, least=2, ends=Counter({"200": 1})).over
    assert Load(until=0.0, least=2, ends=Counter({"200": 2})).over


GOOD = {"flags": "f", "ends": {"200": 9}, "busy": 0, "loads": (0, 0), "judged": 1000, "grown": 1 << 20}


@pytest.mark.parametrize("bad", [{"ends": {"without an end": 1}}, {"busy": 1}, {"loads": (0, 1)}, {"grown": 5 << 20}])
def test_a_soak_that_leaves_something_behind_is_a_fault(bad: dict[str, Any]) -> None:
    assert faults([GOOD]) == []
    assert len(faults([GOOD | bad])) == 1


@pytest.mark.parametrize(("judged", "faulty"), [(10_000, False), (100_000, True)])
def test_what_a_request_may_leave_behind_does_not_depend_on_how_many_fit_into_the_time(
    judged: int, faulty: bool
) -> None:
    assert bool(faults([GOOD | {"judged": judged, "grown": judged * 120}])) is faulty
