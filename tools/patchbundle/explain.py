"""For the reader of a tree: which patch touched a file and why, and how drift differs from the nearest level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from patchbundle import author, fetch, pin
from patchbundle import plan as plan_module
from patchbundle.errors import command
from patchbundle.identity import File
from patchbundle.manifest import Bundle, Patch
from patchbundle.state import State
from patchbundle.target import Target
from patchbundle.tree import Tree

# A file of more bytes than this is none that a person reads line by line.
_LARGEST = 1 << 22


@dataclass(frozen=True)
class Touch:
    """One patch that touches a file: its level, whether the tree has it, and how it comes off."""

    patch: Patch
    level: int
    applied: bool
    installs: bool
    off: str


@dataclass(frozen=True)
class Difference:
    """How a path differs from the nearest level: a unified diff, or the reason why there is none."""

    path: str
    word: str
    diff: str


def touches(state: State, target: Target, path: str) -> list[Touch]:
    """The patches of the tree's series that touch ``path``, in order. A drifted tree counts as its nearest level."""
    bundle, base, at = state.bundle, state.base, state.nearest
    found = []
    for level, patch in enumerate(bundle.series(base.role), 1):
        installs = any(base.install_path(source) == path for source in patch.sources)
        if installs or any(file.path == path for file in patch.files):
            below = state.pins.name_of(level - 1)
            found.append(
                Touch(patch, level, level <= at, installs, command("revert", "--root", target.root, "--to", below))
            )
    return found


def differences(tree: Tree, state: State) -> Iterator[Difference]:
    """Every path that is not as at the nearest level.

    Raises:
        BundleError: NOT_FETCHED, if the release's archive is not in the cache: its bytes are needed.
    """
    drifted = [file for file in state.files if not file.holds]
    expected = _expected(state.bundle, state, {file.path for file in drifted}) if drifted else {}
    for file in drifted:
        yield Difference(file.path, file.word, _diff(tree, file.path, expected.get(file.path), file.expected.is_file))
    for path in state.unexpected:
        yield Difference(path, "unexpected", _diff(tree, path, None, False))


def _expected(bundle: Bundle, state: State, paths: set[str]) -> dict[str, File | None]:
    base = state.base
    archive = fetch.fetch(base, fetch.default_archive(base), offline=True)
    touched = plan_module.touched_paths(bundle, base)
    series = bundle.series(base.role)[: state.nearest]
    before = pin.before(bundle, base, dict(fetch.members(archive)), sorted(touched | (paths - base.overlay.keys())))
    return plan_module.levels(replace(bundle, patches=series), base, before)[-1]


def _diff(tree: Tree, path: str, old: File | None, wanted: bool) -> str:
    found = tree.find(path, _LARGEST)
    if wanted and old is None:
        return "the bundle has no bytes of this file of the image, only its SHA-256"
    if found.identity.kind not in ("file", "absent"):
        return f"a {found.identity.kind} stands there" if wanted else f"a {found.identity.kind}"
    if found.identity.is_file and found.data is None:
        return f"{found.identity.size} bytes: too many to be shown"
    if any(b"\0" in file.data for file in (old, found.file) if file is not None):
        return "bytes that are no text"
    return author.render(path, old, found.file).decode("utf-8", "backslashreplace")
