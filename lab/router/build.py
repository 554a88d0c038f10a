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
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
HARMONY_GIT = "https://github.com/openai/harmony"
HARMONY_TAG = "v0.0.4"
MARK = "patchbundle-router-series"
# Raised when the recipe itself changes, so that no result of an older recipe is taken for one of this.
RECIPE = 1
VARIANTS = ("stock", "patched")
GIB = 1 << 30
COLD_BYTES, WARM_BYTES = 5 * GIB, 2 * GIB
KEPT_RESULTS = 6


class BuildError(Exception):
    """The build cannot be done; the text says what is missing or wrong and what to do."""


@dataclass(frozen=True)
class Archive:
    """A published source archive: distribution name, version, SHA-256 of the file."""

    name: str
    version: str
    sha256: str

    @property
    def filename(self) -> str:
        """Name of the file as published."""
        return f"{self.name.replace('-', '_')}-{self.version}.tar.gz"


ROUTER = Archive("sglang-router", "0.3.2", "bdbea1d54cce879fb83d2885d01ee3c006f242d0adbbac806f2fb2b91a5fe73d")
HARMONY = Archive("openai-harmony", "0.0.4", "5c67ac6df349236fb7b64f57c3dbb0273efcdca24314daa108f2a482c427106c")

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


def cache_folder() -> Path:
    """Folder for everything that outlives a clone: $PATCHBUNDLE_CACHE, else patchbundle/ in the user's cache folder."""
    if named := os.environ.get("PATCHBUNDLE_CACHE"):
        return Path(named).resolve()
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home).resolve() / "patchbundle"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock file ``path``; says so once when another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            click.echo(f"another build holds {path}; waiting for it", err=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def missing_programs() -> list[str]:
    """Debian packages (or what else) that the build needs and this machine lacks."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if shutil.which("pkg-config") and subprocess.run(["pkg-config", "--exists", "openssl"]).returncode:
        missing.append("libssl-dev")
    return missing


def toolchain() -> str:
    """What ``rustc`` says of itself; part of the key of every result.

    Raises:
        BuildError: there is no cargo or no rustc.
    """
    if shutil.which("cargo") is None or shutil.which("rustc") is None:
        raise BuildError("cargo and rustc are needed (1.85 or newer); install a Rust toolchain, then run this again")
    return subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout


def fetch(archive: Archive, cache: Path) -> Path:
    """Return the archive's file in the cache, fetched by hash with pip when it is not there yet.

    Raises:
        BuildError: pip could not fetch it, or the file does not have the pinned digest.
    """
    place = cache / "archives" / archive.sha256 / archive.filename
    if place.exists():
        if file_digest(place) == archive.sha256:
            return place
        raise BuildError(f"{place} does not have SHA-256 {archive.sha256}; remove it and run this again")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        pin = Path(folder, "pin.txt")
        pin.write_text(f"{archive.name}=={archive.version} --hash=sha256:{archive.sha256}\n")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        command += ["--require-hashes", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        command += ["-r", str(pin), "-d", folder]
        backend = dict(os.environ, PYTHONPATH=str(REPOSITORY / "tools" / "patchbundle" / "nobuild"))
        done = subprocess.run(command, env=backend, capture_output=True, text=True)
        found = Path(folder, archive.filename)
        if done.returncode or not found.exists():
            raise BuildError(f"pip could not fetch {archive.filename}:\n{(done.stdout + done.stderr).strip()[-1500:]}")
        if file_digest(found) != archive.sha256:
            raise BuildError(f"{archive.filename} came with another digest than {archive.sha256}")
        found.replace(place)
    return place


def members(path: Path) -> dict[str, bytes]:
    """Every file of a source archive by its name without the leading folder."""
    files = {}
    with tarfile.open(path, "r:gz") as archive:
        for entry in archive:
            if not entry.isfile():
                continue
            handle = archive.extractfile(entry)
            assert handle is not None
            files[entry.name.split("/", 1)[1]] = handle.read()
    return files


@dataclass(frozen=True)
class Series:
    """The router's patches in order, each with its diff and the sources that it installs.

    ``patches``: (id, path of the diff); ``sources``: (path of the source, path in the crate); ``digest``: SHA-256 over
    ids, diffs and sources, in hexadecimal.
    """

    patches: tuple[tuple[str, Path], ...]
    sources: tuple[tuple[Path, str], ...]
    digest: str

    @property
    def mark(self) -> str:
        """The line that a patched build carries in its binary."""
        return f"[{MARK} sha256={self.digest} level={len(self.patches)}]"


def read_series(series: Path, upto: str | None = None) -> Series:
    """Read the router's part of ``series``, up to and including the patch ``upto``.

    Raises:
        BuildError: ``upto`` is no patch of the router, or there is none at all.
    """
    folder, patches, sources = REPOSITORY / "patches", [], []
    digest = hashlib.sha256()
    for entry in tomllib.loads(series.read_text(encoding="utf-8")).get("patch", []):
        if entry["role"] != "router":
            continue
        diff = folder / entry["file"]
        patches.append((entry["id"], diff))
        digest.update(json.dumps([entry["id"], file_digest(diff)]).encode())
        for name in entry.get("sources", []):
            source = REPOSITORY / "sources" / name
            sources.append((source, "src/routers/http/research/" + Path(name).name))
            digest.update(json.dumps([name, file_digest(source)]).encode())
        if entry["id"] == upto:
            break
    if not patches or (upto is not None and patches[-1][0] != upto):
        raise BuildError(f"{series} has no router patch {upto or 'at all'}")
    return Series(tuple(patches), tuple(sources), digest.hexdigest())


def patched_files(base: dict[str, bytes], series: Series) -> dict[str, bytes]:
    """Apply ``series`` to the files of the base and return all files of the patched tree.

    Raises:
        BuildError: a diff does not apply.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_tree(Path(folder), base)
        # Inside somebody's repository git would skip paths that it thinks are outside of it.
        alone = dict(os.environ, GIT_CEILING_DIRECTORIES=str(Path(folder).parent), GIT_CONFIG_GLOBAL=os.devnull)
        for name, diff in series.patches:
            command = ["git", "apply", "-p1", "--whitespace=nowarn", str(diff)]
            done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True)
            if done.returncode:
                raise BuildError(f"{name} does not apply to the pinned router:\n{done.stderr.strip()}")
        for source, path in series.sources:
            target = Path(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


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

    def __init__(self, series: Path, profile: str = "dev", upto: str | None = None, incremental: bool = False) -> None:
        self.cache, self.incremental = cache_folder(), incremental
        self.profile = profile
        self.series_file, self.upto = series, upto
        kind = json.dumps([RECIPE, ROUTER.sha256, HARMONY.sha256, toolchain(), profile])
        self.place = self.cache / "router" / hashlib.sha256(kind.encode()).hexdigest()[:16]

    @functools.cached_property
    def series(self) -> Series:
        """The router's patches; read when a patched build asks for it."""
        return read_series(self.series_file, self.upto)

    def result_folder(self, variant: str) -> Path:
        """Where the finished build of ``variant`` lies or will lie."""
        digest = self.series.digest if variant == "patched" else ROUTER.sha256
        return self.place / "results" / f"{variant}-{digest[:16]}"

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
        with locked(self.place / "lock"):
            return self.find(variant) or self._build(variant)

    def _build(self, variant: str) -> Result:
        start = time.monotonic()
        cold = not (self.place / "target").exists()
        self._require_room(COLD_BYTES if cold else WARM_BYTES)
        files = members(fetch(ROUTER, self.cache))
        lock = files["bindings/python/Cargo.lock"]
        mark = ""
        if variant == "patched":
            files, mark = patched_files(files, self.series), self.series.mark
        tree = self.place / "trees" / variant
        tree.mkdir(parents=True, exist_ok=True)
        self._write_sources()
        write_tree(tree, files)
        click.echo(f"router {variant}: compiling ({'cold, about 7 minutes on 2 cores' if cold else 'warm'})", err=True)
        command = ["cargo", "build", "--locked", "--lib", "-j", str(min(2, os.cpu_count() or 1))]
        command += ["--profile", self.profile, "--target-dir", str(self.place / "target")]
        environment = cargo_environment(self.profile, self.incremental)
        if mark:
            environment["PATCHBUNDLE_ROUTER_SERIES"] = mark
        log = self.place / f"{variant}.log"
        with log.open("w") as output:
            done = subprocess.run(
                command, cwd=tree / "bindings" / "python", env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        text = log.read_text(errors="replace")
        if done.returncode:
            raise BuildError(f"cargo failed ({done.returncode}); the whole log is {log}\n{text[-4000:]}")
        if (tree / "bindings/python/Cargo.lock").read_bytes() != lock:
            raise BuildError("the build changed Cargo.lock, which it must not")
        compiled = sum(line.lstrip().startswith("Compiling ") for line in text.splitlines())
        built = self.place / "target" / ("debug" if self.profile == "dev" else self.profile) / "libsglang_router_rs.so"
        return self._keep(variant, tree, built, mark, compiled, time.monotonic() - start)

    def _require_room(self, wanted: int) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.place).free
        if free < wanted:
            raise BuildError(f"{self.place} needs {wanted / GIB:.0f} GiB free and has {free / GIB:.1f} GiB")

    def _write_sources(self) -> None:
        """Lay out openai-harmony and tell cargo, in a file outside the router's tree, to take it from there."""
        crate = members(fetch(HARMONY, self.cache))
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

    def _keep(self, variant: str, tree: Path, built: Path, mark: str, compiled: int, seconds: float) -> Result:
        """Put package, library and receipt beside the results, then rename them into place in one step."""
        if mark and mark.encode() not in built.read_bytes():
            raise BuildError(f"{built} does not carry the series mark {mark}")
        folder = self.result_folder(variant)
        folder.parent.mkdir(exist_ok=True)
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
                "series": mark,
                "patches": [name for name, _ in self.series.patches] if variant == "patched" else [],
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


def series_in(content: bytes) -> str | None:
    """The series mark that the bytes of a binary hold, or None for a stock build."""
    start = content.find(f"[{MARK} ".encode())
    return None if start < 0 else content[start : content.index(b"]", start) + 1].decode("ascii")


SERIES_OPTION = click.option(
    "--series",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=REPOSITORY / "patches" / "series.toml",
    envvar="PATCHBUNDLE_SERIES",
    help="The series file.",
)


@click.command()
@click.argument("variants", nargs=-1, type=click.Choice(VARIANTS))
@SERIES_OPTION
@click.option("--to", "upto", help="Patch only up to this id.")
@click.option("--profile", type=click.Choice(["dev", "release"]), default="dev", show_default=True)
@click.option("--incremental", is_flag=True, help="For work on the sources: quicker again, a larger target folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a variant.")
def main(
    variants: tuple[str, ...], series: Path, upto: str | None, profile: str, incremental: bool, as_json: bool
) -> None:
    """Build the router VARIANTS (stock, patched; both by default) and print where they are."""
    try:
        builder = Builder(series, profile, upto, incremental)
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
    except BuildError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
