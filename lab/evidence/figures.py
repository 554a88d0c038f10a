"""Figures in the documentation, and the claims that stand behind them.

A figure is a number with a unit, or with the unit's name, outside code. Its block (a paragraph, a list item, a row of a
table) names its claims in a comment, ``<!-- claim: ID ID -->``; a comment on a line of its own before a table holds for
all its rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lab.evidence.claims import Claim, Problem

NUMBER = r"\d[\d,]*(?:\.\d+)?"
WORDS = {"percent": "%", "milliseconds": "ms", "microseconds": "us", "seconds": "s", "µs": "us"}
UNIT = rf"{'|'.join(WORDS)}|%|ms|us|GiB|MiB|GB/s|req/s|tokens/s/GPU|tokens|×|s"
SPACE = r"[ \u00a0\u2009\u202f]?"  # plain, or one that does not break
FIGURE = re.compile(rf"(?<![\w.,]){NUMBER}(?: ?(?:to|–|and|or) {NUMBER})?{SPACE}(?:{UNIT})(?!\w)")
MARKER = re.compile(r"<!-- claim: ([a-z0-9 -]+?) -->")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Figure:
    """One number as it is written, its unit, and where."""

    line: int
    text: str
    unit: str
    claims: tuple[str, ...]

    def shows(self, claim: Claim) -> bool:
        """Whether it is the claim's value, rounded as it is written."""
        plain = self.text.replace(",", "")
        decimals = len(plain.partition(".")[2])
        return self.unit == claim.unit and f"{claim.value:.{decimals}f}" == f"{float(plain):.{decimals}f}"


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, list item and table row; code is blanked."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    page = FENCE.sub(blank, page)
    page = re.sub(r"`[^`\n]*`", blank, page)
    start, held = 1, list[str]()
    for number, line in enumerate(page.splitlines(), 1):
        if not line.strip() or re.match(r"\s*(\||[-*] |\d+\. |#)", line):
            if held:
                yield start, "\n".join(held)
            start, held = number, []
        if line.strip():
            if not held:
                start = number
            held.append(line)
    if held:
        yield start, "\n".join(held)


def figures(page: str) -> Iterator[Figure]:
    """Every figure of a page with the claims that its block names."""
    table: tuple[str, ...] = ()
    for line, text in blocks(page):
        named = tuple(name for match in MARKER.findall(text) for name in match.split())
        bare = MARKER.sub("", text)
        if not bare.strip():
            table = named
            continue
        if not bare.lstrip().startswith("|"):
            table = ()
        for match in FIGURE.finditer(bare):
            unit = re.search(rf"(?:{UNIT})$", match[0])
            assert unit is not None
            at = line + bare.count("\n", 0, match.start())
            for number in re.findall(NUMBER, match[0]):
                yield Figure(at, number, WORDS.get(unit[0], unit[0]), named + table)


def check(name: str, page: str, claims: Mapping[str, Claim]) -> Iterator[Problem]:
    """Figures of a page that no claim stands behind, and markers that name none."""
    for match in MARKER.finditer(page):
        for word in match[1].split():
            if word not in claims:
                yield Problem(f"{name}:{page.count(chr(10), 0, match.start()) + 1}", f"no claim {word!r}")
    for figure in figures(page):
        known = [claims[word] for word in figure.claims if word in claims]
        if not any(figure.shows(claim) for claim in known):
            said = ", ".join(f"{claim.id} = {claim.value:g} {claim.unit}" for claim in known) or "no claim"
            yield Problem(f"{name}:{figure.line}", f"{figure.text} {figure.unit} is behind {said}")
