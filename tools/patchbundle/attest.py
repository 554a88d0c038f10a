"""Attestation: is the whole tree the pinned release, but for what the series changes?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from patchbundle import record, survey
from patchbundle.bases import Base
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import ABSENT
from patchbundle.manifest import Bundle
from patchbundle.state import State
from patchbundle.survey import Begun, Survey
from patchbundle.tree import LIMIT, Tree

# Build outputs that may lie in a crate without being a part of it.
_BUILDS = survey.BYTECODE | {"target", ".git"}


class Attestation(NamedTuple):
    """The verdict. ``archive`` is the pinned archive that the tree was made from; ``extra`` are paths that the
    release does not have: they are listed, not refused."""

    archive: str
    checked: int
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.missing and not self.changed


# Path -> SHA-256 and size, as a release lists its files.
Entries = Mapping[str, tuple[str, int]]


@contextmanager
def begun(tree: Tree, bases: Iterable[Base], early: Begun | None = None) -> Iterator[Begun | None]:
    """Begin the survey that :func:`attest` will want, if it is not the one that was begun ``early``; None where it
    depends on which of the bases the tree is of."""
    places = {(_top(base), _skip(base)) for base in bases}
    if len(places) != 1:
        yield None
        return
    top, skip = places.pop()
    if early is not None and early.covers(tree, top, skip, 0):
        yield early
        return
    with survey.begun(tree, top, skip, LIMIT) as under_way:
        yield under_way


def attest(tree: Tree, bundle: Bundle, state: State, level: int, under_way: Begun | None = None) -> Attestation:
    """Compare every file of the release with the tree. Pinned paths were compared by ``state`` already.

    ``under_way`` is a survey of the tree, if one was begun already.

    Raises:
        BundleError: NOT_ATTESTED, if the release's own list of files is not to be had or is not the pinned one.
    """
    base = state.base
    archive, expected = _entries_of_crate(bundle, base) if base.is_crate else _entries_of_wheel(tree, state, level)
    pinned = set(state.pins.paths) | {base.receipt}
    if under_way is not None and under_way.covers(tree, _top(base), _skip(base), _largest(expected)):
        seen = under_way.finish()
    else:
        seen = survey_of(tree, base, expected)
    below = f"{_top(base)}/".lstrip("/")
    extra = [
        path
        for path, item in seen.items()
        if item.identity.kind != "folder" and path.startswith(below) and path not in expected and path not in pinned
    ]
    missing, changed = differences(tree, seen, expected, pinned)
    changed += [file.path for file in state.files if not file.holds]
    return Attestation(archive, len(expected), tuple(missing), tuple(sorted(changed)), tuple(sorted(extra)))


def _largest(expected: Entries) -> int:
    return max((size for _, size in expected.values()), default=0)


def _top(base: Base) -> str:
    """The folder that everything of the release lies in, its metadata apart; '' for a crate."""
    return "" if base.is_crate else base.marker.partition("/")[0]


def _skip(base: Base) -> frozenset[str]:
    return _BUILDS if base.is_crate else survey.BYTECODE


def survey_of(tree: Tree, base: Base, expected: Entries) -> Survey:
    """A survey of a tree of ``base`` that looks no closer than what its release holds asks for."""
    # What is larger than every file of the release is none of them, whatever it holds.
    return survey.take(tree, _top(base), _skip(base), _largest(expected))


def differences(tree: Tree, seen: Survey, expected: Entries, apart: Set[str]) -> tuple[list[str], list[str]]:
    """Which of the release's files are missing, and which are changed; those ``apart`` are not looked at."""
    missing, changed = [], []
    for path, (digest, size) in expected.items():
        if path in apart:
            continue
        found = seen.get(path)
        identity = found.identity if found is not None else tree.find(path, size, keep=False).identity
        if identity == ABSENT:
            missing.append(path)
        elif (identity.sha256, identity.size) != (digest, size):
            changed.append(path)
    return sorted(missing), sorted(changed)


def differs(root: Path, paths: Sequence[str], expected: str, next_step: str) -> BundleError:
    """The refusal of a tree that differs from its release in these paths, the first of which it names."""
    found = f"{len(paths)} differ: {', '.join(paths[:5])}{' …' if len(paths) > 5 else ''}"
    return BundleError(Reason.NOT_ATTESTED, str(root), expected=expected, found=found, next_step=next_step)


def _entries_of_wheel(tree: Tree, state: State, level: int) -> tuple[str, Entries]:
    """The release's entries, from the tree's own RECORD with our lines undone and recognised by its digest."""
    data = state.data(state.record_path)
    if data is None or state.record_path is None:
        raise BundleError(
            Reason.NOT_ATTESTED,
            str(tree.root),
            expected="the distribution's RECORD",
            found="none",
            next_step="reinstall the distribution; without its RECORD only pinned files can be checked",
        )
    receipt = state.base.receipt
    old = {receipt: record.found(data, receipt), **state.pins.recorded_at(level)}
    overlay = {path: item.release for path, item in state.base.overlay.items()}
    new = {receipt: ABSENT, **state.pins.at(0), **overlay}
    entries, digest = _listed(record.edit(data, old, new, state.record_path))
    return _archive_of(state.base, digest, f"{tree.root}/{state.record_path}"), entries


@lru_cache(maxsize=1)
def _listed(raw: bytes) -> tuple[Entries, str]:
    """What a RECORD says, and its digest. A roundtrip comes to the same one at each of its looks."""
    entries = record.entries(raw)
    return entries, record.entries_digest(entries)


def archive_of(base: Base, entries: Entries, where: str) -> str:
    """The published wheel whose RECORD has these entries.

    Raises:
        BundleError: NOT_ATTESTED, if none has.
    """
    return _archive_of(base, record.entries_digest(entries), where)


def _archive_of(base: Base, digest: str, where: str) -> str:
    for archive in base.archives:
        if archive.entries == digest:
            return archive.filename
    raise BundleError(
        Reason.NOT_ATTESTED,
        where,
        expected=f"the entries of a published wheel of {base.distribution} {base.version}",
        found=f"entries with digest {digest}",
        next_step="reinstall the distribution from the package index",
    )


def _entries_of_crate(bundle: Bundle, base: Base) -> tuple[str, dict[str, tuple[str, int]]]:
    listing = bundle.artifacts[f"config/{base.members}"]
    return base.archives[0].filename, parse_members(listing, f"config/{base.members}")


def parse_members(raw: bytes, where: str) -> dict[str, tuple[str, int]]:
    """Read a list of an archive's members, one ``sha256 size path`` a line.

    Raises:
        BundleError: MANIFEST.
    """
    result = {}
    for number, line in enumerate(raw.decode("utf-8").splitlines(), 1):
        parts = line.split(" ", 2)
        if len(parts) != 3 or len(parts[0]) != 64 or not parts[1].isdigit():
            raise BundleError(Reason.MANIFEST, f"{where}:{number}", expected="sha256 size path", found=repr(line))
        result[parts[2]] = (parts[0], int(parts[1]))
    return result


def dump_members(entries: Mapping[str, tuple[str, int]]) -> bytes:
    return "".join(f"{digest} {size} {path}\n" for path, (digest, size) in sorted(entries.items())).encode("utf-8")


def tree_digest(seen: Survey) -> str:
    """One digest of everything in a survey: paths, kinds, exact permission bits and bytes."""
    total = hashlib.sha256()
    for path, item in sorted(seen.items()):
        bits = "-" if item.bits is None else f"{item.bits:04o}"
        line = f"{path}\0{item.identity.kind}\0{bits}\0{item.identity.sha256}\n"
        total.update(line.encode("utf-8", "surrogateescape"))
    return total.hexdigest()
