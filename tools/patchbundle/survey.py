"""A survey: everything below a folder, looked at once, and every file of it hashed, by two processes where it pays."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from patchbundle.identity import Identity
from patchbundle.second import PIECES, may_help, shared
from patchbundle.tree import FOLDER, LIMIT, Buffer, Tree, buffer, look

BYTECODE = frozenset({"__pycache__"})
# Of fewer folders a second process would cost more than it saves.
_FEW = 20
# A folder's path with a slash, or '', and the names in it that are of no folder to enter.
_Folder = tuple[str, list[str]]
_Found = dict[str, "Seen"]
# What is done with a folder: its descriptor, its path, its names.
_Each = Callable[[int, str, list[str]], None]


class Seen(NamedTuple):
    """What stands at a path, without the bytes: its identity, and of files and folders the permission bits.

    ``stamp`` is of a plain file that is to be remembered: device, inode, mode, size, and when bytes and attributes were
    last changed.
    """

    identity: Identity
    bits: int | None = None
    stamp: tuple[int, ...] | None = None


Survey = Mapping[str, Seen]


class Begun(NamedTuple):
    """A survey that is under way: of which tree and folder, what is left out, and what finishes it."""

    place: tuple[int, int]
    top: str
    skip: frozenset[str]
    limit: int | None
    finish: Callable[[], Survey]

    def covers(self, tree: Tree, top: str, skip: frozenset[str], largest: int) -> bool:
        """Whether it is of this tree, and looks at all of ``top`` but ``skip`` and into files of ``largest`` bytes."""
        whole = (self.top, self.skip) in ((top, skip), ("", BYTECODE))
        return whole and self.place == place(tree) and (self.limit is None or self.limit >= largest)


class Memory:
    """What a process may remember of a tree of its own from one survey to the next.

    Of a file that has the stamp of before it keeps the hash, if its attributes had changed for the last time before
    the survey began that hashed it: by the clock of the file system, which ``clock``, a path beside the tree, is to
    tell. Nobody sets that time, so that a change since has a later one, however coarse the clock. What is younger is
    read again.
    """

    def __init__(self, clock: Path) -> None:
        self._clock = clock
        self._kept: dict[str, Seen] = {}

    @property
    def knows(self) -> bool:
        return bool(self._kept)

    def now(self) -> int:
        """The file system's time, as it gives it to a file that changes now."""
        self._clock.unlink(missing_ok=True)
        self._clock.touch()
        return self._clock.stat().st_ctime_ns

    def keep(self, seen: Survey, began: int) -> None:
        self._kept = {path: item for path, item in seen.items() if item.stamp is not None and item.stamp[-1] < began}

    def of(self, folder: int, name: str, path: str) -> Seen | None:
        """What is known of a file, if it is as it was."""
        kept = self._kept.get(path)
        if kept is None:
            return None
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None
        return kept if _stamp(status) == kept.stamp else None


def take(
    tree: Tree,
    top: str = "",
    skip: frozenset[str] = BYTECODE,
    limit: int | None = None,
    memory: Memory | None = None,
) -> Survey:
    """Look at everything below ``top`` once, folders included, those called as in ``skip`` left out.

    Of files with more than ``limit`` bytes only kind and size are told: whoever knows what there may be saves the rest.
    """
    with begun(tree, top, skip, limit, memory) as under_way:
        return under_way.finish()


@contextmanager
def begun(
    tree: Tree,
    top: str = "",
    skip: frozenset[str] = BYTECODE,
    limit: int | None = None,
    memory: Memory | None = None,
) -> Iterator[Begun]:
    """Begin to :func:`take` a survey. A second process is at work meanwhile."""
    began = memory.now() if memory is not None else 0
    own = buffer()
    folders: list[_Folder] = []
    seen: _Found = {}

    def walked(each: _Each) -> None:
        with tree.folder(top) as fd:
            _enter(fd, f"{top}/" if top else "", skip, seen, each)

    def files(fd: int, prefix: str, names: list[str]) -> _Found:
        return {prefix + name: _file(fd, name, prefix + name, limit, memory, own) for name in names}

    def hashed(number: int) -> _Found:
        found: _Found = {}
        for prefix, names in folders[number::PIECES]:
            with tree.folder(prefix[:-1]) as fd:
                found |= files(fd, prefix, names)
        return found

    if may_help() and not (memory is not None and memory.knows):
        # Names first, so that there is something to share.
        walked(lambda _, prefix, names: folders.append((prefix, names)))
    count = min(len(folders), PIECES)
    with shared(count, hashed, alone=len(folders) < _FEW, packed=_packed, unpacked=_unpacked) as done:

        def finish() -> Survey:
            if not folders:
                walked(lambda fd, prefix, names: seen.update(files(fd, prefix, names)))
            for part in done().values():
                seen.update(part)
            if memory is not None:
                memory.keep(seen, began)
            return seen

        yield Begun(place(tree), top, skip, limit, cache(finish))


@contextmanager
def guessed(root: Path, top: str) -> Iterator[Begun | None]:
    """Begin the survey that a look at ``root`` may want once it knows what stands there; None without such a folder.

    Whoever wants one compares place and extent: a guess that was wrong is for nothing.
    """
    with ExitStack() as stack:
        under_way = None
        with suppress(OSError):
            tree = stack.enter_context(Tree(root))
            under_way = stack.enter_context(begun(tree, top, BYTECODE, LIMIT))
        yield under_way


def place(tree: Tree) -> tuple[int, int]:
    """Which folder an open tree is, whatever it is called by now."""
    status = os.fstat(tree.fd)
    return status.st_dev, status.st_ino


def _packed(found: _Found) -> dict[str, tuple[tuple[object, ...], int | None, tuple[int, ...] | None]]:
    return {path: (tuple(item.identity), item.bits, item.stamp) for path, item in found.items()}


def _unpacked(plain: dict[str, Any]) -> _Found:
    return {path: Seen(Identity(*identity), bits, stamp) for path, (identity, bits, stamp) in plain.items()}


def _enter(fd: int, prefix: str, skip: frozenset[str], seen: _Found, each: _Each) -> None:
    """List a folder and those below it. Names alone: what each is, is looked at when it is opened."""
    names, below = [], []
    with os.scandir(fd) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
            elif entry.name not in skip:
                below.append(entry.name)
    for name in below:
        try:
            child = os.open(name, FOLDER, dir_fd=fd)
        except OSError:
            # Closed to us, or something else by now.
            names.append(name)
            continue
        try:
            seen[prefix + name] = Seen(Identity("folder"), stat.S_IMODE(os.fstat(child).st_mode))
            _enter(child, f"{prefix}{name}/", skip, seen, each)
        finally:
            os.close(child)
    each(fd, prefix, names)


def _file(fd: int, name: str, path: str, limit: int | None, memory: Memory | None, own: Buffer) -> Seen:
    known = memory.of(fd, name, path) if memory is not None else None
    if known is not None:
        return known
    identity, _, status = look(fd, name, limit, own)
    if status is None:
        return Seen(identity)
    return Seen(identity, stat.S_IMODE(status.st_mode), _stamp(status) if memory is not None else None)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    changed = (status.st_mtime_ns, status.st_ctime_ns)
    return (status.st_dev, status.st_ino, status.st_mode, status.st_size, *changed)
