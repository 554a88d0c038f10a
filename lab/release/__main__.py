"""Build what a release consists of, into ``dist/``."""

from __future__ import annotations

from pathlib import Path

import click

from lab.release import publish, sdist, wheels
from lab.release.notes import ReleaseError
from patchbundle import __version__, disk, manifest
from patchbundle.errors import BundleError

ROOT = Path(__file__).resolve().parents[2]


@click.command()
@click.argument("what", type=click.Choice(["pyz", "sdist", "release"]))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "dist", show_default=False)
@click.option("-n", "--dry-run", is_flag=True, help="Of a release: make its files, change nothing in the repository.")
def main(what: str, out: Path, dry_run: bool) -> None:
    """Build one file, or a whole release, into dist/ (or --out), and print SHA-256 digests as sha256sum does."""
    try:
        if what == "release":
            _release(out, dry_run)
            return
        name, data = (publish.FILE, publish.one_file(ROOT)) if what == "pyz" else (publish.SOURCES, sdist.build(ROOT))
        disk.write_file(out / name, data)
        if what == "pyz":
            (out / name).chmod(0o755)
        click.echo(f"{publish.digest(data)}  {name}")
    except (BundleError, ReleaseError, wheels.WheelError) as error:
        raise click.ClickException(str(error)) from error


def _release(out: Path, dry_run: bool) -> None:
    news = publish.check(ROOT, manifest.load(ROOT), __version__)
    for name, digest in publish.build(ROOT, out / __version__, news).items():
        click.echo(f"{digest}  {name}")
    if not dry_run:
        changed = publish.conclude(ROOT, __version__, news)
        click.echo(f"commit {', '.join(changed)} as 'File {__version__}', then raise __version__", err=True)


if __name__ == "__main__":
    main()
