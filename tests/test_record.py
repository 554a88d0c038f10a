"""RECORD: an edit that is exact, and undone by the edit back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchbundle import record
from patchbundle.errors import BundleError
from patchbundle.identity import ABSENT, EXECUTABLE, Identity

A, B, C = Identity.of(b"a"), Identity.of(b"b"), Identity.of(b"c", EXECUTABLE)


def listing(*rows: tuple[str, Identity] | str, end: str = "\n", last: str | None = None) -> bytes:
    out = [row if isinstance(row, str) else record.line(*row).decode() for row in rows]
    return (end.join(out) + (end if last is None else last)).encode()


RAW = listing("../../bin/x,sha256=AAAA,3", ("x.py", A), ("y.py", B), "RECORD,,", "z.pyc,,")


def test_a_line_is_the_one_that_installers_write() -> None:
    assert record.line("a/x.py", Identity.of(b"")) == b"a/x.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0"


@pytest.mark.parametrize(("path", "start"), [("a,b", b'"a,b",'), ('a"b', b'"a""b",'), ("caf\u00e9", b"caf\xc3\xa9,")])
def test_a_name_is_quoted_where_it_must_be(path: str, start: bytes) -> None:
    raw = listing((path, A))
    assert raw.startswith(start)
    record.check(raw, {path: A}, "RECORD")
    assert record.entries(raw)[path] == (A.sha256, 1)


def test_a_changed_file_keeps_its_line_s_place() -> None:
    made = record.edit(RAW, {"x.py": A}, {"x.py": C}, "RECORD")
    assert made == RAW.replace(record.line("x.py", A), record.line("x.py", C))


def test_an_added_file_is_appended_in_the_order_given() -> None:
    old = {"n": ABSENT, "m": ABSENT}
    made = record.edit(RAW, old, {"n": A, "m": B}, "RECORD")
    assert made == RAW + listing(("n", A), ("m", B))
    assert record.edit(made, {"n": A, "m": B}, old, "RECORD") == RAW


def test_a_removed_file_of_the_release_keeps_its_line_s_place_without_a_hash() -> None:
    made = record.edit(RAW, {"x.py": A}, {"x.py": ABSENT}, "RECORD", {"x.py"})
    assert made == RAW.replace(record.line("x.py", A), b"x.py,,")
    record.check(made, {"x.py": ABSENT}, "RECORD", {"x.py"})
    record.check(made, {"x.py": ABSENT}, "RECORD")
    assert "x.py" not in record.entries(made)
    assert record.edit(made, {"x.py": ABSENT}, {"x.py": A}, "RECORD", {"x.py"}) == RAW
    assert record.edit(made, {"x.py": ABSENT}, {"x.py": A}, "RECORD") == RAW


def test_a_removed_file_of_ours_leaves_no_line() -> None:
    raw = RAW + listing(("n", A))
    assert record.edit(raw, {"n": A}, {"n": ABSENT}, "RECORD", {"x.py"}) == RAW


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        listing(("y.py", B)),
        listing(("y.py", B), end="\r\n"),
        listing(("y.py", B), last=""),
        listing("a,,", ("y.py", B), end="\r\n", last=""),
        listing("a,,", last="\r\n") + listing(("y.py", B)),
        listing("a,,", "b,,", last="\n") + listing(("y.py", B), last="\r\n"),
        listing("", ("y.py", B), "", ""),
    ],
    ids=[
        "nothing",
        "LF",
        "CR LF",
        "no last end",
        "CR LF, no last end",
        "CR LF then LF",
        "LF then CR LF",
        "blank lines",
    ],
)
def test_line_ends_come_back_whatever_they_are(raw: bytes) -> None:
    old, new = {"y.py": B if b"y.py" in raw else ABSENT, "n": ABSENT}, {"y.py": C, "n": A}
    made = record.edit(raw, old, new, "RECORD")
    record.check(made, new, "RECORD")
    assert made.endswith(b"\n") == (raw.endswith(b"\n") or not raw)
    assert record.edit(made, new, old, "RECORD") == raw


BAD = {
    "the line is missing": listing(("y.py", B)),
    "the line stands twice": RAW + listing(("x.py", A)),
    "another digest": RAW.replace(record.line("x.py", A), record.line("x.py", B)),
    "another size": RAW.replace(record.line("x.py", A), record.line("x.py", A)[:-1] + b"2"),
    "no hash": RAW.replace(record.line("x.py", A), b"x.py,,"),
    "another algorithm": RAW.replace(record.line("x.py", A), record.line("x.py", A).replace(b"sha256", b"sha512")),
    "quotes that need not be": RAW.replace(b"\nx.py,", b'\n"x.py",'),
    "a space": RAW.replace(b"\nx.py,", b"\nx.py ,"),
    "padding": RAW.replace(record.line("x.py", A), record.line("x.py", A).replace(b",1", b"=,1")),
    "a fourth field": RAW.replace(record.line("x.py", A), record.line("x.py", A) + b","),
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD)
def test_a_touched_file_s_line_is_drift_when(raw: bytes) -> None:
    for call in (
        lambda: record.check(raw, {"x.py": A}, "RECORD"),
        lambda: record.edit(raw, {"x.py": A}, {"x.py": B}, "RECORD"),
    ):
        with pytest.raises(BundleError) as refusal:
            call()
        assert refusal.value.code == "record"
        assert refusal.value.where == "RECORD: x.py"


@pytest.mark.parametrize(
    ("raw", "released"),
    [
        (listing(("n", A)), None),
        (listing("n,,", "n,,"), None),
        (listing("n,,"), set()),
        (listing("y,,"), {"n"}),
        (listing("n,,0"), None),
    ],
    ids=["a line", "two place holders", "a place holder of ours", "no place holder", "a place holder with a size"],
)
def test_an_absent_file_is_drift_with(raw: bytes, released: set[str] | None) -> None:
    with pytest.raises(BundleError, match="RECORD"):
        record.check(raw, {"n": ABSENT}, "RECORD", released)


def test_an_absent_file_has_no_line() -> None:
    record.check(RAW, {"n": ABSENT}, "RECORD")
    record.check(RAW, {"n": ABSENT}, "RECORD", {"x.py"})


def test_lines_of_others_may_be_odd() -> None:
    raw = b'"unfinished\n\xff\xfe,,\n"a\0b",,\n,\n' + listing(("x.py", A))
    made = record.edit(raw, {"x.py": A, "n": ABSENT}, {"x.py": B, "n": A}, "RECORD")
    assert record.edit(made, {"x.py": B, "n": A}, {"x.py": A, "n": ABSENT}, "RECORD") == raw


def test_a_field_longer_than_csv_takes_is_nobody_s_line() -> None:
    for field in (b'"' + b"x" * 200_000 + b'",,\n', b'"' + b"x" * 200_000 + b"\n"):
        record.check(field + listing(("x.py", A)), {"x.py": A}, "RECORD")


_IDENTITY = st.sampled_from([ABSENT, A, B, C])
_PATH = st.sampled_from(["x.py", "y.py", "a,b", 'q"', "é"])
_END = st.sampled_from(["\n", "\r\n"])


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    st.dictionaries(_PATH, st.lists(_IDENTITY, min_size=3, max_size=3), max_size=5),
    st.lists(st.tuples(st.sampled_from(["other,,", "o2,sha256=x,1", ""]), _END), max_size=4),
    _END,
    st.booleans(),
)
def test_any_way_up_and_down_gives_the_bytes_of_before(
    chains: dict[str, list[Identity]], others: list[tuple[str, str]], end: str, cut: bool
) -> None:
    levels = [{path: chain[level] for path, chain in chains.items()} for level in range(3)]
    released = {path for path, identity in levels[0].items() if identity.is_file}
    raw = "".join(row + stop for row, stop in others).encode()
    raw += b"".join(record.line(path, levels[0][path]) + end.encode() for path in sorted(released))
    if cut:
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    raws = [raw]
    for old, new in itertools.pairwise(levels):
        raws.append(record.edit(raws[-1], old, new, "RECORD", released))
        record.check(raws[-1], new, "RECORD", released)
    assert record.edit(raws[2], levels[2], levels[0], "RECORD", released) == raw
    assert record.edit(raws[1], levels[1], levels[0], "RECORD", released) == raw


# The release's own entries.


def test_what_an_installer_added_is_left_out() -> None:
    own = listing(("a/x.py", A), ("a-1.dist-info/METADATA", B))
    more = listing(
        ("../bin/x", A), ("/abs", A), ("a-1.dist-info/INSTALLER", A), ("a-1.dist-info/REQUESTED", A),
        ("a-1.dist-info/direct_url.json", A), ("a-1.dist-info/uv_cache.json", A), ("a-1.dist-info/uv_build.json", A),
        ("a/__pycache__/x.pyc", A), "a/y.pyc,,", "a-1.dist-info/RECORD,,",
    )  # fmt: skip
    digest = record.entries_digest(record.entries(own))
    assert record.entries_digest(record.entries(more + own)) == digest
    assert record.entries_digest(record.entries(own.replace(b"\n", b"\r\n"))) == digest
    for path in ("a/new.py", "a/uv_build.json", "uv_build.json", "a-1.dist-info/other.json"):
        assert record.entries_digest(record.entries(own + listing((path, A)))) != digest


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff,sha256=x,1\n",
        b"x,sha256=short,1\n",
        listing(("x", A)).replace(b",1\n", b",one\n"),
        listing(("x", A)).replace(b",1\n", b", 1\n"),
        listing(("x", A)).replace(b",1\n", b",-1\n"),
        listing(("x", A)).replace(b",1\n", b",01\n"),
        listing(("x", A)).replace(b",1\n", b"=,1\n"),
        b"x,sha256=" + b"A" * 42 + b"B,1\n",
        b"x,sha256=" + b"A" * 42 + b"\xc3\xa9,1\n",
        b"y" * 200_000 + b",sha256=x,1\n",
    ],
    ids=[
        "no UTF-8",
        "short digest",
        "word",
        "space",
        "negative",
        "leading zero",
        "padding",
        "spare bits",
        "letter",
        "long",
    ],
)
def test_a_list_that_does_not_read_is_refused_and_not_a_traceback(raw: bytes) -> None:
    with pytest.raises(BundleError) as refusal:
        record.entries(raw)
    assert refusal.value.code == "record"


def test_the_identity_that_a_line_states_is_found() -> None:
    assert record.found(RAW, "x.py") == A
    assert record.found(RAW, "n") == ABSENT


@pytest.mark.parametrize("raw", [RAW + listing(("x.py", A)), listing("x.py,,"), listing("x.py,sha256=x,1")], ids=str)
def test_a_line_that_states_no_one_identity_is_refused(raw: bytes) -> None:
    with pytest.raises(BundleError, match="RECORD"):
        record.found(raw, "x.py")
