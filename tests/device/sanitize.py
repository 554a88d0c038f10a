"""A small round through every path of the kernel, under each tool of compute-sanitizer; --json writes it."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from lab import provenance
from tests.device.topk_data import make, of_the_kernel
from tests.device.tree import REPOSITORY, install
from tests.engine.decode import topk_oracle as oracle

MODULE = "tests.device.sanitize"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SEED = 1
RIGHT = "all right"
SECONDS = 280


def round_through() -> None:
    """Run and compare; exits with 1 at the first wrong row."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = install(Path(folder))
        kernel.prepare("cuda:0")
        for kind in ("randn", "zeros_0.99", "bf16_quantised"):
            for path, width, split, rank, rows in (
                ("resident", 5001, 0, 0, 3),
                ("resident", 9001, 0, 0, 3),
                ("resident", 2501, 0, 0, 135),
                ("resident", 8201, 0, 0, 135),
                ("stream", 9001, 0, 0, 3),
                ("stream", 9001, 0, 1, 3),
                ("stream", 33801, 0, 0, 3),
                ("stream", 33801, 0, 8192, 3),
                ("split", 9001, 3, 0, 3),
                ("split", 34001, 2, 8192, 3),
            ):
                scores = torch.from_numpy(make(kind, rows, width, SEED)).cuda()
                lengths = torch.tensor([(width - 3, 0, 2417)[i % 3] for i in range(rows)], dtype=torch.int32).cuda()
                starts = torch.tensor([(3, 1, 2)[i % 3] for i in range(rows)], dtype=torch.int32).cuda()
                out = kernel.select(scores, lengths, 2048, starts=starts, path=path, split=split, sample_rank=rank)
                wanted = oracle.expected(scores.cpu().numpy(), lengths.tolist(), 2048, starts.tolist())
                if not (out.cpu().numpy() == wanted).all():
                    sys.exit(f"{kind} {path} {width} {split} {rank}: wrong")
    sys.stdout.write(f"{RIGHT}\n")


def verdict(tool: str, code: int, text: str) -> dict[str, Any]:
    """One row: the errors that the tool counted, None where it told no number."""
    told = [line for line in text.splitlines() if "SUMMARY" in line]
    number = re.search(r"SUMMARY: (\d+) (?:error|hazard)", told[-1]) if told else None
    errors = int(number.group(1)) if number else None
    row = {"name": tool, "value": errors, "unit": "errors", "must": "== 0"}
    row["holds"] = errors == 0 and code == 0 and RIGHT in text
    row["told"] = told[-1].strip("= ") if told else text[-1500:]
    return row


def under_all() -> list[dict[str, Any]]:
    """The round under every tool at once, one process each."""
    running = {}
    for tool in TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", MODULE]
        running[tool] = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    rows = []
    for tool, process in running.items():
        try:
            text = process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = f"{tool} was not done after the time that it is given\n{process.communicate()[0]}"
        rows.append(verdict(tool, process.returncode, text))
    return rows


def main() -> int:
    """Without arguments the round itself, which a tool watches; with --json the round under every tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.json is None:
        round_through()
        return 0
    rows = under_all()
    for row in rows:
        sys.stdout.write(f"{'holds' if row['holds'] else 'DOES NOT HOLD':<14}{row['name']:<10}{row['told']}\n")
    head = {**provenance.of(__file__, SEED), **of_the_kernel()}
    options.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
