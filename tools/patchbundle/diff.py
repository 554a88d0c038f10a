"""A parsed diff and its exact effect on bytes. Pure: no file is read or written here."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from patchbundle.errors import BundleError, Reason
from patchbundle.identity import PLAIN, File

_REVERSED = {" ": " ", "-": "+", "+": "-"}


@dataclass(frozen=True)
class Hunk:
    """One block of a file. ``lines`` are (tag, bytes) with tag one of space, minus, plus; a line holds its LF."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[tuple[str, bytes], ...]
    line_no: int

    @property
    def old_index(self) -> int:
        """Zero-based line where the hunk's old side begins. An empty side names the line before it."""
        return self.old_start - 1 if self.old_count else self.old_start

    @property
    def new_index(self) -> int:
        return self.new_start - 1 if self.new_count else self.new_start

    def side(self, tag: str) -> list[bytes]:
        """The lines of the old (``-``) or the new (``+``) side."""
        return [text for line_tag, text in self.lines if line_tag in (" ", tag)]

    @property
    def leading(self) -> int:
        """Number of context lines before the first change."""
        return next(index for index, (tag, _) in enumerate(self.lines) if tag != " ")

    @property
    def trailing(self) -> int:
        return next(index for index, (tag, _) in enumerate(reversed(self.lines)) if tag != " ")

    def reversed(self) -> Hunk:
        # Minus lines stand before plus lines in every run of changes; the mirrored hunk keeps that order.
        lines: list[tuple[str, bytes]] = []
        run: list[tuple[str, bytes]] = []
        for tag, text in (*self.lines, (" ", b"")):
            if tag == " ":
                lines += sorted(run, key=lambda item: item[0] == "+")
                run = []
                lines.append((tag, text))
            else:
                run.append((_REVERSED[tag], text))
        return replace(
            self,
            old_start=self.new_start,
            old_count=self.new_count,
            new_start=self.old_start,
            new_count=self.old_count,
            lines=tuple(lines[:-1]),
        )


@dataclass(frozen=True)
class FileDiff:
    """What one diff does to one path. ``old_mode`` and ``new_mode`` are None where the diff does not tell."""

    path: str
    creates: bool
    deletes: bool
    old_mode: str | None
    new_mode: str | None
    hunks: tuple[Hunk, ...]
    line_no: int

    def reversed(self) -> FileDiff:
        """The diff that takes this one off."""
        return replace(
            self,
            creates=self.deletes,
            deletes=self.creates,
            old_mode=self.new_mode,
            new_mode=self.old_mode,
            hunks=tuple(hunk.reversed() for hunk in self.hunks),
        )

    def apply(self, file: File | None, where: str, *, restored_mode: str | None = None) -> File | None:
        """Return the file after the diff; None is an absent file.

        ``restored_mode`` is the mode for a file that comes back where the diff does not tell it.

        Raises:
            BundleError: anything but an exact fit, with the diff's line.
        """
        place = f"{where}:{self.line_no}: {self.path}"
        if self.creates:
            if file is not None:
                raise BundleError(Reason.FILE_EXISTS, place)
            return File(self._content(b"", where), self.new_mode or restored_mode or PLAIN)
        if file is None:
            raise BundleError(Reason.FILE_MISSING, place)
        if self.old_mode is not None and file.mode != self.old_mode:
            raise BundleError(Reason.MODE_DIFFERS, place, expected=self.old_mode, found=file.mode)
        data = self._content(file.data, where)
        if self.deletes:
            if data:
                raise BundleError(
                    Reason.CONTEXT_DIFFERS, place, expected="a diff that removes every line", found="lines are left"
                )
            return None
        return File(data, self.new_mode or file.mode)

    def _content(self, data: bytes, where: str) -> bytes:
        if not self.hunks:
            return data
        lines = split_lines(data)
        out: list[bytes] = []
        done = 0
        for hunk in self.hunks:
            place = f"{where}:{hunk.line_no}: {self.path}"
            start, old = hunk.old_index, hunk.side("-")
            end = start + len(old)
            if lines[start:end] != old or start > len(lines):
                _refuse_context(lines, start, old, place)
            if (not hunk.leading and start > 0) or (not hunk.trailing and end < len(lines)):
                raise BundleError(Reason.NO_CONTEXT, place)
            out += lines[done:start]
            out += hunk.side("+")
            done = end
        out += lines[done:]
        last = out.pop() if out else b""
        above = b"".join(out)
        # A line without LF in the middle would be glued to its successor: the diff says it is the last one.
        if above.count(b"\n") != len(out):
            raise BundleError(Reason.NEWLINE_MARKER, f"{where}:{self.line_no}: {self.path}")
        return above + last


def split_lines(data: bytes) -> list[bytes]:
    """Split at LF and nothing else, each line with its LF. ``bytes.splitlines`` also splits at CR."""
    return io.BytesIO(data).readlines()


def _refuse_context(lines: Sequence[bytes], start: int, old: Sequence[bytes], place: str) -> None:
    for offset, expected in enumerate(old):
        found = lines[start + offset] if start + offset < len(lines) else None
        if found != expected:
            raise BundleError(
                Reason.CONTEXT_DIFFERS,
                place,
                expected=f"line {start + offset + 1}: {_show(expected)}",
                found=_show(found) if found is not None else "the end of the file",
            )
    raise BundleError(Reason.CONTEXT_DIFFERS, place, expected=f"at least {start} lines", found=f"{len(lines)} lines")


def _show(line: bytes) -> str:
    text = repr(line)[2:-1]
    return text if len(text) <= 120 else text[:117] + "..."
