"""Many simulations: the four designs at equal memory over prefixes, cold share, bursts and slow decode."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from lab.models.capacity import Budget, Model, tokens
from lab.models.fleet import Design, Fleet, Load, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 1 << 30
Line = Mapping[str, str | int | float]
Job = tuple[Fleet, Load, int]


@dataclass(frozen=True)
class Axes:
    """Independent prefixes, share of prefixes that nobody shares, requests at once, factors on every send."""

    prefixes: tuple[int, ...] = (1, 4, 8, 16, 32)
    cold: tuple[float, ...] = (0.0, 0.1)
    burst: tuple[int, ...] = (1, 4)
    slow: tuple[float, ...] = (1.0, 8.0)

    def jobs(self, gib: float = 6.33, rate: float = 3.4, requests: int = 400, seed: int = 17) -> list[Job]:
        """A job for each design and point. ``gib``: a rank's budget, the same for all; ``rate``: requests per second.

        Raises ValueError if a design cannot hold one request.
        """
        jobs: list[Job] = []
        for design, prefix, share, many, factor in itertools.product(
            Design, self.prefixes, self.cold, self.burst, self.slow
        ):
            load = Load(requests=requests, rate=rate, prefixes=prefix, cold=share, burst=many)
            budget, longest = Budget(int(gib * GIB)), load.prefix + load.fresh
            held = tokens(Model(), design.keeping, 4, budget, gathered=longest)
            if load.prefix + load.fresh > held:
                raise ValueError(
                    f"{gib} GiB: {design.value} holds {held} tokens, a request has {load.prefix + load.fresh}"
                )
            jobs.append((Fleet(design, held, slow=factor), load, seed))
        return jobs


def point(job: Job) -> Line:
    """One simulation, as a line of the sweep."""
    fleet, load, seed = job
    outcome = simulate(fleet, load, seed)
    return {
        "design": fleet.design.value,
        "pool": fleet.pool,
        "prefixes": load.prefixes,
        "cold": load.cold,
        "burst": load.burst,
        "slow": fleet.slow,
        "locked": outcome.peak_locked,
        "free": fleet.pool - outcome.peak_locked,
        "hits": outcome.hit_share,
        "p50 s": outcome.latency(0.5),
        "p99 s": outcome.latency(0.99),
        "busiest GiB": max(outcome.sent) / GIB,
        "busiest / mean": outcome.hot_spot,
        "evictions": outcome.evictions,
        "done / s": outcome.finished / outcome.ended,
    }


@contextmanager
def run(jobs: Sequence[Job]) -> Iterator[Iterator[Line]]:
    """The lines in the order of the jobs, as they come; two processes simulate."""
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as workers:
        yield workers.map(point, jobs, chunksize=4)


def draw(lines: Sequence[Line]) -> Figure:
    """Latency, hits and the hot spot over the number of prefixes, latency over each other axis, a line for each design.

    Each place is the mean over the axes that are not drawn.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    latency = "p99 of prefill and sending, s"
    panels = (
        *(("prefixes", "p99 s", latency), ("prefixes", "hits", "share of prefix hits")),
        ("prefixes", "busiest / mean", "bytes of the busiest source / mean"),
        *((axis, "p99 s", latency) for axis in ("cold", "burst", "slow")),
    )
    names = {
        "prefixes": "independent prefixes",
        "cold": "share of cold prefixes",
        "burst": "requests at once",
        "slow": "slow decode, factor",
    }
    for axes, (axis, key, label) in zip(figure.subplots(2, 3).flat, panels, strict=True):
        for design in Design:
            own = [line for line in lines if line["design"] == design.value]
            places = sorted({line[axis] for line in own})
            axes.plot(
                places,
                [mean(float(line[key]) for line in own if line[axis] == place) for place in places],
                # Hits depend on the pool alone: two lines may lie on each other.
                marker={Design.CP0: "s", Design.ROTATED: "o"}.get(design, "^"),
                linestyle={Design.CP0: "-", Design.LAYER_SPLIT: "-"}.get(design, "--"),
                label=design.value,
            )
        if axis != "cold":
            axes.set_xscale("log", base=2)
        axes.set_xlabel(names[axis])
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize="x-small")
    figure.suptitle("Model, not a measurement")
    return figure
