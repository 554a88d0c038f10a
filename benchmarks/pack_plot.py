"""Draw what ``benchmarks/bounded_pack.py`` measured: ``python -m benchmarks.pack_plot FILE.json`` writes FILE.svg."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import picture

PARTS = ("wait", "gather", "send", "rest")


def draw(result: Path, path: Path) -> None:
    """Write the picture of ``result``: a bar for each cell and arm, of the medians of a transfer's parts."""
    found = json.loads(result.read_text(encoding="utf-8"))
    values = {row["name"]: row["value"] for row in found["rows"]}
    bars = [name.removesuffix(": transfer p50") for name in values if name.endswith(": transfer p50")]
    pyplot = picture.begin("bounded-pack")
    figure, axis = pyplot.subplots(figsize=(10, 6))
    ends = [0.0] * len(bars)
    for number, part in enumerate(PARTS):
        widths = [values[f"{bar}: {part}"] for bar in bars]
        axis.barh(range(len(bars)), widths, left=ends, color=f"C{number}", label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, (bar, end) in enumerate(zip(bars, ends, strict=True)):
        count = f"{values[f'{bar}: descriptors']:,.0f} descriptors"
        axis.text(end + 1, place, f"p50 {values[f'{bar}: transfer p50']:.1f} ms, {count}", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), bars)
    axis.invert_yaxis()
    axis.set_xlim(right=max(ends) * 1.4)
    axis.set_xlabel(f"milliseconds, medians of each part, n = {found['pairs']}; {found['label']}")
    axis.legend(loc="lower right")
    axis.grid(visible=True, axis="x", alpha=0.25)
    picture.write(figure, path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[1]).with_suffix(".svg"))
