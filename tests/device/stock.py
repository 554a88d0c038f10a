"""Count the rows that the stock selections get wrong beside ours, class by class, on one GPU; --json writes them.

``python -m tests.device.stock --stock-aot FILE --stock-v2 FILE``: the libraries are those of ``benchmarks.topk``. A row
is wrong if its values are not the oracle's: ties may be broken in any way. Classes with NaN are left out, since the
stock kernels promise no place for it. What is known is written after each class, should a kernel bring the card down.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.topk import K, Peer, stock_aot, stock_v2, torch_topk, wrong_rows
from lab import provenance
from tests.device.topk_data import KINDS, make, of_the_kernel
from tests.device.tree import install
from tests.engine.decode import topk_oracle as oracle

SEED = 11
SHAPES = ((40, 8192), (12, 32768), (6, 131072))


def count(arms: dict[str, Peer], kind: str, shape: tuple[int, int]) -> dict[str, int]:
    """Wrong rows of each arm."""
    rows, width = shape
    scores = make(kind, rows, width, SEED)
    wanted = oracle.expected(scores, [width] * rows, K)
    device = torch.from_numpy(scores).cuda()
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    found = {}
    for name, arm in arms.items():
        out = torch.full((rows, K), -7, dtype=torch.int32, device="cuda")
        arm(device, lengths, out)()
        torch.cuda.synchronize()
        # Of ours every index counts, in its place.
        found[name] = wrong_rows(out, scores, wanted, name == "exact_topk")[1 if name == "exact_topk" else 0]
    return found


def main() -> int:
    """Give 1 if ours has a wrong row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock-aot", type=Path, metavar="FILE", required=True)
    parser.add_argument("--stock-v2", type=Path, metavar="FILE", required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        kernel = install(Path(folder))
        kernel.prepare("cuda:0")
        arms: dict[str, Peer] = {
            "exact_topk": lambda scores, lengths, out: lambda: kernel.select(scores, lengths, K, out=out),
            "stock fast_topk": stock_aot(options.stock_aot),
            "stock topk_v2": stock_v2(options.stock_v2),
            "torch.topk": torch_topk,
        }
        head = {**provenance.of(__file__, SEED), **of_the_kernel()}
        for kind in KINDS:
            if np.isnan(make(kind, 8, 4096, SEED)).any():
                continue
            total = dict.fromkeys(arms, 0)
            for shape in SHAPES:
                for name, wrong in count(arms, kind, shape).items():
                    total[name] += wrong
            for name, wrong in total.items():
                ours = name == "exact_topk"
                row = {"name": f"{name} {kind}", "value": wrong, "unit": "wrong rows", "must": "== 0" if ours else None}
                rows.append({**row, "holds": wrong == 0 if ours else None, "of": sum(count for count, _ in SHAPES)})
            sys.stdout.write(f"{kind:<24}{total}\n")
            sys.stdout.flush()
            if options.json:
                options.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["holds"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
