"""The one table that a run prints."""

from __future__ import annotations

from collections.abc import Sequence

from lab.rig.runner import Report


def number(value: float | None) -> str:
    """A measured number as short as it can be, or a dash."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}"


def lines(reports: Sequence[Report]) -> list[str]:
    """The table's lines, in the reports' order; widths fit the content."""
    rows = [("boot", "scenario", "must hold", "measured", "")]
    for report in reports:
        for line in report.lines:
            mark = "ok" if line.holds else "FAIL" + (f" ({line.note})" if line.note else "")
            rows.append((report.boot, line.scenario, line.hold, number(line.measured), mark))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    made = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
        made.append("  ".join([*cells, row[4]]).rstrip())
    for report in reports:
        made.append(
            f"{report.boot}: ready after {report.start_s:.0f} s, ran {report.run_s:.0f} s, "
            f"{report.memory >> 20} MiB at most"
        )
    return made


_COLUMNS = (
    ("send", "send"),
    ("request", "request"),
    ("prompt", "prompt"),
    ("P hit", "p_hit"),
    ("D hit", "d_hit"),
    ("KV bytes", "kv_bytes"),
    ("index bytes", "index_bytes"),
    ("tokens", "tokens"),
    ("accept", "accept"),
    ("retracted", "retractions"),
)


def requests(reports: Sequence[Report]) -> list[str]:
    """One line a request: what was found in the caches, and what was sent for it; a dash for what was not seen."""
    cells = [("scenario", *(head for head, _ in _COLUMNS))]
    for report in reports:
        for scenario, rows in report.rows.items():
            for row in rows:
                found = [row[key] for _, key in _COLUMNS]
                cells.append((scenario, *("-" if value is None else str(value) for value in found)))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
