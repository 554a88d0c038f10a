"""Archives: by hash, from the cache, and never another one."""

from __future__ import annotations

import os
import shutil
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from patchbundle import fetch, manifest
from patchbundle.bases import Archive, Base
from patchbundle.errors import BundleError, Reason
from tests import toy as toys
from tests import trees
from tests.toy import Toy


@pytest.fixture
def cached(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> tuple[Base, Archive, Path]:
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(toy.cache))
    base = manifest.load(toy.bundle).bases[toys.BASE_ID]
    return base, base.archives[0], next((toy.cache / "archives").glob("*/*.whl"))


def test_offline_from_the_cache(cached: tuple[Base, Archive, Path]) -> None:
    base, archive, place = cached
    assert fetch.fetch(base, archive, offline=True) == place


def test_offline_and_not_in_the_cache(cached: tuple[Base, Archive, Path]) -> None:
    base, archive, place = cached
    place.unlink()
    with pytest.raises(BundleError) as caught:
        fetch.fetch(base, archive, offline=True)
    assert caught.value.reason is Reason.NOT_FETCHED


@pytest.mark.parametrize("offline", [True, False])
def test_a_wrong_archive_in_the_cache_is_refused_and_kept(cached: tuple[Base, Archive, Path], offline: bool) -> None:
    base, archive, place = cached
    data = bytearray(place.read_bytes())
    data[100] ^= 1
    place.write_bytes(data)
    with pytest.raises(BundleError) as caught:
        fetch.fetch(base, archive, offline=offline)
    assert caught.value.reason is Reason.ARCHIVE
    assert str(place) in caught.value.where
    assert place.read_bytes() == data


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda place: place.symlink_to("nowhere")])
@pytest.mark.parametrize("offline", [True, False])
def test_something_odd_in_the_place_of_an_archive_is_refused_at_once(
    cached: tuple[Base, Archive, Path], put: Callable[[Path], None], offline: bool
) -> None:
    base, archive, place = cached
    place.unlink()
    put(place)
    with pytest.raises(BundleError) as caught:
        fetch.fetch(base, archive, offline=offline)
    assert (caught.value.reason, caught.value.found) == (Reason.ARCHIVE, "no plain file")


@pytest.mark.parametrize("arguments", [["--offline"], []])
def test_what_is_cached_is_found_in_a_cache_that_may_only_be_read(arguments: list[str]) -> None:
    with trees.open_place() as place:
        toy = toys.make(place / "toy")
        for path in [toy.cache, *toy.cache.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = trees.snapshot(toy.cache)
        result = trees.unprivileged(lambda: trees.run(toy, "fetch-base", *arguments))
        assert result.code == 0, result
        assert trees.snapshot(toy.cache) == before


def test_offline_makes_no_cache(
    cached: tuple[Base, Archive, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path / "none"))
    with pytest.raises(BundleError) as caught:
        fetch.fetch(*cached[:2], offline=True)
    assert caught.value.reason is Reason.NOT_FETCHED
    assert not (tmp_path / "none").exists()


def test_two_clones_that_want_the_same_archive_fetch_it_once(
    cached: tuple[Base, Archive, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for the first and finds what it fetched. A lock belongs to an open file, so threads will do."""
    base, archive, place = cached
    data = place.read_bytes()
    place.unlink()
    fetched: list[Path] = []
    both = threading.Event()

    def slow(_: Base, item: Archive, folder: Path) -> Path:
        fetched.append(folder)
        if len(fetched) > 1:
            both.set()
        both.wait(0.5)
        (folder / item.filename).write_bytes(data)
        return folder / item.filename

    monkeypatch.setattr(fetch, "_download", slow)
    with ThreadPoolExecutor(2) as pool:
        places = list(pool.map(lambda _: fetch.fetch(base, archive), range(2)))
    assert places == [place, place]
    assert len(fetched) == 1


def index(place: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a folder: pip asks nobody else."""
    folder.mkdir()
    shutil.move(place, folder / place.name)
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder / place.name


def test_what_the_index_hands_out_lands_in_the_cache(
    cached: tuple[Base, Archive, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, archive, place = cached
    data = index(place, tmp_path / "index", monkeypatch).read_bytes()
    assert fetch.fetch(base, archive) == place
    assert place.read_bytes() == data
    assert [item.name for item in place.parent.parent.iterdir() if "fetching" in item.name] == []


def test_another_archive_of_the_same_name_from_the_index_is_refused(
    cached: tuple[Base, Archive, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, archive, place = cached
    with zipfile.ZipFile(index(place, tmp_path / "index", monkeypatch), "a") as wheel:
        wheel.writestr("sglang/more.py", b"evil = 1\n")
    with pytest.raises(BundleError) as caught:
        fetch.fetch(base, archive)
    assert caught.value.reason is Reason.ARCHIVE
    assert not place.exists()


def test_an_index_that_has_nothing_is_told(
    cached: tuple[Base, Archive, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, archive, place = cached
    index(place, tmp_path / "index", monkeypatch).unlink()
    with pytest.raises(BundleError) as caught:
        fetch.fetch(base, archive)
    assert caught.value.reason is Reason.NOT_FETCHED
    assert caught.value.exit_code == 6


def test_cache_folder_follows_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHBUNDLE_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert fetch.cache_folder() == Path("/one")
    monkeypatch.delenv("PATCHBUNDLE_CACHE")
    assert fetch.cache_folder() == Path("/two/patchbundle")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_folder() == Path.home() / ".cache/patchbundle"


def test_clean_cache_keeps_what_is_named_and_what_is_being_fetched(toy: Toy) -> None:
    archives = toy.cache / "archives"
    (archives / ("0" * 64)).mkdir()
    (archives / ("0" * 64) / "old.whl").write_bytes(b"x")
    (archives / "fetching-abc").mkdir()
    (archives / "fetching-abc" / "half.whl").write_bytes(b"x")
    assert trees.run(toy, "clean-cache").code == 0
    assert not (archives / ("0" * 64)).exists()
    assert (archives / "fetching-abc" / "half.whl").exists()
    assert trees.run(toy, "clean-cache").code == 3
    assert trees.run(toy, "fetch-base", "--offline").code == 0


def test_unpacked_modes_do_not_depend_on_the_umask(cached: tuple[Base, Archive, Path], tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        fetch.unpack(cached[2], tmp_path / "tree")
    finally:
        os.umask(before)
    assert (tmp_path / "tree/sglang/srt/engine.py").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "tree/sglang/srt/tool.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["../out.py", "/out.py", "sglang/../../out.py"])
def test_an_archive_cannot_write_outside_its_tree(tmp_path: Path, name: str) -> None:
    place = tmp_path / "x.whl"
    with zipfile.ZipFile(place, "w") as wheel:
        wheel.writestr(name, b"x")
    with pytest.raises(BundleError) as caught:
        fetch.unpack(place, tmp_path / "tree")
    assert caught.value.reason is Reason.NAME
    assert not (tmp_path / "out.py").exists()
