"""Which files of an image are of concern: those that the tools look at where a distribution is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from patchbundle import names
from patchbundle.bases import Base
from patchbundle.manifest import Bundle

_RECORD = 1 << 25
_METADATA = 1 << 20
_HEAD = 16  # bytes of a compiled file that say what it was made from


@dataclass(frozen=True)
class Keep:
    """How much of a file is kept: all of one that has up to ``limit`` bytes; its ``head`` only, of a larger one too."""

    limit: int
    head: bool = False


class Interest:
    """Of paths of the whole image: the distribution may be anywhere. Of paths below its root: ``rel``."""

    def __init__(self, bundle: Bundle, role: str) -> None:
        self.markers = set[str]()
        self._folders = set[str]()
        self._files: dict[str, int] = {}
        distributions = set[str]()
        for known in (bundle, *bundle.filed):
            for base in (base for base in known.bases.values() if base.role == role):
                self._add(known, base)
                distributions.add(re.sub(r"[-_.]+", "_", base.distribution))
        self._dist_info = re.compile(rf"(?:{'|'.join(sorted(distributions))})-[^/]+\.dist-info")
        self._modules: dict[str, list[str]] = {}  # last part -> modules, without their ending
        for path in self._files:
            if path.endswith(".py"):
                self._modules.setdefault(path[:-3].rpartition("/")[2], []).append(path[:-3])
        self._by_name: dict[str, list[str]] = {}
        for path in self._files:
            self._by_name.setdefault(path.rpartition("/")[2], []).append(path)
        self._above = {parent for path in (*self._files, *self._folders) for parent in names.parents(path)}
        self._above |= {f"{path.rpartition('/')[0]}/__pycache__" for path in self._files} | self._folders

    def _add(self, bundle: Bundle, base: Base) -> None:
        self.markers.add(base.marker)
        pins = bundle.pins(base)
        self._folders |= {base.home, *pins.folders}
        for path, chain in pins.paths.items():
            self._files[path] = max([self._files.get(path, 0), *(identity.size for identity in chain)])
        more = ("PKG-INFO", "Cargo.toml") if base.is_crate else (f"{base.marker.partition('/')[0]}/_version.py",)
        self._files |= {path: max(self._files.get(path, 0), _METADATA) for path in (base.receipt, *more)}
        self._files.setdefault(base.marker, 0)

    def keep(self, path: str) -> Keep | None:
        """Whether a file at a path of the image is of concern, and how much of it."""
        folder, _, name = path.rpartition("/")
        for rel in self._by_name.get(name, ()):
            if _ends(path, rel):
                return Keep(self._files[rel])
        if name.startswith(names.RESERVED):
            return Keep(_METADATA)
        if name in ("METADATA", "RECORD") and self._dist_info.fullmatch(folder.rpartition("/")[2]):
            return Keep(_RECORD)
        if name.endswith(".pyc") and self._is_compiled(folder, name):
            return Keep(_HEAD, head=True)
        return Keep(0) if any(f"/{ours}/" in f"/{path}" for ours in self._folders) else None

    def _is_compiled(self, folder: str, name: str) -> bool:
        """Bytecode of a module that the tools look at, beside it or below a prefix."""
        parts = name.split(".")
        above = folder.removesuffix("/__pycache__")
        # A module's own name may have dots too.
        stems = (".".join(parts[:count]) for count in range(1, len(parts)))
        return any(_ends(f"{above}/{stem}", module) for stem in stems for module in self._modules.get(stem, ()))

    def is_laid_out(self, rel: str, kind: str) -> bool:
        """Whether a folder or a link below the distribution's root is laid out for the tools to see."""
        if "/" not in rel and rel.endswith(".dist-info"):
            return True
        if kind == "folder":
            return rel in self.markers or any(_is_at_or_below(rel, ours) for ours in self._folders)
        return rel in self._files or rel in self._above or self.keep(rel) is not None

    def roots(self, folders: Iterable[str]) -> list[str]:
        """The roots of distributions, by the folders that the image has."""
        found = {
            path.removesuffix(marker).rstrip("/") for path in folders for marker in self.markers if _ends(path, marker)
        }
        return sorted(found)


def _ends(path: str, rel: str) -> bool:
    return path == rel or path.endswith(f"/{rel}")


def _is_at_or_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
