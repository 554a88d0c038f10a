"""The tables of docs/topk.md from the results below evidence/topk; --write puts them in the place of the old ones.

It also prints the claims that stand behind the tables of how time grows, for evidence/claims.toml.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/topk.md"
PEERS = ("stock topk_v2", "stock fast_topk", "torch.topk")
KINDS = ("randn", "relu90", "relu999", "off100", "allequal", "ramp1e-13", "bf16q")
WIDTHS = (8192, 16384, 32768, 65536, 81920, 131072, 262144, 524288, 1048576)
# Claims behind the last three tables, by the rows of the result that each picks.
CLAIMS = {
    "topk-by-columns": ("1x* randn", "Time of a call of the exact top-k over one row, by columns"),
    "topk-by-columns-64": ("64x* randn", "Time of a call of the exact top-k over 64 rows, by columns"),
    "topk-by-rows": ("*x32768 randn", "Time of a call of the exact top-k over rows of 32,768 columns"),
    "topk-by-short-rows": ("*x8192 randn", "Time of a call of the exact top-k over rows of 8,192 columns"),
}

Rows = Mapping[str, Mapping[str, Any]]


def table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [
        f"| {' | '.join(f'{cell:g}' if isinstance(cell, float) else str(cell) for cell in row)} |" for row in body
    ]
    return "\n".join(lines)


def times(rows: Rows, reported: Rows) -> str:
    body = []
    for name, row in rows.items():
        if name.endswith(" randn") and "must" in row:
            shape = name.split()[0]
            old = reported[shape]
            figures = [float(row[key]) for key in ("floor_us", "value", "ratio")]
            peers = [float(row["peers_us"][peer]) if peer in row["peers_us"] else "not measured" for peer in PEERS]
            holds = "yes" if row["holds"] else "**no**"
            theirs = [float(old["lowest_us"]), float(old["ascending_us"])]
            body.append([shape, *figures, row["must"], holds, *peers, *theirs])
    heads = ["rows x columns", "read floor", "ours", "of the floor", "must", "holds"]
    heads += [f"`{peer.split()[-1]}`" if peer.startswith("torch") else f"stock `{peer.split()[-1]}`" for peer in PEERS]
    return table([*heads, *(f"best exact, {kind} (*reported*)" for kind in ("lowest index", "ascending"))], body)


def spread(rows: Rows) -> list[str]:
    """The shapes that were measured on every distribution."""
    return [shape for shape in shapes(rows) if all(f"{shape} {kind}" in rows for kind in KINDS)]


def shapes(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name.split()[0] for name in rows))


def distributions(rows: Rows) -> str:
    body = []
    for shape in spread(rows):
        found = [float(rows[f"{shape} {kind}"]["value"]) for kind in KINDS]
        body.append([shape, *found, round(max(found) / found[0], 2)])
    return table(["rows x columns", *KINDS, "worst / randn"], body)


def wrong(rows: Rows) -> str:
    def cell(arm: str, kind: str) -> str:
        held = [rows[f"{shape} {kind}"] for shape in spread(rows)]
        if arm == "exact_topk":
            total = sum(row["wrong_rows"] for row in held)
            return f"{total} / {total}"
        values, sets = (sum(row[key].get(arm, 0) for row in held) for key in ("peers_wrong_values", "peers_other_sets"))
        return f"{values} / {sets}"

    return table(["arm", *KINDS], [[arm, *(cell(arm, kind) for kind in KINDS)] for arm in ("exact_topk", *PEERS)])


def grown(rows: Rows, label: str, names: Sequence[str]) -> list[object]:
    """One line of a table of how time grows; a shape that was not measured leaves its cell empty."""
    found = (rows.get(f"{name} randn") for name in names)
    return [label, *(f"{row['value']:g} ({row['ratio']:g})" if row else "" for row in found)]


def growth(rows: Rows) -> list[str]:
    wide = [
        grown(rows, f"{count} rows, us (of the floor)", [f"{count}x{width}" for width in WIDTHS]) for count in (1, 64)
    ]
    made = [table(["", *map(str, WIDTHS)], wide)]
    for width in (32768, 8192):
        counts = sorted(
            int(shape.split("x")[0])
            for shape in shapes(rows)
            if shape.endswith(f"x{width}") and f"{shape} randn" in rows
        )
        line = grown(rows, f"{width} columns, us (of the floor)", [f"{count}x{width}" for count in counts])
        made.append(table(["", *map(str, counts)], [line]))
    return [text.replace("|  |", "| |", 1) for text in made]


def profile(content: Mapping[str, Any]) -> str:
    """What the profiler told of the shapes that miss their bounds."""
    heads = ["rows x columns, kernel", "time, us", "read / floor's", "written", "of the memory's rate", "warps active"]
    heads += ["instructions", "a clock", "registers"]
    body = []
    for row in content["rows"]:
        for one in row["kernels"]:
            share = round(one["read_mb"] / row["floor"]["read_mb"], 2) if row["floor"]["read_mb"] else "not measured"
            cells = (one[key] for key in ("memory_rate_percent", "occupancy_percent", "instructions"))
            rest = [round(cell) if cell is not None else "not measured" for cell in cells]
            body.append([f"{row['name']} `{one['kernel']}`", one["us"], share, one["written_mb"], *rest])
            body[-1] += [one["instructions_a_clock"], one["registers"]]
    return table(heads, body)


def errors(content: Mapping[str, Any]) -> str:
    """Wrong rows of each arm in the classes where an arm has some, and over all classes."""
    found: dict[str, dict[str, int]] = {}
    for row in content["rows"]:
        arm, kind = row["name"].rsplit(" ", 1)
        found.setdefault(kind, {})[arm] = row["value"]
    arms = ("exact_topk", *PEERS)
    body: list[list[object]] = [
        [f"`{kind}`", *(one[arm] for arm in arms)] for kind, one in found.items() if any(one.values())
    ]
    body.append([f"all {len(found)} classes", *(sum(one[arm] for one in found.values()) for arm in arms)])
    return table(["class of rows", *arms], body)


def broken(content: Mapping[str, Any]) -> str:
    """What was broken in the kernel, and the first test that failed then."""
    rows = content["rows"]
    return table(["broken", "caught by"], [[row["name"], f"`{row['by']}`" if row["by"] else "none"] for row in rows])


def told(file: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "evidence/topk" / file).read_text(encoding="utf-8")))


def by_name(file: str) -> dict[str, Any]:
    return {row["name"]: row for row in told(file)["rows"]}


def tables() -> list[str]:
    """Those of the page, in its order."""
    rows = by_name("speed.json")
    made = [times(rows, by_name("reported.json")), distributions(rows), wrong(rows), *growth(rows)]
    return [*made, profile(told("profile.json")), errors(told("stock.json")), broken(told("mutations.json"))]


def replaced(text: str, made: Sequence[str]) -> str:
    """The page with its first tables replaced, each a run of lines that begin with a bar."""
    out: list[str] = []
    left, inside, skipping = list(made), False, False
    for line in text.splitlines():
        begins = line.startswith("|") and not inside
        inside = line.startswith("|")
        if begins and left:
            out += left.pop(0).splitlines()
            skipping = True
        elif not inside:
            skipping = False
        if not inside or not skipping:
            out.append(line)
    return "\n".join(out) + "\n"


def claims(content: Mapping[str, Any]) -> str:
    """The claims of how time grows, each with its values in the order of the result."""
    made = []
    for name, (pick, statement) in CLAIMS.items():
        first, last = pick.split("*")
        found = [
            row["value"] for row in content["rows"] if row["name"].startswith(first) and row["name"].endswith(last)
        ]
        lines = [f'id = "{name}"', f'statement = "{statement}"', f"value = {found}", 'unit = "us"', 'kind = "measured"']
        lines += [
            'result = "evidence/topk/speed.json"',
            f'pick = "rows[{pick}].value"',
            f"date = {content.get('date')}",
        ]
        made.append("\n".join(["[[claim]]", *lines]))
    return "\n\n".join(made)


@click.command()
@click.option("--write", is_flag=True, help="Put the tables into docs/topk.md.")
def main(write: bool) -> None:
    """Print the tables of docs/topk.md."""
    made = tables()
    if write:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        click.echo("\n\n".join(made))
    click.echo("\n" + claims(told("speed.json")))


if __name__ == "__main__":
    main()
