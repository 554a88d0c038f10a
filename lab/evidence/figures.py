"""Figures in the documentation, and the claims that stand behind them.

A figure is a number with a unit, or with the unit's name, outside code; in a table the unit may stand in the head of
the column. Its block (a paragraph, a list item, a row of a table) names its claims in a comment,
``<!-- claim: ID ID -->``; a comment on a line of its own before a table holds for all its rows.

What a reader sees counts, not how it is written: a line that is wrapped between number and unit, emphasis around
either, an entity for the space. Each hid a figure once.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lab.evidence.claims import Claim, Problem
from lab.evidence.quantity import MEASURES

NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
WORDS = {
    "percent": "%",
    "nanoseconds": "ns",
    "microseconds": "us",
    "milliseconds": "ms",
    "msec": "ms",
    "seconds": "s",
    "second": "s",
    "secs": "s",
    "sec": "s",
    "minutes": "min",
    "minute": "min",
    "hours": "h",
    "hour": "h",
    "KB": "kB",
    "requests/s": "req/s",
    "requests per second": "req/s",
    "tok/s": "tokens/s",
    "tok": "tokens",
    "token": "tokens",
    "x": "×",
}
UNIT = "|".join(re.escape(name) for name in sorted([*MEASURES, *WORDS], key=len, reverse=True))
# "Times" is a ratio before one of these; "20 times a day" counts.
TIMES = r"times(?= (?:less|more|faster|slower|as|larger|smaller|fewer|longer|shorter|higher|lower)\b)"
JOIN = r"(?:,? (?:to|up to|and|or|of|against|then|instead of) |[–→/-]| [–→/-] | -> |, )"
# Words may stand between a row of numbers and the unit that all of them have: the unit is written once.
FIGURE = re.compile(
    rf"(?<![\w.,])(?P<numbers>[+−-]?{NUMBER}(?:{JOIN}[+−-]?{NUMBER})*)"
    rf"(?: |-|)(?P<unit>{UNIT}|{TIMES})(?!\w)(?!-[a-z])"
)
MARKER = re.compile(r"<!-- claim: ([a-z0-9 -]+?) -->")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEAD = re.compile(rf"(?:^|[ ,(])(?P<unit>{UNIT})\)?(?: \([^)]*\))?$")
ROW_HEAD = re.compile(rf", (?P<unit>{UNIT})(?: \([^)]*\))?$")
CELL = re.compile(rf"(?<![\w.(])[+−-]?{NUMBER}(?![\w)])")
RULE = re.compile(r"\s*\|(?:\s*:?-+:?\s*\|)+\s*")


@dataclass(frozen=True)
class Figure:
    """One number as it is written, its unit, and where."""

    line: int
    text: str
    unit: str
    claims: tuple[str, ...]

    def shows(self, claim: Claim) -> bool:
        """Whether it is a value of the claim in the figure's unit, rounded as it is written; a written sign counts."""
        kind, factor = MEASURES[self.unit]
        own = MEASURES.get(claim.unit)
        if own is None or own[0] != kind:
            return False
        plain = self.text.replace(",", "").replace("−", "-")
        decimals = len(plain.partition("e")[0].partition(".")[2])
        form = f".{decimals}{'e' if 'e' in plain else 'f'}"
        for value in claim.values:
            value *= 1 if own[1] == factor else own[1] / factor
            if plain[0] in "+-" and (plain[0] == "-") != (value < 0):
                continue
            if f"{abs(value):{form}}" == f"{abs(float(plain)):{form}}":
                return True
        return False


def _named(unit: str) -> str:
    return "×" if unit == "times" else WORDS.get(unit, unit)


def seen(text: str) -> str:
    """The text as a reader sees it: entities read, emphasis gone, one sign for a micro, every kind of space plain."""
    text = html.unescape(text)
    text = re.sub(r"[*_~]+(?=\S)|(?<=\S)[*_~]+", "", text)
    return re.sub(r"[\u00a0\u2009\u202f\u2007\t]", " ", text.replace("µ", "u").replace("μ", "u").replace("‑", "-"))


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


def _in(text: str, line: int, claims: tuple[str, ...]) -> Iterator[Figure]:
    """The figures of one block without its markers."""
    ends, joined = list[int](), ""
    for part in text.split("\n"):
        # One space for each run of them, so that a wrapped line reads as one.
        joined += re.sub(r" +", " ", seen(part).strip()) + " "
        ends.append(len(joined))
    for match in FIGURE.finditer(joined):
        unit = _named(match["unit"])
        at = line + sum(end <= match.start() for end in ends)
        # A dash before the first number is a sign; between two it joins them.
        first, *rest = re.findall(NUMBER, match["numbers"])
        sign = match["numbers"][0] if match["numbers"][0] in "+−-" else ""
        for number in (sign + first, *rest):
            yield Figure(at, number, unit, claims)


def cells(row: str) -> list[str]:
    """The cells of a row of a table, as a reader sees them."""
    return [re.sub(r" +", " ", seen(cell)).strip() for cell in row.strip().strip("|").split("|")]


def figures(page: str) -> Iterator[Figure]:
    """Every figure of a page with the claims that its block names."""
    table: tuple[str, ...] = ()
    head: list[str] = []
    units: dict[int, str] | None = None  # by column; None before a table's rule
    for line, text in blocks(page):
        named = tuple(name for match in MARKER.findall(text) for name in match.split())
        bare = MARKER.sub("", text)
        if not bare.strip():
            table = named
            continue
        if not bare.lstrip().startswith("|"):
            table, head, units = (), [], None
        elif RULE.fullmatch(bare):
            units = {column: _named(match["unit"]) for column, cell in enumerate(head) if (match := HEAD.search(cell))}
        else:
            head = cells(bare)
            own = ROW_HEAD.search(head[0]) if units is not None else None
            for column, cell in enumerate(head):
                # A row may have its unit in its own head; what stands in brackets is something else.
                unit = (units or {}).get(column) or (_named(own["unit"]) if own and column else None)
                if unit and not FIGURE.search(cell):
                    for number in CELL.findall(cell):
                        yield Figure(line, number, unit, named + table)
        yield from _in(bare, line, named + table)


def check(name: str, page: str, claims: Mapping[str, Claim]) -> Iterator[Problem]:
    """Figures of a page that no claim stands behind, and markers that name none."""
    for match in MARKER.finditer(page):
        for word in match[1].split():
            if word not in claims:
                yield Problem(f"{name}:{page.count(chr(10), 0, match.start()) + 1}", f"no claim {word!r}")
    for figure in figures(page):
        known = [claims[word] for word in figure.claims if word in claims]
        if not any(figure.shows(claim) for claim in known):
            said = ", ".join(f"{claim.id} = {claim.shown}" for claim in known) or "no claim"
            yield Problem(f"{name}:{figure.line}", f"{figure.text} {figure.unit} is behind {said}")
