"""A parsed diff's effect on bytes: exact or refused, and mirrored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from patchbundle import parse
from patchbundle.diff import FileDiff, Hunk, split_lines
from patchbundle.errors import BundleError
from patchbundle.identity import EXECUTABLE, PLAIN, File
from tests import toy


def one(raw: bytes) -> FileDiff:
    (file,) = parse.parse(raw, "p.diff").files
    return file


OLD, NEW = File(toy.numbered("n", 9)), File(toy.numbered("n", 9).replace(b"n = 5\n", b"five\nV\n"))
CHANGE = one(toy.diff("f", OLD, NEW))
CREATE = one(toy.diff("f", None, OLD))
DELETE = one(toy.diff("f", OLD, None))
TO_EXECUTABLE = one(toy.diff("f", OLD, File(OLD.data, EXECUTABLE)))


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a\n"]),
        (b"\n\na", [b"\n", b"\n", b"a"]),
        (b"a\r\nb\rc\x0b\x0c\x1c\x85\n", [b"a\r\n", b"b\rc\x0b\x0c\x1c\x85\n"]),
    ],
)
def test_lines_end_at_lf_and_nowhere_else(data: bytes, lines: list[bytes]) -> None:
    assert split_lines(data) == lines
    assert b"".join(lines) == data


REFUSED = {
    "a change of an absent file": (CHANGE, None, "file-missing"),
    "a change of an empty file": (CHANGE, File(b""), "context-differs"),
    "a change one line further down": (CHANGE, File(b"n = 0\n" + OLD.data), "context-differs"),
    "a change of a cut file": (CHANGE, File(toy.numbered("n", 7)), "context-differs"),
    "a change that was made already": (CHANGE, NEW, "context-differs"),
    "a change of a context line": (CHANGE, File(OLD.data.replace(b"n = 3\n", b"n = 3 \n")), "context-differs"),
    "a creation over the same bytes": (CREATE, OLD, "file-exists"),
    "a creation over an empty file": (CREATE, File(b""), "file-exists"),
    "a removal of an absent file": (DELETE, None, "file-missing"),
    "a removal of a longer file": (DELETE, File(OLD.data + b"more\n"), "no-context"),
    "a removal of a shorter file": (DELETE, File(toy.numbered("n", 8)), "context-differs"),
    "a removal of a file without its last newline": (DELETE, File(OLD.data[:-1]), "context-differs"),
    "a removal of an executable file": (DELETE, File(OLD.data, EXECUTABLE), "mode-differs"),
    "a mode that is there already": (TO_EXECUTABLE, File(OLD.data, EXECUTABLE), "mode-differs"),
    "a mode of an absent file": (TO_EXECUTABLE, None, "file-missing"),
}


@pytest.mark.parametrize(("diff", "file", "code"), REFUSED.values(), ids=REFUSED)
def test_anything_but_an_exact_fit_is_refused_with_its_place(diff: FileDiff, file: File | None, code: str) -> None:
    with pytest.raises(BundleError) as refusal:
        diff.apply(file, "p.diff")
    assert refusal.value.code == code
    assert refusal.value.where.startswith("p.diff:")
    assert refusal.value.where.endswith(": f")


def test_a_refusal_shows_the_line_that_differs() -> None:
    with pytest.raises(BundleError) as refusal:
        CHANGE.apply(File(OLD.data.replace(b"n = 3\n", b"\xff" * 500 + b"\n")), "p.diff")
    assert refusal.value.expected == r"line 3: n = 3\n"
    assert (refusal.value.found or "").startswith(r"\xff\xff")
    assert len(refusal.value.found or "") == 120


def test_a_refusal_shows_where_the_file_ends() -> None:
    with pytest.raises(BundleError) as refusal:
        CHANGE.apply(File(toy.numbered("n", 6)), "p.diff")
    assert (refusal.value.expected, refusal.value.found) == (r"line 7: n = 7\n", "the end of the file")


def test_an_insertion_beyond_the_end_is_refused() -> None:
    far = replace(CHANGE, hunks=(Hunk(12, 0, 13, 1, (("+", b"x\n"),), 4),))
    with pytest.raises(BundleError) as refusal:
        far.apply(OLD, "p.diff")
    assert refusal.value.expected == "at least 12 lines"


def test_a_line_without_its_end_is_the_last_one() -> None:
    for lines in ((("+", b"x"), (" ", b"n = 0\n")), (("+", b""), (" ", b"n = 0\n"))):
        glued = replace(CHANGE, hunks=(Hunk(1, 1, 1, 2, lines, 4),))
        with pytest.raises(BundleError) as refusal:
            glued.apply(File(b"n = 0\n"), "p.diff")
        assert refusal.value.code == "newline-marker"


@pytest.mark.parametrize(
    ("diff", "old", "new"),
    [
        (CHANGE, OLD, NEW),
        (CREATE, None, OLD),
        (DELETE, OLD, None),
        (TO_EXECUTABLE, OLD, File(OLD.data, EXECUTABLE)),
        (CHANGE, File(OLD.data, EXECUTABLE), File(NEW.data, EXECUTABLE)),
        (one(toy.diff("f", None, File(b"", EXECUTABLE))), None, File(b"", EXECUTABLE)),
        (one(toy.diff("f", File(b"a"), File(b"a\n"))), File(b"a"), File(b"a\n")),
    ],
    ids=["change", "creation", "removal", "mode", "change of an executable", "empty executable", "last newline"],
)
def test_a_fit_applies_and_comes_off(diff: FileDiff, old: File | None, new: File | None) -> None:
    assert diff.apply(old, "p.diff") == new
    assert diff.reversed().apply(new, "p.diff") == old
    assert diff.reversed().reversed() == diff


def test_a_file_that_comes_back_has_the_mode_it_had() -> None:
    raw = b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"
    back = one(raw).reversed()
    assert back.apply(None, "p.diff", restored_mode=EXECUTABLE) == File(b"a\n", EXECUTABLE)
    assert back.apply(None, "p.diff") == File(b"a\n", PLAIN)


def test_a_mirrored_hunk_keeps_removals_before_additions() -> None:
    (hunk,) = CHANGE.reversed().hunks
    assert "".join(tag for tag, _ in hunk.lines) == "   --+   "
    assert (hunk.old_start, hunk.old_count, hunk.new_start, hunk.new_count) == (2, 8, 2, 7)


def test_context_is_counted_on_both_sides() -> None:
    (hunk,) = CHANGE.hunks
    assert (hunk.leading, hunk.trailing) == (3, 3)
    (hunk,) = CREATE.hunks
    assert (hunk.leading, hunk.trailing) == (0, 0)
