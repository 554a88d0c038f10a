"""The pinned bases: which releases the series stand on. Read from ``config/bases.toml``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from patchbundle import names, store
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import Identity

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the node's Python decides
    import tomli as tomllib

OVERLAYS = "config/overlays"
ROLES = ("prefill", "decode", "router")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]*")
_AREA = re.compile(r"[a-z]+")
_WHEEL = re.compile(r"[A-Za-z0-9._]+-[A-Za-z0-9.+_!]+-[a-z]{2}[0-9]+-[A-Za-z0-9_.]+-[A-Za-z0-9_.]+\.whl")
_SOURCE = re.compile(r"[A-Za-z0-9._-]+\.tar\.gz")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Archive(NamedTuple):
    """A published archive of a base.

    ``record`` is the SHA-256 of the wheel's RECORD file, ``entries`` the digest of its entries in canonical
    order (see :func:`patchbundle.record.entries_digest`); both are empty for a source archive.
    """

    filename: str
    sha256: str
    record: str = ""
    entries: str = ""

    @property
    def is_wheel(self) -> bool:
        return self.filename.endswith(".whl")


class Overlay(NamedTuple):
    """A file of the release that an operator's image holds otherwise.

    ``found`` is what the image has, ``release`` what the release has, ``recorded`` what the image's RECORD says of it.
    """

    found: Identity
    release: Identity
    recorded: Identity


class Base(NamedTuple):
    """A pinned upstream release, or an operator's own image of one."""

    id: str
    role: str
    distribution: str
    version: str
    marker: str  # what tells the root of a tree: a path that is there
    install: Mapping[str, str]  # area under sources/ -> folder inside the tree
    archives: tuple[Archive, ...]
    torch: str = ""
    members: str = ""  # file under config/ that lists the members of a source archive
    build: tuple[Archive, ...] = ()  # source archives of others that a build of a source archive needs
    overlay: Mapping[str, Overlay] = MappingProxyType({})  # of an operator's image: what it holds otherwise

    @property
    def home(self) -> str:
        """The folder inside the tree that holds everything of ours, the receipt included."""
        return min(self.install.values(), key=len)

    @property
    def receipt(self) -> str:
        return f"{self.home}/receipt.json"

    @property
    def is_release(self) -> bool:
        """Whether it is a published release as it stands, and no operator's image."""
        return not self.overlay

    def overlay_file(self, path: str) -> str:
        """Where the bundle keeps the bytes of an overlay that a patch touches."""
        return f"{OVERLAYS}/{self.id}/{path}"

    @property
    def is_crate(self) -> bool:
        return self.distribution == "sglang-router"

    def archive(self, filename: str) -> Archive:
        """The archive of this name.

        Raises:
            BundleError: ARCHIVE, if the base has none of this name.
        """
        for archive in self.archives:
            if archive.filename == filename:
                return archive
        raise BundleError(
            Reason.ARCHIVE,
            filename,
            expected=f"one of {', '.join(archive.filename for archive in self.archives)}",
            next_step="see config/bases.toml",
        )

    def install_path(self, source: str) -> str | None:
        """Where ``source`` (relative to ``sources/``) lands in the tree; None if its area is not this base's."""
        area, _, name = source.partition("/")
        folder = self.install.get(area)
        return f"{folder}/{name}" if folder and name else None


def load(path: Path) -> dict[str, Base]:
    """Read and check the bases.

    Raises:
        BundleError: MANIFEST or NAME, naming the table and the key.
    """
    return parse(read_file(path), str(path))


def parse(raw: bytes, where: str) -> dict[str, Base]:
    """Check the bases in the bytes of ``config/bases.toml``.

    Raises:
        BundleError: MANIFEST or NAME, naming the table and the key.
    """
    table = parse_toml(raw, where)
    check_keys(table, {"schema", "bases"}, where)
    check_schema(table, where)
    entries = _tables(table["bases"], f"{where}: bases")
    found: dict[str, Base] = {}
    for base_id, entry in entries.items():
        check_id(base_id, f"{where}: bases")
        read = _image if isinstance(entry, dict) and "from" in entry else _base
        found[base_id] = read(base_id, entry, f"{where}: bases.{base_id}", found)
    return found


def check_id(base_id: str, where: str) -> None:
    """Refuse what is no name of a base."""
    if not _ID.fullmatch(base_id):
        raise refuse(where, "a name of letters, digits, '.', '-', '+' and '_'", repr(base_id))


def _image(base_id: str, entry: dict[str, Any], where: str, releases: Mapping[str, Base]) -> Base:
    """An operator's image: a release named before it, and what differs."""
    check_keys(entry, {"from", "overlay"}, where)
    release = releases.get(entry["from"]) if isinstance(entry["from"], str) else None
    if release is None or not release.is_release:
        raise refuse(where, "from: a release that stands before it", repr(entry["from"]))
    overlay = {}
    for path, table in _tables(entry["overlay"], f"{where}.overlay").items():
        place = f"{where}.overlay.{names.check(path, where)}"
        check_keys(table, {"found", "release", "recorded"}, place)
        try:
            overlay[path] = Overlay(**{key: Identity.parse(str(text)) for key, text in table.items()})
        except ValueError as error:
            raise refuse(place, "MODE SHA-256 SIZE, three times", str(error)) from None
        if not all(item.is_file for item in (overlay[path].found, overlay[path].release, overlay[path].recorded)):
            raise refuse(place, "three plain files", "absent")
        if path == release.receipt or path.startswith(f"{release.home}/"):
            raise refuse(place, "a file of the release", "a folder of ours")
    return release._replace(id=base_id, overlay=overlay)


def _base(base_id: str, entry: object, where: str, _: Mapping[str, Base]) -> Base:
    strings = {"role", "distribution", "version", "marker"}
    check_keys(entry, strings | {"install", "archives"}, where, optional={"torch", "members", "origin", "build"})
    assert isinstance(entry, dict)
    for key in ("torch", "members", "origin"):
        strings |= {key} & set(entry)
    for key in sorted(strings):
        if not isinstance(entry[key], str) or not entry[key] or not entry[key].isprintable():
            raise refuse(where, f"{key}: a text", repr(entry[key]))
    if entry["role"] not in ROLES:
        raise refuse(where, f"role: one of {', '.join(ROLES)}", repr(entry["role"]))
    names.check(entry["marker"], where)
    archives = _archives(entry["archives"], f"{where}.archives")
    build = _archives(entry["build"], f"{where}.build") if "build" in entry else []
    if len({archive.is_wheel for archive in archives}) != 1:
        raise refuse(f"{where}.archives", "wheels, or a source archive", "both")
    if build and any(archive.is_wheel for archive in (archives[0], *build)):
        raise refuse(f"{where}.build", "source archives, for a base that is one", "a wheel")
    # A wheel brings its own list of files, RECORD; for a source archive we keep one.
    if archives[0].is_wheel == ("members" in entry):
        raise refuse(where, "members for a source archive, and for nothing else", repr(entry.get("members", "none")))
    if "members" in entry and "/" in names.check(entry["members"], where):
        raise refuse(where, "members: a file of config/ itself", repr(entry["members"]))
    base = Base(
        id=base_id,
        role=entry["role"],
        distribution=entry["distribution"],
        version=entry["version"],
        marker=entry["marker"],
        install=_install(entry["install"], f"{where}.install"),
        archives=tuple(archives),
        torch=entry.get("torch", ""),
        members=entry.get("members", ""),
        build=tuple(build),
    )
    for folder in base.install.values():
        if folder != base.home and not folder.startswith(f"{base.home}/"):
            raise refuse(f"{where}.install", f"one folder for everything of ours, {base.home}", folder)
    return base


def _install(table: object, where: str) -> dict[str, str]:
    install: dict[str, str] = {}
    for area, folder in _tables(table, where).items():
        if not _AREA.fullmatch(area) or not isinstance(folder, str):
            raise refuse(where, "area = folder", f"{area} = {folder!r}")
        install[area] = names.check(folder, where)
    # The dot stands for any file: it is the folders above it that must not be one on some file system.
    names.check_together((f"{folder}/." for folder in set(install.values())), where)
    return install


def _archives(table: object, where: str) -> list[Archive]:
    return [_archive(filename, digests, f"{where}.{filename}") for filename, digests in _tables(table, where).items()]


def _archive(filename: str, digests: object, where: str) -> Archive:
    if not _WHEEL.fullmatch(filename) and not _SOURCE.fullmatch(filename):
        raise refuse(where, "the file name of a wheel or of a .tar.gz", repr(filename))
    keys = {"sha256", "record", "entries"} if filename.endswith(".whl") else {"sha256"}
    check_keys(digests, keys, where)
    assert isinstance(digests, dict)
    if not all(isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in digests.values()):
        raise refuse(where, "SHA-256 digests", repr(digests))
    return Archive(filename, **digests)


def _tables(table: object, where: str) -> dict[str, Any]:
    if not isinstance(table, dict) or not table:
        raise refuse(where, "a table with an entry at least", repr(table))
    return table


def read_file(path: Path, reason: Reason = Reason.MANIFEST, what: str = "the file", next_step: str = "") -> bytes:
    """Read a file of the bundle, if it is a plain one of a plausible size.

    Raises:
        BundleError: MANIFEST, or another ``reason``, if it cannot be read.
    """
    try:
        return store.read(path)
    except (OSError, ValueError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise BundleError(reason, str(path), expected=what, found=found, next_step=next_step) from None


def parse_toml(raw: bytes, where: str) -> dict[str, Any]:
    """Read the bytes of a TOML file.

    Raises:
        BundleError: MANIFEST, if they are not TOML.
    """
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BundleError(Reason.MANIFEST, where, expected="TOML", found=str(error)) from None


def check_keys(table: object, required: Set[str], where: str, *, optional: Set[str] = frozenset()) -> None:
    """Refuse a table with a key too few or too many."""
    if not isinstance(table, dict):
        raise refuse(where, "a table", repr(table))
    missing, unknown = required - set(table), set(table) - required - optional
    if missing or unknown:
        parts = [f"missing {key}" for key in sorted(missing)] + [f"unknown {key}" for key in sorted(unknown)]
        raise refuse(where, f"the keys {', '.join(sorted(required | optional))}", "; ".join(parts))


def check_schema(table: Mapping[str, Any], where: str) -> None:
    # True and 1.0 are equal to 1.
    if type(table.get("schema")) is not int or table["schema"] != 1:
        raise refuse(where, "schema = 1", f"schema = {table.get('schema')!r}")


def refuse(where: str, expected: str, found: str) -> BundleError:
    return BundleError(Reason.MANIFEST, where, expected=expected, found=found)
