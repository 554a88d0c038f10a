"""Archives whose bytes are a function of the files in them: not of time, place, umask, locale or a zlib."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping

from patchbundle.identity import EXECUTABLE, File

# The first moment that a ZIP archive can name.
_TIME = (1980, 1, 1, 0, 0, 0)
_SECONDS = 315532800
_BLOCK = 65535


def _bits(file: File) -> int:
    return 0o755 if file.mode == EXECUTABLE else 0o644


def zipped(files: Mapping[str, File], *, prefix: bytes = b"", comment: bytes = b"") -> bytes:
    """A ZIP archive after ``prefix``. Nothing is compressed: compressors of two machines differ.

    Raises:
        ValueError: a name that an archive cannot hold as it is.
    """
    buffer = io.BytesIO()
    buffer.write(prefix)
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.comment = comment
        for name, file in sorted(files.items()):
            info = zipfile.ZipInfo(name, _TIME)
            if info.filename != name:
                raise ValueError(f"no name for a ZIP archive: {name!r}")
            info.create_system = 3
            info.external_attr = (0o100000 | _bits(file)) << 16
            archive.writestr(info, file.data)
    return buffer.getvalue()


def tarred(files: Mapping[str, File], *, top: str) -> bytes:
    """A gzip'ed tar archive of everything below one folder, ``top``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, file in sorted(files.items()):
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size, info.mode, info.mtime = len(file.data), _bits(file), _SECONDS
            archive.addfile(info, io.BytesIO(file.data))
    return b"".join(_stored(buffer.getvalue()))


def _stored(data: bytes) -> Iterator[bytes]:
    """A gzip stream of stored blocks (RFC 1951, 3.2.4)."""
    yield b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
    for start in range(0, len(data), _BLOCK):
        block = data[start : start + _BLOCK]
        yield struct.pack("<BHH", start + _BLOCK >= len(data), len(block), len(block) ^ 0xFFFF) + block
    yield struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
