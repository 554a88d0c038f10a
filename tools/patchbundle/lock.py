"""The lock: every path's identity at every level, and every artifact's SHA-256. Written by ``pin`` alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from patchbundle import canonical, names
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import Identity

SCHEMA = 1
_REPAIR = "undo the edit, or run: tools/apply.py pin"


@dataclass(frozen=True)
class Pins:
    """What the lock says of one base.

    ``levels`` are patch ids in order; level k is the tree after the first k of them. ``paths`` maps a path to
    its identity at every level, base included. ``folders`` maps a folder that the series makes to the level
    that first has it. ``recorded`` is what an installed RECORD says of the files that an operator's image holds
    otherwise than the release, as long as no patch has changed them.
    """

    role: str
    levels: tuple[str, ...]
    paths: Mapping[str, tuple[Identity, ...]]
    folders: Mapping[str, int]
    recorded: Mapping[str, Identity] = field(default_factory=dict)

    def at(self, level: int) -> dict[str, Identity]:
        """Every pinned path's identity at a level, paths in the order in which levels introduce them."""
        return {path: self.paths[path][level] for path in self._order}

    def recorded_at(self, level: int) -> dict[str, Identity]:
        """What an installed RECORD says of every pinned path at a level, in the same order."""
        pins = self.at(level)
        return pins | {path: item for path, item in self.recorded.items() if pins[path] == self.paths[path][0]}

    def changes(self, level: int) -> tuple[str, ...]:
        """The paths whose identity at a level is not that of the level before."""
        return self._changes[level]

    @cached_property
    def _changes(self) -> tuple[tuple[str, ...], ...]:
        changes: list[list[str]] = [[] for _ in range(len(self.levels) + 1)]
        for path, chain in self.paths.items():
            for level in range(1, len(chain)):
                # Most are one object, of one line of the lock.
                if chain[level] is not chain[level - 1] and chain[level] != chain[level - 1]:
                    changes[level].append(path)
        return tuple(map(tuple, changes))

    @cached_property
    def _order(self) -> tuple[str, ...]:
        first: dict[str, int] = {}
        for level, paths in enumerate(self._changes):
            for path in paths:
                first.setdefault(path, level)
        return tuple(sorted(self.paths, key=lambda path: (first.get(path, len(self.levels) + 1), path)))

    def level_of(self, patch_id: str) -> int:
        """The level at which ``patch_id`` is the last patch applied; ``base`` is level 0.

        Raises:
            BundleError: UNKNOWN_LEVEL.
        """
        if patch_id == "base":
            return 0
        if patch_id not in self.levels:
            raise BundleError(
                Reason.UNKNOWN_LEVEL, patch_id, expected=f"base or one of {', '.join(self.levels) or 'nothing'}"
            )
        return self.levels.index(patch_id) + 1

    def name_of(self, level: int) -> str:
        return "base" if level == 0 else self.levels[level - 1]


class Lock(NamedTuple):
    """The whole lock; ``digest`` is the SHA-256 of the file, which names the bundle."""

    artifacts: Mapping[str, str]
    bases: Mapping[str, Pins]
    digest: str = ""


def dump(lock: Lock) -> bytes:
    """The one byte form of a lock. It carries a digest of its own content, so that no byte can change unseen."""
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "artifacts": dict(lock.artifacts),
        "bases": {
            base_id: {
                "role": pins.role,
                "levels": list(pins.levels),
                "folders": dict(pins.folders),
                "paths": {path: _steps(chain) for path, chain in pins.paths.items()},
                **({"recorded": {path: str(item) for path, item in pins.recorded.items()}} if pins.recorded else {}),
            }
            for base_id, pins in lock.bases.items()
        },
    }
    return canonical.sealed(body)


def load(raw: bytes, where: str) -> Lock:
    """Read a lock.

    Raises:
        BundleError: LOCK, for anything that :func:`dump` would not have written.
    """
    try:
        table = json.loads(raw)
        bases = {
            base_id: Pins(
                role=entry["role"],
                levels=tuple(entry["levels"]),
                paths={path: _chain(steps, len(entry["levels"]) + 1) for path, steps in sorted(entry["paths"].items())},
                folders=dict(entry["folders"]),
                recorded={path: Identity.parse(text) for path, text in entry.get("recorded", {}).items()},
            )
            for base_id, entry in table["bases"].items()
        }
        lock = Lock(dict(table["artifacts"]), bases, hashlib.sha256(raw).hexdigest())
        written = dump(lock)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise BundleError(
            Reason.LOCK, where, expected=f"a lock of schema {SCHEMA}", found=f"{error!r}", next_step=_REPAIR
        ) from None
    if written != raw:
        raise BundleError(
            Reason.LOCK,
            where,
            expected="the bytes that pin writes, with the digest of their content",
            found="other bytes",
            next_step=_REPAIR,
        )
    for base_id, pins in lock.bases.items():
        _check_pins(pins, f"{where}: {base_id}")
        for level in range(len(pins.levels)):
            if not pins.changes(level + 1):
                raise BundleError(
                    Reason.LOCK, f"{where}: {base_id}: {pins.levels[level]}", found="a patch without effect"
                )
    return lock


def _check_pins(pins: Pins, where: str) -> None:
    """What the canonical form alone does not show: types, ranges, and paths that cannot stand in one tree."""
    for patch_id in pins.levels:
        if not isinstance(patch_id, str) or pins.levels.count(patch_id) > 1:
            raise BundleError(Reason.LOCK, where, expected="each level once, by its patch's id", found=repr(patch_id))
    for path in (*pins.paths, *pins.folders):
        names.check(path, where)
    names.check_together(pins.paths, where)
    for path, identity in pins.recorded.items():
        if path not in pins.paths or not identity.is_file:
            raise BundleError(Reason.LOCK, f"{where}: {path}", expected="a pinned file that RECORD lists")
    for folder, level in pins.folders.items():
        if type(level) is not int or not 0 < level <= len(pins.levels):
            raise BundleError(Reason.LOCK, f"{where}: {folder}", expected="a level of the series", found=repr(level))
        if folder in pins.paths:
            raise BundleError(Reason.LOCK, f"{where}: {folder}", expected="a folder", found="a pinned file")


def _steps(chain: tuple[Identity, ...]) -> dict[str, str]:
    """Only the levels at which the identity changes."""
    return {
        f"{level:03d}": str(identity)
        for level, identity in enumerate(chain)
        if level == 0 or identity != chain[level - 1]
    }


def _chain(steps: Mapping[str, str], levels: int) -> tuple[Identity, ...]:
    chain: list[Identity] = []
    for level in range(levels):
        text = steps.get(f"{level:03d}")
        chain.append(chain[-1] if text is None else Identity.parse(text))
    return tuple(chain)
