"""The verb ``attest``: documents about a bundle, or about one tree, in a folder; signed if asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patchbundle import __version__, bases, disk, signature
from patchbundle.bases import Base
from patchbundle.errors import BundleError, Reason
from patchbundle.manifest import LOCK, Bundle
from workstation import outputs, provenance


def write(stands: Sequence[tuple[Bundle, Base, int]], out: Path, key: Path | None) -> list[str]:
    """Write the documents of each base at its level, and a copy of the lock that pins it, to the new folder ``out``.

    With ``key``, a secret key of minisign, each of these files gets a signature beside it. Returns the names.

    Raises:
        BundleError: NOT_EXPECTED, where nothing is patched; OUTPUT, SIGNATURE or NO_PROGRAM. Then there is no folder.
    """
    for _, base, level in stands:
        # A statement without a subject is none.
        if level == 0:
            expected = "a tree with one patch at least"
            raise BundleError(Reason.NOT_EXPECTED, base.id, expected=expected, found="the release itself")
    made = {name: data for stand in stands for name, data in provenance.documents(*stand).items()}
    bundle = stands[0][0]
    made[Path(LOCK).name] = bases.read_file(bundle.root / LOCK)
    with outputs.folder(out) as making:
        folder = making.path
        for name, data in made.items():
            disk.write_file(folder / name, data)
        if key is not None:
            comment = f"bundle {bundle.lock.digest}, patchbundle {__version__}"
            signature.sign([folder / name for name in made], key, comment)
        return sorted(path.name for path in folder.iterdir())
