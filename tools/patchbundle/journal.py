"""The journal of a transaction: what recovery needs, and nothing that it could get elsewhere.

It stands in the root of the tree while a transaction runs. Its phase tells what may be undone:

prepare   files are being staged; the tree is old; recovery removes what was staged
commit    everything new and everything old lies beside its place; recovery goes on or back
finish    the tree is new; what is left is clearing up; recovery only goes on
"""

from __future__ import annotations

import json
from typing import NamedTuple

from patchbundle import canonical, names
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import Identity

NAME = f"{names.RESERVED}-journal"
BESIDE = f"{NAME}.new"
PHASES = ("prepare", "commit", "finish")


class Step(NamedTuple):
    """One path; ``stage`` holds the new bytes and ``backup`` the old file, where there are such."""

    path: str
    old: Identity
    new: Identity
    stage: str | None
    backup: str | None

    @classmethod
    def of(cls, number: int, path: str, old: Identity, new: Identity) -> Step:
        folder = path.rpartition("/")[0]
        beside = f"{folder}/{names.RESERVED}-{number}" if folder else f"{names.RESERVED}-{number}"
        return cls(path, old, new, f"{beside}.new" if new.is_file else None, f"{beside}.old" if old.is_file else None)


class Journal(NamedTuple):
    phase: str
    bundle: str
    base: str
    from_level: str
    to_level: str
    steps: tuple[Step, ...]
    new_folders: tuple[str, ...]
    gone_folders: tuple[str, ...]
    mirrors: tuple[str, ...]  # folders outside the tree that hold bytecode of its modules

    def at(self, phase: str) -> Journal:
        return self._replace(phase=phase)

    def dump(self) -> bytes:
        body = {
            "schema": 1,
            "phase": self.phase,
            "bundle": self.bundle,
            "base": self.base,
            "from": self.from_level,
            "to": self.to_level,
            "steps": [[step.path, str(step.old), str(step.new)] for step in self.steps],
            "new_folders": list(self.new_folders),
            "gone_folders": list(self.gone_folders),
            "mirrors": list(self.mirrors),
        }
        return canonical.sealed(body)


def load(raw: bytes, where: str) -> Journal:
    """Read a journal.

    Raises:
        BundleError: JOURNAL, if it is not byte for byte what :meth:`Journal.dump` writes.
    """
    try:
        table = json.loads(raw)
        steps = tuple(
            Step.of(number, names.check(path, where), Identity.parse(old), Identity.parse(new))
            for number, (path, old, new) in enumerate(table["steps"])
        )
        journal = Journal(
            phase=table["phase"],
            bundle=table["bundle"],
            base=table["base"],
            from_level=table["from"],
            to_level=table["to"],
            steps=steps,
            new_folders=tuple(names.check(path, where) for path in table["new_folders"]),
            gone_folders=tuple(names.check(path, where) for path in table["gone_folders"]),
            mirrors=tuple(table["mirrors"]),
        )
        same = journal.dump() == raw and journal.phase in PHASES
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BundleError):
        same = False
    if not same:
        raise BundleError(
            Reason.JOURNAL,
            where,
            expected="the journal as it was written",
            found=f"{len(raw)} other bytes",
            next_step="do not delete it: see docs/recovery.md, 'A damaged journal'",
        )
    return journal
