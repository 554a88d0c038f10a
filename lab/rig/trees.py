"""The trees a run needs: stock ones copied from the environments, and those that the caller names."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from lab.rig import cache, environment
from lab.rig.errors import RigError
from lab.rig.tree import RELEASES, Tree, find, recognise


def stock(role: str, say: Callable[[str], None] = lambda text: None) -> Path:
    """A copy of the release that the environment of ``role`` has installed, alone in a folder.

    The environment's own folder cannot stand first on PYTHONPATH: it holds every other package too.
    """
    release = RELEASES[role]
    python = environment.ensure(release, say)
    (site,) = python.parent.parent.glob("lib/python3*/site-packages")
    record = site / f"sglang-{release}.dist-info" / "RECORD"
    digest = hashlib.sha256(record.read_bytes()).hexdigest()

    def build(folder: Path) -> None:
        hidden = shutil.ignore_patterns("__pycache__")
        shutil.copytree(site / "sglang", folder / "sglang", ignore=hidden)
        shutil.copytree(record.parent, folder / record.parent.name, ignore=hidden)

    return cache.ensure(f"trees/stock-{release}", digest, build, 400_000_000)


def gather(
    named: Mapping[tuple[str, str], Path | None],
    wanted: set[tuple[str, str]],
    allow_drift: bool,
    say: Callable[[str], None] = lambda text: None,
) -> dict[tuple[str, str], Tree]:
    """Find and recognise every tree that is wanted.

    Args:
        named: folders the caller gave, by role and ``stock`` or ``patched``.
        wanted: roles and kinds that the run needs.

    Raises:
        RigError: kinds ``tree``, ``drift``; a patched tree that is wanted was not named.
    """
    found: dict[tuple[str, str], Tree] = {}
    for role, kind in sorted(wanted):
        path = named.get((role, kind))
        if path is None:
            if kind == "patched":
                raise RigError("tree", f"a patched {role} tree is needed: name it with --{role}-root")
            path = stock(role, say)
        tree = find(role, path)
        level = recognise(tree, allow_drift)
        if kind == "stock" and level != "base":
            raise RigError("drift", f"{path} is to be the stock {role} tree but is {level}")
        say(f"{role} {kind}: {tree.root} is sglang {tree.version}, {level}")
        found[role, kind] = tree
    return found
