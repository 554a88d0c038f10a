"""A build backend that builds nothing: lets pip fetch a source archive by hash without running the archive's code.

pip asks the backend named in ``pyproject.toml`` for the metadata of a source archive. The real one would run
``cargo metadata`` and fetch a git repository. This one hands back the PKG-INFO that the archive already holds.
It shadows the real backend in the one process that has this folder on its path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Name no requirement: nothing is built."""
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """Write the archive's own metadata to ``metadata_directory`` and name the folder made there.

    Raises:
        FileNotFoundError: the archive holds no PKG-INFO.
    """
    info = Path("PKG-INFO").read_text(encoding="utf-8")
    lines = info.split("\n\n", 1)[0].splitlines()
    head = dict(line.split(": ", 1) for line in lines if ": " in line and not line.startswith(" "))
    name = f"{head['Name'].replace('-', '_')}-{head['Version']}.dist-info"
    folder = Path(metadata_directory, name)
    folder.mkdir()
    (folder / "METADATA").write_text(info, encoding="utf-8")
    tags = "Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    (folder / "WHEEL").write_text(tags, encoding="utf-8")
    return name
