"""The builds and their wheels: what they were made from, that a second one costs nothing, and what is refused.

Where the recipe itself is not the subject, a stand-in for cargo takes the compiler's place: it makes a library that
carries the mark it was given, and writes down that it ran.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.router import build
from lab.router.build import Builder, BuildError, Result
from lab.router.wheel import pack
from patchbundle import binary, fetch
from patchbundle.errors import BundleError, Reason

ROOT = Path(__file__).resolve().parents[2]

CARGO = """#!/bin/bash
# A stand-in for cargo: target folder and mark as cargo gets them.
while [ $# -gt 0 ]; do [ "$1" = --target-dir ] && target=$2; shift; done
echo begin >> "$RUNS"
sleep "${CARGO_SECONDS:-0}"
echo "   Compiling one crate"
mkdir -p "$target/debug"
printf '\\177ELF PyInit_sglang_router_rs %s' "${FALSE_MARK-$PATCHBUNDLE_ROUTER_SERIES}" \
    > "$target/debug/libsglang_router_rs.so"
echo end >> "$RUNS"
"""


def test_a_second_build_is_found_and_compiles_nothing(
    built: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "missing_programs", lambda: ["nothing may be asked for"])
    for variant in build.VARIANTS:
        assert Builder().build(variant) == built[variant]


def test_only_the_patched_binary_carries_the_series_and_its_level(built: dict[str, Result]) -> None:
    builder = Builder()
    found = binary.read(built["patched"].library)
    assert found == binary.Built(built["patched"].receipt["series"], len(builder.patches))
    assert binary.name_of(builder.bundle, builder.base, found) == builder.patches[-1]
    assert binary.read(built["stock"].library) == binary.Built("", 0)


def test_what_is_compiled_is_what_apply_makes_of_the_archive(tmp_path: Path) -> None:
    builder = Builder()
    root = tmp_path / "crate"
    fetch.unpack(fetch.fetch(builder.base, builder.base.archives[0]), root)
    command = [sys.executable, str(ROOT / "tools" / "apply.py"), "apply", "--root", str(root)]
    subprocess.run(command, check=True, capture_output=True)
    applied = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    del applied[builder.base.receipt]
    stock = build.unpacked(builder.base, builder.base.archives[0])
    assert build.patched_files(builder.bundle, builder.base, stock, builder.level) == applied


def test_the_build_leaves_the_lock_file_of_the_archive_alone(built: dict[str, Result]) -> None:
    builder = Builder()
    lock = build.unpacked(builder.base, builder.base.archives[0])[build.LOCK_FILE]
    trees = [builder.place / "trees" / variant / build.LOCK_FILE for variant in build.VARIANTS]
    assert all(path.read_bytes() == lock for path in trees if path.exists())


def test_a_wheel_tells_what_it_was_built_from_and_imports(built: dict[str, Result], tmp_path: Path) -> None:
    wheels = {variant: pack(Builder(), result, tmp_path) for variant, result in built.items()}
    assert binary.read(wheels["patched"]).series == built["patched"].receipt["series"]
    assert binary.read(wheels["stock"]).level == 0 and "+patchbundle.stock-" in wheels["stock"].name
    command = [sys.executable, str(ROOT / "tools" / "apply.py"), "status", "--router", str(wheels["patched"])]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0 and f"({Builder().patches[-1]})" in said.stdout, said.stdout + said.stderr
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command += ["--no-index", "--target", str(tmp_path / "site"), str(wheels["patched"])]
    subprocess.run(command, check=True)
    code = "import sglang_router, sglang_router.sglang_router_rs as rust; print(rust.get_version_string())"
    path = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True)
    assert done.returncode == 0 and "0.3.2" in done.stdout, done.stderr
    # Back to stock: its wheel over the patched one.
    library = tmp_path / "site" / "sglang_router" / "sglang_router_rs.abi3.so"
    for variant, says in (("patched", f"({Builder().patches[-1]})"), ("stock", "(base)")):
        subprocess.run([*command[:-1], "--upgrade", str(wheels[variant])], check=True)
        ask = [sys.executable, str(ROOT / "tools" / "apply.py"), "status", "--router", str(library)]
        said = subprocess.run(ask, capture_output=True, text=True)
        assert says in said.stdout, said.stdout + said.stderr
        assert build.file_digest(library) == built[variant].receipt["library_sha256"]


class Cache:
    """A cache folder of its own that shares the archives, with the stand-in for cargo on the path."""

    def __init__(self, folder: Path) -> None:
        (folder / "cache").mkdir()
        (folder / "cache" / "archives").symlink_to(fetch.cache_folder() / "archives")
        (folder / "bin").mkdir()
        cargo = folder / "bin" / "cargo"
        cargo.write_text(CARGO)
        cargo.chmod(0o755)
        self.environment = os.environ | {
            "PATCHBUNDLE_CACHE": str(folder / "cache"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "RUNS": str(folder / "runs"),
        }
        self.folder = folder

    def start(self, **environment: str) -> subprocess.Popen[str]:
        """Begin a patched build as a process of its own."""
        command = [sys.executable, "-m", "lab.router.build", "patched"]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def wait_for_cargo(self) -> None:
        limit = time.monotonic() + 120
        while not self.runs:
            assert time.monotonic() < limit, "cargo was never started"
            time.sleep(0.02)

    @property
    def runs(self) -> list[str]:
        """``begin`` and ``end`` of each run of cargo, in order."""
        path = self.folder / "runs"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def results(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob("cache/router/*/results/*/receipt.json"))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def ends(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def test_of_two_builds_at_once_one_compiles_and_the_other_waits_and_finds_it(cache: Cache) -> None:
    both = [cache.start(CARGO_SECONDS="3") for _ in range(2)]
    said = [ends(one) for one in both]
    assert cache.runs == ["begin", "end"] and len(cache.results) == 1
    assert sum("another build holds" in text for text in said) == 1


def test_a_build_that_was_killed_is_made_again_whole(cache: Cache) -> None:
    killed = cache.start(CARGO_SECONDS="60")
    cache.wait_for_cargo()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert cache.results == []
    left = next(iter(cache.folder.glob("cache/router/*"))) / "results" / ".making-left"
    (left / "result").mkdir(parents=True)
    ends(cache.start())
    assert cache.runs == ["begin", "begin", "end"] and len(cache.results) == 1 and not left.exists()
    assert "found" in ends(cache.start()) and len(cache.runs) == 3


def test_a_compiler_that_outlives_its_killed_build_is_waited_for(cache: Cache) -> None:
    killed = cache.start(CARGO_SECONDS="4")
    cache.wait_for_cargo()
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    ends(cache.start())
    assert cache.runs == ["begin", "end"] * 2, "two compilers wrote one target folder"


@pytest.mark.parametrize("mark", ["", "[patchbundle-router-series sha256=" + "0" * 64 + " level=4]"])
def test_a_library_that_does_not_say_what_it_was_built_from_is_not_kept(cache: Cache, mark: str) -> None:
    process = cache.start(FALSE_MARK=mark)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1 and "does not say that it was built from the series" in said
    assert cache.results == []


def test_a_failed_compiler_is_told_with_the_end_of_its_log(cache: Cache) -> None:
    (cache.folder / "bin" / "cargo").write_text("#!/bin/sh\necho 'error: no such crate'\nexit 101\n")
    said, _ = cache.start().communicate(timeout=300)
    assert "cargo failed (101)" in said and "no such crate" in said and cache.results == []


def test_missing_debian_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda program: None if program in ("protoc", "perl") else "/bin/true")
    monkeypatch.setattr(build, "toolchain", lambda: "rustc of a test")
    with pytest.raises(BuildError, match="missing Debian packages: protobuf-compiler perl"):
        Builder().build("stock")


def test_a_protoc_without_its_own_types_is_named_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Debian has them in a package of their own; without it a cold build ended at the last crate but one."""
    protoc = tmp_path / "protoc"
    protoc.write_text('#!/bin/sh\necho "google/protobuf/timestamp.proto: File not found." >&2\nexit 1\n')
    protoc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert build.missing_programs() == ["libprotobuf-dev"]


def test_too_little_room_is_said_with_both_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "COLD_BYTES", 1 << 60)
    with pytest.raises(BuildError, match=r"needs \d+ GiB free and has \d+\.\d GiB"):
        Builder().build("stock")


def test_a_damaged_archive_in_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path))
    builder = Builder()
    for archive in (builder.base.archives[0], *builder.base.build):
        place = tmp_path / "archives" / archive.sha256 / archive.filename
        place.parent.mkdir(parents=True)
        place.write_bytes(b"something else")
        with pytest.raises(BundleError) as refusal:
            build.unpacked(builder.base, archive)
        assert refusal.value.reason is Reason.ARCHIVE


def test_files_that_are_not_the_pinned_ones_are_not_patched() -> None:
    builder = Builder()
    stock = build.unpacked(builder.base, builder.base.archives[0])
    name = next(path for path, identity in builder.bundle.pins(builder.base).at(0).items() if identity.is_file)
    for files in ({}, stock | {name: stock[name] + b"\n"}):
        with pytest.raises(BundleError) as refusal:
            build.patched_files(builder.bundle, builder.base, files, builder.level)
        assert refusal.value.reason is Reason.DRIFT


def test_a_patch_to_stop_at_must_be_one_of_the_router() -> None:
    with pytest.raises(BundleError, match="nonsense"):
        Builder(upto="nonsense")
    with pytest.raises(BuildError, match="called stock"):
        Builder(upto="base")
    with pytest.raises(BuildError, match="neither of"):
        Builder().build("other")


def test_a_tree_keeps_the_time_of_what_does_not_change_and_loses_what_is_gone(tmp_path: Path) -> None:
    build.write_tree(tmp_path, {"a/b": b"1", "c": b"2"})
    before = (tmp_path / "a/b").stat().st_mtime_ns
    assert build.write_tree(tmp_path, {"a/b": b"1", "d": b"3"}) == 1
    assert (tmp_path / "a/b").stat().st_mtime_ns == before and not (tmp_path / "c").exists()


def test_only_the_results_used_last_are_kept_and_stock_always(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builder = Builder()
    builder.place = tmp_path
    results = tmp_path / "results"
    for age, name in enumerate(["patched-new", "patched-old", "stock-1"]):
        (results / name).mkdir(parents=True)
        os.utime(results / name, (1000 - age, 1000 - age))
    monkeypatch.setattr(build, "KEPT_RESULTS", 1)
    builder._prune(results / "patched-new")
    assert sorted(path.name for path in results.iterdir()) == ["patched-new", "stock-1"]
