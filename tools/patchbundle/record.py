"""RECORD, the list of a distribution's files that installers keep: a pure, invertible edit of its lines.

Touched files' lines are replaced in place, added files' lines are appended, every other byte stays. So the
edit back gives the bytes of before without a copy of them being kept. Line ends are kept line by line, since
installers differ.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Mapping

from patchbundle.errors import BundleError, Reason
from patchbundle.identity import ABSENT, PLAIN, Identity

# What installers add to a RECORD beside the wheel's own entries.
_INSTALLERS = frozenset({"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"})


def line(path: str, identity: Identity) -> bytes:
    """The RECORD line of a file, without its line end."""
    digest = base64.urlsafe_b64encode(bytes.fromhex(identity.sha256)).rstrip(b"=").decode("ascii")
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow([path, f"sha256={digest}", identity.size])
    return out.getvalue().encode("utf-8")


def edit(raw: bytes, old: Mapping[str, Identity], new: Mapping[str, Identity], where: str) -> bytes:
    """Turn the lines of the paths in ``old`` into those of ``new``; both hold the same paths.

    Paths that are added are appended in the order of ``new``.

    Raises:
        BundleError: RECORD, if a line of one of the paths is not as ``old`` says.
    """
    check(raw, old, where)
    text, ends = _split(raw)
    changed = {path for path in old if old[path] != new[path]}
    kept: list[tuple[bytes, bytes]] = []
    for content, end in zip(text, ends, strict=True):
        path = _path(content)
        if path in changed and new[path].is_file:
            content = line(path, new[path])
        if path not in changed or new[path].is_file:
            kept.append((content, end))
    added = [path for path in new if path in changed and not old[path].is_file]
    usual = ends[0] if ends and ends[0] else b"\n"
    final = ends[-1] if ends else b"\n"
    kept += [(line(path, new[path]), usual) for path in added]
    # The last line's end is a property of the file, not of the line that happens to be last.
    out = [content + (end or usual) for content, end in kept]
    if kept:
        out[-1] = kept[-1][0] + final
    return b"".join(out)


def check(raw: bytes, pins: Mapping[str, Identity], where: str) -> None:
    """Refuse a RECORD whose line of a pinned path is missing, doubled, or not as pinned.

    Raises:
        BundleError: RECORD, naming the path.
    """
    found: dict[str, list[bytes]] = {}
    for content in _split(raw)[0]:
        path = _path(content)
        if path in pins:
            found.setdefault(path, []).append(content)
    for path, identity in pins.items():
        lines = found.get(path, [])
        expected = [line(path, identity)] if identity.is_file else []
        if lines != expected:
            raise BundleError(
                Reason.RECORD,
                f"{where}: {path}",
                expected=expected[0].decode() if expected else "no line",
                found=" and ".join(item.decode("utf-8", "replace") for item in lines) or "no line",
                next_step="reinstall the distribution, or restore its RECORD",
            )


def entries(raw: bytes) -> dict[str, tuple[str, int]]:
    """The wheel's own entries: path -> (hex SHA-256, size). What an installer added is left out."""
    result: dict[str, tuple[str, int]] = {}
    for row in csv.reader(io.StringIO(raw.decode("utf-8"))):
        if len(row) != 3 or not row[1].startswith("sha256=") or _is_installers(row[0]):
            continue
        digest = row[1].removeprefix("sha256=")
        result[row[0]] = (base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex(), int(row[2]))
    return result


def entries_digest(table: Mapping[str, tuple[str, int]]) -> str:
    """Digest of entries in canonical order: the same for a wheel's RECORD and for any installer's copy of it."""
    lines = (f"{path}\0{digest}\0{size}\n" for path, (digest, size) in sorted(table.items()))
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def _is_installers(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return (
        path.startswith(("../", "/"))
        or "__pycache__" in path
        or (folder.endswith(".dist-info") and name in _INSTALLERS)
    )


def _split(raw: bytes) -> tuple[list[bytes], list[bytes]]:
    """Lines without their ends, and the ends: LF, CR LF, or nothing for a last line that has none."""
    *parts, tail = raw.split(b"\n")
    contents = [part.removesuffix(b"\r") for part in parts]
    ends = [b"\r\n" if part.endswith(b"\r") else b"\n" for part in parts]
    return ([*contents, tail], [*ends, b""]) if tail else (contents, ends)


def _path(content: bytes) -> str:
    if content.startswith(b'"'):
        rows: Iterable[list[str]] = csv.reader([content.decode("utf-8", "replace")])
        return next(iter(rows), [""])[0]
    return content.split(b",", 1)[0].decode("utf-8", "replace")


def found(raw: bytes, path: str) -> Identity:
    """The identity that the RECORD's one line of ``path`` states; absent if it has none.

    Raises:
        BundleError: RECORD, if there are two such lines or it is not a line of a hashed file.
    """
    lines = [content for content in _split(raw)[0] if _path(content) == path]
    if not lines:
        return ABSENT
    table = entries(lines[0] + b"\n")
    if len(lines) > 1 or path not in table:
        raise BundleError(Reason.RECORD, path, expected="one hashed line", found=f"{len(lines)} lines")
    digest, size = table[path]
    return Identity("file", PLAIN, digest, size)
