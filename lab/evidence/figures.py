"""Figures in the documentation, and the claims that stand behind them.

A figure is a number with a unit, or with the unit's name, outside code; in a table the unit may stand in the head of
the column or of the row, or in a column of its own. Its block (a paragraph, a list item, a row of a table) names its
claims in a comment, ``<!-- claim: ID ID -->``; a comment on a line of its own before a table holds for all its rows.

What a reader sees counts, not how it is written: a line that is wrapped between number and unit, emphasis, a link or a
tag around either, an entity for the space, a thousand as K, code that is a number and its unit and nothing else. Each
hid a figure once. What is no number as this house writes it (1,234.5) is behind no claim at all.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lab.evidence.claims import Claim, Problem
from lab.evidence.quantity import MEASURES

# Wider than what is well formed: "12,5" and a half are figures too, and no claim shows them.
SPELLED = {
    word: str(number)
    for number, word in enumerate(
        re.findall(
            r"\w+",
            "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen twenty",
        ),
        1,
    )
} | {"thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "ninety": "90", "half a": "0.5", "half an": "0.5"}
DIGITS = r"(?:\d+(?:,\d+)*(?:\.\d+)*|(?<!\.)\.\d+)(?:[eE][+-]?\d+)?(?:⁄\d+)?"
NUMBER = rf"(?:{DIGITS}|(?i:{'|'.join(sorted(SPELLED, key=len, reverse=True))})(?!\w))"
WELL = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?")
SCALES = {"": 1.0, "k": 1e3, "thousand": 1e3, "m": 1e6, "million": 1e6, "billion": 1e9}


def _words() -> dict[str, str]:
    """Unit by each other name of it."""
    found = {"x": "×", "X": "×", "fold": "×", "Gb": "Gbit", "Mb": "Mbit", "Gb/s": "Gbit/s", "Gbps": "Gbit/s"}
    for unit, names in {
        "%": "percent|per cent|pct|percentage point|percentage points",
        "ns": "nanosecond|nanoseconds|nsec",
        "us": "microsecond|microseconds|usec|usecs|microsecs",
        "ms": "millisecond|milliseconds|msec|msecs|millis",
        "s": "second|seconds|sec|secs",
        "min": "minute|minutes|mins",
        "h": "hour|hours|hr|hrs",
        "days": "day",
        "weeks": "week",
        "kB": "kilobyte|kilobytes|kbyte|kbytes",
        "MB": "megabyte|megabytes|mbyte|mbytes",
        "GB": "gigabyte|gigabytes|gbyte|gbytes",
        "TB": "terabyte|terabytes|tbyte|tbytes",
        "KiB": "kibibyte|kibibytes",
        "MiB": "mebibyte|mebibytes",
        "GiB": "gibibyte|gibibytes",
        "MB/s": "MBps",
        "GB/s": "GBps",
        "req/s": "requests/s|requests / s|requests/second|requests/sec|requests per second|requests a second|reqs/s"
        "|requests each second|request/s|request per second|rps|qps",
        "tokens": "token|tok",
        "tokens/s": "tok/s|tokens/second|tokens/sec|tokens per second|tokens a second|tok/sec|tps",
        "tokens/s/GPU": "tokens/s per GPU|tokens per second per GPU|tokens per second and GPU",
    }.items():
        found |= dict.fromkeys(names.split("|"), unit)
    return found


WORDS = _words()
# A single letter has one case alone: 4 S are shards, and 8 H no hours.
LOWER = {name.lower(): unit for name, unit in [*WORDS.items(), *((name, name) for name in MEASURES)] if len(name) > 1}
UNIT = "|".join(
    (f"{name}(?!-[a-z])" if name.isalpha() else name) if len(name) == 1 else f"(?i:{re.escape(name)})"
    for name in sorted({*MEASURES, *WORDS}, key=len, reverse=True)
)
# "Times" is a ratio before one of these; "20 times a day" counts.
TIMES = (
    r"times(?= (?:less|more|faster|slower|as|larger|smaller|fewer|longer|shorter|higher|lower|quicker|bigger|greater"
    r"|better|worse|over|that|what)\b)"
)
JOIN = (
    r"(?:,? (?:to|up to|and|or|of|against|then|instead of|versus|vs\.?|by|plus|minus) "
    r"| ?(?:\+/-|->|\.{2,3}|[–—→/&+±·-]) ?| [~x×] |, )"
)
SCALE = r"(?: ?(?P<scale>[kKM]|thousand|million|billion)(?=[\W_]|[a-z]{2}))?"
NUMBERS = rf"(?<![\w.,])(?P<numbers>[+−-]?{NUMBER}(?:{JOIN}[+−-]?{NUMBER})*){SCALE}"
# Words may stand between a row of numbers and the unit that all of them have: the unit is written once.
FIGURE = re.compile(rf"{NUMBERS}(?: |-|)(?P<unit>{UNIT}|{TIMES})(?!\w)")
# A word or two before the unit's name: "8,192 fresh tokens". None of those that begin something else.
BETWEEN = (
    r"(?:or (?:so|more|less) |(?!(?:a|an|and|are|as|at|by|for|from|if|in|is|of|on|or|per|than|the|to|was|with)\b)"
    r"[a-z]+(?:-[a-z]+)* )"
)
NAMED = re.compile(
    rf"{NUMBERS} {BETWEEN}{{1,2}}(?P<unit>(?i:tokens?|seconds?|minutes?|hours?|milliseconds|percent|[KMG]iB|[MG]B))"
    r"(?!\w)"
)
# The unit first: "latency (ms): 12".
FIRST = re.compile(
    rf"(?:^|(?<=[ (\[]))(?P<unit>{UNIT})(?<!x)[)\]]?(?: ?= ?|: )(?P<numbers>[+−-]?{NUMBER})(?P<scale>)(?![\w.]*\w)"
)
PREFIXED = re.compile(rf"(?:^|(?<=[ (]))(?<!\d )(?P<unit>[×x])(?P<numbers>{DIGITS})(?P<scale>)(?!\w)")
# The unit between the two: "from 192 MiB to 216."
TAIL = re.compile(rf"(?: to | up to | or | and | ?[–→] ?| -> )(?P<number>[+−-]?{NUMBER})(?= ?$|[.,;:)](?: |$))")
MARKER = re.compile(r"<!-- claim: ([a-z0-9 -]+?) -->")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(rf"[+−-]?{DIGITS}(?:(?: |-|)(?:{UNIT}))?|{UNIT}")
HEAD = re.compile(rf"(?:^|[ ,(\[])(?P<unit>{UNIT})[)\]]?(?: \([^)]*\))?$|^(?P<first>{UNIT}) (?:a|an|per|each|for) ")
ROW_HEAD = re.compile(rf"(?:, |\()(?P<unit>{UNIT})\)?(?: \([^)]*\))?$")
CELL = re.compile(rf"(?<![\w.(,])[+−-]?{DIGITS}(?![\w)]|[.,]\d)")
RULE = re.compile(r"\s*\|(?:\s*:?-+:?\s*\|)+\s*")
BARE_RULE = re.compile(r"\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)+\|?\s*")


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
        sign, number, scale = re.fullmatch(rf"([+−-]?)({NUMBER})(.*)", self.text, re.DOTALL).groups()  # type: ignore[union-attr]
        number = SPELLED.get(number.lower(), number)
        if not WELL.fullmatch(number):
            return False
        plain = number.replace(",", "").lower()
        decimals = len(plain.partition("e")[0].partition(".")[2])
        form = f".{decimals}{'e' if 'e' in plain else 'f'}"
        for value in claim.values:
            value *= 1 if own[1] == factor else own[1] / factor
            value /= SCALES[scale.lower()]
            if sign and (sign != "+") != (value < 0):
                continue
            if f"{abs(value):{form}}" == f"{abs(float(plain)):{form}}":
                return True
        return False


def _named(unit: str) -> str:
    if unit == "times":
        return "×"
    return unit if unit in MEASURES else WORDS.get(unit) or LOWER[unit.lower()]


def seen(text: str) -> str:
    """The text as a reader sees it: entities read, links, tags and emphasis gone, one kind of micro and of space."""
    text = html.unescape(text)
    text = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"\[\^[^\]]*\]", "", text)
    text = re.sub(r"</?[a-zA-Z][^<>]*>", lambda tag: " " if tag[0].startswith("<br") else "", text)
    text = re.sub(r"\\(?:mathrm|text)\{([^{}]*)\}", r"\1", text.replace("$", ""))
    text = re.sub(r"\\([^\w\s,])", r"\1", re.sub(r"\\[,;: ]", " ", text))
    text = unicodedata.normalize("NFKC", text).replace("μ", "u").replace("\u2010", "-")
    text = "".join(" " if sign.isspace() else sign for sign in text if unicodedata.category(sign) != "Cf")
    return re.sub(r"[*_~]+(?=\S)|(?<=\S)[*_~]+", "", text)


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, list item and table row; code is blanked."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    def code(match: re.Match[str]) -> str:
        # What is a figure and nothing else is one in code too; a command's words are none.
        return f" {match[1]} " if CODE.fullmatch(match[1].strip()) else blank(match)

    page = FENCE.sub(blank, page)
    page = re.sub(r"`([^`\n]*)`", code, page)
    page = re.sub(r"^(?:[ ]*>)+", blank, page, flags=re.MULTILINE)
    start, held = 1, list[str]()
    for number, line in enumerate(_piped(page.split("\n")), 1):
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


def _piped(lines: list[str]) -> list[str]:
    """The lines with a bar before each row of a table that is written without."""
    for number, line in enumerate(lines):
        if number and "|" in lines[number - 1] and BARE_RULE.fullmatch(line):
            row = number - 1
            while row < len(lines) and "|" in lines[row]:
                lines[row] = f"|{lines[row]}|"
                row += 1
    return lines


def _in(text: str, line: int, claims: tuple[str, ...]) -> Iterator[Figure]:
    """The figures of one block without its markers."""
    ends, joined = list[int](), ""
    for part in text.split("\n"):
        # One space for each run of them, so that a wrapped line reads as one.
        joined += re.sub(r" +", " ", seen(part).strip()) + " "
        ends.append(len(joined))
    taken: set[int] = set()
    for pattern in (FIGURE, NAMED, FIRST, PREFIXED):
        for match in pattern.finditer(joined):
            if match.start("numbers") in taken:
                continue
            taken.add(match.start("numbers"))
            at = line + sum(end <= match.start() for end in ends)
            # A dash before the first number is a sign; between two it joins them.
            first, *rest = re.findall(NUMBER, match["numbers"])
            sign = match["numbers"][0] if match["numbers"][0] in "+−-" else ""
            tail = TAIL.match(joined, match.end()) if pattern in (FIGURE, NAMED) else None
            for number in (sign + first, *rest, *([tail["number"]] if tail else [])):
                yield Figure(at, number + (match["scale"] or ""), _named(match["unit"]), claims)


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
        bare = COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
        if not bare.strip():
            table = named
            continue
        if not bare.lstrip().startswith("|"):
            table, head, units = (), [], None
        elif RULE.fullmatch(bare):
            units = {
                column: _named(match["unit"] or match["first"])
                for column, cell in enumerate(head)
                if (match := HEAD.search(cell))
            }
        else:
            head = cells(bare)
            own = ROW_HEAD.search(head[0]) if units is not None else None
            # A unit may have a column of its own; a row its unit in its own head.
            alone = next((cell for cell in head[1:] if units is not None and re.fullmatch(UNIT, cell)), None)
            beside = own["unit"] if own else alone
            for column, cell in enumerate(head):
                # What stands in brackets is something else.
                unit = (units or {}).get(column) or (_named(beside) if beside and column else None)
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
