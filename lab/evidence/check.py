"""All of it at once: claims, results, the pages that show them, the links upstream, and the pages that list them."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path

from lab.evidence import claims, figures, ledger
from lab.evidence.claims import Claim, Kind, Problem, StaleResult
from lab.evidence.formulas import FORMULAS
from lab.rig.standins import page as standins

PAGE, UPSTREAM, STAND_INS = "docs/claims.md", "docs/upstream.md", "docs/stand-ins.md"


def unread(root: Path) -> Iterator[Problem]:
    """Files below docs/ that nobody looks at: text is written in Markdown."""
    for path in sorted((root / "docs").rglob("*")):
        if path.is_file() and path.suffix not in (".md", ".svg"):
            yield Problem(path.relative_to(root).as_posix(), "is no page whose figures are checked; expected .md")


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


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
        if path in (root / PAGE, root / UPSTREAM):
            continue  # compared as a whole below
        yield from figures.check(str(path.relative_to(root)), path.read_text(encoding="utf-8"), by_id)
    yield from unread(root)
    yield from results(root)
    links, wrong = ledger.read(root)
    patches, unknown = ledger.series(root)
    yield from (*wrong, *unknown)
    yield from ledger.check(links, patches, datetime.date.today())
    for name, text in made(root).items():
        listed = root / name
        if not listed.is_file() or listed.read_text(encoding="utf-8") != text:
            yield Problem(name, "is not what is written of its list; run `make claims`")


def results(root: Path) -> Iterator[Problem]:
    """Results that do not say what made them, or whose script has changed, and that are not listed as older ones."""
    older, wrong = claims.older(root)
    yield from wrong
    for path in sorted((root / "evidence").rglob("*.json")):
        name = path.relative_to(root).as_posix()
        try:
            claims.result(root, name)
        except StaleResult as error:
            if name not in older:
                yield Problem(name, str(error).removeprefix(f"{name} "))
        else:
            if name in older:
                yield Problem(f"{claims.FILE}: {name}", "says all that a result must: take it off the older ones")
    for name in older:
        if not (root / name).is_file():
            yield Problem(f"{claims.FILE}: {name}", "is no file")


def page(known: list[Claim], older: Mapping[str, str]) -> str:
    """The page that lists every claim by kind, and the older results."""
    lines = [
        "# Claims",
        "",
        "Written by `make claims` from `evidence/claims.toml`, checked by `tools/check_sources.py --evidence`. A",
        "figure (a number with a unit; a bare count is none) in README.md or docs/ that no claim stands behind fails",
        "that check. *Recomputed*: a formula here gives it. *Measured*: a script here made the result that it is read",
        "from, and that says which bytes of the script, on what machine, with which versions and seed. *Reported*:",
        "somebody said so, and nothing here shows it again: others, or one of us of a run whose whole result was not",
        "kept, or of a setting.",
    ]
    for kind in Kind:
        own = [claim for claim in known if claim.kind is kind]
        if not own:
            continue
        behind = {"recomputed": "formula", "measured": "result", "reported": "source"}[kind.value]
        lines += ["", f"## {kind.value.capitalize()}", "", f"| claim | value | {behind} | date |", "|---|---|---|---|"]
        for claim in own:
            within = f" ± {claim.tolerance:g}" if claim.tolerance else ""
            value = f"{claim.shown}{within} <!-- claim: {claim.id} -->"
            lines.append(f"| {claim.statement} | {value} | {claim.known_by} | {claim.date} |")
    if older:
        lines += ["", "## Older results", "", "| result | what it lacks |", "|---|---|"]
        lines += [f"| `{name}` | {lacks} |" for name, lacks in older.items()]
    return "\n".join(lines) + "\n"


def made(root: Path) -> dict[str, str]:
    """The pages that are written here, by their paths."""
    return {
        PAGE: page(claims.read(root)[0], claims.older(root)[0]),
        UPSTREAM: ledger.page(ledger.read(root)[0], ledger.series(root)[0]),
        STAND_INS: standins.text(root),
    }


def write(root: Path) -> None:
    """Write them."""
    for name, text in made(root).items():
        (root / name).write_text(text, encoding="utf-8")
