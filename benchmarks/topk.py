"""Time the exact top-k on this machine's GPU against a pass that only reads, and check what is timed.

Cold: graphs of calls over rotating buffers that together exceed the L2 cache, after a large read; the arms of a shape
take turns within each repeat; the median counts. Every figure includes the gap between two graph nodes.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.device.tree import REPOSITORY, install
from tests.engine.decode import topk_oracle as oracle

K = 2048
# rows, width: the most microseconds allowed ("must")
MUST = {
    (1, 8192): 5, (1, 32768): 9, (1, 131072): 11, (6, 81920): 11, (16, 131072): 14, (64, 81920): 20, (64, 131072): 27,
    (256, 32768): 22, (256, 131072): 60, (384, 81920): 58, (64, 1 << 20): 120, (2048, 8192): 50, (8192, 8192): 190,
    (8192, 81920): 1150,
}  # fmt: skip
SPREAD = ((1, 131072), (6, 81920), (64, 131072), (256, 131072), (2048, 8192))
DISTRIBUTIONS = ("randn", "relu90", "relu999", "off100", "allequal", "ramp1e-13", "bf16q")
FLUSH_BYTES = 512 << 20


def scores_of(kind: str, rows: int, width: int, seed: int) -> torch.Tensor:
    """Float32 ``[rows, width]`` on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.empty((rows, width), device="cuda")
    if kind == "allequal":
        return made.fill_(1.25)
    if kind == "ramp1e-13":
        return made.copy_(torch.arange(width, device="cuda", dtype=torch.float32) * 1e-13)
    made.normal_(generator=generator)
    if kind == "off100":
        made += 100
    if kind == "bf16q":
        made = made.bfloat16().float()
    if kind.startswith("relu"):
        share = {"relu90": 0.9, "relu999": 0.999}[kind]
        made = made.abs_() * (torch.rand(made.shape, generator=generator, device="cuda") >= share)
    return made


class Floor:
    """A pass that reads everything once."""

    def __init__(self, build: Any) -> None:
        source = Path(__file__).with_name("topk_floor.cu")
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        self.library = build.library(source, digest, torch.cuda.get_device_capability())
        self.library.topk_floor_launch.argtypes = (
            ctypes.c_void_p, ctypes.c_longlong, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p,
        )  # fmt: skip
        self.out = torch.zeros(4, device="cuda")

    def __call__(self, scores: torch.Tensor, blocks: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        error = self.library.topk_floor_launch(
            scores.data_ptr(), scores.numel() // 4, self.out.data_ptr(), blocks, stream
        )
        assert error == 0, error


def graph_of(call: Callable[[int], None], nodes: int) -> torch.cuda.CUDAGraph:
    """Capture ``nodes`` calls in a row."""
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(nodes):
            call(i)
    return graph


def timed(
    arms: dict[str, torch.cuda.CUDAGraph], nodes: int, flush: torch.Tensor, repeats: int
) -> dict[str, list[float]]:
    """Microseconds of one call for every repeat of every arm, the arms shuffled within each repeat."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    order, shuffle = list(arms), random.Random(1)
    cuda: Any = torch.cuda  # its events are not typed
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    for _ in range(repeats):
        shuffle.shuffle(order)
        for name in order:
            flush.amax()
            begin.record()
            arms[name].replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) * 1000 / nodes)
    return found


def errors(kernel_out: torch.Tensor, scores: torch.Tensor) -> int:
    """Wrong rows among the first 48."""
    checked = min(48, scores.shape[0])
    wanted = oracle.expected(scores[:checked].cpu().numpy(), [scores.shape[1]] * checked, K)
    return int((kernel_out[:checked].cpu().numpy() != wanted).any(axis=1).sum())


def measure(kernel: Any, floor: Floor, rows: int, width: int, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """All arms of one shape and distribution."""
    size = rows * width * 4
    buffers = max(2, min(64, -(-(200 << 20) // size)))
    if size > 1 << 30:
        buffers = 1
    inputs = [scores_of(kind, rows, width, 17 + i) for i in range(buffers)]
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    outs = [torch.empty((rows, K), dtype=torch.int32, device="cuda") for _ in range(buffers)]
    nodes = 1 if size > 1 << 30 else 24 if size < 1 << 28 else 6
    arms: dict[str, torch.cuda.CUDAGraph] = {}

    def ours(i: int, **given: Any) -> None:
        kernel.select(inputs[i % buffers], lengths, K, out=outs[i % buffers], **given)

    arms["exact_topk"] = graph_of(ours, nodes)
    wrong = errors(outs[0], inputs[0])
    if not options.quick:
        for blocks in (132, 264, 528, 1056):
            arms[f"floor {blocks}"] = graph_of(lambda i, b=blocks: floor(inputs[i % buffers], b), nodes)  # type: ignore[misc]
    for variant in options.variant:
        name, _, text = variant.partition(":")
        given = json.loads(text)
        if rows * width > 1 << 29 and given.get("path") == "split":
            continue
        arms[name] = graph_of(lambda i, g=given: ours(i, **g), nodes)  # type: ignore[misc]
    if options.torch and rows * width < 1 << 28:
        arms["torch.topk"] = graph_of(lambda i: torch.topk(inputs[i % buffers], K, sorted=False) and None, nodes)
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    found = timed(arms, nodes, flush, 3 if size > 1 << 30 else options.repeats)
    medians = {name: round(statistics.median(values), 2) for name, values in found.items()}
    floors = [value for name, value in medians.items() if name.startswith("floor")]
    row: dict[str, Any] = {
        "name": f"{rows}x{width} {kind}", "value": medians["exact_topk"], "unit": "us",
        "min_us": round(min(found["exact_topk"]), 2), "max_us": round(max(found["exact_topk"]), 2),
        "wrong_rows": wrong, "checked_rows": min(48, rows), "buffers": buffers, "nodes": nodes,
    }  # fmt: skip
    if floors:
        row["floor_us"] = min(floors)
        row["ratio"] = round(row["value"] / row["floor_us"], 2)
    row["others_us"] = {n: v for n, v in medians.items() if n != "exact_topk" and not n.startswith("floor")}
    if kind == "randn" and (rows, width) in MUST:
        row["must"] = MUST[rows, width]
        row["holds"] = row["value"] <= row["must"]
    return row


def main(arguments: list[str] | None = None) -> int:
    """Print a table; with --json also write everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="no floor, no spread")
    parser.add_argument("--torch", action="store_true", help="also torch.topk (exact values, ties unspecified)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--shapes", nargs="*", help="ROWSxWIDTH")
    parser.add_argument("--variant", nargs="*", default=[], help='NAME:{"path": ...}, further arms of our kernel')
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        kernel = install(Path(folder))
        kernel.prepare("cuda:0")
        floor = Floor(sys.modules[kernel.__name__.rpartition(".")[0] + ".build"])
        shapes = list(MUST)
        if options.shapes:
            shapes = [(int(rows), int(width)) for rows, _, width in (text.partition("x") for text in options.shapes)]
        tasks = [(rows, width, "randn") for rows, width in shapes]
        if not options.quick:
            tasks += [(*shape, kind) for shape in shapes if shape in SPREAD for kind in DISTRIBUTIONS[1:]]
        rows_found = []
        for rows, width, kind in tasks:
            row = measure(kernel, floor, rows, width, kind, options)
            rows_found.append(row)
            holds = {True: "holds", False: "MISSED", None: ""}[row.get("holds")]
            print(
                f"{rows:>5}x{width:<8}{kind:<10}{row['value']:>9.2f} us  floor {row.get('floor_us', 0):>7.2f}  "
                f"x{row.get('ratio', 0):<5} must {row.get('must', '-'):>5} {holds:<7} wrong {row['wrong_rows']}  "
                f"{row['others_us'] or ''}",
                flush=True,
            )
            torch.cuda.empty_cache()
        if options.json:
            card = torch.cuda.get_device_properties(0)
            clocks = subprocess.run(
                ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,driver_version", "--format=csv,noheader"],
                capture_output=True, text=True, check=False,
            ).stdout.strip()  # fmt: skip
            report = {
                "script": "benchmarks/topk.py", "card": card.name, "processors": card.multi_processor_count,
                "torch": torch.__version__, "clocks_and_driver": clocks, "source_sha256": kernel.SOURCE_SHA256,
                "k": K, "seed": 17, "cache": "cold", "rows": rows_found,
            }  # fmt: skip
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(row["wrong_rows"] for row in rows_found) else 0


if __name__ == "__main__":
    assert REPOSITORY.is_dir()
    sys.exit(main())
