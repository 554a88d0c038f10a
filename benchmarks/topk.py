"""Time the exact top-k on this machine's GPU against a pass that only reads and against others, and check them all.

Cold: graphs of calls over rotating buffers that together exceed the L2 cache, after a large read; the arms of a shape
take turns within each repeat; the median counts. Every figure includes the gap between two graph nodes. Each arm's rows
are compared with the oracle before it is timed; a peer's wrong rows are counted, one of ours fails the run.

The stock kernels are not part of this repository. --stock-aot names ``sgl_kernel/sm90/common_ops.abi3.so`` of the wheel
sglang-kernel 0.4.5; --stock-v2 a library that exports ``topk_transform`` and ``topk_plan`` from the engine's own
``deepseek_v4/topk_v2.cuh`` (it needs the package apache-tvm-ffi). Figures of exact peers that were measured elsewhere
stand in topk_reported.json and are marked so wherever they are shown.
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

import numpy as np
import torch

from lab import provenance
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
GROWTH = (
    *((rows, 32768) for rows in (4, 16, 64, 1024, 4096)),
    *((64, width) for width in (8192, 16384, 262144, 524288)),
    *((1, width) for width in (16384, 65536, 262144, 1 << 20)),
)  # rows, width: how time grows
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


def wrong_rows(out: torch.Tensor, scores: Any, wanted: Any, ordered: bool) -> tuple[int, int]:
    """Rows among the checked ones that do not hold the oracle's values, and that are not the oracle's.

    The latter byte for byte where the arm promises an order, else as sets.
    """
    got = out[: len(wanted)].cpu().numpy()
    if not ordered:
        got, wanted = np.sort(got, axis=1), np.sort(wanted, axis=1)
    other = (got != wanted).any(axis=1)
    rows = np.arange(len(wanted))[:, None]
    values = [np.sort(scores[rows, np.clip(columns, 0, scores.shape[1] - 1)], axis=1) for columns in (got, wanted)]
    broken = (got < 0) | (got >= scores.shape[1])
    broken[:, 1:] |= got[:, 1:] == got[:, :-1]
    wrong = (values[0] != values[1]).any(axis=1) | broken.any(axis=1)
    return int((wrong & other).sum()), int(other.sum())


Call = Callable[[], None]
Peer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Call]


def torch_topk(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> Call:
    """Exact values, ties unspecified, 64-bit indices; the copy to ``out`` is not timed by a graph that lacks it."""
    values = torch.empty(out.shape, device="cuda")
    found = torch.empty(out.shape, dtype=torch.int64, device="cuda")

    def call() -> None:
        torch.topk(scores, K, dim=-1, sorted=False, out=(values, found))

    call()
    out.copy_(found)
    return call


def stock_aot(path: Path) -> Peer:
    """``fast_topk`` of the published kernel wheel: 4096 candidates, the rest dropped."""
    for name in ("libcudart.so.13", "libnvrtc.so.13", "libcublasLt.so.13", "libcublas.so.13"):  # it names no folder
        found = (hit for folder in sys.path for hit in Path(folder).glob(f"nvidia/*/lib/{name}"))
        if library := next(found, None):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    load: Any = torch.ops.load_library
    load(str(path))

    def make(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> Call:
        return lambda: torch.ops.sgl_kernel.fast_topk(scores, out, lengths, None)

    return make


def stock_v2(path: Path) -> Peer:
    """The engine's JIT kernel, paged output of an identity table: 2048 candidates, the rest dropped."""
    import tvm_ffi  # type: ignore[import-not-found,unused-ignore]

    module = tvm_ffi.load_module(str(path))
    page = 64

    def make(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> Call:
        rows, width = scores.shape
        table = torch.arange(width // page, dtype=torch.int32, device="cuda").repeat(rows, 1).contiguous()
        plan = torch.empty((rows + 1, 2), dtype=torch.int32, device="cuda")
        kept = (scores, lengths, table, out, plan)
        given = [tvm_ffi.from_dlpack(tensor) for tensor in kept]
        device = tvm_ffi.device("cuda:0")

        def run(name: str, *arguments: Any) -> None:
            with tvm_ffi.use_raw_stream(device, torch.cuda.current_stream().cuda_stream):
                getattr(module, name)(*arguments)

        run("topk_plan", given[1], given[4], 0)  # once for a step of the engine: not timed

        def call(held: Any = kept) -> None:
            run("topk_transform", *given[:4], page, given[4], None)

        return call

    return make


def measure(
    kernel: Any, floor: Floor, rows: int, width: int, kind: str, peers: dict[str, Peer], options: argparse.Namespace
) -> dict[str, Any]:
    """All arms of one shape and distribution."""
    size = rows * width * 4
    buffers = 1 if size > 1 << 30 else max(2, min(64, -(-(200 << 20) // size)))
    inputs = [scores_of(kind, rows, width, 17 + i) for i in range(buffers)]
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    nodes = 1 if size > 1 << 30 else 64 if size < 1 << 26 else 20 if size < 1 << 28 else 6
    checked = min(48, rows)
    host = inputs[0][:checked].cpu().numpy()
    wanted = oracle.expected(host, [width] * checked, K)
    arms: dict[str, torch.cuda.CUDAGraph] = {}
    errors: dict[str, tuple[int, int]] = {}
    keep: list[Any] = []

    def ours(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> Call:
        return lambda: kernel.select(scores, lengths, K, out=out)

    for name, make in {"exact_topk": ours, **peers}.items():
        if name == "torch.topk" and rows * width > 1 << 28:
            continue
        outs = [torch.full((rows, K), -7, dtype=torch.int32, device="cuda") for _ in range(buffers)]
        calls = [make(scores, lengths, out) for scores, out in zip(inputs, outs, strict=True)]
        calls[0]()
        torch.cuda.synchronize()
        errors[name] = wrong_rows(outs[0], host, wanted, name == "exact_topk")
        arms[name] = graph_of(lambda i, of=calls: of[i % buffers](), nodes)  # type: ignore[misc]
        keep.append((outs, calls))
    for blocks in (132, 264, 528, 1056):
        arms[f"floor {blocks}"] = graph_of(lambda i, b=blocks: floor(inputs[i % buffers], b), nodes)  # type: ignore[misc]
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    found = timed(arms, nodes, flush, 3 if size > 1 << 30 else options.repeats)
    medians = {name: round(statistics.median(values), 2) for name, values in found.items()}
    lowest = min(value for name, value in medians.items() if name.startswith("floor"))
    row: dict[str, Any] = {
        "name": f"{rows}x{width} {kind}", "value": medians["exact_topk"], "unit": "us",
        "min_us": round(min(found["exact_topk"]), 2), "max_us": round(max(found["exact_topk"]), 2),
        "floor_us": lowest, "ratio": round(medians["exact_topk"] / lowest, 2),
        "wrong_rows": errors["exact_topk"][1], "checked_rows": checked, "buffers": buffers, "nodes": nodes,
        "peers_us": {name: medians[name] for name in peers if name in medians},
        "peers_wrong_values": {name: errors[name][0] for name in peers if name in errors},
        "peers_other_sets": {name: errors[name][1] for name in peers if name in errors},
    }  # fmt: skip
    if kind == "randn" and (rows, width) in MUST:
        row["must"] = MUST[rows, width]
        row["holds"] = row["value"] <= row["must"]
    return row


def spread_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each shape measured on every distribution: the worst time over that of randn, which must not exceed 1.5."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        shape, kind = row["name"].split()
        times.setdefault(shape, {})[kind] = row["value"]
    made = []
    for shape, of in times.items():
        if len(of) == len(DISTRIBUTIONS):
            worst = max(of, key=lambda kind, of=of: of[kind])  # type: ignore[misc]
            ratio = round(of[worst] / of["randn"], 2)
            made.append({"name": f"{shape} worst distribution ({worst})", "value": ratio, "unit": "x randn",
                         "must": 1.5, "holds": ratio <= 1.5})  # fmt: skip
    return made


def environment(kernel: Any) -> dict[str, Any]:
    """The machine and what ran on it."""
    card = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,driver_version", "--format=csv,noheader"]
    clocks = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        **provenance.of(__file__, 17), "card": card.name, "processors": card.multi_processor_count,
        "clocks_and_driver": clocks, "source_sha256": kernel.SOURCE_SHA256,
        "k": K, "cache": "cold",
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Print a table; with --json also write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--shapes", nargs="*", help="ROWSxWIDTH; without it those with a bound, and how time grows")
    parser.add_argument("--stock-aot", type=Path, metavar="FILE")
    parser.add_argument("--stock-v2", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    peers: dict[str, Peer] = {"torch.topk": torch_topk}
    if options.stock_aot:
        peers["stock fast_topk"] = stock_aot(options.stock_aot)
    if options.stock_v2:
        peers["stock topk_v2"] = stock_v2(options.stock_v2)
    with tempfile.TemporaryDirectory() as folder:
        kernel = install(Path(folder))
        kernel.prepare("cuda:0")
        floor = Floor(sys.modules[kernel.__name__.rpartition(".")[0] + ".build"])
        shapes = list(MUST)
        if options.shapes:
            shapes = [(int(rows), int(width)) for rows, _, width in (text.partition("x") for text in options.shapes)]
        tasks = [(rows, width, "randn") for rows, width in shapes]
        tasks += [(*shape, kind) for shape in shapes if shape in SPREAD for kind in DISTRIBUTIONS[1:]]
        if not options.shapes:
            tasks += [(*shape, "randn") for shape in GROWTH if shape not in MUST]
        found = []
        for rows, width, kind in tasks:
            row = measure(kernel, floor, rows, width, kind, peers, options)
            found.append(row)
            holds = {True: "holds", False: "MISSED", None: ""}[row.get("holds")]
            print(
                f"{rows:>5}x{width:<8}{kind:<10}{row['value']:>9.2f} us  floor {row['floor_us']:>7.2f} "
                f"x{row['ratio']:<5} must {row.get('must', '-'):>5} {holds:<7} wrong {row['wrong_rows']}  "
                f"{row['peers_us']} wrong {row['peers_wrong_values']} {row['peers_other_sets']}",
                flush=True,
            )
            torch.cuda.empty_cache()
        report = {**environment(kernel), "rows": found + spread_of(found)}
        for row in report["rows"][len(found) :]:
            print(row)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(row["wrong_rows"] for row in found) else 0


if __name__ == "__main__":
    assert REPOSITORY.is_dir()
    sys.exit(main())
