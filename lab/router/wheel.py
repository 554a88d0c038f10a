"""Pack finished builds as wheels; ``tools/apply.py status --router`` tells what a wheel was built from.

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

from lab.router.build import BUNDLE_OPTION, VARIANTS, Builder, BuildError, Result, unpacked
from patchbundle.errors import BundleError


def pack(builder: Builder, result: Result, folder: Path) -> Path:
    """Write the wheel of a build to ``folder`` and return it. The same build gives the same bytes.

    Its version is the pinned release's with a local label: the series' digest, or ``stock``.

    Raises:
        BundleError: the pinned archive is not to be had.
    """
    base = builder.base
    version = f"{base.version}+patchbundle.{result.receipt['series'][:12] or 'stock'}"
    name = base.distribution.replace("-", "_")
    tag = f"cp38-abi3-linux_{platform.machine()}"
    info = f"{name}-{version}.dist-info"
    metadata = unpacked(base, base.archives[0])["PKG-INFO"]
    files = {
        str(path.relative_to(result.folder)): path.read_bytes()
        for path in sorted((result.folder / name).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    old, new = f"\nVersion: {base.version}\n".encode(), f"\nVersion: {version}\n".encode()
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


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@BUNDLE_OPTION
@click.option("--profile", type=click.Choice(["dev", "release"]), default="dev", show_default=True)
def main(folder: Path, root: Path, profile: str) -> None:
    """Build the router, stock and patched, and write both wheels to FOLDER."""
    try:
        builder = Builder(root, profile)
        for variant in VARIANTS:
            click.echo(str(pack(builder, builder.build(variant), folder)))
    except (BuildError, BundleError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
