"""Build what a release consists of, into ``dist/``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import click

from lab.release import pyz, sdist, wheels
from patchbundle import __version__, disk
from patchbundle.errors import BundleError

ROOT = Path(__file__).resolve().parents[2]


def one_file(root: Path) -> bytes:
    return pyz.build(root, root, wheels.fetched(root / "requirements" / "node.txt"))


def source_archive(root: Path) -> bytes:
    return sdist.build(root)


MADE: dict[str, Callable[[Path], bytes]] = {
    f"patchbundle-{__version__}.pyz": one_file,
    f"patchbundle-{__version__}.tar.gz": source_archive,
}


def write(out: Path, name: str) -> str:
    """Make one of them; returns its SHA-256."""
    data = MADE[name](ROOT)
    disk.write_file(out / name, data)
    if name.endswith(".pyz"):
        (out / name).chmod(0o755)
    return hashlib.sha256(data).hexdigest()


@click.command()
@click.argument("what", type=click.Choice(["pyz", "sdist"]))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "dist", show_default=False)
def main(what: str, out: Path) -> None:
    """Build one part of a release into dist/ (or --out), and print its SHA-256 as sha256sum does."""
    name = next(name for name in MADE if name.endswith(".pyz" if what == "pyz" else ".tar.gz"))
    try:
        click.echo(f"{write(out, name)}  {name}")
    except (BundleError, wheels.WheelError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
