"""One file for a node: the tools, the bundle, and the packages that they need. Any Python from 3.10 on runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from lab.release import archives, wheels
from patchbundle import manifest
from patchbundle.errors import BundleError, Reason
from patchbundle.identity import File

_SHEBANG = b"#!/usr/bin/env python3\n"
# What an interpreter sees next if it finds no archive in the file, and takes it for a program. It runs nothing that it
# cannot read to the end, but shows the line that it stumbles over; over one that begins with a space, at once.
_REFUSAL = BundleError(Reason.DAMAGED, "")
_SENTENCE = f" error: {_REFUSAL.reason.value} [{_REFUSAL.code}]: {_REFUSAL.next_step}\n"
_DIGITS = 64
_MAIN = "__main__.py"
_START = Path(__file__).with_name("start.py")
_BUNDLE = "patchbundle/_bundle"
LICENCES = ("LICENSE", "NOTICE")


def build(root: Path, bundle: Path, packages: Iterable[Path]) -> bytes:
    """The bytes of the one file: the tools of the checkout ``root``, the bundle at ``bundle``, these wheels.

    Raises:
        BundleError: the bundle is not whole.
        ValueError: two of its parts have a file of one name.
    """
    parts = [tools(root), bundled(bundle), *(wheels.members(wheel) for wheel in packages)]
    files: dict[str, File] = {_MAIN: File(_START.read_bytes())}
    for part in parts:
        if twice := set(part) & set(files):
            raise ValueError(f"two parts have {min(twice)}")
        files.update(part)
    content = archives.zipped(files, first=_MAIN, prefix=_SHEBANG + _SENTENCE.encode(), comment=b"0" * _DIGITS)[
        :-_DIGITS
    ]
    return content + hashlib.sha256(content).hexdigest().encode("ascii")


def tools(root: Path) -> dict[str, File]:
    """The library, and the licence of it all."""
    package = root / "tools" / "patchbundle"
    files = {f"patchbundle/{path.relative_to(package).as_posix()}": path for path in package.rglob("*.py")}
    files |= {name: root / name for name in LICENCES}
    return {name: File(path.read_bytes()) for name, path in files.items()}


def bundled(root: Path) -> Mapping[str, File]:
    """What the lock names, the lock, and the settings that ``env`` reads; filed releases are part of it."""
    manifest.load(root)
    paths = [path for top in ("config", "patches", "sources") for path in sorted((root / top).rglob("*"))]
    return {
        f"{_BUNDLE}/{path.relative_to(root).as_posix()}": File(path.read_bytes())
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }
