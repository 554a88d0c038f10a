"""Where a tree stands. Computed from hashes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from patchbundle import plan as plan_module
from patchbundle import record
from patchbundle.bases import Base
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import ABSENT, PLAIN, File, Identity
from patchbundle.lock import Pins
from patchbundle.manifest import Bundle
from patchbundle.tree import Found, Tree


@dataclass(frozen=True)
class FileState:
    """One pinned path: a state word, and what was found and expected at the tree's (nearest) level."""

    path: str
    word: str
    found: Identity
    expected: Identity

    @property
    def holds(self) -> bool:
        return self.found == self.expected


@dataclass(frozen=True)
class State:
    """A look at a tree.

    ``level`` is None where the tree is at no level; ``nearest`` is then the level that most paths agree with.
    ``unexpected`` are paths in folders of ours that nothing names. ``receipt`` is one of none, current, other
    (a bundle that makes the same bytes), missing.
    """

    base: Base
    pins: Pins
    level: int | None
    nearest: int
    files: tuple[FileState, ...]
    unexpected: tuple[str, ...]
    receipt: str
    record_path: str | None
    record_fault: BundleError | None
    found: Mapping[str, Found]

    @property
    def tree(self) -> dict[str, File | None]:
        """The pinned paths' bytes, for the planner."""
        return {path: self.found[path].file for path in self.pins.paths}

    def data(self, path: str | None) -> bytes | None:
        return None if path is None else self.found[path].data

    @property
    def level_name(self) -> str:
        return "drifted" if self.level is None else self.pins.name_of(self.level)

    def require_level(self, root: str) -> int:
        """The level.

        Raises:
            BundleError: DRIFT or RECORD, naming the first file that is not as pinned.
        """
        if self.level is not None:
            return self.level
        near = f"nearest known state: level {self.nearest} ({self.pins.name_of(self.nearest)})"
        hint = f"undo the change, or reinstall the base; every file: tools/apply.py status --root {root}"
        for file in self.files:
            if not file.holds:
                raise BundleError(
                    Reason.DRIFT,
                    f"{root}/{file.path} ({file.word}; {near})",
                    expected=file.expected.brief(),
                    found=file.found.brief(),
                    next_step=hint,
                )
        for path in self.unexpected:
            raise BundleError(
                Reason.DRIFT, f"{root}/{path} (unexpected; {near})", expected="absent", found="present", next_step=hint
            )
        assert self.record_fault is not None
        raise self.record_fault


def look(tree: Tree, bundle: Bundle, base: Base, record_path: str | None) -> State:
    """Hash every pinned path of ``base`` and tell where the tree stands."""
    pins = bundle.pins(base)
    paths = [*pins.paths, base.receipt, *([record_path] if record_path else [])]
    found = {path: tree.find(path) for path in paths}
    fits = [sum(found[path].identity == chain[level] for path, chain in pins.paths.items()) for level in _levels(pins)]
    # Of equally near levels the highest: what a half-edited patched tree most probably was.
    nearest = max(_levels(pins), key=lambda level: (fits[level], level))
    level = nearest if fits[nearest] == len(pins.paths) else None
    at = nearest if level is None else level
    unexpected = _unexpected(tree, pins, base, at)
    fault = _record_fault(found, record_path, pins, at) if level is not None else None
    if unexpected or fault:
        level = None
    receipt = _receipt(bundle, base, at, found[base.receipt])
    files = tuple(_file_state(path, chain, found[path].identity, at) for path, chain in pins.paths.items())
    return State(base, pins, level, nearest, files, unexpected, receipt, record_path, fault, found)


def _levels(pins: Pins) -> range:
    return range(len(pins.levels) + 1)


def _unexpected(tree: Tree, pins: Pins, base: Base, level: int) -> tuple[str, ...]:
    """What stands in (or in the place of) a folder of ours without being pinned there."""
    result = []
    for folder, first in sorted(pins.folders.items()):
        if tree.kind(folder) == "absent":
            continue
        if level < first:
            result.append(folder)
            continue
        for name in sorted(tree.listing(folder)):
            path = f"{folder}/{name}"
            if path not in pins.paths and path not in pins.folders and path != base.receipt and name != "__pycache__":
                result.append(path)
    receipt = tree.find(base.receipt).identity
    if level and not (receipt == ABSENT or receipt.mode == PLAIN):
        result.append(base.receipt)
    return tuple(result)


def _record_fault(found: Mapping[str, Found], record_path: str | None, pins: Pins, level: int) -> BundleError | None:
    if record_path is None:
        return None
    data = found[record_path].data
    if data is None or found[record_path].identity.mode != PLAIN:
        return BundleError(
            Reason.RECORD,
            record_path,
            expected="a plain file that is not executable",
            found=found[record_path].identity.brief(),
            next_step="reinstall the distribution, or restore its RECORD",
        )
    try:
        released = {path for path, chain in pins.paths.items() if chain[0].is_file}
        record.check(data, pins.at(level), record_path, released)
    except BundleError as fault:
        return fault
    return None


def _receipt(bundle: Bundle, base: Base, level: int, found: Found) -> str:
    expected = plan_module.receipt_bytes(bundle, base, level)
    if found.identity == ABSENT:
        return "none" if expected is None else "missing"
    return "current" if found.data == expected else "other"


def _file_state(path: str, chain: tuple[Identity, ...], found: Identity, level: int) -> FileState:
    return FileState(path, _word(chain, found, level), found, chain[level])


def _word(chain: tuple[Identity, ...], found: Identity, level: int) -> str:
    expected = chain[level]
    if found == expected:
        step = max((k for k in range(1, level + 1) if chain[k] != chain[k - 1]), default=0)
        if not found.is_file:
            return "absent"
        return f"patched at step {step}" if step else "base"
    if found.kind == "absent":
        return "missing"
    if not found.is_file:
        return "wrong kind"
    if not expected.is_file:
        return "unexpected"
    if found.sha256 == expected.sha256:
        return "wrong mode"
    others = [k for k, identity in enumerate(chain) if identity == found]
    return f"as at level {others[0]}" if others else "drifted"
