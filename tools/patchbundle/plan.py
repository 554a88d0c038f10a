"""Planning: a series, the bytes of a tree and a wanted level in, file operations out. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from patchbundle import names, record
from patchbundle.bases import Base
from patchbundle.diff import FileDiff
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import ABSENT, PLAIN, File, Identity, identity_of
from patchbundle.lock import Pins
from patchbundle.manifest import Bundle, Patch

Tree = dict[str, File | None]


@dataclass(frozen=True)
class Operation:
    """One path from an old to a new identity; ``data`` are the new bytes, None for a removal."""

    path: str
    old: Identity
    new: Identity
    data: bytes | None

    @property
    def verb(self) -> str:
        return "create" if not self.old.is_file else "change" if self.new.is_file else "remove"


@dataclass(frozen=True)
class Plan:
    """File operations from one level to another, in the order in which they are made.

    New files come first and removals last, so that no call site ever stands without the module it calls.
    """

    base: Base
    from_level: int
    to_level: int
    operations: tuple[Operation, ...]
    new_folders: tuple[str, ...]
    gone_folders: tuple[str, ...]


def touched_paths(bundle: Bundle, base: Base) -> set[str]:
    """Every path that some patch of the base's series touches."""
    paths: set[str] = set()
    for patch in bundle.series(base.role):
        paths |= {file.path for file in patch.files} | set(_installs(bundle, base, patch))
    return paths


def levels(bundle: Bundle, base: Base, tree: Mapping[str, File | None]) -> list[Tree]:
    """The touched paths at every level, from the base's bytes. Used by ``pin``, which knows no pins yet.

    Raises:
        BundleError: if a diff does not apply exactly, or a series writes through something it made itself.
    """
    chain = [dict(tree)]
    for patch in bundle.series(base.role):
        chain.append(_forward(bundle, base, patch, chain[-1]))
    # All levels at once: a path that is a file at one level and a folder at another would need the tree to pass
    # through every level between, and a plan goes there in one step.
    names.check_together(sorted(touched_paths(bundle, base) | {base.receipt}), f"the series of {base.id}")
    return chain


def plan(
    bundle: Bundle,
    base: Base,
    tree: Mapping[str, File | None],
    from_level: int,
    to_level: int,
    *,
    record_path: str | None = None,
    record_data: bytes | None = None,
    receipt_data: bytes | None = None,
) -> Plan:
    """Plan the way from one level to another; every level between is checked against its pins.

    ``tree`` holds the bytes of every pinned path at ``from_level``; ``record_data`` the bytes of the installed
    RECORD, if the tree has one; ``receipt_data`` those of the receipt that stands there now.

    Raises:
        BundleError: if any interim tree is not exactly as pinned.
    """
    pins = bundle.pins(base)
    series = bundle.series(base.role)
    current = dict(tree)
    _check_pins(current, pins, from_level, base.id)
    for level in range(from_level, to_level):
        current = _forward(bundle, base, series[level], current)
        _check_pins(current, pins, level + 1, f"patches/{series[level].file}")
    for level in range(from_level, to_level, -1):
        current = _backward(bundle, base, series[level - 1], current, pins.at(level - 1))
        _check_pins(current, pins, level - 1, f"patches/{series[level - 1].file}")

    operations = [_operation(path, tree[path], current[path]) for path in pins.at(to_level)]
    old, new = pins.at(from_level), pins.at(to_level)
    receipt = receipt_bytes(bundle, base, to_level)
    operations.append(_operation(base.receipt, _file(receipt_data), _file(receipt)))
    if record_path is not None and record_data is not None:
        released = {path for path, identity in pins.at(0).items() if identity.is_file}
        edited = _edit_record(record_data, old, new, base.receipt, receipt, record_path, released)
        operations.append(Operation(record_path, Identity.of(record_data), Identity.of(edited), edited))
    made = sorted(folder for folder, level in pins.folders.items() if from_level < level <= to_level)
    gone = sorted((f for f, level in pins.folders.items() if to_level < level <= from_level), reverse=True)
    order = {"create": 0, "change": 1, "remove": 2}
    return Plan(
        base,
        from_level,
        to_level,
        tuple(sorted((op for op in operations if op.old != op.new), key=lambda op: order[op.verb])),
        tuple(made),
        tuple(gone),
    )


def receipt_bytes(bundle: Bundle, base: Base, level: int) -> bytes | None:
    """The receipt of a tree at ``level``: a name to show, recomputable, decided from by nobody."""
    if level == 0:
        return None
    receipt = {
        "schema": 1,
        "bundle": bundle.lock.digest,
        "base": base.id,
        "role": base.role,
        "level": level,
        "patches": list(bundle.pins(base).levels[:level]),
    }
    return (json.dumps(receipt, indent=1, sort_keys=True) + "\n").encode("ascii")


def _file(data: bytes | None) -> File | None:
    return None if data is None else File(data)


def _operation(path: str, old: File | None, new: File | None) -> Operation:
    return Operation(path, identity_of(old), identity_of(new), None if new is None else new.data)


def _edit_record(
    raw: bytes,
    old: dict[str, Identity],
    new: dict[str, Identity],
    receipt: str,
    data: bytes | None,
    where: str,
    released: set[str],
) -> bytes:
    """The RECORD after the plan. The receipt's line is replaced whatever it says, as the receipt itself is."""
    # First in line, so that one step of two levels appends the same lines as two steps of one.
    old = {receipt: record.found(raw, receipt), **old}
    new = {receipt: ABSENT if data is None else Identity.of(data), **new}
    return record.edit(raw, old, new, where, released)


def _installs(bundle: Bundle, base: Base, patch: Patch) -> dict[str, bytes]:
    """Path in the tree -> bytes of the sources that a patch installs."""
    return {base.install_path(source) or source: bundle.source(source) for source in patch.sources}


def _forward(bundle: Bundle, base: Base, patch: Patch, tree: Mapping[str, File | None]) -> Tree:
    where = f"patches/{patch.file}"
    result = dict(tree)
    for file in patch.files:
        result[file.path] = _apply(file, result.get(file.path), where)
    for path, data in _installs(bundle, base, patch).items():
        if result.get(path) is not None:
            raise BundleError(Reason.FILE_EXISTS, f"{where}: {path}", expected="no file where a source lands")
        result[path] = File(data)
    _check_parents(result, where)
    return result


def _backward(
    bundle: Bundle, base: Base, patch: Patch, tree: Mapping[str, File | None], pins: Mapping[str, Identity]
) -> Tree:
    where = f"patches/{patch.file}"
    result = dict(tree)
    for path, data in _installs(bundle, base, patch).items():
        if identity_of(result.get(path)) != Identity.of(data):
            raise BundleError(Reason.CONTEXT_DIFFERS, f"{where}: {path}", expected="the bytes of its source")
        result[path] = None
    for file in reversed(patch.files):
        pinned = pins.get(file.path, ABSENT)
        result[file.path] = _apply(file.reversed(), result.get(file.path), where, pinned.mode or PLAIN)
    _check_parents(result, where)
    return result


def _apply(file: FileDiff, old: File | None, where: str, restored_mode: str = PLAIN) -> File | None:
    return file.apply(old, where, restored_mode=restored_mode)


def _check_parents(tree: Mapping[str, File | None], where: str) -> None:
    files = {path for path, file in tree.items() if file is not None}
    for path in files:
        for parent in names.parents(path):
            if parent in files:
                raise BundleError(Reason.PARENT, f"{where}: {path}", found=f"{parent} is a file")


def _check_pins(tree: Mapping[str, File | None], pins: Pins, level: int, where: str) -> None:
    for path, pinned in pins.at(level).items():
        found = identity_of(tree.get(path))
        if found != pinned:
            raise BundleError(
                Reason.DRIFT,
                f"{where}: {path} at level {level} ({pins.name_of(level)})",
                expected=pinned.brief(),
                found=found.brief(),
            )
