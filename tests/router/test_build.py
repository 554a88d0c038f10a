"""The builds and their wheels: what they were made from, that a second one costs nothing, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from lab.router import build
from lab.router.build import Builder, BuildError, Result
from lab.router.wheel import pack, status

ROOT = Path(__file__).resolve().parents[2]
SERIES = Path(os.environ.get("PATCHBUNDLE_SERIES", ROOT / "patches" / "series.toml"))


def test_a_second_build_is_found_and_compiles_nothing(
    built: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "missing_programs", lambda: ["nothing may be asked for"])
    begin = time.monotonic()
    again = Builder(SERIES).build("patched")
    assert again == built["patched"] and time.monotonic() - begin < 5


def test_only_the_patched_binary_carries_the_series_and_its_level(built: dict[str, Result]) -> None:
    mark = status(built["patched"].library)
    assert mark == built["patched"].receipt["series"] == Builder(SERIES).series.mark
    assert f"level={len(built['patched'].receipt['patches'])}]" in str(mark)
    assert status(built["stock"].library) is None


def test_the_build_leaves_the_lock_file_of_the_archive_alone(built: dict[str, Result]) -> None:
    builder = Builder(SERIES)
    lock = build.members(build.fetch(build.ROUTER, builder.cache))["bindings/python/Cargo.lock"]
    for variant in build.VARIANTS:
        tree = builder.place / "trees" / variant
        if tree.exists():
            assert (tree / "bindings/python/Cargo.lock").read_bytes() == lock


def test_a_wheel_tells_what_it_was_built_from_and_imports(built: dict[str, Result], tmp_path: Path) -> None:
    wheels = {variant: pack(result, tmp_path) for variant, result in built.items()}
    assert status(wheels["patched"]) == built["patched"].receipt["series"]
    assert status(wheels["stock"]) is None and "+patchbundle.stock-" in wheels["stock"].name
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(wheels["patched"])], check=True)
    code = "import sglang_router, sglang_router.sglang_router_rs as rust; print(rust.get_version_string())"
    path = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True)
    assert done.returncode == 0 and "0.3.2" in done.stdout, done.stderr


def test_status_refuses_what_is_no_binary_and_a_mixed_wheel(built: dict[str, Result], tmp_path: Path) -> None:
    text = tmp_path / "x.so"
    text.write_bytes(b"no binary")
    with pytest.raises(BuildError, match="no binary"):
        status(text)
    mixed = tmp_path / "mixed.whl"
    with zipfile.ZipFile(mixed, "w") as archive:
        archive.writestr("a.so", b"\x7fELF")
        archive.writestr("b.so", b"\x7fELF" + Builder(SERIES).series.mark.encode())
    with pytest.raises(BuildError, match="different builds"):
        status(mixed)


def test_missing_debian_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda program: None if program in ("protoc", "perl") else "/bin/true")
    monkeypatch.setattr(build, "toolchain", lambda: "rustc of a test")
    with pytest.raises(BuildError, match="missing Debian packages: protobuf-compiler perl"):
        Builder(SERIES).build("stock")


def test_too_little_room_is_said_with_both_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "COLD_BYTES", 1 << 60)
    with pytest.raises(BuildError, match=r"needs \d+ GiB free and has \d+\.\d GiB"):
        Builder(SERIES).build("stock")


def test_a_damaged_archive_in_the_cache_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "archives" / build.HARMONY.sha256 / build.HARMONY.filename
    place.parent.mkdir(parents=True)
    place.write_bytes(b"something else")
    with pytest.raises(BuildError, match="does not have SHA-256"):
        build.fetch(build.HARMONY, tmp_path)


def test_a_patch_that_does_not_apply_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="does not apply"):
        build.patched_files({"README": b"an empty tree"}, build.read_series(SERIES))


def test_an_unknown_patch_to_stop_at_is_refused() -> None:
    with pytest.raises(BuildError, match="no router patch nonsense"):
        build.read_series(SERIES, "nonsense")
    with pytest.raises(BuildError, match="neither of"):
        Builder(SERIES).build("other")


def test_a_tree_keeps_the_time_of_what_does_not_change_and_loses_what_is_gone(tmp_path: Path) -> None:
    build.write_tree(tmp_path, {"a/b": b"1", "c": b"2"})
    before = (tmp_path / "a/b").stat().st_mtime_ns
    assert build.write_tree(tmp_path, {"a/b": b"1", "d": b"3"}) == 1
    assert (tmp_path / "a/b").stat().st_mtime_ns == before and not (tmp_path / "c").exists()
