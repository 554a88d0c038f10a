"""The bundle: the series that people write, the lock that the machine writes, and the files that both name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from patchbundle import bases as bases_module
from patchbundle import lock as lock_module
from patchbundle import names, store
from patchbundle.bases import ROLES, Base, check_keys, check_schema, parse_toml, refuse
from patchbundle.errors import BundleError, Reason
from patchbundle.lock import Lock, Pins

if TYPE_CHECKING:
    from patchbundle.diff import FileDiff
    from patchbundle.header import Header

_ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_INSTALLED = re.compile(r"[^/]+\.dist-info/.*")
# Digits first: none begins with a dot.
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]*")
RELEASES = "patches/releases"
_BASES = "config/bases.toml"
_SERIES = "patches/series.toml"
LOCK = "patches/pins.lock"
SIGNATURE = f"{LOCK}.minisig"
_PIN = "tools/apply.py pin"


class Patch(NamedTuple):
    """One entry of the series, with its header and diff read."""

    id: str
    role: str
    file: str
    sources: tuple[str, ...]
    requires: tuple[str, ...]
    header: Header
    files: tuple[FileDiff, ...]


@dataclass(frozen=True)
class Bundle:
    """Everything that planning needs, in memory and checked. ``artifacts`` maps bundle paths to their bytes."""

    root: Path
    bases: Mapping[str, Base]
    patches: tuple[Patch, ...]
    artifacts: Mapping[str, bytes]
    lock: Lock
    release: str = ""  # the version under which it was filed; empty for the bundle at work
    strict: bool = True  # whether the series was read too: see load_compared

    @cached_property
    def filed(self) -> tuple[Bundle, ...]:
        """The released bundles under ``patches/releases/``, the newest first. Read when they are asked for.

        Raises:
            BundleError: for the first thing in one of them that is not exactly as it was released.
        """
        versions = sorted(_releases(self.artifacts or self.lock.artifacts), key=_natural, reverse=True)
        read: Callable[..., Bundle] = load if self.strict else load_compared
        if not self.artifacts:
            read = partial(load_pins, within=self.lock)
        return tuple(_load_filed(self.root / RELEASES / version, version, read) for version in versions)

    def released(self, version: str) -> Bundle:
        """One of them.

        Raises:
            BundleError: UNKNOWN_RELEASE.
        """
        for bundle in self.filed:
            if bundle.release == version:
                return bundle
        known = ", ".join(bundle.release for bundle in self.filed) or "none"
        raise BundleError(Reason.UNKNOWN_RELEASE, version, expected=f"one of those filed: {known}")

    def series(self, role: str) -> tuple[Patch, ...]:
        """The patches of a role, in order."""
        return tuple(patch for patch in self.patches if patch.role == role)

    def source(self, name: str) -> bytes:
        return self.artifacts[f"sources/{name}"]

    def pins(self, base: Base) -> Pins:
        """What the lock says of ``base``.

        Raises:
            BundleError: LOCK_STALE, if it says nothing.
        """
        pins = self.lock.bases.get(base.id)
        if pins is None:
            raise BundleError(
                Reason.LOCK_STALE, LOCK, expected=f"pins for {base.id}", found="none", next_step=f"run: {_PIN}"
            )
        return pins


def load_pins(root: Path, *, release: str = "", within: Lock | None = None) -> Bundle:
    """What a look at a tree needs of the bundle at ``root``: bases and lock. Without diffs nothing can be planned.

    ``within`` is the lock of the bundle that ``root`` is filed in.

    Raises:
        BundleError: for the first thing that is not exactly as it should be.
    """
    lock = _read_lock(root)
    _check_digest(within, f"{RELEASES}/{release}/{LOCK}", lock.digest)
    raw = bases_module.read_file(root / _BASES)
    _check_digest(lock, _BASES, hashlib.sha256(raw).hexdigest())
    return Bundle(root, bases_module.parse(raw, _BASES), (), {}, lock, release)


def _read_lock(root: Path) -> Lock:
    path = root / LOCK
    return lock_module.load(bases_module.read_file(path, Reason.LOCK, "the lock", f"run: {_PIN}"), str(path))


def _check_digest(lock: Lock | None, path: str, found: str) -> None:
    if lock is not None and lock.artifacts.get(path) != found:
        raise _not_as_locked(path, lock.artifacts.get(path), found)


def load(root: Path, *, release: str = "") -> Bundle:
    """Read the bundle at ``root``, filed as ``release`` if it is, and check every file of it against the lock.

    Raises:
        BundleError: for the first thing that is not exactly as it should be.
    """
    unlocked = load_unlocked(root)
    lock = _read_lock(root)
    _check_artifacts(unlocked, lock, release)
    bundle = Bundle(unlocked.root, unlocked.bases, unlocked.patches, unlocked.artifacts, lock, release)
    _check_levels(bundle)
    return bundle


def load_compared(root: Path, *, release: str = "") -> Bundle:
    """Compare every file of the bundle at ``root`` with the lock, and read bases and lock alone: it has no patches.

    For a look at a tree. ``pin`` wrote the lock after it had read these very bytes strictly.

    Raises:
        BundleError: for the first thing that is not exactly as it should be.
    """
    root = root.resolve()
    lock = _read_lock(root)
    raw = bases_module.read_file(root / _BASES)
    _check_digest(lock, _BASES, hashlib.sha256(raw).hexdigest())
    bases = bases_module.parse(raw, _BASES)
    bundle = Bundle(root, bases, (), {_BASES: raw, **_read_artifacts(root, bases)}, lock, release, strict=False)
    _check_artifacts(bundle, lock, release)
    return bundle


def _load_filed(root: Path, version: str, read: Callable[..., Bundle]) -> Bundle:
    try:
        return read(root, release=version)
    except BundleError as error:
        raise BundleError(
            error.reason,
            f"{RELEASES}/{version}: {error.where}",
            expected=error.expected,
            found=error.found,
            next_step="a filed release never changes: restore it as it was",
        ) from None


def load_unlocked(root: Path) -> Bundle:
    """Read the bundle as people wrote it, for ``pin``; its lock is empty."""
    root = root.resolve()
    # Every file is read once: what is parsed is what is hashed.
    raw = bases_module.read_file(root / _BASES)
    bases = bases_module.parse(raw, _BASES)
    artifacts = {_BASES: raw, **_read_artifacts(root, bases)}
    patches = _read_series(artifacts)
    _check_orphans(patches, artifacts, bases)
    _check_installs(patches, bases)
    return Bundle(root, bases, patches, artifacts, Lock({}, {}))


def digests(artifacts: Mapping[str, bytes]) -> dict[str, str]:
    """SHA-256 of every artifact."""
    return {path: hashlib.sha256(data).hexdigest() for path, data in sorted(artifacts.items())}


def _read_artifacts(root: Path, bases: Mapping[str, Base]) -> dict[str, bytes]:
    """The files under config/, patches/ and sources/ but the lock; of a filed release its lock, which pins it."""
    for base in bases.values():
        if base.members and not store.is_plain(root / "config" / base.members):
            raise refuse(_BASES, f"the file config/{base.members}", "nothing")
    paths = [path for top in ("config", "patches", "sources") for path in store.walk(root / top)]
    artifacts: dict[str, bytes] = {}
    for path in paths:
        relative = path.relative_to(root).as_posix()
        plain = store.is_plain(path)
        if not plain and (path.is_symlink() or not path.is_dir()):
            raise BundleError(Reason.ORPHAN, relative, expected="a plain file", found="a link or a special file")
        # The interpreter that tests our sources leaves its bytecode beside them.
        if plain and relative not in (LOCK, SIGNATURE) and "__pycache__" not in relative.split("/"):
            if relative.startswith(f"{RELEASES}/") and not _is_filed(relative):
                continue
            artifacts[relative] = bases_module.read_file(path)
    return artifacts


def _is_filed(path: str) -> bool:
    """Whether this is the lock of a filed release; False for another file of one.

    Raises:
        BundleError: ORPHAN, for a file that belongs to none.
    """
    parts = path.split("/")
    if len(parts) < 5 or not _VERSION.fullmatch(parts[2]) or parts[3] not in ("config", "patches", "sources"):
        raise BundleError(
            Reason.ORPHAN,
            path,
            expected=f"{RELEASES}/VERSION/ with config/, patches/ and sources/",
            next_step="delete it, or file the release again: tools/apply.py release",
        )
    return path == f"{RELEASES}/{parts[2]}/{LOCK}"


def _releases(artifacts: Iterable[str]) -> list[str]:
    return [path.split("/")[2] for path in artifacts if path.startswith(f"{RELEASES}/")]


def _natural(version: str) -> list[tuple[int, str]]:
    """An order in which 0.10 comes after 0.9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.+-]", version)]


def check_version(version: str) -> str:
    """A release's name, which is a folder's too.

    Raises:
        BundleError: MANIFEST.
    """
    if not _VERSION.fullmatch(version):
        raise refuse("the release", "a version: a digit, then letters, digits, '.', '+' and '-'", repr(version))
    return version


def is_metadata(path: str) -> bool:
    """Whether a path belongs to the metadata that an installer keeps of a distribution."""
    return _INSTALLED.fullmatch(path) is not None


def _read_series(artifacts: Mapping[str, bytes]) -> tuple[Patch, ...]:
    if _SERIES not in artifacts:
        raise refuse(_SERIES, "the file", "nothing")
    table = parse_toml(artifacts[_SERIES], _SERIES)
    check_keys(table, {"schema"}, _SERIES, optional={"patch"})
    check_schema(table, _SERIES)
    patches: list[Patch] = []
    entries = table.get("patch", [])
    if not isinstance(entries, list):
        raise refuse(_SERIES, "[[patch]] tables", repr(entries))
    for number, entry in enumerate(entries, 1):
        patches.append(_read_patch(entry, f"{_SERIES}: patch {number}", artifacts))
    _check_order(patches)
    return tuple(patches)


def _read_patch(entry: object, where: str, artifacts: Mapping[str, bytes]) -> Patch:
    # A look at a tree reads no diff: it must not pay for the parser.
    from patchbundle import header, parse

    check_keys(entry, {"id", "role", "file", "sources", "requires"}, where)
    assert isinstance(entry, dict)
    patch_id, role, file = entry["id"], entry["role"], entry["file"]
    if not isinstance(patch_id, str) or not _ID.fullmatch(patch_id) or patch_id == "base":
        raise refuse(where, "id: words of lower-case letters and digits joined by '-', not 'base'", repr(patch_id))
    where = f"{_SERIES}: {patch_id}"
    if role not in ROLES:
        raise refuse(where, f"role: one of {', '.join(ROLES)}", repr(role))
    folders = (f"{role}/", f"recovery/{role}/")
    if not isinstance(file, str) or not file.startswith(folders) or not file.endswith(".patch"):
        raise refuse(where, f"file: a .patch under {' or '.join(folders)}", repr(file))
    for key in ("sources", "requires"):
        if not isinstance(entry[key], list) or not all(isinstance(item, str) for item in entry[key]):
            raise refuse(where, f"{key}: a list of names", repr(entry[key]))
        if len(set(entry[key])) != len(entry[key]):
            raise refuse(where, f"{key}: each name once", repr(entry[key]))
    data = artifacts.get(f"patches/{file}")
    if data is None:
        raise refuse(where, f"the file patches/{file}", "nothing")
    for source in entry["sources"]:
        if f"sources/{source}" not in artifacts:
            raise refuse(where, f"the file sources/{source}", "nothing")
    parsed = parse.parse(data, f"patches/{file}")
    return Patch(
        id=patch_id,
        role=role,
        file=file,
        sources=tuple(entry["sources"]),
        requires=tuple(entry["requires"]),
        header=header.Header.parse(parsed.message, f"patches/{file}"),
        files=parsed.files,
    )


def _check_order(patches: list[Patch]) -> None:
    by_id: dict[str, Patch] = {}
    files: dict[str, str] = {}
    for patch in patches:
        if patch.id in by_id:
            raise refuse(f"{_SERIES}: {patch.id}", "an id once", "a second one")
        if patch.file in files:
            raise refuse(f"{_SERIES}: {patch.id}", "a file once", f"{patch.file}, also of {files[patch.file]}")
        by_id[patch.id] = patch
        files[patch.file] = patch.id
    for patch in patches:
        for required in patch.requires:
            if required not in by_id or by_id[required].role != patch.role:
                raise refuse(f"{_SERIES}: {patch.id}", "requires: ids of the same role", required)
    _check_cycles(by_id)
    place = {patch.id: index for index, patch in enumerate(patches)}
    for patch in patches:
        for required in patch.requires:
            if place[required] > place[patch.id]:
                raise refuse(f"{_SERIES}: {patch.id}", f"{required} before it, which it requires", "it stands after")


def _check_cycles(by_id: Mapping[str, Patch]) -> None:
    done: set[str] = set()

    def walk(patch_id: str, trail: tuple[str, ...]) -> None:
        if patch_id in trail:
            circle = (*trail[trail.index(patch_id) :], patch_id)
            raise BundleError(Reason.CYCLE, _SERIES, found=" -> ".join(circle))
        if patch_id not in done:
            for required in by_id[patch_id].requires:
                walk(required, (*trail, patch_id))
            done.add(patch_id)

    for patch_id in by_id:
        walk(patch_id, ())


def _check_orphans(patches: Iterable[Patch], artifacts: Mapping[str, bytes], bases: Mapping[str, Base]) -> None:
    named = {_SERIES, *(path for path in artifacts if path.startswith(("config/", f"{RELEASES}/")))}
    owner: dict[tuple[str, str], str] = {}
    for patch in patches:
        named.add(f"patches/{patch.file}")
        named |= {f"sources/{source}" for source in patch.sources}
        role_bases = [base for base in bases.values() if base.role == patch.role]
        if not role_bases:
            raise refuse(f"{_SERIES}: {patch.id}", f"a base of role {patch.role} in config/bases.toml", "none")
        for source in patch.sources:
            other = owner.setdefault((patch.role, source), patch.id)
            if other != patch.id:
                raise refuse(f"{_SERIES}: {patch.id}", f"{source} once a role", f"it is also of {other}")
            for base in role_bases:
                path = base.install_path(source)
                if path is None:
                    raise refuse(f"{_SERIES}: {patch.id}", f"a source of {', '.join(base.install)}", source)
    overlays = {base.overlay_file(path) for base in bases.values() for path in base.overlay}
    for path in artifacts:
        if path not in named or (path.startswith(f"{bases_module.OVERLAYS}/") and path not in overlays):
            raise BundleError(
                Reason.ORPHAN, path, next_step=f"name it in {_SERIES}, or delete it", found="a file of no patch"
            )


def _check_installs(patches: Iterable[Patch], bases: Mapping[str, Base]) -> None:
    """Every source has a place of its own, and no patch reaches for what the tool itself keeps in the tree."""
    for base in bases.values():
        owner: dict[str, str] = {}
        for patch in patches:
            if patch.role != base.role:
                continue
            where = f"{_SERIES}: {patch.id}"
            for source in patch.sources:
                path = names.check(base.install_path(source) or "", where)
                other = owner.setdefault(path, source)
                if other != source:
                    raise refuse(where, f"one source at {path} of {base.id}", f"{other} and {source}")
            for path in (*owner, *(file.path for file in patch.files)):
                if path == base.receipt:
                    raise refuse(where, "no change of the receipt, which the tool writes", path)
                if is_metadata(path):
                    raise refuse(where, "no change of the distribution's metadata, which RECORD is part of", path)


def _check_artifacts(bundle: Bundle, lock: Lock, release: str) -> None:
    found = digests(bundle.artifacts)
    # A release is filed without those before it.
    wanted = {path: digest for path, digest in lock.artifacts.items() if not (release and path.startswith(RELEASES))}
    for path in sorted({*found, *wanted}):
        if found.get(path) != wanted.get(path):
            raise _not_as_locked(path, wanted.get(path), found.get(path))


def _not_as_locked(path: str, expected: str | None, found: str | None) -> BundleError:
    return BundleError(
        Reason.ARTIFACT,
        path,
        expected=expected or "not in the lock",
        found=found or "missing",
        next_step=f"undo the edit; if it was meant, run: {_PIN}",
    )


def _check_levels(bundle: Bundle) -> None:
    for base in bundle.bases.values():
        levels = tuple(patch.id for patch in bundle.series(base.role))
        pins = bundle.pins(base)
        if (pins.role, pins.levels) != (base.role, levels):
            raise BundleError(
                Reason.LOCK_STALE,
                f"{LOCK}: {base.id}",
                expected=", ".join(levels) or "no patch",
                found=", ".join(pins.levels) or "no patch",
                next_step=f"run: {_PIN}",
            )
    for base_id in bundle.lock.bases:
        if base_id not in bundle.bases:
            raise BundleError(Reason.LOCK_STALE, f"{LOCK}: {base_id}", expected="a base of config/bases.toml")
