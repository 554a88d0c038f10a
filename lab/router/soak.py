"""Let many clients ask for minutes while both legs fail at random, and see that nothing is left over.

Every request must have an end within its limit, the router must count no load at the end, its servers must be free, and
its memory must be flat. Retries and breakers are on in one half of the time and off in the other.

Every prompt is a new one. The prefix trees of ``cache_aware`` keep it, about 7 KB each, until they have reached
``--max-tree-size``: memory that grows by design, and by how much in a minute is the machine's speed. So the trees are
bounded here, the warm-up fills them, and what is judged is the growth a request after it, with eviction at work.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from lab import provenance
from lab.router.build import BUNDLE_OPTION, VARIANTS, Builder, BuildError, Result
from lab.router.harness import ONE_SHOT, Bench, chat
from lab.router.servers import FAILURES
from patchbundle.errors import BundleError

ENVIRONMENT = {"SMG_PD_LOAD_AT_DISPATCH": "1", "SMG_PD_STRICT_ACK": "1", "SMG_PD_ACK_TIMEOUT_MS": "1000"}
# A breaker that is open for a second and a few quick retries: what production has, with shorter times.
RESILIENT = ("--cb-timeout-duration-secs", "1", "--retry-max-retries", "3", "--retry-initial-backoff-ms", "10")
LIMIT = 20.0
# Trees of a few dozen prompts, swept every second: full within the warm-up, and never the same.
SMALL_TREES = ("--max-tree-size", "2000", "--eviction-interval-secs", "1")
# Requests until trees, connections and the allocator's arenas have their size: flat from 2,700 on, as measured.
WARM_REQUESTS = 3000
# So many more are judged, whatever the time says: trees without a bound would grow by 10 MB with them.
LEAST_REQUESTS = 2000
# What the allocator may move with one burst, and what a request may leave behind for good.
ALLOWED_BYTES, ALLOWED_BYTES_A_REQUEST = 4 << 20, 64


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that no file is behind: a page of the program that is read late is no growth."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@dataclass
class Load:
    """What the clients of one half share: when they stop, and how far they are.

    They stop at ``until`` (seconds of CLOCK_MONOTONIC), but not before ``least`` requests had an end. ``memory`` holds
    pairs of the number of requests and the router's bytes, taken after the warm-up.
    """

    until: float
    least: int
    ends: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, int]] = field(default_factory=list)
    lost: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """When each request without an end was asked, and its script: one moment is a stall, one script a fault."""

    @property
    def requests(self) -> int:
        """Requests that had an end."""
        return sum(self.ends.values())

    @property
    def over(self) -> bool:
        """Whether the clients may stop."""
        return time.monotonic() >= self.until and self.requests >= self.least

    def growth(self) -> tuple[int, int]:
        """Requests and bytes between the middles of the first and of the last quarter of the samples, by medians."""
        quarter = max(1, len(self.memory) // 4)
        first, last = self.memory[:quarter], self.memory[-quarter:]
        requests, grown = (
            statistics.median(one[index] for one in last) - statistics.median(one[index] for one in first)
            for index in (0, 1)
        )
        return int(requests), int(grown)


def random_script(dice: random.Random) -> dict[str, Any]:
    """What the servers do with one request: half of the time all is well."""
    script: dict[str, Any] = {"d_tokens": dice.randrange(1, 6), "d_gap": 0.01, "d_first": dice.random() * 0.05}
    # Longer than the deadline of the acknowledgement; the stock router has nothing else to end it.
    script["d_timeout"] = 2.0
    roll = dice.random()
    if roll < 0.3:
        script["p_mode"] = dice.choice(FAILURES)
    elif roll < 0.5:
        script["d_mode"] = dice.choice(["http500", "http400", "reset", "cut", "sse_error"])
    return script


async def client(bench: Bench, load: Load, dice: random.Random) -> None:
    """Ask one request after the other; a tenth of them is left by the client on the way."""
    while not load.over:
        leaves = dice.random() < 0.1
        stream, prompt, script = dice.random() < 0.7, f"prefix {dice.randrange(8)} " * 20, random_script(dice)
        body, asked = chat(stream, prompt, **script), time.monotonic()
        answer = await bench.ask(body, seconds=dice.random() * 0.1 if leaves else LIMIT)
        if leaves:
            load.ends["left"] += 1
        elif answer.error == "TimeoutError":
            load.ends["without an end"] += 1
            load.lost.append((round(asked, 3), {"stream": stream, **script}))
        else:
            load.ends[answer.error or str(answer.status)] += 1


async def ask_all(bench: Bench, load: Load, clients: int, seed: int, warm: int) -> None:
    """Run the clients and take the router's memory twice a second once ``warm`` requests had an end."""
    dice = [random.Random(f"{seed} {index}") for index in range(clients)]
    work = asyncio.gather(*(client(bench, load, one) for one in dice))
    while not work.done():
        if load.requests >= warm:
            load.memory.append((load.requests, anonymous_bytes(bench.router_process.pid)))
        await asyncio.wait([work], timeout=0.5)
    await work


def half(
    built: Result,
    flags: Sequence[str],
    seconds: float,
    clients: int,
    seed: int,
    trees: Sequence[str] = SMALL_TREES,
    warm: int = WARM_REQUESTS,
) -> dict[str, Any]:
    """Soak one router; returns ends of requests, what is left over, and the growth of its memory in bytes.

    It lasts ``seconds``, and longer where fewer than ``LEAST_REQUESTS`` had an end after the ``warm`` first ones.
    """
    gates = ENVIRONMENT if built.receipt["patches"] else {}
    with Bench(built, environment=gates, flags=(*flags, *trees)) as bench:
        bench.run(bench.script(p_delay=0.01))
        load = Load(time.monotonic() + seconds, warm + LEAST_REQUESTS)
        bench.run(ask_all(bench, load, clients, seed, warm))
        seen, loads = bench.run(bench.settle(10.0))
    requests, grown = load.growth()
    return {
        "requests": load.requests,
        "ends": dict(sorted(load.ends.items())),
        "lost": load.lost,
        "busy": seen.busy,
        "loads": loads,
        "memory": load.memory[-1][1],
        "judged": requests,
        "grown": grown,
    }


def soak(built: Result, seconds: float, clients: int, seed: int) -> list[dict[str, Any]]:
    """Run both halves and return one row for each."""
    halves = (("one shot", ONE_SHOT), ("retries and breakers", RESILIENT))
    return [{"flags": name} | half(built, flags, seconds / 2, clients, seed) for name, flags in halves]


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What a soak must not show."""
    found = []
    for row in rows:
        if count := row["ends"].get("without an end", 0):
            found.append(f"{row['flags']}: {count} requests had no end within {LIMIT:.0f} s")
        if row["busy"] or tuple(row["loads"]) != (0, 0):
            found.append(f"{row['flags']}: left over: {row['busy']} requests at the servers, loads {row['loads']}")
        if row["grown"] > ALLOWED_BYTES + ALLOWED_BYTES_A_REQUEST * row["judged"]:
            each = row["grown"] // row["judged"]
            found.append(f"{row['flags']}: memory grew by {each} bytes a request over {row['judged']} requests")
    return found


@click.command()
@BUNDLE_OPTION
@click.option("--seconds", type=float, default=600, show_default=True)
@click.option("--clients", type=int, default=64, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--variant", type=click.Choice(VARIANTS), default="patched", show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here as JSON.")
def main(root: Path, seconds: float, clients: int, seed: int, variant: str, out: Path | None) -> None:
    """Soak a router; print a row of JSON for each half and fail on what must not be."""
    try:
        built = Builder(root).build(variant)
        rows = soak(built, seconds, clients, seed)
    except (BuildError, BundleError) as error:
        raise click.ClickException(str(error)) from None
    if out is not None:
        result = {**provenance.of(__file__, seed), "build": built.receipt, "seconds": seconds, "rows": rows}
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        click.echo(json.dumps(row))
    if found := faults(rows):
        raise click.ClickException("; ".join(found))


if __name__ == "__main__":
    main()
