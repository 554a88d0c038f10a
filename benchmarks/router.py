"""What the router costs: requests per second and latency of direct, stock and patched, over 1 to 256 connections.

Servers and clients are a compiled program of their own (``benchmarks/router_load.rs``) that does next to nothing, so
that the router is what is measured. Each case is compared with stock in quartets of short blocks, stock case case stock
and the other way round in turn: a machine that is slow for a while slows both, and one that drifts does so for both.
One quartet gives one ratio; what counts is the median over all of them, and its interval says how far it can be
trusted. A second stock router is a case as well: it shows what two equal routers differ by.

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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.report import Row, show
from lab.load.accounting import quantile
from lab.router.build import BUNDLE_OPTION, Builder, BuildError
from lab.router.harness import EVEN, ONE_SHOT, Bench, chat
from patchbundle.errors import BundleError

LOAD = {"SMG_PD_LOAD_AT_DISPATCH": "1"}
STOCK = "stock"
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "stock, a second one": ("stock", {}),
    "patched, gates unset": ("patched", {}),
    "load at dispatch": ("patched", LOAD),
    "both gates": ("patched", LOAD | {"SMG_PD_STRICT_ACK": "1"}),
}
DIRECT = "direct, no router"
CONNECTIONS = (1, 4, 16, 64, 256)
# What the patches may cost, as the median over the quartets.
BOUNDS = {"per_second": ">= 0.98", "p99_ms": "<= 1.05"}
UNITS = {"requests": "requests", "per_second": "req/s", "p50_ms": "ms", "p99_ms": "ms", "cpu_us": "us"}
CONFIDENCE = 0.95


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

    def block(self, bench: Bench, connections: int, seconds: float, direct: bool = False) -> Block:
        """Ask the router of a bench, or both of its servers at once without it.

        Raises:
            click.ClickException: a request failed; then nothing is measured.
        """
        ports = [*bench.prefill_ports, *bench.decode_ports] if direct else [int(bench.router.rpartition(":")[2])]
        command = [str(self.program), "ask", str(seconds), str(connections), *map(str, ports)]
        before = cpu_seconds(bench.router_process.pid)
        done = subprocess.run(command, input=self.body, capture_output=True)
        after = cpu_seconds(bench.router_process.pid)
        if done.returncode:
            raise click.ClickException(f"a request failed: {done.stderr.decode(errors='replace')[-500:]}")
        lasted, *times = (int(line) / 1e9 for line in done.stdout.split())
        return Block(times, lasted, after - before)


@click.command()
@BUNDLE_OPTION
@click.option("--quartets", type=click.IntRange(1), default=12, show_default=True, help="Of each case and connections.")
@click.option("--seconds", type=float, default=0.5, show_default=True, help="Of one block; a quartet has four.")
@click.option("--connections", type=int, multiple=True, default=CONNECTIONS, show_default=True)
@click.option("--profile", type=click.Choice(["dev", "release"]), default="dev", show_default=True)
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write every ratio here, as JSON.")
@click.option("--json", "as_json", is_flag=True)
def main(
    root: Path,
    quartets: int,
    seconds: float,
    connections: tuple[int, ...],
    profile: str,
    stream: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare each case with stock and print medians of the ratios, with their intervals.

    Exit code 1 if a median of a patched case is beyond its bound.
    """
    try:
        builds = {variant: Builder(root, profile).build(variant) for variant in ("stock", "patched")}
    except (BuildError, BundleError) as error:
        raise click.ClickException(str(error)) from None
    measured: list[dict[str, Any]] = []
    with ExitStack() as stack:
        generator = Generator(stack.enter_context(tempfile.TemporaryDirectory()), stream)
        benches = {
            case: stack.enter_context(
                Bench(
                    builds[variant], environment=gates, flags=(*ONE_SHOT, *EVEN), decodes=1, servers=generator.servers
                )
            )
            for case, (variant, gates) in {STOCK: ("stock", dict[str, str]()), **CASES}.items()
        }
        benches[DIRECT] = benches[STOCK]
        for count in connections:
            for bench in benches.values():
                generator.block(bench, count, seconds)
            for number, case in itertools.product(range(quartets), (*CASES, DIRECT)):
                order = (STOCK, case, case, STOCK) if number % 2 else (case, STOCK, STOCK, case)
                blocks = [(name, generator.block(benches[name], count, seconds, name == DIRECT)) for name in order]
                one, stock = (
                    sum((block for name, block in blocks if name == wanted), Block([], 0.0, 0.0)).figures
                    for wanted in (case, STOCK)
                )
                measured.append(
                    {
                        "label": f"{count:>3} connections, {case}",
                        "patched": CASES.get(case, (STOCK,))[0] == "patched",
                        "figures": one,
                        "stock": stock,
                        "ratios": {name: one[name] / stock[name] for name in one if name != "requests"},
                    }
                )
    found = [row for label in dict.fromkeys(one["label"] for one in measured) for row in summary(label, measured)]
    if out:
        made = {
            "script": "benchmarks/router.py",
            "script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "torch": "none",
            "seed": 0,
            "profile": profile,
            "builds": {variant: built.receipt for variant, built in builds.items()},
            "stream": stream,
            "quartets": quartets,
            "seconds": seconds,
            "rows": [asdict(row) | {"holds": row.holds} for row in found],
            "measured": measured,
        }
        out.write_text(json.dumps(made, separators=(",", ":")) + "\n", encoding="utf-8")
    show(found, as_json)


def summary(label: str, measured: list[dict[str, Any]]) -> list[Row]:
    """Medians of the quartets of one label: of its figures, and of its ratios to stock with their intervals."""
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
