"""The parser, where a folder of the corpus cannot say it: raw bytes in names, line numbers, the whole result."""

from __future__ import annotations

import pytest

from patchbundle import parse
from patchbundle.errors import BundleError
from patchbundle.identity import EXECUTABLE, PLAIN
from tests import toy

HUNK = b"@@ -1,2 +1,2 @@\n one\n-two\n+TWO\n"


def change(name: bytes) -> bytes:
    return b"diff --git a/" + name + b" b/" + name + b"\n--- a/" + name + b"\n+++ b/" + name + b"\n" + HUNK


def refuse(raw: bytes, strip: int = 1) -> BundleError:
    with pytest.raises(BundleError) as caught:
        parse.parse(raw, "p.diff", strip=strip)
    return caught.value


# Bytes that a file system or git would not carry into a corpus folder.
RAW = {
    "a raw NUL": (b"x\0y", "name"),
    "a raw CR inside": (b"x\ry", "name"),
    "a raw CR at the end": (b"x\r", "line-endings"),
    "a raw escape": (b"x\x1by", "name"),
    "a raw DEL": (b"x\x7fy", "name"),
    "a raw backslash": (b"d\\x", "name"),
    "a raw drive": (b"C:\\x", "name"),
    "bytes that are no UTF-8": (b"x\xff", "name"),
    "UTF-8 written too long": (b"\xc0\xae\xc0\xae/x", "name"),
    "half a surrogate pair": (b"\xed\xa0\x80", "name"),
    "a component of 300 bytes": (b"x" * 300, "name"),
    "a raw tab": (b"x\ty", "time-stamp"),
}


@pytest.mark.parametrize(("name", "code"), RAW.values(), ids=RAW)
def test_a_name_is_refused_with(name: bytes, code: str) -> None:
    error = refuse(change(name))
    assert error.code == code
    assert error.where.startswith("p.diff:")


@pytest.mark.parametrize(
    ("before", "after", "line", "code"),
    [
        (b"", b"junk\n", 8, "trailing-junk"),
        (b"", b"rename from g\n", 8, "rename"),
        (b"", b"\\ No newline at end of file\n\\ No newline at end of file\n", 9, "newline-marker"),
        (b"", b"@@ -9,3 +9,3 @@\n a\nGIT binary patch\n", 10, "binary"),
        (b"note\n\n", b"junk\n", 10, "trailing-junk"),
        (b"note\n", b"@@ -9,3 +9,3 @@\n a\n-b\n+c\n", 9, "hunk-count"),
        (b"", b"@@ -9,2 +9,2 @@\n a\n-b\n+c\n+d\n", 12, "trailing-junk"),
        (b"", b"--- a/g\n", 8, "header-order"),
        (b"", b"+++ b/g\n", 8, "header-order"),
        (b"", b"diff --git a/g b/g\n@@ -1 +1 @@\n-a\n+b\n", 9, "header-order"),
        (b"@@ -1 +1 @@\n", b"", 1, "header-in-message"),
        (b"note\n--- a line\n", b"", 2, "header-in-message"),
        (b"note\n--- a line\n*** another\n", b"", 2, "format"),
        (b"", b"@@ -9,0 +9,0 @@\n", 8, "no-change"),
        (b"", b"@@ -9 +9 @@ x\r\n", 8, "line-endings"),
    ],
)
def test_a_refusal_names_the_line(before: bytes, after: bytes, line: int, code: str) -> None:
    error = refuse(before + change(b"f") + after)
    assert (error.code, error.where) == (code, f"p.diff:{line}")


MODES = b"old mode 100644\nnew mode 100755\n"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"diff --git a/f b/f\nindex 1234567..89abcde 120000\n--- a/f\n+++ b/f\n" + HUNK, "special-mode"),
        (b"diff --git a/xy b/x\n" + MODES, "rename"),
        (b"diff --git a/xy_b/xy\n" + MODES, "rename"),
        (b'diff --git a/x "b/y"\n' + MODES, "rename"),
        (b"diff --git a/x b/x\nnew file mode 100644\n" + MODES, "contradiction"),
        (b"diff --git a/x b/x\ndeleted file mode 100644\n" + MODES, "contradiction"),
        (b'diff --git a/x "b/x" \n' + MODES, "rename"),
    ],
)
def test_the_head_of_a_file_is_refused(raw: bytes, code: str) -> None:
    assert refuse(raw).code == code


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"--- a/x\n+++ b/y\n" + HUNK, "x -> y"),
        (b"diff --git a/x b/y\n" + MODES, "x -> y"),
        (b"--- /dev/null\n+++ /dev/null\n" + HUNK, "/dev/null on both sides"),
        (change(b"x") * 2, "x"),
        (b"--- x/x\n", "--- x/x"),
    ],
)
def test_a_refusal_tells_what_was_found(raw: bytes, found: str) -> None:
    assert refuse(raw).found == found


def test_one_name_of_a_git_line_may_be_quoted_without_need() -> None:
    for names in (b'a/x "b/x"', b'"a/x" b/x', b'"a/x" "b/x"'):
        (file,) = parse.parse(b"diff --git " + names + b"\n" + MODES, "p.diff").files
        assert file.path == "x"


@pytest.mark.parametrize("name", [b"x", b"/a/x", b"//x"])
def test_a_name_has_as_many_leading_components_as_are_taken_off(name: bytes) -> None:
    error = refuse(b"--- " + name + b"\n+++ " + name + b"\n" + HUNK)
    assert (error.code, error.expected) == ("name", "a relative name with 1 leading components")


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_line_of_a_header_that_ends_with_cr_is_named(number: int) -> None:
    lines = (b"diff --git a/f b/f\nindex 1234567..89abcde 100644\n--- a/f\n+++ b/f\n" + HUNK).split(b"\n")
    lines[number - 1] += b"\r"
    error = refuse(b"\n".join(lines))
    assert (error.code, error.where) == ("line-endings", f"p.diff:{number}")


def test_a_hunk_whose_new_side_starts_elsewhere_is_told_where_it_should() -> None:
    second = b"@@ -11,2 +12,3 @@\n a\n b\n+c\n"
    error = refuse(change(b"f") + b"@@ -5,2 +5,3 @@\n a\n b\n+c\n" + second.replace(b"+12", b"+14"))
    assert (error.code, error.where, error.expected) == ("hunk-start", "p.diff:12", "+ side at line 12")
    assert parse.parse(change(b"f") + b"@@ -5,2 +5,3 @@\n a\n b\n+c\n" + second, "p.diff").files


def test_a_cut_anywhere_is_refused_or_ends_with_a_whole_file() -> None:
    """No prefix of a diff passes for another diff, except where a whole entry ends."""
    raw = b"".join(entry.diff for entry in toy.series())
    whole = [raw.index(b"diff --git", spot + 1) for spot in range(len(raw)) if raw.startswith(b"diff --git", spot + 1)]
    # A removal or creation of an empty file, a change of mode, and a hunk that another follows end early too.
    passed = []
    for size in range(len(raw)):
        try:
            parse.parse(raw[:size], "p.diff")
        except BundleError:
            continue
        passed.append(size)
    # Nothing can tell a first hunk alone from a whole diff but the lock; it ends with its last line all the same.
    assert all(raw[:size].endswith(b"\n") for size in passed)
    starts = {size for size in passed if raw.startswith((b"diff --git", b"@@ ", b"--- "), size)}
    assert set(passed) == starts
    assert len(starts - set(whole)) <= 2


def test_the_whole_result_is_as_written() -> None:
    raw = b"why\n\n" + toy.series()[1].diff + toy.series()[2].diff
    diff = parse.parse(raw, "p.diff")
    assert diff.message == ("why", "")
    assert [(file.path, file.creates, file.deletes, file.old_mode, file.new_mode) for file in diff.files] == [
        ("sglang/srt/engine.py", False, False, None, None),
        ("sglang/srt/launch.sh", False, False, PLAIN, EXECUTABLE),
        ("sglang/srt/layers/pool.py", False, False, None, None),
        ("sglang/srt/layers/wired.py", True, False, None, PLAIN),
        ("sglang/srt/layers/deep/er/notes.txt", True, False, None, PLAIN),
        ("sglang/srt/old.py", False, True, PLAIN, None),
    ]
    assert diff.files[4].hunks[0].lines == (("+", toy.NOTES),)
    for file in diff.files:
        assert raw.split(b"\n")[file.line_no - 1].startswith(b"diff --git")
        for hunk in file.hunks:
            assert raw.split(b"\n")[hunk.line_no - 1].startswith(b"@@ ")


def test_the_words_behind_a_hunk_header_are_no_part_of_it() -> None:
    raw = change(b"f").replace(b"@@\n", b"@@ def \xff():\r tail @@ -1 +1 @@\n")
    assert parse.parse(raw, "p.diff").files == parse.parse(change(b"f"), "p.diff").files


@pytest.mark.parametrize(
    "header", [b"@@ -1,2 +1,2 @@x\n", b"@@ -1,2 +1,2 @\n", b"@@ -1,2  +1,2 @@\n", b"@@ -1,2, +1,2 @@\n"]
)
def test_a_hunk_header_has_one_form(header: bytes) -> None:
    assert refuse(change(b"f").replace(b"@@ -1,2 +1,2 @@\n", header)).code == "malformed"


@pytest.mark.parametrize(("number", "code"), [(2**31 - 1, "hunk-start"), (2**31, "number")])
def test_a_line_number_has_a_bound(number: int, code: str) -> None:
    assert refuse(change(b"f").replace(b"@@ -1,2 +1,2 @@", b"@@ -%d,2 +1,2 @@" % number)).code == code


@pytest.mark.parametrize("rest", [b' "b/x" junk', b' "b/x""', b" ", b""])
def test_a_git_line_of_quoted_names_holds_two_and_nothing_else(rest: bytes) -> None:
    assert refuse(b'diff --git "a/x"' + rest + b"\nnew file mode 100644\n").code == "name"


def test_every_escape_of_a_quoted_name_is_decoded() -> None:
    """What it stands for may be refused, and is shown; the names that remain are read."""
    for escape, character in zip("abtnvfr", "\a\b\t\n\v\f\r", strict=True):
        error = refuse(change(b'"%s"').replace(b'a/"%s"', b'"a/x\\%c"' % ord(escape)).replace(b'b/"%s"', b"b/x"))
        assert error.code == "name"
        assert repr(f"x{character}")[1:-1] in str(error), (escape, str(error))
    quoted = b'diff --git "a/x\\303\\251" "b/x\\303\\251"\nnew file mode 100644\n'
    assert parse.parse(quoted, "p.diff").files[0].path == "x\u00e9"


@pytest.mark.parametrize("raw", [b"", b"\n", b" \n\t\n", b"\r\n", b"\0\n"], ids=repr)
def test_nothing_is_no_diff(raw: bytes) -> None:
    assert refuse(raw).code in {"empty", "line-endings"}


def test_a_long_line_is_cut_in_the_message_and_only_there() -> None:
    for size, shown in ((120, "j" * 120), (121, "j" * 117 + "..."), (9000, "j" * 117 + "...")):
        assert refuse(change(b"f") + b"j" * size + b"\n").found == shown


def test_a_nul_in_a_line_is_a_byte_of_the_file() -> None:
    raw = change(b"f").replace(b"+TWO", b"+\0")
    assert parse.parse(raw, "p.diff").files[0].hunks[0].side("+")[-1] == b"\0\n"


def test_no_diff_of_a_real_size_takes_long() -> None:
    body = b"".join(b"-line %d\n+LINE %d\n" % (number, number) for number in range(20_000))
    diff = parse.parse(b"--- a/f\n+++ b/f\n@@ -1,20000 +1,20000 @@\n" + body, "p.diff")
    assert len(diff.files[0].hunks[0].lines) == 40_000
