"""All of it at once: claims, results, the pages that show them, and the page that lists them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lab.evidence import claims, figures
from lab.evidence.claims import Claim, Kind, Problem
from lab.evidence.formulas import FORMULAS

PAGE = "docs/claims.md"


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def problems(root: Path) -> list[Problem]:
    """Everything that does not hold, in the order of the files."""
    return list(_problems(root))


def _problems(root: Path) -> Iterator[Problem]:
    known, wrong = claims.read(root)
    yield from wrong
    for claim in known:
        yield from claims.check(claim, root, FORMULAS)
    unused = FORMULAS.keys() - {claim.formula for claim in known}
    yield from (Problem("lab/evidence/formulas.py", f"{name} stands behind no claim") for name in sorted(unused))
    by_id = {claim.id: claim for claim in known}
    for path in pages(root):
        if path == root / PAGE:
            continue  # compared as a whole below
        yield from figures.check(str(path.relative_to(root)), path.read_text(encoding="utf-8"), by_id)
    listed = root / PAGE
    if not listed.is_file() or listed.read_text(encoding="utf-8") != page(known):
        yield Problem(PAGE, "is not the list of the claims; run `make claims`")


def page(known: list[Claim]) -> str:
    """The page that lists every claim by kind."""
    lines = [
        "# Claims",
        "",
        "Written by `make claims` from `evidence/claims.toml`, checked by `tools/check_sources.py --evidence`. A",
        "figure in README.md or docs/ that no claim stands behind fails that check. *Recomputed*: a formula here gives",
        "it. *Measured*: a script here made the result that it is read from. *Reported*: others said so; nobody here",
        "has measured it again.",
    ]
    for kind in Kind:
        own = [claim for claim in known if claim.kind is kind]
        if not own:
            continue
        behind = {"recomputed": "formula", "measured": "result", "reported": "source"}[kind.value]
        lines += ["", f"## {kind.value.capitalize()}", "", f"| claim | value | {behind} | date |", "|---|---|---|---|"]
        for claim in own:
            within = f" ± {claim.tolerance:g}" if claim.tolerance else ""
            value = f"{claim.value:,.10g} {claim.unit}{within} <!-- claim: {claim.id} -->"
            lines.append(f"| {claim.statement} | {value} | {claim.known_by} | {claim.date} |")
    return "\n".join(lines) + "\n"


def write(root: Path) -> None:
    """Write the page that lists the claims."""
    known, _ = claims.read(root)
    (root / PAGE).write_text(page(known), encoding="utf-8")
