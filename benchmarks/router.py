"""What the router costs: requests per second and latency of direct, stock and patched, over 1 to 256 connections.

The servers answer at once, so what is measured is the way through the router. Every round measures all cases in turns
of a second or less on the same servers' script, and a ratio is always taken within a round: a machine that is slow for
a while slows all cases. The client and the servers are Python; on two cores they are a large part of every number, and
the ratios are what counts. Build with ``--profile release`` for figures about a deployment.

Run: ``python -m benchmarks.router``
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click

from benchmarks.report import Row, show
from lab.router.build import BUNDLE_OPTION, Builder, BuildError
from lab.router.harness import EVEN, ONE_SHOT, Bench, chat
from patchbundle.errors import BundleError

LOAD = {"SMG_PD_LOAD_AT_DISPATCH": "1"}
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "stock": ("stock", {}),
    "patched, gates unset": ("patched", {}),
    "load at dispatch": ("patched", LOAD),
    "both gates": ("patched", LOAD | {"SMG_PD_STRICT_ACK": "1"}),
}
CONNECTIONS = (1, 4, 16, 64, 256)
# What the patches may cost, as the median over the rounds.
BOUNDS = {"per_second": ">= 0.98", "p99_ms": "<= 1.05"}
Ask = Callable[[aiohttp.ClientSession], Awaitable[bool]]


@dataclass
class Sample:
    """What one case brought in one round: seconds of each request, and seconds of all its turns."""

    times: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def figures(self) -> dict[str, float]:
        """Requests, requests per second, and the median and the 99th percentile in milliseconds."""
        ordered = sorted(self.times)
        return {
            "requests": len(ordered),
            "per_second": len(ordered) / self.seconds,
            "p50_ms": statistics.median(ordered) * 1e3,
            "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3,
        }


async def measure(ask: Ask, connections: int, seconds: float, sample: Sample) -> None:
    """Ask over some connections for some seconds, and add what that took to ``sample``."""
    failed = 0
    begin = time.perf_counter()
    until = begin + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal failed
        while (asked := time.perf_counter()) < until:
            failed += not await ask(session)
            sample.times.append(time.perf_counter() - asked)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(connections)))
    sample.seconds += time.perf_counter() - begin
    if failed:
        raise click.ClickException(f"{failed} of {len(sample.times)} requests failed; nothing is measured")


def through(bench: Bench, stream: bool) -> Ask:
    """Ask the router of a bench."""
    body = chat(stream, "benchmark")

    async def ask(session: aiohttp.ClientSession) -> bool:
        async with session.post(bench.router + "/v1/chat/completions", json=body) as response:
            await response.read()
            return response.status == 200

    return ask


def past(bench: Bench, stream: bool) -> Ask:
    """Ask both servers of a bench as the router would, without it."""
    rooms = itertools.count(1)
    ports = (bench.prefill_ports[0], bench.decode_ports[0])

    async def leg(session: aiohttp.ClientSession, port: int, body: dict[str, Any]) -> bool:
        async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as response:
            await response.read()
            return response.status == 200

    async def ask(session: aiohttp.ClientSession) -> bool:
        body = chat(stream, "benchmark") | {"bootstrap_room": next(rooms)}
        return all(await asyncio.gather(*(leg(session, port, body) for port in ports)))

    return ask


@click.command()
@BUNDLE_OPTION
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option("--seconds", type=float, default=6.0, show_default=True, help="Of one case in one round.")
@click.option("--turns", type=int, default=8, show_default=True, help="In so many pieces, the cases taking turns.")
@click.option("--profile", type=click.Choice(["dev", "release"]), default="dev", show_default=True)
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a measurement.")
def main(root: Path, rounds: int, seconds: float, turns: int, profile: str, stream: bool, as_json: bool) -> None:
    """Measure and print a row for each case, number of connections and round, with its ratio to stock in that round.

    Exit code 1 if the median ratio of a patched case is beyond its bound.
    """
    try:
        builds = {variant: Builder(root, profile).build(variant) for variant in ("stock", "patched")}
    except (BuildError, BundleError) as error:
        raise click.ClickException(str(error)) from None
    with ExitStack() as stack:
        benches = {
            case: stack.enter_context(Bench(builds[variant], environment=gates, flags=(*ONE_SHOT, *EVEN), decodes=1))
            for case, (variant, gates) in CASES.items()
        }
        for bench in benches.values():
            bench.run(bench.script(p_delay=0, d_first=0, d_tokens=1, d_gap=0))
        asks = {case: (bench, through(bench, stream)) for case, bench in benches.items()}
        asks["direct"] = (benches["stock"], past(benches["stock"], stream))
        ratios: dict[tuple[str, int, str], list[float]] = {}
        if not as_json:
            click.echo(
                f"{'round':>5} {'connections':>11} {'case':22} {'per s':>8} {'p50 ms':>8} {'p99 ms':>8}  to stock"
            )
        for number, connections in itertools.product(range(1, rounds + 1), CONNECTIONS):
            samples = {case: Sample() for case in asks}
            for turn in range(turns):
                # Whoever comes first in one turn comes last in the next.
                for case in list(asks)[:: -1 if turn % 2 else 1]:
                    bench, ask = asks[case]
                    bench.run(measure(ask, connections, seconds / turns, samples[case]))
            stock = samples["stock"].figures
            for case, sample in samples.items():
                row = sample.figures
                compared = {name: row[name] / stock[name] for name in ("per_second", "p50_ms", "p99_ms")}
                for name, value in compared.items():
                    ratios.setdefault((case, connections, name), []).append(value)
                if as_json:
                    click.echo(json.dumps({"round": number, "connections": connections, "case": case} | row))
                    continue
                figures = f"{row['per_second']:8.1f} {row['p50_ms']:8.2f} {row['p99_ms']:8.2f}"
                told = " ".join(f"{value:.3f}" for value in compared.values())
                click.echo(f"{number:>5} {connections:>11} {case:22} {figures}  {told}")
        show(
            [
                Row(
                    f"{case}, {connections:>3} connections: {name} to stock",
                    statistics.median(values),
                    "x",
                    BOUNDS[name],
                )
                for (case, connections, name), values in ratios.items()
                if case in CASES and case != "stock" and name in BOUNDS
            ],
            as_json,
        )


if __name__ == "__main__":
    main()
