"""Build the router, stock and patched, from its pinned source archive.

The recipe: ``cargo build --locked`` in ``bindings/python`` of the archive, with its own lock file untouched. The lock
names one git source, openai-harmony 0.0.4. It is taken from the published archive of that release instead, through a
directory source replacement, so that no git repository is fetched.

Stock and patched trees share one target folder: all but the router's own two crates are compiled once. Everything lives
in the cache folder, keyed by the digests of what went in. A finished build is found again and not repeated; a killed
one goes on where it stopped, because the tree is only written where it differs and cargo keeps what it has compiled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from patchbundle import binary, fetch, manifest, plan
from patchbundle.bases import Archive, Base
from patchbundle.errors import BundleError
from patchbundle.identity import File
from patchbundle.manifest import Bundle
from patchbundle.plan import Stand

REPOSITORY = Path(__file__).resolve().parents[2]
HARMONY_GIT = "https://github.com/openai/harmony"
HARMONY_TAG = "v0.0.4"
LOCK_FILE = "bindings/python/Cargo.lock"
# Raised when the recipe itself changes, so that no result of an older recipe is taken for one of this.
RECIPE = 1
VARIANTS = ("stock", "patched")
GIB = 1 << 30
COLD_BYTES, WARM_BYTES = 5 * GIB, 2 * GIB
KEPT_RESULTS = 6


class BuildError(Exception):
    """The build cannot be done; the text says what is missing or wrong and what to do."""


# What the build runs, and the Debian package that holds it.
PROGRAMS = {
    "protoc": "protobuf-compiler",
    "pkg-config": "pkg-config",
    "cc": "gcc",
    "c++": "g++",
    "make": "make",
    "perl": "perl",
    "git": "git",
}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the exclusive lock file ``path``; says so once when another process holds it. Yields its descriptor.

    A child that is given the descriptor holds the lock too: a compiler that outlives a killed build is waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            click.echo(f"another build holds {path}; waiting for it", err=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def missing_programs() -> list[str]:
    """Debian packages (or what else) that the build needs and this machine lacks."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if shutil.which("pkg-config") and subprocess.run(["pkg-config", "--exists", "openssl"]).returncode:
        missing.append("libssl-dev")
    if shutil.which("protoc") and not _knows_timestamps():
        missing.append("libprotobuf-dev")
    return missing


def _knows_timestamps() -> bool:
    """Whether protoc finds the types that its package leaves to another: told before ten minutes of compiling."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "it.proto")
        path.write_text('syntax = "proto3";\nimport "google/protobuf/timestamp.proto";\n', encoding="utf-8")
        command = ["protoc", f"--proto_path={folder}", f"--descriptor_set_out={folder}/out", str(path)]
        return subprocess.run(command, capture_output=True).returncode == 0


def toolchain() -> str:
    """What ``rustc`` says of itself; part of the key of every result.

    Raises:
        BuildError: there is no cargo or no rustc.
    """
    if shutil.which("cargo") is None or shutil.which("rustc") is None:
        raise BuildError("cargo and rustc are needed (1.85 or newer); install a Rust toolchain, then run this again")
    return subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout


def unpacked(base: Base, archive: Archive) -> dict[str, bytes]:
    """Every file of a pinned source archive by its path, fetched into the cache if it is not there.

    Raises:
        BundleError: the archive is not to be had, or is not the pinned one.
    """
    name, _, version = archive.filename.removesuffix(".tar.gz").rpartition("-")
    place = fetch.fetch(base._replace(distribution=name, version=version), archive)
    return {path: file.data for path, file in fetch.members(place)}


def patched_files(bundle: Bundle, base: Base, files: dict[str, bytes], level: int) -> dict[str, bytes]:
    """All files of the tree at ``level``, from those of the base: the plan that ``apply`` would carry out.

    Raises:
        BundleError: the base's files, or those of any level between, are not as pinned.
    """
    pins = bundle.pins(base)
    touched = {path: File(files[path], pins.at(0)[path].mode) if path in files else None for path in pins.paths}
    changed = dict(files)
    for operation in plan.plan(Stand(bundle, base, 0), Stand(bundle, base, level), touched).operations:
        if operation.data is None:
            del changed[operation.path]
        elif operation.path != base.receipt:
            # The receipt names the whole bundle; what is compiled does not change with another role's patches.
            changed[operation.path] = operation.data
    return changed


def write_tree(root: Path, files: dict[str, bytes]) -> int:
    """Make ``root`` hold exactly ``files``; a file that is right already keeps its time. Returns the number written."""
    written = 0
    for path in list(root.rglob("*")):
        if (path.is_file() or path.is_symlink()) and str(path.relative_to(root)) not in files:
            path.unlink()
    for name, content in files.items():
        path = root / name
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        written += 1
    return written


def cargo_environment(profile: str, incremental: bool) -> dict[str, str]:
    """Environment of every cargo call. It must not vary: cargo compiles everything anew when a profile changes.

    ``incremental`` changes it for the router's own crates alone.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("CARGO_PROFILE_", "SMG_"))}
    environment |= {
        "CARGO_INCREMENTAL": str(int(incremental)),
        "GIT_CEILING_DIRECTORIES": "/",
        "CARGO_TERM_COLOR": "never",
    }
    for name in ("RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET", "CARGO_TARGET_DIR", "GIT_DIR"):
        environment.pop(name, None)
    if profile == "dev":
        environment["CARGO_PROFILE_DEV_DEBUG"] = "0"
    return environment


@dataclass(frozen=True)
class Result:
    """A finished build: ``folder`` goes on PYTHONPATH and holds the package ``sglang_router``."""

    folder: Path
    variant: str
    receipt: dict[str, Any]

    @property
    def library(self) -> Path:
        """The compiled extension module."""
        return self.folder / "sglang_router" / "sglang_router_rs.abi3.so"


class Builder:
    """One toolchain, one profile: the folder in which trees, target and results of all bundles of that kind lie."""

    def __init__(
        self, root: Path = REPOSITORY, profile: str = "dev", upto: str | None = None, incremental: bool = False
    ) -> None:
        """Read the bundle at ``root``; a patched build stops at the patch ``upto``, which is the last one by default.

        Raises:
            BundleError: the bundle is not as locked, or has no such patch.
            BuildError: ``upto`` leaves nothing to apply, or there is no Rust toolchain.
        """
        self.bundle, self.profile, self.incremental = manifest.load(root), profile, incremental
        self.base = binary.base_of(self.bundle)
        pins = self.bundle.pins(self.base)
        self.level = len(pins.levels) if upto is None else pins.level_of(upto)
        if self.level == 0:
            raise BuildError("a patched build needs a patch; the build without one is called stock")
        self.patches = pins.levels[: self.level]
        archives = [archive.sha256 for archive in (self.base.archives[0], *self.base.build)]
        kind = json.dumps([RECIPE, *archives, toolchain(), profile])
        self.place = fetch.cache_folder().resolve() / "router" / hashlib.sha256(kind.encode()).hexdigest()[:16]

    def series(self, variant: str) -> str:
        """Digest of what ``variant`` is patched with, in hexadecimal; empty for stock."""
        return binary.series_digest(self.bundle, self.base, self.level) if variant == "patched" else ""

    def result_folder(self, variant: str) -> Path:
        """Where the finished build of ``variant`` lies or will lie."""
        return self.place / "results" / f"{variant}-{(self.series(variant) or self.base.archives[0].sha256)[:16]}"

    def find(self, variant: str) -> Result | None:
        """The finished build of ``variant``, or None."""
        folder = self.result_folder(variant)
        try:
            receipt = json.loads((folder / "receipt.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Result(folder, variant, receipt)

    def build(self, variant: str) -> Result:
        """Return the finished build of ``variant``, compiled now if there is none.

        Raises:
            BuildError: a program, the network, or the room on the disk is missing, or the compiler failed.
        """
        if variant not in VARIANTS:
            raise BuildError(f"{variant} is neither of {', '.join(VARIANTS)}")
        if found := self.find(variant):
            os.utime(found.folder)
            return found
        if missing := missing_programs():
            raise BuildError(f"missing Debian packages: {' '.join(missing)}; apt-get install them, then run this again")
        with locked(self.place / "lock") as held:
            return self.find(variant) or self._build(variant, held)

    def _build(self, variant: str, held: int) -> Result:
        start = time.monotonic()
        cold = not (self.place / "target").exists()
        self._require_room(COLD_BYTES if cold else WARM_BYTES)
        tree = self._write_tree(variant)
        lock = (tree / LOCK_FILE).read_bytes()
        click.echo(f"router {variant}: compiling ({'cold, about 7 minutes on 2 cores' if cold else 'warm'})", err=True)
        text = self._cargo(variant, held, "build", "--lib")
        if (tree / LOCK_FILE).read_bytes() != lock:
            raise BuildError("the build changed Cargo.lock, which it must not")
        compiled = sum(line.lstrip().startswith("Compiling ") for line in text.splitlines())
        built = self.place / "target" / ("debug" if self.profile == "dev" else self.profile) / "libsglang_router_rs.so"
        return self._keep(variant, tree, built, compiled, time.monotonic() - start)

    def test(self, source: Path, variant: str = "patched") -> str:
        """Compile the Rust file ``source`` beside a variant's crate as a test of it, and run it; returns what it said.

        The lock file of the archive is used as it is: cargo finds the file in ``tests/`` without being told of it.

        Raises:
            BuildError: it does not compile, or a test fails.
        """
        with locked(self.place / "lock") as held:
            self._write_tree(variant, {f"bindings/python/tests/{source.name}": source.read_bytes()})
            return self._cargo(variant, held, "test", "--test", source.stem)

    def _write_tree(self, variant: str, more: Mapping[str, bytes] | None = None) -> Path:
        """Lay out the crate with ``more`` files, and what it needs beside the registry."""
        files = unpacked(self.base, self.base.archives[0])
        if variant == "patched":
            files = patched_files(self.bundle, self.base, files, self.level)
        tree = self.place / "trees" / variant
        tree.mkdir(parents=True, exist_ok=True)
        self._write_sources()
        write_tree(tree, {**files, **(more or {})})
        return tree

    def _cargo(self, variant: str, held: int, verb: str, *words: str) -> str:
        """Run cargo in the tree of ``variant`` while it too holds the lock; returns what it said.

        Raises:
            BuildError: it failed; the end of its log is in the text.
        """
        command = ["cargo", verb, "--locked", "-j", str(min(2, os.cpu_count() or 1)), "--profile", self.profile]
        command += ["--target-dir", str(self.place / "target"), *words]
        environment = cargo_environment(self.profile, self.incremental)
        if variant == "patched":
            environment["PATCHBUNDLE_ROUTER_SERIES"] = binary.mark(self.bundle, self.base, self.level)
        log = self.place / f"{variant}.log"
        with log.open("w") as output:
            done = subprocess.run(
                command,
                cwd=self.place / "trees" / variant / "bindings" / "python",
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(held,),
            )
        text = log.read_text(errors="replace")
        if done.returncode:
            raise BuildError(f"cargo failed ({done.returncode}); the whole log is {log}\n{text[-4000:]}")
        return text

    def _require_room(self, wanted: int) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.place).free
        if free < wanted:
            raise BuildError(f"{self.place} needs {wanted / GIB:.0f} GiB free and has {free / GIB:.1f} GiB")

    def _write_sources(self) -> None:
        """Lay out openai-harmony and tell cargo, in a file outside the router's tree, to take it from there."""
        (archive,) = self.base.build
        crate = unpacked(self.base, archive)
        write_tree(self.place / "vendor" / "openai-harmony", crate | {".cargo-checksum.json": b'{"files":{}}'})
        lines = [
            f'[source."git+{HARMONY_GIT}?tag={HARMONY_TAG}"]',
            f'git = "{HARMONY_GIT}"',
            f'tag = "{HARMONY_TAG}"',
            'replace-with = "harmony"',
            "[source.harmony]",
            f"directory = {json.dumps(str(self.place / 'vendor'))}",
        ]
        write_tree(self.place / ".cargo", {"config.toml": ("\n".join(lines) + "\n").encode()})

    def _keep(self, variant: str, tree: Path, built: Path, compiled: int, seconds: float) -> Result:
        """Put package, library and receipt beside the results, then rename them into place in one step."""
        if binary.read(built).series != self.series(variant):
            raise BuildError(f"{built} does not say that it was built from the series {self.series(variant) or 'none'}")
        folder = self.result_folder(variant)
        folder.parent.mkdir(exist_ok=True)
        for left in folder.parent.glob(".making-*"):  # by a build that was killed: nobody else holds the lock
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as making:
            fresh = Path(making, "result")
            package = fresh / "sglang_router"
            shutil.copytree(tree / "bindings/python/src/sglang_router", package)
            library = package / "sglang_router_rs.abi3.so"
            shutil.copyfile(built, library)
            receipt = {
                "schema": 1,
                "variant": variant,
                "profile": self.profile,
                "series": self.series(variant),
                "patches": list(self.patches) if variant == "patched" else [],
                "library_sha256": file_digest(library),
                "library_bytes": library.stat().st_size,
                "crates_compiled": compiled,
                "seconds": round(seconds, 1),
                "rustc": toolchain().splitlines()[0],
            }
            (fresh / "receipt.json").write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
            fresh.replace(folder)
        self._prune(folder)
        return Result(folder, variant, receipt)

    def _prune(self, fresh: Path) -> None:
        """Keep the results used last; each is some 200 MB."""
        results = sorted(fresh.parent.glob("*-*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in results[KEPT_RESULTS:]:
            if not old.name.startswith((".", "stock")):
                shutil.rmtree(old)


def target_bytes(place: Path) -> int:
    """Bytes that the target folder of ``place`` takes."""
    return sum(path.stat().st_size for path in (place / "target").rglob("*") if path.is_file())


BUNDLE_OPTION = click.option(
    "--bundle",
    "root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=REPOSITORY,
    help="The bundle to build from.  [default: this one]",
)


@click.command()
@click.argument("variants", nargs=-1, type=click.Choice(VARIANTS))
@BUNDLE_OPTION
@click.option("--to", "upto", help="Patch only up to this id.")
@click.option("--profile", type=click.Choice(["dev", "release"]), default="dev", show_default=True)
@click.option("--incremental", is_flag=True, help="For work on the sources: quicker again, a larger target folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a variant.")
def main(
    variants: tuple[str, ...], root: Path, upto: str | None, profile: str, incremental: bool, as_json: bool
) -> None:
    """Build the router VARIANTS (stock, patched; both by default) and print where they are."""
    try:
        builder = Builder(root, profile, upto, incremental)
        for variant in variants or VARIANTS:
            known = builder.find(variant) is not None
            result = builder.build(variant)
            row = result.receipt | {"folder": str(result.folder), "fresh": not known}
            if as_json:
                click.echo(json.dumps(row))
                continue
            made = "found" if known else f"built in {row['seconds']} s, {row['crates_compiled']} crates"
            click.echo(f"{variant}: {made}, {row['library_bytes'] / 1e6:.0f} MB library, {result.folder}")
        if not as_json:
            click.echo(f"target folder: {target_bytes(builder.place) / 1e9:.1f} GB, {builder.place}")
    except (BuildError, BundleError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
