"""The pinned bases: which releases the series stand on. Read from ``config/bases.toml``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchbundle import names
from patchbundle.errors import BundleError, Reason

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the node's Python decides
    import tomli as tomllib

ROLES = ("prefill", "decode", "router")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Archive:
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


@dataclass(frozen=True)
class Base:
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

    @property
    def home(self) -> str:
        """The folder inside the tree that holds everything of ours, the receipt included."""
        return min(self.install.values(), key=len)

    @property
    def receipt(self) -> str:
        return f"{self.home}/receipt.json"

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
        BundleError: MANIFEST, naming the table and the key.
    """
    table = read_toml(path)
    check_keys(table, {"schema", "bases"}, str(path))
    check_schema(table, str(path))
    bases: dict[str, Base] = {}
    for base_id, entry in table["bases"].items():
        where = f"{path}: bases.{base_id}"
        check_keys(
            entry,
            {"role", "distribution", "version", "marker", "install", "archives"},
            where,
            optional={"torch", "members", "origin"},
        )
        if entry["role"] not in ROLES:
            raise refuse(where, f"role: one of {', '.join(ROLES)}", repr(entry["role"]))
        for folder in entry["install"].values():
            names.check(folder, where)
        archives = []
        for filename, digests in entry["archives"].items():
            check_keys(digests, {"sha256"}, f"{where}.archives", optional={"record", "entries"})
            if not all(_SHA256.fullmatch(digest) for digest in digests.values()):
                raise refuse(f"{where}.archives.{filename}", "SHA-256 digests", repr(digests))
            archives.append(Archive(filename, **digests))
        bases[base_id] = Base(
            id=base_id,
            role=entry["role"],
            distribution=entry["distribution"],
            version=entry["version"],
            marker=entry["marker"],
            install=dict(entry["install"]),
            archives=tuple(archives),
            torch=entry.get("torch", ""),
            members=entry.get("members", ""),
        )
    return bases


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        BundleError: MANIFEST, if it is missing or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BundleError(Reason.MANIFEST, str(path), expected="the file", found="nothing") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BundleError(Reason.MANIFEST, str(path), expected="TOML", found=str(error)) from None


def check_keys(table: object, required: Set[str], where: str, *, optional: Set[str] = frozenset()) -> None:
    """Refuse a table with a key too few or too many."""
    if not isinstance(table, dict):
        raise refuse(where, "a table", repr(table))
    missing, unknown = required - set(table), set(table) - required - optional
    if missing or unknown:
        parts = [f"missing {key}" for key in sorted(missing)] + [f"unknown {key}" for key in sorted(unknown)]
        raise refuse(where, f"the keys {', '.join(sorted(required | optional))}", "; ".join(parts))


def check_schema(table: Mapping[str, Any], where: str) -> None:
    if table.get("schema") != 1:
        raise refuse(where, "schema = 1", f"schema = {table.get('schema')!r}")


def refuse(where: str, expected: str, found: str) -> BundleError:
    return BundleError(Reason.MANIFEST, where, expected=expected, found=found)
