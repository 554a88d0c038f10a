"""Pack a finished build as a wheel, and tell what a wheel or a binary was built from.

The stock build is packed in the same way: rolling a deployment back is installing the stock wheel of the same build.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import zipfile
from pathlib import Path

import click

from lab.router.build import (
    ROUTER,
    SERIES_OPTION,
    VARIANTS,
    Builder,
    BuildError,
    Result,
    cache_folder,
    fetch,
    members,
    series_in,
)


def version_of(result: Result) -> str:
    """The version of the wheel: the pinned release with a local label, the series' digest or ``stock``."""
    _, _, after = result.receipt["series"].partition("sha256=")
    return f"{ROUTER.version}+patchbundle.{after[:12] or 'stock'}"


def pack(result: Result, folder: Path) -> Path:
    """Write the wheel of a build to ``folder`` and return it. The same build gives the same bytes.

    Raises:
        BuildError: the pinned archive is not to be had.
    """
    version = version_of(result)
    name = ROUTER.name.replace("-", "_")
    tag = f"cp38-abi3-linux_{platform.machine()}"
    info = f"{name}-{version}.dist-info"
    metadata = members(fetch(ROUTER, cache_folder()))["PKG-INFO"]
    files = {
        str(path.relative_to(result.folder)): path.read_bytes()
        for path in sorted((result.folder / name).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    old, new = f"\nVersion: {ROUTER.version}\n".encode(), f"\nVersion: {version}\n".encode()
    files[f"{info}/METADATA"] = metadata.replace(old, new, 1)
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: patchbundle\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    )
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\n" + b"".join(
        f"{script}=sglang_router.cli:main\n".encode() for script in ("amg", "sglang-router", "smg")
    )
    files[f"{info}/patchbundle.json"] = (json.dumps(result.receipt, indent=1, sort_keys=True) + "\n").encode()
    record = ""
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(content)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            archive.writestr(entry, content, compresslevel=1)
    return wheel


def status(path: Path) -> str | None:
    """The series mark in a binary or in the binaries of a wheel, or None for one that was built without patches.

    Raises:
        BuildError: the file is neither, or holds two different marks.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            contents = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    else:
        contents = [path.read_bytes()]
    if not contents or any(not content.startswith(b"\x7fELF") for content in contents):
        raise BuildError(f"{path} is no binary and no wheel that holds one")
    marks = {series_in(content) for content in contents}
    if len(marks) > 1:
        raise BuildError(f"{path} holds binaries of different builds")
    return marks.pop()


@click.group()
def main() -> None:
    """Wheels of the router."""


@main.command("pack")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@SERIES_OPTION
@click.option("--profile", type=click.Choice(["dev", "release"]), default="dev", show_default=True)
def pack_command(folder: Path, series: Path, profile: str) -> None:
    """Build the router, stock and patched, and write both wheels to FOLDER."""
    try:
        for variant in VARIANTS:
            click.echo(str(pack(Builder(series, profile).build(variant), folder)))
    except BuildError as error:
        raise click.ClickException(str(error)) from None


@main.command("status")
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def status_command(path: Path) -> None:
    """Tell what the wheel or binary PATH was built from."""
    try:
        click.echo(status(path) or "no series mark: a stock build")
    except BuildError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
