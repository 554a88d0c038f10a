#!/usr/bin/env python3
"""How the cost grows: files in one patch, hunks in one patch, patches in a series.

For each size a made-up tree and series, on a real disk: parse, pin, plan, apply and revert, all in this process, with
the same modules as the tool. ``sync`` is left out of the time: what a disk takes is not what is asked here. The last
column is the exponent between the two largest sizes: 1 is linear, 2 quadratic.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402
from patchbundle import bases, parse, transaction  # noqa: E402
from patchbundle import plan as plan_module  # noqa: E402
from patchbundle.header import Header  # noqa: E402
from patchbundle.identity import File, identity_of  # noqa: E402
from patchbundle.lock import Lock, Pins, dump, load  # noqa: E402
from patchbundle.manifest import Bundle, Patch  # noqa: E402
from patchbundle.plan import Stand  # noqa: E402

_LINES = 30  # of a file, for each hunk in it
_NOISE = 0.2  # of an exponent: caches of the processor, the garbage collector


def files_of(count: int, hunks: int) -> dict[str, bytes]:
    """``count`` files in folders of a hundred, each with room for ``hunks`` hunks."""
    text = b"".join(b"value_%d = %d\n" % (line, line) for line in range(_LINES * hunks))
    return {f"sglang/srt/part_{number // 100}/module_{number}.py": text for number in range(count)}


def diff(path: str, data: bytes, hunks: int, words: str, offset: int) -> bytes:
    """A diff that puts one line into the file at ``hunks`` places. Written down: difflib itself is not linear."""
    lines = data.split(b"\n")
    stride = len(lines) // hunks
    out = [f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n".encode()]
    for hunk in range(hunks):
        at = hunk * stride + 4 + offset % (stride - 9)
        out.append(f"@@ -{at - 2},6 +{at - 2 + hunk},7 @@\n".encode())
        out += [b" %s\n" % line for line in lines[at - 3 : at]]
        out.append(f"+# {words}\n".encode())
        out += [b" %s\n" % line for line in lines[at : at + 3]]
    return b"".join(out)


def diffs_of(tree: Mapping[str, bytes], patches: int, files: int, hunks: int) -> list[bytes]:
    """``patches`` diffs, each of ``files`` files with ``hunks`` hunks; each patch has files of its own."""
    paths = sorted(tree)
    texts = []
    for number in range(patches):
        text = b""
        for path in paths[number * files : (number + 1) * files]:
            text += diff(path, tree[path], hunks, f"change {number}", number)
        texts.append(text)
    return texts


def measure(patches: int, files: int, hunks: int) -> float:
    """Seconds from the text of the diffs to the tree patched and reverted."""
    base = bases.load(ROOT / "config" / "bases.toml")["sglang-0.5.19"]
    tree = files_of(patches * files, hunks)
    texts = diffs_of(tree, patches, files, hunks)
    header = Header("a", "b", "environment-only", "none found, 2026-11-29", "none; made up", "none", "never")
    with tempfile.TemporaryDirectory(prefix="growth-") as temporary, mock.patch("os.fsync", return_value=None):
        root = Path(temporary)
        for path, data in tree.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        began = time.process_time()
        made = tuple(
            Patch(f"change-{number}", "prefill", f"{number}", (), (), header, parse.parse(text, f"{number}").files)
            for number, text in enumerate(texts)
        )
        bundle = Bundle(root, {base.id: base}, made, {}, Lock({}, {}))
        start = {path: File(data) for path, data in tree.items()}
        chain = plan_module.levels(bundle, base, start)
        pins = Pins(
            "prefill",
            tuple(patch.id for patch in made),
            {path: tuple(identity_of(level.get(path)) for level in chain) for path in tree},
            {base.home: 1},
        )
        lock = load(dump(Lock({}, {base.id: pins})), "made up")
        bundle = Bundle(root, {base.id: base}, made, {}, lock)
        ends = Stand(bundle, base, 0), Stand(bundle, base, patches)
        receipt = plan_module.receipt_bytes(bundle, base, patches)
        up = plan_module.plan(ends[0], ends[1], chain[0])
        down = plan_module.plan(ends[1], ends[0], chain[-1], receipt_data=receipt)
        for plan in (up, down):
            with transaction.locked(root) as disk:
                transaction.run(disk, plan, lock.digest)
        return time.process_time() - began


SWEEPS: dict[str, tuple[list[int], Callable[[int], float]]] = {
    "files in one patch": ([1, 10, 100, 1000, 4000], lambda size: measure(1, size, 1)),
    "hunks in one patch": ([1, 10, 100, 1000, 10_000], lambda size: measure(1, 1, size)),
    "patches in a series": ([1, 10, 50, 100], lambda size: measure(size, 10, 2)),
}


@click.command()
@click.option("--json", "as_json", is_flag=True)
def main(as_json: bool) -> None:
    """Measure, and print one table."""
    rows = []
    for name, (sizes, run) in SWEEPS.items():
        # The smallest of three: what disturbs only ever adds.
        times = {size: min(run(size) for _ in range(3 if size <= 1000 else 2)) for size in sizes}
        rows += [Row(f"{name}: {size}", seconds, "s") for size, seconds in times.items()]
        small, large = sizes[-2:]
        exponent = math.log(times[large] / times[small]) / math.log(large / small)
        rows.append(Row(f"{name}: exponent {small} to {large}", exponent, "", f"<= {1 + _NOISE}"))
    show(rows, as_json, provenance.of(__file__, None))


if __name__ == "__main__":
    main()
