"""The fault sweep and the losses of power of ``make test-faults``, on a toy of four operations; both can fail.

``PATCHBUNDLE_CHOICES=1024`` takes that many choices of what a loss of power loses, at each moment.
"""

from __future__ import annotations

import errno
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.faults import calls, power
from lab.faults.calls import Call, Count, Fail, Kill, visited
from lab.faults.power import KEPT, LOST, Log, Losses, Site
from lab.faults.scene import DIRECTIONS, Scene, image_of, lay
from lab.faults.sweep import KINDS, Sweep, swept
from patchbundle import journal, manifest, transaction
from patchbundle.disk import Disk
from patchbundle.identity import File
from tests import toy as toys
from tests import trees

ENGINE = "sglang/srt/engine.py"


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """A file changed, one removed, one made in a new folder, RECORD changed; bytecode of each kind beside them."""
    entry = toys.Entry(
        "only-one",
        toys.diff(ENGINE, File(toys.ENGINE), File(toys.ENGINE_ALPHA))
        + toys.diff("sglang/srt/old.py", File(toys.OLD), None),
    )
    with trees.open_place() as place:
        toy = toys.make(place, entries=[entry], sources={})
        made = Scene.of(manifest.load(toy.bundle), toy.tree)
        assert made.operations == 4
        yield made


# The sweep.


def test_stopped_at_any_call_in_any_way_it_ends_old_or_new(scene: Scene) -> None:
    kinds, ends = Counter[str](), Counter[str]()
    last: dict[tuple[str, bool], str] = {}
    for point, end in swept(Sweep(scene, middles=3, pairs=2).points()):
        kinds[point.kind] += 1
        ends[end] += 1
        if point.kind == "run killed":
            # All old until some call, all new after it: there is one point of no return.
            way = (point.place.split(",")[0], "back" in point.place)
            assert (last.get(way), end) != ("new", "old"), point.place
            last[way] = end
    assert set(kinds) == set(KINDS)
    assert all(count > 25 for count in kinds.values()), kinds
    assert min(ends["old"], ends["new"]) > 200, ends
    assert set(last.values()) == {"new"}


def broken(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Take one link out of the chain."""
    if how == "no journal until the end":
        replace = Disk.replace
        monkeypatch.setattr(Disk, "replace", lambda disk, path, data: b'"prepare"' in data or replace(disk, path, data))
    elif how == "nothing is rolled back":
        monkeypatch.setattr(transaction, "_roll_back", transaction._clear)
    elif how == "the journal goes first":
        finish = transaction._finish

        def early(disk: Disk, log: journal.Journal) -> tuple[tuple[str, ...], list[str]]:
            disk.unlink(journal.NAME)
            return finish(disk, log)

        monkeypatch.setattr(transaction, "_finish", early)
    else:
        monkeypatch.setattr(transaction, "_undone", lambda disk, error, made, tried: error)


@pytest.mark.parametrize(
    "how", ["no journal until the end", "nothing is rolled back", "the journal goes first", "nothing is undone"]
)
def test_a_transaction_that_lacks_a_link_is_found_out(scene: Scene, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, how)
    with pytest.raises(AssertionError, match=r"killed|failed"):
        for _ in swept(Sweep(scene, middles=2, pairs=1).points(), 3):
            pass


def test_a_point_that_ends_wrong_is_told_with_its_place(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scene, "recover", lambda *_: "new")
    with pytest.raises(
        AssertionError, match=r"run killed: apply, change 1 \(unlink\): recover says new, the tree is old"
    ):
        for _ in swept(Sweep(scene, middles=1).points()):
            pass


def test_a_sample_takes_about_one_point_of_so_many_and_the_same_for_a_seed(scene: Scene) -> None:
    def places(seed: int) -> list[str]:
        points = (point for point in Sweep(scene, middles=1).points() if point.kind == "run failed lastingly")
        return [point.place for point, _ in swept(points, 10, seed)]

    assert 5 < len(places(1)) < 60
    assert places(1) == places(1) != places(2)


def test_every_call_of_the_engine_is_seen_whoever_makes_it(scene: Scene) -> None:
    """What Disk.call knows of, and nothing else, changes the disk."""
    named: list[str] = []
    words = {"open": "create", "chmod": "fchmod", "chown": "fchown"}
    kind = trees.hooked(lambda _, name, __: named.append(words.get(name, name)))
    for direction in DIRECTIONS:
        named.clear()
        scene.lay(scene.images[direction])
        count = Count()
        with visited(count), transaction.locked(scene.root, kind) as disk:
            scene.carry_out(direction, disk)
        assert [name for name in named if name not in ("flock", "fsync")] == count.changes
        assert named.count("fsync") == count.kinds.count("fsync")


def test_a_kill_is_a_kill_before_the_change_and_half_of_a_write_in_its_middle(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "made").mkdir()
        (tmp_path / "first").mkdir()
        fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, b"12345678")
        os.close(fd)

    calls.killed(work, Kill(4, half=True))
    assert sorted(image_of(tmp_path)) == ["file", "first", "made"]
    assert (tmp_path / "file").read_bytes() == b"1234"
    with pytest.raises(AssertionError, match="not killed"):
        calls.killed(lambda: None, Kill(1))


def test_a_failure_is_raised_at_its_call_and_a_lasting_one_at_all_later_changes(tmp_path: Path) -> None:
    def work() -> list[str]:
        done = []
        for name in ("a", "b", "c"):
            try:
                (tmp_path / name).mkdir()
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                done.append(name)
        return done

    with visited(Fail(2, errno.ENOSPC)):
        assert work() == ["a", "c"]
    for name in ("a", "c"):
        (tmp_path / name).rmdir()
    with visited(Fail(2, errno.ENOSPC, lasting=True)):
        assert work() == ["a"]
    assert os.mkdir is not None
    assert not hasattr(os.mkdir, "__wrapped__")


def test_of_reads_from_one_place_three_are_failed_and_of_changes_each(scene: Scene) -> None:
    count = Count()
    scene.lay(scene.images["apply"])
    with visited(count):
        scene.change("apply")
    some, each = count.failing(False), count.failing(True)
    assert set(some) < set(each) == set(range(1, len(count.kinds) + 1))
    assert all(number in some for number, change in enumerate(count.is_change, 1) if change)
    assert len(some) > len(set(count.sites))


# Loss of power.


def losses(scene: Scene, without: Site | None = None) -> Losses:
    bound = int(os.environ.get("PATCHBUNDLE_CHOICES", "10"))
    return Losses(scene, bound=bound, deeper=4, without=without)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_after_a_loss_of_power_at_any_call_recovery_ends_old_or_new(
    scene: Scene, direction: str, record_property: Callable[[str, object], None]
) -> None:
    found = losses(scene)
    found.check(direction)
    for name in ("bound", "choices", "states"):
        record_property(name, getattr(found, name))
    assert found.states > 500
    assert found.choices > found.states


@pytest.mark.parametrize(
    ("site", "words"), power.syncs(), ids=[f"{site.function}-{words}" for site, words in power.syncs()]
)
def test_each_fsync_is_needed(scene: Scene, site: Site, words: str) -> None:
    def both_ways() -> None:
        for direction in DIRECTIONS:
            losses(scene, site).check(direction)

    with pytest.raises(AssertionError, match="power lost"):
        both_ways()


def test_the_table_of_fsyncs_in_the_docs_has_each_of_them() -> None:
    text = (trees.REPOSITORY / "docs/proof.md").read_text(encoding="utf-8").split("### Each fsync\n")[1]
    rows = [row.strip("| ").split(" | ")[:2] for row in text.split("\n## ")[0].splitlines() if row.startswith("| `")]
    documented = sorted((re.sub(r"…|, .*", "", words.strip("`")), place.strip("`")) for words, place in rows)
    assert documented == sorted((re.sub(r", .*", "", words), site.function) for site, words in power.syncs()), (
        documented
    )


def recorded(root: Path, *names: str) -> Log:
    """Two files, the first synchronised; then its name too."""
    log = Log(root)
    fd = os.open(root, os.O_RDONLY)
    with visited(log):
        for name in names:
            new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=fd)
            os.write(new, b"12345678")
            if name == names[0]:
                os.fsync(new)
            os.close(new)
        os.rename(names[0], "renamed", src_dir_fd=fd, dst_dir_fd=fd)
    os.close(fd)
    return log


def test_what_is_synchronised_is_kept_and_all_else_may_be_lost_in_any_choice(tmp_path: Path) -> None:
    log = recorded(tmp_path, "a", "b")
    seen = set()
    for moment, fates in log.losses(10_000, random.Random(0)):
        if moment == len(log.entries):
            seen.add(tuple(sorted((path, data) for path, (_, data) in log.image(fates).items())))
    whole = b"12345678"
    # The rename is the last change, and made; of "b" there is nothing, or any part; "a" keeps its old name only
    # where nothing gave it one.
    others = {(), (("b", b""),), (("b", b"1234"),), (("b", bytes(8)),), (("b", whole),)}
    assert seen == {(*other, ("renamed", whole)) for other in others}
    # Made, written and synchronised; made, written; renamed.
    assert log.left() == [0, 3, 4, 5]


def test_the_log_makes_the_tree_that_is_there_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    log = recorded(tmp_path, "a", "b")
    assert log.image({}) == image_of(tmp_path)
    assert log.image(dict.fromkeys(range(len(log.entries)), LOST)) == {}
    assert KEPT != LOST
    with visited(log), pytest.raises(NotImplementedError, match="symlink"):
        os.symlink("x", tmp_path / "y")
    with visited(log), pytest.raises(NotImplementedError, match="opened over"):
        os.open("b", os.O_WRONLY | os.O_TRUNC, dir_fd=os.open(tmp_path, os.O_RDONLY))


def test_an_image_is_laid_as_it_was_taken(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_bytes(b"1")
    (tmp_path / "a/b/c").chmod(0o600)
    (tmp_path / "a").chmod(0o711)
    image = image_of(tmp_path)
    lay(image, trees.fresh(tmp_path / "again"))
    assert image_of(tmp_path / "again") == image


def test_calls_are_named_by_what_they_do() -> None:
    made = Call("open", os.open, ("x", os.O_CREAT | os.O_WRONLY), {})
    read = Call("open", os.open, ("x", os.O_RDONLY), {})
    assert (made.kind, made.changes, read.kind, read.changes) == ("create", True, "open", False)
    assert set(calls.CHANGES) - set(calls.PLAUSIBLE) == set()
