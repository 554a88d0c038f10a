"""Standard output and standard error, of which no failure ever reaches a verb.

A full disk behind a redirection, a pipe whose reader has left, a stream that was closed before the start: the words
are lost then, and nothing else. What a verb does to a tree, and its exit code, must not depend on who listens.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import TextIO, cast


class Output(io.TextIOBase):
    """A text stream that loses what it cannot write. ``lost`` is the first failure, None if all was written."""

    # Output is compared by scripts: file names must come out the same under every locale.
    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.lost: OSError | ValueError | None = None
        if isinstance(stream, io.TextIOWrapper):
            self._try(lambda: stream.reconfigure(encoding=self.encoding, errors=self.errors))

    def _try(self, action: Callable[[], object]) -> None:
        if self.stream is None or self.lost is not None:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self.lost = error
            # What it still holds would be written, and fail, once more when the interpreter ends.
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.stream.fileno())
                os.close(null)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError("a text stream takes text")
        self._try(lambda: self.stream is not None and self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda: self.stream is not None and self.stream.flush())

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.stream is not None and not self.stream.closed and self.stream.isatty()

    def fileno(self) -> int:
        if self.stream is None:
            raise io.UnsupportedOperation("closed before the start")
        return self.stream.fileno()


def install() -> None:
    """Let this process write through :class:`Output` from here on."""
    # A stream closed before the start leaves its number free: the next file opened, maybe one of the tree, would get
    # it, and whatever is written to the number by the system itself would land in that file.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = cast(TextIO, Output(sys.stdout))
    sys.stderr = cast(TextIO, Output(sys.stderr))


def lost() -> OSError | ValueError | None:
    """Why something of standard output was lost, if it was."""
    return getattr(sys.stdout, "lost", None)


def line(text: str = "", *, error: bool = False) -> None:
    """Write a line, at once."""
    stream = sys.stderr if error else sys.stdout
    stream.write(f"{text}\n")
    stream.flush()
