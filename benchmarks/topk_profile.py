"""Ask the profiler why the exact top-k misses its bounds: bytes, passes, occupancy and instructions of each kernel.

``python -m benchmarks.topk_profile --json FILE`` on a machine with an H200 and Nsight Compute (``ncu``). It starts
itself under the profiler once for all shapes. A pass that only reads stands before each shape: its bytes are the fewest
there are, and it parts the kernels of one shape from those of the next. Under the profiler kernels run one after the
other from a cold cache, so what a graph hides, a second kernel that is set up while the first still runs, shows in
full. Where ncu cannot read the card's counters, the result says so and holds no rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.topk import Floor, K, scores_of
from lab import provenance
from tests.device.topk_data import of_the_kernel
from tests.device.tree import REPOSITORY, install

SEED = 17
SHAPES = ((1, 32768), (1, 131072), (6, 81920), (16, 131072), (64, 81920), (256, 32768))
FLOOR = "read_all"
NAMES = (FLOOR, "resident_rows", "stream_rows", "filter_rows", "finish_rows")
# What stands in a row: its name here, the profiler's, and what to divide by.
METRICS = {
    "us": ("gpu__time_duration.sum", 1e3),
    "read_mb": ("dram__bytes_read.sum", 1e6),
    "written_mb": ("dram__bytes_write.sum", 1e6),
    "memory_rate_percent": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "instructions": ("smsp__inst_executed.sum", 1),
    "instructions_a_clock": ("sm__inst_executed.avg.per_cycle_active", 1),
    "processors_busy_percent": ("sm__cycles_active.avg.pct_of_peak_sustained_elapsed", 1),
    "registers": ("launch__registers_per_thread", 1),
}


def launch() -> None:
    """What the profiler watches: for each shape the floor, then one call."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = install(Path(folder))
        kernel.prepare("cuda:0")
        floor = Floor(sys.modules[kernel.__name__.rpartition(".")[0] + ".build"])
        for rows, width in SHAPES:
            scores = scores_of("randn", rows, width, SEED)
            lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
            out = torch.empty((rows, K), dtype=torch.int32, device="cuda")
            torch.cuda.synchronize()
            floor(scores, 528)
            kernel.select(scores, lengths, K, out=out)
            torch.cuda.synchronize()


def number(text: str) -> float | None:
    """A cell's number; None where the profiler has none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def kernels(lines: Iterable[str]) -> list[dict[str, Any]]:
    """One entry for each launch in the profiler's raw table: a line of names, one of units, then the launches.

    Raises:
        ValueError: there is no such table; the message is what the profiler said instead.
    """
    held = [line for line in lines if line.strip()]
    begin = next((at for at, line in enumerate(held) if line.startswith('"ID"')), None)
    if begin is None:
        raise ValueError(" ".join(line.strip() for line in held)[-1000:] or "it said nothing")
    found = []
    for entry in list(csv.DictReader(line for line in held[begin:] if line.startswith('"')))[1:]:
        shown = entry["Kernel Name"]
        one: dict[str, Any] = {"kernel": next((name for name in NAMES if name in shown), shown[:80])}
        one |= {"grid": entry["Grid Size"], "block": entry["Block Size"]}
        for name, (metric, by) in METRICS.items():
            value = number(entry.get(metric, ""))
            one[name] = None if value is None else round(value / by, 4)
        found.append(one)
    return found


def shapes(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The launches by shape: a row for the whole call and what each kernel did.

    Raises:
        ValueError: the launches are not those that :func:`launch` makes.
    """
    groups: list[list[dict[str, Any]]] = []
    for one in found:
        if one["kernel"] == FLOOR:
            groups.append([one])
        elif groups:
            groups[-1].append(one)
    if len(groups) != len(SHAPES) or any(len(group) < 2 for group in groups):
        raise ValueError(
            f"{[len(group) for group in groups]} launches for {len(SHAPES)} shapes, expected 2 or more each"
        )
    rows = []
    for (count, width), (floor, *own) in zip(SHAPES, groups, strict=True):
        took = [one["us"] for one in own]
        row = {"name": f"{count}x{width}", "value": None if None in took else round(sum(took), 3), "unit": "us"}
        rows.append({**row, "must": None, "holds": None, "passes": len(own), "floor": floor, "kernels": own})
    return rows


def profile(ncu: str) -> list[dict[str, Any]]:
    """Run this script under the profiler.

    Raises:
        ValueError: the profiler brought no numbers; the message says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--log-file", log]
        command += ["--target-processes", "all", "--metrics", ",".join(metric for metric, _ in METRICS.values())]
        command += ["--kernel-name", f"regex:{'|'.join(NAMES)}"]
        command += [sys.executable, "-m", "benchmarks.topk_profile", "--launch"]
        done = subprocess.run(
            [str(part) for part in command], cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
        )
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        found = kernels((text or done.stdout + done.stderr).splitlines())
    if all(one["read_mb"] is None for one in found):
        raise ValueError("it timed the kernels and could not read the card's counters")
    return shapes(found)


def main() -> int:
    """Give 1 if there are no numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch()
        return 0
    report: dict[str, Any] = {**provenance.of(__file__, SEED), **of_the_kernel(), "rows": []}
    ncu = shutil.which("ncu")
    try:
        if ncu is None:
            raise ValueError("there is no ncu on the path")
        report["rows"] = profile(ncu)
    except (ValueError, subprocess.TimeoutExpired) as error:
        report["not_measured"] = f"ncu brought no numbers: {error}"
        print(report["not_measured"], file=sys.stderr)
    for row in report["rows"]:
        print(f"{row['name']:<12}{row['value']} us in {row['passes']} passes; the floor {row['floor']}")
        for one in row["kernels"]:
            print(f"  {one}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["rows"] else 1


if __name__ == "__main__":
    sys.exit(main())
