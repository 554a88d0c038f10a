"""The bundle: what people wrote, what the machine wrote, and that both name the same files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from patchbundle import bases, manifest
from patchbundle import lock as lock_module
from patchbundle.errors import BundleError
from patchbundle.identity import File
from patchbundle.lock import Lock
from patchbundle.manifest import Bundle
from tests import toy
from tests.toy import Toy

ROOT = Path(__file__).parents[1]
SERIES = "patches/series.toml"
BASES = "config/bases.toml"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """One toy for the tests that put back what they change."""
    return toy.make(tmp_path_factory.mktemp("bundle"))


@contextmanager
def edited(path: Path, data: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def refusal(root: Path) -> BundleError:
    with pytest.raises(BundleError) as caught:
        manifest.load(root)
    assert caught.value.exit_code == 1
    return caught.value


def refused_by_both(root: Path) -> None:
    """By the strict reading, and by the comparison alone that a look at a tree makes."""
    refusal(root)
    with pytest.raises(BundleError) as caught:
        manifest.load_compared(root)
    assert caught.value.exit_code == 1


def files(root: Path) -> list[str]:
    return sorted(
        path.relative_to(root).as_posix()
        for top in ("config", "patches", "sources")
        for path in (root / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )


# Every byte counts.


def test_every_change_of_one_byte_of_a_small_bundle_is_caught(tmp_path: Path) -> None:
    """Each byte of each file, the lock included, in turn; each with another bit turned."""
    change = toy.diff("sglang/srt/old.py", File(toy.OLD), File(toy.OLD + b"more\n"))
    root = toy.make(
        tmp_path, entries=[toy.Entry("one", change, ["prefill/a.py"])], sources={"prefill/a.py": b"a\n"}
    ).bundle
    manifest.load(root)
    found = files(root)
    assert found == [BASES, "patches/pins.lock", "patches/prefill/one.patch", SERIES, "sources/prefill/a.py"]
    for path in found:
        raw = (root / path).read_bytes()
        for spot in range(len(raw)):
            (root / path).write_bytes(raw[:spot] + bytes([raw[spot] ^ 1 << spot % 8]) + raw[spot + 1 :])
            refused_by_both(root)
        (root / path).write_bytes(raw)
    manifest.load(root)


def test_every_value_of_a_byte_is_caught_by_the_comparison_with_the_lock(shared: Toy) -> None:
    """What a change of any file comes to: its digest is compared, for every value that a byte can have."""
    bundle = manifest.load(shared.bundle)
    for path, raw in bundle.artifacts.items():
        for value in range(256):
            data = raw[:-1] + bytes([value])
            if data != raw:
                with pytest.raises(BundleError) as caught:
                    _compare({**bundle.artifacts, path: data}, bundle)
                assert caught.value.code == "artifact"
                assert caught.value.where == path
                assert "pin" in (caught.value.next_step or "")


def test_every_file_of_the_real_bundle_is_compared_byte_by_byte(tmp_path: Path) -> None:
    """A change at any of some twenty places of each real file changes the digest that is compared."""
    artifacts = manifest._read_artifacts(ROOT, bases.load(ROOT / BASES))
    for bundle in manifest.load(ROOT).filed:
        artifacts |= {f"{manifest.RELEASES}/{bundle.release}/{path}": raw for path, raw in bundle.artifacts.items()}
    assert {*artifacts, BASES} == set(files(ROOT)) - {"patches/pins.lock"}
    for path, raw in artifacts.items():
        locked = Bundle(ROOT, {}, (), {}, Lock(manifest.digests({path: raw}), {}))
        _compare({path: raw}, locked)
        for spot in range(0, len(raw), max(1, len(raw) // 20)):
            with pytest.raises(BundleError) as caught:
                _compare({path: raw[:spot] + bytes([raw[spot] ^ 0x80]) + raw[spot + 1 :]}, locked)
            assert caught.value.where == path


def _compare(artifacts: dict[str, bytes], bundle: Bundle) -> None:
    changed = Bundle(bundle.root, bundle.bases, bundle.patches, artifacts, Lock({}, {}))
    manifest._check_artifacts(changed, bundle.lock, "")


@pytest.mark.parametrize("change", ["append", "cut", "empty"])
def test_a_longer_shorter_or_empty_file_is_caught(shared: Toy, change: str) -> None:
    for path in files(shared.bundle):
        raw = (shared.bundle / path).read_bytes()
        data = {"append": raw + b"\n", "cut": raw[:-1], "empty": b""}[change]
        with edited(shared.bundle / path, data):
            refused_by_both(shared.bundle)


def test_a_missing_file_is_caught(shared: Toy) -> None:
    for path in files(shared.bundle):
        place = shared.bundle / path
        raw = place.read_bytes()
        place.unlink()
        refused_by_both(shared.bundle)
        place.write_bytes(raw)
    manifest.load(shared.bundle)


def test_an_edited_source_is_named_with_the_way_out(shared: Toy) -> None:
    with edited(shared.bundle / "sources/prefill/alpha.py", b"def start(): evil()\n"):
        error = refusal(shared.bundle)
    assert (error.code, error.where) == ("artifact", "sources/prefill/alpha.py")
    assert "pin" in (error.next_step or "")


def test_a_patch_whose_line_ends_were_converted_is_told_so(shared: Toy) -> None:
    path = shared.bundle / "patches/prefill/alpha-first.patch"
    with edited(path, path.read_bytes().replace(b"\n", b"\r\n")):
        assert refusal(shared.bundle).code == "line-endings"


def test_the_same_bundle_loads_and_says_its_digest(shared: Toy) -> None:
    one, two = manifest.load(shared.bundle), manifest.load(shared.bundle)
    assert one == two
    assert len(one.lock.digest) == 64
    compared = manifest.load_compared(shared.bundle)
    assert (compared.bases, compared.artifacts, compared.lock) == (one.bases, one.artifacts, one.lock)


# Orphans, both ways.


@pytest.mark.parametrize(
    "path",
    [
        "patches/prefill/other.patch",
        "patches/notes.txt",
        "patches/pins.lock.orig",
        "patches/deep/er/x",
        "sources/prefill/x.py",
        "sources/x",
        "sources/prefill/alpha.py.orig",
        "sources/prefill/.hidden",
    ],
)
def test_a_file_that_nothing_names_is_refused(toy: Toy, path: str) -> None:
    place = toy.bundle / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"x\n")
    error = refusal(toy.bundle)
    assert (error.code, error.where) == ("orphan", path)
    with pytest.raises(BundleError) as caught:
        manifest.load_compared(toy.bundle)
    assert (caught.value.code, caught.value.where, caught.value.expected) == ("artifact", path, "not in the lock")


@pytest.mark.parametrize("path", ["patches/prefill/alpha-first.patch", "sources/prefill/alpha.py"])
def test_a_name_without_its_file_is_refused(toy: Toy, path: str) -> None:
    (toy.bundle / path).unlink()
    error = refusal(toy.bundle)
    assert error.code == "manifest"
    assert error.expected == f"the file {path}"


@pytest.mark.parametrize("path", ["sources/prefill/alpha.py", "patches/prefill/alpha-first.patch", SERIES, BASES])
def test_a_link_in_the_place_of_a_file_is_refused(toy: Toy, path: str) -> None:
    place = toy.bundle / path
    place.rename(toy.bundle / "elsewhere")
    place.symlink_to(toy.bundle / "elsewhere")
    assert path == BASES or refusal(toy.bundle).code == "orphan"


@pytest.mark.parametrize("kind", ["fifo", "dangling link", "link to a folder"])
def test_what_is_no_plain_file_is_refused(toy: Toy, kind: str) -> None:
    place = toy.bundle / "sources" / "odd"
    if kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to(toy.tree if kind == "link to a folder" else "nowhere")
    error = refusal(toy.bundle)
    assert (error.code, error.where) == ("orphan", "sources/odd")


def test_bytecode_beside_the_sources_is_no_orphan(toy: Toy) -> None:
    (toy.bundle / "sources/shared/__pycache__").mkdir()
    (toy.bundle / "sources/shared/__pycache__/gates.cpython-311.pyc").write_bytes(b"x")
    manifest.load(toy.bundle)


def test_a_bundle_below_a_folder_of_that_name_is_read_all_the_same(tmp_path: Path) -> None:
    made = toy.make(tmp_path / "__pycache__")
    assert len(manifest.load(made.bundle).patches) == 3
    (made.bundle / "sources/orphan").write_bytes(b"")
    assert refusal(made.bundle).code == "orphan"


# The lock and the series.


def test_a_missing_lock_says_how_to_make_one(toy: Toy) -> None:
    (toy.bundle / "patches/pins.lock").unlink()
    error = refusal(toy.bundle)
    assert error.code == "lock"
    assert "pin" in (error.next_step or "")


def test_a_folder_in_the_place_of_the_lock_is_refused(toy: Toy) -> None:
    (toy.bundle / "patches/pins.lock").unlink()
    (toy.bundle / "patches/pins.lock").mkdir()
    assert refusal(toy.bundle).code == "lock"


def relock(made: Toy, change: Callable[[Lock], Lock]) -> None:
    """Write another lock, well-formed, with the artifacts as they are now."""
    path = made.bundle / "patches/pins.lock"
    lock = lock_module.load(path.read_bytes(), "lock")
    artifacts = manifest.digests(manifest.load_unlocked(made.bundle).artifacts)
    path.write_bytes(lock_module.dump(change(Lock(artifacts, lock.bases))))


def _without_base(lock: Lock) -> Lock:
    return Lock(lock.artifacts, {})


def _with_another_base(lock: Lock) -> Lock:
    return Lock(lock.artifacts, {**lock.bases, "other-1": lock.bases[toy.BASE_ID]})


def _without_last_level(lock: Lock) -> Lock:
    pins = lock.bases[toy.BASE_ID]
    paths = {path: chain[:3] for path, chain in pins.paths.items()}
    folders = {folder: level for folder, level in pins.folders.items() if level < 3}
    return Lock(lock.artifacts, {toy.BASE_ID: lock_module.Pins(pins.role, pins.levels[:2], paths, folders)})


def _of_another_role(lock: Lock) -> Lock:
    pins = lock.bases[toy.BASE_ID]
    return Lock(lock.artifacts, {toy.BASE_ID: lock_module.Pins("decode", pins.levels, pins.paths, pins.folders)})


def _without_an_artifact(lock: Lock) -> Lock:
    return Lock({path: digest for path, digest in lock.artifacts.items() if path != SERIES}, lock.bases)


def _with_an_artifact_more(lock: Lock) -> Lock:
    return Lock({**lock.artifacts, "sources/more": "0" * 64}, lock.bases)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_without_base, "lock-stale"),
        (_with_another_base, "lock-stale"),
        (_without_last_level, "lock-stale"),
        (_of_another_role, "lock-stale"),
        (_without_an_artifact, "artifact"),
        (_with_an_artifact_more, "artifact"),
    ],
    ids=["lacks a base", "has a base more", "lacks a level", "is of another role", "lacks a file", "has a file more"],
)
def test_the_lock_and_the_series_disagree_when_the_lock(toy: Toy, change: Callable[[Lock], Lock], code: str) -> None:
    relock(toy, change)
    error = refusal(toy.bundle)
    assert error.code == code


def test_a_new_order_makes_the_lock_stale(toy: Toy) -> None:
    path = toy.bundle / SERIES
    head, one, two, three = path.read_text().split("[[patch]]")
    path.write_text("[[patch]]".join([head, one, three, two]))
    relock(toy, lambda lock: lock)
    error = refusal(toy.bundle)
    assert error.code == "lock-stale"
    assert error.expected == "alpha-first, gamma-third, beta-second"
    assert error.found == "alpha-first, beta-second, gamma-third"


# The series.

EDITS: dict[str, tuple[str, str, str]] = {
    "another schema": ("schema = 1", "schema = 2", "manifest"),
    "a schema that is true": ("schema = 1", "schema = true", "manifest"),
    "a schema that is a fraction": ("schema = 1", "schema = 1.0", "manifest"),
    "no schema": ("schema = 1", "", "manifest"),
    "an unknown key": ("schema = 1", "schema = 1\nmore = 1", "manifest"),
    "patches that are no tables": ("schema = 1", "schema = 1\npatch = 1\n[x]", "manifest"),
    "no TOML": ("schema = 1", "schema =", "manifest"),
    "an unknown key of a patch": ('id = "alpha-first"', 'id = "alpha-first"\nnote = "x"', "manifest"),
    "a missing key of a patch": ('role = "prefill"\nfile = "prefill/alpha', 'file = "prefill/alpha', "manifest"),
    "a key twice": ('id = "alpha-first"', 'id = "alpha-first"\nid = "x"', "manifest"),
    "an id twice": ('id = "beta-second"', 'id = "alpha-first"', "manifest"),
    "an id that is base": ('id = "gamma-third"', 'id = "base"', "manifest"),
    "an id in capitals": ('id = "gamma-third"', 'id = "Gamma"', "manifest"),
    "an id with a space": ('id = "gamma-third"', 'id = "gamma third"', "manifest"),
    "an id that ends with a dash": ('id = "gamma-third"', 'id = "gamma-"', "manifest"),
    "an id that is a number": ('id = "gamma-third"', "id = 7", "manifest"),
    "an id with a newline": ('id = "gamma-third"', 'id = "gamma\\n"', "manifest"),
    "an unknown role": ('role = "prefill"\nfile = "prefill/alpha', 'role = "both"\nfile = "prefill/alpha', "manifest"),
    "a role that is a list": ('role = "prefill"\nfile = "prefill/al', 'role = ["x"]\nfile = "prefill/al', "manifest"),
    "a role without a base": (
        'role = "prefill"\nfile = "prefill/gamma-third.patch"',
        'role = "decode"\nfile = "decode/gamma-third.patch"',
        "manifest",
    ),
    "a file of another role": ('file = "prefill/alpha', 'file = "decode/alpha', "manifest"),
    "a file that climbs": ('file = "prefill/alpha', 'file = "prefill/../prefill/alpha', "manifest"),
    "a file that is absolute": ('file = "prefill/alpha', 'file = "/prefill/alpha', "manifest"),
    "a file without its suffix": ('alpha-first.patch"', 'alpha-first"', "manifest"),
    "a file twice": ('file = "prefill/gamma-third', 'file = "prefill/alpha-first', "manifest"),
    "a file that is a list": ('file = "prefill/alpha-first.patch"', "file = []", "manifest"),
    "a source twice": ('["kernels/beta.cu"]', '["kernels/beta.cu", "kernels/beta.cu"]', "manifest"),
    "a source of two patches": ('["kernels/beta.cu"]', '["kernels/beta.cu", "shared/gates.py"]', "manifest"),
    "a source that is missing": ('["kernels/beta.cu"]', '["kernels/beta.cu", "kernels/x"]', "manifest"),
    "a source that climbs": ('["kernels/beta.cu"]', '["kernels/../kernels/beta.cu"]', "manifest"),
    "sources that are a text": ('["kernels/beta.cu"]', '"kernels/beta.cu"', "manifest"),
    "sources that are numbers": ('["kernels/beta.cu"]', "[1]", "manifest"),
    "a source that no patch lists": ('["kernels/beta.cu"]', "[]", "orphan"),
    "a requirement that is unknown": ('requires = ["alpha-first"]', 'requires = ["alpha"]', "manifest"),
    "a requirement twice": ('["alpha-first"]', '["alpha-first", "alpha-first"]', "manifest"),
    "a requirement of itself": ('requires = ["alpha-first"]', 'requires = ["beta-second"]', "cycle"),
    "a requirement that stands after": ('requires = ["alpha-first"]', 'requires = ["gamma-third"]', "manifest"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "code"), EDITS.values(), ids=EDITS)
def test_the_series_is_refused_for(shared: Toy, old: str, new: str, code: str) -> None:
    path = shared.bundle / SERIES
    text = path.read_text()
    assert text.count(old) == 1
    with edited(path, text.replace(old, new).encode()):
        error = refusal(shared.bundle)
    assert error.code == code
    assert code == "orphan" or SERIES in error.where


def test_a_longer_circle_is_shown_whole(shared: Toy) -> None:
    path = shared.bundle / SERIES
    blocks = path.read_text().split("[[patch]]")
    blocks[1] = blocks[1].replace("requires = []", 'requires = ["gamma-third"]')
    blocks[3] = blocks[3].replace("requires = []", 'requires = ["beta-second"]')
    with edited(path, "[[patch]]".join(blocks).encode()):
        error = refusal(shared.bundle)
    assert error.code == "cycle"
    assert error.found == "alpha-first -> gamma-third -> beta-second -> alpha-first"


def test_a_requirement_of_another_role_is_refused(tmp_path: Path) -> None:
    decode = toy.Entry("delta-fourth", toy.diff("sglang/srt/new", None, File(b"x\n")), role="decode")
    made = toy.make(tmp_path, pinned=False)
    bases_path = made.bundle / BASES
    text = bases_path.read_text()
    bases_path.write_text(
        text + text.replace("schema = 1\n", "").replace("0.5.19", "0.5.17").replace("prefill", "decode")
    )
    with (made.bundle / SERIES).open("a") as stream:
        stream.write('\n[[patch]]\nid = "delta-fourth"\nrole = "decode"\nfile = "decode/delta-fourth.patch"\n')
        stream.write('sources = []\nrequires = ["alpha-first"]\n')
    (made.bundle / "patches/decode").mkdir()
    (made.bundle / "patches/decode/delta-fourth.patch").write_bytes(toy.header() + decode.diff)
    with pytest.raises(BundleError) as caught:
        manifest.load_unlocked(made.bundle)
    assert caught.value.expected == "requires: ids of the same role"


# What a patch may not reach for.

REACHES = {
    "the receipt, by a diff": ([toy.Entry("x", toy.diff(f"{toy.HOME}/receipt.json", None, File(b"{}\n")))], {}),
    "the receipt, by a source": (
        [toy.Entry("x", toy.series()[0].diff, ["prefill/receipt.json"])],
        {"prefill/receipt.json": b"{}\n"},
    ),
    "RECORD": (
        [toy.Entry("x", toy.diff(f"{toy.INFO}/WHEEL", toy.BASE[f"{toy.INFO}/WHEEL"], None))],
        {},
    ),
    "one place with two sources": (
        [toy.Entry("x", toy.series()[0].diff, ["prefill/a.py", "shared/a.py"])],
        {"prefill/a.py": b"1\n", "shared/a.py": b"2\n"},
    ),
    "one place with two sources of two patches": (
        [
            toy.Entry("x", toy.series()[0].diff, ["prefill/a.py"]),
            toy.Entry("y", toy.diff("sglang/n", None, File(b"")), ["shared/a.py"]),
        ],
        {"prefill/a.py": b"1\n", "shared/a.py": b"2\n"},
    ),
    "an area that the base does not have": (
        [toy.Entry("x", toy.series()[0].diff, ["decode/a.py"])],
        {"decode/a.py": b"1\n"},
    ),
    "a source without an area": ([toy.Entry("x", toy.series()[0].diff, ["a.py"])], {"a.py": b"1\n"}),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "sources"), REACHES.values(), ids=REACHES)
def test_a_series_may_not_reach_for(tmp_path: Path, entries: list[toy.Entry], sources: dict[str, bytes]) -> None:
    made = toy.make(tmp_path, entries=entries, sources=sources, pinned=False)
    with pytest.raises(BundleError) as caught:
        manifest.load_unlocked(made.bundle)
    assert caught.value.code == "manifest"
    assert caught.value.where.startswith(SERIES)


def test_a_patch_without_its_header_is_refused(toy: Toy) -> None:
    path = toy.bundle / "patches/prefill/gamma-third.patch"
    raw = path.read_bytes()
    path.write_bytes(raw[raw.index(b"diff --git") :])
    assert refusal(toy.bundle).code == "header"


# The bases.

INSTALL = "".join(
    f'{area} = "{toy.HOME}{tail}"\n' for area, tail in (("shared", ""), ("prefill", ""), ("kernels", "/kernels"))
)
BASE_EDITS: dict[str, tuple[str, str]] = {
    "another schema": ("schema = 1", "schema = 2"),
    "no bases": ("schema = 1\n", "schema = 1\nbases = {}\n[x]\n"),
    "bases that are a list": ("schema = 1\n", "schema = 1\nbases = []\n[x]\n"),
    "an unknown key": ('torch = "2.13.0"', 'torch = "2.13.0"\nmore = 1'),
    "no version": ('version = "0.5.19"', ""),
    "a version that is a number": ('version = "0.5.19"', "version = 5"),
    "an empty version": ('version = "0.5.19"', 'version = ""'),
    "a torch that is a list": ('torch = "2.13.0"', "torch = []"),
    "an unknown role": ('role = "prefill"', 'role = "both"'),
    "a marker that climbs": ('marker = "sglang/srt"', 'marker = "../sglang"'),
    "members beside wheels": ('torch = "2.13.0"', 'members = "list"'),
    "members that climb": ('torch = "2.13.0"', 'members = "../list"'),
    "an origin that is a number": ('torch = "2.13.0"', "origin = 7"),
    "no place to install": (INSTALL, ""),
    "an area that is a path": ('shared = "', '"a/b" = "'),
    "a folder that is a number": ('shared = "sglang/srt/research"', "shared = 1"),
    "a folder that is absolute": ('shared = "sglang/srt/research"', 'shared = "/sglang/srt/research"'),
    "a folder outside ours": ('kernels = "sglang/srt/research/kernels"', 'kernels = "sglang/srt/research_kernels"'),
    "a folder in another case": ('kernels = "sglang/srt/research/kernels"', 'kernels = "sglang/srt/Research/kernels"'),
    "a digest that is short": ('record = "', 'record = "0'),
    "a digest that is a number": ('entries = "', 'more = "'),
    "an archive that is a path": (f'"{toy.WHEEL}"', f'"../{toy.WHEEL}"'),
    "an archive that is neither": (f'"{toy.WHEEL}"', '"sglang.zip"'),
    "a wheel with too few tags": (f'"{toy.WHEEL}"', '"sglang-0.5.19-py3.whl"'),
    "an id with a slash": (f'[bases."{toy.BASE_ID}"]\n', '[bases."a/b"]\n'),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), BASE_EDITS.values(), ids=BASE_EDITS)
def test_the_bases_are_refused_for(shared: Toy, old: str, new: str) -> None:
    text = (shared.bundle / BASES).read_text()
    assert text.count(old) == 1
    with pytest.raises(BundleError) as caught:
        bases.parse(text.replace(old, new).encode(), BASES)
    assert caught.value.code in {"manifest", "name", "collision"}
    assert caught.value.where.startswith(BASES)


@pytest.mark.parametrize(
    "raw",
    [b"\xff", b"schema", b"a = " + b"[" * 50_000, b"a = 2026-99-99", b"a = " + b"9" * 5000],
    ids=["no UTF-8", "a bare word", "very deep", "no such day", "a very long number"],
)
def test_what_is_no_toml_is_refused_and_not_a_traceback(raw: bytes) -> None:
    with pytest.raises(BundleError) as caught:
        bases.parse(raw, BASES)
    assert caught.value.code == "manifest"


@pytest.mark.parametrize("kind", ["missing", "a folder"])
def test_bases_that_cannot_be_read_are_refused(toy: Toy, kind: str) -> None:
    path = toy.bundle / BASES
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    assert refusal(toy.bundle).code == "manifest"


def test_a_source_archive_needs_its_list_of_members(tmp_path: Path) -> None:
    text = (ROOT / BASES).read_text()
    with pytest.raises(BundleError, match="members for a source archive"):
        bases.parse(text.replace('members = "sglang-router-0.3.2.members"\n', "").encode(), BASES)
    made = toy.make(tmp_path, pinned=False)
    (made.bundle / BASES).write_text(text)
    error = refusal(made.bundle)
    assert (error.code, error.expected) == ("manifest", "the file config/sglang-router-0.3.2.members")


def test_the_real_bases_are_read() -> None:
    made = bases.load(ROOT / BASES)
    assert {base.role for base in made.values()} == set(bases.ROLES)
    assert made["sglang-0.5.19"].receipt == "sglang/srt/research/receipt.json"
    assert made["sglang-0.5.19"].install_path("kernels/a/b.cu") == "sglang/srt/research/kernels/a/b.cu"
    assert made["sglang-0.5.19"].install_path("decode/x.py") is None
    assert made["sglang-0.5.19"].install_path("shared") is None
    with pytest.raises(BundleError, match="archive"):
        made["sglang-0.5.19"].archive("other.whl")
