"""One of two processes that time the collectives which decode context parallelism adds to a layer, and one it shares.

``python -m lab.rig.gpu.collectives nccl|gloo cuda|cpu TIMES RANK``, with MASTER_ADDR and MASTER_PORT set; rank 0 prints
one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

HEADS, SELECTED, HIDDEN = 64, 2048, 6144
ROWS = (1, 6, 8, 32, 192)  # decode, and 32 requests that verify 6 tokens each


def made(rows: int, device: str) -> dict[str, Callable[[], Any]]:
    """The collectives for a step of ``rows`` rows, each as a call."""
    queries = torch.zeros(HEADS // 2, rows, 576, dtype=torch.bfloat16, device=device)
    all_queries = torch.zeros(HEADS, rows, 576, dtype=torch.bfloat16, device=device)
    lse = torch.zeros(rows, HEADS, device=device)
    all_lse = torch.zeros(2 * rows, HEADS, device=device)
    out = torch.zeros(HEADS, rows, 512, device=device)
    own = torch.zeros(HEADS // 2, rows, 512, device=device)
    slots = torch.zeros(rows, SELECTED, dtype=torch.int32, device=device)
    hidden = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
    return {
        "gather queries": lambda: dist.all_gather_into_tensor(all_queries, queries),
        "gather LSE": lambda: dist.all_gather_into_tensor(all_lse, lse),
        "reduce-scatter outputs": lambda: dist.reduce_scatter_tensor(own, out),
        "broadcast selection": lambda: dist.broadcast(slots, 0),
        # Tensor parallelism has it without DCP too, twice a layer: what the others are to be seen beside.
        "all-reduce hidden": lambda: dist.all_reduce(hidden),
    }


def microseconds(call: Callable[[], Any], device: str, times: int) -> float:
    """The median of ``times`` calls; on a GPU by its own clock."""
    for _ in range(3):
        call()
    took: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(times):
        if device == "cuda":
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            took.append(float(begin.elapsed_time(end)) * 1000)
        else:
            began = time.perf_counter()
            call()
            took.append((time.perf_counter() - began) * 1e6)
    return round(sorted(took)[times // 2], 1)


def main() -> None:
    """Join the group, time, print."""
    backend, device, times, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=2)
    found = []
    for rows in ROWS if device == "cuda" else ROWS[:2]:
        row = {name: microseconds(call, device, times) for name, call in made(rows, device).items()}
        found.append({"rows": rows, **row})
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
