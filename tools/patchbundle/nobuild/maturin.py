"""A build backend that builds nothing, named like the one that the router's source archive asks for.

pip asks an archive's backend for metadata before it hands the archive over, and the real backend would run
cargo and want a git checkout. This one hands back the archive's own PKG-INFO: nothing of the archive is run.
"""

from __future__ import annotations

from pathlib import Path


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:
    """Write the metadata folder that pip reads; returns its name."""
    info = Path("PKG-INFO").read_text(encoding="utf-8")
    head = dict(line.split(": ", 1) for line in info.split("\n\n")[0].splitlines() if ": " in line)
    name = f"{head['Name'].replace('-', '_')}-{head['Version']}.dist-info"
    folder = Path(metadata_directory, name)
    folder.mkdir()
    (folder / "METADATA").write_text(info, encoding="utf-8")
    (folder / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    return name
