"""The user's cache folder: things that cost minutes to make, kept by the digest of what decided them.

Everything is made beside its final place and renamed into it, under one lock file each, so that two clones on one
machine share the work and a killed build leaves nothing half made under a final name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.rig.errors import RigError


def root() -> Path:
    """The cache folder: ``$PATCHBUNDLE_CACHE``, else ``patchbundle`` below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("PATCHBUNDLE_CACHE")
    if own:
        return Path(own).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "patchbundle"


def need_disk(path: Path, needed: int, what: str) -> None:
    """Refuse when the file system of ``path`` has less than ``needed`` bytes free.

    Raises:
        RigError: kind ``disk``, with the number needed and the number free.
    """
    existing = path
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise RigError("disk", f"{what} needs {needed / 1e9:.1f} GB below {path}, {free / 1e9:.1f} GB are free")


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` for the time of the block; wait for another holder. The kernel frees it on a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def place(kind: str, digest: str) -> Path:
    """The final place of the entry ``digest`` of ``kind`` (``models/mla``, ``environments/0.5.17`` ...)."""
    return root() / kind / digest[:16]


def ensure(kind: str, digest: str, build: Callable[[Path], None], needed: int = 0) -> Path:
    """Return the folder of an entry, made by ``build(folder)`` if it is not there yet.

    Args:
        needed: bytes of disk the build takes; checked before it starts.

    Raises:
        RigError: kind ``disk``; or whatever ``build`` raises, after its half-made folder is gone.
    """
    final = place(kind, digest)
    if final.is_dir():
        return final
    with lock(final.with_suffix(".lock")):
        if final.is_dir():
            return final
        need_disk(final, needed, kind)
        work = final.with_suffix(".making")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            build(work)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        work.rename(final)
    return final
