"""Filing a release: the bundle as it stands, kept so that later bundles know the trees that it patched."""

from __future__ import annotations

import tempfile
from pathlib import Path

from patchbundle import bases, disk, manifest
from patchbundle.errors import BundleError, Reason
from patchbundle.manifest import RELEASES


def file(root: Path, version: str) -> Path:
    """Copy the bundle at ``root`` to ``patches/releases/VERSION/``; returns that folder.

    All that planning needs: what the lock names, and the lock. Earlier releases are not copied into it.

    Raises:
        BundleError: MANIFEST, if the version is none, or is filed already; or whatever is wrong with the bundle.
    """
    manifest.check_version(version)
    bundle = manifest.load(root)
    place = root / RELEASES / version
    if any(filed.release == version for filed in bundle.filed):
        raise BundleError(
            Reason.MANIFEST,
            str(place),
            expected="a version that is not filed",
            found="a filed release",
            next_step="what was released does not change: file it under its own version",
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: it is made beside its place.
    with tempfile.TemporaryDirectory(prefix=".filing-", dir=place.parent.parent) as temporary:
        made = Path(temporary) / version
        for path, data in bundle.artifacts.items():
            if not path.startswith(f"{RELEASES}/"):
                disk.write_file(made / path, data)
        disk.write_file(made / manifest.LOCK, bases.read_file(root / manifest.LOCK))
        manifest.load(made, release=version)
        made.rename(place)
    return place
