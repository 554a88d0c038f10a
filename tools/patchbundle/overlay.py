"""An overlay: a patched copy of the engine's package beside a tree that is not to be, or cannot be, changed.

It is a whole tree, so that everything that looks at one can look at it: to be put on PYTHONPATH, or mounted over the
package. It is made below one name and moved to its place last, package at the end: there is no moment at which an
interpreter could import half of it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from patchbundle import guard, names, survey, transaction, work
from patchbundle.bases import Base
from patchbundle.disk import Disk
from patchbundle.errors import BundleError, Reason
from patchbundle.manifest import Bundle
from patchbundle.plan import Plan
from patchbundle.target import Target
from patchbundle.tree import Tree

_MADE = f"{names.RESERVED}-overlay"
_SKIP = frozenset({"__pycache__"})
Progress = Callable[[str], None]


def make(
    bundle: Bundle,
    target: Target,
    place: Path,
    to: str | None,
    *,
    release: str | None = None,
    dry_run: bool = False,
    progress: Progress = lambda _: None,
) -> Plan:
    """Make an overlay of ``target`` at ``place``, a new or empty folder, with the series applied as ``apply`` does.

    Raises:
        BundleError: OVERLAY, if it cannot be there or be one of this tree; SWAPPED, if the tree changes meanwhile; or
            as ``apply``. What was made is removed again.
    """
    with Tree(target.root) as tree:
        state, plan = work.make_plan(bundle, target, "apply", to, release=release, tree=tree)
        check_place(place, target, plan.base)
        if dry_run:
            return plan
        tops = [*([target.record.partition("/")[0]] if target.record else []), _package(plan.base)]
        there = place.exists()
        place.mkdir(exist_ok=True)
        try:
            with transaction.locked(place) as disk:
                disk.mkdir(_MADE, 0o755, None)
                progress("copying")
                for top in tops:
                    _copy(tree, disk, top)
                progress("patching")
                inner = Target(place / _MADE, target.bases, target.version, target.torch, target.record, ())
                state, again = work.make_plan(bundle, inner, "apply", to, release=release)
                if again.operations:
                    work.execute(bundle, inner, state, again)
                disk.call("sync", ".", os.sync)
                for top in tops:
                    _move(disk, top)
                disk.rmdir(_MADE)
                disk.sync_folder("")
        except BaseException:
            _clear(place, tops, there)
            raise
    return plan


def _package(base: Base) -> str:
    return base.marker.partition("/")[0]


def check_place(place: Path, target: Target, base: Base) -> None:
    """Whether there can be an overlay of ``target`` at ``place``.

    Raises:
        BundleError: OVERLAY.
    """
    where, fault = place.resolve(), ""
    if base.is_crate:
        fault = "a tree that is compiled: copy it, and apply to the copy"
    elif where == target.root or target.root in where.parents:
        fault = "a folder of the tree itself"
    elif guard.SEPARATOR in str(place.absolute()):
        fault = "a colon in its path, where PYTHONPATH is split"
    elif os.path.lexists(place) and not place.is_dir():
        fault = "no folder"
    elif place.is_dir() and os.listdir(place):
        fault = f"a folder with {len(os.listdir(place))} entries"
    elif not place.parent.is_dir():
        fault = "nothing above it"
    if fault:
        raise BundleError(Reason.OVERLAY, str(place), expected="a new or empty folder outside of the tree", found=fault)


def _copy(tree: Tree, disk: Disk, top: str) -> None:
    """Copy everything below ``top`` but bytecode, and look again whether it was all of one moment.

    Raises:
        BundleError: OVERLAY, for a link or a special file; SWAPPED.
    """
    with tree.folder(top) as fd:
        disk.mkdir(f"{_MADE}/{top}", stat.S_IMODE(os.fstat(fd).st_mode) | stat.S_IRWXU, None)
    for path, found in tree.walk(top, _SKIP, None):
        if found.status is None:
            raise BundleError(
                Reason.OVERLAY, str(tree.root / path), expected="plain files and folders", found=found.identity.kind
            )
        permissions = stat.S_IMODE(found.status.st_mode)
        if found.data is None:
            disk.mkdir(f"{_MADE}/{path}", permissions | stat.S_IRWXU, None)
        else:
            disk.create(f"{_MADE}/{path}", found.data, permissions, None, sync=False)
    before = {path: item.identity for path, item in survey.take(tree, top).items()}
    with Tree(disk.root / _MADE) as copy:
        after = {path: item.identity for path, item in survey.take(copy, top).items()}
    if before != after:
        path = min(path for path in {*before, *after} if before.get(path) != after.get(path))
        raise BundleError(Reason.SWAPPED, str(tree.root / path), expected="no change while it was copied")


def _move(disk: Disk, top: str) -> None:
    """Out of the folder in which it was made: on one file system, and below one folder that we just made."""
    disk.call("rename", top, lambda: os.rename(f"{_MADE}/{top}", top, src_dir_fd=disk.fd, dst_dir_fd=disk.fd))


def _clear(place: Path, tops: Iterable[str], there: bool) -> None:
    """Nothing is left of an overlay that was not made, and nothing of others is removed."""
    for name in (_MADE, *tops):
        shutil.rmtree(place / name, ignore_errors=True)
    if not there:
        with contextlib.suppress(OSError):
            place.rmdir()


def uses(place: Path, root: Path, base: Base) -> Iterator[str]:
    """How it is used, as a person may type it."""
    package = _package(base)
    yield f"export PYTHONPATH={shlex.quote(str(place))}${{PYTHONPATH:+:$PYTHONPATH}}"
    yield f"mount --bind {shlex.quote(str(place / package))} {shlex.quote(str(root / package))}"


def shadow(place: Path, base: Base) -> Path | None:
    """What an interpreter started here would import in place of the overlay, though that is first on its path."""
    return guard.shadow(place, _package(base), guard.with_first(place, os.environ), Path.cwd())
