"""Read a target through descriptors that follow no link. Nothing here writes."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from patchbundle import names
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import ABSENT, EXECUTABLE, PLAIN, File, Identity

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK the open of a fifo would wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_Self = TypeVar("_Self", bound="Tree")
Buffer = memoryview
_ABSENT = {errno.ENOENT}
# What is held in memory at most where the caller knows no closer limit: more than any file that a series touches.
LIMIT = 1 << 28
_PART = 1 << 20
_NOT_PLAIN = {errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.EACCES}
_FOLDER_THERE = Identity("folder")


class Found(NamedTuple):
    """What stands at a path: its identity, and for a plain file its bytes and status.

    A file larger than the look allowed is not read: its identity has its size and no hash, and there are no bytes.
    """

    identity: Identity
    data: bytes | None = None
    status: os.stat_result | None = None

    @property
    def file(self) -> File | None:
        return File(self.data, self.identity.mode) if self.data is not None else None


class Tree:
    """A folder, held open. Paths are relative, checked by :mod:`names`, in forward slashes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def folder(self, path: str) -> Iterator[int]:
        """A descriptor of the folder ``path``, opened component by component; '' is the root.

        Raises:
            OSError: ELOOP or ENOTDIR where a component is a link or no folder, ENOENT where it is missing.
        """
        fd = self._opened(path)
        try:
            yield fd
        finally:
            os.close(fd)

    def _opened(self, path: str) -> int:
        fd = os.dup(self.fd)
        for part in path.split("/") if path else ():
            try:
                child = os.open(part, FOLDER, dir_fd=fd)
            finally:
                # The descriptor of the parent is closed as soon as the child's is there.
                os.close(fd)
            fd = child
        return fd

    @contextmanager
    def parent(self, path: str) -> Iterator[tuple[int, str]]:
        """A descriptor of the folder that holds ``path``, and the last component's name."""
        head, _, name = path.rpartition("/")
        fd = self._opened(head)
        try:
            yield fd, name
        finally:
            os.close(fd)

    def find(self, path: str, limit: int | None = LIMIT, *, keep: bool = True) -> Found:
        """Look at ``path``: read and hash it through one descriptor if it is a plain file of up to ``limit`` bytes.

        Without ``keep`` its bytes are hashed as they come, and not kept.

        Raises:
            BundleError: UNREADABLE, if the file cannot be read.
        """
        try:
            with self.parent(path) as (folder, name):
                return look(folder, name, limit, None if keep else buffer())
        except OSError as error:
            if error.errno in _ABSENT:
                return Found(ABSENT)
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                return Found(Identity(f"below {self._odd_parent(path)}"))
            raise unreadable(self.root / path, error) from error

    def head(self, path: str, count: int) -> bytes:
        """The first ``count`` bytes of the plain file ``path``; fewer if it is shorter or no plain file.

        Raises:
            OSError: it cannot be opened or read.
        """
        with self.parent(path) as (folder, name):
            fd = os.open(name, _FILE, dir_fd=folder)
        try:
            return os.read(fd, count) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        finally:
            os.close(fd)

    def _odd_parent(self, path: str) -> str:
        for parent in names.parents(path):
            kind = self.kind(parent)
            if kind != "folder":
                return f"a {kind} at {parent}"
        return "a parent that is no folder"

    def kind(self, path: str) -> str:
        """One of absent, file, folder, link, special."""
        try:
            with self.parent(path) as (folder, name):
                return kind_of(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except OSError as error:
            if error.errno in _ABSENT:
                return "absent"
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                return "absent"
            raise unreadable(self.root / path, error) from error

    def listing(self, path: str) -> dict[str, str]:
        """Name -> kind of everything in a folder; empty if it is not there or no folder."""
        try:
            with self.folder(path) as fd, os.scandir(fd) as entries:
                return {entry.name: _kind_of_entry(entry) for entry in entries}
        except OSError as error:
            if error.errno in _ABSENT | {errno.ELOOP, errno.ENOTDIR}:
                return {}
            raise unreadable(self.root / path, error) from error

    def walk(
        self, top: str = "", skip: frozenset[str] = frozenset({"__pycache__"}), limit: int | None = LIMIT
    ) -> Iterator[tuple[str, Found]]:
        """Every path below ``top`` with what stands there, folders included, none entered whose name is in ``skip``.

        ``limit`` is as in :meth:`find`.
        """
        with self.folder(top) as fd:
            yield from _walk(fd, f"{top}/" if top else "", skip, limit)


def buffer() -> Buffer:
    """Memory to hash files in, one after the other."""
    return memoryview(bytearray(_PART))


def _walk(fd: int, prefix: str, skip: frozenset[str], limit: int | None) -> Iterator[tuple[str, Found]]:
    for name in sorted(os.listdir(fd)):
        path = prefix + name
        try:
            child = os.open(name, _FILE, dir_fd=fd)
        except OSError as error:
            yield path, _not_opened(fd, name, error)
            continue
        # One descriptor tells what it is, and is read or entered.
        try:
            status = os.fstat(child)
            if not stat.S_ISDIR(status.st_mode):
                yield path, _look(child, status, limit, None)
            elif name not in skip:
                yield path, Found(_FOLDER_THERE, None, status)
                yield from _walk(child, f"{path}/", skip, limit)
        finally:
            os.close(child)


def look(folder: int, name: str, limit: int | None, own: Buffer | None) -> Found:
    """As :meth:`Tree.find`, of a name in an open folder; with a buffer the bytes are hashed there and not kept.

    Raises:
        OSError: it cannot be read, or is not there.
    """
    try:
        fd = os.open(name, _FILE, dir_fd=folder)
    except OSError as error:
        return _not_opened(folder, name, error)
    try:
        return _look(fd, os.fstat(fd), limit, own)
    finally:
        os.close(fd)


def _not_opened(folder: int, name: str, error: OSError) -> Found:
    """What stands there, where that could not be opened because it is no file or folder; else the error is raised."""
    kind = "file"
    if error.errno in _NOT_PLAIN:
        kind = kind_of(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    if kind == "file":
        raise error
    return Found(Identity(kind))


def _look(fd: int, status: os.stat_result, limit: int | None, own: Buffer | None) -> Found:
    """What an open descriptor is of. With a buffer (``own``) the bytes are hashed there, part by part."""
    if not stat.S_ISREG(status.st_mode):
        return Found(Identity(kind_of(status.st_mode)))
    mode = EXECUTABLE if status.st_mode & stat.S_IXUSR else PLAIN
    if limit is not None and status.st_size > limit:
        return Found(Identity("file", mode, "", status.st_size), None, status)
    parts, sha256, size = _read(fd, status.st_size, limit) if own is None else _hash(fd, status.st_size, limit, own)
    data = b"".join(parts) if sha256 is not None and parts is not None else None
    return Found(Identity("file", mode, sha256 or "", size), data, status)


def _read(fd: int, size: int, limit: int | None) -> tuple[list[bytes], str | None, int]:
    """The bytes, their SHA-256 and their number; no hash where there are more of them than ``limit``."""
    parts, total, count = [], hashlib.sha256(), 0
    while part := os.read(fd, wanted := min(max(size - count, 0) + 1, _PART)):
        count += len(part)
        # It may have grown since its size was taken.
        if limit is not None and count > limit:
            return [], None, max(count, os.fstat(fd).st_size)
        total.update(part)
        parts.append(part)
        # One more was asked for than there is: the call that would say so is saved, one a file.
        if count == size and len(part) < wanted:
            break
    return parts, total.hexdigest(), count


def _hash(fd: int, size: int, limit: int | None, own: Buffer) -> tuple[None, str | None, int]:
    """As :func:`_read`, without the bytes. New memory for each file would take as long as hashing it."""
    count = got = os.readv(fd, [own])
    total = hashlib.sha256(own[:got])
    # Mostly that was all of it, and one call is cheaper than two.
    while got and not (count == size and got < len(own)):
        # It may have grown since its size was taken.
        if limit is not None and count > limit:
            return None, None, max(count, os.fstat(fd).st_size)
        got = os.readv(fd, [own])
        count += got
        total.update(own[:got])
    return None, total.hexdigest(), count


def _kind_of_entry(entry: os.DirEntry[str]) -> str:
    """As :func:`kind_of`; most file systems tell it with the name."""
    if entry.is_symlink():
        return "link"
    if entry.is_file(follow_symlinks=False):
        return "file"
    return "folder" if entry.is_dir(follow_symlinks=False) else "special"


def kind_of(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "special"


def unreadable(path: Path, error: OSError) -> BundleError:
    return BundleError(Reason.UNREADABLE, str(path), expected="to read it", found=error.strerror or str(error))
