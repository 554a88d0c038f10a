#!/usr/bin/env python3
"""The one file against the tools in place, on the real bases: what a node pays for having no installation.

Both arms apply every role's whole series to trees of their own, in turns, so that what else the machine does falls on
both; beside the median of the pairs' ratios stand the least and the most of them. In place the interpreter has compiled
the tools already; of the one file what a verb needs is compiled at each start. Then the guarded start: the whole
command, from the start of the interpreter to that of the command that it becomes. The trees lie in TMPDIR: on a disk
that others write to, fsync takes longer than everything else; in memory it takes nothing, to the harm of the one file.
"""

from __future__ import annotations

import compileall
import hashlib
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from benchmarks.report import Row, show  # noqa: E402
from benchmarks.tool import Spent, spent  # noqa: E402
from lab import provenance  # noqa: E402
from lab.release import pyz, wheels  # noqa: E402
from patchbundle import bases, fetch  # noqa: E402
from patchbundle.bases import Base  # noqa: E402


def call(*command: str | Path) -> None:
    """A command that has to succeed."""
    words = [str(part) for part in command]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}: {' '.join(words)}\n{done.stderr}")


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

    def run(self, arm: str, verb: str) -> Spent:
        """What a verb takes on the trees of an arm, one process a role."""

        def all_roles() -> None:
            for base in self.bases:
                call(sys.executable, self.arms[arm], verb, "--root", self.trees[arm, base.role])

        return spent(all_roles)

    def start(self, arm: str, role: str) -> Spent:
        command = (sys.executable, "-I", self.arms[arm], "exec", role, "--expect", "applied")
        return spent(lambda: call(*command, "--root", self.trees[arm, role], "--", "true"))


def medians(name: str, spents: list[Spent], must: str | None = None) -> list[Row]:
    """Two rows: by the clock, which is what is bounded, and of the processor, which a busy machine disturbs less."""
    return [
        Row(name, statistics.median(item.wall for item in spents), "s", must),
        Row(f"{name}: processor", statistics.median(item.processor for item in spents), "s"),
    ]


@click.command()
@click.option("--runs", default=7, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(runs: int, as_json: bool) -> None:
    """Measure, and print one table."""
    # As an installer leaves it; a clone in which nothing ran yet would make the one file look good.
    compileall.compile_dir(str(ROOT / "tools"), quiet=1)
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        node = Node(Path(temporary))
        applied: dict[str, list[Spent]] = {arm: [] for arm in node.arms}
        for number in range(runs + 1):
            # First one, then the other, in turns; the first round of all fills caches and does not count.
            for arm in sorted(node.arms, reverse=bool(number % 2)):
                took = node.run(arm, "apply")
                if number < runs:
                    node.run(arm, "revert")
                if number:
                    applied[arm].append(took)
        started = {base.role: [node.start("one file", base.role) for _ in range(runs)] for base in node.bases}
        bare = [spent(lambda: call(sys.executable, "-I", "-c", "pass")) for _ in range(runs)]
        digest = hashlib.sha256(node.file.read_bytes()).hexdigest()
    pairs = list(zip(applied["one file"], applied["in place"], strict=True))
    rows = [row for arm, items in applied.items() for row in medians(f"apply of every role, {arm}", items)]
    ratio = "apply, one file / in place"
    clock = [one.wall / two.wall for one, two in pairs]
    busy = [one.processor / two.processor for one, two in pairs]
    rows.append(Row(ratio, statistics.median(clock), "ratio", "<= 1.5"))
    rows.append(Row(f"{ratio}: processor", statistics.median(busy), "ratio"))
    for words, pick in (("the least of the pairs", min), ("the most of the pairs", max)):
        rows += [
            Row(f"{ratio}: {words}", pick(clock), "ratio"),
            Row(f"{ratio}: processor, {words}", pick(busy), "ratio"),
        ]
    for role, items in started.items():
        rows += medians(f"exec of {role}, verified, until it is the command", items, "<= 0.25")
    rows += medians("python -c pass", bare)
    if not as_json:
        click.echo(f"one file: {digest}")
    show(rows, as_json, provenance.of(__file__, None))


if __name__ == "__main__":
    main()
