"""The toy that other tests stand on is itself what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchbundle import manifest
from patchbundle import plan as plan_module
from patchbundle.identity import File
from tests import toy
from tests.toy import Toy


@pytest.fixture
def made(tmp_path: Path) -> Toy:
    return toy.make(tmp_path)


def test_the_toy_bundle_loads_and_has_a_level_for_each_patch(made: Toy) -> None:
    bundle = manifest.load(made.bundle)
    assert bundle.pins(bundle.bases[toy.BASE_ID]).levels == toy.LEVELS


def test_the_toy_series_makes_the_files_that_were_written_down_by_hand(made: Toy) -> None:
    bundle = manifest.load(made.bundle)
    base = bundle.bases[toy.BASE_ID]
    touched = plan_module.touched_paths(bundle, base)
    chain = plan_module.levels(bundle, base, {path: toy.BASE.get(path) for path in touched})
    for level, tree in enumerate(chain):
        expected = {path: file for path, file in toy.after(level).items() if path in touched}
        assert {path: file for path, file in tree.items() if file is not None} == expected


def test_the_toy_is_made_the_same_twice(tmp_path: Path) -> None:
    one, two = toy.make(tmp_path / "one"), toy.make(tmp_path / "two")
    lock = Path("patches/pins.lock")
    assert (one.bundle / lock).read_bytes() == (two.bundle / lock).read_bytes()
    assert (one.tree / toy.RECORD).read_bytes() == (two.tree / toy.RECORD).read_bytes()


def test_the_installed_toy_holds_the_files_of_its_wheel(made: Toy) -> None:
    for path, file in toy.BASE.items():
        assert (made.tree / path).read_bytes() == file.data
        assert bool((made.tree / path).stat().st_mode & 0o100) == (file.mode == "100755")


def test_a_toy_without_a_record_has_no_metadata(tmp_path: Path) -> None:
    assert not (toy.make(tmp_path, with_record=False).tree / toy.INFO).exists()


def test_a_toy_with_its_own_series_is_pinned_too(tmp_path: Path) -> None:
    change = toy.diff("sglang/srt/old.py", File(toy.OLD), File(toy.OLD + b"more\n"))
    made = toy.make(tmp_path, entries=[toy.Entry("only-one", change)], sources={})
    assert [patch.id for patch in manifest.load(made.bundle).patches] == ["only-one"]
