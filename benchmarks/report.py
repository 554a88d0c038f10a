"""What every benchmark prints: a table, or with --json the same rows."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import click


@dataclass(frozen=True)
class Row:
    """One figure. ``must`` is its bound ("<= 0.5"), or None where nothing is promised."""

    name: str
    value: float
    unit: str
    must: str | None = None

    @property
    def holds(self) -> bool | None:
        if self.must is None:
            return None
        sign, bound = self.must.split()
        return bool({"<=": operator.le, ">=": operator.ge, "==": operator.eq}[sign](self.value, float(bound)))


def show(rows: list[Row], as_json: bool, head: Mapping[str, Any] | None = None) -> None:
    """Print the rows, with --json below what ``lab.provenance`` says of the run; exit code 1 if one does not hold."""
    if as_json:
        result = {**(head or {}), "rows": [asdict(row) | {"holds": row.holds} for row in rows]}
        click.echo(json.dumps(result, indent=1))
    else:
        width = max(len(row.name) for row in rows)
        for row in rows:
            verdict = "" if row.must is None else f"  must {row.must}: {'holds' if row.holds else 'DOES NOT HOLD'}"
            click.echo(f"{row.name:<{width}}  {row.value:10.3f} {row.unit}{verdict}")
    if any(row.holds is False for row in rows):
        raise SystemExit(1)
