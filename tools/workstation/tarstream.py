"""A strict reader of tar streams. Forward only; no byte of a file is kept but those that are asked for.

The standard library's reader takes a broken header for the end of the archive, and runtimes do not: what a layer holds
must not depend on who reads it. Here whatever is not understood is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from patchbundle.errors import BundleError, Reason

_BLOCK = 512
_LONGEST = 1 << 16  # bytes of a GNU long name
_HEADER = 1 << 20  # bytes of an extended header, attributes included
_KINDS = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "link",
    b"3": "device",
    b"4": "device",
    b"5": "folder",
    b"6": "fifo",
}
_ATTRIBUTE = "SCHILY.xattr."
_EMPTY = bytes(_BLOCK)


class Source(Protocol):
    """Bytes that come one after the other."""

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes; fewer at the end only."""

    def skip(self, count: int) -> int:
        """Pass over bytes; returns how many there were."""

    def rest_is_empty(self) -> bool:
        """Go to the end; whether every byte on the way was zero."""


@dataclass(frozen=True)
class Entry:
    """One member. ``name`` and ``target`` are as written; sizes in bytes, ``mtime`` in whole seconds."""

    name: str
    kind: str  # file, hardlink, link, folder, fifo, device
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int
    target: str = ""
    attributes: Mapping[str, bytes] = field(default_factory=dict)
    is_sparse: bool = False


class Reader:
    """The members of one archive, in order."""

    def __init__(self, source: Source, where: str) -> None:
        self._source = source
        self._where = where
        self._left = 0  # bytes of the current member that were not read
        self._pad = 0
        self._global: dict[str, bytes] = {}

    def __iter__(self) -> Iterator[Entry]:
        """Each member; its bytes may be taken by :meth:`data` before the next one is asked for.

        Raises:
            BundleError: LAYER, at the first thing that is no sound archive.
        """
        while (entry := self._next()) is not None:
            yield entry
            left, pad = self._left, self._pad
            self._left = self._pad = 0
            self._pass(left)
            # Some writers, umoci's insert among them, leave out what would follow the last byte of the last file.
            if self._source.skip(pad) < pad:
                return

    def data(self, count: int) -> bytes:
        """The next bytes of the current member, up to ``count``."""
        count = min(count, self._left)
        self._left -= count
        return self._exactly(count)

    def refuse(self, found: str, expected: str = "a sound tar archive") -> BundleError:
        return BundleError(Reason.LAYER, self._where, expected=expected, found=found)

    def _next(self) -> Entry | None:
        pax = dict(self._global)
        name: bytes | None = None
        target: bytes | None = None
        began = False
        while (block := self._block(began)) is not None:
            began = True
            kind = block[156:157]
            size = self._number(block[124:136], "size")
            if kind in b"xg":
                records = self._records(self._body(size, _HEADER))
                if kind == b"g":
                    self._global.update(records)
                    if sum(map(len, self._global.values())) > _HEADER:
                        raise self.refuse("global headers that add up", f"up to {_HEADER} bytes")
                pax.update(records)
            elif kind == b"L":
                name = self._body(size, _LONGEST).rstrip(b"\0")
            elif kind == b"K":
                target = self._body(size, _LONGEST).rstrip(b"\0")
            else:
                return self._entry(block, size, name, target, pax)
        return None

    def _block(self, began: bool) -> bytes | None:
        """The next header; None at the end, where nothing but zeros may follow."""
        block = self._source.read(_BLOCK)
        if not block and not began:
            return None
        if len(block) < _BLOCK:
            raise self.refuse(f"it ends within a header, {len(block)} bytes of which are there")
        if block == _EMPTY:
            if began:
                raise self.refuse("it ends after an extended header")
            if not self._source.rest_is_empty():
                raise self.refuse("more bytes after its end")
            return None
        told = self._number(block[148:156], "checksum")
        plain = sum(block) - sum(block[148:156]) + 8 * 32
        signed = plain - 256 * sum(byte > 127 for byte in block[:148] + block[156:]) if plain != told else plain
        if told not in (plain, signed):
            raise self.refuse("a header with a wrong checksum")
        return block

    def _entry(self, block: bytes, size: int, name: bytes | None, target: bytes | None, pax: dict[str, bytes]) -> Entry:
        code = block[156:157]
        sparse = code == b"S" or any(key.startswith("GNU.sparse.") for key in pax)
        kind = "file" if code == b"S" else _KINDS.get(code)
        if kind is None:
            raise self.refuse(f"a member of type {code!r}", "files, folders, links")
        if code == b"S":
            more = block[482]
            while more:
                more = self._exactly(_BLOCK)[504]
        if name is None:
            name = _text(block[:100])
            prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else b""
            name = prefix + b"/" + name if prefix else name
        name = pax.get("path", name)
        if kind == "file" and code == b"\0" and name.endswith(b"/"):
            kind = "folder"
        size = self._decimal(pax["size"], "size") if "size" in pax else size
        # As runtimes have it: nothing but a file has bytes, whatever its header says.
        self._left = size if kind == "file" else 0
        self._pad = -self._left % _BLOCK
        return Entry(
            name=_decoded(name),
            kind=kind,
            mode=self._number(block[100:108], "mode") & 0o7777,
            uid=self._decimal(pax["uid"], "uid") if "uid" in pax else self._number(block[108:116], "uid"),
            gid=self._decimal(pax["gid"], "gid") if "gid" in pax else self._number(block[116:124], "gid"),
            mtime=self._seconds(pax["mtime"]) if "mtime" in pax else self._number(block[136:148], "mtime", signed=True),
            size=self._left,
            target=_decoded(pax.get("linkpath", _text(block[157:257]) if target is None else target)),
            attributes={key.removeprefix(_ATTRIBUTE): data for key, data in pax.items() if key.startswith(_ATTRIBUTE)},
            is_sparse=sparse,
        )

    def _records(self, raw: bytes) -> dict[str, bytes]:
        records: dict[str, bytes] = {}
        place = 0
        while place < len(raw):
            space = raw.find(b" ", place, place + 20)
            length = self._decimal(raw[place:space], "length") if space > place else 0
            record = raw[space + 1 : place + length]
            key, equals, data = record[:-1].partition(b"=")
            if place + length > len(raw) or record[-1:] != b"\n" or not equals or not key:
                raise self.refuse("a broken extended header")
            try:
                records[key.decode("utf-8")] = data
            except UnicodeDecodeError:
                raise self.refuse(f"an extended header with the keyword {key[:80]!r}", "keywords in UTF-8") from None
            place += length
        return records

    def _number(self, field_: bytes, what: str, *, signed: bool = False) -> int:
        if field_[0] & 0x80:
            number = int.from_bytes(field_, "big") & ((1 << (8 * len(field_) - 1)) - 1)
            # Two's complement: a second bit says so.
            number -= (1 << (8 * len(field_) - 1)) if field_[0] & 0x40 else 0
        else:
            digits = field_.strip(b" \0")
            try:
                number = int(digits, 8) if digits else 0
            except ValueError:
                raise self.refuse(f"{what} {digits!r}") from None
        if number < 0 and not signed:
            raise self.refuse(f"{what} {number}")
        return number

    def _decimal(self, raw: bytes, what: str) -> int:
        if not raw.isdigit() or len(raw) > 20:
            raise self.refuse(f"{what} {raw[:30]!r}")
        return int(raw)

    def _seconds(self, raw: bytes) -> int:
        whole, _, part = raw.partition(b".")
        digits = whole.removeprefix(b"-")
        if not digits.isdigit() or len(digits) > 20 or not (part.isdigit() or not part):
            raise self.refuse(f"mtime {raw[:30]!r}")
        return int(whole)

    def _body(self, size: int, limit: int) -> bytes:
        if size > limit:
            raise self.refuse(f"an extended header of {size} bytes", f"one of up to {limit}")
        data = self._exactly(size)
        self._pass(-size % _BLOCK)
        return data

    def _exactly(self, count: int) -> bytes:
        data = self._source.read(count)
        if len(data) < count:
            raise self.refuse("it ends within a member")
        return data

    def _pass(self, count: int) -> None:
        if count and self._source.skip(count) < count:
            raise self.refuse("it ends within a member")


def _text(raw: bytes) -> bytes:
    return raw.partition(b"\0")[0]


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
