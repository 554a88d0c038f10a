"""Refuse a stand-in that touches a function which one of our patches changes: it would hide the patch from the rig.

The touched functions come from the diffs and the base's own files: a changed line belongs to the innermost
function or class that holds it in the base, a line of the module's own body to the names that its statement binds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lab.rig.standins.errors import StandInConflict
from lab.rig.standins.table import DECODE, PREFILL, StandIn, for_version
from lab.rig.standins.targets import definitions

__all__ = ["ROLES", "check", "conflicts", "touched", "touched_by"]

ROLES = {"decode": DECODE, "prefill": PREFILL}

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


def _changed(diff: str) -> Iterator[tuple[str, set[tuple[int, int]]]]:
    """Each file of a unified diff, with its changes in the base's numbering.

    A removed line ``n`` is the pair (n, n), an insertion before line ``n`` the pair (n - 1, n). Lines inserted right
    behind a removed one replace it and count as it.
    """
    path, lines, at = "", set[tuple[int, int]](), 0
    left = 0
    replacing = False
    for line in diff.splitlines():
        if left <= 0 and line.startswith("--- "):
            if path:
                yield path, lines
            name = line[4:].split("\t")[0]
            path, lines = ("" if name == "/dev/null" else name.partition("/")[2]), set()
            continue
        found = _HUNK.match(line) if left <= 0 else None
        if found:
            at, replacing = int(found[1]), False
            left = int(found[2] or "1")
            if left == 0:
                # A hunk without base lines names the line before it.
                at += 1
            continue
        if line.startswith("+") and not line.startswith("+++ "):
            if at and not replacing:
                lines.add((at - 1, at))
        elif left > 0 and line.startswith("-"):
            lines.add((at, at))
            at, left, replacing = at + 1, left - 1, True
        elif left > 0 and not line.startswith("\\"):
            at, left, replacing = at + 1, left - 1, False
    if path:
        yield path, lines


def _owners(tree: ast.Module) -> Iterator[tuple[str, int, int, bool]]:
    """Dotted name, first and last line, and whether it is a block, of every function, class and statement."""

    def inside(prefix: str, body: Iterable[ast.stmt]) -> Iterator[tuple[str, int, int, bool]]:
        for name, node in definitions(body):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            block = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield prefix + name, first, node.end_lineno or node.lineno, block
            if isinstance(node, ast.ClassDef):
                yield from inside(f"{prefix}{name}.", node.body)

    return inside("", tree.body)


def touched(diff: str, read: Callable[[str], str]) -> set[tuple[str, str]]:
    """Functions that a diff changes.

    Args:
        diff: the text of a unified diff; anything before its first file is ignored.
        read: gives the base's text of a path; raises FileNotFoundError for a file that the diff creates.

    Returns:
        Pairs of path and dotted name. A change in a class outside its methods gives the class, one in a method the
        method alone. Files that are not Python or are new are left out.
    """
    found: set[tuple[str, str]] = set()
    for path, lines in _changed(diff):
        if not path.endswith(".py"):
            continue
        try:
            tree = ast.parse(read(path))
        except FileNotFoundError:
            continue
        owners = list(_owners(tree))
        for before, after in lines:
            # An insertion at a block's edge may be a decorator or its new last line: it counts for the block. Between
            # two plain statements it belongs to neither.
            for line in {before, after}:
                holding = [
                    (last - first, name)
                    for name, first, last, block in owners
                    if first <= line <= last and (block or (first <= before and after <= last))
                ]
                if holding:
                    narrowest = min(size for size, _ in holding)
                    found |= {(path, name) for size, name in holding if size == narrowest}
    return found


def conflicts(changed: Iterable[tuple[str, str]], entries: Iterable[StandIn]) -> list[str]:
    """Stand-ins that touch a changed function, in words.

    Args:
        changed: pairs of path (relative to the folder that holds the package) and dotted name.
        entries: stand-ins.
    """
    places = set(changed)
    out = []
    for entry in entries:
        base = entry.module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if (path, entry.name) in places:
                out.append(f"{entry.target} is a stand-in, and a patch changes it in {path}")
    return out


def touched_by(folder: Path, role: str, base: Path) -> set[tuple[str, str]]:
    """Functions that the patches of one role change.

    Args:
        folder: the bundle's ``patches`` folder; patches lie in ``<role>/`` and ``recovery/<role>/``.
        role: ``decode`` or ``prefill``.
        base: the unpacked base of the role.
    """
    files = [*(folder / role).glob("*.patch"), *(folder / "recovery" / role).glob("*.patch")]
    found: set[tuple[str, str]] = set()
    for file in sorted(files):
        found |= touched(file.read_text(encoding="utf-8"), lambda path: (base / path).read_text(encoding="utf-8"))
    return found


def check(folder: Path, role: str, base: Path) -> None:
    """Refuse to go on if a stand-in hides a patch.

    Raises:
        StandInConflict: names every such stand-in.
    """
    found = conflicts(touched_by(folder, role, base), for_version(ROLES[role]))
    if found:
        raise StandInConflict("; ".join(found))
