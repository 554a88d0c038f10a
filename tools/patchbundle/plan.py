"""Planning: a series, the bytes of a tree and a wanted level in, file operations out. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from patchbundle import canonical, names, record
from patchbundle.bases import Base
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import ABSENT, PLAIN, Attributes, File, Identity, identity_of
from patchbundle.lock import Pins
from patchbundle.manifest import Bundle, Patch

Tree = dict[str, File | None]


class Operation(NamedTuple):
    """One path from an old to a new identity; ``data`` are the new bytes, None for a removal.

    ``attributes`` are those that a file of the release had when it was removed; None lets the folder suggest them.
    """

    path: str
    old: Identity
    new: Identity
    data: bytes | None
    attributes: Attributes | None = None

    @property
    def verb(self) -> str:
        return "create" if not self.old.is_file else "change" if self.new.is_file else "remove"


class Stand(NamedTuple):
    """A level of a bundle's series on one of its bases."""

    bundle: Bundle
    base: Base
    level: int

    @property
    def pins(self) -> Pins:
        return self.bundle.pins(self.base)

    @property
    def name(self) -> str:
        """As people name it: the patch on top, after the release of the bundle if it is a filed one."""
        own = self.pins.name_of(self.level)
        return f"{self.bundle.release}:{own}" if self.bundle.release and self.level else own

    def folders(self) -> set[str]:
        """The folders of ours that are there."""
        return {folder for folder, first in self.pins.folders.items() if first <= self.level}

    def recorded(self) -> dict[str, Identity]:
        """What an installed RECORD says of every pinned path."""
        return self.pins.recorded_at(self.level)

    def released(self) -> set[str]:
        """The pinned paths that the base itself has."""
        return {path for path, chain in self.pins.paths.items() if chain[0].is_file}


class Plan(NamedTuple):
    """File operations from where a tree stands to where it is to stand, in the order in which they are made.

    New files come first and removals last, so that no call site ever stands without the module it calls.
    """

    start: Stand
    goal: Stand
    operations: tuple[Operation, ...]
    new_folders: tuple[str, ...]
    gone_folders: tuple[str, ...]

    @property
    def base(self) -> Base:
        return self.goal.base


def touched_paths(bundle: Bundle, base: Base) -> set[str]:
    """Every path that some patch of the base's series touches."""
    return {path for patch in bundle.series(base.role) for path in _touched(bundle, base, patch)}


def _touched(bundle: Bundle, base: Base, patch: Patch) -> set[str]:
    return {file.path for file in patch.files} | set(_installs(bundle, base, patch))


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
    start: Stand,
    goal: Stand,
    tree: Mapping[str, File | None],
    *,
    record_path: str | None = None,
    record_data: bytes | None = None,
    receipt_data: bytes | None = None,
    attributes: Mapping[str, Attributes] | None = None,
) -> Plan:
    """Plan the way from one level to another; every level between is checked against its pins.

    From one bundle to another it leads over the base, in memory. ``tree`` holds the bytes of every path that either
    pins; ``record_data`` the bytes of the installed RECORD, if the tree has one; ``receipt_data`` those of the receipt
    that stands there now; ``attributes`` those that a file which may be removed would not get back by itself.

    Raises:
        BundleError: if any interim tree is not exactly as pinned.
    """
    turn = min(start.level, goal.level) if start.bundle is goal.bundle else 0
    current = dict(tree)
    _check_pins(current, start, start.level, start.base.id, start.pins.paths)
    down, up = start.bundle.series(start.base.role), goal.bundle.series(goal.base.role)
    for level in range(start.level, turn, -1):
        current = _backward(start, down[level - 1], current, level - 1)
        _check_step(current, start, level - 1, down[level - 1], level)
    if start.bundle is not goal.bundle:
        _check_pins(current, goal, turn, goal.base.id, goal.pins.paths)
    for level in range(turn + 1, goal.level + 1):
        current = _forward(goal.bundle, goal.base, up[level - 1], current)
        _check_step(current, goal, level, up[level - 1], level)

    paths = dict.fromkeys([*goal.pins.at(goal.level), *start.pins.paths])
    held = {**kept(start.pins, start.level, receipt_data), **(attributes or {})}
    operations = [_operation(path, tree[path], current[path], held) for path in paths]
    receipt = receipt_bytes(goal.bundle, goal.base, goal.level, _removed(goal.pins, goal.level, held))
    if start.base.receipt == goal.base.receipt:
        operations.append(_operation(goal.base.receipt, _file(receipt_data), _file(receipt)))
    else:
        operations.append(_operation(start.base.receipt, _file(receipt_data), None))
        operations.append(_operation(goal.base.receipt, None, _file(receipt)))
    if record_path is not None and record_data is not None:
        edited = _edit_record(record_data, start, goal, receipt, record_path)
        operations.append(Operation(record_path, Identity.of(record_data), Identity.of(edited), edited))
    before, after = start.folders(), goal.folders()
    order = {"create": 0, "change": 1, "remove": 2}
    return Plan(
        start,
        goal,
        tuple(sorted((op for op in operations if op.old != op.new), key=lambda op: order[op.verb])),
        tuple(sorted(after - before)),
        tuple(sorted(before - after, reverse=True)),
    )


def receipt_bytes(
    bundle: Bundle, base: Base, level: int, attributes: Mapping[str, Attributes] | None = None
) -> bytes | None:
    """The receipt of a tree at ``level``: a name to show, recomputable, decided from by nobody.

    Beside it ``attributes``, if there are any: what removed files of the release get back with their bytes.
    """
    if level == 0:
        return None
    receipt: dict[str, object] = {"kept": {path: str(item) for path, item in attributes.items()}} if attributes else {}
    receipt |= {
        "schema": 1,
        "bundle": bundle.lock.digest,
        "base": base.id,
        "role": base.role,
        "level": level,
        "patches": list(bundle.pins(base).levels[:level]),
    }
    return canonical.dump(receipt)


def kept(pins: Pins, level: int, receipt_data: bytes | None) -> dict[str, Attributes]:
    """What the receipt of a tree at ``level`` keeps for the files of the release that are removed there.

    Nothing, if it is damaged: then the folder suggests owner and mode, as for any new file.
    """
    try:
        found = json.loads(receipt_data or b"{}").get("kept", {})
        return _removed(pins, level, {path: Attributes.parse(text) for path, text in found.items()})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _removed(pins: Pins, level: int, attributes: Mapping[str, Attributes]) -> dict[str, Attributes]:
    chains = {path: pins.paths.get(path, (ABSENT,)) for path in attributes}
    gone = {path for path, chain in chains.items() if chain[0].is_file and not chain[level].is_file}
    return {path: item for path, item in attributes.items() if path in gone}


def _file(data: bytes | None) -> File | None:
    return None if data is None else File(data)


def _operation(
    path: str, old: File | None, new: File | None, attributes: Mapping[str, Attributes] | None = None
) -> Operation:
    held = (attributes or {}).get(path) if old is None else None
    return Operation(path, identity_of(old), identity_of(new), None if new is None else new.data, held)


def _edit_record(raw: bytes, start: Stand, goal: Stand, receipt: bytes | None, where: str) -> bytes:
    """The RECORD after the plan. The receipt's line is replaced whatever it says, as the receipt itself is."""
    ends = Identity.of(receipt) if receipt is not None else ABSENT
    if start.bundle is goal.bundle:
        # The receipt first in line, so that one step of two levels appends the same lines as two steps of one.
        own = start.base.receipt
        old = {own: record.found(raw, own), **start.recorded()}
        return record.edit(raw, old, {own: ends, **goal.recorded()}, where, start.released())
    # As if the base had been there in between, so that lines stand where a fresh run puts them.
    base = start._replace(level=0)
    old = {start.base.receipt: record.found(raw, start.base.receipt), **start.recorded()}
    raw = record.edit(raw, old, {start.base.receipt: ABSENT, **base.recorded()}, where, start.released())
    base = goal._replace(level=0)
    old = {goal.base.receipt: ABSENT, **base.recorded()}
    return record.edit(raw, old, {goal.base.receipt: ends, **goal.recorded()}, where, goal.released())


def _installs(bundle: Bundle, base: Base, patch: Patch) -> dict[str, bytes]:
    """Path in the tree -> bytes of the sources that a patch installs."""
    return {base.install_path(source) or source: bundle.source(source) for source in patch.sources}


def _forward(bundle: Bundle, base: Base, patch: Patch, tree: Mapping[str, File | None]) -> Tree:
    where = f"patches/{patch.file}"
    result = dict(tree)
    for file in patch.files:
        result[file.path] = file.apply(result.get(file.path), where, restored_mode=PLAIN)
    for path, data in _installs(bundle, base, patch).items():
        if result.get(path) is not None:
            raise BundleError(Reason.FILE_EXISTS, f"{where}: {path}", expected="no file where a source lands")
        result[path] = File(data)
    _check_parents(result, _touched(bundle, base, patch), where)
    return result


def _backward(stand: Stand, patch: Patch, tree: Mapping[str, File | None], level: int) -> Tree:
    where = f"patches/{patch.file}"
    result = dict(tree)
    for path, data in _installs(stand.bundle, stand.base, patch).items():
        if identity_of(result.get(path)) != Identity.of(data):
            raise BundleError(Reason.CONTEXT_DIFFERS, f"{where}: {path}", expected="the bytes of its source")
        result[path] = None
    for file in reversed(patch.files):
        pinned = stand.pins.paths[file.path][level] if file.path in stand.pins.paths else ABSENT
        back = file.reversed()
        result[file.path] = back.apply(result.get(file.path), where, restored_mode=pinned.mode or PLAIN)
    _check_parents(result, _touched(stand.bundle, stand.base, patch), where)
    return result


def _check_parents(tree: Mapping[str, File | None], touched: Iterable[str], where: str) -> None:
    """No file stands below a file. Of paths that are files at different levels see :func:`levels`."""
    for path in touched:
        for parent in names.parents(path) if tree.get(path) is not None else ():
            if tree.get(parent) is not None:
                raise BundleError(Reason.PARENT, f"{where}: {path}", found=f"{parent} is a file")


def _check_step(tree: Mapping[str, File | None], stand: Stand, level: int, patch: Patch, step: int) -> None:
    """The tree is as pinned at ``level`` after the step between ``step`` and the level below it.

    Only what the patch touches and what the lock changes there: the rest is as it was at the level before.
    """
    paths = {*_touched(stand.bundle, stand.base, patch), *stand.pins.changes(step)}
    _check_pins(tree, stand, level, f"patches/{patch.file}", sorted(paths & stand.pins.paths.keys()))


def _check_pins(tree: Mapping[str, File | None], stand: Stand, level: int, where: str, paths: Iterable[str]) -> None:
    pins = stand.pins
    for path in paths:
        found, pinned = identity_of(tree.get(path)), pins.paths[path][level]
        if found != pinned:
            raise BundleError(
                Reason.DRIFT,
                f"{where}: {path} at level {level} ({pins.name_of(level)})",
                expected=pinned.brief(),
                found=found.brief(),
            )
