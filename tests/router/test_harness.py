"""What a test may take off a delay (its processes were ready to run and had no processor), and its thresholds."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time

import pytest
import tomllib

from lab.router.build import REPOSITORY
from lab.router.harness import EVEN, Bench, waited

SPIN = "import os, sys, time; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


def test_a_process_that_shares_a_processor_has_waited_and_one_that_sleeps_has_not() -> None:
    first = str(min(os.sched_getaffinity(0)))
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN, first], stdout=subprocess.PIPE) for _ in range(2)]
    sleeping = subprocess.Popen(["sleep", "60"])
    try:
        for one in spinning:
            assert one.stdout is not None and one.stdout.readline()
        before, began = waited(spinning[0].pid), time.monotonic()
        time.sleep(2.0)
        share = (waited(spinning[0].pid) - before) / (time.monotonic() - began)
        assert share > 0.25
        assert waited(sleeping.pid) < 0.5
    finally:
        for one in (*spinning, sleeping):
            one.kill()
            one.communicate()


def test_a_process_that_has_ended_has_not_waited() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert waited(gone.pid) == pytest.approx(0.0)


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
