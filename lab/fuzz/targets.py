"""What is fuzzed: a reader of bytes from outside, and what must hold of what it accepts.

Each target takes bytes. Refusing them is one answer (BundleError, with a place in the file); every other exception,
and every broken promise about what was accepted, is a finding.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from patchbundle import journal, lock, parse, record
from patchbundle.diff import FileDiff, split_lines
from patchbundle.errors import BundleError
from patchbundle.header import Header
from patchbundle.identity import PLAIN, File

REPOSITORY = Path(__file__).resolve().parents[2]
_PLACE = re.compile(r"p\.diff(?::[0-9]+)?(?::|$)")
# More lines than this before a hunk make the file to try it on large, and nothing else.
_LARGEST = 5_000


def patch(raw: bytes) -> None:
    """The parser: what it accepts goes on and comes off byte for byte, on a file that the hunks fit."""
    try:
        parsed = parse.parse(raw, "p.diff")
    except BundleError as refusal:
        assert _PLACE.match(refusal.where), refusal.where
        return
    assert parsed.files
    with contextlib.suppress(BundleError):
        Header.parse(parsed.message, "p.diff")
    for file in parsed.files:
        assert file.reversed().reversed() == file
        _on_and_off(file)


def _on_and_off(file: FileDiff) -> None:
    old = None if file.creates else _fitting(file)
    if old is None and not file.creates:
        return
    try:
        new = file.apply(old, "p.diff")
    except BundleError as refusal:
        assert _PLACE.match(refusal.where), refusal.where
        return
    assert file.reversed().apply(new, "p.diff", restored_mode=old.mode if old else None) == old


def _fitting(file: FileDiff) -> File | None:
    """A file that the old side of every hunk fits; None if it were too large."""
    lines: list[bytes] = []
    for hunk in file.hunks:
        if hunk.old_index > _LARGEST:
            return None
        lines += [b"%d\n" % number for number in range(len(lines), hunk.old_index)]
        lines += hunk.side("-")
    # Context that is cut short must stand at the end of the file.
    if file.hunks and file.hunks[-1].trailing and all(line.endswith(b"\n") for line in lines) and not file.deletes:
        lines.append(b"the end\n")
    data = b"".join(lines)
    assert split_lines(data) == lines or any(not line.endswith(b"\n") for line in lines[:-1])
    return File(data, file.old_mode or PLAIN)


def journals(raw: bytes) -> None:
    """A journal that is accepted is byte for byte one that we write."""
    try:
        read = journal.load(raw, "journal")
    except BundleError:
        return
    assert read.dump() == raw


def locks(raw: bytes) -> None:
    """So is a lock."""
    try:
        read = lock.load(raw, "lock")
    except BundleError:
        return
    assert lock.dump(read) == raw


def records(raw: bytes) -> None:
    """Every path of a RECORD that is accepted is found in it again, and an edit of it comes back."""
    try:
        table = record.entries(raw)
    except BundleError:
        return
    for path in list(table)[:4]:
        try:
            before = {path: record.found(raw, path)}
            after = {path: File(b"other").identity}
            edited = record.edit(raw, before, after, "RECORD", {path})
            back = record.edit(edited, after, before, "RECORD", {path})
        except BundleError:
            continue
        assert back == raw, path


TARGETS: dict[str, Callable[[bytes], None]] = {
    "patch": patch,
    "journal": journals,
    "lock": locks,
    "record": records,
}


def seeds(target: str) -> Iterator[bytes]:
    """Small inputs that are right, or wrong in a known way: those of the repository itself."""
    if target == "patch":
        for path in sorted((REPOSITORY / "tests/corpus").glob("*/p*.diff")):
            yield path.read_bytes()
        for path in sorted((REPOSITORY / "patches").rglob("*.patch")):
            yield path.read_bytes()[:4096]
    elif target == "journal":
        yield journal.Journal("prepare", "b", "base", "base", "top", (), ("a",), (), ("/m",)).dump()
        step = journal.Step.of(0, "a/b.py", File(b"1").identity, File(b"2").identity)
        yield journal.Journal("commit", "b", "base", "base", "top", (step,), (), (), ()).dump()
    elif target == "lock":
        whole = (REPOSITORY / "patches/pins.lock").read_bytes()
        yield whole[:8192]
        yield lock.dump(lock.Lock({"patches/x.patch": "0" * 64}, {}))
    else:
        yield b'a/b.py,sha256=%s,1\nx,,\n"c,d",,\r\nRECORD,,' % (b"A" * 43)
