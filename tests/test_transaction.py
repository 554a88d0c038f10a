"""A transaction is all or nothing, and says what it did. Where it is killed or failed at every call: test_faults.

``small`` is a transaction with every kind of step: a file changed, one made in new folders, one removed, a
source, a receipt and RECORD changed, stale bytecode dropped. Old and new are compared path by path: bytes, exact
modes, owners, folders. Bytecode is left out of that: a cache that is missing changes nothing.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from lab.faults.scene import Image, image_of, lay
from patchbundle import bytecode, journal, manifest, preflight, transaction, work
from patchbundle import target as target_module
from patchbundle.disk import Disk
from patchbundle.errors import BundleError, Exit, Reason
from patchbundle.identity import File
from patchbundle.manifest import Bundle
from patchbundle.tree import Tree
from tests import toy as toys
from tests import trees
from tests.toy import Toy
from tests.trees import Killed, Snapshot, forked, hooked

ENGINE = "sglang/srt/engine.py"
NOTES = "sglang/srt/layers/deep/er/notes.txt"
DIRECTIONS = ("apply", "revert")
_T = TypeVar("_T")


@dataclass
class Scene:
    """A toy, loaded once, with a copy of its tree before and after, and a place to work in."""

    toy: Toy
    bundle: Bundle
    images: dict[str, Path]
    states: dict[str, Snapshot]
    tree: Path

    def start(self, direction: str) -> None:
        """Put the tree at the old state of a direction."""
        self.copy(self.images[direction])

    def copy(self, image: Path) -> None:
        shutil.rmtree(self.tree, ignore_errors=True)
        shutil.copytree(image, self.tree, symlinks=True)

    def change(
        self, direction: str, kind: type[Disk] = Disk, progress: transaction.Progress = lambda _: None
    ) -> transaction.Outcome:
        target = target_module.discover(self.bundle, root=self.tree)
        with transaction.locked(self.tree, kind) as disk:
            state, plan = work.make_plan(self.bundle, target, direction, None, tree=disk)
            return work.execute(self.bundle, target, state, plan, progress, disk=disk)

    def recover(self, back: bool, kind: type[Disk] = Disk) -> str:
        return transaction.recover(self.tree, back=back, disk_type=kind)[0]

    def seen(self) -> Snapshot:
        return without_bytecode(trees.snapshot(self.tree, times=False))

    def where(self, direction: str) -> str:
        """Old or new, by the bytes; and ``status`` must agree, and nothing of ours may lie about."""
        seen = self.seen()
        assert not [name for name in seen if ".patchbundle" in name]
        with Tree(self.tree) as tree:
            level = work.look(self.bundle, target_module.discover(self.bundle, root=self.tree), tree).level
        old, new = (0, 1) if direction == "apply" else (1, 0)
        if seen == self.states[direction]:
            assert level == old
            return "old"
        assert seen == self.states[DIRECTIONS[1 - DIRECTIONS.index(direction)]]
        assert level == new
        return "new"


def without_bytecode(snapshot: Snapshot) -> Snapshot:
    return {name: item for name, item in snapshot.items() if "__pycache__" not in name}


def small_entry() -> toys.Entry:
    return toys.Entry(
        "only-one",
        toys.diff(ENGINE, File(toys.ENGINE), File(toys.ENGINE_ALPHA))
        + toys.diff(NOTES, None, File(toys.NOTES))
        + toys.diff("sglang/srt/old.py", File(toys.OLD), None),
        ("shared/__init__.py",),
    )


def make_scene(folder: Path, entry: toys.Entry, sources: dict[str, bytes], with_record: bool) -> Scene:
    toy = toys.make(folder, entries=[entry], sources=sources, with_record=with_record)
    caches = toy.tree / "sglang/srt/__pycache__"
    caches.mkdir()
    (caches / "engine.cpython-311.pyc").write_bytes(b"\0" * 16)
    (toy.tree / ENGINE).chmod(0o640)
    images = {"apply": folder / "old", "revert": folder / "new"}
    scene = Scene(toy, manifest.load(toy.bundle), images, {}, toy.tree)
    for direction in DIRECTIONS:
        scene.states[direction] = scene.seen()
        shutil.copytree(toy.tree, images[direction], symlinks=True)
        if direction == "apply":
            scene.change("apply")
            # What an interpreter would have left by the time of the revert.
            for place in (
                caches / "engine.cpython-311.pyc",
                toy.tree / toys.HOME / "__pycache__/__init__.cpython-311.pyc",
            ):
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(b"\0" * 16)
    return scene


@pytest.fixture(scope="module")
def small() -> Iterator[Scene]:
    sources = {"shared/__init__.py": toys.SOURCES["shared/__init__.py"]}
    with trees.open_place() as place:
        yield make_scene(place, small_entry(), sources, True)


def calls(scene: Scene, direction: str, kind_of_run: str = "change", back: bool = False) -> list[tuple[str, str]]:
    """The calls that an undisturbed run makes, by name and path."""
    made: list[tuple[str, str]] = []
    kind = hooked(lambda _, name, path: made.append((name, path)))
    if kind_of_run == "change":
        scene.start(direction)
        scene.change(direction, kind)
    else:
        scene.recover(back, kind)
    return made


def dying_at(number: int) -> type[Disk]:
    """A disk whose process is killed at that call; a write is cut in its middle."""
    count = 0

    class Dying(Disk):
        def call(self, name: str, path: str, action: Callable[[], _T]) -> _T:
            nonlocal count
            count += 1
            if count == number:
                if isinstance(action, partial) and action.func is os.write:
                    fd, data = action.args
                    os.write(fd, data[: len(data) // 2])
                trees.kill_self()
            return super().call(name, path, action)

    return Dying


def die(scene: Scene, direction: str, number: int) -> None:
    scene.start(direction)
    with pytest.raises(Killed):
        forked(lambda: scene.change(direction, dying_at(number)).changed)


def test_the_small_transaction_has_every_kind_of_call(small: Scene) -> None:
    names = {name for direction in DIRECTIONS for name, _ in calls(small, direction)}
    assert names >= {"flock", "open", "write", "chmod", "fsync", "rename", "link", "mkdir", "unlink", "rmdir"}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_killed_at_any_call_every_verb_says_so_and_writes_nothing(small: Scene, direction: str) -> None:
    for number in range(1, len(calls(small, direction)) + 1, 7):
        die(small, direction, number)
        before = trees.snapshot(small.tree)
        pending = any(name in before for name in (journal.NAME, journal.BESIDE))
        for verb in ("status", "plan"):
            result = trees.run(small.toy, verb, "--root", small.tree)
            assert (result.code == Exit.RECOVERY_NEEDED) == pending
        if pending:
            assert trees.run(small.toy, direction, "--root", small.tree).code == Exit.RECOVERY_NEEDED
        assert trees.snapshot(small.tree) == before


def test_recovery_from_every_state_that_kills_can_ever_reach(tmp_path: Path) -> None:
    """The closure: every state reachable by any number of kills, of the run and of recoveries in either direction."""
    entry = toys.Entry(
        "only-one",
        toys.diff(ENGINE, File(toys.ENGINE), File(toys.ENGINE_ALPHA))
        + toys.diff(NOTES, None, File(toys.NOTES))
        + toys.diff("sglang/srt/old.py", File(toys.OLD), None),
    )
    scene = make_scene(tmp_path, entry, {}, False)
    seen: dict[frozenset[tuple[str, tuple[int, bytes]]], str] = {}
    todo: list[tuple[str, Image]] = []

    def note(direction: str) -> None:
        image = image_of(scene.tree)
        if frozenset(image.items()) not in seen:
            seen[frozenset(image.items())] = direction
            todo.append((direction, image))

    changing = {"open", "write", "rename", "link", "mkdir", "unlink", "rmdir"}
    for direction in DIRECTIONS:

        def after(_: Disk, name: str, __: str, way: str = direction) -> None:
            if name in changing:
                note(way)

        kind = hooked(after=after)
        scene.start(direction)
        scene.change(direction, kind)
        while todo:
            _, image = todo.pop()
            for back in (False, True):
                lay(image, trees.fresh(scene.tree))
                try:
                    scene.recover(back, kind)
                except BundleError as error:
                    # Only ever because that way is closed, and then the other one is open.
                    assert back, str(error)
                    assert error.exit_code == Exit.RECOVERY_NEEDED
                    scene.recover(False)
                scene.where(direction)
        seen = {image: way for image, way in seen.items() if way != direction}


def settle(scene: Scene, direction: str, error: BundleError, number: int) -> str:
    """After a refusal: undone, or exit code 4 and then recovered."""
    if error.exit_code == Exit.RECOVERY_NEEDED:
        assert f"recover --root {scene.tree}" in error.next_step
        scene.recover(False)
    else:
        assert error.exit_code in (Exit.FAILED, Exit.REFUSED), number
        assert "everything was undone" in str(error) or error.reason != Reason.STOPPED
        assert scene.where(direction) == "old", number
    return scene.where(direction)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_failed_call_is_told_with_the_file_that_it_was_for(small: Scene, direction: str, code: int) -> None:
    """Whatever the call knows of it: a name in a folder, or a descriptor."""
    for number, (name, path) in enumerate(calls(small, direction), 1):
        count = 0

        def before(_: Disk, __: str, ___: str, number: int = number) -> None:
            nonlocal count
            count += 1
            if count == number:
                raise OSError(code, os.strerror(code))

        small.start(direction)
        try:
            small.change(direction, hooked(before))
        except OSError as error:
            assert (name, error.filename) == ("flock", str(small.tree))
        except BundleError as error:
            place = str(small.tree if path == "." else small.tree / path)
            if error.reason is Reason.STOPPED:
                assert error.where == place, (name, path)
            if error.reason is not Reason.BYTECODE:
                assert f"{os.strerror(code)}: {place}" in str(error), (name, path)


def test_next_steps_of_a_recovery_can_be_typed_as_they_stand(small: Scene, tmp_path: Path) -> None:
    renames = [at for at, (name, path) in enumerate(calls(small, "apply"), 1) if (name, path) == ("rename", ENGINE)]
    die(small, "apply", renames[0] + 1)
    root = tmp_path / "a tree's place"
    shutil.copytree(small.tree, root, symlinks=True)
    for place in root.rglob(".patchbundle-*.*"):
        place.unlink()
        place.write_bytes(b"other")
    with pytest.raises(BundleError) as caught:
        transaction.recover(root, back=True)
    assert shlex.split(caught.value.next_step) == ["run:", "tools/apply.py", "recover", "--root", str(root)]
    with pytest.raises(BundleError) as caught:
        transaction.recover(root)
    assert shlex.split(caught.value.next_step)[-3:] == ["--root", str(root), "--back"]


def test_interrupted_by_the_user_at_any_call_it_is_undone_or_recovered(small: Scene) -> None:
    for number in range(2, len(calls(small, "apply")) + 1, 3):
        small.start("apply")
        count = 0

        def before(_: Disk, __: str, ___: str, number: int = number) -> None:
            nonlocal count
            count += 1
            if count == number:
                raise KeyboardInterrupt

        with pytest.raises(BundleError) as caught:
            small.change("apply", hooked(before))
        assert "interrupted by the user" in str(caught.value)
        settle(small, "apply", caught.value, number)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_out_of_memory_at_any_call_it_is_undone_or_recovered(small: Scene, direction: str) -> None:
    for number in range(2, len(calls(small, direction)) + 1, 3):
        small.start(direction)
        count = 0

        def before(_: Disk, __: str, ___: str, number: int = number) -> None:
            nonlocal count
            count += 1
            if count == number:
                raise MemoryError

        with pytest.raises(BundleError) as caught:
            small.change(direction, hooked(before))
        assert "not enough memory" in str(caught.value)
        settle(small, direction, caught.value, number)


# What somebody else put under names of ours.


def own_names(scene: Scene, direction: str) -> list[str]:
    """The paths that a run makes beside the files, in its order, folders included."""
    beside = [path for name, path in calls(scene, direction) if name in ("open", "link", "mkdir")]
    return [path for path in beside if path != journal.BESIDE]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_files_under_our_names_are_refused_by_name_and_kept(small: Scene, direction: str) -> None:
    beside = [path for path in own_names(small, direction) if ".patchbundle" in path]
    assert len(beside) > 6
    for path in [*beside, ".patchbundle-77.old", "sglang/srt/.patchbundle-journal", ".patchbundle"]:
        small.start(direction)
        if not (small.tree / path).parent.is_dir():
            continue
        (small.tree / path).write_bytes(b"rescued")
        before = trees.snapshot(small.tree)
        for more in (["-n"], []):
            result = trees.run(small.toy, direction, "--root", small.tree, *more)
            assert result.code == Exit.REFUSED, (path, result)
            assert path in result.err
        assert trees.snapshot(small.tree) == before
    (small.tree / path).unlink()


def test_leftovers_are_what_stands_under_our_names_but_for_the_journal(small: Scene) -> None:
    small.start("apply")
    for path in (journal.NAME, journal.BESIDE, ".patchbundle-1.new", "sglang/srt/.patchbundle-0.old", "sglang/.patch"):
        (small.tree / path).write_bytes(b"")
    (small.tree / "sglang/srt/layers/.patchbundle-5.new").mkdir()
    (small.tree / "sglang/.patchbundle-link").symlink_to("nowhere")
    with Tree(small.tree) as tree:
        assert preflight.leftovers(tree, []) == [".patchbundle-1.new"]
        assert preflight.leftovers(tree, ["sglang/none/a.py", ENGINE, "sglang/srt/layers/b.py", "sglang/c.py"]) == [
            ".patchbundle-1.new",
            "sglang/.patchbundle-link",
            "sglang/srt/.patchbundle-0.old",
            "sglang/srt/layers/.patchbundle-5.new",
        ]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_undoing_removes_nothing_that_the_run_did_not_make(small: Scene, direction: str) -> None:
    """Somebody, without our lock, makes the very file or folder that the run is about to make."""
    made = own_names(small, direction)
    for path in made:
        small.start(direction)
        theirs = small.tree / path
        fresh = True

        def before(_: Disk, name: str, at: str, path: str = path, theirs: Path = theirs) -> None:
            nonlocal fresh
            if fresh and at == path and name in ("open", "link", "mkdir"):
                fresh = False
                theirs.mkdir() if name == "mkdir" else theirs.write_bytes(b"theirs")

        with pytest.raises(BundleError) as caught:
            small.change(direction, hooked(before))
        assert (caught.value.reason, caught.value.where) == (Reason.STOPPED, str(theirs))
        if theirs.is_dir():
            theirs.rmdir()
        else:
            assert theirs.read_bytes() == b"theirs"
            theirs.unlink()
        # Folders of the run's own stay if theirs is in them.
        for folder in theirs.parents:
            if folder.relative_to(small.tree).as_posix() in made:
                folder.rmdir()
            else:
                break
        assert small.where(direction) == "old", path


# Progress.


class Deaf(Exception):
    """What a terminal may answer that is no terminal any more."""


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "full"), BrokenPipeError(), ValueError("closed"), Deaf()])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_words_that_cannot_be_told_stop_no_run(small: Scene, direction: str, failure: Exception) -> None:
    told = []

    def fail(text: str) -> None:
        told.append(text)
        raise failure

    small.start(direction)
    small.change(direction, progress=fail)
    assert told == ["staging", "renaming", "clearing up"]
    assert small.where(direction) == "new"


@pytest.mark.parametrize("at", ["staging", "renaming", "clearing up"])
def test_interrupted_by_the_user_between_two_parts_it_is_undone_or_recovered(small: Scene, at: str) -> None:
    def stop(text: str) -> None:
        if text == at:
            raise KeyboardInterrupt

    small.start("apply")
    with pytest.raises(BundleError) as caught:
        small.change("apply", progress=stop)
    assert (caught.value.exit_code == Exit.RECOVERY_NEEDED) == (at == "clearing up")
    assert settle(small, "apply", caught.value, 0) == ("new" if at == "clearing up" else "old")


def test_recover_says_what_it_did_and_then_that_nothing_is_left(small: Scene) -> None:
    journals = [at for at, call in enumerate(calls(small, "apply"), 1) if call == ("rename", journal.NAME)]
    die(small, "apply", journals[1] + 1)
    root = ("--root", str(small.tree))
    dry = trees.run(small.toy, "recover", *root, "--dry-run")
    assert (dry.code, dry.out) == (0, "interrupted in phase commit\n")
    done = trees.run(small.toy, "recover", *root)
    assert (done.code, done.out) == (0, "recovered: the tree is new, at only-one of sglang-0.5.19\n")
    again = trees.run(small.toy, "recover", *root)
    assert (again.code, again.out) == (Exit.NOTHING_TO_DO, "nothing to do\n")


def test_recover_finds_the_tree_inside_the_environment_that_it_is_given(small: Scene, tmp_path: Path) -> None:
    journals = [at for at, call in enumerate(calls(small, "apply"), 1) if call == ("rename", journal.NAME)]
    die(small, "apply", journals[1] + 1)
    place = tmp_path / "venv/lib/python3.11/site-packages"
    shutil.copytree(small.tree, place)
    assert trees.run(small.toy, "recover", "--root", tmp_path / "venv").code == 0
    small.copy(place)
    assert small.where("apply") == "new"


def test_back_is_refused_after_the_point_of_no_return(small: Scene) -> None:
    journals = [at for at, call in enumerate(calls(small, "apply"), 1) if call == ("rename", journal.NAME)]
    die(small, "apply", journals[2] + 2)
    result = trees.run(small.toy, "recover", "--root", small.tree, "--back", "--json")
    assert (result.code, result.reason) == (Exit.RECOVERY_NEEDED, "past-return")
    assert small.recover(False) == "new"
    assert small.where("apply") == "new"


def test_somebody_elses_file_in_a_new_folder_does_not_stop_recovery(small: Scene) -> None:
    """Recovery must end; what is not ours stays, and status tells."""
    journals = [at for at, call in enumerate(calls(small, "apply"), 1) if call == ("rename", journal.NAME)]
    die(small, "apply", journals[1] - 1)
    (small.tree / toys.HOME / "theirs.txt").write_bytes(b"theirs")
    assert small.recover(False) == "old"
    assert (small.tree / toys.HOME / "theirs.txt").read_bytes() == b"theirs"
    assert trees.run(small.toy, "recover", "--root", small.tree).code == Exit.NOTHING_TO_DO
    assert toys.HOME in trees.run(small.toy, "status", "--root", small.tree).out


def test_each_staged_file_and_each_folder_has_an_fsync_of_its_own(
    small: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None for another: counted at the system, by what the descriptor is of."""
    asked: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: asked.append(os.readlink(f"/proc/self/fd/{fd}")))
    made = calls(small, "apply")
    root = next(path for path in asked if path.endswith(journal.BESIDE)).removesuffix(f"/{journal.BESIDE}")
    relative = sorted(os.path.relpath(path, root) for path in asked)
    assert relative == sorted(path for name, path in made if name == "fsync")
    staged = [path for name, path in made if name == "open" and path.endswith(".new")]
    assert all(relative.count(path) == staged.count(path) for path in staged)


def test_one_fsync_of_many_that_fails_undoes_the_run(small: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real call fails; the run names the file."""

    def fail(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("-1.new"):
            raise OSError(errno.EIO, "Input/output error")

    small.start("apply")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(BundleError) as refusal:
        small.change("apply", Disk)
    assert refusal.value.code == "stopped"
    assert refusal.value.where.endswith("-1.new")
    assert "everything was undone" in (refusal.value.found or "")


def test_a_file_that_is_replaced_whole_is_on_the_disk_with_its_name(tmp_path: Path) -> None:
    made: list[tuple[str, str]] = []
    with hooked(lambda _, name, path: made.append((name, path)))(tmp_path) as disk:
        disk.mkdir("a", 0o755, None)
        disk.replace("a/b", b"1")
    assert made[-4:] == [("chmod", "a/b.new"), ("fsync", "a/b.new"), ("rename", "a/b"), ("fsync", "a")]


@pytest.mark.parametrize("by", ["recover", "undo"])
def test_bytecode_of_the_new_code_goes_when_the_run_is_taken_back(small: Scene, by: str) -> None:
    """An interpreter that ran meanwhile compiled the new module; the old one must not be hidden by it."""
    cache = small.tree / "sglang/srt/__pycache__/engine.cpython-312.pyc"
    renamed = next(at for at, call in enumerate(calls(small, "apply"), 1) if call == ("rename", ENGINE))
    if by == "recover":
        die(small, "apply", renamed + 1)
        cache.write_bytes(b"\0" * 16)
        assert small.recover(True) == "old"
    else:
        small.start("apply")
        count = 0

        def before(_: Disk, __: str, ___: str) -> None:
            nonlocal count
            count += 1
            if count == renamed + 1:
                cache.write_bytes(b"\0" * 16)
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with pytest.raises(BundleError):
            small.change("apply", hooked(before))
    assert not cache.exists()
    assert small.where("apply") == "old"


def test_links_among_the_bytecode_of_our_folder_go_with_it(small: Scene) -> None:
    small.start("revert")
    caches = small.tree / toys.HOME / "__pycache__"
    (caches / "gone.cpython-311.pyc").symlink_to("nowhere")
    small.change("revert")
    assert small.where("revert") == "new"


# What it says that it did.

CACHE = "sglang/srt/__pycache__/engine.cpython-311.pyc"
UNCHECKED = b"\0\0\0\0\1\0\0\0" + b"\0" * 8


def stopped(name: str, suffix: str, action: Callable[[], None]) -> type[Disk]:
    """A disk that does something before its calls ``name`` on paths that end so."""
    return hooked(lambda _, called, path: action() if called == name and path.endswith(suffix) else None)


def failing(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_run_says_what_it_changed_and_dropped_in_order_and_nothing_else(small: Scene) -> None:
    small.start("apply")
    outcome = small.change("apply")
    made, receipt = f"{toys.HOME}/__init__.py", f"{toys.HOME}/receipt.json"
    assert set(outcome.changed[:3]) == {NOTES, made, receipt}
    assert set(outcome.changed[3:5]) == {ENGINE, toys.RECORD}
    assert outcome.changed[5:] == ("sglang/srt/old.py",)
    assert outcome.dropped == (str(small.tree / CACHE),)
    assert outcome.warnings == ()
    small.start("revert")
    outcome = small.change("revert")
    assert str(small.tree / CACHE) in outcome.dropped
    assert outcome.warnings == ()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_bytecode_that_may_not_be_removed_and_is_checked_is_a_warning(small: Scene, code: int) -> None:
    small.start("apply")
    outcome = small.change("apply", stopped("unlink", ".pyc", failing(code)))
    assert outcome.dropped == ()
    assert outcome.warnings == (f"{small.tree / CACHE} could not be removed: {os.strerror(code)}",)
    assert small.where("apply") == "new"


def test_bytecode_that_is_gone_already_is_neither_dropped_nor_a_warning_and_the_next_one_goes(small: Scene) -> None:
    small.start("apply")
    other = CACHE.replace("311", "312")
    shutil.copy(small.tree / CACHE, small.tree / other)
    outcome = small.change("apply", stopped("unlink", CACHE, (small.tree / CACHE).unlink))
    assert (outcome.dropped, outcome.warnings) == ((str(small.tree / other),), ())
    assert not (small.tree / other).exists()
    assert small.where("apply") == "new"


def test_bytecode_after_a_folder_that_is_closed_goes_all_the_same(
    small: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.start("apply")
    closed = bytecode.Cache(small.tree, "sglang/closed/__pycache__", ENGINE, "closed")
    real = bytecode.find
    monkeypatch.setattr(bytecode, "find", lambda *arguments: [closed, *real(*arguments)])
    assert small.change("apply").dropped == (str(small.tree / CACHE),)


@pytest.mark.parametrize(("data", "code"), [(b"\0" * 16, errno.EIO), (UNCHECKED, errno.EACCES), (UNCHECKED, errno.EIO)])
def test_bytecode_that_would_hide_the_change_leaves_the_run_to_be_recovered(
    small: Scene, data: bytes, code: int
) -> None:
    small.start("apply")
    (small.tree / CACHE).write_bytes(data)
    with pytest.raises(BundleError) as caught:
        small.change("apply", stopped("unlink", ".pyc", failing(code)))
    assert caught.value.exit_code == Exit.RECOVERY_NEEDED
    assert "the tree is changed, but clearing up stopped: " in (caught.value.found or "")
    assert (small.tree / CACHE).exists()
    assert small.recover(False) == "new"
    assert not (small.tree / CACHE).exists()
    assert small.where("apply") == "new"


def test_a_folder_that_somebody_put_a_file_into_is_kept_and_told(small: Scene) -> None:
    small.start("revert")
    theirs = small.tree / toys.HOME / "theirs"
    outcome = small.change("revert", stopped("rmdir", toys.HOME, theirs.touch))
    assert outcome.warnings == (f"{theirs.parent} was kept: somebody put a file into it",)
    assert os.listdir(theirs.parent) == ["theirs"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b"other"), Reason.STOPPED),
        (lambda path: path.unlink(), Reason.STOPPED),
        (lambda path: path.chmod(0o604), Reason.OWNER),
    ],
    ids=["other bytes", "gone", "other bits"],
)
def test_what_was_staged_is_looked_at_again_before_anything_is_renamed(
    small: Scene, damage: Callable[[Path], None], reason: Reason
) -> None:
    small.start("apply")
    damaged: list[str] = []

    def after(disk: Disk, name: str, path: str) -> None:
        if name == "fsync" and path.startswith("sglang/") and path.endswith(".new") and not damaged:
            damaged.append(path)
            damage(disk.root / path)

    with pytest.raises(BundleError) as caught:
        small.change("apply", hooked(after=after))
    assert caught.value.reason is reason
    assert small.where("apply") == "old"


@pytest.mark.parametrize(("code", "ends"), [(errno.EPERM, "new"), (errno.EOPNOTSUPP, "new"), (errno.EIO, "old")])
def test_a_file_system_without_links_gets_copies_and_one_that_fails_stops_the_run(
    small: Scene, code: int, ends: str
) -> None:
    small.start("apply")
    kind = stopped("link", "", failing(code))
    if ends == "new":
        assert small.change("apply", kind).warnings == ()
    else:
        with pytest.raises(BundleError, match=os.strerror(code)):
            small.change("apply", kind)
    assert small.where("apply") == ends


def test_a_folder_that_the_disk_does_not_remove_leaves_the_run_to_be_recovered(small: Scene) -> None:
    small.start("revert")
    with pytest.raises(BundleError) as caught:
        small.change("revert", stopped("rmdir", toys.HOME, failing(errno.EIO)))
    assert caught.value.exit_code == Exit.RECOVERY_NEEDED
    assert small.recover(False) == "new"
    assert small.where("revert") == "new"


def test_a_folder_that_somebody_removed_first_is_no_warning(small: Scene) -> None:
    small.start("revert")
    outcome = small.change("revert", stopped("rmdir", toys.HOME, (small.tree / NOTES).parent.rmdir))
    assert outcome.warnings == ()
    assert small.where("revert") == "new"


def test_where_nothing_was_interrupted_nothing_was_left_behind(small: Scene) -> None:
    small.start("apply")
    with Tree(small.tree) as tree:
        assert transaction.left_behind(tree) == (False, None)
        assert transaction.pending(tree) is None
        with transaction.quiet(tree):
            pass
        # Its moment is over: a writer need not wait.
        assert small.change("apply").changed


def test_a_recovery_goes_on_where_no_way_is_named(small: Scene) -> None:
    renamed = next(at for at, call in enumerate(calls(small, "apply"), 1) if call == ("rename", ENGINE))
    die(small, "apply", renamed + 1)
    state, log = transaction.recover(small.tree)
    assert state == "new"
    assert log is not None
    assert (log.phase, log.to_level) == ("commit", "only-one")
    assert transaction.recover(small.tree) == ("clean", None)


# What is looked at first, to the byte.


def looked_over(scene: Scene) -> None:
    target = target_module.discover(scene.bundle, root=scene.tree)
    with Tree(scene.tree) as tree:
        _, plan = work.make_plan(scene.bundle, target, "apply", None, tree=tree)
        preflight.check(tree, plan)


def test_room_is_twice_the_new_bytes_once_the_old_and_a_mebibyte(small: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    small.start("apply")
    before = {path.relative_to(small.tree): path.stat().st_size for path in small.tree.rglob("*") if path.is_file()}
    small.change("apply")
    after = {path.relative_to(small.tree): path.stat().st_size for path in small.tree.rglob("*") if path.is_file()}
    small.start("apply")
    changed = {Path(ENGINE), Path(toys.RECORD)} | {
        path for path in before.keys() ^ after.keys() if path.suffix != ".pyc"
    }
    bytes_needed = (1 << 20) + sum(2 * after.get(path, 0) + before.get(path, 0) for path in changed)
    inodes_needed = 2 * len(changed) + 8
    real = os.fstatvfs
    free: dict[str, int] = {}

    def so_full(fd: int) -> os.statvfs_result:
        values = list(real(fd))
        values[1], values[4] = 1, free["bytes"]  # f_frsize, f_bavail
        values[5], values[7] = 1 << 30, free["inodes"]  # f_files, f_favail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "fstatvfs", so_full)
    free |= {"bytes": bytes_needed, "inodes": inodes_needed}
    looked_over(small)
    for what, needed in (("bytes", bytes_needed), ("inodes", inodes_needed)):
        free |= {"bytes": bytes_needed, "inodes": inodes_needed, what: needed - 1}
        with pytest.raises(BundleError) as caught:
            looked_over(small)
        assert caught.value.reason is Reason.NO_SPACE


@pytest.mark.parametrize(
    ("user", "owner", "group", "refused"),
    [
        (1000, 1000, 1000, False),
        (1000, 1000, 20, False),
        (1000, 1000, 4321, True),
        (1000, 1001, 1000, True),
        (0, 1001, 4321, False),
    ],
)
def test_a_file_is_only_replaced_by_who_can_keep_its_owner_and_its_group(
    small: Scene, monkeypatch: pytest.MonkeyPatch, user: int, owner: int, group: int, refused: bool
) -> None:
    small.start("apply")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [20])
    with Tree(small.tree) as tree:
        if refused:
            with pytest.raises(BundleError) as caught:
                preflight._check_owner(tree, ENGINE, owner, group)
            assert caught.value.reason is Reason.OWNER
            assert f"owner {owner}, group {group}" in str(caught.value)
        else:
            preflight._check_owner(tree, ENGINE, owner, group)


def test_no_call_site_ever_stands_without_the_module_that_it_calls(small: Scene) -> None:
    made = [path for name, path in calls(small, "apply") if name == "rename"]
    assert made.index(f"{toys.HOME}/__init__.py") < made.index(ENGINE)
    made = [path for name, path in calls(small, "revert") if name in ("rename", "unlink")]
    assert made.index(ENGINE) < made.index(f"{toys.HOME}/__init__.py")


@pytest.mark.parametrize("name", [journal.NAME, journal.BESIDE])
def test_a_journal_that_comes_after_the_plan_is_not_written_over(small: Scene, name: str) -> None:
    small.start("apply")
    target = target_module.discover(small.bundle, root=small.tree)
    with transaction.locked(small.tree) as disk:
        state, plan = work.make_plan(small.bundle, target, "apply", None, tree=disk)
        (small.tree / name).write_bytes(b"of an earlier run")
        before = small.seen()
        with pytest.raises(BundleError) as caught:
            work.execute(small.bundle, target, state, plan, disk=disk)
    assert caught.value.reason is Reason.RECOVERY_NEEDED
    assert (small.tree / name).read_bytes() == b"of an earlier run"
    assert small.seen() == before
