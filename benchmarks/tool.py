#!/usr/bin/env python3
"""One process of ours against loops of `git apply` and quilt on the same long series, on a real base.

Every arm starts from an unpacked base and does the same work: check every file of the release against its SHA-256,
put on all patches, check the release's untouched files and every touched one again, take all patches off, check the
whole release once more. The others check with `sha256sum -c` and, where they are asked to be durable, end each side
with `sync -f`. Ratios are of medians in one run, by the clock; beside them those of processor
time, which a busy machine disturbs less.

What is imported is compiled on both sides, as pip compiles click and unidiff, and as the interpreter compiles ours when
it first runs them. Rows without a bound tell what that first run takes.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from benchmarks import series  # noqa: E402
from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402
from patchbundle import bases, fetch, manifest  # noqa: E402
from patchbundle import plan as plan_module  # noqa: E402
from patchbundle.identity import File  # noqa: E402

# What each is held to, by the clock.
OTHERS = {"git apply, sync": "<= 0.5", "git apply, no sync": None, "quilt, sync": "<= 0.25", "quilt, no sync": None}
IMPORT = "python -c 'import click, unidiff'"
# What no change of ours could save: every file read and hashed by one interpreter with click and unidiff, and no more.
FLOOR = """
import hashlib, os, sys
import click, unidiff

buffer = memoryview(bytearray(1 << 20))
for _ in range(int(sys.argv[1])):
    for folder, _, names in os.walk("."):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            total, count = hashlib.sha256(), len(buffer)
            while count == len(buffer):
                count = os.readv(fd, [buffer])
                total.update(buffer[:count])
            total.hexdigest()
            os.close(fd)
"""
HASHED = {times: f"imports, and every file hashed {words}" for times, words in ((1, "once"), (3, "three times"))}
PAIRS = [
    ("attestation, whole command / sha256sum -c", "check_sources --full", "sha256sum -c of the release", "<= 0.7"),
    ("floor of the attestation / sha256sum -c", HASHED[1], "sha256sum -c of the release", None),
    ("floor of the roundtrip / git apply, sync", HASHED[3], "git apply, sync", None),
    ("floor of the roundtrip / quilt, sync", HASHED[3], "quilt, sync", None),
    ("cold start of help / import of click and unidiff", "apply.py apply --help", IMPORT, "<= 2.0"),
    ("cold start of recover / import of click and unidiff", "apply.py recover, nothing to do", IMPORT, "<= 2.0"),
]


def run(*command: str | Path, cwd: Path | None = None, expect: int = 0) -> None:
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if done.returncode != expect:
        raise SystemExit(f"exit code {done.returncode}: {' '.join(words)}")


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
        # Compiled, and as a fresh clone has them.
        self.tools, self.source = (Path(shutil.copytree(ROOT / "tools", folder / name)) for name in ("tools", "source"))
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(self.tools)], check=True)

    def fresh(self) -> None:
        shutil.rmtree(self.tree, ignore_errors=True)
        fetch.unpack(self.archive, self.tree)
        os.sync()

    def verify(self, listing: Path) -> None:
        run("sha256sum", "--quiet", "-c", listing, cwd=self.tree)

    def roundtrip(self) -> float:
        """Returns the seconds of its unpacking."""
        command = [
            sys.executable,
            self.tools / "apply.py",
            "roundtrip",
            "--offline",
            "--role",
            "prefill",
            "--bundle",
            self.bundle,
            "--json",
        ]
        said = subprocess.run([str(part) for part in command], check=True, capture_output=True).stdout
        return float(json.loads(said)["result"]["rows"][0]["unpacking"])

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


@dataclass(frozen=True)
class Spent:
    """Seconds by the clock, and of the processor, in this process and its children."""

    wall: float
    processor: float


def spent(action: Callable[[], float | None]) -> Spent:
    """What an action takes, less the seconds that it says are not its own."""
    before, began = _processor(), time.perf_counter()
    aside = action() or 0.0
    return Spent(time.perf_counter() - began - aside, _processor() - before)


def _processor() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in used)


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
        empty = Path(temporary) / "empty"
        empty.mkdir()
        measured: dict[str, Callable[[], float | None]] = {
            "roundtrip, one process, unpacked": arms.roundtrip,
            "git apply, sync": lambda: arms.git(True),
            "git apply, no sync": lambda: arms.git(False),
        }
        if shutil.which("quilt"):
            measured["quilt, sync"] = lambda: arms.quilt(True)
            measured["quilt, no sync"] = lambda: arms.quilt(False)
        measured["sha256sum -c of the release"] = lambda: arms.verify(arms.before)
        for often, name in HASHED.items():
            measured[name] = lambda often=often: run(sys.executable, "-c", FLOOR, str(often), cwd=arms.tree)  # type: ignore[misc]
        tool = arms.tools / "apply.py"
        check: list[str | Path] = [arms.tools / "check_sources.py", "--bundle", arms.bundle]
        measured["check_sources --full"] = lambda: run(sys.executable, *check, "--root", arms.tree, "--full")
        measured["check_sources"] = lambda: run(sys.executable, *check, "--root", arms.tree)
        measured["check_sources of the bundle alone"] = lambda: run(sys.executable, *check)
        measured[IMPORT] = lambda: run(sys.executable, "-c", "import click, unidiff")
        measured["apply.py apply --help"] = lambda: run(sys.executable, tool, "apply", "--help")
        measured["apply.py recover, nothing to do"] = lambda: run(
            sys.executable, tool, "recover", "--root", empty, expect=3
        )
        measured["apply.py recover, nothing to do, nothing compiled"] = lambda: run(
            sys.executable, "-B", arms.source / "apply.py", "recover", "--root", empty, expect=3
        )
        places = [Path(temporary) / f"unpacked-{number}" for number in range(3)]
        unpacking = statistics.median(spent(lambda at=at: fetch.unpack(arms.archive, at)).processor for at in places)  # type: ignore[misc]
        removing = statistics.median(spent(lambda at=at: shutil.rmtree(at)).wall for at in places)  # type: ignore[misc]
        times: dict[str, list[Spent]] = {name: [] for name in measured}
        for _ in range(runs):
            for name, action in measured.items():
                if name.startswith(("git", "quilt", "sha256sum")):
                    arms.fresh()
                times[name].append(spent(action))
    wall = {name: statistics.median(item.wall for item in items) for name, items in times.items()}
    processor = {name: statistics.median(item.processor for item in items) for name, items in times.items()}
    ours = "roundtrip, one process, unpacked"
    # By the clock it tells itself how long its unpacking took; the others are given their tree.
    processor[ours] -= unpacking
    rows = [Row(name, value, "s") for name, value in wall.items()]
    rows += [Row(f"{name}: processor", value, "s") for name, value in processor.items()]
    for other, must in OTHERS.items():
        if other in wall:
            rows.append(Row(f"ours / {other}", wall[ours] / wall[other], "ratio", must))
            rows.append(Row(f"ours / {other}: processor", processor[ours] / processor[other], "ratio"))
    # The others are not asked to; it is within ours.
    rows.append(Row("removing an unpacked tree", removing, "s"))
    for name, one, two, must in PAIRS:
        if two not in wall:
            continue
        rows.append(Row(name, wall[one] / wall[two], "ratio", must))
        rows.append(Row(f"{name}: processor", processor[one] / processor[two], "ratio"))
    for name, times_of in (("attestation alone / sha256sum -c", wall), ("attestation alone: processor", processor)):
        alone = times_of["check_sources --full"] - times_of["check_sources"]
        rows.append(Row(name, alone / times_of["sha256sum -c of the release"], "ratio"))
    show(rows, as_json, provenance.of(__file__, None))


if __name__ == "__main__":
    main()
