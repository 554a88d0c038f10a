"""Every line of "bad input": one clear error, its exit code, and the tree as it was, to the last time stamp."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from patchbundle import journal, transaction
from patchbundle.disk import Disk
from patchbundle.errors import Exit, Reason
from tests import toy as toys
from tests import trees
from tests.toy import Toy
from tests.trees import Result, snapshot

ENGINE = "sglang/srt/engine.py"
TOUCHED_AT_BASE = (ENGINE, "sglang/srt/launch.sh", "sglang/srt/layers/pool.py", "sglang/srt/old.py")
TOUCHED_ON_TOP = (
    ENGINE,
    "sglang/srt/launch.sh",
    "sglang/srt/layers/pool.py",
    "sglang/srt/layers/wired.py",
    "sglang/srt/layers/deep/er/notes.txt",
    *(f"{toys.HOME}/{name}" for name in ("__init__.py", "gates.py", "alpha.py", "kernels/beta.cu")),
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


@pytest.fixture
def applied(toy: Toy) -> Toy:
    assert trees.apply(toy).code == 0
    return toy


def refused(toy: Toy, command: Callable[[], Result], reason: Reason, code: Exit = Exit.REFUSED) -> Result:
    """Run it; it must refuse for this reason alone and touch nothing. Returns what it said."""
    before = snapshot(toy.tree)
    result = command()
    assert snapshot(toy.tree) == before
    assert result.code == code, result
    assert result.err.count("error: ") == 1, result
    assert f"[{reason.name.lower().replace('_', '-')}]" in result.err
    assert result.err.rstrip().splitlines()[-1].startswith("  next:")
    return result


def all_refuse(toy: Toy, reason: Reason, path: str) -> None:
    """Every verb that asks for a known level names the path and refuses; status says so and goes on."""
    for command in (
        lambda: trees.apply(toy),
        lambda: trees.apply(toy, "--dry-run"),
        lambda: trees.revert(toy),
        lambda: trees.run(toy, "plan", "--root", toy.tree),
        lambda: trees.check(toy),
    ):
        assert path in refused(toy, command, reason).err
    told = trees.status(toy)
    assert told.code == Exit.REFUSED
    assert path in told.out
    assert "drifted; nearest is" in told.out


# The target.


def test_wrong_version(toy: Toy) -> None:
    metadata = toy.tree / toys.INFO / "METADATA"
    metadata.write_bytes(metadata.read_bytes().replace(b"Version: 0.5.19", b"Version: 0.5.18"))
    said = refused(toy, lambda: trees.apply(toy), Reason.WRONG_VERSION).err
    assert "sglang 0.5.19 (prefill)" in said
    assert "sglang 0.5.18" in said


@pytest.mark.parametrize("path", TOUCHED_AT_BASE)
def test_one_byte_off_in_any_touched_file_of_the_base(toy: Toy, path: str) -> None:
    place = toy.tree / path
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.write_bytes(data)
    all_refuse(toy, Reason.DRIFT, path)


@pytest.mark.parametrize("path", TOUCHED_ON_TOP)
def test_one_byte_off_in_any_touched_file_of_a_patched_tree(applied: Toy, path: str) -> None:
    place = applied.tree / path
    place.write_bytes(place.read_bytes()[:-1] + b"~")
    all_refuse(applied, Reason.DRIFT, path)


def test_one_byte_off_in_the_record_line_of_a_touched_file(applied: Toy) -> None:
    place = applied.tree / toys.RECORD
    place.write_bytes(place.read_bytes().replace(b"engine.py,sha256=", b"engine.py,sha256=A"))
    assert "engine.py" in refused(applied, lambda: trees.revert(applied), Reason.RECORD).err
    assert trees.status(applied).code == Exit.REFUSED


@pytest.mark.parametrize("path", TOUCHED_AT_BASE)
def test_missing_file(toy: Toy, path: str) -> None:
    (toy.tree / path).unlink()
    all_refuse(toy, Reason.DRIFT, path)
    # The removal of old.py is what the last patch does: to miss it is another level's state for this one file.
    words = {file["path"]: file["word"] for file in trees.status(toy, "--json").table["result"]["status"]["files"]}
    assert words[path] == "missing"


@pytest.mark.parametrize("name", ["extra.py", "extra", ".hidden", "kernels/extra.cu"])
def test_extra_file_in_a_folder_of_ours(applied: Toy, name: str) -> None:
    (applied.tree / toys.HOME / name).write_bytes(b"x")
    all_refuse(applied, Reason.DRIFT, name)


@pytest.mark.parametrize("path", [toys.HOME, "sglang/srt/layers/wired.py", "sglang/srt/layers/deep"])
def test_extra_file_where_the_series_will_create_one(toy: Toy, path: str) -> None:
    (toy.tree / path).write_bytes(b"x")
    all_refuse(toy, Reason.DRIFT, path)


def test_extra_folder_where_the_series_will_create_one(toy: Toy) -> None:
    (toy.tree / toys.HOME).mkdir()
    all_refuse(toy, Reason.DRIFT, toys.HOME)


@pytest.mark.parametrize("name", ["engine2.py", "Engine.py", "engine.PY"])
def test_renamed_file(toy: Toy, name: str) -> None:
    place = toy.tree / ENGINE
    place.rename(place.with_name(name))
    all_refuse(toy, Reason.DRIFT, ENGINE)


def as_link(path: Path) -> None:
    moved = path.with_name("moved-away")
    path.rename(moved)
    path.symlink_to(moved.name)


def as_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("path", [*TOUCHED_AT_BASE, toys.RECORD])
@pytest.mark.parametrize("replace", [as_link, as_directory, as_fifo])
def test_file_replaced_by_link_directory_or_fifo(toy: Toy, path: str, replace: Callable[[Path], None]) -> None:
    replace(toy.tree / path)
    reason = Reason.RECORD if path == toys.RECORD else Reason.DRIFT
    for command in (lambda: trees.apply(toy), lambda: trees.check(toy), lambda: trees.apply(toy, "-n")):
        said = refused(toy, command, reason).err
        assert path in said
        assert {"as_link": "link", "as_directory": "folder", "as_fifo": "special"}[replace.__name__] in said


def test_file_replaced_by_a_link_to_nowhere(toy: Toy) -> None:
    as_dangling_link(toy.tree / ENGINE)
    all_refuse(toy, Reason.DRIFT, ENGINE)


@pytest.mark.parametrize("replace", [as_link, as_dangling_link, as_directory, as_fifo])
def test_receipt_replaced_by_link_directory_or_fifo(applied: Toy, replace: Callable[[Path], None]) -> None:
    replace(applied.tree / toys.HOME / "receipt.json")
    for command in (lambda: trees.apply(applied), lambda: trees.revert(applied), lambda: trees.check(applied)):
        # Where it is a link to its old self moved away, that one is the first unexpected path.
        refused(applied, command, Reason.DRIFT)


@pytest.mark.parametrize("parent", ["sglang/srt/layers", "sglang/srt", "sglang"])
def test_parent_a_link(toy: Toy, parent: str) -> None:
    as_link(toy.tree / parent)
    said = refused(toy, lambda: trees.apply(toy), Reason.DRIFT).err
    assert f"a link at {parent}" in said


@pytest.mark.parametrize(("path", "mode"), [(ENGINE, 0o755), ("sglang/srt/launch.sh", 0o744)])
def test_wrong_mode(toy: Toy, path: str, mode: int) -> None:
    (toy.tree / path).chmod(mode)
    all_refuse(toy, Reason.DRIFT, path)
    words = {file["path"]: file["word"] for file in trees.status(toy, "--json").table["result"]["status"]["files"]}
    # launch.sh with an executable bit is what a later level has: the word says which.
    assert words[path] in {"wrong mode", "as at level 2"}


@pytest.mark.parametrize("path", [toys.RECORD, f"{toys.HOME}/receipt.json"])
def test_wrong_mode_of_a_file_that_only_the_tool_edits(applied: Toy, path: str) -> None:
    (applied.tree / path).chmod(0o755)
    refused(applied, lambda: trees.revert(applied), Reason.RECORD if path == toys.RECORD else Reason.DRIFT)


# The bundle.


@pytest.mark.parametrize("path", ["patches/prefill/alpha-first.patch", "sources/prefill/alpha.py"])
def test_patch_or_source_edited(toy: Toy, path: str) -> None:
    place = toy.bundle / path
    place.write_bytes(place.read_bytes().replace(b"start", b"stirt"))
    assert path in refused(toy, lambda: trees.apply(toy), Reason.ARTIFACT).err


@pytest.mark.parametrize("old", [b'"schema": 1', b"0", b"100644", b"alpha-first", b"\n"])
def test_lock_edited(toy: Toy, old: bytes) -> None:
    place = toy.bundle / "patches" / "pins.lock"
    data = place.read_bytes()
    assert old in data
    place.write_bytes(data.replace(old, old[:-1] + bytes([old[-1] ^ 1]), 1))
    refused(toy, lambda: trees.apply(toy), Reason.LOCK)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("config/bases.toml", Reason.MANIFEST),
        ("patches/pins.lock", Reason.LOCK),
        ("patches/series.toml", Reason.MANIFEST),
        ("sources/prefill/alpha.py", Reason.MANIFEST),
    ],
)
def test_a_file_of_the_bundle_that_is_a_fifo_or_huge_is_refused_at_once(toy: Toy, path: str, reason: Reason) -> None:
    place = toy.bundle / path
    with place.open("r+b") as stream:
        stream.truncate(1 << 40)
    assert "too large" in refused(toy, lambda: trees.apply(toy), reason).err
    as_fifo(place)
    # Where a link would do, so would a fifo: the look for what nobody names finds both first.
    refused(toy, lambda: trees.apply(toy), Reason.MANIFEST if path.startswith("config") else Reason.ORPHAN)


def test_lock_missing(toy: Toy) -> None:
    (toy.bundle / "patches" / "pins.lock").unlink()
    assert "pin" in refused(toy, lambda: trees.apply(toy), Reason.LOCK).err


@pytest.mark.parametrize("drop", [0, 1])
def test_lock_and_series_disagree(toy: Toy, drop: int) -> None:
    """Of two valid bundles each gets the other's lock."""
    other = toys.make(toy.bundle.parent / "other", entries=toys.series()[:2])
    one, two = (toy, other) if drop == 0 else (other, toy)
    shutil.copy(one.bundle / "patches" / "pins.lock", two.bundle / "patches" / "pins.lock")
    refused(two, lambda: trees.apply(two), Reason.ARTIFACT)


def test_lock_for_another_base_than_the_series(toy: Toy) -> None:
    config = toy.bundle / "config" / "bases.toml"
    before = (toy.bundle / "patches" / "pins.lock").read_bytes()
    config.write_text(config.read_text().replace("sglang-0.5.19]", "x]").replace('"sglang-0.5.19"', '"sglang-other"'))
    toy.pin()
    config.write_text(config.read_text().replace('"sglang-other"', '"sglang-0.5.19"'))
    assert (toy.bundle / "patches" / "pins.lock").read_bytes() != before
    refused(toy, lambda: trees.apply(toy), Reason.ARTIFACT)


BINARY = b"diff --git a/sglang/x.bin b/sglang/x.bin\nnew file mode 100644\nGIT binary patch\nliteral 1\nIcmZPo0000\n\n"
RENAME = (
    b"diff --git a/sglang/a.py b/sglang/b.py\nsimilarity index 100%\nrename from sglang/a.py\nrename to sglang/b.py\n"
)
HEAD = b"diff --git a/sglang/srt/old.py b/sglang/srt/old.py\n--- a/sglang/srt/old.py\n+++ b/sglang/srt/old.py\n"
HUNK = b"@@ -1,3 +1,4 @@\n old = 1\n old = 2\n old = 3\n+old = 4\n"
OVERLAP = HEAD + b"@@ -1,2 +1,3 @@\n+zero = 0\n old = 1\n old = 2\n@@ -2,2 +3,3 @@\n old = 2\n old = 3\n+old = 4\n"


def named(name: bytes) -> bytes:
    return (HEAD + HUNK).replace(b"sglang/srt/old.py", name)


@pytest.mark.parametrize(
    ("diff", "reason"),
    [
        pytest.param(HEAD + b"@@ what @@\n+x\n", Reason.MALFORMED, id="malformed"),
        pytest.param(BINARY, Reason.BINARY, id="binary"),
        pytest.param((HEAD + HUNK).replace(b"\n", b"\r\n"), Reason.LINE_ENDINGS, id="CRLF-damaged"),
        pytest.param((HEAD + HUNK)[:-1], Reason.TRUNCATED, id="truncated in its last line"),
        pytest.param(HEAD + HUNK[: HUNK.index(b" old = 3")], Reason.HUNK_COUNT, id="truncated between two lines"),
        pytest.param(HEAD, Reason.NO_HUNKS, id="truncated after the header"),
        pytest.param(RENAME, Reason.RENAME, id="renaming"),
        pytest.param(OVERLAP, Reason.HUNK_ORDER, id="overlapping"),
        pytest.param(b"diff --git a/sglang/srt/old.py b/sglang/srt/old.py\n", Reason.NO_HUNKS, id="zero-hunk"),
        pytest.param(HEAD + HUNK + b"and some more\n", Reason.TRAILING_JUNK, id="trailing junk"),
        pytest.param(b"", Reason.EMPTY, id="empty"),
        pytest.param(named(b"sglang/../../old.py"), Reason.NAME, id="a name with .."),
        pytest.param(
            named(b"/sglang/old.py").replace(b"a//", b"/").replace(b"b//", b"/"), Reason.NAME, id="absolute name"
        ),
        pytest.param(
            b'diff --git "a/sglang/\\056\\056/x" "b/sglang/\\056\\056/x"\n--- "a/sglang/\\056\\056/x"\n'
            b'+++ "b/sglang/\\056\\056/x"\n' + HUNK,
            Reason.NAME,
            id="quoted name",
        ),
    ],
)
def test_malformed_diffs(toy: Toy, diff: bytes, reason: Reason) -> None:
    place = toy.bundle / "patches" / "prefill" / "beta-second.patch"
    header = toys.header()
    place.write_bytes((header.replace(b"\n", b"\r\n") if b"\r" in diff else header) + diff)
    commands: list[Callable[[], Result]] = [
        partial(trees.apply, toy),
        partial(trees.run, toy, "plan", "--root", toy.tree),
        partial(trees.run, toy, "pin", "--offline"),
    ]
    for command in commands:
        assert "beta-second.patch" in refused(toy, command, reason).err
    assert not (toy.tree.parent / "old.py").exists()


# The machine.


@contextmanager
def nobodys(applied: bool = False) -> Iterator[Toy]:
    """A toy whose tree belongs to a user without rights (or to us, if we have none)."""
    with trees.open_place() as place:
        made = toys.make(place / "toy")
        if applied:
            trees.change(made, "apply")
        trees.give_away(made.tree)
        yield made


@pytest.mark.parametrize("folder", ["", "sglang/srt", "sglang/srt/layers", toys.INFO])
def test_unwritable_directory_named_before_anything_is_written(folder: str) -> None:
    with nobodys() as toy:
        (toy.tree / folder).chmod(0o555)
        for more in ([], ["--dry-run"]):
            said = refused(toy, partial(trees.unprivileged, partial(trees.apply, toy, *more)), Reason.NOT_WRITABLE).err
            assert f"where:    {toy.tree / folder}".rstrip("/") + "\n" in said
            assert "dr-xr-xr-x" in said


@pytest.mark.parametrize("folder", ["sglang/srt", "sglang/srt/layers/deep", f"{toys.HOME}/__pycache__"])
def test_unwritable_directory_of_a_folder_that_goes(folder: str) -> None:
    """The folder above one that revert removes, or the bytecode in it."""
    with nobodys(applied=True) as toy:
        place = toy.tree / folder
        if not place.exists():
            place.mkdir()
            (place / "alpha.cpython-311.pyc").write_bytes(b"\0" * 16)
            trees.give_away(place)
        place.chmod(0o555)
        said = refused(toy, lambda: trees.unprivileged(lambda: trees.revert(toy)), Reason.NOT_WRITABLE).err
        assert f"where:    {place}\n" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of somebody else's")
def test_file_of_another_owner() -> None:
    with nobodys() as toy:
        os.chown(toy.tree / ENGINE, 0, 0)
        said = refused(toy, lambda: trees.unprivileged(lambda: trees.apply(toy)), Reason.OWNER).err
        assert ENGINE in said


@contextmanager
def mounted(options: str) -> Iterator[Path]:
    with trees.open_place() as place:
        # A small one of our own: the size is rounded up to pages.
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True, capture_output=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True, capture_output=True)


def can_mount() -> bool:
    try:
        with mounted("size=64k"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@needs_root
@pytest.mark.parametrize("options", ["size=256k", "size=8m,nr_inodes=44"])
def test_no_space_on_a_real_small_disk(tmp_path: Path, options: str) -> None:
    if not can_mount():
        pytest.skip("mounting is not allowed here")
    made = toys.make(tmp_path / "toy")
    with mounted(options) as place:
        moved = Toy(made.bundle, place / "tree", made.cache)
        shutil.copytree(made.tree, moved.tree, symlinks=True)
        said = refused(moved, lambda: trees.apply(moved), Reason.NO_SPACE).err
        assert "inodes free" in said
        assert trees.status(moved).code == 0


def test_no_space_told_by_the_file_system(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstatvfs

    def full(fd: int) -> os.statvfs_result:
        values = list(real(fd))
        values[4] = 1  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "fstatvfs", full)
    assert "bytes" in refused(toy, lambda: trees.apply(toy), Reason.NO_SPACE).err


@needs_root
def test_read_only_tree_where_readers_still_work(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("mounting is not allowed here")
    made = toys.make(tmp_path / "toy")
    with mounted("size=4m") as place:
        moved = Toy(made.bundle, place / "tree", made.cache)
        shutil.copytree(made.tree, moved.tree, symlinks=True)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        said = refused(moved, lambda: trees.apply(moved), Reason.NOT_WRITABLE).err
        assert "read-only file system" in said
        before = snapshot(moved.tree)
        assert trees.status(moved).code == 0
        assert trees.run(moved, "plan", "--root", moved.tree).code == 0
        assert trees.check(moved, "--full", "--expect", "base").code == 0
        assert trees.revert(moved).code == Exit.NOTHING_TO_DO
        assert snapshot(moved.tree) == before


def test_readers_need_no_right_to_write() -> None:
    with trees.open_place() as place:
        toy = toys.make(place / "toy")
        for path in [toy.tree, *toy.tree.rglob("*")]:
            path.chmod(0o555 if path.is_dir() or (path.suffix == ".sh" and path.stat().st_mode & 0o100) else 0o444)
        before = snapshot(toy.tree)
        for command in (
            lambda: trees.status(toy),
            lambda: trees.run(toy, "plan", "--root", toy.tree),
            lambda: trees.check(toy, "--full"),
        ):
            result = trees.unprivileged(command)
            assert result.code == 0, result
        assert snapshot(toy.tree) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="root's files are unreadable to others alone")
def test_a_file_that_cannot_be_read() -> None:
    with trees.open_place() as place:
        toy = toys.make(place / "toy")
        (toy.tree / ENGINE).chmod(0o600)
        for command in (lambda: trees.status(toy), lambda: trees.apply(toy)):
            said = refused(toy, partial(trees.unprivileged, command), Reason.UNREADABLE, Exit.FAILED).err
            assert ENGINE in said


def test_two_candidates(toy: Toy) -> None:
    outer = toy.tree / "python"
    shutil.copytree(toy.tree / "sglang", outer / "sglang")
    said = refused(toy, lambda: trees.apply(toy), Reason.TWO_TARGETS).err
    assert str(toy.tree) in said
    assert str(outer) in said


def test_two_versions_of_metadata(toy: Toy) -> None:
    shutil.copytree(toy.tree / toys.INFO, toy.tree / "sglang-0.5.18.dist-info")
    assert "sglang-0.5.18" in refused(toy, lambda: trees.apply(toy), Reason.TWO_TARGETS).err


def test_second_writer(toy: Toy) -> None:
    with transaction.locked(toy.tree):
        for command in (
            lambda: trees.apply(toy),
            lambda: trees.revert(toy),
            lambda: trees.run(toy, "recover", "--root", toy.tree),
        ):
            refused(toy, command, Reason.BUSY, Exit.BUSY)
        # Readers do not mind.
        assert trees.status(toy).code == 0
        assert trees.apply(toy, "--dry-run").code == 0
    assert trees.apply(toy).code == 0


def test_reader_during_a_run_is_told_that_one_is_at_work_not_to_recover(toy: Toy) -> None:
    with transaction.locked(toy.tree):
        (toy.tree / journal.NAME).write_bytes(b"{}")
        refused(toy, lambda: trees.status(toy), Reason.BUSY, Exit.BUSY)
    refused(toy, lambda: trees.status(toy), Reason.RECOVERY_NEEDED, Exit.RECOVERY_NEEDED)


@pytest.mark.parametrize("name", [journal.NAME, journal.BESIDE])
def test_interrupted_earlier_run(toy: Toy, name: str) -> None:
    (toy.tree / name).write_bytes(b"")
    for command in (
        lambda: trees.apply(toy),
        lambda: trees.revert(toy),
        lambda: trees.status(toy),
        lambda: trees.run(toy, "plan", "--root", toy.tree),
        lambda: trees.check(toy),
    ):
        said = refused(toy, command, Reason.RECOVERY_NEEDED, Exit.RECOVERY_NEEDED).err
        assert f"tools/apply.py recover --root {toy.tree}" in said


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"phase": "commit"}', b"\xff", b"[" * 5000])
def test_damaged_journal(toy: Toy, data: bytes) -> None:
    (toy.tree / journal.NAME).write_bytes(data)
    command = lambda: trees.run(toy, "recover", "--root", toy.tree)  # noqa: E731
    refused(toy, command, Reason.JOURNAL, Exit.RECOVERY_NEEDED)


@pytest.mark.parametrize("replace", [as_link, as_directory, as_fifo])
def test_journal_replaced_by_link_directory_or_fifo(toy: Toy, replace: Callable[[Path], None]) -> None:
    (toy.tree / journal.NAME).write_bytes(b"")
    replace(toy.tree / journal.NAME)
    refused(toy, lambda: trees.run(toy, "recover", "--root", toy.tree), Reason.JOURNAL, Exit.RECOVERY_NEEDED)


def in_place(path: Path) -> None:
    path.write_bytes(b"somebody else's\n")


def by_rename(path: Path) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(b"somebody else's\n")
    beside.rename(path)


@pytest.mark.parametrize("swap", [in_place, by_rename, as_link, as_directory, as_fifo])
@pytest.mark.parametrize("path", [ENGINE, "sglang/srt/old.py"])
def test_target_swapped_between_check_and_write(toy: Toy, swap: Callable[[Path], None], path: str) -> None:
    """Swapped while the first new file is renamed into place: what is made is undone, what is theirs stays."""

    done: list[str] = []

    def at_the_first_rename(disk: Disk, name: str, where: str) -> None:
        if name == "rename" and not where.startswith(".patchbundle") and not done:
            done.append(where)
            swap(disk.root / path)

    before = snapshot(toy.tree, times=False)
    with pytest.raises(Exception, match="a file changed between the check and the write") as caught:
        trees.change(toy, "apply", disk_type=trees.hooked(at_the_first_rename))
    assert path in str(caught.value)
    assert getattr(caught.value, "exit_code", None) == Exit.REFUSED
    after = snapshot(toy.tree, times=False)
    theirs = {name for name in after.keys() | before.keys() if after.get(name) != before.get(name)}
    assert theirs <= {path, "sglang/srt/moved-away"}
    if swap in (in_place, by_rename):
        assert (toy.tree / path).read_bytes() == b"somebody else's\n"


def test_file_put_where_one_was_just_removed_keeps_the_old_bytes_for_recovery(toy: Toy) -> None:
    """The old file is gone from its place by our doing: its bytes must survive beside it."""
    old = toy.tree / "sglang/srt/old.py"

    def then(disk: Disk, name: str, path: str) -> None:
        if name == "unlink" and path == "sglang/srt/old.py":
            in_place(old)

    with pytest.raises(Exception, match="an earlier run was interrupted"):
        trees.change(toy, "apply", disk_type=trees.hooked(after=then))
    assert old.read_bytes() == b"somebody else's\n"
    result = trees.run(toy, "recover", "--root", toy.tree)
    assert result.code == Exit.RECOVERY_NEEDED
    assert "sglang/srt/old.py" in result.err
    old.unlink()
    assert trees.run(toy, "recover", "--root", toy.tree, "--back").code == 0
    assert old.read_bytes() == toys.OLD
    assert trees.level(toy) == 0
