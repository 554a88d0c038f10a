"""The lock is made from what is proven, and nothing but the lock is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchbundle import pin
from patchbundle.errors import BundleError
from patchbundle.identity import File
from tests import toy as toy_module
from tests.toy import ENGINE, HOME, SOURCES, Entry, Toy, cache_at, diff


def refused(folder: Path, entry: Entry, sources: dict[str, bytes] | None = None, **base: File) -> BundleError:
    """What ``pin`` says of a series of one entry on a base with files more."""
    files = {**toy_module.BASE, **base}
    made = toy_module.make(folder / "toy", entries=[entry], sources=sources or {}, base=files, pinned=False)
    before = {path: path.read_bytes() for path in made.bundle.rglob("*") if path.is_file()}
    with pytest.raises(BundleError) as caught:
        made.pin()
    assert {path: path.read_bytes() for path in made.bundle.rglob("*") if path.is_file()} == before
    return caught.value


def test_pinning_twice_changes_nothing(toy: Toy) -> None:
    before = (toy.bundle / "patches" / "pins.lock").read_bytes()
    assert toy.pin() is False
    assert (toy.bundle / "patches" / "pins.lock").read_bytes() == before


def test_checking_tells_of_a_change_and_writes_nothing(toy: Toy) -> None:
    lock = toy.bundle / "patches" / "pins.lock"
    before = lock.read_bytes()
    (toy.bundle / "sources" / "prefill" / "alpha.py").write_bytes(b"changed = 1\n")
    with cache_at(toy.cache):
        assert pin.pin(toy.bundle, offline=True, write=False)[1] is True
    assert lock.read_bytes() == before


def test_only_the_lock_is_written(toy: Toy) -> None:
    (toy.bundle / "sources" / "prefill" / "alpha.py").write_bytes(b"changed = 1\n")
    before = {path: path.read_bytes() for path in toy.bundle.rglob("*") if path.is_file()}
    assert toy.pin() is True
    changed = {path.name for path, data in before.items() if path.read_bytes() != data}
    assert changed == {"pins.lock"}


def test_a_diff_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    stale = diff("sglang/srt/engine.py", File(ENGINE.replace(b"engine = 4\n", b"engine = four\n")), File(b"gone\n"))
    assert refused(tmp_path, Entry("one", stale)).code == "context-differs"


def test_more_than_three_lines_of_context_are_refused(tmp_path: Path) -> None:
    thick = "".join(f" engine = {number}\n" for number in range(1, 6)) + "+new\n"
    thick += "".join(f" engine = {number}\n" for number in range(6, 9))
    text = f"--- a/sglang/srt/engine.py\n+++ b/sglang/srt/engine.py\n@@ -1,8 +1,9 @@\n{thick}".encode()
    fault = refused(tmp_path, Entry("one", text))
    assert fault.code == "artifact"
    assert "5 before" in (fault.found or "")


def test_a_new_file_below_a_file_of_the_release_is_refused(tmp_path: Path) -> None:
    below = diff("sglang/srt/tool.sh/inside.py", None, File(b"x = 1\n"))
    assert refused(tmp_path, Entry("one", below)).code == "parent"


def test_a_new_file_that_differs_from_one_of_the_release_in_case_is_refused(tmp_path: Path) -> None:
    again = diff("sglang/srt/Engine.py", None, File(b"x = 1\n"))
    assert refused(tmp_path, Entry("one", again)).code == "collision"


def test_a_source_that_lands_on_a_file_of_the_release_is_refused(tmp_path: Path) -> None:
    entry = Entry("one", diff("sglang/srt/old.py", File(toy_module.OLD), None), ("prefill/alpha.py",))
    there = {f"{HOME}/alpha.py": File(b"theirs = 1\n")}
    fault = refused(tmp_path, entry, {"prefill/alpha.py": SOURCES["prefill/alpha.py"]}, **there)
    assert fault.code == "file-exists"
