"""Make the lock. The diffs are never edited: each must apply exactly, forward and back, to be pinned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from patchbundle import attest, disk, fetch, lock, names
from patchbundle import plan as plan_module
from patchbundle.bases import Base, refuse
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import File, Identity, identity_of
from patchbundle.lock import Lock, Pins
from patchbundle.manifest import Bundle, digests, load_unlocked
from patchbundle.plan import Stand
from patchbundle.tree import Tree

_CONTEXT = 3


def pin(root: Path, *, offline: bool = False, write: bool = True) -> tuple[Lock, bool]:
    """Recompute ``patches/pins.lock``; returns it and whether it differs from the file.

    Raises:
        BundleError: if a diff does not apply exactly or is thicker than three lines of context.
    """
    bundle = load_unlocked(root)
    _check_context(bundle)
    pinned = {}
    for base in bundle.bases.values():
        archive = fetch.default_archive(base)
        tree = dict(fetch.members(fetch.fetch(base, archive, offline=offline)))
        if base.members:
            _check_members(bundle, base, tree)
        pinned[base.id] = _pins(bundle, base, tree)
    unsigned = lock.dump(Lock(digests(bundle.artifacts), pinned))
    made = lock.load(unsigned, "the new lock")
    _check_way_back(bundle, made)
    path = root / "patches" / "pins.lock"
    changed = not _holds(path, unsigned)
    if write and changed:
        disk.write_file(path, unsigned)
    return made, changed


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file holds exactly these bytes. One of another size, or no plain file, is not read."""
    with Tree(path.parent) as tree:
        return tree.find(path.name, len(data)).data == data


def write_members(root: Path, *, offline: bool = False) -> list[Path]:
    """Write the list of members of every base that is a source archive; returns the files that changed."""
    bundle_bases = load_bases(root)
    changed = []
    for base in bundle_bases.values():
        if base.members:
            tree = dict(fetch.members(fetch.fetch(base, base.archives[0], offline=offline)))
            data = attest.dump_members(_entries(tree))
            path = root / "config" / base.members
            if not _holds(path, data):
                disk.write_file(path, data)
                changed.append(path)
    return changed


def load_bases(root: Path) -> Mapping[str, Base]:
    from patchbundle import bases

    return bases.load(root / "config" / "bases.toml")


def _entries(tree: Mapping[str, File]) -> dict[str, tuple[str, int]]:
    return {path: (hashlib.sha256(file.data).hexdigest(), len(file.data)) for path, file in tree.items()}


def _check_members(bundle: Bundle, base: Base, tree: Mapping[str, File]) -> None:
    where = f"config/{base.members}"
    if attest.parse_members(bundle.artifacts[where], where) != _entries(tree):
        raise BundleError(
            Reason.ARTIFACT,
            where,
            expected=f"the members of {base.archives[0].filename}",
            found="another list",
            next_step="run: tools/apply.py pin --members",
        )


def _pins(bundle: Bundle, base: Base, members: Mapping[str, File]) -> Pins:
    touched = sorted(plan_module.touched_paths(bundle, base))
    chain = plan_module.levels(bundle, base, before(bundle, base, members, touched))
    # A new file must not stand below a file of the release, or where some file system takes it for one.
    names.check_together(sorted({*members, *touched}), f"the series of {base.id} on its release")
    there = {folder for path in members for folder in names.parents(path)}
    folders: dict[str, int] = {}
    for level, tree in enumerate(chain):
        # The receipt stands in our folder from level 1 on, whether or not a source does.
        made = [path for path, file in tree.items() if file is not None] + ([base.receipt] if level else [])
        for path in made:
            for folder in names.parents(path):
                if folder not in there:
                    folders.setdefault(folder, level)
    return Pins(
        role=base.role,
        levels=tuple(patch.id for patch in bundle.series(base.role)),
        paths={path: tuple(identity_of(tree.get(path)) for tree in chain) for path in touched}
        | {path: (item.found,) * len(chain) for path, item in base.overlay.items() if path not in touched},
        folders=dict(sorted(folders.items())),
        recorded={path: item.recorded for path, item in base.overlay.items()},
    )


def before(bundle: Bundle, base: Base, members: Mapping[str, File], paths: Iterable[str]) -> dict[str, File | None]:
    """What stands at ``paths`` before any patch: the release's file, or the one of an operator's image.

    Raises:
        BundleError: MANIFEST, if the bundle does not have the bytes of an overlay among them.
    """
    result: dict[str, File | None] = {path: members.get(path) for path in paths}
    for path, item in base.overlay.items():
        if identity_of(members.get(path)).sha256 != item.release.sha256:
            raise refuse(f"config/bases.toml: {base.id}", f"the release's file, {item.release.brief()}", path)
        if path in result:
            where = base.overlay_file(path)
            data = bundle.artifacts.get(where)
            if data is None or Identity.of(data, item.found.mode) != item.found:
                raise BundleError(
                    Reason.MANIFEST,
                    where,
                    expected=f"the image's own {path}, which a patch changes: {item.found.brief()}",
                    found="nothing" if data is None else "other bytes",
                    next_step="run: tools/apply.py base add, again and from the image",
                )
            result[path] = File(data, item.found.mode)
    return result


def _check_context(bundle: Bundle) -> None:
    for patch in bundle.patches:
        for file in patch.files:
            for hunk in file.hunks:
                if max(hunk.leading, hunk.trailing) > _CONTEXT:
                    raise BundleError(
                        Reason.ARTIFACT,
                        f"patches/{patch.file}:{hunk.line_no}",
                        expected=f"{_CONTEXT} lines of context at most",
                        found=f"{hunk.leading} before, {hunk.trailing} after",
                    )


def _check_way_back(bundle: Bundle, made: Lock) -> None:
    """Every level can be planned from the top and from the base; the planner checks each interim tree."""
    # Of what no patch touches in an operator's image the bundle has no bytes, and needs none.
    known = {
        base_id: replace(
            pins, paths={path: chain for path, chain in pins.paths.items() if len(set(chain)) > 1}, recorded={}
        )
        for base_id, pins in made.bases.items()
    }
    locked = Bundle(bundle.root, bundle.bases, bundle.patches, bundle.artifacts, made._replace(bases=known))
    for base in bundle.bases.values():
        members = dict(fetch.members(fetch.fetch(base, fetch.default_archive(base), offline=True)))
        touched = sorted(plan_module.touched_paths(locked, base))
        chain = plan_module.levels(locked, base, before(locked, base, members, touched))
        top = len(locked.pins(base).levels)
        ends = Stand(locked, base, 0), Stand(locked, base, top)
        plan_module.plan(ends[0], ends[1], chain[0])
        plan_module.plan(ends[1], ends[0], chain[top])
