"""A plan made durable: all or nothing, whatever stops it and whenever.

The order is the proof. New bytes and a second name of every old file lie beside their places, synchronised,
before the journal says "commit"; from then on either direction needs nothing but renames inside one folder.
The journal goes last. The limits: a file system that ignores fsync, and somebody else who writes to the same
files at the same moment without taking the lock; the first is not seen, the second is (each file is read
again right before its rename), but for the moment between that look and the rename.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from patchbundle import bytecode, journal, names
from patchbundle.disk import Disk
from patchbundle.errors import BundleError, Exit, Reason
from patchbundle.identity import EXECUTABLE, Identity
from patchbundle.journal import Journal, Step
from patchbundle.plan import Plan
from patchbundle.tree import Tree

# Room for the journal, folders and block rounding, beside the bytes themselves.
_SLACK = 1 << 20
_CANNOT_LINK = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}

Progress = Callable[[str], None]


def _silent(_: str) -> None:
    return None


@dataclass(frozen=True)
class Outcome:
    """What a transaction did: the paths it changed, the caches it dropped, what it could not do and why."""

    changed: tuple[str, ...]
    dropped: tuple[str, ...]
    warnings: tuple[str, ...]


def pending(tree: Tree) -> Journal | None:
    """The journal of an interrupted run; None if there is none. A half-written first journal counts as none yet.

    Raises:
        BundleError: JOURNAL, if it is damaged.
    """
    found = tree.find(journal.NAME)
    if found.identity.kind == "absent":
        return None
    return journal.load(found.data or b"", str(tree.root / journal.NAME))


def interrupted(tree: Tree) -> bool:
    """Whether an earlier run left something to recover, without reading it."""
    return any(tree.kind(name) != "absent" for name in (journal.NAME, journal.BESIDE))


def run(
    root: Path,
    plan: Plan,
    bundle_digest: str,
    names_of_levels: tuple[str, str],
    *,
    prefixes: Sequence[Path] = (),
    progress: Progress = _silent,
    disk_type: type[Disk] = Disk,
) -> Outcome:
    """Carry out ``plan`` on the tree at ``root``.

    Raises:
        BundleError: before anything was written, or with everything undone; with exit code 4 where undoing
            failed too and ``recover`` must finish.
    """
    with locked(root, disk_type) as disk:
        if interrupted(disk):
            raise recovery_needed(root)
        warnings = preflight(disk, plan, prefixes)
        steps = tuple(Step.of(number, op.path, op.old, op.new) for number, op in enumerate(plan.operations))
        log = Journal(
            "prepare",
            bundle_digest,
            plan.base.id,
            *names_of_levels,
            steps,
            plan.new_folders,
            plan.gone_folders,
            tuple(str(prefix) for prefix in prefixes),
        )
        data = {op.path: op.data for op in plan.operations if op.data is not None}
        try:
            disk.replace(journal.NAME, log.dump())
            progress("staging")
            _stage(disk, log, data)
            log = log.at("commit")
            disk.replace(journal.NAME, log.dump())
            progress("renaming")
            for step in steps:
                _check_unchanged(disk, step)
                _forward(disk, step)
            _settle(disk, log)
            log = log.at("finish")
            disk.replace(journal.NAME, log.dump())
        except (OSError, BundleError, KeyboardInterrupt) as error:
            raise _undone(disk, error) from error
        progress("clearing up")
        try:
            dropped, more = _finish(disk, log)
        except OSError as error:
            raise BundleError(
                Reason.RECOVERY_NEEDED,
                str(root),
                found=f"the tree is changed, but clearing up stopped: {error}",
                next_step=_recover_command(root),
            ) from error
        return Outcome(tuple(step.path for step in steps), dropped, (*warnings, *more))


def recover(root: Path, *, back: bool = False, disk_type: type[Disk] = Disk) -> tuple[str, Journal | None]:
    """Bring a tree after an interrupted run to the new state, or with ``back`` to the old one.

    Returns the state it is in now ("old", "new", or "clean" if there was nothing to do) and the journal.
    May itself be interrupted at any call and run again.

    Raises:
        BundleError: PAST_RETURN, if ``back`` is no longer possible; SWAPPED, if a file is neither old nor new.
    """
    with locked(root, disk_type) as disk:
        try:
            return _recover(disk, back)
        except OSError as error:
            raise BundleError(
                Reason.RECOVERY_NEEDED, str(root), found=str(error), next_step=_recover_command(root)
            ) from error


def _recover(disk: Disk, back: bool) -> tuple[str, Journal | None]:
    log = pending(disk)
    had_beside = disk.kind(journal.BESIDE) != "absent"
    if had_beside:
        disk.unlink(journal.BESIDE)
        disk.sync_folder("")
    if log is None:
        return ("old" if had_beside else "clean"), None
    if log.phase == "prepare":
        _clear(disk, log)
        return "old", log
    if log.phase == "finish":
        if back:
            raise BundleError(
                Reason.PAST_RETURN,
                str(disk.root),
                expected=f"phase commit, to go back to {log.from_level}",
                found=f"phase finish: the tree is at {log.to_level}",
                next_step=_recover_command(disk.root),
            )
        _finish(disk, log)
        return "new", log
    _check_known(disk, log, back)
    if back:
        _roll_back(disk, log, log.steps)
        return "old", log
    for step in log.steps:
        if disk.find(step.path).identity != step.new:
            _forward(disk, step)
    _settle(disk, log)
    disk.replace(journal.NAME, log.at("finish").dump())
    _finish(disk, log)
    return "new", log


@contextmanager
def locked(root: Path, disk_type: type[Disk] = Disk) -> Iterator[Disk]:
    """Hold the tree's lock.

    Raises:
        BundleError: BUSY.
    """
    with disk_type(root) as disk:
        if not disk.lock():
            raise BundleError(Reason.BUSY, str(root), next_step="wait for the other run to end, then run status")
        yield disk


def recovery_needed(root: Path) -> BundleError:
    return BundleError(Reason.RECOVERY_NEEDED, str(root), next_step=_recover_command(root))


def _recover_command(root: Path) -> str:
    return f"run: tools/apply.py recover --root {root}"


# Before anything is written.


def preflight(tree: Tree, plan: Plan, prefixes: Sequence[Path] = ()) -> list[str]:
    """Check all that can be checked without writing; returns warnings.

    Raises:
        BundleError: naming the first thing that stands in the way.
    """
    for op in plan.operations:
        found = tree.find(op.path)
        if found.identity != op.old:
            raise _swapped(tree, op.path, found.identity, op.old)
        if found.status is not None and op.new.is_file:
            _check_owner(tree, op.path, found.status)
    for folder in plan.new_folders:
        if tree.kind(folder) != "absent":
            raise BundleError(Reason.SWAPPED, str(tree.root / folder), expected="nothing", found=tree.kind(folder))
    _check_gone_folders(tree, plan)
    folders = _existing_parents(tree, (op.path for op in plan.operations))
    for folder in ["", *sorted(folders)]:
        _check_writable(tree, folder)
    _check_room(tree, folders, plan)
    return _check_caches(tree, plan, prefixes)


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
                found=stat.filemode(os.fstat(fd).st_mode) + f", owner {os.fstat(fd).st_uid}",
                next_step="run as the owner of the tree",
            )


def _check_owner(tree: Tree, path: str, status: os.stat_result) -> None:
    groups = {os.getegid(), *os.getgroups()}
    if os.geteuid() != 0 and (status.st_uid != os.geteuid() or status.st_gid not in groups):
        raise BundleError(
            Reason.OWNER,
            str(tree.root / path),
            expected=f"a file of user {os.geteuid()} and of one of its groups",
            found=f"owner {status.st_uid}, group {status.st_gid}",
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
            if path not in removed and path not in plan.gone_folders and name != "__pycache__":
                raise BundleError(
                    Reason.DRIFT,
                    str(tree.root / path),
                    expected="nothing of others in a folder that goes",
                    found="a file",
                )


def _check_caches(tree: Tree, plan: Plan, prefixes: Sequence[Path]) -> list[str]:
    warnings = []
    modules = [op.path for op in plan.operations]
    for cache in bytecode.find(tree, modules, prefixes):
        place = cache.folder / cache.path
        if os.access(place.parent, os.W_OK | os.X_OK, effective_ids=True):
            continue
        if cache.kind == "unchecked":
            raise BundleError(
                Reason.BYTECODE,
                str(place),
                expected="bytecode that can be removed: it is never checked against its source",
                found="a folder that cannot be written to",
                next_step="remove it as its owner, then run the command again",
            )
        warnings.append(f"{place} cannot be removed; an interpreter checks it against its source ({cache.kind})")
    return warnings


# Staging.


def _stage(disk: Disk, log: Journal, data: dict[str, bytes]) -> None:
    for folder in log.new_folders:
        above = folder.rpartition("/")[0]
        with disk.folder(above) as fd:
            status = os.fstat(fd)
        disk.mkdir(folder, 0o755 | (status.st_mode & stat.S_ISGID), (status.st_uid, status.st_gid))
    for step in log.steps:
        found = disk.find(step.path)
        if found.identity != step.old:
            raise _swapped(disk, step.path, found.identity, step.old)
        if step.stage is not None:
            permissions, owner = _attributes(disk, step, found.status)
            disk.create(step.stage, data[step.path], permissions, owner)
            if found.status is not None:
                disk.copy_attributes(step.path, step.stage)
            _check_staged(disk, step.stage, step.new, permissions)
        if step.backup is not None and found.status is not None and found.data is not None:
            try:
                disk.link(step.path, step.backup)
            except OSError as error:
                if error.errno not in _CANNOT_LINK:
                    raise
                owner = (found.status.st_uid, found.status.st_gid)
                disk.create(step.backup, found.data, stat.S_IMODE(found.status.st_mode), owner)
                disk.copy_attributes(step.path, step.backup)
            backup = disk.find(step.backup).identity
            if backup != step.old:
                raise _swapped(disk, step.path, backup, step.old)
    for folder in _folders(disk, log):
        disk.sync_folder(folder)


def _attributes(disk: Disk, step: Step, status: os.stat_result | None) -> tuple[int, tuple[int, int]]:
    """Permission bits and owner of the new file: those of the old one, else those that its folder suggests."""
    executable = step.new.mode == EXECUTABLE
    if status is None:
        with disk.parent(step.path) as (folder, _):
            above = os.fstat(folder)
        return (0o755 if executable else 0o644), (above.st_uid, above.st_gid)
    permissions = stat.S_IMODE(status.st_mode)
    if step.old.mode != step.new.mode:
        # As chmod +x and -x: whoever may read it may run it.
        permissions = permissions | (permissions & 0o444) >> 2 if executable else permissions & ~0o111
    return permissions, (status.st_uid, status.st_gid)


def _check_staged(disk: Disk, path: str, expected: Identity, permissions: int) -> None:
    found = disk.find(path)
    if found.identity.sha256 != expected.sha256 or found.status is None:
        raise BundleError(
            Reason.STOPPED, str(disk.root / path), expected=expected.brief(), found=found.identity.brief()
        )
    if stat.S_IMODE(found.status.st_mode) != permissions:
        raise BundleError(
            Reason.OWNER,
            str(disk.root / path),
            expected=oct(permissions),
            found=oct(stat.S_IMODE(found.status.st_mode)),
            next_step="run as a user who may set these bits",
        )


def _folders(disk: Disk, log: Journal) -> list[str]:
    """Every folder with a changed entry that is there, the parents of new folders included."""
    paths = [step.path for step in log.steps] + [*log.new_folders, *log.gone_folders]
    return sorted(folder for folder in {path.rpartition("/")[0] for path in paths} if _is_there(disk, folder))


def _is_there(disk: Disk, folder: str) -> bool:
    return not folder or disk.kind(folder) == "folder"


# Forward and back.


def _check_unchanged(disk: Disk, step: Step) -> None:
    found = disk.find(step.path).identity
    if found != step.old:
        raise _swapped(disk, step.path, found, step.old)


def _forward(disk: Disk, step: Step) -> None:
    if step.stage is not None:
        disk.rename(step.stage, step.path)
    else:
        disk.unlink(step.path)


def _settle(disk: Disk, log: Journal) -> None:
    """Everything renamed is on the disk and is what was meant."""
    for folder in _folders(disk, log):
        disk.sync_folder(folder)
    for step in log.steps:
        found = disk.find(step.path).identity
        if found != step.new:
            raise _swapped(disk, step.path, found, step.new)


def _finish(disk: Disk, log: Journal) -> tuple[tuple[str, ...], list[str]]:
    dropped, warnings = _drop_caches(disk, log)
    _remove_beside(disk, log)
    for folder in log.gone_folders:
        if disk.kind(folder) == "folder":
            try:
                _remove_folder(disk, folder)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
                warnings.append(f"{disk.root / folder} was kept: somebody put a file into it")
    _remove_journal(disk, log)
    return dropped, warnings


def _drop_caches(disk: Disk, log: Journal) -> tuple[tuple[str, ...], list[str]]:
    dropped, warnings = [], []
    prefixes = [Path(prefix) for prefix in log.prefixes]
    for cache in bytecode.find(disk, [step.path for step in log.steps], prefixes):
        place = cache.folder / cache.path
        try:
            if cache.folder == disk.root:
                disk.unlink(cache.path)
            else:
                with type(disk)(cache.folder) as other:
                    other.unlink(cache.path)
            dropped.append(str(place))
        except PermissionError as error:
            warnings.append(f"{place} could not be removed: {error.strerror}")
    return tuple(dropped), warnings


def _remove_folder(disk: Disk, folder: str) -> None:
    """Remove a folder of ours; the bytecode of our modules goes with it."""
    caches = f"{folder}/__pycache__"
    for name in disk.listing(caches):
        disk.unlink(f"{caches}/{name}")
    if disk.kind(caches) == "folder":
        disk.rmdir(caches)
    disk.rmdir(folder)


def _undone(disk: Disk, error: OSError | BundleError | KeyboardInterrupt) -> BundleError:
    """Undo an interrupted run in this process; returns the refusal to raise."""
    try:
        log = pending(disk)
        if disk.kind(journal.BESIDE) != "absent":
            disk.unlink(journal.BESIDE)
        if log is not None and log.phase == "finish":
            return recovery_needed(disk.root)
        if log is not None and log.phase == "commit":
            _roll_back(disk, log, _done(disk, log))
        elif log is not None:
            _clear(disk, log)
    except (OSError, BundleError) as second:
        return BundleError(
            Reason.RECOVERY_NEEDED,
            str(disk.root),
            found=f"{_words(error)}; undoing it failed: {_words(second)}",
            next_step=_recover_command(disk.root),
        )
    if isinstance(error, BundleError):
        return error
    return BundleError(
        Reason.STOPPED,
        str(disk.root),
        expected="every call on the file system to succeed",
        found=f"{_words(error)}; everything was undone, the tree is as it was",
        next_step="mend the cause, then run the command again",
    )


def _done(disk: Disk, log: Journal) -> list[Step]:
    """The steps that are made.

    Raises:
        BundleError: SWAPPED, if somebody changed a file after it was made: its old bytes must not be thrown away.
    """
    steps = []
    for step in log.steps:
        found = disk.find(step.path).identity
        if found == step.new:
            steps.append(step)
        elif found != step.old and step.stage is not None and disk.kind(step.stage) == "absent":
            raise _swapped(disk, step.path, found, step.new)
    return steps


def _words(error: OSError | BundleError | KeyboardInterrupt) -> str:
    if isinstance(error, BundleError):
        return f"{error.reason.value}: {error.where}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by the user"
    return error.strerror or str(error)


def _roll_back(disk: Disk, log: Journal, steps: Iterable[Step]) -> None:
    for step in reversed(tuple(steps)):
        if disk.find(step.path).identity == step.old:
            continue
        if step.backup is not None:
            disk.rename(step.backup, step.path)
        else:
            disk.unlink(step.path)
    for folder in _folders(disk, log):
        disk.sync_folder(folder)
    _drop_caches(disk, log)
    _clear(disk, log)


def _clear(disk: Disk, log: Journal) -> None:
    """The tree is old: remove what was staged, the folders made for it, and the journal."""
    _remove_beside(disk, log)
    for folder in reversed(log.new_folders):
        if disk.kind(folder) == "folder":
            _remove_folder(disk, folder)
    _remove_journal(disk, log)


def _remove_beside(disk: Disk, log: Journal) -> None:
    for step in log.steps:
        for path in (step.stage, step.backup):
            if path is not None and disk.kind(path) != "absent":
                disk.unlink(path)


def _remove_journal(disk: Disk, log: Journal) -> None:
    # The folders first: the journal may only vanish after all that it speaks of has.
    for folder in _folders(disk, log):
        disk.sync_folder(folder)
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(journal.NAME)
    disk.sync_folder("")


def _check_known(disk: Disk, log: Journal, back: bool) -> None:
    """Before recovery changes anything: every path is old or new, and what is needed lies beside it."""
    for step in log.steps:
        found = disk.find(step.path).identity
        if found not in (step.old, step.new):
            raise BundleError(
                Reason.SWAPPED,
                str(disk.root / step.path),
                expected=f"{step.old.brief()}, or {step.new.brief()}",
                found=found.brief(),
                next_step="put one of the two back, then run recover again",
                exit_code=Exit.RECOVERY_NEEDED,
            )
        needed, wanted = (step.backup, step.old) if back else (step.stage, step.new)
        if found != wanted and needed is not None and disk.find(needed).identity != wanted:
            raise BundleError(
                Reason.SWAPPED,
                str(disk.root / needed),
                expected=wanted.brief(),
                found=disk.find(needed).identity.brief(),
                next_step="run recover with --back" if not back else "run recover without --back",
                exit_code=Exit.RECOVERY_NEEDED,
            )


def _swapped(tree: Tree, path: str, found: Identity, expected: Identity) -> BundleError:
    return BundleError(
        Reason.SWAPPED,
        str(tree.root / path),
        expected=expected.brief(),
        found=found.brief(),
        next_step="find out what else writes to this tree, then run status",
    )
