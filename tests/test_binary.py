"""What a router's binary says it was built from, and what is no router's binary."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from patchbundle import binary, manifest
from patchbundle.bases import Base
from patchbundle.binary import Built
from patchbundle.errors import BundleError, Exit, Reason
from patchbundle.identity import Identity
from patchbundle.lock import Lock, Pins
from patchbundle.manifest import Bundle
from tests import trees
from tests.test_cli import valid
from tests.toy import Toy

STOCK = b"\x7fELF\x02 some code PyInit_sglang_router_rs\0 more"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return manifest.load(trees.REPOSITORY)


@pytest.fixture(scope="module")
def base(bundle: Bundle) -> Base:
    return binary.base_of(bundle)


def at(bundle: Bundle, base: Base, level: int) -> bytes:
    """A binary of a level."""
    return STOCK + binary.mark(bundle, base, level).encode() + b"\0tail"


def test_the_mark_of_every_level_is_read_back(bundle: Bundle, base: Base, tmp_path: Path) -> None:
    levels = ["base", *bundle.pins(base).levels]
    for level, name in enumerate(levels):
        path = tmp_path / f"{level}.so"
        path.write_bytes(at(bundle, base, level))
        built = binary.read(path)
        assert built == Built(binary.series_digest(bundle, base, level) if level else "", level)
        assert binary.name_of(bundle, base, built) == name


def test_no_two_levels_have_one_digest(bundle: Bundle, base: Base) -> None:
    levels = range(len(bundle.pins(base).levels) + 1)
    assert len({binary.series_digest(bundle, base, level) for level in levels}) == len(levels)


def test_the_digest_is_of_what_is_compiled_and_not_of_the_whole_bundle(bundle: Bundle, base: Base) -> None:
    top = len(bundle.pins(base).levels)
    words = Bundle(bundle.root, bundle.bases, (), {}, bundle.lock)
    assert binary.series_digest(words, base, top) == binary.series_digest(bundle, base, top)
    pins = bundle.pins(base)
    named = Pins(pins.role, tuple(f"{name}-2" for name in pins.levels), pins.paths, pins.folders)
    renamed = Bundle(bundle.root, bundle.bases, bundle.patches, bundle.artifacts, Lock({}, {base.id: named}))
    assert binary.series_digest(renamed, base, top) != binary.series_digest(bundle, base, top)
    path = next(iter(pins.paths))
    changed = {**pins.paths, path: (*pins.paths[path][:-1], Identity.of(b"other bytes"))}
    lock = Lock(bundle.lock.artifacts, {base.id: Pins(pins.role, pins.levels, changed, pins.folders)})
    other = Bundle(bundle.root, bundle.bases, bundle.patches, bundle.artifacts, lock)
    assert binary.series_digest(other, base, top) != binary.series_digest(bundle, base, top)
    assert binary.series_digest(other, base, top - 1) == binary.series_digest(bundle, base, top - 1)


@pytest.mark.parametrize(
    ("series", "level"), [("0" * 64, 1), ("0" * 64, 9999), ("digest", 1)], ids=["digest", "level", "swapped"]
)
def test_a_series_of_another_bundle_has_no_name(bundle: Bundle, base: Base, series: str, level: int) -> None:
    # A level's digest under another level's number is no level either.
    digest = binary.series_digest(bundle, base, 2) if series == "digest" else series
    assert binary.name_of(bundle, base, Built(digest, level)) is None
    assert binary.name_of(bundle, base, Built(digest, len(bundle.pins(base).levels) + 1)) is None


def refused(path: Path) -> BundleError:
    with pytest.raises(BundleError) as caught:
        binary.read(path)
    assert (caught.value.reason, caught.value.exit_code) == (Reason.NO_BINARY, Exit.REFUSED)
    assert str(path) in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "data",
    [b"", b"text", STOCK[4:], b"\x7fELF another library", b"PK\x03\x04 no archive"],
    ids=["empty", "text", "headless", "library", "broken-archive"],
)
def test_what_is_no_binary_of_the_router_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(data)
    refused(path)


def test_a_binary_with_the_marks_of_two_series_is_refused(bundle: Bundle, base: Base, tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(at(bundle, base, 1) + at(bundle, base, 2))
    assert "two series" in str(refused(path))
    path.write_bytes(at(bundle, base, 1) * 2)
    assert binary.read(path).level == 1


def wheel(path: Path, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_the_one_binary_of_a_wheel_is_read_and_any_other_number_is_refused(
    bundle: Bundle, base: Base, tmp_path: Path
) -> None:
    top = len(bundle.pins(base).levels)
    good = {"a.so": at(bundle, base, top), "b.py": b"1"}
    assert binary.read(wheel(tmp_path / "good.whl", **good)).level == top
    for name, files in (("none", {"b.py": b"1"}), ("two", good | {"c.so": STOCK}), ("other", {"a.so": b"\x7fELF"})):
        refused(wheel(tmp_path / f"{name}.whl", **files))


def test_a_damaged_wheel_is_refused(bundle: Bundle, base: Base, tmp_path: Path) -> None:
    path = wheel(tmp_path / "x.whl", **{"a.so": at(bundle, base, 1)})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"PyInit", b"PyInot", 1))
    refused(path)


def test_status_tells_series_and_level_as_text_and_as_json(bundle: Bundle, base: Base, tmp_path: Path) -> None:
    real = Toy(trees.REPOSITORY, tmp_path, tmp_path)
    top = len(bundle.pins(base).levels)
    cases = [
        (top, f"level:   {top} of {top} ({bundle.pins(base).levels[-1]})", 0),
        (0, f"level:   0 of {top} (base)", 0),
    ]
    for level, line, code in cases:
        path = tmp_path / f"{level}.so"
        path.write_bytes(at(bundle, base, level))
        said = trees.run(real, "status", "--router", path)
        assert (said.code, said.out.splitlines()[-1]) == (code, line)
        told = valid(trees.run(real, "status", "--router", path, "--json"), "status", code)["router"]
        assert (told["level"], told["path"]) == (level, str(path))
    path = tmp_path / "other.so"
    path.write_bytes(STOCK + b"[patchbundle-router-series sha256=" + b"0" * 64 + b" level=3]")
    said = trees.run(real, "status", "--router", path)
    assert (said.code, said.out.splitlines()[-1]) == (1, "level:   3, of another bundle")
    assert valid(trees.run(real, "status", "--router", path, "--json"), "status", 1)["router"]["name"] is None


def test_status_of_a_router_goes_with_no_option_of_a_target(tmp_path: Path) -> None:
    real = Toy(trees.REPOSITORY, tmp_path, tmp_path)
    path = tmp_path / "x.so"
    path.write_bytes(STOCK)
    for more in (("--root", tmp_path), ("--role", "router"), ("--require-torch",)):
        assert trees.run(real, "status", "--router", path, *more).code == Exit.USAGE
    assert trees.run(real, "status", "--router", tmp_path / "none.so").code == Exit.USAGE
    path.write_bytes(b"text")
    answer = json.loads(trees.run(real, "status", "--router", path, "--json").out)
    assert answer["error"]["reason"] == "no-binary"


def test_a_bundle_without_a_compiled_base_says_so(toy: Toy, tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(STOCK)
    answer = json.loads(trees.run(toy, "status", "--router", path, "--json").out)
    assert answer["error"]["reason"] == "no-target" and "compiled" in answer["error"]["expected"]
