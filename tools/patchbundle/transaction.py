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
import fcntl
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from patchbundle import bytecode, journal, preflight
from patchbundle.disk import Disk
from patchbundle.errors import BundleError, Exit, Reason, command
from patchbundle.identity import ABSENT, EXECUTABLE, Attributes, Identity
from patchbundle.journal import Journal, Step
from patchbundle.tree import Found, Tree

if TYPE_CHECKING:
    from patchbundle.plan import Operation, Plan

_CANNOT_LINK = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}

# What may end a run in its middle and is answered by undoing it.
_FAILURES = (OSError, BundleError, KeyboardInterrupt, MemoryError)

Progress = Callable[[str], None]


def _silent(_: str) -> None:
    return None


class Outcome(NamedTuple):
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
    if found.identity == ABSENT:
        return None
    return journal.load(found.data or b"", str(tree.root / journal.NAME))


def interrupted(tree: Tree) -> bool:
    """Whether an earlier run left something to recover, without reading it."""
    return any(tree.kind(name) != "absent" for name in (journal.NAME, journal.BESIDE))


def refuse_interrupted(tree: Tree) -> None:
    """Refuse a tree in which a run was interrupted, or is at work.

    Raises:
        BundleError: BUSY or RECOVERY_NEEDED.
    """
    if interrupted(tree):
        # Our own lock does not count: whoever holds it and finds a journal finds one of an earlier run.
        if isinstance(tree, Disk):
            raise recovery_needed(tree.root)
        with quiet(tree):
            # Again, now that nobody writes: the run whose journal that was may have come to its end.
            if interrupted(tree):
                raise recovery_needed(tree.root)


def run(
    disk: Disk,
    plan: Plan,
    bundle_digest: str,
    *,
    mirrors: Sequence[Path] = (),
    progress: Progress = _silent,
) -> Outcome:
    """Carry out ``plan`` on the tree that ``disk`` holds the lock of.

    Raises:
        BundleError: before anything was written, or with everything undone; with exit code 4 where undoing
            failed too and ``recover`` must finish.
    """
    if interrupted(disk):
        raise recovery_needed(disk.root)
    warnings = preflight.check(disk, plan, mirrors)
    steps = tuple(Step.of(number, op.path, op.old, op.new) for number, op in enumerate(plan.operations))
    log = Journal(
        "prepare",
        bundle_digest,
        plan.base.id,
        plan.start.name,
        plan.goal.name,
        steps,
        plan.new_folders,
        plan.gone_folders,
        tuple(str(mirror) for mirror in mirrors),
    )
    operations = {op.path: op for op in plan.operations}
    made: set[str] = set()
    tried: list[Step] = []
    changed = False
    # One block around all of it: nothing that happens between two parts, Ctrl-C included, may get past both.
    try:
        disk.replace(journal.NAME, log.dump())
        _tell(progress, "staging")
        _stage(disk, log, operations, made)
        log = log.at("commit")
        disk.replace(journal.NAME, log.dump())
        _tell(progress, "renaming")
        for step in steps:
            _check_unchanged(disk, step)
            tried.append(step)
            _forward(disk, step)
        _settle(disk, log)
        log = log.at("finish")
        disk.replace(journal.NAME, log.dump())
        changed = True
        _tell(progress, "clearing up")
        dropped, more = _finish(disk, log)
    except _FAILURES as error:
        if changed:
            raise _unfinished(disk.root, f"the tree is changed, but clearing up stopped: {_words(error)}") from error
        raise _undone(disk, error, made, tried) from error
    return Outcome(tuple(step.path for step in steps), dropped, (*warnings, *more))


def _tell(progress: Progress, text: str) -> None:
    """Say how far it is. Whatever becomes of the words: no transaction stops for them."""
    with contextlib.suppress(Exception):
        progress(text)


def recover(root: Path, *, back: bool = False, disk_type: type[Disk] = Disk) -> tuple[str, Journal | None]:
    """Bring a tree after an interrupted run to the new state, or with ``back`` to the old one.

    Without ``back`` too it goes back where an earlier undoing was itself interrupted: what had been made is
    gone then, and the old files are all there. Returns the state it is in now ("old", "new", or "clean" if
    there was nothing to do) and the journal. May itself be interrupted at any call and run again.

    Raises:
        BundleError: BUSY; else with exit code 4: PAST_RETURN, if ``back`` is no longer possible; SWAPPED, if a
            file is neither old nor new; RECOVERY_NEEDED, if the file system fails.
    """
    try:
        with locked(root, disk_type) as disk:
            return _recover(disk, back)
    except _FAILURES as error:
        if isinstance(error, BundleError) and error.exit_code in (Exit.RECOVERY_NEEDED, Exit.BUSY):
            raise
        raise _unfinished(root, _words(error)) from error


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
    if not back and _obstacle(disk, log, back=False) and not _obstacle(disk, log, back=True):
        back = True
    if obstacle := _obstacle(disk, log, back):
        raise obstacle
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
            raise _busy(root)
        yield disk


@contextmanager
def quiet(tree: Tree) -> Iterator[None]:
    """A moment in which nobody writes to the tree. Needs no right to write; a writer waits for its end.

    Raises:
        BundleError: BUSY, if somebody writes.
    """
    # A descriptor of its own: a lock belongs to the open file, and this one must end here.
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=tree.fd)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy(tree.root) from error
        except OSError:
            # A file system without locks: a writer could not have taken its own.
            pass
        yield
    finally:
        os.close(fd)


def left_behind(tree: Tree) -> tuple[bool, Journal | None]:
    """Whether an earlier run was interrupted, and its journal, if it got as far as to write one.

    Raises:
        BundleError: BUSY, if that run is still at work; JOURNAL.
    """
    if not interrupted(tree):
        return False, None
    with quiet(tree):
        return interrupted(tree), pending(tree)


def _busy(root: Path) -> BundleError:
    return BundleError(
        Reason.BUSY, str(root), next_step=f"wait for the other run, then: {command('status', '--root', root)}"
    )


def _unfinished(root: Path, found: str) -> BundleError:
    return BundleError(Reason.RECOVERY_NEEDED, str(root), found=found, next_step=_recover_command(root))


def recovery_needed(root: Path) -> BundleError:
    return BundleError(Reason.RECOVERY_NEEDED, str(root), next_step=_recover_command(root))


def _recover_command(root: Path, *more: str) -> str:
    return f"run: {command('recover', '--root', root, *more)}"


# Staging.


def _stage(disk: Disk, log: Journal, operations: Mapping[str, Operation], made: set[str]) -> None:
    """Lay everything new and everything old beside its place. ``made`` grows by the paths that undoing must remove."""
    for folder in log.new_folders:
        above = folder.rpartition("/")[0]
        with disk.folder(above) as fd:
            status = os.fstat(fd)
        # As open as the folder above it, to everybody; but we must be able to fill it.
        with _making(made, folder):
            disk.mkdir(folder, stat.S_IMODE(status.st_mode) | stat.S_IRWXU, _owner_below(status))
    staged: list[tuple[str, Identity, int]] = []
    for step in log.steps:
        found = disk.find(step.path)
        if found.identity != step.old:
            raise preflight.swapped(disk, step.path, found.identity, step.old)
        operation = operations[step.path]
        if step.stage is not None and operation.data is not None:
            permissions, owner = _attributes(disk, step, found.status, operation.attributes)
            like = step.path if found.status is not None else None
            with _making(made, step.stage):
                disk.create(step.stage, operation.data, permissions, owner, like, sync=False)
            staged.append((step.stage, step.new, permissions))
        if step.backup is not None and found.status is not None and found.data is not None:
            with _making(made, step.backup):
                _keep(disk, step.path, step.backup, found)
            backup = disk.find(step.backup).identity
            if backup != step.old:
                raise preflight.swapped(disk, step.path, backup, step.old)
    # All after all: a file system commits in one go what it was given together. One after the other, each write waits
    # for a commit of its own.
    for stage, _, _ in staged:
        disk.sync_file(stage)
    for folder in _folders(disk, log):
        disk.sync_folder(folder)
    # After they are on the disk: what is read again now is what a crash would leave.
    for stage, expected, permissions in staged:
        _check_staged(disk, stage, expected, permissions)


@contextmanager
def _making(made: set[str], path: str) -> Iterator[None]:
    """Note a path as ours before it is made, so that it is whenever the call stops; but not one that was there."""
    made.add(path)
    try:
        yield
    except FileExistsError:
        made.remove(path)
        raise


def _keep(disk: Disk, path: str, backup: str, found: Found) -> None:
    """Give an old file a second name; a copy where that cannot be."""
    try:
        disk.link(path, backup)
    except OSError as error:
        if error.errno not in _CANNOT_LINK or found.status is None or found.data is None:
            raise
        owner = (found.status.st_uid, found.status.st_gid)
        disk.create(backup, found.data, stat.S_IMODE(found.status.st_mode), owner, path)


def _owner_below(above: os.stat_result) -> tuple[int, int] | None:
    """Owner of something new in a folder: the folder's, where we may give files away; None leaves it to the system."""
    return (above.st_uid, above.st_gid) if os.geteuid() == 0 else None


def _attributes(
    disk: Disk, step: Step, status: os.stat_result | None, kept: Attributes | None
) -> tuple[int, tuple[int, int] | None]:
    """Permission bits and owner of the new file: those of the old one, or those that it had when it was removed; else
    those that its folder suggests."""
    executable = step.new.mode == EXECUTABLE
    if status is None and kept is None:
        with disk.parent(step.path) as (folder, _):
            above = os.fstat(folder)
        return (0o755 if executable else 0o644), _owner_below(above)
    own = kept if status is None else Attributes(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
    assert own is not None
    permissions = own.bits
    if bool(permissions & stat.S_IXUSR) != executable:
        # As chmod +x and -x: whoever may read it may run it.
        permissions = permissions | (permissions & 0o444) >> 2 if executable else permissions & ~0o111
    return permissions, (own.owner, own.group)


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
        raise preflight.swapped(disk, step.path, found, step.old)


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
            raise preflight.swapped(disk, step.path, found, step.new)


def _finish(disk: Disk, log: Journal) -> tuple[tuple[str, ...], list[str]]:
    dropped, warnings = _drop_caches(disk, log)
    _remove_beside(disk, log)
    for folder in log.gone_folders:
        if not _remove_folder(disk, folder):
            warnings.append(f"{disk.root / folder} was kept: somebody put a file into it")
    _remove_journal(disk, log)
    return dropped, warnings


def _drop_caches(disk: Disk, log: Journal) -> tuple[tuple[str, ...], list[str]]:
    dropped, warnings = [], []
    mirrors = [Path(mirror) for mirror in log.mirrors]
    for cache in bytecode.find(disk, [step.path for step in log.steps], mirrors):
        place = cache.folder / cache.path
        if cache.kind == "closed":
            continue
        try:
            if cache.folder == disk.root:
                disk.unlink(cache.path)
            else:
                with type(disk)(cache.folder) as other:
                    other.unlink(cache.path)
            dropped.append(str(place))
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
                raise
            if cache.kind == "unchecked":
                # The old code would run on. The journal stays, so that recover tries again.
                raise preflight.in_the_way(cache) from error
            warnings.append(f"{place} could not be removed: {error.strerror}")
    return tuple(dropped), warnings


def _remove_folder(disk: Disk, folder: str) -> bool:
    """Remove a folder of ours, the bytecode of our modules with it; False if something of others is in it."""
    if disk.kind(folder) != "folder":
        return True
    caches = f"{folder}/__pycache__"
    try:
        for name, kind in disk.listing(caches).items():
            if preflight.is_bytecode(name, kind):
                with contextlib.suppress(FileNotFoundError):
                    disk.unlink(f"{caches}/{name}")
        if disk.kind(caches) == "folder":
            disk.rmdir(caches)
        disk.rmdir(folder)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        return False
    return True


def _undone(disk: Disk, error: BaseException, made: Collection[str], tried: Iterable[Step]) -> BundleError:
    """Undo in this process a run that made the paths ``made`` and of which the steps ``tried`` may be made.

    Returns the refusal to raise.
    """
    try:
        log = pending(disk)
        if disk.kind(journal.BESIDE) != "absent":
            disk.unlink(journal.BESIDE)
        if log is not None and log.phase == "finish":
            return _unfinished(disk.root, f"the tree is changed, but {_words(error)}")
        if log is not None and log.phase == "commit":
            _roll_back(disk, log, _done(disk, tried))
        elif log is not None:
            _clear(disk, log, made)
    except _FAILURES as second:
        return _unfinished(disk.root, f"{_words(error)}; undoing it failed: {_words(second)}")
    if isinstance(error, BundleError):
        return error
    place = getattr(error, "filename", None)
    return BundleError(
        Reason.STOPPED,
        place if isinstance(place, str) else str(disk.root),
        expected="every call on the file system to succeed",
        found=f"{_words(error)}; everything was undone, the tree is as it was",
        next_step="mend the cause, then run the command again",
    )


def _done(disk: Disk, tried: Iterable[Step]) -> list[Step]:
    """Those of the steps tried that are made.

    Raises:
        BundleError: SWAPPED, if somebody changed a file after it was made: its old bytes must not be thrown away.
    """
    steps = []
    for step in tried:
        found = disk.find(step.path).identity
        if found == step.new:
            steps.append(step)
        elif found != step.old:
            raise preflight.swapped(disk, step.path, found, step.new)
    return steps


def _words(error: BaseException) -> str:
    if isinstance(error, BundleError):
        return f"{error.reason.value}: {error.where}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by the user"
    if not isinstance(error, OSError):
        return "not enough memory"
    words = error.strerror or str(error)
    return f"{words}: {error.filename}" if isinstance(error.filename, str) else words


def _roll_back(disk: Disk, log: Journal, steps: Iterable[Step]) -> None:
    for step in reversed(tuple(steps)):
        if disk.find(step.path).identity == step.old:
            continue
        if step.backup is not None:
            disk.rename(step.backup, step.path)
        else:
            disk.unlink(step.path)
    # No fsync here: whichever of these renames a loss of power loses, recovery finds what it needs for one direction.
    _drop_caches(disk, log)
    _clear(disk, log)


def _clear(disk: Disk, log: Journal, made: Collection[str] | None = None) -> None:
    """The tree is old: remove what was staged, the folders made for it, and the journal.

    Only what is in ``made``, if the process that made it is still there to tell. Else all that the journal names:
    none of it was there when the journal was written (:func:`preflight`).
    """
    _remove_beside(disk, log, made)
    for folder in reversed(log.new_folders):
        # One that somebody put something into stays; status tells.
        if made is None or folder in made:
            _remove_folder(disk, folder)
    _remove_journal(disk, log)


def _remove_beside(disk: Disk, log: Journal, made: Collection[str] | None = None) -> None:
    for step in log.steps:
        for path in (step.stage, step.backup):
            if path is not None and (made is None or path in made) and disk.kind(path) != "absent":
                disk.unlink(path)


def _remove_journal(disk: Disk, log: Journal) -> None:
    # The folders first: the journal may only vanish after all that it speaks of has.
    for folder in _folders(disk, log):
        disk.sync_folder(folder)
    _sync_caches(disk, log)
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(journal.NAME)
    disk.sync_folder("")


def _sync_caches(disk: Disk, log: Journal) -> None:
    """Bytecode that comes back after a loss of power could hide the change; whichever run it was that dropped it."""
    folders = sorted({step.path.rpartition("/")[0] for step in log.steps if step.path.endswith(".py")})
    _sync_those_there(disk, [f"{folder}/__pycache__".lstrip("/") for folder in folders])
    for mirror in log.mirrors:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            with type(disk)(Path(mirror)) as other:
                _sync_those_there(other, folders)


def _sync_those_there(disk: Disk, folders: Iterable[str]) -> None:
    for folder in folders:
        # One that is closed to us holds nothing that we removed.
        with contextlib.suppress(PermissionError):
            if _is_there(disk, folder):
                disk.sync_folder(folder)


def _obstacle(disk: Disk, log: Journal, back: bool) -> BundleError | None:
    """Why recovery cannot go this way: a path that is neither old nor new, or what is needed does not lie beside it."""
    for step in log.steps:
        found = disk.find(step.path).identity
        if found not in (step.old, step.new):
            return BundleError(
                Reason.SWAPPED,
                str(disk.root / step.path),
                expected=f"{step.old.brief()}, or {step.new.brief()}",
                found=found.brief(),
                next_step=f"put one of the two back, then {_recover_command(disk.root)}",
                exit_code=Exit.RECOVERY_NEEDED,
            )
        needed, wanted = (step.backup, step.old) if back else (step.stage, step.new)
        if found != wanted and needed is not None and disk.find(needed).identity != wanted:
            return BundleError(
                Reason.SWAPPED,
                str(disk.root / needed),
                expected=wanted.brief(),
                found=disk.find(needed).identity.brief(),
                next_step=_recover_command(disk.root, *([] if back else ["--back"])),
                exit_code=Exit.RECOVERY_NEEDED,
            )
    return None
