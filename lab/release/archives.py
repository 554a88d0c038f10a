"""Archives whose bytes are a function of the files in them: not of time, place, umask, locale or a zlib."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping

from patchbundle import store
from patchbundle.identity import EXECUTABLE, File

# The first moment that a ZIP archive can name.
_TIME = (1980, 1, 1, 0, 0, 0)
_SECONDS = 315532800
_BLOCK = 65535
# An interpreter looks for the record that ends an archive in the last 65557 bytes of a file.
_REACH = 60_000
_PIECE = 48 << 10
# What a directory says of a member, and the record at its end (APPNOTE.TXT, 4.3.12 and 4.3.16).
_MEMBER, _END = struct.Struct("<4s4B4H3L5H2L"), struct.Struct("<4s4H2LH")
_AGAIN = "if-cut-short"


def _bits(file: File) -> int:
    return 0o755 if file.mode == EXECUTABLE else 0o644


def zipped(files: Mapping[str, File], *, first: str, prefix: bytes = b"", comment: bytes = b"") -> bytes:
    """A ZIP archive after ``prefix``. Nothing is compressed: compressors of two machines differ.

    Cut off anywhere, it is still an archive with the member ``first``, for an interpreter at least: a directory of that
    one alone comes again and again, as a member that nobody asks for, and the last one that is left is taken for the
    archive's. Nothing can stand within a member, so a large file is there in parts: NAME, NAME~2 and so on, which
    ``patchbundle.store`` joins.

    Raises:
        ValueError: a name that an archive cannot hold as it is, or that a part would have.
    """
    buffer = io.BytesIO()
    buffer.write(prefix)
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.comment = comment
        found = _put(archive, first, files[first].data, _bits(files[first]))
        reached = _put_again(archive, found)
        for name, data, bits in _parts(files, first):
            if archive.start_dir + len(name) + len(data) > reached + _REACH:
                reached = _put_again(archive, found)
            _put(archive, name, data, bits)
        _put_again(archive, found)
    return buffer.getvalue()


def _parts(files: Mapping[str, File], first: str) -> Iterator[tuple[str, bytes, int]]:
    for name, file in sorted(files.items()):
        if store.PART.fullmatch(name):
            raise ValueError(f"the name of a part: {name!r}")
        starts = range(0, len(file.data) or 1, _PIECE) if name != first else ()
        for number, start in enumerate(starts, 1):
            part = name if number == 1 else f"{name}~{number}"
            yield part, file.data[start : start + _PIECE], _bits(file)


def _put(archive: zipfile.ZipFile, name: str, data: bytes, bits: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _TIME)
    if info.filename != name:
        raise ValueError(f"no name for a ZIP archive: {name!r}")
    info.create_system = 3
    info.external_attr = (0o100000 | bits) << 16
    archive.writestr(info, data)
    return info


def _put_again(archive: zipfile.ZipFile, first: zipfile.ZipInfo) -> int:
    """A directory of ``first`` alone as a member of its own; returns where it ends."""
    name = first.filename.encode("ascii")
    numbers = (first.CRC, first.file_size, first.file_size, len(name), 0, 0, 0, 0, first.external_attr)
    directory = _MEMBER.pack(b"PK\1\2", 20, 3, 20, 0, 0, 0, 0, 33, *numbers, first.header_offset) + name
    called = f"{_AGAIN}/{archive.start_dir:08}"
    # The member's own head, of 30 bytes and its name, comes before.
    end = _END.pack(b"PK\5\6", 0, 0, 1, 1, len(directory), archive.start_dir + 30 + len(called), 0)
    _put(archive, called, directory + end, 0o644)
    return archive.start_dir


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
