"""An operator's image as a base: what it may hold otherwise, what is refused, and that it works like any other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from patchbundle import bases, manifest, record
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import File, Identity
from tests import toy as toys
from tests import trees
from tests.toy import Toy
from tests.trees import Result

ENGINE = "sglang/srt/engine.py"
OLD = "sglang/srt/old.py"
TOOL = "sglang/srt/tool.sh"
UNTOUCHED = "sglang/_version.py"
BASES = "config/bases.toml"
# Line 20 stands between the hunks around 5 and 30, line 31 right below the second change.
OUTSIDE = toys.ENGINE.replace(b"engine = 20\n", b"engine = 2020\n")
INSIDE = toys.ENGINE.replace(b"engine = 31\n", b"engine = 3131\n")


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return toys.make(tmp_path)


def edit(toy: Toy, path: str, data: bytes, *, recorded: bool = False) -> None:
    """Change a file of the image; with ``recorded`` its RECORD too."""
    old = (toy.tree / path).read_bytes()
    (toy.tree / path).write_bytes(data)
    if recorded:
        place = toy.tree / toys.RECORD
        line = record.line(path, Identity.of(old))
        assert line in place.read_bytes()
        place.write_bytes(place.read_bytes().replace(line, record.line(path, Identity.of(data))))


def add(toy: Toy, *overlays: str | Path, base: str = "image-1", more: tuple[str, ...] = ()) -> Result:
    words = [word for overlay in overlays for word in ("--overlay", str(overlay))]
    return trees.run(toy, "base", "add", "--offline", "--json", "--from", toy.tree, "--id", base, *words, *more)


def whole_way(toy: Toy, base: str = "image-1") -> None:
    """Level by level up, down, checked and attested; the image must be as before, byte for byte."""
    before = trees.snapshot(toy.tree, times=False)
    for level, name in enumerate(toys.LEVELS, 1):
        assert trees.apply(toy, "--to", name).code == 0
        told = trees.status(toy, "--json").table["result"]["status"]
        assert (told["base"], told["level"]) == (base, level)
        assert trees.check(toy, "--full").code == 0
    assert trees.apply(toy).code == 3
    assert trees.revert(toy, "--to", "alpha-first").code == 0
    assert trees.revert(toy).code == 0
    assert trees.snapshot(toy.tree, times=False) == before
    assert trees.check(toy, "--expect", "base", "--full").code == 0


@pytest.mark.parametrize("recorded", [False, True], ids=["RECORD of the release", "RECORD of the image"])
def test_an_overlay_on_a_file_that_no_patch_touches(toy: Toy, recorded: bool) -> None:
    data = b"__version__ = version = '0.5.19'\nIMAGE = 1\n"
    edit(toy, UNTOUCHED, data, recorded=recorded)
    done = add(toy, UNTOUCHED)
    assert done.code == 0, done.out
    assert done.table["result"] == {"base": "image-1", "overlay": {UNTOUCHED: str(Identity.of(data))}}
    # By SHA-256 alone: the bundle keeps no byte of it.
    assert not (toy.bundle / bases.OVERLAYS).exists()
    assert trees.run(toy, "pin", "--offline").code == 3
    whole_way(toy)
    edit(toy, UNTOUCHED, data + b"more\n")
    assert trees.status(toy, "--json").table["result"]["status"]["level"] == 0, "the release's own pins hold"
    assert trees.check(toy, "--full").code == 1


@pytest.mark.parametrize("recorded", [False, True], ids=["RECORD of the release", "RECORD of the image"])
def test_an_overlay_on_a_touched_file_outside_the_hunks_has_pins_of_its_own(toy: Toy, recorded: bool) -> None:
    edit(toy, ENGINE, OUTSIDE, recorded=recorded)
    assert trees.status(toy).code == 1
    assert add(toy, toy.tree / ENGINE).code == 0
    bundle = manifest.load(toy.bundle)
    image, release = (bundle.pins(bundle.bases[name]) for name in ("image-1", toys.BASE_ID))
    assert image.paths[ENGINE][0] == Identity.of(OUTSIDE)
    assert not set(image.paths[ENGINE]) & set(release.paths[ENGINE])
    assert image.levels == release.levels
    whole_way(toy)
    assert trees.apply(toy).code == 0
    assert (toy.tree / ENGINE).read_bytes() == toys.ENGINE_BETA.replace(b"engine = 20\n", b"engine = 2020\n")


@pytest.mark.parametrize(
    ("data", "patch", "line"),
    [
        (INSIDE, "alpha-first", b"@@ -27,7"),
        (toys.ENGINE.replace(b"engine = 3\n", b"engine = 33\n"), "alpha-first", b"@@ -3,6"),
        (b"# one line more\n" + toys.ENGINE, "alpha-first", b"@@ -3,6"),
    ],
    ids=["context below a change", "context above a change", "everything moved by a line"],
)
def test_an_overlay_inside_a_hunk_is_refused_by_the_name_of_patch_and_hunk(
    toy: Toy, data: bytes, patch: str, line: bytes
) -> None:
    edit(toy, ENGINE, data)
    before = trees.snapshot(toy.bundle)
    done = add(toy, ENGINE)
    assert (done.code, done.reason) == (1, "context-differs")
    raw = (toy.bundle / f"patches/prefill/{patch}.patch").read_bytes().split(b"\n")
    number = next(number for number, text in enumerate(raw, 1) if text.startswith(line))
    assert done.table["error"]["where"] == f"image-1: the hunk at patches/prefill/{patch}.patch:{number}: {ENGINE}"
    assert trees.snapshot(toy.bundle) == before


def test_a_file_that_a_patch_removes_may_not_be_another_in_the_image(toy: Toy) -> None:
    edit(toy, OLD, toys.OLD + b"image = 1\n")
    done = add(toy, OLD)
    assert (done.code, done.reason) == (1, "no-context")
    assert "gamma-third.patch" in done.table["error"]["where"]


def test_every_difference_must_be_declared(toy: Toy) -> None:
    edit(toy, UNTOUCHED, b"image = 1\n")
    edit(toy, "sglang/srt/__init__.py", b"image = 2\n")
    (toy.tree / TOOL).unlink()
    before = trees.snapshot(toy.bundle)
    done = add(toy, UNTOUCHED)
    assert (done.code, done.reason) == (1, "not-attested")
    assert done.table["error"]["found"] == f"2 differ: {TOOL} (missing), sglang/srt/__init__.py"
    assert trees.snapshot(toy.bundle) == before


def test_a_mode_of_a_touched_file_is_a_difference_too(toy: Toy) -> None:
    edit(toy, UNTOUCHED, b"image = 1\n")
    (toy.tree / ENGINE).chmod(0o755)
    done = add(toy, UNTOUCHED)
    assert (done.code, done.table["error"]["found"]) == (1, f"1 differ: {ENGINE}")
    assert add(toy, UNTOUCHED, ENGINE).code == 0
    whole_way(toy)


def test_a_tree_without_record_is_compared_file_by_file(tmp_path: Path) -> None:
    toy = toys.make(tmp_path, with_record=False)
    edit(toy, ENGINE, OUTSIDE)
    edit(toy, UNTOUCHED, toys.BASE[UNTOUCHED].data + b"image = 1\n")
    assert add(toy, ENGINE).reason == "not-attested"
    assert add(toy, ENGINE, UNTOUCHED).code == 0
    assert trees.apply(toy).code == 0
    assert trees.status(toy, "--json").table["result"]["status"]["base"] == "image-1"
    assert trees.revert(toy).code == 0


def missing(toy: Toy) -> None:
    (toy.tree / UNTOUCHED).unlink()


def linked(toy: Toy) -> None:
    (toy.tree / UNTOUCHED).unlink()
    (toy.tree / UNTOUCHED).symlink_to("elsewhere")


def patched(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    edit(toy, UNTOUCHED, b"image = 1\n")


def interrupted(toy: Toy) -> None:
    (toy.tree / ".patchbundle-journal").write_bytes(b"{}")


def other_record(toy: Toy) -> None:
    edit(toy, UNTOUCHED, b"image = 1\n", recorded=True)
    edit(toy, UNTOUCHED, b"image = 2\n")


def as_it_is(toy: Toy) -> None:
    return None


def edited(toy: Toy) -> None:
    edit(toy, UNTOUCHED, b"image = 1\n")


REFUSED: dict[str, tuple[Callable[[Toy], None], list[str], str, str]] = {
    "a missing file": (missing, [UNTOUCHED], "image-1", "manifest"),
    "a link": (linked, [UNTOUCHED], "image-1", "manifest"),
    "the release's own bytes": (as_it_is, [UNTOUCHED], "image-1", "manifest"),
    "nothing declared of the release": (as_it_is, [], "image-1", "manifest"),
    "nothing declared of an image": (edited, [], "image-1", "not-attested"),
    "a file that the release does not have": (edited, ["sglang/more.py"], "image-1", "manifest"),
    "metadata": (edited, [f"{toys.INFO}/METADATA"], "image-1", "manifest"),
    "a way out of the tree": (edited, ["../tree/sglang/_version.py"], "image-1", "name"),
    "another place": (edited, ["/sglang/_version.py"], "image-1", "name"),
    "a patched tree": (patched, [UNTOUCHED], "image-1", "not-expected"),
    "an interrupted tree": (interrupted, [UNTOUCHED], "image-1", "recovery-needed"),
    "a RECORD of neither": (other_record, [UNTOUCHED], "image-1", "record"),
    "a taken id": (edited, [UNTOUCHED], toys.BASE_ID, "manifest"),
    "an id with a path": (edited, [UNTOUCHED], "../x", "manifest"),
    "an empty id": (edited, [UNTOUCHED], "", "manifest"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_bundle_and_tree_as_they_were(toy: Toy, case: str) -> None:
    prepare, overlays, base, reason = REFUSED[case]
    prepare(toy)
    before = trees.snapshot(toy.bundle), trees.snapshot(toy.tree)
    done = add(toy, *overlays, base=base)
    assert done.code in (1, 4)
    assert done.reason == reason, done.out
    assert (trees.snapshot(toy.bundle), trees.snapshot(toy.tree)) == before


def test_a_dry_run_tries_all_of_it_and_writes_nothing(toy: Toy) -> None:
    edit(toy, ENGINE, OUTSIDE)
    before = trees.snapshot(toy.bundle)
    assert add(toy, ENGINE, more=("-n",)).code == 0
    assert trees.snapshot(toy.bundle) == before
    edit(toy, ENGINE, INSIDE)
    assert add(toy, ENGINE, more=("-n",)).reason == "context-differs"


def test_two_images_and_the_release_are_told_apart(toy: Toy, tmp_path: Path) -> None:
    other = toys.make(tmp_path / "other")
    edit(toy, ENGINE, OUTSIDE)
    assert add(toy, ENGINE, base="one").code == 0
    edit(toy, UNTOUCHED, toys.BASE[UNTOUCHED].data + b"image = 1\n")
    assert add(toy, ENGINE, UNTOUCHED, base="two").code == 0
    here = Toy(toy.bundle, other.tree, toy.cache)
    for edits, base in (((), toys.BASE_ID), ((ENGINE,), "one"), ((ENGINE, UNTOUCHED), "two")):
        for path in edits:
            (other.tree / path).write_bytes((toy.tree / path).read_bytes())
        for verb in (trees.apply, trees.revert):
            assert verb(here).code == 0
            assert trees.status(here, "--json").table["result"]["status"]["base"] == base
    rows = trees.run(toy, "roundtrip", "--offline", "--json").table["result"]["rows"]
    assert [row["base"] for row in rows] == [toys.BASE_ID]


def test_a_patch_that_comes_to_touch_an_overlay_asks_for_the_image_again(toy: Toy) -> None:
    path = "sglang/__init__.py"
    edit(toy, path, b"IMAGE = 1\n")
    assert add(toy, path).code == 0
    place = toy.bundle / "patches/prefill/gamma-third.patch"
    place.write_bytes(place.read_bytes() + toys.diff(path, File(b""), File(b"# ours\n")))
    done = trees.run(toy, "pin", "--offline", "--json")
    assert (done.code, done.reason) == (1, "manifest")
    assert done.table["error"]["where"] == f"{bases.OVERLAYS}/image-1/{path}"
    assert "base add" in done.table["error"]["next"]


def damage(toy: Toy, old: str, new: str) -> None:
    place = toy.bundle / BASES
    text = place.read_text()
    assert old in text
    place.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f'from = "{toys.BASE_ID}"', 'from = "image-1"'),
        (f'from = "{toys.BASE_ID}"', "from = 1"),
        (f'from = "{toys.BASE_ID}"', f'from = "{toys.BASE_ID}"\nrole = "decode"'),
        ('found = "100644 ', 'found = "100600 '),
        ('found = "100644 ', 'found = "absent"\nmore = "'),
        (f'overlay."{ENGINE}"', 'overlay."../x"'),
        (f'overlay."{ENGINE}"', f'overlay."{toys.HOME}/x.py"'),
    ],
)
def test_a_damaged_table_is_refused(toy: Toy, old: str, new: str) -> None:
    edit(toy, ENGINE, OUTSIDE)
    assert add(toy, ENGINE).code == 0
    damage(toy, old, new)
    with pytest.raises(BundleError) as caught:
        bases.load(toy.bundle / BASES)
    assert caught.value.reason in (Reason.MANIFEST, Reason.NAME)


def test_the_bytes_of_an_overlay_are_pinned_and_belong_to_a_base(toy: Toy) -> None:
    edit(toy, ENGINE, OUTSIDE)
    assert add(toy, ENGINE).code == 0
    place = toy.bundle / bases.OVERLAYS / "image-1" / ENGINE
    assert place.read_bytes() == OUTSIDE
    place.write_bytes(INSIDE)
    assert trees.status(toy, "--json").reason == "artifact"
    assert trees.run(toy, "pin", "--offline", "--json").reason == "manifest"
    place.write_bytes(OUTSIDE)
    (place.parent / "more.py").write_bytes(b"")
    assert trees.status(toy, "--json").reason == "orphan"


def test_a_lock_that_records_an_unpinned_file_is_refused(toy: Toy) -> None:
    edit(toy, ENGINE, OUTSIDE)
    assert add(toy, ENGINE).code == 0
    from patchbundle import lock

    table = json.loads((toy.bundle / manifest.LOCK).read_bytes())
    table["bases"]["image-1"]["recorded"]["sglang/none.py"] = str(Identity.of(b""))
    del table["content"]
    from patchbundle import canonical

    with pytest.raises(BundleError) as caught:
        lock.load(canonical.sealed(table), "here")
    assert caught.value.reason is Reason.LOCK


def test_the_bundle_may_be_killed_between_two_files_and_pin_mends_it(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(toy, ENGINE, OUTSIDE)
    from patchbundle import disk

    real, written = disk.write_file, []

    def stop(path: Path, data: bytes) -> None:
        if path == toy.bundle / manifest.LOCK:
            raise OSError(os.strerror(28))
        written.append(path)
        real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_file", stop)
        assert add(toy, ENGINE).code == 6
    assert trees.status(toy, "--json").reason == "artifact"
    assert trees.run(toy, "pin", "--offline").code == 0
    whole_way(toy)
