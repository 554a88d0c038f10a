"""A survey tells what a walk tells, file by file, and remembers nothing that may have changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from patchbundle import survey, tree
from patchbundle.survey import Memory
from patchbundle.tree import Found, Tree

AT = 1_600_000_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for number in range(30):
        folder = root / f"f{number}" / ("deep" if number % 3 else ".")
        folder.mkdir(parents=True)
        for name in "ab":
            (folder / name).write_bytes(name.encode() * (number * 100_000 if number == 20 else number))
    (root / "f1/run").write_bytes(b"#!")
    (root / "f1/run").chmod(0o4755)
    (root / "f2/link").symlink_to("deep")
    (root / "f3/__pycache__").mkdir()
    (root / "f3/__pycache__/x.pyc").write_bytes(b"x")
    (root / "f4/__pycache__").write_bytes(b"a file of that name")
    os.mkfifo(root / "f5/pipe")
    (root / "f6" / os.fsdecode(b"no utf-8 \xff")).write_bytes(b"y")
    return root


@pytest.mark.parametrize("processors", [1, 2])
@pytest.mark.parametrize(("top", "limit"), [("", None), ("", 1000), ("f1", None)])
def test_it_tells_what_a_walk_tells(
    root: Path, monkeypatch: pytest.MonkeyPatch, top: str, limit: int | None, processors: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    with Tree(root) as opened:
        found = dict(opened.walk(top, limit=limit))
        seen = survey.take(opened, top, limit=limit)
    bits = {path: None if item.status is None else stat.S_IMODE(item.status.st_mode) for path, item in found.items()}
    assert {path: item.identity for path, item in seen.items()} == {path: item.identity for path, item in found.items()}
    assert {path: item.bits for path, item in seen.items()} == bits
    assert len(seen) > (90 if top == "" else 2)


class Scene:
    """A tree that is surveyed again and again with one memory; the files that were read each time."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.memory, self.read = root, Memory(root.parent / "clock"), set[str]()
        real = tree.look

        def look(folder: int, name: str, limit: int | None, own: memoryview | None) -> Found:
            self.read.add(f"{os.readlink(f'/proc/self/fd/{folder}')}/{name}".removeprefix(f"{root}/"))
            return real(folder, name, limit, own)

        monkeypatch.setattr(survey, "look", look)
        # In one process, so that each read is noted here.
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})

    def take(self) -> survey.Survey:
        self.read.clear()
        with Tree(self.root) as opened:
            return survey.take(opened, memory=self.memory)


@pytest.fixture
def scene(root: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene(root, monkeypatch)
    # By the file system's clock the tree is older than the first look.
    youngest = max(path.lstat().st_ctime_ns for path in root.rglob("*"))
    while scene.memory.now() <= youngest:
        pass
    return scene


def test_what_stands_as_it_was_is_not_read_again(scene: Scene) -> None:
    first = scene.take()
    everything = set(scene.read)
    assert len(everything) > 60
    assert scene.take() == first
    # What is no plain file has no stamp.
    assert scene.read == {"f2/link", "f5/pipe"}
    assert scene.take() == first


def in_place(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.write(b"Z")


def by_rename(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(b"Z" + path.read_bytes()[1:])
    new.chmod(stat.S_IMODE(path.stat().st_mode))
    new.rename(path)


@pytest.mark.parametrize("change", [in_place, by_rename])
def test_a_change_with_size_and_time_put_back_is_seen(scene: Scene, change: object) -> None:
    path = scene.root / "f7/deep/a"
    os.utime(path, (AT, AT))
    scene.take()
    scene.take()
    before = path.stat()
    change(path)  # type: ignore[operator]
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (before.st_size, before.st_mtime_ns, before.st_mode) == (after.st_size, after.st_mtime_ns, after.st_mode)
    seen = scene.take()
    assert "f7/deep/a" in scene.read
    with Tree(scene.root) as opened:
        assert seen["f7/deep/a"].identity == opened.find("f7/deep/a").identity


def test_a_change_of_the_mode_alone_is_seen(scene: Scene) -> None:
    scene.take()
    (scene.root / "f7/deep/a").chmod(0o755)
    assert scene.take()["f7/deep/a"].bits == 0o755


def test_a_file_that_went_or_came_is_seen(scene: Scene) -> None:
    scene.take()
    (scene.root / "f7/deep/a").unlink()
    (scene.root / "f7/deep/new").write_bytes(b"")
    seen = scene.take()
    assert "f7/deep/a" not in seen
    assert "f7/deep/new" in seen


def test_a_change_within_one_tick_of_a_coarse_clock_is_seen(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of an hour a tick a file changes after it was looked at, and has the stamp of before."""
    hour, real, now = 3_600 * 10**9, survey._stamp, Memory.now
    monkeypatch.setattr(
        survey, "_stamp", lambda status: (*real(status)[:-2], *(item // hour * hour for item in real(status)[-2:]))
    )
    monkeypatch.setattr(Memory, "now", lambda self: now(self) // hour * hour)
    path = scene.root / "f7/deep/a"
    first = scene.take()
    in_place(path)
    seen = scene.take()
    if seen["f7/deep/a"].stamp == first["f7/deep/a"].stamp:
        assert seen["f7/deep/a"].identity != first["f7/deep/a"].identity
    assert "f7/deep/a" in scene.read


def test_a_file_changed_since_the_survey_began_is_read_again(scene: Scene) -> None:
    """Its attributes were changed in the moment in which the survey began: they may have the time of a later change."""
    path = scene.root / "f7/deep/a"
    scene.memory.now = lambda: path.stat().st_ctime_ns  # type: ignore[method-assign]
    scene.take()
    scene.take()
    assert "f7/deep/a" in scene.read


def test_a_clock_that_was_set_back_keeps_nothing(scene: Scene) -> None:
    first = scene.take()
    scene.memory.now = lambda: 0  # type: ignore[method-assign]
    scene.take()
    assert scene.take() == first
    assert len(scene.read) > 60


def test_a_file_that_turned_into_something_else_is_seen(scene: Scene) -> None:
    scene.take()
    (scene.root / "f7/deep/a").unlink()
    (scene.root / "f7/deep/a").symlink_to("b")
    (scene.root / "f8/deep/a").unlink()
    (scene.root / "f8/deep/a").mkdir()
    seen = scene.take()
    assert seen["f7/deep/a"].identity.kind == "link"
    assert seen["f8/deep/a"].identity.kind == "folder"


def test_a_folder_that_changed_after_it_was_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as what it is when it is opened."""
    real = os.open

    def swapped(name: str, flags: int, **more: int) -> int:
        if name == "deep" and not (root / "f7/deep").is_symlink():
            (root / "f7/deep").rename(root.parent / "away")
            (root / "f7/deep").symlink_to(root.parent / "away")
        return real(name, flags, **more)

    with Tree(root) as opened:
        monkeypatch.setattr(os, "open", swapped)
        seen = survey.take(opened, "f7")
    assert seen["f7/deep"].identity.kind == "link"
    assert not [path for path in seen if path.startswith("f7/deep/")]
