"""Draw what ``benchmarks/boundary.py`` measured: ``python -m benchmarks.boundary_plot FILE.json`` writes FILE.svg."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import picture


def draw(result: Path, path: Path) -> None:
    """Write the picture of ``result``: a bar for each time, its spread, and the bandwidth of what sends."""
    found = json.loads(result.read_text(encoding="utf-8"))
    rows = [row for row in found["rows"] if row["unit"] == "us"]
    pyplot = picture.begin("boundary")
    figure, axis = pyplot.subplots(figsize=(10, 7))
    times = [row["value"] for row in rows]
    spread = [[row["value"] - row["min_us"] for row in rows], [row["max_us"] - row["value"] for row in rows]]
    colors = ["C1" if row["name"].startswith(("boundary", "sends")) else "C0" for row in rows]
    axis.barh(range(len(rows)), times, xerr=spread, color=colors, capsize=2)
    for place, row in enumerate(rows):
        rate = f", {row['gb_per_s']:.0f} GB/s" if row.get("gb_per_s") else ""
        axis.text(row["max_us"] * 1.03, place, f"{row['value']:,.0f} us{rate}", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(right=max(times) * 5)
    gpus = found["machine"].get("gpus", ["CPU"])
    axis.set_xlabel(f"microseconds, median, least and most; {len(gpus)} x {gpus[0]}")
    axis.grid(visible=True, axis="x", alpha=0.25)
    picture.write(figure, path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[1]).with_suffix(".svg"))
