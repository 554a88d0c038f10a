"""A long series over a real base, for measuring: always the same diffs for the same numbers."""

from __future__ import annotations

import difflib
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from patchbundle import pin
from patchbundle.diff import split_lines
from patchbundle.identity import PLAIN, File

_HEADER = """Description: A change made up for measuring.
Why: The benchmark needs a long series.
Class: environment-only
Upstream: none found, 2026-11-29
Gate: none; never part of a real bundle
Risk: none
Drop-When: never

"""


def make(bundle: Path, root: Path, members: Mapping[str, File], *, patches: int, files: int, hunks: int) -> Path:
    """Lay out a bundle at ``root`` with ``patches`` prefill patches of ``files`` files with ``hunks`` hunks each.

    The bases are those of ``bundle``; every fourth patch installs a source. Returns ``root``.
    """
    shutil.copytree(bundle / "config", root / "config")
    (root / "patches" / "prefill").mkdir(parents=True)
    (root / "sources" / "prefill").mkdir(parents=True)
    rng = random.Random(20261129)
    current = {path: file.data for path, file in members.items() if _is_usable(path, file, hunks)}
    names = sorted(current)
    entries = ["schema = 1\n"]
    for number in range(patches):
        chosen = rng.sample(names, files)
        text = _HEADER.encode()
        for path in sorted(chosen):
            new = _edit(current[path], hunks, f"measured change {number}", rng)
            text += diff(path, current[path], new)
            current[path] = new
        (root / "patches" / "prefill" / f"change-{number}.patch").write_bytes(text)
        sources = []
        if number % 4 == 0:
            name = f"prefill/measured_{number}.py"
            (root / "sources" / name).write_text(
                f'"""Measured source {number}."""\n\nVALUE = {number}\n', encoding="utf-8"
            )
            sources.append(f'"{name}"')
        entries.append(
            f'[[patch]]\nid = "change-{number}"\nrole = "prefill"\nfile = "prefill/change-{number}.patch"\n'
            f"sources = [{', '.join(sources)}]\nrequires = []\n"
        )
    (root / "patches" / "series.toml").write_text("\n".join(entries), encoding="utf-8")
    pin.pin(root, offline=True)
    return root


def _is_usable(path: str, file: File, hunks: int) -> bool:
    lines = split_lines(file.data)
    return path.endswith(".py") and file.mode == PLAIN and len(lines) > 12 * hunks and file.data.endswith(b"\n")


def _edit(data: bytes, hunks: int, words: str, rng: random.Random) -> bytes:
    """Put a comment at ``hunks`` places that stand far enough apart to stay hunks of their own."""
    lines = split_lines(data)
    stride = len(lines) // hunks
    places = [block * stride + rng.randrange(0, stride - 9) for block in range(hunks)]
    for place in sorted(places, reverse=True):
        lines.insert(place, f"# {words}\n".encode())
    return b"".join(lines)


def diff(path: str, old: bytes, new: bytes) -> bytes:
    """A unified diff in git's form; both sides end with LF."""
    head = [f"diff --git a/{path} b/{path}\n".encode()]
    body = difflib.diff_bytes(
        difflib.unified_diff,
        split_lines(old),
        split_lines(new),
        f"a/{path}".encode(),
        f"b/{path}".encode(),
        lineterm=b"\n",
    )
    return b"".join([*head, *body])


def as_new_file(path: str, data: bytes) -> bytes:
    """A source as the new file of a diff, for tools that know nothing but diffs."""
    lines = split_lines(data)
    head = (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
    )
    return head.encode() + b"".join(b"+" + line for line in lines)


def whole_patches(root: Path, install: str) -> Iterator[bytes]:
    """Each patch of a made bundle with its sources as new files: the same work for git and quilt."""
    for number in range(len(list((root / "patches" / "prefill").iterdir()))):
        text = (root / "patches" / "prefill" / f"change-{number}.patch").read_bytes()
        source = root / "sources" / "prefill" / f"measured_{number}.py"
        if source.exists():
            text += as_new_file(f"{install}/measured_{number}.py", source.read_bytes())
        yield text
