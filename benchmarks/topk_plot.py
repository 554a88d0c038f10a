"""Draw docs/topk.svg from evidence/topk: time and ratio to the read floor of each shape, ours against the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import picture

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "evidence" / "topk"
PICTURE = ROOT / "docs" / "topk.svg"


def series() -> tuple[list[str], dict[str, list[float | None]]]:
    """Shapes with a bound, and the microseconds of every arm on each of them; None where there is no figure."""
    rows = [row for row in json.loads((EVIDENCE / "speed.json").read_text())["rows"] if row["name"].endswith(" randn")]
    rows = [row for row in rows if "must" in row]
    reported = {row["name"]: row for row in json.loads((EVIDENCE / "reported.json").read_text())["rows"]}
    shapes = [row["name"].split()[0] for row in rows]
    lines: dict[str, list[float | None]] = {
        "read floor": [row["floor_us"] for row in rows],
        "exact_topk (ours)": [row["value"] for row in rows],
        "bound": [row["must"] for row in rows],
        "stock topk_v2 (not exact)": [row["peers_us"].get("stock topk_v2") for row in rows],
        "stock fast_topk (not exact)": [row["peers_us"].get("stock fast_topk") for row in rows],
        "torch.topk (any tie)": [row["peers_us"].get("torch.topk") for row in rows],
        "best exact, lowest index (reported)": [reported[shape]["lowest_us"] for shape in shapes],
        "best exact, ascending (reported)": [reported[shape]["ascending_us"] for shape in shapes],
    }
    return shapes, lines


def draw(path: Path) -> None:
    """Write the picture; equal evidence gives equal bytes with one version of matplotlib."""
    pyplot = picture.begin("topk")
    shapes, lines = series()
    figure, axes = pyplot.subplots(2, 1, figsize=(10, 9), sharex=True)
    floor = lines["read floor"]
    at = range(len(shapes))
    for place, (name, values) in enumerate(lines.items()):
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1, "label": name, "color": f"C{place}"}
        if "ours" in name:
            style.update(linewidth=2.5, color="black")
        elif name == "bound":
            style.update(linestyle="none", marker="_", markersize=16, color="red")
        elif "reported" in name:
            style.update(linestyle=":")
        axes[0].plot(at, [v if v is not None else float("nan") for v in values], **style)
        if name != "read floor":
            ratios = [v / f if v is not None and f else float("nan") for v, f in zip(values, floor, strict=True)]
            axes[1].plot(at, ratios, **style)
    for axis, label in zip(axes, ("microseconds", "times the read floor"), strict=True):
        axis.set_yscale("log")
        axis.set_ylabel(label)
        axis.grid(visible=True, which="both", alpha=0.25)
    axes[0].legend(fontsize=8)
    axes[1].set_xticks(list(at), shapes, rotation=40, ha="right")
    axes[1].set_xlabel("rows x columns, float32, k = 2048, one NVIDIA H200, cold L2")
    picture.write(figure, path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
