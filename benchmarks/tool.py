#!/usr/bin/env python3
"""One process of ours against loops of `git apply` and quilt on the same long series, on a real base.

Every arm starts from an unpacked base and does the same work: check every file of the release against its SHA-256,
put on all patches, check the release's untouched files and every touched one again, take all patches off, check the
whole release once more. The others check with `sha256sum -c` and, where they are asked to be durable, end each side
with `sync -f`. Ratios are of wall-clock medians in one run; the machine's noise is in all arms alike.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from benchmarks import series  # noqa: E402
from benchmarks.report import Row, show  # noqa: E402
from patchbundle import bases, fetch, manifest  # noqa: E402
from patchbundle import plan as plan_module  # noqa: E402
from patchbundle.identity import File  # noqa: E402

TOOL = ROOT / "tools" / "apply.py"
CHECK = ROOT / "tools" / "check_sources.py"


def run(*command: str | Path, cwd: Path | None = None) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, check=True, stdout=subprocess.DEVNULL)


def sums(files: dict[str, bytes], place: Path) -> Path:
    """A list for `sha256sum -c`."""
    place.write_text("".join(f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in sorted(files.items())))
    return place


class Arms:
    """The same series as three tools want it."""

    def __init__(self, folder: Path, patches: int, files: int, hunks: int) -> None:
        self.base = bases.load(ROOT / "config" / "bases.toml")["sglang-0.5.19"]
        place = fetch.fetch(self.base, fetch.default_archive(self.base))
        self.archive = place
        members = dict(fetch.members(place))
        self.bundle = series.make(ROOT, folder / "bundle", members, patches=patches, files=files, hunks=hunks)
        bundle = manifest.load(self.bundle)
        touched = plan_module.touched_paths(bundle, self.base)
        top = plan_module.levels(bundle, self.base, {path: members.get(path) for path in touched})[-1]
        patched: dict[str, File | None] = {**members, **top}
        self.before = sums({path: file.data for path, file in members.items()}, folder / "before.sha256")
        self.after = sums({path: file.data for path, file in patched.items() if file}, folder / "after.sha256")
        self.diffs = folder / "diffs"
        self.diffs.mkdir()
        self.names = [f"change-{number}.diff" for number in range(patches)]
        for name, text in zip(self.names, series.whole_patches(self.bundle, self.base.home), strict=True):
            (self.diffs / name).write_bytes(text)
        (self.diffs / "series").write_text("".join(f"{name}\n" for name in self.names))
        self.tree = folder / "tree"

    def fresh(self) -> None:
        shutil.rmtree(self.tree, ignore_errors=True)
        fetch.unpack(self.archive, self.tree)
        os.sync()

    def verify(self, listing: Path) -> None:
        run("sha256sum", "--quiet", "-c", listing, cwd=self.tree)

    def roundtrip(self) -> None:
        run(sys.executable, TOOL, "roundtrip", "--offline", "--role", "prefill", "--bundle", self.bundle)

    def git(self, durable: bool) -> None:
        self.verify(self.before)
        for name in self.names:
            run("git", "apply", "--whitespace=nowarn", self.diffs / name, cwd=self.tree)
        self.settle(durable)
        self.verify(self.after)
        for name in reversed(self.names):
            run("git", "apply", "--whitespace=nowarn", "-R", self.diffs / name, cwd=self.tree)
        self.settle(durable)
        self.verify(self.before)

    def quilt(self, durable: bool) -> None:
        environment = {**os.environ, "QUILT_PATCHES": str(self.diffs), "LC_ALL": "C"}
        self.verify(self.before)
        for verb in ("push", "pop"):
            subprocess.run(
                ["quilt", verb, "-a", "-q"], cwd=self.tree, env=environment, check=True, stdout=subprocess.DEVNULL
            )
            self.settle(durable)
            self.verify(self.after if verb == "push" else self.before)

    def settle(self, durable: bool) -> None:
        if durable:
            run("sync", "-f", self.tree)


def seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


@click.command()
@click.option("--patches", default=40, show_default=True)
@click.option("--files", default=3, show_default=True, help="Files a patch.")
@click.option("--hunks", default=2, show_default=True, help="Hunks a file.")
@click.option("--runs", default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(patches: int, files: int, hunks: int, runs: int, as_json: bool) -> None:
    """Measure, and print one table."""
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        arms = Arms(Path(temporary), patches, files, hunks)
        measured: dict[str, Callable[[], None]] = {
            "roundtrip, one process": arms.roundtrip,
            "unpack alone": arms.fresh,
            "git apply, sync": lambda: arms.git(True),
            "git apply, no sync": lambda: arms.git(False),
        }
        if shutil.which("quilt"):
            measured["quilt, sync"] = lambda: arms.quilt(True)
            measured["quilt, no sync"] = lambda: arms.quilt(False)
        measured["sha256sum -c of the release"] = lambda: arms.verify(arms.before)
        measured["check_sources --full"] = lambda: run(
            sys.executable, CHECK, "--bundle", arms.bundle, "--root", arms.tree, "--full"
        )
        measured["python -c 'import click, unidiff'"] = lambda: run(sys.executable, "-c", "import click, unidiff")
        measured["apply.py --help"] = lambda: run(sys.executable, TOOL, "apply", "--help")
        times: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(runs):
            for name, action in measured.items():
                if name not in {"unpack alone", "roundtrip, one process"}:
                    arms.fresh()
                times[name].append(seconds(action))
    middle = {name: statistics.median(values) for name, values in times.items()}
    # The roundtrip also unpacks; the other arms are given their tree.
    ours = middle["roundtrip, one process"] - middle["unpack alone"]
    rows = [Row(name, value, "s") for name, value in middle.items()]
    rows.append(Row("ours / git apply, sync", ours / middle["git apply, sync"], "ratio", "<= 0.5"))
    rows.append(Row("ours / git apply, no sync", ours / middle["git apply, no sync"], "ratio"))
    if "quilt, sync" in middle:
        rows.append(Row("ours / quilt, sync", ours / middle["quilt, sync"], "ratio", "<= 0.25"))
        rows.append(Row("ours / quilt, no sync", ours / middle["quilt, no sync"], "ratio"))
    attestation = middle["check_sources --full"] / middle["sha256sum -c of the release"]
    rows.append(Row("attestation / sha256sum -c", attestation, "ratio", "<= 0.7"))
    start = middle["apply.py --help"] / middle["python -c 'import click, unidiff'"]
    rows.append(Row("cold start / import of click and unidiff", start, "ratio", "<= 2.0"))
    show(rows, as_json)


if __name__ == "__main__":
    main()
