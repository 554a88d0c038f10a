"""What can be checked before anything is written: rights, room, owners, and nothing of others in the way."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from patchbundle import bytecode, journal, names
from patchbundle.errors import BundleError, Reason, command
from patchbundle.identity import Identity
from patchbundle.tree import Tree

if TYPE_CHECKING:
    from patchbundle.plan import Plan

# Room for the journal, folders and block rounding, beside the bytes themselves.
_SLACK = 1 << 20


def check(tree: Tree, plan: Plan, mirrors: Sequence[Path] = ()) -> list[str]:
    """Check all that can be checked without writing; returns warnings.

    Raises:
        BundleError: naming the first thing that stands in the way.
    """
    # First of all: these names are written to, and removed, without a look at what they are.
    for path in leftovers(tree, [*(op.path for op in plan.operations), *plan.new_folders, *plan.gone_folders]):
        raise BundleError(
            Reason.DRIFT,
            str(tree.root / path),
            expected=f"no {names.RESERVED}* file where no run was interrupted",
            found=f"a {tree.kind(path)}",
            next_step="it may be a rescue copy of an earlier run: move it out of the tree, then run the command again",
        )
    for op in plan.operations:
        found = tree.find(op.path)
        if found.identity != op.old:
            raise swapped(tree, op.path, found.identity, op.old)
        if found.status is not None and op.new.is_file:
            _check_owner(tree, op.path, found.status.st_uid, found.status.st_gid)
        elif op.attributes is not None:
            _check_owner(tree, op.path, op.attributes.owner, op.attributes.group)
    for folder in plan.new_folders:
        if tree.kind(folder) != "absent":
            raise BundleError(Reason.SWAPPED, str(tree.root / folder), expected="nothing", found=tree.kind(folder))
    _check_gone_folders(tree, plan)
    # A folder that comes or goes is an entry of the one above it.
    folders = _existing_parents(tree, (*(op.path for op in plan.operations), *plan.new_folders, *plan.gone_folders))
    folders |= {f"{folder}/__pycache__" for folder in plan.gone_folders if tree.listing(f"{folder}/__pycache__")}
    for folder in ["", *sorted(folders)]:
        _check_writable(tree, folder)
    _check_room(tree, folders, plan)
    return _check_caches(tree, plan, mirrors)


def leftovers(tree: Tree, paths: Iterable[str]) -> list[str]:
    """What stands under a name of our own in the tree's root and in the folders of ``paths``; sorted.

    The journal is not among it: :func:`refuse_interrupted` is about that. In a tree in which no run was interrupted
    nobody knows whose these files are. They are never removed, and nothing is written beside them.
    """
    folders = {"", *(path.rpartition("/")[0] for path in paths)}
    found = []
    for folder in folders:
        for name in tree.listing(folder):
            path = f"{folder}/{name}" if folder else name
            if name.startswith(names.RESERVED) and path not in (journal.NAME, journal.BESIDE):
                found.append(path)
    return sorted(found)


def _existing_parents(tree: Tree, paths: Iterable[str]) -> set[str]:
    """For each path the innermost folder above it that is there."""
    folders = set()
    for path in paths:
        above = ["", *names.parents(path)]
        folders.add(next(folder for folder in reversed(above) if not folder or tree.kind(folder) == "folder"))
    return folders


def _check_writable(tree: Tree, folder: str) -> None:
    with tree.folder(folder) as fd:
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
            raise BundleError(
                Reason.NOT_WRITABLE,
                str(tree.root / folder),
                expected=f"a folder that user {os.geteuid()} may write to",
                found="a read-only file system"
                if os.fstatvfs(fd).f_flag & os.ST_RDONLY
                else f"{stat.filemode(os.fstat(fd).st_mode)}, owner {os.fstat(fd).st_uid}",
                next_step="run where the tree can be written to, as its owner",
            )


def _check_owner(tree: Tree, path: str, owner: int, group: int) -> None:
    groups = {os.getegid(), *os.getgroups()}
    if os.geteuid() != 0 and (owner != os.geteuid() or group not in groups):
        raise BundleError(
            Reason.OWNER,
            str(tree.root / path),
            expected=f"a file of user {os.geteuid()} and of one of its groups",
            found=f"owner {owner}, group {group}",
            next_step="run as the owner of the file",
        )


def _check_room(tree: Tree, folders: set[str], plan: Plan) -> None:
    # Twice the bytes: where the file system has no hard links, the old files are copied.
    needed = _SLACK + sum(2 * op.new.size + op.old.size for op in plan.operations)
    for folder in sorted(folders):
        with tree.folder(folder) as fd:
            room = os.fstatvfs(fd)
        free = room.f_bavail * room.f_frsize
        if free < needed or (room.f_files and room.f_favail < 2 * len(plan.operations) + 8):
            raise BundleError(
                Reason.NO_SPACE,
                str(tree.root / folder),
                expected=f"{needed} bytes and {2 * len(plan.operations) + 8} inodes free",
                found=f"{free} bytes and {room.f_favail} inodes free",
                next_step="make room, then run the command again",
            )


def _check_gone_folders(tree: Tree, plan: Plan) -> None:
    removed = {op.path for op in plan.operations if not op.new.is_file}
    for folder in plan.gone_folders:
        for name in tree.listing(folder):
            path = f"{folder}/{name}"
            if name == "__pycache__":
                others = [f"{path}/{item}" for item, kind in tree.listing(path).items() if not is_bytecode(item, kind)]
                # Or something that is no folder, in a folder's place.
                others += [] if tree.kind(path) == "folder" else [path]
            else:
                others = [] if path in removed or path in plan.gone_folders else [path]
            if others:
                raise BundleError(
                    Reason.DRIFT,
                    str(tree.root / others[0]),
                    expected="nothing of others in a folder that goes",
                    found=f"a {tree.kind(others[0])}",
                    next_step="move it away, then run the command again",
                )


def is_bytecode(name: str, kind: str) -> bool:
    # An interpreter writes NAME.pyc.NUMBER and renames it.
    return kind in {"file", "link"} and ".pyc" in name


def _check_caches(tree: Tree, plan: Plan, mirrors: Sequence[Path]) -> list[str]:
    warnings = []
    modules = [op.path for op in plan.operations]
    for cache in bytecode.find(tree, modules, mirrors):
        place = cache.folder / cache.path
        if cache.kind == "closed":
            warnings.append(f"{place} cannot be looked into: drop the bytecode of changed modules there")
            continue
        if os.access(place.parent, os.W_OK | os.X_OK, effective_ids=True):
            continue
        if cache.kind == "unchecked":
            raise in_the_way(cache)
        warnings.append(f"{place} cannot be removed; an interpreter checks it against its source ({cache.kind})")
    return warnings


def swapped(tree: Tree, path: str, found: Identity, expected: Identity) -> BundleError:
    return BundleError(
        Reason.SWAPPED,
        str(tree.root / path),
        expected=expected.brief(),
        found=found.brief(),
        next_step=f"find out what else writes to this tree, then run: {command('status', '--root', tree.root)}",
    )


def in_the_way(cache: bytecode.Cache) -> BundleError:
    return BundleError(
        Reason.BYTECODE,
        str(cache.folder / cache.path),
        expected="bytecode that can be removed: it is never checked against its source",
        found="a folder that cannot be written to",
        next_step="remove it as its owner, then run the command again",
    )
