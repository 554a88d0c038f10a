"""Every call on the file system that a piece of code makes: counted, failed, or the process killed at it.

The calls are taken where Python makes them, in ``os`` and ``fcntl``, and not where our own code says that it makes
one: reads count, and so does a call that somebody added without telling. A process that is killed between two calls
that change something leaves the same disk as one killed before the second, so those alone are points of a kill.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import signal
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

READS = (
    *("access", "close", "dup", "fstat", "fstatvfs", "getxattr", "listdir", "listxattr", "lstat", "read", "readlink"),
    *("readv", "scandir", "stat"),
)
CHANGES = ("fchmod", "fchown", "link", "mkdir", "rename", "rmdir", "setxattr", "unlink", "write")
SYNCS = ("fsync",)
# Our code makes none of these. The model of a loss of power does not know them, and says so when one is made.
UNKNOWN = (
    *("chmod", "chown", "copy_file_range", "fdatasync", "ftruncate", "lchown", "mkfifo", "mknod", "posix_fallocate"),
    *("pwrite", "pwritev", "remove", "removexattr", "replace", "sendfile", "symlink", "sync", "truncate", "utime"),
    *("writev",),
)

# What each call may plausibly be answered with on Linux. "short" is no error: half of the bytes were written.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
PLAUSIBLE: dict[str, tuple[int, ...]] = {
    "create": (*_FULL, *_CLOSED, errno.EIO, errno.EMFILE, errno.EEXIST),
    "write": (*_FULL, errno.EIO, errno.EFBIG),
    "fsync": (*_FULL, errno.EIO, errno.EROFS),
    "fchmod": (errno.EPERM, errno.EROFS, errno.EIO),
    "fchown": (errno.EPERM, errno.EROFS, errno.EIO),
    "setxattr": (*_FULL, errno.EPERM, errno.EOPNOTSUPP, errno.EIO),
    "link": (*_FULL, *_CLOSED, errno.EIO, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.EEXIST),
    "rename": (*_FULL, *_CLOSED, errno.EIO, errno.EXDEV, errno.EBUSY),
    "unlink": (*_CLOSED, errno.EIO, errno.EBUSY),
    "mkdir": (*_FULL, *_CLOSED, errno.EIO, errno.EMLINK),
    # Not ENOTEMPTY: that is the answer where somebody put a file there, and then the folder is meant to stay.
    "rmdir": (*_CLOSED, errno.EIO, errno.EBUSY),
    "flock": (errno.EINTR, errno.ENOLCK, errno.EIO),
    "close written": (*_FULL, errno.EIO),
    # A read is answered by a broken disk, or for want of descriptors. No close of a file that was only read fails.
    "open": (errno.EIO, errno.EMFILE),
    "dup": (errno.EMFILE,),
    "close": (),
}
_READ = (errno.EIO,)
# With these a cause stays, until somebody mends it: every later change fails too.
LASTING = (errno.ENOSPC, errno.EROFS, errno.EIO)


@dataclass(frozen=True)
class Call:
    """A call that is about to be made."""

    name: str
    real: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def kind(self) -> str:
        """Its name, but for an ``open`` that makes a file: "create"."""
        creates = self.name == "open" and self.arguments[1] & (os.O_CREAT | os.O_TRUNC)
        return "create" if creates else self.name

    @property
    def changes(self) -> bool:
        """Whether it may change what stands on the disk."""
        return self.kind == "create" or self.name in CHANGES

    def make(self) -> Any:
        return self.real(*self.arguments, **self.options)

    def fail(self, code: int) -> Any:
        """What the system does when it answers with an error."""
        if self.name == "close":
            self.make()  # Linux closes in any case.
        raise OSError(code, os.strerror(code))

    def half(self) -> Any:
        """A write that is cut in its middle."""
        descriptor, data = self.arguments
        return self.real(descriptor, data[: len(data) // 2])


Visitor = Callable[[Call], Any]


@contextmanager
def visited(visitor: Visitor) -> Iterator[None]:
    """Let ``visitor`` make every call on the file system for this process; its own calls are not visited."""
    real: dict[tuple[ModuleType, str], Callable[..., Any]] = {(fcntl, "flock"): fcntl.flock}
    names = ("open", *READS, *CHANGES, *SYNCS, *UNKNOWN)
    real |= {(os, name): getattr(os, name) for name in names if hasattr(os, name)}
    inside = False

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            nonlocal inside
            if inside:
                return function(*arguments, **options)
            inside = True
            try:
                return visitor(Call(name, function, arguments, options))
            finally:
                inside = False

        return called

    for (module, name), function in real.items():
        setattr(module, name, wrap(name, function))
    try:
        yield
    finally:
        for (module, name), function in real.items():
            setattr(module, name, function)


class Count:
    """A visitor that makes every call, and keeps in order what each was and from where in our code it came."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.is_change: list[bool] = []
        self.sites: list[Hashable] = []
        self._written: set[int] = set()

    def __call__(self, call: Call) -> Any:
        kind = call.kind
        if kind == "close" and call.arguments[0] in self._written:
            self._written.remove(call.arguments[0])
            kind = "close written"
        self.kinds.append(kind)
        self.is_change.append(call.changes)
        self.sites.append((kind, *_site()))
        result = call.make()
        if kind == "create":
            self._written.add(result)
        return result

    @property
    def changes(self) -> list[str]:
        return [kind for kind, change in zip(self.kinds, self.is_change, strict=True) if change]

    def failing(self, every_read: bool) -> list[int]:
        """The calls to fail, from 1: all that are not mere reads; of the reads that come from one place in the code
        (the whole stack) the first, the middle one and the last, or with ``every_read`` each."""
        by_site: dict[Hashable, list[int]] = {}
        chosen = set()
        for number, (kind, site) in enumerate(zip(self.kinds, self.sites, strict=True), 1):
            by_site.setdefault(site, []).append(number)
            if every_read or not (kind in READS or kind == "open"):
                chosen.add(number)
        for numbers in by_site.values():
            chosen |= {numbers[0], numbers[len(numbers) // 2], numbers[-1]}
        return sorted(chosen)


def _site() -> tuple[tuple[str, int], ...]:
    """The stack of our own code, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    found = []
    while frame is not None:
        if f"{os.sep}patchbundle{os.sep}" in frame.f_code.co_filename:
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


class Kill:
    """A visitor that kills the process before the changing call ``number``, from 1; with ``half`` in its middle."""

    def __init__(self, number: int, *, half: bool = False) -> None:
        self.left = number
        self.half = half

    def __call__(self, call: Call) -> Any:
        self.left -= call.changes
        if call.changes and not self.left:
            if self.half and call.name == "write":
                call.half()
            os.kill(os.getpid(), signal.SIGKILL)
        return call.make()


class Fail:
    """A visitor that fails the call ``number``, from 1, and with ``lasting`` every later one that changes something.

    With a code of 0 the call, a write, is answered with half of its bytes.
    """

    def __init__(self, number: int, code: int, *, lasting: bool = False) -> None:
        self.left = number
        self.code = code
        self.lasting = lasting

    def __call__(self, call: Call) -> Any:
        self.left -= 1
        if self.left == 0:
            return call.fail(self.code) if self.code else call.half()
        if self.left < 0 and self.lasting and (call.changes or call.name in SYNCS):
            return call.fail(self.code)
        return call.make()


def answers(kind: str) -> tuple[int, ...]:
    """The codes that a call of this kind may be answered with; 0 stands for half a write."""
    return (*PLAUSIBLE.get(kind, _READ), *([0] if kind == "write" else []))


def killed(function: Callable[[], Any], visitor: Visitor) -> None:
    """Run ``function`` in a child of this process, which must end by SIGKILL.

    Raises:
        AssertionError: it ended otherwise.
    """
    child = os.fork()
    if child == 0:
        try:
            with visited(visitor):
                function()
        finally:
            os._exit(1)
    _, ended = os.waitpid(child, 0)
    assert os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL, f"the child was not killed: {ended}"
