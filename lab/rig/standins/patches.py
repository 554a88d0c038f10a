"""Refuse a stand-in that touches a function which one of our patches changes: it would hide the patch from the rig.

The changed functions come from two trees, the stock one and the patched one, so that patches on top of each other
need no line numbers: whatever a module defines is compared, name by name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from lab.rig.standins.errors import StandInConflict
from lab.rig.standins.table import DECODE, PREFILL, StandIn, for_version
from lab.rig.standins.targets import definitions

__all__ = ["ROLES", "check", "conflicts", "touched", "touched_by"]

ROLES = {"decode": DECODE, "prefill": PREFILL}


def _bodies(text: str) -> dict[str, list[str]]:
    """Dotted name to what it means, comments and layout left out; a class without what it defines by itself."""
    found: dict[str, list[str]] = {}

    def inside(prefix: str, body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
        for name, node in definitions(body):
            parts: list[ast.AST] = [node]
            if isinstance(node, ast.ClassDef):
                own = list(inside(f"{prefix}{name}.", node.body))
                rest = [one for one in node.body if one not in own]
                parts = [*node.bases, *node.keywords, *node.decorator_list, *rest]
            found.setdefault(prefix + name, []).append(" ".join(map(ast.dump, parts)))
            yield node

    list(inside("", ast.parse(text).body))
    return found


def touched(before: str, after: str) -> set[str]:
    """Dotted names of ``before`` that mean something else in ``after``, or are gone.

    A change in a class outside its methods gives the class, one in a method the method alone. Imports count as the
    names that they bind. What ``after`` alone defines touches nothing that could be stood in for.
    """
    old, new = _bodies(before), _bodies(after)
    return {name for name, bodies in old.items() if new.get(name) != bodies}


def touched_by(stock: Path, patched: Path) -> set[tuple[str, str]]:
    """Pairs of path and dotted name that differ between two trees of one release; paths from the trees' root."""
    found: set[tuple[str, str]] = set()
    for file in sorted((stock / "sglang").rglob("*.py")):
        path = file.relative_to(stock)
        before, other = file.read_bytes(), patched / path
        after = other.read_bytes() if other.is_file() else b""
        if before != after:
            found |= {(path.as_posix(), name) for name in touched(before.decode(), after.decode())}
    return found


def _one_holds_the_other(one: str, other: str) -> bool:
    """Whether two dotted names are the same, or one names something inside the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def conflicts(changed: Iterable[tuple[str, str]], entries: Iterable[StandIn]) -> list[str]:
    """Stand-ins that touch a changed function, in words.

    A stand-in for a class hides what a patch changes in its methods; one for a method may be wrong in a class whose
    bases, attributes or decorators a patch changes.

    Args:
        changed: pairs of path (relative to the folder that holds the package) and dotted name.
        entries: stand-ins.
    """
    places = set(changed)
    out = []
    for entry in entries:
        base = entry.module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            for name in sorted(name for where, name in places if where == path):
                if _one_holds_the_other(name, entry.name):
                    out.append(f"{entry.target} is a stand-in, and a patch changes {name} in {path}")
    return out


def check(role: str, stock: Path, patched: Path) -> None:
    """Refuse to go on if a stand-in hides a patch of the tree ``patched``.

    Raises:
        StandInConflict: names every such stand-in; or a changed file is no Python, so that nobody can tell.
    """
    try:
        changed = touched_by(stock, patched)
    except (SyntaxError, ValueError) as error:
        raise StandInConflict(f"{patched}: a changed file is no Python ({error})") from error
    found = conflicts(changed, for_version(ROLES[role]))
    if found:
        raise StandInConflict("; ".join(found))
