"""Filed releases: trees that an older bundle patched are known, and go to the new one, or back to the base, at once.

The old bundle is the toy, filed as 1.0. The new one has an edited source, a patch less at its end, and another one
that touches a file which the old one leaves alone.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from patchbundle import journal, manifest, transaction, work
from patchbundle import target as target_module
from patchbundle.disk import Disk
from patchbundle.errors import Exit
from patchbundle.identity import File
from tests import toy as toys
from tests import trees
from tests.toy import Toy
from tests.trees import Killed, Result, Snapshot, forked, hooked

TOOL, ENGINE = "sglang/srt/tool.sh", "sglang/srt/engine.py"
ALPHA = b"def start(): ...\ndef stop(): ...\ndef pause(): ...\n"


@dataclass
class Scene:
    """A new bundle in which the old one is filed; the old one beside it; what each makes of the tree."""

    toy: Toy
    old: Path
    base: Snapshot
    patched: dict[int, Snapshot]  # by the old bundle, by level
    fresh: Snapshot  # by the new one, from the base

    def apply_old(self, *arguments: str) -> Result:
        return trees.apply(self.toy, "--bundle", self.old, *arguments)

    def seen(self) -> Snapshot:
        return trees.snapshot(self.toy.tree, times=False)


def renew(toy: Toy) -> None:
    """The next bundle's series, sources and lock."""
    (toy.bundle / "patches/prefill/gamma-third.patch").unlink()
    wheel = next((toy.cache / "archives").glob("*/*.whl"))
    tool = toys.BASE[TOOL]
    entries = (
        *toys.series()[:2],
        toys.Entry("delta-new", toys.diff(TOOL, tool, File(tool.data + b"# more\n", tool.mode)), ()),
    )
    toys.write_bundle(toy.bundle, wheel, entries, {**toys.SOURCES, "prefill/alpha.py": ALPHA})
    toy.pin()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    toy = toys.make(tmp_path)
    made = Scene(toy, tmp_path / "old", trees.snapshot(toy.tree, times=False), {}, {})
    shutil.copytree(toy.bundle, made.old)
    for level, name in enumerate(toys.LEVELS, 1):
        assert made.apply_old("--to", name).code == 0
        made.patched[level] = made.seen()
    assert trees.revert(toy).code == 0
    assert trees.run(toy, "release", "1.0").code == 0
    toy.pin()
    renew(toy)
    assert trees.apply(toy).code == 0
    made.fresh = made.seen()
    assert trees.revert(toy).code == 0
    assert made.seen() == made.base
    return made


LEVELS = pytest.mark.parametrize("level", [1, 2, 3])


@LEVELS
def test_a_tree_of_a_release_is_known_by_name_and_level(scene: Scene, level: int) -> None:
    assert scene.apply_old("--to", toys.LEVELS[level - 1]).code == 0
    told = trees.status(scene.toy, "--json").table["result"]["status"]
    assert (told["release"], told["level"], told["name"]) == ("1.0", level, toys.LEVELS[level - 1])
    assert f"level:   {level} of 3 ({toys.LEVELS[level - 1]}) of release 1.0\n" in trees.status(scene.toy).out
    assert all(file["holds"] for file in told["files"])
    checked = trees.check(scene.toy, "--full", "--json")
    assert checked.code == 0
    assert checked.table["result"]["release"] == "1.0"
    refused = trees.check(scene.toy, "--expect", "applied")
    assert refused.code == Exit.REFUSED
    assert f"level {level} (1.0:{toys.LEVELS[level - 1]})" in refused.err


@LEVELS
def test_apply_leads_from_a_release_to_the_tree_that_a_fresh_run_makes(scene: Scene, level: int) -> None:
    assert scene.apply_old("--to", toys.LEVELS[level - 1]).code == 0
    dry = trees.apply(scene.toy, "-n", "--json")
    assert dry.code == 0
    assert dry.table["result"]["plan"]["from"] == f"1.0:{toys.LEVELS[level - 1]}"
    assert scene.seen() == scene.patched[level]
    assert trees.apply(scene.toy).code == 0
    assert scene.seen() == scene.fresh
    assert trees.revert(scene.toy).code == 0
    assert scene.seen() == scene.base


@LEVELS
def test_revert_leads_from_a_release_to_the_base_or_down_its_own_series(scene: Scene, level: int) -> None:
    assert scene.apply_old("--to", toys.LEVELS[level - 1]).code == 0
    if level > 1:
        assert trees.revert(scene.toy, "--to", "alpha-first").code == 0
        assert scene.seen() == scene.patched[1]
    assert trees.revert(scene.toy).code == 0
    assert scene.seen() == scene.base


def test_a_downgrade_is_asked_for_by_name_and_gives_the_release_byte_for_byte(scene: Scene) -> None:
    assert trees.apply(scene.toy).code == 0
    assert trees.apply(scene.toy).code == Exit.NOTHING_TO_DO
    assert trees.apply(scene.toy, "--release", "1.0").code == 0
    assert scene.seen() == scene.patched[3]
    assert trees.apply(scene.toy, "--release", "1.0").code == Exit.NOTHING_TO_DO
    assert trees.apply(scene.toy, "--release", "1.0", "--to", "alpha-first").code == Exit.REFUSED
    assert trees.apply(scene.toy).code == 0
    assert scene.seen() == scene.fresh


def test_a_release_goes_on_the_base_too(scene: Scene) -> None:
    assert trees.run(scene.toy, "plan", "--root", scene.toy.tree, "--release", "1.0").code == 0
    assert trees.apply(scene.toy, "--release", "1.0", "--to", "beta-second").code == 0
    assert scene.seen() == scene.patched[2]


def test_a_release_that_is_not_filed_is_refused_with_those_that_are(scene: Scene) -> None:
    refused = trees.apply(scene.toy, "--release", "0.9")
    assert refused.code == Exit.REFUSED
    assert "[unknown-release]" in refused.err
    assert "1.0" in refused.err
    assert trees.run(scene.toy, "plan", "--root", scene.toy.tree, "--release", "1.0", "--revert").code == Exit.USAGE
    assert scene.seen() == scene.base


def test_a_bundle_that_was_never_filed_leaves_drift(scene: Scene) -> None:
    shutil.rmtree(scene.toy.bundle / "patches/releases")
    scene.toy.pin()
    assert scene.apply_old().code == 0
    for verb in (trees.apply, trees.revert, trees.status):
        assert verb(scene.toy).code == Exit.REFUSED
    assert scene.seen() == scene.patched[3]


@pytest.mark.parametrize("path", [ENGINE, f"{toys.HOME}/alpha.py", f"{toys.HOME}/receipt.json"])
def test_one_byte_off_in_a_tree_of_a_release_is_drift_beside_that_release(scene: Scene, path: str) -> None:
    assert scene.apply_old().code == 0
    place = scene.toy.tree / path
    place.write_bytes(place.read_bytes() + b"#\n" if "receipt" not in path else b"{}")
    before = scene.seen()
    told = trees.status(scene.toy)
    assert told.code == Exit.REFUSED
    assert "drifted; nearest is 3 of 3 (gamma-third) of release 1.0" in told.out
    for verb in (trees.apply, trees.revert):
        assert verb(scene.toy).code == Exit.REFUSED
    assert scene.seen() == before


def test_a_file_that_only_the_new_bundle_touches_is_looked_at_before_an_upgrade(scene: Scene) -> None:
    assert scene.apply_old().code == 0
    (scene.toy.tree / TOOL).write_bytes(b"#!/bin/sh\nexit 1\n")
    before = scene.seen()
    refused = trees.apply(scene.toy)
    assert refused.code == Exit.REFUSED
    assert TOOL in refused.err
    assert scene.seen() == before


def test_an_upgrade_that_is_killed_is_the_old_or_the_new_tree_after_recovery(scene: Scene) -> None:
    bundle = manifest.load(scene.toy.bundle)
    image = scene.toy.tree.parent / "image"
    assert scene.apply_old().code == 0
    shutil.copytree(scene.toy.tree, image, symlinks=True)

    def upgrade(kind: type[Disk]) -> None:
        target = target_module.discover(bundle, root=scene.toy.tree)
        with transaction.locked(target.root, kind) as disk:
            state, plan = work.make_plan(bundle, target, "apply", None, tree=disk)
            work.execute(bundle, target, state, plan, disk=disk)

    count: list[str] = []
    upgrade(hooked(lambda _, name, path: count.append(name)))
    assert scene.seen() == scene.fresh
    ends = set()
    for number in range(1, len(count), 9):
        left = [number]

        def dying(left: list[int], *_: object) -> None:
            left[0] -= 1
            if left[0] == 0:
                trees.kill_self()

        trees.fresh(scene.toy.tree).rmdir()
        shutil.copytree(image, scene.toy.tree, symlinks=True)
        with pytest.raises(Killed):
            forked(partial(upgrade, hooked(partial(dying, left))))
        state, log = transaction.recover(scene.toy.tree)
        assert log is None or (log.from_level, log.to_level) == ("1.0:gamma-third", "delta-new")
        assert scene.seen() == (scene.fresh if state == "new" else scene.patched[3])
        assert not (scene.toy.tree / journal.NAME).exists()
        ends.add(state)
    assert ends >= {"old", "new"}


# Filing.


def test_what_is_filed_is_whole_and_pinned_by_the_next_lock(scene: Scene) -> None:
    bundle = manifest.load(scene.toy.bundle)
    (filed,) = bundle.filed
    assert (filed.release, filed.lock.digest) == ("1.0", manifest.load(scene.old).lock.digest)
    assert "patches/releases/1.0/patches/pins.lock" in bundle.lock.artifacts
    assert trees.run(scene.toy, "--json", check=True).table["result"]["bundle"]["releases"] == ["1.0"]


def test_releases_are_filed_one_after_the_other_without_those_before(scene: Scene) -> None:
    assert trees.run(scene.toy, "release", "1.10").code == 0
    scene.toy.pin()
    assert trees.run(scene.toy, "release", "1.9").code == 0
    scene.toy.pin()
    assert [filed.release for filed in manifest.load(scene.toy.bundle).filed] == ["1.10", "1.9", "1.0"]
    assert not (scene.toy.bundle / "patches/releases/1.9/patches/releases").exists()
    assert trees.status(scene.toy).code == 0


@pytest.mark.parametrize("version", ["", "v1", "../1", "1/2", ".1", "1 0"])
def test_a_version_that_is_none_is_refused(scene: Scene, version: str) -> None:
    assert trees.run(scene.toy, "release", version, "--json").reason == "manifest"
    assert sorted(path.name for path in (scene.toy.bundle / "patches/releases").iterdir()) == ["1.0"]


def test_a_release_is_filed_once_and_from_a_bundle_that_holds(scene: Scene) -> None:
    assert trees.run(scene.toy, "release", "1.0", "--json").reason == "manifest"
    (scene.toy.bundle / "sources/prefill/alpha.py").write_bytes(b"edited\n")
    assert trees.run(scene.toy, "release", "1.1", "--json").reason == "artifact"
    assert [path.name for path in (scene.toy.bundle / "patches/releases").iterdir()] == ["1.0"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("patches/prefill/alpha-first.patch", "trailing-junk"),
        ("sources/prefill/alpha.py", "artifact"),
        ("patches/pins.lock", "artifact"),
        ("sources/prefill/more.py", "orphan"),
        ("notes.txt", "orphan"),
    ],
)
def test_an_edited_release_is_refused(scene: Scene, path: str, reason: str) -> None:
    place = scene.toy.bundle / "patches/releases/1.0" / path
    place.write_bytes((place.read_bytes() if place.exists() else b"") + b"\n")
    refused = trees.run(scene.toy, "--json", check=True)
    assert refused.code == Exit.REFUSED
    assert refused.reason == reason
    assert "patches/releases/1.0" in refused.table["error"]["where"]
