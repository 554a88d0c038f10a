"""``evidence/claims.toml``: what is claimed, of which kind, and whether it still holds."""

from __future__ import annotations

import datetime
import fnmatch
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

from lab.evidence.quantity import MEASURES, MixedUnits, Quantity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "evidence/claims.toml"
COUNTED = frozenset(
    [
        "S",
        "requests",
        "calls",
        "descriptors",
        "retractions",
        "comparisons",
        "pairs",
        "runs",
        "bytes",
        "cards",
        "layers",
        "tests",
        "patches",
        "files",
        "functions",
        "faults",
        "instructions",
        "steps",
        "ranks",
    ]
)
UNITS = COUNTED | MEASURES.keys()
# A list is sorted by kind, so a statement that leans on the one before it would lean on another.
LEANING = re.compile(
    r"(?:as (?:above|before|the)|it|its|that|these|those|there|the same|of (?:these|those)|from there)\b"
    r"|.*\bthat (?:burst|pair|pool|round|run|shape|union|window)\b",
    re.IGNORECASE,
)
COMMON = {"id", "statement", "value", "unit", "kind", "date"}


class Kind(Enum):
    """How a claim is known, and the fields that say so."""

    RECOMPUTED = "recomputed"
    MEASURED = "measured"
    REPORTED = "reported"

    @property
    def fields(self) -> frozenset[str]:
        return {
            Kind.RECOMPUTED: frozenset({"formula"}),
            Kind.MEASURED: frozenset({"result", "pick"}),
            Kind.REPORTED: frozenset({"source", "not_shown"}),
        }[self]


@dataclass(frozen=True)
class Problem:
    """One thing that does not hold."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Claim:
    """One figure, or of a reported table all those of a column. ``tolerance`` is absolute, in the claim's unit."""

    id: str
    statement: str
    values: tuple[float, ...]
    unit: str
    kind: Kind
    date: datetime.date
    tolerance: float = 0.0
    formula: str = ""
    result: str = ""
    pick: str = ""
    source: str = ""
    not_shown: str = ""

    @property
    def value(self) -> float:
        """The figure; of a column the first."""
        return self.values[0]

    @property
    def shown(self) -> str:
        """Its figures with the unit."""
        return f"{', '.join(f'{value:,.10g}' for value in self.values)} {self.unit}"

    @property
    def known_by(self) -> str:
        """What stands behind it, for a table."""
        if self.kind is Kind.RECOMPUTED:
            return f"`{self.formula}`"
        if self.kind is Kind.MEASURED:
            return f"`{self.result}`: {self.pick}"
        return f"{self.source}; not shown: {self.not_shown}"


Formula = Callable[[], Quantity]


Entry = Mapping[str, Any]


def entries(
    root: Path, file: str, table: str, key: str, faults: Callable[[Entry], Iterator[str]], *, some: bool = True
) -> tuple[list[dict[str, Any]], list[Problem]]:
    """Each ``[[table]]`` of a TOML file without ``faults``, once for each ``key``; and what is wrong besides.

    ``some``: that there is none at all is wrong too.
    """
    try:
        listed = tomllib.loads((root / file).read_text(encoding="utf-8")).get(table, [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return [], [Problem(file, f"cannot be read: {error}")]
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        return [], [Problem(file, f"{table} is no array of tables")]
    known: dict[str, dict[str, Any]] = {}
    problems = [] if listed or not some else [Problem(file, f"holds no {table}")]
    for number, entry in enumerate(listed, 1):
        found = list(faults(entry))
        if not found and str(entry[key]) in known:
            found = ["is there twice"]
        problems += [Problem(f"{file}: {entry.get(key, f'{table} {number}')}", what) for what in found]
        if not found:
            known[entry[key]] = entry
    return list(known.values()), problems


def read(root: Path) -> tuple[list[Claim], list[Problem]]:
    """The claims that are well formed, and what is wrong with the others."""
    listed, problems = entries(root, FILE, "claim", "id", faults)
    return [_claim(**entry) for entry in listed], problems


def older(root: Path) -> tuple[dict[str, str], list[Problem]]:
    """Results that lack something a result must say, and what; nothing that is read from one is claimed as measured."""

    def wrong(entry: Entry) -> Iterator[str]:
        if entry.keys() != {"result", "lacks"} or not all(map(_is_text, entry.values())):
            yield "expected result and lacks, each a text that is not blank"

    listed, problems = entries(root, FILE, "older", "result", wrong, some=False)
    return {entry["result"]: entry["lacks"] for entry in listed}, problems


def _claim(value: float | list[float], kind: str, **fields: Any) -> Claim:
    values = value if isinstance(value, list) else [value]
    return Claim(values=tuple(map(float, values)), kind=Kind(kind), **fields)


def faults(entry: Entry) -> Iterator[str]:
    """What keeps an entry from being a claim."""
    missing = COMMON - entry.keys()
    if missing:
        yield f"lacks {', '.join(sorted(missing))}"
        return
    texts = [name for name, text in entry.items() if name not in {"value", "tolerance", "date"} and not _is_text(text)]
    if texts:
        yield f"{', '.join(texts)}: expected a text that is not blank"
        return
    if LEANING.match(entry["statement"]) or re.match(r"as (?:above|before|the)\b", entry.get("not_shown", "")):
        yield "statement, not_shown: expected words that stand alone, without the claim before"
    if entry["kind"] not in {kind.value for kind in Kind}:
        yield f"kind {entry['kind']!r}: expected {', '.join(kind.value for kind in Kind)}"
        return
    kind = Kind(entry["kind"])
    lacking = [name for name in sorted(kind.fields) if not entry.get(name)]
    if lacking:
        yield f"is {kind.value} and lacks {', '.join(lacking)}"
    unknown = entry.keys() - COMMON - kind.fields - {"tolerance"}
    if unknown:
        yield f"has {', '.join(sorted(unknown))}, which a {kind.value} claim has not"
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", str(entry["id"])):
        yield "id: expected small letters, digits and single dashes"
    if entry["unit"] not in UNITS:
        yield f"unit {entry['unit']!r}: expected one of {' '.join(sorted(UNITS))}"
    value, tolerance = entry["value"], entry.get("tolerance", 0)
    if isinstance(value, list) and kind is Kind.RECOMPUTED:
        yield f"value is a list, which a {kind.value} claim has not"
        return
    if value == []:
        yield "value is empty"
    for name, number in [("value", one) for one in (value if isinstance(value, list) else [value])] + [
        ("tolerance", tolerance)
    ]:
        if isinstance(number, bool) or not isinstance(number, int | float):
            yield f"{name} is no number"
            return
        if not math.isfinite(number):
            yield f"{name} is not finite"
            return
    if not 0 <= tolerance <= min(map(_rounding, value if isinstance(value, list) else [value]), default=0):
        yield f"tolerance {tolerance:g}: more than rounding {value} needs; it would let anything pass"
    if type(entry["date"]) is not datetime.date:
        yield "date is no date"
    elif entry["date"] > datetime.date.today():
        yield "date is in the future"


def _rounding(value: float) -> float:
    """Half of the last digit of a number as it is written."""
    exponent = Decimal(repr(value)).as_tuple().exponent
    assert isinstance(exponent, int)
    return 0.5 * 10.0 ** min(exponent, 0)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def check(claim: Claim, root: Path, formulas: Mapping[str, Formula]) -> Iterator[Problem]:
    """Whether the value is still what its formula or its result says. ``formulas``: by name."""
    where = f"{FILE}: {claim.id}"
    found: tuple[float, ...]
    if claim.kind is Kind.RECOMPUTED:
        if claim.formula not in formulas:
            yield Problem(where, f"no formula {claim.formula!r} in lab/evidence/formulas.py")
            return
        try:
            given = formulas[claim.formula]()
        except MixedUnits as error:
            yield Problem(where, f"its formula {error}")
            return
        except Exception as error:  # whatever a formula does wrong is its claim's problem, and no traceback
            yield Problem(where, f"its formula fails: {type(error).__name__}: {error}")
            return
        if given.unit != claim.unit:
            yield Problem(where, f"is in {claim.unit}, its formula gives {given.unit}")
            return
        found = (given.value,)
    elif claim.kind is Kind.MEASURED:
        try:
            found = measured(root, claim.result, claim.pick)
        except StaleResult as error:
            yield Problem(where, str(error))
            return
    else:
        return
    if len(found) != len(claim.values):
        yield Problem(where, f"says {len(claim.values)} values; found {len(found)}")
        return
    for said, is_so in zip(claim.values, found, strict=True):
        if not abs(is_so - said) <= claim.tolerance + 1e-9:
            yield Problem(where, f"says {said:g} {claim.unit}, within {claim.tolerance:g}; found {is_so:g}")


class StaleResult(Exception):
    """A result that no longer stands behind a claim, or never did."""


def result(root: Path, name: str) -> dict[str, Any]:
    """What a result holds. A result may name the modules that its script imports; older ones do not.

    Raises StaleResult if the file is missing, says too little about its run, or its script has changed since.
    """
    try:
        content = json.loads((root / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StaleResult(f"{name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise StaleResult(f"{name} is no object")
    # A seed may be null: nothing was drawn at random.
    missing = [name for name in ("script", "script_sha256", "machine") if not content.get(name)]
    missing += [] if "seed" in content else ["seed"]
    missing += [] if content.get("versions") or content.get("torch") else ["versions"]
    if missing:
        raise StaleResult(f"{name} lacks {', '.join(missing)}")
    imported = content.get("modules", {})
    if not isinstance(imported, dict):
        raise StaleResult(f"{name}: modules is no table of digests")
    for made_by, digest in {str(content["script"]): content["script_sha256"], **imported}.items():
        path = (root / made_by).resolve()
        inside = path.is_relative_to(root.resolve()) and path.is_file() and path.suffix == ".py"
        if not inside or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise StaleResult(f"{name} is stale: {made_by} has changed since; measure again")
    return content


def measured(root: Path, name: str, pick: str) -> tuple[float, ...]:
    """The numbers that ``pick`` names in a result: keys with dots between them, ``[NAME]`` for a row by its name.

    A row without one goes by its kernel. A star in NAME stands for anything, and for as many rows as there are.

    Raises StaleResult as ``result``, and if there is no such number.
    """
    places: list[Any] = [result(root, name)]
    for key, row_name in re.findall(r"([^.\[\]]+)|\[([^\]]+)\]", pick):
        try:
            if key:
                places = [place[key] for place in places]
            else:
                rows = [row for place in places for row in place]
                found = [row for row in rows if fnmatch.fnmatchcase(row.get("name") or row["kernel"], row_name)]
                places = found if "*" in row_name else found[:1]
        except (AttributeError, KeyError, TypeError):
            places = []
        if not places:
            raise StaleResult(f"{name} has nothing at {pick}")
    if any(isinstance(place, bool) or not isinstance(place, int | float) for place in places):
        raise StaleResult(f"{name} has no number at {pick}")
    return tuple(map(float, places))
