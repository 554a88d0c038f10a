"""The attention kernels of GLM-DSA under decode context parallelism (DCP), on one GPU: parts merged against the whole.

Each rank's part is computed here one after the other by the real kernel on every D-th row of the cache, with the slots
made local by the patch's own kernel, and merged by the engine's own kernel; the same kernel over the whole cache is
what it is compared with. Scores are peaked and the ranks' shares unequal, so that a merge in the wrong base is far off.

``python3 -m lab.rig.gpu.dsa_parts TREE --out FILE.json`` in a process that has the archive's library on its path, which
``lab.rig.gpu.parts`` starts; ``TREE`` is the patched tree.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lab import provenance

# Of the patched tree: the engine's own merge of the ranks' parts, and the patch's localisation.
MERGE = "sglang/kernels/ops/attention/dcp_kernels.py"
LOCALISE = "sglang/srt/research/kernels/dcp_localise.py"
WIDTH, LATENT, PAGE = 576, 512, 64
SCALE = WIDTH**-0.5
# (heads that the model gives a DCP group, heads that the kernel wants)
HEADS = ((32, 64), (64, 64), (128, 128))
ROWS = (1, 6, 33)
# Of an output's distance from what it is to be, over 1 + that: bf16 steps are 0.4 %. The other base is further off.
BOUND, WRONG = 0.02, 0.05


def file(path: Path) -> ModuleType:
    """Execute one file of a tree by itself."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fp8_rows(rows: Tensor) -> Tensor:
    """Latent rows ``[N, 576]`` as the fp8 cache stores them: uint8 ``[N, 656]``, a scale for 128 values."""
    tiles = rows[:, :LATENT].float().reshape(-1, 4, 128)
    scale = tiles.abs().amax(-1).clamp_min(1e-4) / 448
    values = (tiles / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).reshape(-1, LATENT)
    rope = rows[:, LATENT:].to(torch.bfloat16).contiguous()
    return torch.cat([values.view(torch.uint8), scale.contiguous().view(torch.uint8), rope.view(torch.uint8)], 1)


class Kernel:
    """One of the two sparse kernels, called as the attention backend does.

    Args:
        flash_mla: the module that holds both.
        fp8: the decode kernel over 656-byte rows (``flashmla_kv``), else that over bf16 rows (``flashmla_sparse``).
        heads: query heads; padded: as many as the kernel wants.
    """

    def __init__(self, flash_mla: Any, fp8: bool, heads: int, padded: int, rows: int, selected: int) -> None:
        self.flash, self.fp8, self.heads, self.padded = flash_mla, fp8, heads, padded
        self.rows, self.selected = rows, selected
        self.meta: Any = None

    @property
    def name(self) -> str:
        """What the engine calls it."""
        return "flashmla_kv" if self.fp8 else "flashmla_sparse"

    def cache(self, rows: Tensor) -> Tensor:
        """Lay rows ``[N, 576]`` out for this kernel."""
        return fp8_rows(rows).view(-1, PAGE, 1, 656) if self.fp8 else rows[:, None].contiguous()

    def plan(self, device: torch.device) -> None:
        """Make the plan that the decode kernel wants; it depends on the shapes alone."""
        self.lengths = torch.full((self.rows,), self.selected, dtype=torch.int32, device=device)
        self.table = torch.empty(self.rows, 0, dtype=torch.int32, device=device)
        if self.fp8:
            self.meta = self.flash.get_mla_metadata(
                cache_seqlens=self.lengths,
                num_q_tokens_per_head_k=self.padded,
                num_heads_k=1,
                num_heads_q=self.padded,
                is_fp8_kvcache=True,
                topk=self.selected,
            )

    def __call__(self, queries: Tensor, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Attend: queries ``[T, padded, 576]``, slots int32 ``[T, K]`` to (out ``[T, H, 512]``, LSE ``[T, H]``)."""
        if not self.fp8:
            out, _, lse = self.flash.flash_mla_sparse_fwd(
                q=queries, kv=cache, indices=slots[:, None], sm_scale=SCALE, d_v=LATENT, topk_length=self.lengths
            )
        else:
            out, lse = self.flash.flash_mla_with_kvcache(
                q=queries[:, None],
                k_cache=cache,
                cache_seqlens=self.lengths,
                head_dim_v=LATENT,
                tile_scheduler_metadata=self.meta[0],
                num_splits=self.meta[1],
                softmax_scale=SCALE,
                indices=slots[:, None],
                block_table=self.table,
                is_fp8_kvcache=True,
            )
            out, lse = out[:, 0], lse[..., 0]
        return out[:, : self.heads].contiguous(), lse[:, : self.heads].contiguous()


def selections(rows: int, total: int, selected: int, ranks: int, random: torch.Generator) -> Tensor:
    """Selections ``[rows, selected]`` of ``total`` slots, the first page of every rank left out: plain, with a -1 tail,
    owned by one rank, with holes, mostly one rank's, and all -1, in turn."""
    first = PAGE * ranks
    picks = []
    for row in range(rows):
        slots = torch.randperm(total - first, generator=random)[:selected].int() + first
        kind = row % 6
        if kind == 1:
            slots[selected // 3 :] = -1
        elif kind == 2:
            slots = slots // ranks * ranks + ranks - 1
        elif kind == 3:
            slots[::2] = -1
        elif kind == 4:
            slots[selected // 16 :] = slots[selected // 16 :] // ranks * ranks
        elif kind == 5:
            slots[:] = -1
        picks.append(slots)
    return torch.stack(picks)


def merged(parts: Sequence[tuple[Tensor, Tensor]], correct: Callable[..., Any], natural: bool) -> Tensor:
    """Merge the ranks' parts as the engine does: corrected by its kernel, summed as its reduce-scatter would."""
    lses = torch.stack([lse.float() for _, lse in parts])
    total: Tensor | None = None
    for rank, (out, _) in enumerate(parts):
        corrected = torch.empty(out.transpose(0, 1).shape, dtype=torch.float32, device=out.device)
        correct(out, lses, rank, None, corrected, is_lse_base_on_e=natural)
        total = corrected if total is None else total + corrected
    assert total is not None
    return total.transpose(0, 1)


def case(
    kernel: Kernel, ranks: int, total: int, correct: Callable[..., Any], localise: Callable[..., Tensor], device: str
) -> dict[str, Any]:
    """Compare merged parts with the whole for one kernel, number of heads, rows and ranks; one row of the evidence."""
    random = torch.Generator().manual_seed(ranks * 100 + kernel.rows)
    place = torch.device(device)
    rows = torch.randn(total, WIDTH, generator=random).to(torch.bfloat16).to(place)
    queries = torch.zeros(kernel.rows, kernel.padded, WIDTH, dtype=torch.bfloat16, device=place)
    # Peaked: the scores spread over a few units, so a handful of keys carries the sum.
    queries[:, : kernel.heads] = (2 * torch.randn(kernel.rows, kernel.heads, WIDTH, generator=random)).to(place)
    slots = selections(kernel.rows, total, kernel.selected, ranks, random).to(place)
    # A kernel may read what a -1 names, block 0, and must not use it.
    rows[: PAGE * ranks] = math.nan
    kernel.plan(place)
    whole, lse = kernel(queries, kernel.cache(rows), slots)
    caches = [kernel.cache(rows[rank::ranks].contiguous()) for rank in range(ranks)]
    parts = [kernel(queries, caches[rank], localise(slots, rank, ranks)) for rank in range(ranks)]
    named = slots[0][slots[0] >= 0].long()
    scores = queries[0, : kernel.heads].float() @ rows[named].float().T * SCALE
    exact = torch.logsumexp(scores, -1)
    off = {
        "natural": (lse[0] - exact).abs().max().item(),
        "base 2": (lse[0] - exact / math.log(2)).abs().max().item(),
    }
    base = min(off, key=lambda word: off[word])
    natural = base == "natural"
    whole = whole.float()
    error = (merged(parts, correct, natural) - whole).abs() / (1 + whole.abs())
    wrong = ((merged(parts, correct, not natural) - whole).abs() / (1 + whole.abs())).max().item()
    empty = [(slots.remainder(ranks) != rank).logical_or(slots < 0).all(1) for rank in range(ranks)]
    empty_lse = torch.cat([parts[rank][1][empty[rank]].flatten() for rank in range(ranks)])
    found: dict[str, Any] = {
        "kernel": kernel.name,
        "heads": kernel.heads,
        "rows": kernel.rows,
        "ranks": ranks,
        "base": base,
        "lse_error": round(off[base], 5),
        "max_error": error.max().item(),
        "rms_error": error.pow(2).mean().sqrt().item(),
        "wrong_base_error": wrong,
        "empty_lse": sorted({str(value) for value in empty_lse.tolist()}),
        "finite": bool(torch.isfinite(error).all()),
    }
    if place.type == "cuda":
        found |= replayed(kernel, queries, caches[ranks - 1], slots, ranks, localise)
    # One row has no unequal share, so its merge forgives the base.
    found["holds"] = found["finite"] and found["max_error"] < BOUND and (kernel.rows < 3 or wrong > WRONG)
    found["holds"] = found["holds"] and found.get("graph_equals_eager", True)
    return found


def replayed(
    kernel: Kernel, queries: Tensor, cache: Tensor, slots: Tensor, ranks: int, localise: Callable[..., Tensor]
) -> dict[str, Any]:
    """Capture localisation and attention in a CUDA graph, replay it with other slots, and time both parts."""
    rank = ranks - 1
    place = slots.clone()
    kernel(queries, cache, localise(place, rank, ranks))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernel(queries, cache, localise(place, rank, ranks))
    other = slots.roll(1, 0)
    place.copy_(other)
    graph.replay()
    eager, eager_lse = kernel(queries, cache, localise(other, rank, ranks))
    local = localise(slots, rank, ranks)
    return {
        "graph_equals_eager": bool(torch.equal(out, eager) and torch.equal(lse, eager_lse)),
        "localise_us": timed(lambda: localise(slots, rank, ranks)),
        "attention_us": timed(lambda: kernel(queries, cache, local)),
    }


def timed(call: Callable[[], Any], times: int = 50) -> float:
    """Microseconds of the GPU for one call, in a CUDA graph of ``times`` of them: no launch from Python counts."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    graph.replay()
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(float(begin.elapsed_time(end)) * 1000 / times, 2)


def run(flash_mla: Any, tree: Path, device: str = "cuda", *, total: int = 65_536, selected: int = 2048) -> list[Any]:
    """Every case, on ``device``.

    Args:
        flash_mla: ``sgl_kernel.flash_mla``, or what stands for it.
        tree: the patched tree, which holds the merge kernel and the localisation.
    """
    correct, localise = file(tree / MERGE).correct_attn_out, file(tree / LOCALISE).localise
    return [
        case(Kernel(flash_mla, fp8, heads, padded, rows, selected), ranks, total, correct, localise, device)
        for fp8 in (True, False)
        for heads, padded in HEADS
        for rows in ROWS
        for ranks in (2, 4)
    ]


def rows_of(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases as every result has them, and what localising costs beside its attention."""
    rows = []
    for case_ in cases:
        # JSON has no NaN.
        one: dict[str, Any] = {
            key: None if isinstance(it, float) and not math.isfinite(it) else it for key, it in case_.items()
        }
        name = f"{one['kernel']}, {one['heads']} heads, {one['rows']} rows, {one['ranks']} ranks"
        judged = {"value": one["max_error"], "unit": "|difference| / (1 + |value|)", "must": f"<= {BOUND}"}
        rows.append({"name": name, **judged, "holds": one["holds"], **one})
        if "localise_us" in one:
            share = round(one["localise_us"] / one["attention_us"], 4)
            rows.append({"name": f"{name}: localising / attention", "value": share, "unit": "", "must": None})
            rows[-1]["holds"] = None
    return rows


def main() -> int:
    """0 when every case holds."""
    parser = argparse.ArgumentParser(description="attention of DCP ranks, merged, beside the whole")
    parser.add_argument("tree", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    cases = run(importlib.import_module("sgl_kernel.flash_mla"), arguments.tree)
    # Each case draws from a seed that its shape gives.
    files = {name: hashlib.sha256((arguments.tree / name).read_bytes()).hexdigest() for name in (MERGE, LOCALISE)}
    report = {**provenance.of(__file__, None), "files": files, "rows": rows_of(cases)}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for one in report["rows"]:
        print({True: "holds", False: "DOES NOT HOLD", None: ""}[one["holds"]], one["name"], one["value"], sep="  ")
    return 0 if all(one["holds"] for one in cases) else 1


if __name__ == "__main__":
    raise SystemExit(main())
