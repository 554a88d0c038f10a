"""An output folder that is there whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from patchbundle.errors import BundleError, Reason


@dataclass
class Making:
    """A folder to be filled. If it is not ``wanted`` in the end, it does not come to be."""

    path: Path
    wanted: bool = True


@contextmanager
def folder(place: Path) -> Iterator[Making]:
    """A folder beside ``place``; it gets that name when the block ends without an exception.

    Raises:
        BundleError: OUTPUT, if something stands at ``place`` already, or nothing above it.
    """
    place = place.absolute()
    if os.path.lexists(place):
        raise BundleError(Reason.OUTPUT, str(place), expected="nothing there yet", found="a file or folder")
    if not place.parent.is_dir():
        raise BundleError(Reason.OUTPUT, str(place), expected="a folder to make it in", found=f"no {place.parent}")
    made = Making(Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".partial", dir=place.parent)))
    try:
        yield made
        if made.wanted:
            umask = os.umask(0)
            os.umask(umask)
            made.path.chmod(0o777 & ~umask)
            made.path.rename(place)
    finally:
        # Nothing is there any more if it went well.
        shutil.rmtree(made.path, ignore_errors=True)
