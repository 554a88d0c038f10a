#!/usr/bin/env python3
"""How long a sweep of a hundred points takes: that of ``tools/model.py sweep``, two processes."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402
from lab.models.sweep import Axes, run  # noqa: E402

SEED = 17
# Times four designs.
AXES = Axes(prefixes=(1, 4, 8, 16, 32), cold=(0.0, 0.05, 0.1, 0.2, 0.4), burst=(1,), slow=(1.0,))


@click.command()
@click.option("--json", "as_json", is_flag=True)
def main(as_json: bool) -> None:
    """Sweep, and print the seconds that it took by the clock and of the processor."""
    jobs = AXES.jobs(seed=SEED)
    began = time.monotonic()
    with run(jobs) as lines:
        points = sum(1 for _ in lines)
    clock = time.monotonic() - began
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    rows = [
        Row("points", points, "", "== 100"),
        Row("by the clock", round(clock, 2), "s", "<= 60"),
        Row("of the processor", round(sum(one.ru_utime + one.ru_stime for one in spent), 2), "s"),
    ]
    show(rows, as_json, provenance.of(__file__, SEED))


if __name__ == "__main__":
    main()
