"""What a run changed in a laid-out image, as the members of one layer. No clock is read."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from patchbundle import names
from patchbundle.plan import Operation, Plan
from workstation.layer import Member
from workstation.layout import FILE_BITS, Layout
from workstation.tarstream import Entry

_FOLDER = Entry("", "folder", 0o755, 0, 0, 0, 0)
_WHITEOUT = Entry("", "file", 0o644, 0, 0, 0, 0)


def members(layout: Layout, plan: Plan, dropped: Iterable[str], created: int) -> list[Member]:
    """Files that the run made or changed, folders that it made, whiteouts of what it took away, and the folders above.

    A changed file keeps owner, bits and attributes of the image's; a new one gets its folder's owner. Every new time is
    the image's own (``created``, in seconds), or a second after the newest file that is replaced: bytecode that was
    compiled from that one, wherever it lies, is then older.
    """
    when = max([created, *(entry.mtime + 1 for op in plan.operations if (entry := _old(layout, op)) is not None)])
    gone = {_join(layout, folder) for folder in plan.gone_folders}
    lost = {*gone, *(_join(layout, op.path) for op in plan.operations if not op.new.is_file)}
    lost |= {Path(path).relative_to(layout.tree).as_posix() for path in dropped}
    made: dict[str, Member] = {}
    for folder in plan.new_folders:
        path = _join(layout, folder)
        made[path] = Member(_new(layout, path, "folder", when))
    for op in plan.operations:
        if op.data is not None:
            path = _join(layout, op.path)
            old = _old(layout, op)
            entry = _new(layout, path, "file", when) if old is None else _changed(layout, path, old, when)
            made[path] = Member(entry, op.data)
    for path in lost:
        # A folder that goes takes along what is in it.
        if not any(above in gone for above in names.parents(path)):
            above, _, name = path.rpartition("/")
            hidden = f"{above}/.wh.{name}" if above else f".wh.{name}"
            made[hidden] = Member(replace(_WHITEOUT, name=hidden, mtime=when))
    for path in {above for member in made for above in names.parents(member)} - made.keys():
        made[path] = Member(replace(_named(layout, path) or replace(_FOLDER, mtime=when), name=path))
    return list(made.values())


def _join(layout: Layout, path: str) -> str:
    return f"{layout.prefix}/{path}" if layout.prefix else path


def _old(layout: Layout, op: Operation) -> Entry | None:
    return layout.entry(_join(layout, op.path)) if op.old.is_file else None


def _named(layout: Layout, path: str) -> Entry | None:
    entry = layout.entry(path)
    return entry if entry is not None and entry.kind == "folder" else None


def _bits(layout: Layout, path: str) -> int:
    return stat.S_IMODE((layout.tree / path).lstat().st_mode)


def _new(layout: Layout, path: str, kind: str, when: int) -> Entry:
    above = next((entry for parent in reversed(names.parents(path)) if (entry := _named(layout, parent))), _FOLDER)
    return Entry(path, kind, _bits(layout, path), above.uid, above.gid, when, 0)


def _changed(layout: Layout, path: str, old: Entry, when: int) -> Entry:
    # Without the bits that only our own copy has.
    bits = _bits(layout, path) & ~(FILE_BITS & ~old.mode)
    return replace(old, name=path, kind="file", mode=bits, mtime=when, target="")
