"""Every published wheel of the pinned bases: it is the pinned one, and the series means the same in all of them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from patchbundle import bases as bases_module
from patchbundle import fetch, manifest, plan, record
from patchbundle.bases import Archive, Base
from patchbundle.identity import File
from patchbundle.tree import Tree
from tests import trees
from tests.toy import Toy

pytestmark = pytest.mark.bases
BASES = bases_module.load(trees.REPOSITORY / "config" / "bases.toml")
WHEELS = [(base, archive) for base in BASES.values() for archive in base.archives if archive.is_wheel]
ids = [archive.filename for _, archive in WHEELS]


def test_all_sixteen_wheels_are_pinned() -> None:
    for version in ("0.5.17", "0.5.19"):
        names = {archive.filename for base, archive in WHEELS if base.version == version}
        assert names == {
            f"sglang-{version}-cp{python}-cp{python}-manylinux_2_34_{machine}.whl"
            for python in (310, 311, 312, 313)
            for machine in ("x86_64", "aarch64")
        }


def place_of(base: Base, archive: Archive) -> Path:
    """The archive; those for other machines only if they are in the cache already or if all are asked for."""
    own = archive == fetch.default_archive(base)
    cached = (fetch.cache_folder() / "archives" / archive.sha256 / archive.filename).exists()
    if not (own or cached or os.environ.get("PATCHBUNDLE_ALL_WHEELS")):
        pytest.skip("not in the cache: run tools/apply.py fetch-base --all")
    return fetch.fetch(base, archive)


@pytest.mark.parametrize(("base", "archive"), WHEELS, ids=ids)
def test_archive_record_and_entries_are_as_pinned(base: Base, archive: Archive) -> None:
    place = place_of(base, archive)
    assert hashlib.sha256(place.read_bytes()).hexdigest() == archive.sha256
    with zipfile.ZipFile(place) as wheel:
        listing = wheel.read(f"sglang-{base.version}.dist-info/RECORD")
    assert hashlib.sha256(listing).hexdigest() == archive.record
    assert record.entries_digest(record.entries(listing)) == archive.entries


@pytest.mark.parametrize(("base", "archive"), WHEELS, ids=ids)
def test_touched_files_are_the_same_in_every_wheel_of_a_version(base: Base, archive: Archive) -> None:
    """By each wheel's RECORD, and with bytes and mode for those that the series touches."""
    place = place_of(base, archive)
    pins = manifest.load(trees.REPOSITORY).pins(base)
    with zipfile.ZipFile(place) as wheel:
        names = set(wheel.namelist())
        for path, identity in pins.at(0).items():
            assert (path in names) == identity.is_file, path
            if identity.is_file:
                assert hashlib.sha256(wheel.read(path)).hexdigest() == identity.sha256, path
                assert bool(wheel.getinfo(path).external_attr >> 16 & 0o100) == (identity.mode == "100755"), path


@pytest.mark.parametrize("version", ["0.5.17", "0.5.19"])
def test_the_wheels_of_a_version_differ_in_compiled_files_alone(version: str) -> None:
    """So that a series over source files cannot mean two things."""
    tables = []
    for base, archive in WHEELS:
        if base.version == version:
            with zipfile.ZipFile(place_of(base, archive)) as wheel:
                tables.append(record.entries(wheel.read(f"sglang-{version}.dist-info/RECORD")))
    paths = {path for table in tables for path in table}
    differ = {path for path in paths if len({table.get(path) for table in tables}) > 1}
    assert len(tables) == 8
    assert differ
    assert {path for path in differ if not path.endswith(".so")} == {f"sglang-{version}.dist-info/WHEEL"}


def blob(file: File | None) -> str:
    """The name that git gives to a file's bytes; of no file, all zeros."""
    return hashlib.sha1(b"blob %d\0" % len(file.data) + file.data).hexdigest() if file else "0" * 40


@pytest.mark.parametrize("name", BASES)
def test_every_index_line_names_the_bytes_before_and_after_its_patch(name: str) -> None:
    """``git am -3`` looks the old blob up; a line that an edit by hand left behind sends it nowhere."""
    bundle = manifest.load(trees.REPOSITORY)
    base = bundle.bases[name]
    levels = plan.levels(bundle, base, dict(fetch.members(fetch.fetch(base, fetch.default_archive(base)))))
    wrong, seen = [], 0
    for patch, before, after in zip(bundle.series(base.role), levels, levels[1:], strict=False):
        text = bundle.artifacts[f"patches/{patch.file}"].decode("latin-1")
        heads = re.findall(r"^diff --git a/(\S+) b/\S+\n(?:\S+ ?.* mode .*\n)*index (\w+)\.\.(\w+)", text, re.MULTILINE)
        seen += len(heads)
        for path, old, new in heads:
            expected = blob(before.get(path))[: len(old)], blob(after.get(path))[: len(new)]
            if (old, new) != expected:
                wrong.append(f"{patch.file}: {path}: expected {'..'.join(expected)}, found {old}..{new}")
    assert not wrong
    assert seen == sum(
        bundle.artifacts[f"patches/{patch.file}"].count(b"\nindex ") for patch in bundle.series(base.role)
    )


def test_a_real_wheel_that_pip_installed_is_recognised_and_attested(tmp_path: Path) -> None:
    """pip adds its own lines to RECORD and makes scripts; status works in it, read-only, without special rights."""
    base = BASES["sglang-0.5.19"]
    wheel = fetch.fetch(base, fetch.default_archive(base))
    with trees.open_place() as place:
        site = place / "site"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
        subprocess.run([*command, "--target", str(site), str(wheel)], check=True)
        toy = Toy(trees.REPOSITORY, site, fetch.cache_folder())
        result = trees.check(toy, "--full", "--expect", "base")
        assert result.code == 0, result
        for path in site.rglob("*"):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)
        told = trees.unprivileged(lambda: trees.status(toy))
        assert told.code == 0, told
        with Tree(site) as tree:
            assert tree.kind(".patchbundle-journal") == "absent"
        shutil.rmtree(site)
