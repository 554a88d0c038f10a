"""What the router costs in instructions a request, patched against stock: a count that no other load moves.

Each router runs under valgrind's callgrind, which counts what it executes between two moments; meanwhile one connection
asks, as in ``benchmarks/router.py``. Time is not measured: valgrind makes everything some fifty times slower. The files
of callgrind are kept with ``--keep``, for ``callgrind_annotate``.

Run: ``python -m benchmarks.router_instructions``
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from benchmarks.report import Row, show
from benchmarks.router import CASES, STOCK, Generator
from lab import provenance
from lab.router.build import BUNDLE_OPTION, Builder, BuildError, Result
from lab.router.harness import EVEN, ONE_SHOT, Bench
from patchbundle.errors import BundleError

# Nothing but the requests is to be counted.
FLAGS = (*ONE_SHOT, *EVEN, "--health-check-interval-secs", "3600")


class Counted(Bench):
    """A bench whose router runs under callgrind, which counts nothing until it is told to."""

    def __init__(self, built: Result, counts: Path, **options: Any) -> None:
        super().__init__(built, flags=FLAGS, decodes=1, **options)
        self.counts = counts

    def command(self, router: int, metrics: int) -> list[str]:
        """The command line of the router, below that of valgrind."""
        count = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={self.counts}"]
        return [*count, *super().command(router, metrics)]

    def wait(self, condition: Callable[[], Awaitable[bool]], seconds: float, name: str) -> None:
        """As the bench waits, but with the patience that valgrind needs."""
        super().wait(condition, 10 * seconds, name)

    def control(self, *words: str) -> None:
        """Tell callgrind something, and wait until it has heard."""
        subprocess.run(["callgrind_control", *words, str(self.router_process.pid)], check=True, capture_output=True)


def total(text: str) -> int:
    """Instructions that a file of callgrind counts in all.

    Raises:
        click.ClickException: it has no such line.
    """
    for line in text.splitlines():
        if line.startswith("totals:"):
            return int(line.split()[1])
    raise click.ClickException("callgrind wrote no total")


def instructions(bench: Counted, generator: Generator, seconds: float) -> tuple[float, int]:
    """Instructions a request, and how many requests they were counted over; the first ones only warm it up."""
    generator.block(bench, 1, seconds / 3)
    bench.control("--instr=on")
    requests = len(generator.block(bench, 1, seconds).times)
    bench.control("--instr=off")
    bench.control("--dump")
    # The dump is a file of its own, numbered.
    return total(Path(f"{bench.counts}.1").read_text(errors="replace")) / requests, requests


@click.command()
@BUNDLE_OPTION
@click.option("--seconds", type=float, default=20.0, show_default=True, help="For how long each router is asked.")
@click.option("--policy", default="cache_aware", show_default=True)
@click.option("--profile", type=click.Choice(["dev", "release"]), default="dev", show_default=True)
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A folder for the counts.")
@click.option("--json", "as_json", is_flag=True)
def main(root: Path, seconds: float, policy: str, profile: str, stream: bool, keep: Path | None, as_json: bool) -> None:
    """Count and print instructions a request, and their ratio to stock."""
    try:
        builds = {variant: Builder(root, profile).build(variant) for variant in ("stock", "patched")}
    except (BuildError, BundleError) as error:
        raise click.ClickException(str(error)) from None
    rows, stock = [], 0.0
    cases = {STOCK: ("stock", dict[str, str]())} | {name: case for name, case in CASES.items() if case[0] != "stock"}
    with ExitStack() as stack:
        generator = Generator(stack.enter_context(tempfile.TemporaryDirectory()), stream)
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for case, (variant, gates) in cases.items():
            counts = folder / case.replace(", ", "-").replace(" ", "-")
            bench = Counted(builds[variant], counts, environment=gates, policy=policy, servers=generator.servers)
            with bench:
                each, requests = instructions(bench, generator, seconds)
            stock = stock or each
            rows.append(Row(f"{case}: requests", requests, "requests"))
            rows.append(Row(f"{case}: instructions a request", each, ""))
            rows.append(Row(f"{case}: to stock", each / stock, "x"))
    show(rows, as_json, provenance.of(__file__, None))


if __name__ == "__main__":
    main()
