"""An operator's image as a base: the release, but for declared files, each by its SHA-256."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from patchbundle import attest, bases, disk, fetch, manifest, names, pin, record, transaction
from patchbundle import state as state_module
from patchbundle import target as target_module
from patchbundle.bases import Base, Overlay
from patchbundle.errors import BundleError, Reason, command
from patchbundle.identity import ABSENT, PLAIN, Identity, identity_of
from patchbundle.plan import touched_paths
from patchbundle.state import State
from patchbundle.tree import Found, Tree

_BASES = "config/bases.toml"


def add(
    root: Path, base_id: str, place: Path, declared: Iterable[str], *, offline: bool = False, write: bool = True
) -> Base:
    """Take the tree at ``place`` in as the base ``base_id`` of the bundle at ``root``, with pins of its own.

    ``declared`` are the files, below ``place``, that it holds otherwise than the release; every other file of the
    release must be as released. The tree must be at base. Without ``write`` all is tried and nothing kept.

    Raises:
        BundleError: MANIFEST, for an id that is taken; NOT_ATTESTED, naming what differs and was not declared;
            CONTEXT_DIFFERS and the like, naming the patch and the hunk that an overlay reaches into.
    """
    bundle = manifest.load(root)
    bases.check_id(base_id, "--id")
    if base_id in bundle.bases:
        raise bases.refuse(f"{_BASES}: {base_id}", "an id that no base has", "a base of this name")
    target = target_module.discover(bundle, root=place)
    with Tree(target.root) as tree:
        transaction.refuse_interrupted(tree)
        looks = [state_module.look(tree, bundle, base, target.record) for base in target.bases if base.is_release]
        state = max(looks, key=lambda look: sum(file.holds for file in look.files))
        if tree.kind(state.base.home) != "absent":
            raise BundleError(
                Reason.NOT_EXPECTED,
                f"{target.root}/{state.base.home}",
                expected="a tree at base",
                found="a folder of ours",
                next_step=f"run: {command('revert', '--root', target.root)}",
            )
        members = {
            path: identity_of(file)
            for path, file in fetch.members(fetch.fetch(state.base, fetch.default_archive(state.base), offline=offline))
        }
        looked = {
            path: tree.find(path) for path in sorted({names.below(target.root, name, "--overlay") for name in declared})
        }
        overlay = {path: _overlay(state, path, found, members) for path, found in looked.items()}
        _refuse_others(tree, state, bundle.artifacts, members, overlay)
    if not overlay:
        raise bases.refuse("--overlay", "a file that differs from the release", "none: this tree is the release")
    made = state.base._replace(id=base_id, overlay=overlay)
    touched = touched_paths(bundle, state.base)
    files = {made.overlay_file(path): found.data or b"" for path, found in looked.items() if path in touched}
    files[_BASES] = bundle.artifacts[_BASES].rstrip(b"\n") + b"\n\n" + _table(made, state.base.id)
    with tempfile.TemporaryDirectory(prefix="base-") as temporary:
        # All of it is tried in a copy: what is refused leaves no trace.
        copy = Path(temporary)
        for path, data in {**bundle.artifacts, **files}.items():
            disk.write_file(copy / path, data)
        try:
            pin.pin(copy, offline=offline)
        except BundleError as error:
            if not error.where.startswith("patches/"):
                raise
            raise BundleError(
                error.reason,
                f"{base_id}: the hunk at {error.where}",
                expected=error.expected,
                found=error.found,
                next_step="the image and this patch change the same lines: bring the patch to the image's file, "
                "or use an image without that change",
            ) from None
        files[manifest.LOCK] = bases.read_file(copy / manifest.LOCK)
    if write:
        # The lock last: until then the bundle says itself that it is not as locked.
        for path, data in files.items():
            disk.write_file(root / path, data)
    return made


def _overlay(state: State, path: str, found: Found, members: Mapping[str, Identity]) -> Overlay:
    where = f"--overlay {path}"
    released = members.get(path, ABSENT)
    if not released.is_file or manifest.is_metadata(path):
        raise bases.refuse(where, f"a file of {state.base.distribution} {state.base.version}", "none of its own")
    if found.data is None:
        raise bases.refuse(where, "a plain file", found.identity.brief())
    if found.identity == released:
        raise bases.refuse(where, "a file that differs from the release", "the release's bytes")
    data = state.data(state.record_path)
    if data is None:
        return Overlay(found.identity, released, released)
    recorded = record.found(data, path)
    for item in (released, found.identity):
        if (recorded.sha256, recorded.size) == (item.sha256, item.size):
            return Overlay(found.identity, released, recorded)
    raise BundleError(
        Reason.RECORD,
        f"{state.record_path}: {path}",
        expected=f"{released.brief()}, or {found.identity.brief()}",
        found=recorded.brief(),
    )


def _refuse_others(
    tree: Tree,
    state: State,
    artifacts: Mapping[str, bytes],
    members: Mapping[str, Identity],
    overlay: Mapping[str, Overlay],
) -> None:
    """Refuse a tree that differs from the release in a file that was not declared."""
    base, data = state.base, state.data(state.record_path)
    archive = fetch.default_archive(base).filename
    if base.is_crate:
        where = f"config/{base.members}"
        entries = attest.parse_members(artifacts[where], where)
    elif data is not None:
        entries = record.entries(data) | {
            path: (item.release.sha256, item.release.size) for path, item in overlay.items()
        }
        archive = attest.archive_of(base, entries, f"{tree.root}/{state.record_path}")
    else:
        top = base.marker.partition("/")[0]
        entries = {path: (item.sha256, item.size) for path, item in members.items() if path.startswith(f"{top}/")}
    missing, changed = attest.differences(tree, attest.survey_of(tree, base, entries), entries, set(overlay))
    changed = sorted({*changed, *(file.path for file in state.files if not file.holds and file.path not in overlay)})
    found = [*(f"{path} (missing)" for path in missing), *(path for path in changed if path not in missing)]
    if found:
        expected = f"every file of {archive} but the declared ones"
        raise attest.differs(tree.root, found, expected, "declare each with --overlay FILE, or put it back")


def _table(base: Base, release: str) -> bytes:
    """The base as config/bases.toml has it."""
    lines = [f"[bases.{_quoted(base.id)}]", f"from = {_quoted(release)}"]
    for path, item in base.overlay.items():
        lines += ["", f"[bases.{_quoted(base.id)}.overlay.{_quoted(path)}]"]
        lines += [f'found = "{item.found}"', f'release = "{item.release}"']
        lines += [f'recorded = "{item.recorded._replace(mode=PLAIN)}"']
    return "".join(f"{line}\n" for line in lines).encode("utf-8")


def _quoted(text: str) -> str:
    # A name without control characters and backslashes is quoted alike in JSON and TOML.
    return json.dumps(text, ensure_ascii=False)
