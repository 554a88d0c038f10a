"""How a test tells the router's delay from the machine's, and the thresholds of the bench."""

from __future__ import annotations

import functools
import inspect

import tomllib

from lab.router.build import REPOSITORY
from lab.router.harness import EVEN, Bench
from tests.router.router_requests import least


def test_a_delay_that_is_in_every_try_is_found_and_one_that_is_not_is_taken_off() -> None:
    for delays, found, left in (([0.6, 0.7, 0.8, 0.1], 0.6, 1), ([0.6, 0.9, 0.2], 0.2, 0), ([0.5, 0.1], 0.5, 1)):
        assert least(functools.partial(delays.pop, 0), 0.5) == found and len(delays) == left


def test_the_even_thresholds_are_those_of_the_evaluation_file() -> None:
    found = tomllib.loads((REPOSITORY / "config" / "router-evaluation.toml").read_text(encoding="utf-8"))
    router = found["router"]
    assert (
        "--balance-abs-threshold",
        str(router["balance_abs_threshold"]),
        "--balance-rel-threshold",
        str(router["balance_rel_threshold"]),
    ) == EVEN
    assert router["policy"] == inspect.signature(Bench).parameters["policy"].default
    assert found["environment"] == {"SMG_PD_LOAD_AT_DISPATCH": "1"}
