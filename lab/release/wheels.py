"""The node's packages as wheels: pinned by hash in ``requirements/node.txt``, fetched into the cache, never run."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from patchbundle import fetch
from patchbundle.identity import File

# Under this name one file carries them: what an installer would write beside a package is left out.
_INSTALLERS = re.compile(r"[^/]+\.dist-info/(?:RECORD|WHEEL|top_level\.txt|entry_points\.txt)")


class WheelError(Exception):
    """A package is not to be had as it is pinned; the text says which, and what pip said."""


def pinned(requirements: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> version and SHA-256 digests of every pinned package but pip, whatever its marker says."""
    text = requirements.read_text(encoding="utf-8").replace("\\\n", " ")
    result = {}
    for line in text.splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line)
        if match and match[1] != "pip":
            result[match[1]] = (match[2], frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", line)))
    return result


def fetched(requirements: Path) -> list[Path]:
    """The pure wheel of each pinned package, from the cache or from the package index.

    Raises:
        WheelError: one is not there as pinned, or is not pure Python.
    """
    return [_fetched(name, *pins) for name, pins in sorted(pinned(requirements).items())]


def _fetched(name: str, version: str, digests: frozenset[str]) -> Path:
    top = fetch.cache_folder() / "wheels"
    pattern = f"{re.sub(r'[-_.]+', '_', name)}-{version}-py3-none-any.whl"
    for place in sorted(top.glob(f"*/{pattern}")):
        if place.parent.name in digests and fetch.digest(place) == place.parent.name:
            return place
    top.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetching-", dir=top) as temporary:
        pins = Path(temporary) / "pins.txt"
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in sorted(digests))
        pins.write_text(f"{name}=={version} {hashes}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "--requirement", str(pins), "--dest", temporary]
        command += ["--only-binary=:all:", "--platform", "any", "--implementation", "py", "--abi", "none"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        came = Path(temporary) / pattern
        if not came.exists():
            raise WheelError(f"{pattern}: {(said.strip() or 'another file came').splitlines()[-1]}")
        folder = top / fetch.digest(came)
        folder.mkdir(exist_ok=True)
        return came.replace(folder / pattern)


def members(wheel: Path) -> dict[str, File]:
    """What one file carries of a wheel: its modules, its metadata and its licence.

    Raises:
        WheelError: it brings no licence.
    """
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("/") and not _INSTALLERS.fullmatch(name):
                files[name] = File(archive.read(name))
    if not any(re.search(r"\.dist-info/(?:licen[sc]es/|LICEN[SC]E|COPYING)", name) for name in files):
        raise WheelError(f"{wheel.name}: no licence in it")
    return files
