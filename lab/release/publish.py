"""A release: all of its files in one folder, whole or not at all; and what it leaves in the repository."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from lab.release import notes, pyz, sdist, wheels
from lab.release.notes import News, ReleaseError
from patchbundle import __version__, canonical, disk, manifest, pin, releases
from patchbundle.manifest import Bundle
from workstation import attest, outputs

FILE, SOURCES = f"patchbundle-{__version__}.pyz", f"patchbundle-{__version__}.tar.gz"
ATTESTATION = "attestation"
MANIFEST, SUMS, NOTES = "release.json", "SHA256SUMS", "NOTES.md"


def one_file(root: Path, packages: Sequence[Path] | None = None) -> bytes:
    """The one file of the checkout ``root``, its packages fetched unless they are given."""
    return pyz.build(root, root, packages or wheels.fetched(root / "requirements" / "node.txt"))


def check(root: Path, bundle: Bundle, version: str) -> News:
    """Whether this is a state to release; returns its news.

    Raises:
        ReleaseError: it is not committed, the lock is not current, or the version does not follow.
    """
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "status", "--porcelain"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rstrip()
        if said:
            raise ReleaseError(f"what is released must be committed first:\n{said}")
    if pin.pin(root, write=False)[1]:
        raise ReleaseError("the lock is not current: run make pin")
    news = notes.read(root)
    notes.check_version(version, [filed.release for filed in bundle.filed], news)
    return news


def build(root: Path, out: Path, news: News, *, packages: Sequence[Path] | None = None) -> dict[str, str]:
    """Make the folder ``out`` with everything that is published; returns SHA-256 by name.

    ``packages`` are the node's wheels; by default fetched. ``release.json`` names each file with its digest and size;
    ``SHA256SUMS`` is the same for ``sha256sum -c``. The same commit gives the same bytes.

    Raises:
        BundleError: OUTPUT, if there is such a folder; or whatever is wrong with the bundle.
    """
    bundle = manifest.load(root)
    out.parent.mkdir(parents=True, exist_ok=True)
    with outputs.folder(out) as made:
        folder = made.path
        disk.write_file(folder / FILE, one_file(root, packages))
        (folder / FILE).chmod(0o755)
        disk.write_file(folder / SOURCES, sdist.build(root))
        disk.write_file(folder / NOTES, f"# {__version__}\n\n{news.text}".encode())
        stands = [(bundle, base, len(bundle.pins(base).levels)) for base in bundle.bases.values()]
        attest.write(stands, folder / ATTESTATION, None)
        data = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        table = {
            "schema": 1,
            "version": __version__,
            "bundle": bundle.lock.digest,
            "files": {name: {"sha256": digest(item), "size": len(item)} for name, item in sorted(data.items())},
        }
        data[MANIFEST] = canonical.dump(table)
        disk.write_file(folder / MANIFEST, data[MANIFEST])
        sums = {name: digest(item) for name, item in sorted(data.items())}
        disk.write_file(folder / SUMS, _listing(sums))
    return sums


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _listing(sums: Mapping[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode()


def conclude(root: Path, version: str, news: News) -> list[str]:
    """File the release, move its news to the change log, pin anew; returns what changed, to be committed.

    Raises:
        BundleError: it is filed already.
    """
    changes = root / "CHANGELOG.md"
    date = datetime.now(timezone.utc).date().isoformat()
    filed = releases.file(root, version)
    disk.write_file(changes, notes.fold(changes.read_text(encoding="utf-8"), version, date, news).encode())
    for fragment in news.fragments:
        fragment.unlink()
    pin.pin(root)
    return [filed.relative_to(root).as_posix(), changes.name, "changelog.d", manifest.LOCK]
