"""RECORD, the list of a distribution's files that installers keep: a pure, invertible edit of its lines.

Touched files' lines are replaced in place, added files' lines are appended, every other byte stays. A file of the
release that a patch removes keeps its line's place, without hash and size: RECORD allows that, and installers do
not miss such a file. So the edit back gives the bytes of before without a copy of them being kept. Line ends are
kept line by line, since installers differ.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
import re
from collections.abc import Iterable, Mapping, Set
from functools import lru_cache

from patchbundle.errors import BundleError, Reason
from patchbundle.identity import ABSENT, PLAIN, Identity

# 43 letters hold 258 bits: of the four last letters that would spell one digest only one is ever written.
_HASHED = re.compile(r"sha256=([A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]),(0|[1-9][0-9]{0,17})")
_STANDARD = str.maketrans("-_", "+/")
# What installers add to a RECORD beside the wheel's own entries.
_INSTALLERS = frozenset({"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"})


def line(path: str, identity: Identity) -> bytes:
    """The RECORD line of a file, without its line end."""
    digest = base64.urlsafe_b64encode(bytes.fromhex(identity.sha256)).rstrip(b"=").decode("ascii")
    return _row(path, f"sha256={digest}", str(identity.size))


def place_holder(path: str) -> bytes:
    """The line of a file of the release that is not there now, without its line end."""
    return _row(path, "", "")


def _row(*fields: str) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(fields)
    return out.getvalue().encode("utf-8")


def edit(
    raw: bytes,
    old: Mapping[str, Identity],
    new: Mapping[str, Identity],
    where: str,
    released: Set[str] | None = None,
) -> bytes:
    """Turn the lines of the paths in ``old`` into those of ``new``; both hold the same paths.

    Paths that are added are appended in the order of ``new``. ``released`` are the paths that the release itself
    lists; it may be left out where no such path becomes absent.

    Raises:
        BundleError: RECORD, if a line of one of the paths is not as ``old`` says.
    """
    check(raw, old, where, released)
    changed = {path for path in old if old[path] != new[path]}
    if not changed:
        return raw
    text, ends = _split(raw)
    keys = _keys(changed)
    kept: list[tuple[bytes, bytes]] = []
    replaced: set[str] = set()
    for content, end in zip(text, ends, strict=True):
        path = keys.get(_key(content))
        if path is not None:
            if new[path].is_file:
                content = line(path, new[path])
            elif path in (released or ()):
                content = place_holder(path)
            else:
                continue
            replaced.add(path)
        kept.append((content, end))
    added = [path for path in new if path in changed and new[path].is_file and path not in replaced]
    usual = ends[0] if ends and ends[0] else b"\n"
    final = ends[-1] if ends else b"\n"
    kept += [(line(path, new[path]), usual) for path in added]
    # The last line's end is a property of the file, not of the line that happens to be last.
    out = [content + (end or usual) for content, end in kept]
    if kept:
        out[-1] = kept[-1][0] + final
    return b"".join(out)


def check(raw: bytes, pins: Mapping[str, Identity], where: str, released: Set[str] | None = None) -> None:
    """Refuse a RECORD whose line of a pinned path is missing, doubled, or not as pinned.

    An absent path has no line, or the place holder if it is in ``released``; without ``released`` either will do.

    Raises:
        BundleError: RECORD, naming the path.
    """
    found = _lines_of(raw, pins)
    for path, identity in pins.items():
        lines = found.get(path, [])
        if identity.is_file:
            expected = [line(path, identity)]
        else:
            held = lines[:1] == [place_holder(path)] if released is None else path in released
            expected = [place_holder(path)] if held else []
        if lines != expected:
            raise BundleError(
                Reason.RECORD,
                f"{where}: {path}",
                expected=expected[0].decode() if expected else "no line",
                found=" and ".join(item.decode("utf-8", "replace") for item in lines) or "no line",
                next_step="reinstall the distribution, or restore its RECORD",
            )


def entries(raw: bytes) -> dict[str, tuple[str, int]]:
    """The wheel's own entries: path -> (hex SHA-256, size). What an installer added is left out.

    Raises:
        BundleError: RECORD, if it is not a list of such lines.
    """
    try:
        rows = list(csv.reader(io.StringIO(raw.decode("utf-8"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BundleError(Reason.RECORD, "RECORD", expected="comma-separated lines", found=str(error)) from None
    paths, sizes, digests = [], [], []
    for row in rows:
        if len(row) != 3 or not row[1].startswith("sha256=") or _is_installers(row[0]):
            continue
        match = _HASHED.fullmatch(f"{row[1]},{row[2]}")
        if match is None:
            raise BundleError(Reason.RECORD, f"RECORD: {row[0]}", expected="path,sha256=…,size", found=repr(row))
        paths.append(row[0])
        # With an "A" in the place of the padding it is 33 bytes, the last of them zero: so all are decoded at once.
        digests.append(match[1])
        sizes.append(int(match[2]))
    decoded = binascii.a2b_base64("A".join([*digests, ""]).translate(_STANDARD)).hex()
    starts = range(0, len(decoded), 66)
    return {path: (decoded[at : at + 64], size) for path, at, size in zip(paths, starts, sizes, strict=True)}


def entries_digest(table: Mapping[str, tuple[str, int]]) -> str:
    """Digest of entries in canonical order: the same for a wheel's RECORD and for any installer's copy of it."""
    lines = (f"{path}\0{digest}\0{size}\n" for path, (digest, size) in sorted(table.items()))
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def _is_installers(path: str) -> bool:
    if path.startswith(("../", "/")) or "__pycache__" in path:
        return True
    folder, _, name = path.rpartition("/") if ".dist-info/" in path else ("", "", "")
    return folder.endswith(".dist-info") and name in _INSTALLERS


def _split(raw: bytes) -> tuple[list[bytes], list[bytes]]:
    """Lines without their ends, and the ends: LF, CR LF, or nothing for a last line that has none."""
    *parts, tail = raw.split(b"\n")
    if b"\r" not in raw:
        ends = [b"\n"] * len(parts)
        return ([*parts, tail], [*ends, b""]) if tail else (parts, ends)
    contents = [part.removesuffix(b"\r") for part in parts]
    ends = [b"\r\n" if part.endswith(b"\r") else b"\n" for part in parts]
    return ([*contents, tail], [*ends, b""]) if tail else (contents, ends)


def _keys(paths: Iterable[str]) -> dict[bytes, str]:
    return {path.encode("utf-8"): path for path in paths}


def _key(content: bytes) -> bytes:
    """The path that a line begins with."""
    if content[:1] != b'"':
        return content.partition(b",")[0]
    name, quote, rest = content[1:].partition(b'"')
    if quote and rest[:1] == b",":
        # No quote inside, as in nearly all of them: no other one could stand before a comma.
        return name
    try:
        return next(csv.reader([content.decode("utf-8", "replace")]), [""])[0].encode("utf-8")
    except csv.Error:  # a NUL, or a field of megabytes: a line of nobody's
        return b""


def _lines_of(raw: bytes, paths: Iterable[str]) -> dict[str, list[bytes]]:
    lines = _lines(raw)
    return {path: lines[key] for key, path in _keys(paths).items() if key in lines}


@lru_cache(maxsize=1)
def _lines(raw: bytes) -> dict[bytes, list[bytes]]:
    """The lines by the path that each begins with. A look at a tree asks for those of one RECORD several times."""
    lines: dict[bytes, list[bytes]] = {}
    for content in _split(raw)[0]:
        lines.setdefault(_key(content), []).append(content)
    return lines


def found(raw: bytes, path: str) -> Identity:
    """The identity that the RECORD's one line of ``path`` states; absent if it has none.

    Raises:
        BundleError: RECORD, if there are two such lines or it is not a line of a hashed file.
    """
    lines = _lines_of(raw, [path]).get(path, [])
    if not lines:
        return ABSENT
    table = entries(lines[0] + b"\n")
    if len(lines) > 1 or path not in table:
        raise BundleError(Reason.RECORD, path, expected="one hashed line", found=f"{len(lines)} lines")
    digest, size = table[path]
    return Identity("file", PLAIN, digest, size)
