"""Let many clients ask for minutes while both legs fail at random, and see that nothing is left over.

Every request must have an end within its limit, the router must count no load at the end, its servers must be free, and
its memory must be flat. Retries and breakers are on in one half of the time and off in the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from lab.router.build import BUNDLE_OPTION, Builder, BuildError, Result
from lab.router.harness import ONE_SHOT, Bench, chat
from lab.router.servers import FAILURES
from patchbundle.errors import BundleError

ENVIRONMENT = {"SMG_PD_LOAD_AT_DISPATCH": "1", "SMG_PD_STRICT_ACK": "1", "SMG_PD_ACK_TIMEOUT_MS": "1000"}
# A breaker that is open for a second and a few quick retries: what production has, with shorter times.
RESILIENT = ("--cb-timeout-duration-secs", "1", "--retry-max-retries", "3", "--retry-initial-backoff-ms", "10")
LIMIT = 20.0


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def random_script(dice: random.Random) -> dict[str, Any]:
    """What the servers do with one request: half of the time all is well."""
    script: dict[str, Any] = {"d_tokens": dice.randrange(1, 6), "d_gap": 0.01, "d_first": dice.random() * 0.05}
    roll = dice.random()
    if roll < 0.3:
        script["p_mode"] = dice.choice(FAILURES)
    elif roll < 0.5:
        script["d_mode"] = dice.choice(["http500", "http400", "reset", "cut", "sse_error"])
    return script


async def client(bench: Bench, until: float, dice: random.Random, ends: Counter[str]) -> None:
    """Ask one request after the other; a tenth of them is left by the client on the way."""
    while time.monotonic() < until:
        leaves = dice.random() < 0.1
        body = chat(dice.random() < 0.7, f"prefix {dice.randrange(8)} " * 20, **random_script(dice))
        answer = await bench.ask(body, seconds=dice.random() * 0.1 if leaves else LIMIT)
        if leaves:
            ends["left"] += 1
        elif answer.error == "TimeoutError":
            ends["without an end"] += 1
        else:
            ends[answer.error or str(answer.status)] += 1


def soak(built: Result, seconds: float, clients: int, seed: int) -> list[dict[str, Any]]:
    """Run both halves and return one row for each: flags, ends of requests, what is left over, memory in bytes."""
    rows = []
    for name, flags in (("one shot", ONE_SHOT), ("retries and breakers", RESILIENT)):
        with Bench(built, environment=ENVIRONMENT, flags=flags) as bench:
            bench.run(bench.script(p_delay=0.01))
            ends: Counter[str] = Counter()
            memory: list[int] = []

            async def all_clients(bench: Bench, ends: Counter[str], memory: list[int], until: float) -> None:
                dice = [random.Random(f"{seed} {index}") for index in range(clients)]
                work = asyncio.gather(*(client(bench, until, one, ends) for one in dice))
                while not work.done():
                    memory.append(resident_bytes(bench.router_process.pid))
                    await asyncio.wait([work], timeout=max(0.5, seconds / 40))
                await work

            bench.run(all_clients(bench, ends, memory, time.monotonic() + seconds / 2))
            seen, loads = bench.run(bench.settle(10.0))
            warm = memory[len(memory) // 4 :]
            rows.append(
                {
                    "flags": name,
                    "requests": sum(ends.values()),
                    "ends": dict(sorted(ends.items())),
                    "busy": seen.busy,
                    "loads": loads,
                    "memory_warm": warm[0],
                    "memory_end": warm[-1],
                }
            )
    return rows


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What a soak must not show."""
    found = []
    for row in rows:
        if count := row["ends"].get("without an end", 0):
            found.append(f"{row['flags']}: {count} requests had no end within {LIMIT:.0f} s")
        if row["busy"] or tuple(row["loads"]) != (0, 0):
            found.append(f"{row['flags']}: left over: {row['busy']} requests at the servers, loads {row['loads']}")
        grown = row["memory_end"] - row["memory_warm"]
        if grown > max(64 << 20, row["memory_warm"] // 4):
            found.append(f"{row['flags']}: memory grew by {grown >> 20} MiB")
    return found


@click.command()
@BUNDLE_OPTION
@click.option("--seconds", type=float, default=600, show_default=True)
@click.option("--clients", type=int, default=64, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
def main(root: Path, seconds: float, clients: int, seed: int) -> None:
    """Soak the patched router; print a row of JSON for each half and fail on what must not be."""
    try:
        rows = soak(Builder(root).build("patched"), seconds, clients, seed)
    except (BuildError, BundleError) as error:
        raise click.ClickException(str(error)) from None
    for row in rows:
        click.echo(json.dumps(row))
    if found := faults(rows):
        raise click.ClickException("; ".join(found))


if __name__ == "__main__":
    main()
