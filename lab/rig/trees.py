"""The trees a run needs: stock ones, patched ones made by the bundle's own tool, and those that the caller names."""

from __future__ import annotations

import csv
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lab.rig import cache, environment, tree
from lab.rig.errors import RigError
from lab.rig.standins import patches, targets
from lab.rig.standins.errors import StandInError
from lab.rig.tree import RELEASES, REPOSITORY, Tree, find

Say = Callable[[str], None]
NEEDED = 400_000_000
_BASE = re.compile(r"^holds:.*at level 0 \(base\)$", re.MULTILINE)
CHECKER = REPOSITORY / "tools" / "check_sources.py"


def _packages(role: str, say: Say) -> Path:
    """The folder with everything that the environment of ``role`` has installed."""
    python = environment.ensure(RELEASES[role], say)
    (site,) = python.parent.parent.glob("lib/python3*/site-packages")
    return site


def stock(role: str, say: Say = lambda text: None) -> Path:
    """A copy of the release that the environment of ``role`` has installed, alone in a folder.

    The environment's own folder cannot stand first on PYTHONPATH: it holds every other package too.
    """
    release = RELEASES[role]
    site = _packages(role, say)
    record = site / f"sglang-{release}.dist-info" / "RECORD"
    text = record.read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()

    def build(folder: Path) -> None:
        for row in csv.reader(text.splitlines()):
            path = row[0]
            if path.startswith("../") or path.endswith(".pyc"):
                continue
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(site / path, place)

    return cache.ensure(f"trees/stock-{release}", digest, build, NEEDED)


def bundle_digest() -> str:
    """SHA-256 over the files that decide what a patched tree is."""
    digest = hashlib.sha256()
    for top in ("patches", "sources"):
        for path in sorted((REPOSITORY / top).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(path.relative_to(REPOSITORY).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def apply(role: str, root: Path, to: str = "", revert: bool = False) -> str:
    """Let the bundle's tool apply (or revert) the series of ``role`` on the tree ``root``.

    Returns:
        what the tool printed.

    Raises:
        RigError: kind ``apply``, with what the tool said.
    """
    argv = [sys.executable, str(REPOSITORY / "tools" / "apply.py"), "revert" if revert else "apply"]
    argv += ["--role", role, "--root", str(root), *(["--to", to] if to else [])]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode not in (0, 3):
        raise RigError(
            "apply", f"the bundle was not applied to {root}", tuple((done.stdout + done.stderr).splitlines())
        )
    return done.stdout


def patched(role: str, say: Say = lambda text: None) -> Path:
    """A copy of the stock tree of ``role`` with the whole series of this repository applied."""
    source = stock(role, say)

    def build(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        apply(role, folder)

    digest = hashlib.sha256(f"{source}\0{bundle_digest()}".encode()).hexdigest()
    return cache.ensure(f"trees/patched-{RELEASES[role]}", digest, build, NEEDED)


def in_a_files_place(found: Tree) -> list[str]:
    """Paths that Python would import, perhaps in the place of a released file, and that RECORD does not name.

    Compiled modules, bytecode without its source, and what lies in a folder beside a module of its name. Bytecode in
    ``__pycache__`` is left out: an engine of the rig has a folder of its own for it.
    """
    listed: set[str] = set()
    for record in found.root.glob(f"sglang-{found.version}.dist-info/RECORD"):
        listed |= {row[0] for row in csv.reader(record.read_text("utf-8", "replace").splitlines()) if row}
    paths = (path for path in sorted((found.root / "sglang").rglob("*")) if path.parent.name != "__pycache__")
    return [
        name
        for path in paths
        if path.suffix in (".so", ".pyc") or (path.suffix == ".py" and path.parent.with_suffix(".py").is_file())
        if (name := path.relative_to(found.root).as_posix()) not in listed
    ]


def recognise(found: Tree, allow_drift: bool) -> str:
    """Say at which level a tree stands: ``base`` only if its RECORD and the bundle's checker both say so.

    Args:
        allow_drift: go on with a tree that is not recognised.

    Raises:
        RigError: kind ``drift``; the tree is not one the bundle knows, or holds what Python would import in a file's
            place, and ``allow_drift`` is not set.
    """
    level = tree.recognise(found, allow_drift, CHECKER)
    wrong = [f"{name} is extra" for name in in_a_files_place(found)]
    if level == "base":
        # One of the two has said so: what does the other say?
        argv = [sys.executable, str(CHECKER), "--role", found.role, "--root", str(found.root), "--full"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        wrong += tree.record_differences(found)
        if done.returncode != 0 or not _BASE.search(done.stdout):
            wrong.append((done.stderr or done.stdout).strip())
    if not wrong:
        return level
    if allow_drift:
        return "drifted, allowed"
    told = "; ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    raise RigError("drift", f"{found.root} is not {found.role} as it should be: {told}. Use --allow-drift to run it")


def see_stand_ins(found: Tree, patched: bool, say: Say = lambda text: None) -> None:
    """Refuse a tree in which a stand-in's target moved, or would take the place of a function that was patched.

    Raises:
        RigError: kind ``stand-in``, naming every such stand-in.
    """
    try:
        targets.check(found.version, [found.root, _packages(found.role, say)])
        if patched:
            patches.check(found.role, stock(found.role, say), found.root)
    except StandInError as error:
        raise RigError("stand-in", str(error)) from error


def gather(
    named: Mapping[tuple[str, str], Path | None],
    wanted: set[tuple[str, str]],
    allow_drift: bool,
    say: Say = lambda text: None,
    any_level: bool = False,
) -> dict[tuple[str, str], Tree]:
    """Find and recognise every tree that is wanted.

    Args:
        named: folders the caller gave, by role and ``stock`` or ``patched``; the others are made.
        wanted: roles and kinds that the run needs.
        any_level: run the named trees at whatever level they stand, in a stock engine's place too.

    Raises:
        RigError: kinds ``tree``, ``drift``, ``apply``, ``stand-in``.
    """
    found: dict[tuple[str, str], Tree] = {}
    for role, kind in sorted(wanted):
        path = named.get((role, kind))
        if path is None:
            path = stock(role, say) if kind == "stock" else patched(role, say)
        one = find(role, path)
        level = recognise(one, allow_drift)
        if kind == "stock" and level != "base" and not (any_level or allow_drift):
            raise RigError("drift", f"{path} is to be the stock {role} tree but stands at {level}")
        if kind == "patched" and level == "base" and not any_level:
            # Stock beside stock is equal whatever the patches do.
            raise RigError("drift", f"{path} is to be a patched {role} tree but stands at base; apply the bundle to it")
        see_stand_ins(one, level != "base", say)
        say(f"{role} {kind}: {one.root} is sglang {one.version}, {level}")
        found[role, kind] = one
    return found
