"""The author's loop: write a patch back from an edited tree, and tell how a series fares on another release."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from patchbundle import disk, names, parse
from patchbundle import plan as plan_module
from patchbundle.bases import Base
from patchbundle.diff import FileDiff, Hunk, split_lines
from patchbundle.errors import BundleError, Reason, command
from patchbundle.identity import File, identity_of
from patchbundle.manifest import Bundle, Patch
from patchbundle.tree import Tree

_MARKER = b"\\ No newline at end of file\n"
_CONTEXT = 3


@dataclass(frozen=True)
class Refreshed:
    """What ``refresh`` wrote, by bundle path, and new files of ours that the series does not name yet."""

    written: Mapping[str, bytes]
    unnamed: tuple[str, ...]


def render(path: str, old: File | None, new: File | None) -> bytes:
    """The diff of one file in git's form, with three lines of context; empty if nothing changed."""
    if identity_of(old) == identity_of(new):
        return b""
    head = [f"diff --git a/{path} b/{path}\n"]
    if old is None or new is None:
        present = new or old
        assert present is not None
        head.append(f"{'new' if old is None else 'deleted'} file mode {present.mode}\n")
    elif old.mode != new.mode:
        head += [f"old mode {old.mode}\n", f"new mode {new.mode}\n"]
    before, after = (split_lines(file.data) if file is not None else [] for file in (old, new))
    body: list[bytes] = []
    if before != after:
        source = b"/dev/null" if old is None else f"a/{path}".encode()
        target = b"/dev/null" if new is None else f"b/{path}".encode()
        lines = difflib.diff_bytes(difflib.unified_diff, before, after, source, target, n=_CONTEXT, lineterm=b"\n")
        for line in lines:
            if line.startswith(b"@@ -"):
                line = line[:-1] + _heading(before, int(line[4:].split(b" ")[0].split(b",")[0])) + b"\n"
            body += [line] if line.endswith(b"\n") else [line, b"\n", _MARKER]
    return "".join(head).encode() + b"".join(body)


def _heading(lines: Sequence[bytes], start: int) -> bytes:
    """What stands behind the second ``@@``: the nearest line above that begins at the margin, as git shows it."""
    for line in reversed(lines[: max(start - 1, 0)]):
        if line[:1].isalpha() or line[:1] in (b"_", b"$"):
            return b" " + line.strip()[:80]
    return b""


def refresh(bundle: Bundle, patch_id: str, root: Path) -> Refreshed:
    """Compute the patch that turns the tree before ``patch_id`` into the edited tree at ``root``.

    ``bundle`` may be unlocked: the author is in the middle of an edit. Edited files of ours go back to sources/.

    Raises:
        BundleError: if the tree holds a later patch too, or something that no patch can hold.
    """
    patch = _find(bundle, patch_id)
    base = next(item for item in bundle.bases.values() if item.role == patch.role)
    members = _members(base)
    series = bundle.series(patch.role)
    earlier = series[: series.index(patch)]
    before = plan_module.levels(replace(bundle, patches=earlier), base, members)[-1]
    ours = {base.install_path(source) or "": source for item in series for source in item.sources}
    later = {source for item in series[len(earlier) + 1 :] for source in item.sources}
    with Tree(root) as tree:
        edited = _edited(tree, base, before, {file.path for file in patch.files})
    for path in edited:
        if ours.get(path) in later:
            raise BundleError(
                Reason.NOT_EXPECTED,
                f"{root}/{path}",
                expected=f"a tree at {patch_id}",
                found="a file of a later patch",
                next_step=f"run: {command('revert', '--to', patch_id, '--root', root)}, then edit",
            )
    written: dict[str, bytes] = {}
    unnamed: list[str] = []
    text = b""
    for path, file in sorted(edited.items()):
        if path == base.receipt:
            continue
        area = _area(base, path)
        if area is None:
            text += render(path, before.get(path), file)
        elif file is not None:
            source = ours.get(path, f"{area}/{path.rpartition('/')[2]}")
            if bundle.artifacts.get(f"sources/{source}") != file.data:
                written[f"sources/{source}"] = file.data
            if path not in ours:
                unnamed.append(source)
    written |= _patch_text(bundle, base, patch, text, before, edited)
    return Refreshed(written, tuple(unnamed))


def write(root: Path, refreshed: Refreshed) -> None:
    for path, data in refreshed.written.items():
        disk.write_file(root / path, data)


def _find(bundle: Bundle, patch_id: str) -> Patch:
    for patch in bundle.patches:
        if patch.id == patch_id:
            return patch
    known = ", ".join(patch.id for patch in bundle.patches)
    raise BundleError(Reason.UNKNOWN_LEVEL, patch_id, expected=f"one of {known}")


def _members(base: Base) -> dict[str, File]:
    from patchbundle import fetch

    return dict(fetch.members(fetch.fetch(base, fetch.default_archive(base))))


def _edited(tree: Tree, base: Base, before: Mapping[str, File | None], own: Set[str]) -> dict[str, File | None]:
    """Every path at which the tree differs from ``before``.

    A mode alone counts only for the patch's ``own`` paths: many ways to unpack a wheel lose the executable bit.
    """
    top = "" if base.is_crate else base.marker.partition("/")[0]
    result: dict[str, File | None] = {}
    seen = set()
    for path, found in tree.walk(top, frozenset({"__pycache__", "target", ".git"})):
        if found.identity.kind == "folder":
            continue
        seen.add(path)
        if found.file is None:
            raise BundleError(
                Reason.SPECIAL_MODE, f"{tree.root}/{path}", expected="a plain file", found=found.identity.kind
            )
        old = identity_of(before.get(path))
        if old != found.identity and (old.sha256 != found.identity.sha256 or path in own):
            result[names.check(path, str(tree.root))] = found.file
    for path, file in before.items():
        if file is not None and path not in seen and (not top or path.startswith(f"{top}/")):
            result[path] = None
    return result


def _area(base: Base, path: str) -> str | None:
    """The area of sources/ that a path in a folder of ours belongs to; the role's own area where folders coincide."""
    folder = path.rpartition("/")[0]
    areas = [area for area, place in base.install.items() if place == folder]
    return base.role if base.role in areas else areas[0] if areas else None


def _patch_text(
    bundle: Bundle,
    base: Base,
    patch: Patch,
    text: bytes,
    before: Mapping[str, File | None],
    edited: Mapping[str, File | None],
) -> dict[str, bytes]:
    """The patch file with its header kept, proven to give the edited bytes; nothing if it is as it was."""
    where = f"patches/{patch.file}"
    raw = bundle.artifacts[where]
    parsed = parse.parse(raw, where)
    outside = {path for path in edited if _area(base, path) is None and path != base.receipt}
    if outside == {file.path for file in parsed.files} and all(
        _gives(file, before, edited, where) for file in parsed.files
    ):
        return {}
    new = "".join(f"{line}\n" for line in parsed.message).encode("latin-1") + text
    for file in parse.parse(new, where).files:
        if not _gives(file, before, edited, where):
            raise BundleError(Reason.CONTEXT_DIFFERS, f"{where}: {file.path}", expected="the edited bytes")
    return {where: new}


def _gives(file: FileDiff, before: Mapping[str, File | None], edited: Mapping[str, File | None], where: str) -> bool:
    """Whether a diff leads to the edited file exactly."""
    try:
        made = file.apply(before.get(file.path), where)
    except BundleError:
        return False
    return identity_of(made) == identity_of(edited.get(file.path))


@dataclass(frozen=True)
class Fate:
    """How one hunk (or source) of a patch fares on another release.

    ``word`` is one of: fits, moved, conflict, upstream (what it adds is there already), gone (the file is not
    there), taken (a file stands where a source would land).
    """

    patch: str
    path: str
    line: int
    word: str
    detail: str = ""


def rebase_report(bundle: Bundle, role: str, other: Mapping[str, File]) -> list[Fate]:
    """Look for every hunk of a role's series in the files of another release.

    A patch that fits is carried on to the next one; where it does not, the next one is looked up in the
    file as the release has it, and says so by conflicting.
    """
    fates: list[Fate] = []
    tree: dict[str, File | None] = dict(other)
    base = next(item for item in bundle.bases.values() if item.role == role)
    for patch in bundle.series(role):
        for source in patch.sources:
            path = base.install_path(source) or source
            fates.append(Fate(patch.id, path, 0, "taken" if tree.get(path) is not None else "fits"))
        for file in patch.files:
            fates += _fates(patch, file, tree)
    return fates


def _fates(patch: Patch, file: FileDiff, tree: dict[str, File | None]) -> list[Fate]:
    old = tree.get(file.path)
    if file.creates:
        word = "fits" if old is None else "taken"
        tree[file.path] = old or file.apply(None, patch.file)
        return [Fate(patch.id, file.path, file.line_no, word)]
    if old is None:
        return [Fate(patch.id, file.path, file.line_no, "gone")]
    lines = split_lines(old.data)
    fates = [_fate(patch, file, hunk, lines) for hunk in file.hunks]
    if all(fate.word in {"fits", "moved"} for fate in fates):
        tree[file.path] = File(_carried(lines, file, fates), old.mode)
    return fates


def _fate(patch: Patch, file: FileDiff, hunk: Hunk, lines: list[bytes]) -> Fate:
    def fate(word: str, detail: str = "") -> Fate:
        return Fate(patch.id, file.path, hunk.line_no, word, detail)

    old, new = hunk.side("-"), hunk.side("+")
    places = _places(lines, old)
    if hunk.old_index in places:
        return fate("fits")
    if len(places) == 1:
        return fate("moved", f"{places[0] - hunk.old_index:+d} lines")
    if places:
        return fate("conflict", f"{len(places)} places look alike")
    added = [text for tag, text in hunk.lines if tag == "+"]
    if _places(lines, new) or (added and _places(lines, added)):
        return fate("upstream")
    missing = next((text for text in old if text not in lines), b"")
    return fate(
        "conflict", f"not there: {missing.decode('utf-8', 'replace').strip()[:80]}" if missing else "lines moved apart"
    )


def _places(lines: list[bytes], block: list[bytes]) -> list[int]:
    if not block:
        return []
    return [
        at
        for at in range(len(lines) - len(block) + 1)
        if lines[at] == block[0] and lines[at : at + len(block)] == block
    ]


def _carried(lines: list[bytes], file: FileDiff, fates: list[Fate]) -> bytes:
    result = list(lines)
    for hunk, fate in reversed(list(zip(file.hunks, fates, strict=True))):
        start = hunk.old_index if fate.word == "fits" else _places(lines, hunk.side("-"))[0]
        result[start : start + hunk.old_count] = hunk.side("+")
    return b"".join(result)
