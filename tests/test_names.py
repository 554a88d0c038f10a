"""Names: what may be a path inside a target, and which paths can stand in one tree."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchbundle import names
from patchbundle.errors import BundleError

BAD = {
    "an empty name": "",
    "an absolute name": "/etc/x",
    "dot": ".",
    "dot dot": "..",
    "a leading dot dot": "../x",
    "a dot dot inside": "a/../x",
    "a trailing dot dot": "a/..",
    "a dot inside": "a/./x",
    "a double slash": "a//x",
    "a trailing slash": "a/",
    "a backslash": "a\\x",
    "a NUL": "a\0x",
    "a newline": "a\nx",
    "a carriage return": "a\rx",
    "a tab": "a\tx",
    "an escape": "a\x1bx",
    "a DEL": "a\x7fx",
    "a git folder": ".git/config",
    "a git folder in capitals below another": "a/.GIT/config",
    "a name that the tool keeps for itself": ".patchbundle-journal",
    "such a name in capitals inside": "a/.PatchBundle/x",
    "a component of 256 bytes": "a" * 256,
    "a component of 128 letters of two bytes": "\u00e9" * 128,
    "half a surrogate pair": "a\ud800",
}


@pytest.mark.parametrize("path", BAD.values(), ids=BAD)
def test_a_name_that_could_lead_elsewhere_is_refused_with_its_place(path: str) -> None:
    with pytest.raises(BundleError) as refusal:
        names.check(path, "p.diff:3")
    assert refusal.value.code == "name"
    assert refusal.value.where == "p.diff:3"
    assert repr(path) in (refusal.value.found or "")


GOOD = [
    "x",
    "a/b/c.py",
    "with space",
    "caf\u00e9",
    "...",
    "a..b",
    "..a",
    ".hidden",
    ".gitignore",
    "a" * 255,
    "-dash",
    "~",
    "a:b",
]


@pytest.mark.parametrize("path", GOOD)
def test_a_plain_name_comes_back_unchanged(path: str) -> None:
    assert names.check(path, "here") == path


TOGETHER = {
    "two names that differ in case": (["A.py", "a.py"], "collision"),
    "two names that differ in a letter outside ASCII": (["\u00c9", "\u00e9"], "collision"),
    "two names that differ in Unicode form": (["caf\u00e9", "cafe\u0301"], "collision"),
    "two names that differ in case and form": (["CAFE\u0301", "caf\u00e9"], "collision"),
    "sharp s and two s": (["stra\u00dfe", "STRASSE"], "collision"),
    "an accent over an iota subscript in two cases": (["\u1f80\u0301", "\u1f88\u0301"], "collision"),
    "two folders that differ in case": (["D/x", "d/y"], "collision"),
    "two folders deep down": (["a/B/c", "a/b/d"], "collision"),
    "a file and a folder that differ in case": (["a", "A/x"], "collision"),
    "a file that is a folder": (["a", "a/x"], "parent"),
    "a file that is a folder two levels up": (["a/b/c/d", "a"], "parent"),
}


@pytest.mark.parametrize(("paths", "code"), TOGETHER.values(), ids=TOGETHER)
def test_paths_that_cannot_stand_in_one_tree_are_refused(paths: list[str], code: str) -> None:
    for order in (paths, paths[::-1]):
        with pytest.raises(BundleError) as refusal:
            names.check_together(order, "the series")
        assert refusal.value.code == code
        assert refusal.value.where.startswith("the series")


@pytest.mark.parametrize(
    "paths", [[], ["a"], ["a", "a"], ["a", "ab", "a.b"], ["a/b", "a/c", "b"], ["a-b", "a/b"]], ids=str
)
def test_paths_that_can_stand_in_one_tree_pass(paths: list[str]) -> None:
    names.check_together(paths, "the series")


@settings(derandomize=True, database=None, deadline=None, max_examples=50)
@given(st.text(max_size=8))
def test_every_spelling_of_a_name_folds_to_one(text: str) -> None:
    for form in ("NFC", "NFD"):
        assert names.fold(unicodedata.normalize(form, text)) == names.fold(text)
    assert names.fold(names.fold(text)) == names.fold(text)


@settings(derandomize=True, database=None, deadline=None, max_examples=50)
@given(st.text(alphabet="ab./\\\0 .", max_size=12))
def test_a_name_that_passes_stays_inside_its_root(text: str) -> None:
    try:
        names.check(text, "here")
    except BundleError:
        return
    depth = 0
    for part in text.split("/"):
        assert part not in {"", ".", ".."}
        depth += 1
    assert depth == len(names.parents(text)) + 1


@pytest.mark.parametrize(("path", "above"), [("a", []), ("a/b", ["a"]), ("a/b/c", ["a", "a/b"])])
def test_the_folders_above_a_path_come_outermost_first(path: str, above: list[str]) -> None:
    assert names.parents(path) == above
