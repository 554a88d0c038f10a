"""What the router costs: requests per second and latency of direct, stock and patched, over 1 to 256 connections.

Servers and clients are a compiled program of their own (``benchmarks/router_load.rs``) that does next to nothing, so
that the router is what is measured. In every round each case gets a new router, and a new stock router as its partner:
both start together, each with servers of its own, and are asked the same number of requests, in quartets of short
blocks, partner case case partner and the other way round in turn. A machine that is slow for a while slows both, one
that drifts does so for both, and neither is older or has done more. One quartet gives one ratio, and one pair of
processes one quartet for each number of connections, so that the luck of a process is in the spread between rounds;
what counts is the median over the rounds, and its interval says how far it can be trusted. Stock against stock is a
case as well: it shows how far the method itself is off.

Build with ``--profile release`` for figures about a deployment. Run: ``python -m benchmarks.router --out RESULT.json``
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.report import Row, show
from lab.load.accounting import quantile
from lab.router.build import BUNDLE_OPTION, Builder, BuildError, Result
from lab.router.harness import EVEN, ONE_SHOT, Bench, chat
from patchbundle.errors import BundleError

LOAD = {"SMG_PD_LOAD_AT_DISPATCH": "1"}
STOCK = "stock"
SECOND = "stock, a second one"
CASES: dict[str, tuple[str, dict[str, str]]] = {
    SECOND: ("stock", {}),
    "patched, gates unset": ("patched", {}),
    "load at dispatch": ("patched", LOAD),
    "both gates": ("patched", LOAD | {"SMG_PD_STRICT_ACK": "1"}),
}
DIRECT = "direct, no router"
CONNECTIONS = (1, 4, 16, 64, 256)
# What the patches may cost, as the median over the rounds.
BOUNDS = {"per_second": ">= 0.98", "p99_ms": "<= 1.05"}
UNITS = {"requests": "requests", "per_second": "req/s", "p50_ms": "ms", "p99_ms": "ms", "cpu_us": "us"}
CONFIDENCE = 0.95
# Before each block, in seconds. Even beside real-time threads Linux gives other work 50 ms of every second, all at
# once: so it has them between the blocks and not within one.
PAUSE = 0.1
# No limit to a block's time, or to its requests.
LONG, MANY = 3600.0, 1 << 62

Servers = Callable[[Path, Sequence[int]], list[str]]


@dataclass
class Block:
    """One case asked for a while: seconds of each request, seconds in all, and CPU seconds of its router."""

    times: list[float]
    seconds: float
    cpu: float

    def __add__(self, other: Block) -> Block:
        return Block(self.times + other.times, self.seconds + other.seconds, self.cpu + other.cpu)

    @property
    def figures(self) -> dict[str, float]:
        """Requests per second, median and 99th percentile in milliseconds, CPU of the router in us a request."""
        return {
            "requests": len(self.times),
            "per_second": len(self.times) / self.seconds,
            "p50_ms": quantile(self.times, 0.5) * 1e3,
            "p99_ms": quantile(self.times, 0.99) * 1e3,
            "cpu_us": self.cpu / len(self.times) * 1e6,
        }


def middle(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Median, and the interval of order statistics that holds the true median with at least that confidence.

    Nothing is assumed of the values but that they are independent. With too few of them it is all of their range.
    """
    ordered, tail, out = sorted(values), 0.0, 0
    while out < len(ordered) // 2:
        tail += math.comb(len(ordered), out) / 2 ** len(ordered)
        if tail > (1 - confidence) / 2:
            break
        out += 1
    low = max(out - 1, 0)
    return statistics.median(ordered), ordered[low], ordered[len(ordered) - 1 - low]


def cpu_seconds(pid: int) -> float:
    """CPU time that the living threads of a process have had, in seconds; a router keeps its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class Generator:
    """The compiled servers and clients."""

    def __init__(self, folder: str, stream: bool) -> None:
        self.program = Path(folder) / "load"
        source = Path(__file__).with_name("router_load.rs")
        subprocess.run(["rustc", "-O", "--edition", "2021", "-o", self.program, source], check=True)
        self.body = json.dumps(chat(stream, "benchmark"), separators=(",", ":")).encode()

    def servers(self, model: Path, ports: Sequence[int]) -> list[str]:
        """The command line of workers on ``ports``."""
        return [str(self.program), "serve", str(model), *map(str, ports)]

    def block(
        self, bench: Bench, connections: int, seconds: float = LONG, requests: int = MANY, direct: bool = False
    ) -> Block:
        """Ask the router of a bench, or both of its servers at once without it, for so long or so often.

        Raises:
            click.ClickException: a request failed; then nothing is measured.
        """
        ports = [*bench.prefill_ports, *bench.decode_ports] if direct else [int(bench.router.rpartition(":")[2])]
        command = [str(self.program), "ask", *map(str, (seconds, requests, connections, *ports))]
        time.sleep(PAUSE)
        before = cpu_seconds(bench.router_process.pid)
        done = subprocess.run(command, input=self.body, capture_output=True)
        after = cpu_seconds(bench.router_process.pid)
        if done.returncode:
            raise click.ClickException(f"a request failed: {done.stderr.decode(errors='replace')[-500:]}")
        lasted, *times = (int(line) / 1e9 for line in done.stdout.split())
        return Block(times, lasted, after - before)


def pair(
    stack: ExitStack, builds: Mapping[str, Result], case: str, turned: bool, policy: str, servers: Servers
) -> list[Bench]:
    """Start a case's router and its stock partner, the partner first if ``turned``; returns the case's first."""
    variants = [CASES[case], CASES[SECOND]]
    benches = [
        Bench(builds[variant], environment=gates, flags=(*ONE_SHOT, *EVEN), decodes=1, policy=policy, servers=servers)
        for variant, gates in variants
    ]
    for bench in reversed(benches) if turned else benches:
        stack.enter_context(bench)
    return benches


def quartet(
    generator: Generator, benches: Sequence[Bench], connections: int, requests: int, turned: bool
) -> list[Block]:
    """Warm both up, then four blocks of as many requests each; returns what the case did, and its partner."""
    for bench in benches:
        generator.block(bench, connections, requests=requests // 2)
    sums = [Block([], 0.0, 0.0) for _ in benches]
    for index in (1, 0, 0, 1) if turned else (0, 1, 1, 0):
        sums[index] += generator.block(benches[index], connections, requests=requests)
    return sums


@click.command()
@BUNDLE_OPTION
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="New routers in each.")
@click.option("--seconds", type=float, default=0.4, show_default=True, help="Of one block, of a stock router.")
@click.option("--connections", type=int, multiple=True, default=CONNECTIONS, show_default=True)
@click.option("--profile", type=click.Choice(["dev", "release"]), default="dev", show_default=True)
@click.option("--policy", default="cache_aware", show_default=True)
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write every ratio here, as JSON.")
@click.option("--more", is_flag=True, help="Add the rounds to those in --out, of the same script, builds and settings.")
@click.option("--json", "as_json", is_flag=True)
def main(
    root: Path,
    rounds: int,
    seconds: float,
    connections: tuple[int, ...],
    profile: str,
    policy: str,
    stream: bool,
    out: Path | None,
    more: bool,
    as_json: bool,
) -> None:
    """Compare each case with stock and print medians of the ratios, with their intervals.

    Exit code 1 if a median of a patched case is beyond its bound.
    """
    try:
        builds = {variant: Builder(root, profile).build(variant) for variant in ("stock", "patched")}
    except (BuildError, BundleError) as error:
        raise click.ClickException(str(error)) from None
    head = {
        "script": "benchmarks/router.py",
        "script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "torch": "none",
        "seed": 0,
        "profile": profile,
        "builds": {variant: built.receipt for variant, built in builds.items()},
        "policy": policy,
        "stream": stream,
        "seconds": seconds,
        "connections": list(connections),
    }
    before: dict[str, Any] = earlier(out, head) if more else {"rounds": 0, "measured": []}
    measured: list[dict[str, Any]] = before["measured"]

    def note(case: str, count: int, one: dict[str, float], stock: dict[str, float]) -> None:
        measured.append(
            {
                "label": f"{count:>3} connections, {case}",
                "patched": CASES.get(case, (STOCK,))[0] == "patched",
                "figures": one,
                "stock": stock,
                "ratios": {name: one[name] / stock[name] for name in one if name != "requests"},
            }
        )

    with tempfile.TemporaryDirectory() as folder:
        generator = Generator(folder, stream)
        with ExitStack() as stack:
            gauge, _ = pair(stack, builds, SECOND, False, policy, generator.servers)
            requests = {count: len(generator.block(gauge, count, seconds).times) for count in connections}
        for number, case in itertools.product(range(before["rounds"], before["rounds"] + rounds), CASES):
            with ExitStack() as stack:
                benches = pair(stack, builds, case, number % 2 == 1, policy, generator.servers)
                for place, count in enumerate(connections):
                    turned = (number + place) % 2 == 1
                    one, stock = (
                        block.figures for block in quartet(generator, benches, count, requests[count], turned)
                    )
                    note(case, count, one, stock)
                    if case == SECOND:
                        direct = [
                            generator.block(bench, count, requests=requests[count], direct=True) for bench in benches
                        ]
                        note(DIRECT, count, sum(direct, Block([], 0.0, 0.0)).figures, stock)
    found = [row for label in dict.fromkeys(one["label"] for one in measured) for row in summary(label, measured)]
    if out:
        rows = [asdict(row) | {"holds": row.holds} for row in found]
        made = head | {"rounds": before["rounds"] + rounds, "rows": rows, "measured": measured}
        out.write_text(json.dumps(made, separators=(",", ":")) + "\n", encoding="utf-8")
    show(found, as_json)


def earlier(out: Path | None, head: Mapping[str, Any]) -> dict[str, Any]:
    """The result in ``out``, to which rounds are to be added.

    Raises:
        click.ClickException: there is none, or it was not made in the same way.
    """
    try:
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out else {}
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--more: {out} holds no result: {error}") from None
    if other := [name for name, value in head.items() if result.get(name) != value]:
        raise click.ClickException(f"--more: {out or '--out is missing'}: another {', '.join(other)} than in this run")
    return result


def summary(label: str, measured: list[dict[str, Any]]) -> list[Row]:
    """Medians over the rounds of one label: of its figures, and of its ratios to stock with their intervals."""
    own = [one for one in measured if one["label"] == label]
    bounds = BOUNDS if own[0]["patched"] else {}
    found = [
        Row(f"{label}: {name}", statistics.median(one["figures"][name] for one in own), UNITS[name])
        for name in own[0]["figures"]
    ]
    for name in own[0]["ratios"]:
        median, low, high = middle([one["ratios"][name] for one in own])
        found.append(Row(f"{label}: {name} to stock", median, "x", bounds.get(name)))
        found += [Row(f"{label}: {name} to stock, {end}", value, "x") for end, value in (("low", low), ("high", high))]
    return found


if __name__ == "__main__":
    main()
