"""Read a unified diff, strictly. One parser serves the checker and the applier.

unidiff parses the hunks, and them alone; what it forgives is refused here. It silently drops the tail of a hunk whose
header counts too few lines, a translated no-newline marker and trailing junk, and it turns text that is
no diff into an empty set, so every raw line must be accounted for by a header or by a hunk.
The bytes are handed over as latin-1, which loses nothing and splits lines at LF only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as UnidiffHunk
from unidiff.patch import PatchSet

from patchbundle import names
from patchbundle.diff import FileDiff, Hunk
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import MODES

_HUNK = re.compile(r"@@ -([0-9]+)(?:,([0-9]+))? \+([0-9]+)(?:,([0-9]+))? @@(?: .*)?")
_GIT = "diff --git "
_INDEX = re.compile(r"index [0-9a-f]{4,64}\.\.[0-9a-f]{4,64}(?: ([0-7]{6}))?")
_MODE = re.compile(r"(old mode|new mode|new file mode|deleted file mode) ([0-7]{6})")
_MARKER = "\\ No newline at end of file"
_LARGEST = 2**31 - 1

_RENAMES = ("rename from ", "rename to ", "copy from ", "copy to ", "similarity index ", "dissimilarity index ")
_BINARY = ("GIT binary patch", "Binary files ", "Binary file ")
_OTHER_FORMATS = ("*** ", "***************", "Index: ", "Only in ", "Property changes on: ")
# What may never stand in the text before the first file: a reader would take it for a part of the diff.
_DIFF_LIKE = ("+++ ", "@@ ", "diff ", "index ", "old mode ", "new mode ", "new file mode ", "deleted file mode ")


class Diff(NamedTuple):
    """A parsed patch file: the text before the diff, and one entry a file, in order."""

    message: tuple[str, ...]
    files: tuple[FileDiff, ...]


@dataclass
class _Entry:
    """The header lines of one file as they were read."""

    line_no: int
    git: str | None = None
    modes: dict[str, str] | None = None
    index_mode: str | None = None
    names: tuple[str, str] | None = None  # what stands behind "--- " and "+++ "


def parse(raw: bytes, where: str, *, strip: int = 1) -> Diff:
    """Parse ``raw``; ``where`` names it in refusals, ``strip`` leading components are taken off every name.

    Raises:
        BundleError: with a named reason, the file and the line.
    """
    return _Parser(raw, where, strip).run()


class _Parser:
    def __init__(self, raw: bytes, where: str, strip: int) -> None:
        self.where = where
        self.strip = strip
        *self.lines, tail = raw.decode("latin-1").split("\n")
        self.at = 0
        if tail:
            raise self.refuse(Reason.TRUNCATED, len(self.lines) + 1, found=_show(tail))

    def refuse(
        self, reason: Reason, line_no: int, found: str | None = None, expected: str | None = None
    ) -> BundleError:
        if found is None and line_no <= len(self.lines):
            found = _show(self.lines[line_no - 1])
        return BundleError(reason, f"{self.where}:{line_no}", expected=expected, found=found)

    def run(self) -> Diff:
        message = self._message()
        self._check_hunk_headers()
        hunks = self._unidiff_hunks()
        files: list[FileDiff] = []
        while self.at < len(self.lines):
            files.append(self._file(hunks))
        if hunks:
            # unidiff saw a hunk that the walk over the raw lines did not.
            raise self.refuse(Reason.MALFORMED, min(hunks))
        seen: dict[str, FileDiff] = {}
        for file in files:
            if file.path in seen:
                raise self.refuse(Reason.DUPLICATE_FILE, file.line_no, found=file.path)
            seen[file.path] = file
        names.check_together(seen, self.where)
        return Diff(message, tuple(files))

    # The text before the first file.

    def _message(self) -> tuple[str, ...]:
        for index, line in enumerate(self.lines):
            if line.startswith(_GIT) or line.startswith("--- "):
                if line.startswith("--- ") and not self._starts(index + 1, "+++ "):
                    # As in the context format, whose "***" before it was refused already where there is one.
                    reason = Reason.FORMAT if self._starts(index + 1, "***") else Reason.HEADER_IN_MESSAGE
                    raise self.refuse(reason, index + 1)
                self.at = index
                return tuple(self.lines[:index])
            self._refuse_foreign(line, index + 1)
            if line.endswith("\r"):
                raise self.refuse(Reason.LINE_ENDINGS, index + 1)
            if line.startswith(_DIFF_LIKE):
                raise self.refuse(Reason.HEADER_IN_MESSAGE, index + 1)
        raise BundleError(Reason.EMPTY, self.where, expected="a line 'diff --git' or '---'")

    def _starts(self, index: int, prefix: str) -> bool:
        return index < len(self.lines) and self.lines[index].startswith(prefix)

    def _refuse_foreign(self, line: str, line_no: int) -> None:
        if line.startswith(_RENAMES):
            raise self.refuse(Reason.RENAME, line_no)
        if line.startswith(_BINARY):
            raise self.refuse(Reason.BINARY, line_no)
        if line.startswith(_OTHER_FORMATS):
            raise self.refuse(Reason.FORMAT, line_no)

    # What unidiff sees.

    def _check_hunk_headers(self) -> None:
        """Refuse numbers that only arithmetic without bounds would take, before unidiff reads them."""
        for index in range(self.at, len(self.lines)):
            line = self.lines[index]
            if line.startswith("@@ -"):
                match = _HUNK.match(line)
                if match and any(int(number[:20]) > _LARGEST for number in match.groups() if number):
                    raise self.refuse(Reason.NUMBER, index + 1)

    def _unidiff_hunks(self) -> dict[int, UnidiffHunk]:
        """The hunks that unidiff finds, by the line number of their header."""
        read = self.at

        def feed() -> Iterator[str]:
            # unidiff's errors do not tell the line; how far it came does.
            nonlocal read
            # Of headers it sees the two that it cannot do without: its reading of the rest (names that it
            # guesses from a git line, mode lines) would only be a second opinion. A hunk's own lines never
            # begin with a letter.
            for line in self.lines[self.at :]:
                read += 1
                yield "#\n" if line[:1].isalpha() else line + "\n"

        try:
            patch = PatchSet(feed())
        except UnidiffParseError as error:
            raise self._unparsed(str(error).strip(), read) from error
        found: dict[int, UnidiffHunk] = {}
        for file in patch:
            for hunk in file:
                first = hunk[0].diff_line_no if hunk else None
                if first is None:  # "@@ -1,0 +1,0 @@" at the end: unidiff keeps a hunk without a line
                    raise self.refuse(Reason.NO_CHANGE, self._header_before(read))
                found[first - 1 + self.at] = hunk
        return found

    def _unparsed(self, text: str, read: int) -> BundleError:
        """Find better words for what unidiff refused at line ``read``: it does not tell the usual cause."""
        for index in range(self.at, read):
            self._refuse_foreign(self.lines[index], index + 1)
            if self.lines[index].startswith("@@ ") and self.lines[index].endswith("\r"):
                return self.refuse(Reason.LINE_ENDINGS, index + 1)
        if text.startswith("Hunk"):
            return self.refuse(Reason.HUNK_COUNT, self._header_before(read), expected=_show(text))
        if text.startswith("Unexpected marker"):
            return self.refuse(Reason.NEWLINE_MARKER, read, expected="a line of a hunk before it")
        return self.refuse(Reason.HEADER_ORDER, read, expected="'---' and '+++' before a hunk")

    def _header_before(self, line_no: int) -> int:
        """The line number of the last hunk header up to a line."""
        return next((number for number in range(line_no, self.at, -1) if self._starts(number - 1, "@@ ")), line_no)

    # One file.

    def _file(self, hunks: dict[int, UnidiffHunk]) -> FileDiff:
        entry = self._header()
        body: list[Hunk] = []
        while self._starts(self.at, "@@ "):
            body.append(self._hunk(hunks))
        return self._assemble(entry, body)

    def _header(self) -> _Entry:
        entry = _Entry(self.at + 1)
        line = self.lines[self.at]
        self._refuse_crlf(self.at)
        if line.startswith(_GIT):
            entry.git = line[len(_GIT) :]
            self.at += 1
            self._extended(entry)
        elif not line.startswith("--- "):
            self._refuse_foreign(line, self.at + 1)
            reason = Reason.NEWLINE_MARKER if line.startswith("\\") else Reason.TRAILING_JUNK
            raise self.refuse(reason, self.at + 1)
        if self._starts(self.at, "--- "):
            self._refuse_crlf(self.at)
            if not self._starts(self.at + 1, "+++ "):
                raise self.refuse(Reason.HEADER_ORDER, self.at + 1, expected="'+++' after '---'")
            self._refuse_crlf(self.at + 1)
            entry.names = self.lines[self.at][4:], self.lines[self.at + 1][4:]
            self.at += 2
            if not self._starts(self.at, "@@ "):
                raise self.refuse(Reason.NO_HUNKS, self.at, expected="a hunk after '+++'")
        return entry

    def _refuse_crlf(self, index: int) -> None:
        if self.lines[index].endswith("\r"):
            raise self.refuse(Reason.LINE_ENDINGS, index + 1)

    def _extended(self, entry: _Entry) -> None:
        entry.modes = {}
        while self.at < len(self.lines):
            line, line_no = self.lines[self.at], self.at + 1
            if line.startswith(("--- ", "@@ ", _GIT)):
                return
            self._refuse_crlf(self.at)
            self._refuse_foreign(line, line_no)
            mode, index = _MODE.fullmatch(line), _INDEX.fullmatch(line)
            if mode:
                if mode[1] in entry.modes or entry.index_mode is not None:
                    raise self.refuse(Reason.HEADER_ORDER, line_no)
                if mode[2] not in MODES:
                    raise self.refuse(Reason.SPECIAL_MODE, line_no)
                entry.modes[mode[1]] = mode[2]
            elif index:
                if entry.index_mode is not None:
                    raise self.refuse(Reason.HEADER_ORDER, line_no)
                entry.index_mode = index[1] or ""
                if index[1] and index[1] not in MODES:
                    raise self.refuse(Reason.SPECIAL_MODE, line_no)
            else:
                raise self.refuse(Reason.TRAILING_JUNK, line_no)
            self.at += 1

    # One hunk.

    def _hunk(self, hunks: dict[int, UnidiffHunk]) -> Hunk:
        line_no = self.at + 1
        header = self.lines[self.at]
        self._refuse_crlf(self.at)
        match = _HUNK.fullmatch(header)
        parsed = hunks.pop(line_no, None)
        if match is None or parsed is None:
            raise self.refuse(Reason.MALFORMED, line_no)
        self.at += 1
        lines: list[tuple[str, bytes]] = []
        counted = [line for line in parsed if line.diff_line_no is not None]
        for _ in counted:
            self._body_line(lines, self.at)
            self.at += 1
        while self._starts(self.at, "\\"):
            self._body_line(lines, self.at)
            self.at += 1
        hunk = Hunk(
            parsed.source_start,
            parsed.source_length,
            parsed.target_start,
            parsed.target_length,
            tuple(lines),
            line_no,
        )
        self._check_hunk(hunk)
        return hunk

    def _body_line(self, lines: list[tuple[str, bytes]], index: int) -> None:
        raw = self.lines[index]
        tag, text = raw[:1], raw[1:]
        if tag == "\\":
            if raw != _MARKER or not lines or not lines[-1][1].endswith(b"\n"):
                raise self.refuse(Reason.NEWLINE_MARKER, index + 1, expected=_MARKER)
            lines[-1] = (lines[-1][0], lines[-1][1][:-1])
        elif tag in {" ", "-", "+"}:
            lines.append((tag, text.encode("latin-1") + b"\n"))
        else:
            raise self.refuse(Reason.BLANK_CONTEXT, index + 1)

    def _check_hunk(self, hunk: Hunk) -> None:
        if all(tag == " " for tag, _ in hunk.lines):
            raise self.refuse(Reason.NO_CHANGE, hunk.line_no)
        if (len(hunk.side("-")), len(hunk.side("+"))) != (hunk.old_count, hunk.new_count):
            raise self.refuse(Reason.HUNK_COUNT, hunk.line_no)
        if (hunk.old_count and not hunk.old_start) or (hunk.new_count and not hunk.new_start):
            raise self.refuse(Reason.NUMBER, hunk.line_no)
        for tag in "-+":
            if any(not text.endswith(b"\n") for text in hunk.side(tag)[:-1]):
                raise self.refuse(Reason.NEWLINE_MARKER, hunk.line_no)

    # Putting it together.

    def _assemble(self, entry: _Entry, hunks: list[Hunk]) -> FileDiff:
        modes = entry.modes or {}
        creates, deletes = "new file mode" in modes, "deleted file mode" in modes
        changes_mode = "old mode" in modes or "new mode" in modes
        contradiction = creates + deletes + changes_mode > 1 or ("old mode" in modes) != ("new mode" in modes)
        if contradiction or (changes_mode and modes["old mode"] == modes["new mode"]):
            raise self.refuse(Reason.CONTRADICTION, entry.line_no)
        if not hunks and not (creates or deletes or changes_mode):
            raise self.refuse(Reason.NO_HUNKS, entry.line_no)
        if hunks and entry.names is None:
            raise self.refuse(Reason.HEADER_ORDER, entry.line_no, expected="'---' and '+++' before a hunk")
        path, creates, deletes = self._path(entry, creates, deletes)
        if entry.index_mode and (creates or deletes or changes_mode):
            raise self.refuse(Reason.CONTRADICTION, entry.line_no, found="a mode on the index line and beside it")
        self._check_whole(hunks, creates, deletes)
        self._check_order(hunks)
        kept = entry.index_mode or None
        return FileDiff(
            path=path,
            creates=creates,
            deletes=deletes,
            old_mode=modes.get("deleted file mode") or modes.get("old mode") or kept,
            new_mode=modes.get("new file mode") or modes.get("new mode") or kept,
            hunks=tuple(hunks),
            line_no=entry.line_no,
        )

    def _check_whole(self, hunks: list[Hunk], creates: bool, deletes: bool) -> None:
        """A file that is created or deleted is given whole: one hunk, one side."""
        for active, tag, empty in ((creates, "+", "old"), (deletes, "-", "new")):
            if active and hunks:
                one_sided = len(hunks) == 1 and all(line_tag == tag for line_tag, _ in hunks[0].lines)
                if not one_sided or getattr(hunks[0], f"{empty}_start") or hunks[0].old_start + hunks[0].new_start != 1:
                    raise self.refuse(Reason.CONTRADICTION, hunks[0].line_no)

    def _check_order(self, hunks: list[Hunk]) -> None:
        end = delta = 0
        for hunk in hunks:
            if hunk.old_index < end:
                raise self.refuse(Reason.HUNK_ORDER, hunk.line_no)
            if hunk.new_index != hunk.old_index + delta:
                raise self.refuse(
                    Reason.HUNK_START, hunk.line_no, expected=f"+ side at line {hunk.old_index + delta + 1}"
                )
            end = hunk.old_index + hunk.old_count
            delta += hunk.new_count - hunk.old_count

    # Names.

    def _path(self, entry: _Entry, creates: bool, deletes: bool) -> tuple[str, bool, bool]:
        place = f"{self.where}:{entry.line_no}"
        old = new = None
        if entry.names is not None:
            old, new = (self._name(text, place) for text in entry.names)
            if old is None and new is None:
                raise self.refuse(Reason.CONTRADICTION, entry.line_no, found="/dev/null on both sides")
            if entry.modes is not None and (creates != (old is None) or deletes != (new is None)):
                raise self.refuse(Reason.CONTRADICTION, entry.line_no)
            creates, deletes = old is None, new is None
            if old is not None and new is not None and old != new:
                raise self.refuse(Reason.RENAME, entry.line_no, found=f"{old} -> {new}")
        git = self._git_name(entry, old or new, place) if entry.git is not None else None
        path = old or new or git
        assert path is not None
        return path, creates, deletes

    def _name(self, text: str, place: str) -> str | None:
        """The path that a ``---`` or ``+++`` line names; None for /dev/null.

        git ends a name that holds a space with a tab. More after the tab is a time stamp, which other readers
        take for a creation or a removal where it says 1970.
        """
        if text.startswith('"'):
            name, rest = _unquote(text, place)
        else:
            name, tab, rest = text.partition("\t")
            if not rest and name == "/dev/null":
                return None
            name, rest = _utf8(name.encode("latin-1"), text, place), tab + rest
        if rest not in {"", "\t"}:
            raise BundleError(Reason.TIME_STAMP if rest[0] == "\t" else Reason.NAME, place, found=_show(text))
        return self._strip(name, place)

    def _strip(self, name: str, place: str) -> str:
        parts = name.split("/")
        if name.startswith("/") or len(parts) <= self.strip or "" in parts[: self.strip]:
            raise BundleError(
                Reason.NAME, place, expected=f"a relative name with {self.strip} leading components", found=repr(name)
            )
        return names.check("/".join(parts[self.strip :]), place)

    def _git_name(self, entry: _Entry, known: str | None, place: str) -> str:
        """The one path that a ``diff --git`` line names twice; it must be the one that the other lines name."""
        text = entry.git or ""
        if text.startswith('"') or text.endswith('"'):
            first, second = self._quoted_pair(text, place)
        else:
            # Spaces do not separate: the two names are one path behind prefixes of equal length.
            middle = len(text) // 2
            if len(text) % 2 == 0 or text[middle] != " ":
                raise self.refuse(Reason.RENAME, entry.line_no)
            first, second = (_utf8(half.encode("latin-1"), text, place) for half in (text[:middle], text[middle + 1 :]))
        first, second = self._strip(first, place), self._strip(second, place)
        if first != second or (known is not None and first != known):
            raise self.refuse(Reason.RENAME, entry.line_no, found=f"{first} -> {known or second}")
        return first

    def _quoted_pair(self, text: str, place: str) -> tuple[str, str]:
        if text.startswith('"'):
            first, rest = _unquote(text, place)
            rest = rest[1:] if rest.startswith(" ") else ""
        else:
            head, _, rest = text.partition(' "')
            first, rest = _utf8(head.encode("latin-1"), text, place), f'"{rest}'
        if rest.startswith('"'):
            second, rest = _unquote(rest, place)
        else:
            second, rest = _utf8(rest.encode("latin-1"), text, place), ""
        if rest or not second:
            raise BundleError(Reason.NAME, place, found=_show(text))
        return first, second


_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
_QUOTED = re.compile(r'"((?:[^"\\]|\\[abtnvfr"\\]|\\[0-3][0-7]{2})*)"')
_ESCAPE = re.compile(r"\\([0-3][0-7]{2}|.)", re.DOTALL)


def _unquote(text: str, place: str) -> tuple[str, str]:
    """Decode the C-quoted name at the start of ``text``; returns it and what follows."""
    match = _QUOTED.match(text)
    if match is None:
        raise BundleError(Reason.NAME, place, expected="a complete quoted name", found=_show(text))

    def decode(escape: re.Match[str]) -> str:
        code = escape[1]
        return chr(int(code, 8)) if len(code) == 3 else chr(_ESCAPES[code])

    return _utf8(_ESCAPE.sub(decode, match[1]).encode("latin-1"), text, place), text[match.end() :]


def _utf8(raw: bytes, text: str, place: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise BundleError(Reason.NAME, place, expected="a name in UTF-8", found=_show(text)) from None


def _show(text: str) -> str:
    shown = text.encode("unicode_escape").decode("ascii")
    return shown if len(shown) <= 120 else shown[:117] + "..."
