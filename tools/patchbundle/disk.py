"""The one place that writes. Every call on the file system goes through :meth:`Disk.call`.

Tests take that one point to fail or to kill the process at each call; nothing else in the package opens a
file for writing, renames, links, removes or synchronises.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from patchbundle.tree import Tree

_T = TypeVar("_T")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# How long a writer waits for readers to let go of the lock, in seconds. Each holds it for the moment of a look.
_PATIENCE = 1.0


class Disk(Tree):
    """A folder that may be written to, by paths relative to it, without following a link."""

    def call(self, name: str, path: str, action: Callable[[], _T]) -> _T:
        """Run one call on the file system. ``name`` and ``path`` say which."""
        return action()

    @contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        """Let every OSError from here name the whole path: the system knows only a component, or a descriptor."""
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.root / path), None
            raise

    def create(
        self,
        path: str,
        data: bytes,
        permissions: int,
        owner: tuple[int, int] | None,
        like: str | None = None,
        *,
        sync: bool = True,
    ) -> None:
        """Write a new file, exactly with these permission bits and this owner, down to the disk.

        It gets the extended attributes (access control lists, labels) of the file ``like`` beside it. Without
        ``sync`` it is the caller's to bring it down to the disk, after others were written (:meth:`sync_file`).
        """
        with self._naming(path), self.parent(path) as (folder, name):
            fd = self.call("open", path, lambda: os.open(name, _NEW, 0o600, dir_fd=folder))
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[self.call("write", path, partial(os.write, fd, rest)) :]
                status = os.fstat(fd)
                if owner is not None and owner != (status.st_uid, status.st_gid):
                    self.call("chown", path, lambda: os.fchown(fd, *owner))
                if like is not None:
                    # While the file is ours to write: attributes of a read-only file cannot be set later.
                    self._copy_attributes(folder, like.rpartition("/")[2], path, fd)
                # After the writes and the chown: both clear set-id bits. fchmod also ignores the umask.
                self.call("chmod", path, lambda: os.fchmod(fd, permissions))
                if sync:
                    self.call("fsync", path, lambda: os.fsync(fd))
                else:
                    # It is on its way already when the fsync comes, and all of them are under way at once.
                    with contextlib.suppress(OSError):
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def _copy_attributes(self, folder: int, like: str, path: str, fd: int) -> None:
        old = os.open(like, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            for attribute in _attributes(old):
                value = os.getxattr(old, attribute)
                try:
                    self.call("setxattr", path, partial(os.setxattr, fd, attribute, value))
                except PermissionError:
                    # Labels are the system's to give. Any other attribute is a part of the file.
                    if not attribute.startswith(("security.", "trusted.")):
                        raise
        finally:
            os.close(old)

    def link(self, old: str, new: str) -> None:
        """Both in one folder."""
        with self._naming(new), self.parent(old) as (folder, name):
            there = {"src_dir_fd": folder, "dst_dir_fd": folder}
            new_name = new.rpartition("/")[2]
            self.call("link", new, lambda: os.link(name, new_name, follow_symlinks=False, **there))

    def rename(self, old: str, new: str) -> None:
        """Both in one folder: a rename across folders fails on overlayfs, and across mounts anywhere."""
        with self._naming(new), self.parent(old) as (folder, name):
            new_name = new.rpartition("/")[2]
            self.call("rename", new, lambda: os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=folder))

    def unlink(self, path: str) -> None:
        with self._naming(path), self.parent(path) as (folder, name):
            self.call("unlink", path, lambda: os.unlink(name, dir_fd=folder))

    def mkdir(self, path: str, permissions: int, owner: tuple[int, int] | None) -> None:
        with self._naming(path), self.parent(path) as (folder, name):
            self.call("mkdir", path, lambda: os.mkdir(name, 0o700, dir_fd=folder))
        with self._naming(path), self.folder(path) as fd:
            status = os.fstat(fd)
            if owner is not None and owner != (status.st_uid, status.st_gid):
                self.call("chown", path, lambda: os.fchown(fd, *owner))
            self.call("chmod", path, lambda: os.fchmod(fd, permissions))

    def rmdir(self, path: str) -> None:
        with self._naming(path), self.parent(path) as (folder, name):
            self.call("rmdir", path, lambda: os.rmdir(name, dir_fd=folder))

    def sync_folder(self, path: str) -> None:
        with self._naming(path), self.folder(path) as fd:
            self.call("fsync", path or ".", lambda: os.fsync(fd))

    def sync_file(self, path: str) -> None:
        """Bring a file that was written before down to the disk.

        An error of one of its writes is told to the descriptor that is opened for it here; if the system has forgotten
        the file since, its bytes come from the disk when it is read, and hashed, the next time.
        """
        with self._naming(path), self.parent(path) as (folder, name):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                self.call("fsync", path, lambda: os.fsync(fd))
            finally:
                os.close(fd)

    def replace(self, path: str, data: bytes, permissions: int = 0o644) -> None:
        """Write a file whole or not at all, through a new one beside it."""
        folder = path.rpartition("/")[0]
        beside = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):
            self.unlink(beside)
        self.create(beside, data, permissions, None)
        self.rename(beside, path)
        self.sync_folder(folder)

    def lock(self) -> bool:
        """Take the tree's lock, for as long as this object is open; False if another process has it.

        The lock is on the folder itself: no file is left behind, and it ends with the process however it ends.
        Readers share it for the moment of a look (:func:`patchbundle.transaction.refuse_interrupted`). That is
        waited for: somebody who only looks must not make a writer fail.
        """
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                with self._naming(""):
                    self.call("flock", ".", lambda: fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                if self._another_writes() or time.monotonic() > until:
                    return False
                import random

                # Not in step with others that wait too: each looks with a shared lock of its own.
                time.sleep(random.uniform(0.001, 0.01))
            else:
                return True

    def _another_writes(self) -> bool:
        """Whether what keeps us from the lock is a writer, which alone does not share it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return False


def _attributes(fd: int) -> list[str]:
    try:
        return os.listxattr(fd)
    except OSError as error:
        if error.errno in {errno.ENOTSUP, errno.ENOSYS}:
            return []
        raise


def write_file(path: Path, data: bytes) -> None:
    """Write ``path`` whole or not at all, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with Disk(path.parent) as disk:
        disk.replace(path.name, data)
