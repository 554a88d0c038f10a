"""Random trees and diffs, ours against ``git apply``.

What we accept, git must accept with the same result, forward and back; what git makes a diff of, we must accept.
The other way round we refuse more than git: only for a reason of which the corpus has a case, with the why.
``PATCHBUNDLE_EXAMPLES=5000`` looks longer, and at other examples every time. ``PATCHBUNDLE_COUNTS=FILE`` gets a line
for each outcome of it, with how often there was one.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from patchbundle import names, parse
from patchbundle.bases import parse_toml
from patchbundle.diff import split_lines
from patchbundle.errors import BundleError
from patchbundle.identity import EXECUTABLE, PLAIN, File
from tests import oracle, toy
from tests.oracle import Files

_CORPUS = Path(__file__).parent / "corpus"
_LONG = "PATCHBUNDLE_EXAMPLES" in os.environ
small = settings(
    max_examples=int(os.environ.get("PATCHBUNDLE_EXAMPLES", "60")),
    derandomize=not _LONG,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

# Few different lines, so that near-identical places are common; some look like parts of a diff.
_TEXTS = [
    b"",
    b"a",
    b"b",
    b"    return x",
    b"-- a/x",
    b"++ b/x",
    b"@@ -1 +1 @@",
    b"\\ No newline",
    b"diff --git a/x b/x",
    b"\xff\x80",
]
_LINE = st.builds(
    lambda text, end: text + end, st.sampled_from(_TEXTS), st.sampled_from([b"\n", b"\n", b"\n", b"\r\n"])
)
_CONTENT = st.builds(
    lambda lines, cut: b"".join(lines)[: -1 if cut and lines else None], st.lists(_LINE, max_size=25), st.booleans()
)
_FILE = st.builds(File, _CONTENT, st.sampled_from([PLAIN, PLAIN, EXECUTABLE]))
_NAME = st.sampled_from(["f", "d/g", "d/e/h.py", "with space", "d/caf\u00e9", 'quo"te', "b/f", "-dash", "d/a b/c"])
_TREE = st.dictionaries(_NAME, _FILE, min_size=1, max_size=3)


@st.composite
def edited(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes after a few changes of lines."""
    lines = split_lines(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines)))
        lines[at : at + draw(st.integers(0, 2))] = draw(st.lists(_LINE, max_size=2))
    # A line in the middle cannot lack its end.
    lines[:-1] = [line if line.endswith(b"\n") else line + b"\n" for line in lines[:-1]]
    joined = b"".join(lines)
    return joined.removesuffix(b"\n") if draw(st.booleans()) and joined.endswith(b"\n") else joined


@st.composite
def two_trees(draw: st.DrawFn) -> tuple[Files, Files]:
    old = draw(_TREE)
    new = dict(old)
    for path, file in old.items():
        what = draw(st.sampled_from(["keep", "edit", "edit", "edit", "mode", "remove"]))
        if what == "remove":
            del new[path]
        elif what != "keep":
            mode = file.mode if what == "edit" else draw(st.sampled_from([PLAIN, EXECUTABLE]))
            new[path] = File(draw(edited(file.data)), mode)
    for path, file in draw(st.dictionaries(_NAME, _FILE, max_size=1)).items():
        new.setdefault(path, file)
    return old, new


@contextmanager
def folders(**trees: Files) -> Iterator[dict[str, Path]]:
    with tempfile.TemporaryDirectory() as top:
        for name, tree in trees.items():
            oracle.write(Path(top, name), tree)
        yield {name: Path(top, name) for name in trees} | {"diff": Path(top, "p.diff")}


def git_diff(old: Path, new: Path) -> bytes:
    """What git itself makes of two folders ``a`` and ``b`` that stand side by side."""
    options = ["--no-index", "--no-ext-diff", "--no-color", "--no-renames", "--text", "--no-prefix"]
    command = ["git", "diff", *options, old.name, new.name]
    environment = {"PATH": os.environ["PATH"], "HOME": str(old.parent), "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(command, cwd=old.parent, env=environment, capture_output=True, check=False).stdout


def ours(raw: bytes, tree: Files) -> oracle.Series | BundleError:
    """The series, or our refusal of it. Anything else goes through."""
    try:
        return oracle.pin({"p.diff": raw}, tree)
    except BundleError as refusal:
        return refusal


def theirs(raw: bytes, tree: Files, *options: str) -> Files | None:
    with folders(tree=tree) as place:
        place["diff"].write_bytes(raw)
        took = oracle.git_apply(place["tree"], [place["diff"]], 1, *options)
        return oracle.read(place["tree"]) if took else None


def stricter() -> frozenset[str]:
    """The reasons for which we refuse what git applies: those of which the corpus has such a case."""
    tables = [parse_toml(path.read_bytes(), str(path)) for path in sorted(_CORPUS.glob("*/case.toml"))]
    return frozenset(
        table["reason"]
        for table in tables
        if table["expected"] == "refuse" and table.get("git", "").startswith("applies")
    )


STRICTER = stricter()
COUNTS = Counter[str]()


@pytest.fixture(scope="module", autouse=True)
def told() -> Iterator[None]:
    """How often each outcome was, into the file that was asked for."""
    yield
    if place := os.environ.get("PATCHBUNDLE_COUNTS"):
        lines = [f"{count} {outcome}\n" for outcome, count in COUNTS.most_common()]
        Path(place).write_text("".join(lines), encoding="utf-8")


def agree(raw: bytes, tree: Files, kind: str) -> None:
    """If we accept, git must too, with the same bytes and modes, forward and back; if git alone does, for a reason that
    we have a name for."""
    series = ours(raw, tree)
    git = theirs(raw, tree)
    if isinstance(series, BundleError):
        outcome = "both refuse" if git is None else f"git alone applies it: {series.code}"
        # The word by which a reader finds the case.
        assert git is None or series.code in STRICTER, f"git applies it, and we have no case of {series.code}"
    else:
        outcome = "both apply it, to the same tree"
        made = oracle.move(series, 0, 1)
        assert git == made
        assert oracle.move(series, 1, 0) == tree
        # git 2.47 forgets that a file was executable when it reverses its removal.
        back = theirs(raw, made, "-R")
        assert back is not None
        assert {path: file if path in made else File(file.data, tree[path].mode) for path, file in back.items()} == tree
    COUNTS[f"{kind}: {outcome}"] += 1
    event(outcome)


@small
@given(two_trees())
def test_what_git_makes_a_diff_of_we_apply_and_take_off(trees: tuple[Files, Files]) -> None:
    old, new = trees
    with folders(a=old, b=new) as place:
        raw = git_diff(place["a"], place["b"])
    assume(raw)
    series = ours(raw, old)
    assert not isinstance(series, BundleError), str(series)
    COUNTS["git's own diff: both apply it, to the same tree"] += 1
    assert oracle.move(series, 0, 1) == new
    assert oracle.move(series, 1, 0) == old


@small
@given(two_trees(), st.data())
def test_a_diff_against_an_edited_tree_is_refused_or_does_what_git_does(
    trees: tuple[Files, Files], data: st.DataObject
) -> None:
    old, new = trees
    raw = whole_diff(old, new)
    assume(raw)
    path = data.draw(st.sampled_from(sorted(old)))
    other = {**old, path: File(data.draw(edited(old[path].data)), old[path].mode)}
    agree(raw, other, "against an edited tree")


_OTHER_LINES: tuple[bytes, ...] = (
    b"@@ -1,2 +1,2 @@\n",
    b"index 1..2 100644\n",
    b"\r\n",
    b"\\ No newline at end of file\n",
    b"--- /dev/null\n",
)
_OTHER_LINES += tuple(word + b"\n" for word in b"--- a/f;+++ b/f;@@ -1 +1 @@; a;+a;-a;; ;junk;rename to x".split(b";"))
_OTHER_LINES += (b"diff --git a/f b/f\n", b"new file mode 100644\n")


@small
@given(two_trees(), st.data())
def test_a_damaged_diff_is_refused_or_does_what_git_does(trees: tuple[Files, Files], data: st.DataObject) -> None:
    old, new = trees
    lines = whole_diff(old, new).split(b"\n")
    assume(len(lines) > 1)
    raw = b"\n".join(lines)
    for _ in range(data.draw(st.integers(1, 2))):
        lines = [line + b"\n" for line in raw.split(b"\n")[:-1]]
        at = data.draw(st.integers(0, max(0, len(lines) - 1)))
        kind = data.draw(st.sampled_from(["drop", "double", "swap", "put", "digit", "byte"]))
        if kind == "drop":
            del lines[at : at + 1]
        elif kind == "double":
            lines[at:at] = lines[at : at + 1]
        elif kind == "swap":
            lines[at : at + 2] = lines[at : at + 2][::-1]
        elif kind == "put":
            lines.insert(at, data.draw(st.sampled_from(_OTHER_LINES)))
        raw = b"".join(lines)
        if kind in {"digit", "byte"} and raw:
            spot = data.draw(st.integers(0, len(raw) - 1))
            byte = data.draw(st.integers(48, 57) if kind == "digit" else st.integers(0, 255))
            raw = raw[:spot] + bytes([byte]) + raw[spot + 1 :]
        if not raw.endswith(b"\n"):
            raw += b"\n"
    agree(raw, old, "a damaged diff")


@small
@given(st.dictionaries(_NAME, _FILE, min_size=2, max_size=4), two_trees(), st.data())
def test_a_diff_against_a_tree_of_its_own_is_refused_or_does_what_git_does(
    tree: Files, trees: tuple[Files, Files], data: st.DataObject
) -> None:
    """Files that are missing, there already, or in a folder's place; two diffs one after the other."""
    raw = whole_diff(*trees)
    assume(raw)
    taken = data.draw(st.sampled_from(["its files and others", "others"]))
    agree(raw, tree if taken == "others" else {**tree, **trees[0]}, "against another tree")


@small
@given(st.lists(st.one_of(st.sampled_from(_OTHER_LINES), st.binary(max_size=12)), max_size=14).map(b"".join))
def test_any_bytes_are_parsed_or_refused_and_nothing_else(raw: bytes) -> None:
    where = "p.diff:1"
    try:
        assert parse.parse(raw, "p.diff").files
    except BundleError as refusal:
        where = refusal.where
    assert re.match(r"p\.diff(?::[0-9]+|$)", where)


@small
@given(two_trees())
def test_a_diff_reversed_twice_is_itself(trees: tuple[Files, Files]) -> None:
    raw = whole_diff(*trees)
    assume(raw)
    for file in parse.parse(raw, "p.diff").files:
        assert file.reversed().reversed() == file


def whole_diff(old: Files, new: Files) -> bytes:
    """The diff of two trees, by difflib: another hand than git's. Names that need quotes are left out."""
    paths = [path for path in sorted({*old, *new}) if path.isascii() and '"' not in path and " " not in path]
    raw = b"".join(toy.diff(path, old.get(path), new.get(path)) for path in paths if old.get(path) != new.get(path))
    names.check_together(paths, "generated")
    return raw
