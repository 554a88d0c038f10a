"""``make report``: one HTML file that opens without a network: patches, pins, claims by kind, kernel chart, models."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import click

from lab.evidence import claims, ledger
from lab.evidence.claims import Kind
from lab.html import document, element, svg, table
from lab.models.boundary import Layout, Shape, entry, exit_, sent
from lab.models.capacity import Budget, Keeping, Model, tokens
from lab.models.sweep import GIB, Axes, Line, draw, run
from patchbundle import manifest
from patchbundle.manifest import Bundle

ROOT = Path(__file__).resolve().parents[2]
CHART = "docs/topk.svg"
Section = tuple[str, str]


def patches(bundle: Bundle, root: Path) -> Section:
    """Every patch: class, gate, the files of the base that it changes, and what is known of its links upstream."""
    known = {link.url: link for link in ledger.read(root)[0]}
    rows = [
        {
            "patch": patch.id,
            "role": patch.role,
            "class": patch.header.patch_class.partition(",")[0].partition(";")[0],
            "gate": patch.header.gate_name or "none",
            "files changed": len(patch.files),
            "our files": len(patch.sources),
            "upstream": ", ".join(
                f"{link.number} {link.status}" for url in ledger.named(patch) if (link := known.get(url))
            )
            or "none found",
            "drop when": patch.header.drop_when,
        }
        for patch in bundle.patches
    ]
    return "Patches", table(rows)


def pins(bundle: Bundle) -> Section:
    """Every base with its archives, and the identity that each touched file ends with."""
    archives = [
        {"base": base.id, "archive": archive.filename, "SHA-256": archive.sha256}
        for base in bundle.bases.values()
        for archive in base.archives
    ]
    files = [
        {"base": name, "level": len(pinned.levels), "file": path, "identity at the top of the series": str(chain[-1])}
        for name, pinned in sorted(bundle.lock.bases.items())
        for path, chain in sorted(pinned.paths.items())
    ]
    return "Pins", (
        f"<p>bundle <code>{bundle.lock.digest}</code></p>{table(archives)}"
        f"<details><summary>{len(files)} files</summary>{table(files)}</details>"
    )


def claimed(root: Path) -> Section:
    """The claims by kind."""
    known, _ = claims.read(root)
    parts = []
    for kind in Kind:
        rows = [
            {
                "claim": claim.statement,
                "value": claim.shown + (f" ± {claim.tolerance:g}" if claim.tolerance else ""),
                "known by": claim.known_by,
                "date": str(claim.date),
            }
            for claim in known
            if claim.kind is kind
        ]
        parts.append(
            f"<details open><summary>{kind.value}: {len(rows)}</summary>{table(rows)}</details>" if rows else ""
        )
    return "Claims", "".join(parts)


def kernel(root: Path) -> Section:
    """The chart of the exact top-k, as it stands in the documentation."""
    picture = element((root / CHART).read_text(encoding="utf-8"))
    words = "Measured on one H200. Where our line is above a red mark, a bound that we set ourselves is missed."
    return "The exact top-k", f"<p>{words}</p>{picture}"


def models(lines: Sequence[Line]) -> Section:
    """The byte ledger of a layer, the tokens of a budget, and the sweep."""
    shape = Shape()
    layers = [
        {
            "layout": layout.value,
            "entry, S": sent(entry(layout, shape)) / shape.shard,
            "exit, S": sent(exit_(layout, shape)) / shape.shard,
            "both, MiB": (sent(entry(layout, shape)) + sent(exit_(layout, shape))) / (1 << 20),
        }
        for layout in Layout
    ]
    budget = Budget(int(6.33 * GIB))
    kept = [
        {"keeping": keeping.value, "ranks": 4, "tokens": tokens(Model(), keeping, 4, budget, gathered=81_920)}
        for keeping in Keeping
    ]
    return "Models", (
        "<p>Arithmetic and simulation: nothing here was measured.</p>"
        f"<h3>Bytes that a rank sends in a layer (model)</h3>{table(layers)}"
        f"<h3>Tokens of four ranks with 6.33 GiB each (model)</h3>{table(kept)}"
        f"<h3>Four designs at equal memory (model)</h3>{svg(draw(lines))}"
        f"<details><summary>{len(lines)} points</summary>{table(lines)}</details>"
    )


def page(root: Path, lines: Sequence[Line]) -> str:
    """The whole file. ``lines``: those of a sweep."""
    bundle = manifest.load(root)
    sections = [patches(bundle, root), pins(bundle), claimed(root), kernel(root), models(lines)]
    contents = "".join(f'<li><a href="#s{at}">{html.escape(name)}</a></li>' for at, (name, _) in enumerate(sections))
    body = "".join(f'<h2 id="s{at}">{html.escape(name)}</h2>{text}' for at, (name, text) in enumerate(sections))
    return document("Patch bundle: what is known", f"<ul>{contents}</ul>{body}")


@click.command()
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--requests", type=click.IntRange(1), default=400, show_default=True, help="Requests of each simulation.")
def main(out: Path, requests: int) -> None:
    """Write the report to OUT."""
    jobs = Axes().jobs(requests=requests)
    with run(jobs) as done, click.progressbar(done, length=len(jobs), label="simulating") as bar:
        lines = list(bar)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(ROOT, lines), encoding="utf-8")
    click.echo(f"{out}: {out.stat().st_size / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    main()
