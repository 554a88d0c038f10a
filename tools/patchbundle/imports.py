"""What an interpreter would import for a name: a package first, then an extension, a source, a compiled file.

Nothing is imported, and no interpreter is asked: which one it will be is not known here, so an extension for any of
them counts. A folder that may not be listed holds nothing for an interpreter either.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

_ENDING = re.compile(r"\.pyc?|(?:\.[A-Za-z0-9_-]+)?\.so")
_SOURCE = ".py"


def found(place: Path, package: str) -> Path | None:
    """What an import of ``package`` takes from an entry of its path, a folder or an archive; None if it has none."""
    if place.is_dir():
        names = _listing(place)
        inside = _package(place, package, names)
        return place / inside if inside else next((place / name for name in _of(package, names)), None)
    import zipimport

    try:
        spec = zipimport.zipimporter(str(place)).find_spec(package)
    except (zipimport.ZipImportError, OSError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def instead(root: Path, modules: Iterable[str]) -> tuple[str, str] | None:
    """The first of ``modules``, sources below ``root``, that another file is imported for; and that file's path."""
    listings: dict[str, list[str]] = {}
    for module in sorted(modules):
        folder, _, name = module.rpartition("/")
        if not name.endswith(_SOURCE):
            continue
        stem = name.removesuffix(_SOURCE)
        if folder not in listings:
            listings[folder] = _listing(root / folder)
        names = listings[folder]
        others = [item for item in _of(stem, names) if item.endswith(".so")]
        other = _package(root / folder, stem, names) or next(iter(others), None)
        if other is not None:
            return module, f"{folder}/{other}".lstrip("/")
    return None


def _package(folder: Path, name: str, names: Collection[str]) -> str | None:
    """A package's first file. A folder without one is none: it gives way to whatever has one."""
    if name not in names:
        return None
    return next((f"{name}/{item}" for item in _of("__init__", _listing(folder / name))), None)


def _of(stem: str, names: Iterable[str]) -> list[str]:
    ends = {name: name[len(stem) :] for name in names if name.startswith(stem)}
    order = (".so", _SOURCE, ".pyc")
    fitting = [name for name, end in ends.items() if _ENDING.fullmatch(end)]
    return sorted(fitting, key=lambda name: next(at for at, end in enumerate(order) if name.endswith(end)))


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
