#!/usr/bin/env python3
"""The one file against the tools in place, on the real bases: what a node pays for having no installation.

Both arms apply every role's whole series to trees of their own, in turns, so that what else the machine does falls on
both. In place the interpreter has compiled the tools already; the one file is compiled at each start. Then the guarded
start: the whole command, from the start of the interpreter to that of the command that it becomes.
"""

from __future__ import annotations

import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402
from lab.release import pyz, wheels  # noqa: E402
from patchbundle import bases, fetch  # noqa: E402
from patchbundle.bases import Base  # noqa: E402


def timed(*command: str | Path) -> float:
    """Seconds of a command that has to succeed."""
    words = [str(part) for part in command]
    began = time.perf_counter()
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}: {' '.join(words)}\n{done.stderr}")
    return took


class Node:
    """Trees of every role for each arm, and the one file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "patchbundle.pyz"
        self.file.write_bytes(pyz.build(ROOT, ROOT, wheels.fetched(ROOT / "requirements" / "node.txt")))
        self.arms = {"in place": ROOT / "tools" / "apply.py", "one file": self.file}
        self.bases: list[Base] = list(bases.load(ROOT / "config" / "bases.toml").values())
        self.trees = {
            (arm, base.role): folder / arm.replace(" ", "-") / base.role for arm in self.arms for base in self.bases
        }
        for (_, role), tree in self.trees.items():
            base = next(base for base in self.bases if base.role == role)
            fetch.unpack(fetch.fetch(base, fetch.default_archive(base)), tree)

    def run(self, arm: str, verb: str, *more: str | Path) -> float:
        """Seconds that a verb takes on the trees of an arm, one process a role."""
        command = (sys.executable, self.arms[arm], verb)
        return sum(timed(*command, "--root", self.trees[arm, base.role], *more) for base in self.bases)

    def start(self, arm: str, role: str) -> float:
        command = (sys.executable, "-I", self.arms[arm], "exec", role, "--expect", "applied")
        return timed(*command, "--root", self.trees[arm, role], "--", "true")


@click.command()
@click.option("--runs", default=7, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(runs: int, as_json: bool) -> None:
    """Measure, and print one table."""
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        node = Node(Path(temporary))
        applied: dict[str, list[float]] = {arm: [] for arm in node.arms}
        for number in range(runs + 1):
            # First one, then the other, in turns; the first round of all fills caches and does not count.
            for arm in sorted(node.arms, reverse=bool(number % 2)):
                took = node.run(arm, "apply")
                node.run(arm, "revert") if number < runs else None
                if number:
                    applied[arm].append(took)
        started = {
            base.role: statistics.median(node.start("one file", base.role) for _ in range(runs)) for base in node.bases
        }
        bare = statistics.median(timed(sys.executable, "-I", "-c", "pass") for _ in range(runs))
        digest = hashlib.sha256(node.file.read_bytes()).hexdigest()
    medians = {arm: statistics.median(times) for arm, times in applied.items()}
    ratios = [one / two for one, two in zip(applied["one file"], applied["in place"], strict=True)]
    rows = [Row(f"apply of every role, {arm}", value, "s") for arm, value in medians.items()]
    rows.append(Row("apply, one file / in place", statistics.median(ratios), "ratio", "<= 1.5"))
    rows += [
        Row(f"exec of {role}, verified, until it is the command", value, "s", "<= 0.25")
        for role, value in started.items()
    ]
    rows.append(Row("python -c pass", bare, "s"))
    if not as_json:
        click.echo(f"one file: {digest}")
    show(rows, as_json, provenance.of(__file__, None))


if __name__ == "__main__":
    main()
