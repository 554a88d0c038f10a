"""Where a tree stands. Computed from hashes alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from patchbundle import plan as plan_module
from patchbundle import record
from patchbundle.bases import Base
from patchbundle.errors import BundleError, Reason, command
from patchbundle.identity import ABSENT, PLAIN, File, Identity
from patchbundle.lock import Pins
from patchbundle.manifest import Bundle
from patchbundle.preflight import leftovers
from patchbundle.tree import Found, Tree

# More than a RECORD of a hundred thousand files, or any receipt.
_RECORD_LIMIT = 1 << 25
UNKNOWN = "of an unknown bundle"


class FileState(NamedTuple):
    """One pinned path: a state word, and what was found and expected at the tree's (nearest) level."""

    path: str
    word: str
    found: Identity
    expected: Identity

    @property
    def holds(self) -> bool:
        return self.found == self.expected


class State(NamedTuple):
    """A look at a tree, with the eyes of ``bundle``: the one at work, or a filed release that knows the tree.

    ``level`` is None where the tree is at no level; ``nearest`` is then the level that most paths agree with.
    ``unexpected`` are paths in folders of ours that nothing names. ``receipt`` is one of none, current, other
    (a bundle with the same patches up to here), missing, and "of an unknown bundle": one whose patches this bundle
    does not have, so that the tree may hold changes that it cannot see. The last is no level.
    """

    bundle: Bundle
    base: Base
    pins: Pins
    level: int | None
    nearest: int
    files: tuple[FileState, ...]
    unexpected: tuple[str, ...]
    receipt: str
    record_path: str | None
    record_fault: BundleError | None
    receipt_fault: BundleError | None
    found: Mapping[str, Found]

    @property
    def tree(self) -> dict[str, File | None]:
        """The pinned paths' bytes, for the planner."""
        return {path: self.found[path].file for path in self.pins.paths}

    def data(self, path: str | None) -> bytes | None:
        return None if path is None else self.found[path].data

    @property
    def nearest_holds(self) -> bool:
        """Whether every byte that this bundle looks at is as at the nearest level, but for the receipt."""
        return self.record_fault is None and not self.unexpected and all(file.holds for file in self.files)

    @property
    def release(self) -> str:
        """The release whose bundle knows the tree; empty for the bundle at work."""
        return self.bundle.release

    def describe(self, level: int) -> str:
        """A level as people read it."""
        place = f"level {level} of {len(self.pins.levels)} ({self.pins.name_of(level)})"
        return f"{place} of release {self.release}" if self.release else place

    @property
    def level_name(self) -> str:
        return "drifted" if self.level is None else self.pins.name_of(self.level)

    def require_level(self, root: str) -> int:
        """The level.

        Raises:
            BundleError: DRIFT or RECORD, naming the first file that is not as pinned, or NOT_EXPECTED, naming a
                receipt of an unknown bundle.
        """
        if self.level is not None:
            return self.level
        near = f"nearest known state: level {self.nearest} ({self.pins.name_of(self.nearest)})"
        hint = f"undo the change, or reinstall the base; every file: {command('status', '--root', root)}"
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
        fault = self.record_fault or self.receipt_fault
        assert fault is not None
        raise fault


def look(tree: Tree, bundle: Bundle, base: Base, record_path: str | None) -> State:
    """Hash every pinned path of ``base`` and tell where the tree stands."""
    pins = bundle.pins(base)
    paths = [*pins.paths, base.receipt, *([record_path] if record_path else [])]
    limits = {path: max(identity.size for identity in chain) for path, chain in pins.paths.items()}
    found = {path: tree.find(path, limits.get(path, _RECORD_LIMIT)) for path in paths}
    fits = [sum(found[path].identity == chain[level] for path, chain in pins.paths.items()) for level in _levels(pins)]
    # Of equally near levels the highest: what a half-edited patched tree most probably was.
    nearest = max(_levels(pins), key=lambda level: (fits[level], level))
    level = nearest if fits[nearest] == len(pins.paths) else None
    at = nearest if level is None else level
    extra = _unexpected(tree, pins, base, at, found[base.receipt].identity)
    unexpected = tuple(sorted({*extra, *leftovers(tree, [*pins.paths, base.receipt])}))
    fault = _record_fault(found, record_path, pins, at) if level is not None else None
    receipt = _receipt(bundle, base, at, found[base.receipt])
    foreign = _receipt_fault(tree, bundle, base, at, found[base.receipt]) if receipt == UNKNOWN else None
    if unexpected or fault or foreign:
        level = None
    files = tuple(_file_state(path, chain, found[path].identity, at) for path, chain in pins.paths.items())
    return State(bundle, base, pins, level, nearest, files, unexpected, receipt, record_path, fault, foreign, found)


def _levels(pins: Pins) -> range:
    return range(len(pins.levels) + 1)


def _unexpected(tree: Tree, pins: Pins, base: Base, level: int, receipt: Identity) -> tuple[str, ...]:
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
        record.check(data, pins.recorded_at(level), record_path, released)
    except BundleError as fault:
        return fault
    return None


def _receipt(bundle: Bundle, base: Base, level: int, found: Found) -> str:
    held = plan_module.kept(bundle.pins(base), level, found.data)
    expected = plan_module.receipt_bytes(bundle, base, level, held)
    if found.identity == ABSENT:
        return "none" if expected is None else "missing"
    if found.data == expected:
        return "current"
    # At base the folder that it lies in is unexpected itself.
    return "other" if level == 0 or _is_known(bundle, base, level, _read_receipt(found)) else UNKNOWN


def _read_receipt(found: Found) -> dict[str, Any]:
    """What a receipt says; nothing if it is none."""
    try:
        table = json.loads(found.data or b"")
    except (ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _is_known(bundle: Bundle, base: Base, level: int, receipt: Mapping[str, Any]) -> bool:
    """Whether everything that the bundle of this receipt did to the tree is something that this bundle pins.

    So it is with our own, at any level: the hashes tell the level. Of another bundle it is so where it made the same
    patches as ours up to where the tree stands.
    """
    own = list(bundle.pins(base).levels)
    patches = receipt.get("patches")
    if receipt.get("bundle") == bundle.lock.digest:
        return isinstance(patches, list) and patches == own[: len(patches)]
    return (receipt.get("base"), receipt.get("role"), patches) == (base.id, base.role, own[:level])


def _receipt_fault(tree: Tree, bundle: Bundle, base: Base, level: int, found: Found) -> BundleError:
    receipt = _read_receipt(found)
    patches = receipt.get("patches")
    names = [str(name)[:80] for name in patches] if isinstance(patches, list) else []
    own = bundle.pins(base).levels[:level]
    return BundleError(
        Reason.NOT_EXPECTED,
        f"{tree.root}/{base.receipt} (of an unknown bundle: the tree may hold changes that this bundle cannot see)",
        expected=f"a receipt of this bundle, or of one that made {', '.join(own)} and nothing else",
        found=f"the receipt of bundle {str(receipt.get('bundle'))[:64]} with {', '.join(names[:20]) or 'no patches'}"
        if receipt
        else found.identity.brief(),
        next_step="use the bundle that wrote it; if there is none, tools/check_sources.py --full and docs/recovery.md, "
        "'A receipt of an unknown bundle'",
    )


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
