"""A small round through every path of the kernel, for compute-sanitizer."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from tests.device.topk_data import make
from tests.device.tree import install
from tests.engine.decode import topk_oracle as oracle


def main() -> None:
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
                scores = torch.from_numpy(make(kind, rows, width, 1)).cuda()
                lengths = torch.tensor([(width - 3, 0, 2417)[i % 3] for i in range(rows)], dtype=torch.int32).cuda()
                starts = torch.tensor([(3, 1, 2)[i % 3] for i in range(rows)], dtype=torch.int32).cuda()
                out = kernel.select(scores, lengths, 2048, starts=starts, path=path, split=split, sample_rank=rank)
                wanted = oracle.expected(scores.cpu().numpy(), lengths.tolist(), 2048, starts.tolist())
                if not (out.cpu().numpy() == wanted).all():
                    sys.exit(f"{kind} {path} {width} {split} {rank}: wrong")
    sys.stdout.write("all right\n")


if __name__ == "__main__":
    main()
