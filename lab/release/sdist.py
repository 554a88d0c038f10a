"""The archive of the sources: every file that is published, and the metadata that an installer asks for."""

from __future__ import annotations

from pathlib import Path

from lab.release import archives
from patchbundle import __version__, scan
from patchbundle.bases import parse_toml
from patchbundle.identity import EXECUTABLE, PLAIN, File


def build(root: Path) -> bytes:
    """The bytes of ``patchbundle-VERSION.tar.gz``. The files are those that git has, or would take.

    Raises:
        BundleError: SCAN, if one of them must not be published.
    """
    scan.check(root)
    files = {path.relative_to(root).as_posix(): _file(path) for path in scan.files(root)}
    files["PKG-INFO"] = File(metadata(root))
    return archives.tarred(files, top=f"patchbundle-{__version__}")


def _file(path: Path) -> File:
    # Only the owner's bit: the others come from the umask of whoever checked it out.
    return File(path.read_bytes(), EXECUTABLE if path.stat().st_mode & 0o100 else PLAIN)


def metadata(root: Path) -> bytes:
    """Core metadata 2.4, from ``pyproject.toml``."""
    project = parse_toml((root / "pyproject.toml").read_bytes(), "pyproject.toml")["project"]
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {__version__}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        *(f"License-File: {name}" for name in project["license-files"]),
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {requirement}" for requirement in project["dependencies"]),
        "Description-Content-Type: text/markdown",
    ]
    return ("\n".join(lines) + "\n\n").encode() + (root / str(project["readme"])).read_bytes()
