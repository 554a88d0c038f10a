"""Two ways to apply a series of diffs: ours in memory, and ``git apply`` in a folder outside any repository."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchbundle import parse
from patchbundle import plan as plan_module
from patchbundle.bases import Archive, Base
from patchbundle.header import Header
from patchbundle.identity import EXECUTABLE, PLAIN, File, identity_of
from patchbundle.lock import Lock, Pins
from patchbundle.manifest import Bundle, Patch
from patchbundle.plan import Stand

Files = dict[str, File]

BASE = Base("toy-1", "prefill", "toy", "1", "toy", {"shared": "ours"}, (Archive("toy-1.tar.gz", "0" * 64),))
HEADER = Header("d", "w", "environment-only", "none found, 2026-11-29", "none; a test", "none", "never")


@dataclass(frozen=True)
class Series:
    """Diffs as a bundle in memory, pinned on a tree."""

    bundle: Bundle
    chain: tuple[Mapping[str, File | None], ...]


def pin(diffs: Mapping[str, bytes], tree: Files, strip: int = 1) -> Series:
    """Parse the diffs and run the planner's own ``levels`` on them, as ``pin`` does.

    Raises:
        BundleError: a diff does not parse or does not apply exactly.
    """
    patches = tuple(
        Patch(name, "prefill", name, (), (), HEADER, parse.parse(raw, name, strip=strip).files)
        for name, raw in diffs.items()
    )
    bundle = Bundle(Path(), {BASE.id: BASE}, patches, {}, Lock({}, {}))
    chain = plan_module.levels(bundle, BASE, dict(tree))
    paths = sorted(plan_module.touched_paths(bundle, BASE))
    pins = Pins(
        "prefill", tuple(diffs), {path: tuple(identity_of(level.get(path)) for level in chain) for path in paths}, {}
    )
    return Series(Bundle(Path(), {BASE.id: BASE}, patches, {}, Lock({}, {BASE.id: pins})), tuple(chain))


def move(series: Series, start: int, end: int) -> Files:
    """The tree at level ``end``, made from the one at level ``start`` by the planner's operations alone."""
    tree = {path: file for path, file in series.chain[start].items() if file is not None}
    pinned = {path: tree.get(path) for path in series.bundle.pins(BASE).paths}
    for operation in plan_module.plan(
        Stand(series.bundle, BASE, start), Stand(series.bundle, BASE, end), pinned
    ).operations:
        if operation.path == BASE.receipt:
            continue
        assert identity_of(tree.pop(operation.path, None)) == operation.old
        if operation.data is not None:
            tree[operation.path] = File(operation.data, operation.new.mode)
            assert tree[operation.path].identity == operation.new
    return tree


def git_apply(folder: Path, diffs: Sequence[Path], strip: int = 1, *options: str) -> bool:
    """Run ``git apply`` on a folder with each diff in turn; True if git took them all.

    git looks for a repository around the folder, and silently skips every file if it finds one.
    """
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder.parent),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
    }
    command = ["git", "apply", f"-p{strip}", "--whitespace=nowarn", *options]
    for diff in diffs:
        done = subprocess.run([*command, str(diff)], cwd=folder, env=environment, capture_output=True, check=False)
        if done.returncode:
            return False
    return True


def write(folder: Path, files: Files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path, file in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.data)
        place.chmod(0o755 if file.mode == EXECUTABLE else 0o644)


def read(folder: Path) -> Files:
    """Every plain file below a folder; a link is an odd file that equals no other."""
    result: Files = {}
    for place in sorted(folder.rglob("*")):
        path = place.relative_to(folder).as_posix()
        if place.is_symlink():
            result[path] = File(os.readlink(place).encode(), "120000")
        elif place.is_file():
            result[path] = File(place.read_bytes(), EXECUTABLE if place.stat().st_mode & 0o100 else PLAIN)
    return result
