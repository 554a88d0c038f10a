"""One deterministic layer: files, folders and whiteouts in, a compressed tar archive out."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from workstation.tarstream import Entry


@dataclass(frozen=True)
class Member:
    """What the layer says of a path: ``entry`` has its attributes, its name included; ``data`` a file's bytes."""

    entry: Entry
    data: bytes = b""


@dataclass(frozen=True)
class Made:
    """A layer that was written: digests as in manifests, size in bytes."""

    digest: str
    size: int
    diff_id: str


class _Packer(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class _Sink(io.RawIOBase):
    """Hash, compress, hash, write."""

    def __init__(self, out: IO[bytes], compression: str) -> None:
        self._out = out
        self._packer = _packer(compression)
        self._plain, self._packed = hashlib.sha256(), hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> int:
        self._plain.update(data)
        self._put(self._packer.compress(bytes(data)))
        return len(data)

    def _put(self, data: bytes) -> None:
        self._packed.update(data)
        self._size += len(data)
        self._out.write(data)

    def end(self) -> Made:
        self._put(self._packer.flush())
        return Made(f"sha256:{self._packed.hexdigest()}", self._size, f"sha256:{self._plain.hexdigest()}")


def _packer(compression: str) -> _Packer:
    if compression == "zstd":
        import zstandard

        packer: _Packer = zstandard.ZstdCompressor(level=19).compressobj()
        return packer
    # No name and no time in the head of the stream.
    return zlib.compressobj(9, zlib.DEFLATED, 31)


def write(place: Path, members: Iterable[Member], compression: str) -> Made:
    """Write the layer in the order of its names."""
    with open(place, "wb") as out:
        sink = _Sink(out, compression)
        with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for member in sorted(members, key=lambda member: member.entry.name.split("/")):
                archive.addfile(_info(member), io.BytesIO(member.data))
        return sink.end()


def _info(member: Member) -> tarfile.TarInfo:
    entry = member.entry
    info = tarfile.TarInfo(entry.name)
    info.type = tarfile.DIRTYPE if entry.kind == "folder" else tarfile.REGTYPE
    info.size = len(member.data)
    info.mode, info.uid, info.gid, info.mtime = entry.mode, entry.uid, entry.gid, entry.mtime
    info.pax_headers = {
        f"SCHILY.xattr.{name}": data.decode("utf-8", "surrogateescape")
        for name, data in sorted(entry.attributes.items())
    }
    return info
