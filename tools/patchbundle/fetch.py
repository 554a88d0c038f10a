"""Archives of the pinned bases: fetched by pip with required hashes, kept by hash outside the clone, never run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patchbundle import names
from patchbundle.bases import Archive, Base
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import EXECUTABLE, PLAIN, File


def cache_folder() -> Path:
    """The user's cache folder: ``$PATCHBUNDLE_CACHE``, else ``patchbundle`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("PATCHBUNDLE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "patchbundle"


def fetch(base: Base, archive: Archive, *, offline: bool = False) -> Path:
    """The archive's file in the cache; downloaded first if it is not there.

    Raises:
        BundleError: ARCHIVE, if what is cached or came is not the pinned archive; NOT_FETCHED, if nothing came.
    """
    folder = cache_folder() / "archives" / archive.sha256
    place = folder / archive.filename
    # It is put there whole, by one rename: whoever only reads needs no lock, and no right to write.
    if os.path.lexists(place):
        _verify(place, archive)
        return place
    if offline:
        raise BundleError(
            Reason.NOT_FETCHED,
            str(place),
            expected="the archive in the cache",
            found="nothing",
            next_step="run: tools/apply.py fetch-base, with a network",
        )
    with _cache_lock(folder):
        if os.path.lexists(place):  # somebody else fetched it while we waited
            _verify(place, archive)
            return place
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=folder.parent) as temporary:
            came = _download(base, archive, Path(temporary))
            _verify(came, archive)
            folder.mkdir(exist_ok=True)
            came.replace(place)
    return place


def default_archive(base: Base) -> Archive:
    """The archive for this interpreter and machine, else the first."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-"
    machine = os.uname().machine
    fitting = [item for item in base.archives if f"-{tag}" in item.filename and machine in item.filename]
    return (fitting or list(base.archives))[0]


def members(place: Path) -> Iterator[tuple[str, File]]:
    """Every plain file of a wheel or source archive, by its path under the tree's root, in sorted order."""
    read = _wheel if place.suffix == ".whl" else _source_archive
    yield from sorted(read(place), key=lambda item: item[0])


def unpack(place: Path, root: Path) -> None:
    """Lay an archive out as a tree. Modes are git's two whatever the umask."""
    for path, file in members(place):
        names.check(path, str(place))
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.data)
        target.chmod(0o755 if file.mode == EXECUTABLE else 0o644)


def _wheel(place: Path) -> Iterator[tuple[str, File]]:
    with zipfile.ZipFile(place) as wheel:
        for info in wheel.infolist():
            if not info.is_dir():
                yield info.filename, File(wheel.read(info), EXECUTABLE if info.external_attr >> 16 & 0o100 else PLAIN)


def _source_archive(place: Path) -> Iterator[tuple[str, File]]:
    with tarfile.open(place) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isfile() else None
            if stream is not None:
                # Everything stands below one folder, NAME-VERSION.
                path = member.name.partition("/")[2]
                yield path, File(stream.read(), EXECUTABLE if member.mode & 0o100 else PLAIN)


def _verify(place: Path, archive: Archive) -> None:
    found = digest(place)
    if found != archive.sha256:
        raise BundleError(
            Reason.ARCHIVE,
            str(place),
            expected=archive.sha256,
            found=found,
            next_step="delete this file, then fetch again",
        )


def digest(place: Path) -> str:
    """SHA-256 of a plain file, hashed as it is read; else what it is."""
    total = hashlib.sha256()
    try:
        # Without O_NONBLOCK the open of a fifo would wait for a writer.
        with open(os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                return "no plain file"
            while part := stream.read(1 << 20):
                total.update(part)
    except (FileNotFoundError, IsADirectoryError):  # a link to nowhere
        return "no plain file"
    return total.hexdigest()


@contextmanager
def unpinned(base: Base, version: str | None) -> Iterator[Path]:
    """Another release of a base's distribution for a look, fetched without a pin and kept nowhere; None is the newest.

    Raises:
        BundleError: NOT_FETCHED.
    """
    with tempfile.TemporaryDirectory(prefix="unpinned-") as temporary:
        folder = Path(temporary)
        requirement = base.distribution if version is None else f"{base.distribution}=={version}"
        said = _pip(folder, [requirement], default_archive(base))
        found = list(folder.iterdir())
        if len(found) != 1:
            raise _not_fetched(requirement, requirement, said)
        yield found[0]


def _download(base: Base, archive: Archive, folder: Path) -> Path:
    pins = folder / "pins.txt"
    pins.write_text(f"{base.distribution}=={base.version} --hash=sha256:{archive.sha256}\n", encoding="utf-8")
    said = _pip(folder, ["--require-hashes", "--requirement", str(pins)], archive)
    place = folder / archive.filename
    if place.exists():
        return place
    if "hash" in said.lower():
        raise BundleError(Reason.ARCHIVE, archive.filename, expected=archive.sha256, found=_last_line(said))
    raise _not_fetched(archive.filename, f"{base.distribution} {base.version}", said)


def _pip(folder: Path, what: list[str], like: Archive) -> str:
    """Let pip download ``what`` into ``folder``, for the interpreter and machine of ``like``; returns what it said."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--dest", str(folder), *what]
    environment = {"PYTHONUTF8": "1", **os.environ}
    if like.is_wheel:
        _, _, python, abi, platform = like.filename.removesuffix(".whl").split("-")
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", f"{python[2:3]}.{python[3:]}"]
        command += ["--abi", abi, "--platform", platform]
    else:
        command += ["--no-binary=:all:", "--no-build-isolation"]
        # The stub shadows the archive's build backend for this one process.
        environment["PYTHONPATH"] = str(Path(__file__).parent / "nobuild")
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr


def _not_fetched(where: str, what: str, said: str) -> BundleError:
    return BundleError(
        Reason.NOT_FETCHED,
        where,
        expected=f"{what} from the package index",
        found=_last_line(said),
        next_step="check the network, or put the file into the cache: see docs/reference.md",
    )


def _last_line(said: str) -> str:
    return (said.strip() or "pip said nothing").splitlines()[-1]


@contextmanager
def _cache_lock(folder: Path) -> Iterator[None]:
    """One lock file an archive, so that two clones do not fetch the same one at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as stream:
        with contextlib.suppress(OSError):  # a file system without locks: the rename still is atomic
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def cached_archives() -> list[Path]:
    """Every archive in the cache."""
    return sorted(place for place in (cache_folder() / "archives").glob("*/*") if len(place.parent.name) == 64)


def clean(keep: set[str]) -> list[Path]:
    """Remove cached archives whose SHA-256 is not in ``keep``; returns what was removed."""
    removed = []
    for place in cached_archives():
        if place.parent.name not in keep:
            shutil.rmtree(place.parent)
            removed.append(place)
    return removed
