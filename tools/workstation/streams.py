"""Blobs as they come: read once, hashed as they are and as they unpack, never whole in memory."""

from __future__ import annotations

import hashlib
import queue
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from patchbundle.errors import BundleError, Reason

_PART = 1 << 20
# All layers may unpack to this many bytes whatever their size, and to so many times it: no real image comes near.
FLOOR = 1 << 30
RATIO = 200
# As runtimes have it: more memory than this no frame may ask for.
_WINDOW = 1 << 27
_AHEAD = 4  # parts that are unpacked before they are asked for


class Blob:
    """A blob, opened, of which digest and size are known. ``where`` names it in refusals.

    What is read of it goes to ``copy`` too, if there is one.
    """

    def __init__(self, stream: IO[bytes], where: str, sha256: str, size: int, copy: IO[bytes] | None = None) -> None:
        self.where = where
        self._stream = stream
        self._copy = copy
        self._sha256 = sha256
        self.size = size
        self._total = hashlib.sha256()
        self._count = 0

    def read(self, count: int) -> bytes:
        data = self._stream.read(count)
        self._count += len(data)
        if self._count > self.size:
            raise BundleError(Reason.IMAGE, self.where, expected=f"{self.size} bytes", found="more")
        self._total.update(data)
        if self._copy is not None:
            self._copy.write(data)
        return data

    def check(self) -> None:
        """Read what is left; it must be the blob that was named.

        Raises:
            BundleError: IMAGE.
        """
        while self.read(_PART):
            pass
        if self._count != self.size:
            raise BundleError(Reason.IMAGE, self.where, expected=f"{self.size} bytes", found=f"{self._count} bytes")
        if self._total.hexdigest() != self._sha256:
            raise BundleError(
                Reason.IMAGE, self.where, expected=f"sha256 {self._sha256}", found=f"sha256 {self._total.hexdigest()}"
            )


def limit(size: int) -> int:
    """How many bytes so many packed ones may unpack to."""
    return max(FLOOR, RATIO * size)


class Unpacked:
    """The unpacked bytes of a layer, as a tar reader wants them; hashed on the way. ``count``: how many there were."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._part = b""
        self._place = 0
        self._total = hashlib.sha256()
        self.count = 0

    def _more(self) -> bool:
        self._part = next(self._parts, b"")
        self._place = 0
        self._total.update(self._part)
        self.count += len(self._part)
        return bool(self._part)

    def read(self, count: int) -> bytes:
        end = self._place + count
        if end <= len(self._part):
            data = self._part[self._place : end]
            self._place = end
            return data
        pieces = [self._part[self._place :]]
        missing = count - len(pieces[0])
        while missing and self._more():
            pieces.append(self._part[:missing])
            self._place = len(pieces[-1])
            missing -= len(pieces[-1])
        if missing:
            self._part, self._place = b"", 0
        return b"".join(pieces)

    def skip(self, count: int) -> int:
        left = count
        while left > len(self._part) - self._place:
            left -= len(self._part) - self._place
            if not self._more():
                self._part, self._place = b"", 0
                return count - left
        self._place += left
        return count

    def rest_is_empty(self) -> bool:
        empty = self._part.count(0, self._place) == len(self._part) - self._place
        while self._more():
            empty = empty and self._part.count(0) == len(self._part)
        self._part, self._place = b"", 0
        return empty

    def digest(self) -> str:
        """SHA-256 of everything, to the end."""
        self.rest_is_empty()
        return self._total.hexdigest()


@contextmanager
def unpacked(blob: Blob, compression: str, most: int) -> Iterator[Unpacked]:
    """Unpack a blob in a thread of its own: hashing and unpacking there, hashing and reading here.

    ``compression`` is "", gzip or zstd; ``most`` is how many bytes it may unpack to. A failure there is raised here,
    where the bytes are asked for.

    Raises:
        BundleError: LAYER, for what does not unpack, or unpacks to far too much; IMAGE; NO_PROGRAM.
    """
    made: queue.Queue[bytes | BaseException] = queue.Queue(_AHEAD)
    stopped = threading.Event()

    def put(item: bytes | BaseException) -> bool:
        while not stopped.is_set():
            try:
                made.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for part in _bounded(blob, _unpack(blob, compression), most):
                if not put(part):
                    return
            blob.check()
            put(b"")
        except BaseException as error:  # raised again where it is noticed
            put(error)

    def parts() -> Iterator[bytes]:
        while True:
            item = made.get()
            if isinstance(item, BaseException):
                raise item
            if not item:
                return
            yield item

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield Unpacked(parts())
    finally:
        stopped.set()
        thread.join()


def _bounded(blob: Blob, parts: Iterator[bytes], most: int) -> Iterator[bytes]:
    count = 0
    for part in parts:
        count += len(part)
        if count > most:
            raise _refuse(blob, f"more than {most} bytes out of {blob.size}", "an image of a plausible size")
        if part:
            yield part


def _unpack(blob: Blob, compression: str) -> Iterator[bytes]:
    if compression == "gzip":
        return _gunzip(blob)
    if compression == "zstd":
        return _unzstd(blob)
    return iter(lambda: blob.read(_PART), b"")


def _gunzip(blob: Blob) -> Iterator[bytes]:
    """Several members one after the other are one stream: some builders write them so."""
    member = zlib.decompressobj(31)
    data = blob.read(_PART)
    try:
        while data:
            if member.eof:
                member = zlib.decompressobj(31)
            yield member.decompress(data, _PART)
            data = member.unused_data if member.eof else member.unconsumed_tail
            data = data or blob.read(_PART)
        # What the last member still holds back.
        while not member.eof and (part := member.decompress(b"", _PART)):
            yield part
    except zlib.error as error:
        raise _refuse(blob, str(error), "a gzip stream") from None
    if not member.eof:
        raise _refuse(blob, "it ends within the stream", "a gzip stream")


def _unzstd(blob: Blob) -> Iterator[bytes]:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise BundleError(
            Reason.NO_PROGRAM,
            blob.where,
            expected="the package zstandard, for a layer that zstd compressed",
            found="none",
            next_step="pip install --require-hashes -r requirements/image.txt",
        ) from None
    source: Any = blob  # it has a read, which is all that is called
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(
            source, read_size=_PART, read_across_frames=True
        ) as reader:
            while part := reader.read(_PART):
                yield part
    except zstandard.ZstdError as error:
        raise _refuse(blob, str(error), "a zstd stream") from None


def _refuse(blob: Blob, found: str, expected: str) -> BundleError:
    return BundleError(Reason.LAYER, blob.where, expected=expected, found=found)
