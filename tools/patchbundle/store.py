"""Files of the bundle, read from where they lie: a folder, or the one file that carries tools and bundle.

A path may lead into a ZIP archive, as in ``bundle.pyz/patchbundle/_bundle/config``: an interpreter names its own
modules so, and nothing needs to be unpacked.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

# Only for the one file: a folder is read without it.
if TYPE_CHECKING:
    import zipfile

# More than any file of a bundle: nothing larger is read into memory.
LIMIT = 1 << 26
# The further parts of a file that an archive holds in parts.
PART = re.compile(r"(.+)~([1-9][0-9]*)", re.DOTALL)


class Archive:
    """An open ZIP archive. What is in it as NAME, NAME~2, NAME~3 and so on is one file, NAME."""

    def __init__(self, opened: zipfile.ZipFile) -> None:
        self._opened = opened
        self._names = dict.fromkeys(opened.namelist())

    def names(self) -> list[str]:
        """The files in it."""
        return [name for name in self._names if not (match := PART.fullmatch(name)) or match[1] not in self._names]

    def read(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            KeyError: there is none of that name.
            zipfile.BadZipFile: it is damaged.
        """
        data = self._opened.read(name)
        number = 2
        while (part := f"{name}~{number}") in self._names:
            data += self._opened.read(part)
            number += 1
        return data


def walk(folder: Path) -> list[Path]:
    """Everything below a folder, sorted; of an archive its files alone. Empty if there is no such folder."""
    inside = _split(folder)
    if inside is None:
        return sorted(folder.rglob("*"))
    archive, name = inside
    members = [member for member in archive.names() if member.startswith(f"{name}/") and member[-1] != "/"]
    return sorted(folder / member.removeprefix(f"{name}/") for member in members)


def is_folder(path: Path) -> bool:
    return path.is_dir() or (_split(path) is not None and bool(walk(path)))


def is_plain(path: Path) -> bool:
    """Whether a plain file stands there, and no link."""
    inside = _split(path)
    return inside[1] in inside[0].names() if inside else path.is_file() and not path.is_symlink()


def read(path: Path) -> bytes:
    """The bytes of a plain file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no plain file, or too large.
    """
    inside = _split(path)
    if inside is not None:
        import zipfile

        try:
            return inside[0].read(inside[1])
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        except zipfile.BadZipFile as error:
            raise ValueError(str(error)) from None
    # Without O_NONBLOCK the open of a fifo would wait for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("no plain file")
        data = b"" if status.st_size > LIMIT else stream.read(LIMIT + 1)
        if status.st_size > LIMIT or len(data) > LIMIT:
            raise ValueError(f"{max(status.st_size, len(data))} bytes, which is too large")
        return data


def _split(path: Path) -> tuple[Archive, str] | None:
    """The archive that a path leads into and the name there; None for a path of the file system."""
    for above in path.parents:
        if above not in OPEN and above.is_dir():
            return None
        if above in OPEN or above.is_file():
            archive = _archive(above)
            return (archive, path.relative_to(above).as_posix()) if archive else None
    return None


# Archives that are open already, by their resolved paths: the one that carries the tools, as it was looked at.
OPEN: dict[Path, Archive] = {}


@cache
def _archive(place: Path) -> Archive | None:
    """An open archive; None if it is none. It does not change while a command runs."""
    if place in OPEN:
        return OPEN[place]
    import zipfile

    try:
        return Archive(zipfile.ZipFile(place))
    except zipfile.BadZipFile:
        return None
