"""Compare the CPU stand-ins of ``lab/rig/standins`` with the kernels that they replace, on one GPU.

``python3 -m lab.rig.gpu.standins --out FILE.json`` in a process that has the archive's library on its path, which
``lab.rig.gpu.parts`` starts. Every check draws its inputs from one seed, computes the stand-in on the CPU and the
kernel of 0.5.17 on the GPU, and tells the largest difference beside the largest one that is allowed. A kernel that
cannot be had there is named with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab import provenance
from lab.rig.gpu import dsa_parts
from lab.rig.standins import attention, flashinfer_mla, indexer, interpreter, speculative, table, tables, topk

SEED = 20261130
Load = Callable[[str], Any]
WIDE = "sgl_kernel.speculative:"
FLASH = "sglang.srt.layers.attention.flashinfer_mla_backend:"
TRANSFORM = "sglang.kernels.ops.attention.dsa.transform_index:"
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer:"
_FA3 = "FlashAttention-3's compiled library is not in the archive: it alone is larger than what may be carried"
# Stand-ins for kernels that no check below compares, and why.
MISSING = {
    "sglang.kernels.ops.attention.flash_attention:flash_attn_with_kvcache": _FA3,
    "sgl_kernel.flash_attn:flash_attn_with_kvcache": _FA3,
    "sglang.kernels.ops.attention.flash_attention:flash_attn_varlen_func": _FA3,
    "sgl_kernel.flash_attn:flash_attn_varlen_func": _FA3,
    "sgl_kernel.flash_attn:get_scheduler_metadata": f"computes nothing of its own; {_FA3}",
    f"{FLASH}BatchPrefillWithRaggedKVCacheWrapper": "the stand-in is an error and computes nothing",
}


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        standins: targets of the table that it covers.
        kernel: what runs on the GPU.
        inputs, measure: what goes in; what the figure is.
        most: the largest figure that holds.
        run: gives the figure. It gets what loads a kernel by ``module:name``, the device, and a random generator.
    """

    name: str
    standins: tuple[str, ...]
    kernel: str
    inputs: str
    measure: str
    most: float
    run: Callable[[Load, str, torch.Generator], float]


CHECKS: list[Check] = []
EQUAL = "entries that differ"


def check(
    *standins: str, kernel: str, inputs: str, measure: str = EQUAL, most: float = 0.0
) -> Callable[[Callable[[Load, str, torch.Generator], float]], Callable[[Load, str, torch.Generator], float]]:
    """Add the function to the list."""

    def add(run: Callable[[Load, str, torch.Generator], float]) -> Callable[[Load, str, torch.Generator], float]:
        CHECKS.append(Check(run.__name__.replace("_", " "), standins, kernel, inputs, measure, most, run))
        return run

    return add


def differing(ours: Tensor, real: Tensor) -> float:
    """How many entries differ; another shape differs in all."""
    real = real.cpu()
    return float((ours != real).sum()) if ours.shape == real.shape else float(max(ours.numel(), 1))


def distance(ours: Tensor, real: Tensor) -> float:
    """The largest difference over one plus the value. Entries without a finite value must be the same ones."""
    one, other = ours.float(), real.cpu().float()
    if one.shape != other.shape:
        return math.inf
    finite = torch.isfinite(one)
    if bool((finite != torch.isfinite(other)).any()) or bool((one[~finite] != other[~finite]).any()):
        return math.inf
    gap = (one - other).abs() / (1 + one.abs())
    return float(gap[finite].max()) if bool(finite.any()) else 0.0


def normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random)


def sparse(fp8: bool, load: Load, device: str, random: torch.Generator) -> float:
    """Sparse attention of 6 rows: out and LSE of both, every kind of selection."""
    total, selected = 16_384, 2048
    rows = normal(random, total, dsa_parts.WIDTH).bfloat16()
    slots = dsa_parts.selections(6, total, selected, 1, random)
    queries = (2 * normal(random, 6, 64, dsa_parts.WIDTH)).bfloat16()
    found = []
    for module, place in ((attention, "cpu"), (load("sgl_kernel.flash_mla"), device)):
        kernel = dsa_parts.Kernel(module, fp8, 64, 64, 6, selected)
        kernel.plan(torch.device(place))
        cache = kernel.cache(rows).to(place)
        found.append(kernel(queries.to(place), cache, slots.to(place)))
    (out, lse), (real, real_lse) = found
    return max(distance(out, real), distance(lse, real_lse))


@check(
    "sgl_kernel.flash_mla:flash_mla_sparse_fwd",
    kernel="FlashMLA, sparse, bf16 rows",
    inputs="6 rows of 64 heads, 2048 of 16384 slots: whole, with a tail, owned by one rank, with holes, uneven, empty",
    measure="largest |difference| / (1 + |value|), out and LSE",
    most=0.02,
)
def sparse_attention_over_bf16_rows(load: Load, device: str, random: torch.Generator) -> float:
    return sparse(False, load, device, random)


@check(
    "sgl_kernel.flash_mla:flash_mla_with_kvcache",
    kernel="FlashMLA, sparse decode, fp8 rows of 656 bytes",
    inputs="as above, rows in fp8",
    measure="largest |difference| / (1 + |value|), out and LSE",
    most=0.02,
)
def sparse_attention_over_fp8_rows(load: Load, device: str, random: torch.Generator) -> float:
    return sparse(True, load, device, random)


@check(
    "sgl_kernel.flash_mla:get_mla_metadata",
    kernel="FlashMLA's work split",
    inputs="6 rows of 64 heads",
    measure="dtypes and inner sizes that differ; the values are the kernel's own",
)
def the_work_split_has_the_same_form(load: Load, device: str, random: torch.Generator) -> float:
    shapes = []
    for module, place in ((attention, "cpu"), (load("sgl_kernel.flash_mla"), device)):
        plan, splits = module.get_mla_metadata(
            cache_seqlens=torch.full((6,), 2048, dtype=torch.int32, device=place),
            num_q_tokens_per_head_k=64,
            num_heads_k=1,
            num_heads_q=64,
            is_fp8_kvcache=True,
            topk=2048,
        )
        shapes.append((plan.dtype, plan.shape[1:], splits.dtype, splits.shape))
    return float(sum(one != other for one, other in zip(*shapes, strict=True)))


def scores(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scores without ties, and lengths below, at and above the number selected."""
    return normal(random, 8, 40_000), torch.tensor([40_000, 39_999, 2049, 2048, 2047, 1, 0, 20_000], dtype=torch.int32)


def members(ours: Callable[..., Tensor], load: Load, device: str, *given: Tensor, **named: Tensor) -> float:
    """Members that a selection of 2048 and the kernel of its name differ in."""
    on = {word: one.to(device) for word, one in named.items()}
    real: Tensor = load(f"sgl_kernel.top_k:{ours.__name__}")(*(one.to(device) for one in given), 2048, **on)
    return differing(ours(*given, 2048, **named).sort(1).values, real.cpu().sort(1).values)


@check(
    "sgl_kernel.top_k:fast_topk_v2",
    kernel="sgl-kernel fast_topk",
    inputs="8 rows of 40000 scores without ties, lengths 0 to 40000, 2048 selected",
    measure="members that differ; the kernel's order is free",
)
def top_k_members(load: Load, device: str, random: torch.Generator) -> float:
    return members(topk.fast_topk_v2, load, device, *scores(random))


@check(
    "sgl_kernel.top_k:fast_topk_transform_fused",
    kernel="sgl-kernel fast_topk_transform_fused",
    inputs="as above; a page table for each row",
    measure="members that differ; the kernel's order is free",
)
def top_k_with_a_page_table(load: Load, device: str, random: torch.Generator) -> float:
    values, lengths = scores(random)
    pages = torch.randperm(8 * 40_000, generator=random).view(8, 40_000).int()
    given = (values, lengths, pages, torch.arange(9, dtype=torch.int32))
    return members(topk.fast_topk_transform_fused, load, device, *given)


@check(
    "sgl_kernel.top_k:fast_topk_transform_ragged_fused",
    kernel="sgl-kernel fast_topk_transform_ragged_fused",
    inputs="as above; windows that start at column 5, an offset for each row",
    measure="members that differ; the kernel's order is free",
)
def top_k_over_packed_keys(load: Load, device: str, random: torch.Generator) -> float:
    values, lengths = scores(random)
    lengths = (lengths - 5).clamp_min(0)
    offsets, starts = torch.arange(8, dtype=torch.int32) * 50_000, torch.full((8,), 5, dtype=torch.int32)
    given = (values, lengths, offsets)
    return members(topk.fast_topk_transform_ragged_fused, load, device, *given, row_starts=starts)


@check(
    "sglang.kernels.ops.quantization.hadamard:hadamard_transform",
    kernel="fast-hadamard-transform, compiled there",
    inputs="37 rows of 128 in bf16, scaled by 128^-0.5",
    measure="largest |difference| / (1 + |value|)",
    most=0.01,
)
def hadamard_rotation(load: Load, device: str, random: torch.Generator) -> float:
    x = normal(random, 37, 128).bfloat16()
    real = load("sglang.kernels.ops.quantization.hadamard:hadamard_transform")(x.to(device), 128**-0.5)
    return distance(indexer.hadamard_transform(x, 128**-0.5), real)


def _within(ours: Tensor, real: Tensor) -> float:
    """The largest difference of what both have inside the windows, over the largest value."""
    inside = torch.isfinite(ours)
    one, other = ours[inside], real.cpu().float()[inside]
    return float((one - other).abs().max() / one.abs().max()) if bool(torch.isfinite(other).all()) else math.inf


@check(
    f"{INDEXER}deep_gemm",
    kernel="DeepGEMM fp8_mqa_logits",
    inputs="64 rows of 64 heads against 4096 packed keys, a window for each row",
    measure="largest |difference| / largest |value| inside the windows",
    most=1e-3,
)
def index_logits_over_packed_keys(load: Load, device: str, random: torch.Generator) -> float:
    q = normal(random, 64, 64, 128).to(torch.float8_e4m3fn)
    keys, scale = normal(random, 4096, 128).to(torch.float8_e4m3fn), torch.rand(4096, generator=random) + 0.1
    weights = normal(random, 64, 64)
    first = torch.arange(64, dtype=torch.int32) * 7
    last = first + torch.arange(1, 65, dtype=torch.int32) * 50
    ours = indexer.mqa_logits(q, (keys, scale), weights, first, last, clean_logits=False)
    real = load("deep_gemm:fp8_mqa_logits")(
        q.to(device), (keys.to(device), scale.to(device)), weights.to(device), first.to(device), last.to(device),
        clean_logits=False,
    )  # fmt: skip
    return _within(ours, real)


@check(
    f"{INDEXER}deep_gemm",
    kernel="DeepGEMM fp8_paged_mqa_logits and its work split",
    inputs="4 requests of 64 heads, pages of 64 keys in any order, lengths 1 to 700",
    measure="largest |difference| / largest |value| inside the lengths",
    most=1e-3,
)
def index_logits_over_pages(load: Load, device: str, random: torch.Generator) -> float:
    q = normal(random, 4, 1, 64, 128).to(torch.float8_e4m3fn)
    pages = torch.zeros(44, 64 * 132, dtype=torch.uint8)
    pages[:, : 64 * 128] = normal(random, 44, 64 * 128).to(torch.float8_e4m3fn).view(torch.uint8)
    pages[:, 64 * 128 :] = (torch.rand(44, 64, generator=random) + 0.1).view(torch.uint8)
    cache = pages.view(44, 64, 1, 132)
    weights = normal(random, 4, 64)
    lengths = torch.tensor([[700], [64], [65], [1]], dtype=torch.int32)
    blocks = torch.randperm(44, generator=random).view(4, 11).int()
    ours = indexer.paged_mqa_logits(q, cache, weights, lengths, blocks, None, 704)
    on = lengths.to(device)
    split = load("deep_gemm:get_paged_mqa_logits_metadata")(on, 64, load("deep_gemm:get_num_sms")())
    real = load("deep_gemm:fp8_paged_mqa_logits")(
        q.to(device), cache.to(device), weights.to(device), on, blocks.to(device), split, 704, clean_logits=False
    )
    return _within(ours, real)


@check(
    f"{INDEXER}Indexer._weights_proj_bf16_in_fp32_out",
    kernel="torch.mm, bf16 in and float32 out",
    inputs="9 rows of 6144, 64 heads",
    measure="largest |difference| / (1 + |value|)",
    most=1e-3,
)
def head_gates(load: Load, device: str, random: torch.Generator) -> float:
    x, weight = normal(random, 9, 6144).bfloat16(), normal(random, 64, 6144).bfloat16()

    class Holder:
        class weights_proj:
            pass

    Holder.weights_proj.weight = weight  # type: ignore[attr-defined]
    real = load("torch:mm")(x.to(device), weight.to(device).t(), out_dtype=torch.float32)
    return distance(indexer.weights_proj(Holder, x), real)


@check(
    "sglang.kernels.ops.attention.dsa.quant_k_cache:quantize_k_cache_separate",
    kernel="the engine's Triton packer",
    inputs="300 rows of 512 and 64 in bf16, of sizes 0.001 to 1000",
    measure="largest |difference of a value read back| / (value / 8 + its tile's scale / 512): one fp8 step is 1",
    most=1.0,
)
def packing_of_fp8_rows(load: Load, device: str, random: torch.Generator) -> float:
    size = torch.logspace(-3, 3, 300)[:, None]
    nope, rope = (normal(random, 300, 512) * size).bfloat16(), normal(random, 300, 64).bfloat16()
    real = load("sglang.kernels.ops.attention.dsa.quant_k_cache:quantize_k_cache_separate")(
        nope.to(device), rope.to(device)
    )
    ours = attention.quantize_separate(nope, rope)
    packed = [torch.cat([part.cpu().view(torch.uint8).reshape(300, -1) for part in one], 1) for one in (ours, real)]
    mine, theirs = (attention.dequantize_rows(one) for one in packed)
    if not torch.equal(mine[:, 512:], theirs[:, 512:]):
        return math.inf
    scale = packed[0][:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, 1)
    return float(((mine - theirs)[:, :512].abs() / (mine[:, :512].abs() / 8 + scale / 512)).max())


@check(
    "triton.runtime.interpreter:_convert_float",
    kernel="a Triton kernel's conversion on the card",
    inputs="100000 float32 of all sizes, ties of rounding and values beyond the range among them, to bf16 and fp8",
)
def conversion_of_floats(load: Load, device: str, random: torch.Generator) -> float:
    convert = load("lab.rig.gpu.convert:converted")
    values = normal(random, 100_000) * 10 ** (4 * torch.rand(100_000, generator=random) - 2)
    ties = torch.arange(0, 4096).float() / 16
    values = torch.cat([values, ties, -ties, torch.tensor([448.0, 449.0, 464.0, 465.0, 1e6, -1e6, 0.0, 2.0**-10])])
    found = 0.0
    for target in (torch.bfloat16, torch.float8_e4m3fn):
        ours, real = interpreter.convert(values, target), convert(values.to(device), target).cpu()
        found += differing(ours.view(torch.uint8), real.view(torch.uint8))
    return found


def request_table(random: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of requests, a table, and a range of columns for each."""
    rows = torch.tensor([3, 0, 5], dtype=torch.int64)
    held = torch.randperm(8 * 256, generator=random).view(8, 256).int()
    start = torch.tensor([5, 0, 100], dtype=torch.int64)
    return rows, held, start, start + torch.tensor([70, 1, 33])


@check(
    f"{WIDE}assign_req_to_token_pool_cpu",
    kernel="the engine's Triton kernel",
    inputs="3 requests of 70, 1 and 33 slots",
)
def slots_into_the_table(load: Load, device: str, random: torch.Generator) -> float:
    rows, held, start, end = request_table(random)
    slots = torch.randperm(1000, generator=random)[:104]
    on = [one.to(device) for one in (rows, held.clone(), start, end, slots)]
    load("sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func")(*on, 3)
    speculative.assign_req_to_token_pool(rows, held, start, end, slots, 256)
    return differing(held, on[1])


def written(
    size: int,
    device: str,
    ours: Callable[..., None],
    more: Sequence[int],
    kernel: Any,
    its: Sequence[int],
    *given: Tensor,
) -> float:
    """Entries, all -1 before, that a stand-in and a kernel write differently; the numbers stand behind them."""
    mine = torch.full((size,), -1, dtype=torch.int64)
    real = mine.clone().to(device)
    kernel(*(one.to(device) for one in given), real, *its)
    ours(*given, mine, *more)
    return differing(mine, real)


@check(f"{WIDE}assign_extend_cache_locs_cpu", kernel="the engine's Triton kernel", inputs="as above, read back")
def slots_of_an_extend(load: Load, device: str, random: torch.Generator) -> float:
    kernel = load("sglang.kernels.ops.speculative.cache_locs:assign_extend_cache_locs")[(3,)]
    ours = speculative.assign_extend_cache_locs
    return written(104, device, ours, (256,), kernel, (256, 4), *request_table(random))


@check(
    f"{WIDE}assign_draft_cache_locs_contiguous_cpu",
    kernel="the engine's Triton kernel",
    inputs="3 requests, 2 branches of 5 steps",
)
def slots_of_the_draft(load: Load, device: str, random: torch.Generator) -> float:
    kernel = load("sglang.kernels.ops.speculative.cache_locs:assign_draft_cache_locs_contiguous")[(3,)]
    ours = speculative.assign_draft_cache_locs_contiguous
    return written(30, device, ours, (256, 2, 5), kernel, (256, 2, 5), *request_table(random)[:3])


@check(f"{WIDE}fill_bonus_tokens_cpu", kernel="the engine's Triton kernel", inputs="5 requests, 1 to 4 accepted of 4")
def bonus_tokens(load: Load, device: str, random: torch.Generator) -> float:
    tokens, lengths = torch.randint(0, 1000, (20,), generator=random), torch.tensor([1, 4, 2, 3, 4])
    kernel = load("sglang.kernels.ops.speculative.eagle:fill_bonus_tokens_func")
    return written(5, device, speculative.fill_bonus_tokens, (4,), kernel, (4, 5), tokens, lengths)


@check(f"{WIDE}fill_accept_out_cache_loc_cpu", kernel="the engine's Triton kernel", inputs="20 entries with holes")
def slots_of_accepted_tokens(load: Load, device: str, random: torch.Generator) -> float:
    index = torch.arange(20).masked_fill(torch.rand(20, generator=random) < 0.4, -1)
    slots = torch.randperm(500, generator=random)[:20]
    kernel = load("sglang.kernels.ops.speculative.eagle:fill_accept_out_cache_loc_func")
    return written(20, device, speculative.fill_accept_out_cache_loc, (), kernel, (20,), index, slots)


def tree(width: int, steps: int, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """A tree as the draft makes it: step 0 proposes ``width`` candidates, each later step expands as many of its own.

    Returns:
        the parents' places and the selected candidates in rising order, no parent left out.
    """
    parents, children, offset = [-1, *range(width)], list(range(width)), width
    for _ in range(1, steps):
        grown = [offset + i for i in range(width * width)]
        children += grown
        chosen = torch.randperm(width * width, generator=random)[:width].sort().values.tolist()
        parents += [grown[i] for i in chosen]
        offset += width * width
    parents = parents[: width * (steps - 1) + 1]
    while True:
        picked = torch.randperm(len(children), generator=random)[: count - 1].tolist()
        selected = sorted(children[i] for i in picked)
        if all(one // width == 0 or parents[one // width] in selected for one in selected):
            return torch.tensor([parents]), torch.tensor([selected])


TREES = ((1, 3, 4, 0), (1, 5, 6, 0), (2, 3, 5, 0), (2, 3, 5, 1), (3, 2, 6, 1))


def built(shape: tuple[int, int, int, int], build: Any, place: str, random: torch.Generator) -> tuple[Tensor, ...]:
    """Mask, positions and links of two requests' trees, by ``build`` on ``place``."""
    width, steps, count, mode = shape
    pairs = [tree(width, steps, count, random) for _ in range(2)]
    parents, chosen = (torch.cat([pair[i] for pair in pairs]).to(place) for i in range(2))
    lengths = torch.tensor([5, 8])
    size = int(((lengths + count) * count).sum()) if mode == speculative.FULL_MASK else 2 * count * count
    mask, positions = (torch.ones(size, dtype=torch.bool), torch.zeros(2 * count, dtype=torch.int64))
    links = [torch.full((2, count), -1) for _ in range(3)]
    outputs = tuple(one.to(place) for one in (mask, positions, *links))
    build(parents, chosen, lengths.to(place), *outputs, width, steps, count, mode)
    return outputs


@check(
    f"{WIDE}build_tree_kernel_efficient_cpu",
    kernel="sgl-kernel build_tree_kernel_efficient",
    inputs="two requests, draft trees of 4 to 6 tokens, both masks",
)
def draft_trees(load: Load, device: str, random: torch.Generator) -> float:
    found = 0.0
    for shape in TREES:
        state = random.get_state()
        ours = built(shape, speculative.build_tree, "cpu", random)
        random.set_state(state)
        real = built(shape, load("sgl_kernel:build_tree_kernel_efficient"), device, random)
        found += sum(differing(one, other) for one, other in zip(ours, real, strict=True))
    return found


@check(
    f"{WIDE}verify_tree_greedy_cpu",
    kernel="sgl-kernel verify_tree_greedy",
    inputs="the same trees, candidates and choices of three tokens",
)
def greedy_acceptance(load: Load, device: str, random: torch.Generator) -> float:
    found = 0.0
    for shape in TREES:
        _, steps, count, _ = shape
        links = built(shape, speculative.build_tree, "cpu", random)[2:]
        candidates, wanted = (torch.randint(0, 3, (2, count), generator=random) for _ in range(2))
        accepted = []
        for verify, place in (
            (speculative.verify_tree_greedy, "cpu"),
            (load("sgl_kernel:verify_tree_greedy"), device),
        ):
            predicts = torch.full((2 * count,), -1, dtype=torch.int32, device=place)
            index = torch.full((2, steps + 1), -1, dtype=torch.int32, device=place)
            number = torch.zeros(2, dtype=torch.int32, device=place)
            given = (one.to(place) for one in (candidates, *links, wanted))
            verify(predicts, index, number, *given)
            accepted.append((predicts, index, number))
        found += sum(differing(one, other) for one, other in zip(*accepted, strict=True))
    return found


@check(
    f"{TRANSFORM}transform_index_page_table_decode_fast",
    kernel="the engine's Triton kernel, at the width it is compiled for",
    inputs="5 rows of 2048 positions with holes",
)
def page_table_of_a_decode(load: Load, device: str, random: torch.Generator) -> float:
    pages = torch.randperm(5 * 3000, generator=random).view(5, 3000).int()
    positions = torch.randint(-1, 3000, (5, 2048), dtype=torch.int32, generator=random)
    real = load(f"{TRANSFORM}transform_index_page_table_decode_fast")(pages.to(device), positions.to(device))
    return differing(tables.slots_of(pages, positions), real)


@check(
    f"{TRANSFORM}transform_index_page_table_prefill_fast",
    kernel="the engine's Triton kernel, at the width it is compiled for",
    inputs="2 requests of 3 and 2 rows, one row of padding, 2048 positions with holes",
)
def page_table_of_a_prefill(load: Load, device: str, random: torch.Generator) -> float:
    pages = torch.randperm(2 * 3000, generator=random).view(2, 3000).int()
    positions = torch.randint(-1, 3000, (5, 2048), dtype=torch.int32, generator=random)
    real = load(f"{TRANSFORM}transform_index_page_table_prefill_fast")(
        pages.to(device), positions.to(device), [3, 2], output_num_tokens=6
    )
    ours = tables.slots_of(pages.repeat_interleave(torch.tensor([3, 2]), 0), positions)
    return differing(torch.cat([ours, torch.full((1, 2048), -1, dtype=torch.int32)]), real)


@check(
    "sglang.kernels.ops.attention.pad:seqlens_expand_triton",
    kernel="the engine's Triton kernel",
    inputs="requests of 3, 1 and 4 new rows, one shorter than its new rows",
)
def keys_of_each_new_row(load: Load, device: str, random: torch.Generator) -> float:
    new, lengths = torch.tensor([3, 1, 4], dtype=torch.int32), torch.tensor([9, 5, 2], dtype=torch.int32)
    real = load("sglang.kernels.ops.attention.pad:seqlens_expand_triton")(new.to(device), lengths.to(device), 8, 4)
    return differing(tables.seqlens_expand(new, lengths, 8, 4), real)


@check(
    f"{FLASH}BatchMLAPagedAttentionWrapper",
    kernel="FlashInfer's paged MLA, compiled there",
    inputs="4 requests of 16 heads, 1 query row each, 3 to 700 rows in any order; and 3 rows each, causal",
    measure="largest |difference| / (1 + |value|), out and LSE",
    most=0.02,
)
def paged_mla(load: Load, device: str, random: torch.Generator) -> float:
    worst = 0.0
    for queries, causal in ((1, False), (3, True)):
        lengths = torch.tensor([700, 64, 3, 130], dtype=torch.int32)
        begins = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        starts = torch.arange(5, dtype=torch.int32) * queries
        rows = torch.randperm(1000, generator=random)[: int(lengths.sum())].int()
        cache = normal(random, 1000, 1, 576).bfloat16()
        query = normal(random, 4 * queries, 16, 576).bfloat16()
        found = []
        kinds: tuple[tuple[Any, str], ...] = (
            (flashinfer_mla.BatchMLAPagedAttentionWrapper, "cpu"),
            (load("flashinfer:BatchMLAPagedAttentionWrapper"), device),
        )
        for kind, place in kinds:
            wrapper = kind(torch.zeros(128 << 20, dtype=torch.uint8, device=place))
            plan = (one.to(place) for one in (starts, begins, rows, lengths))
            wrapper.plan(*plan, 16, 512, 64, 1, causal, 576**-0.5, torch.bfloat16, torch.bfloat16)
            held, asked = cache.to(place), query.to(place)
            parts = (asked[..., :512].contiguous(), asked[..., 512:].contiguous(), held[..., :512], held[..., 512:])
            found.append(wrapper.run(*parts, return_lse=True))
        worst = max(worst, *(distance(one, other) for one, other in zip(*found, strict=True)))
    return worst


def load(target: str) -> Any:
    """What ``module:name`` names, or the module."""
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    return getattr(found, name) if name else found


def compare(one: Check, loading: Load, device: str) -> dict[str, Any]:
    """One row of the evidence. A kernel that cannot be loaded, or that fails, does not hold, and says why."""
    began = time.monotonic()
    row: dict[str, Any] = {
        "name": one.name,
        "value": None,
        "unit": one.measure,
        "must": f"<= {one.most:g}",
        "holds": False,
        "stand_ins": list(one.standins),
        "kernel": one.kernel,
        "inputs": one.inputs,
    }
    try:
        value = one.run(loading, device, torch.Generator().manual_seed(SEED))
        row |= {"value": value if math.isfinite(value) else None, "holds": value <= one.most}
        if not math.isfinite(value):
            row["error"] = "not finite where the other is, or of another shape"
    except Exception as error:  # a kernel may fail in any way, and the others are still to be compared
        row["error"] = "".join(traceback.format_exception(error, limit=-3))[-1500:]
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


def uncovered() -> list[str]:
    """Stand-ins for kernels of 0.5.17 that no check compares and no reason excuses."""
    named = {target for one in CHECKS for target in one.standins} | set(MISSING)
    return [one.target for one in table.for_version(table.DECODE) if one.kind == "kernel" and one.target not in named]


def main() -> int:
    """0 when every kernel agrees with its stand-in."""
    parser = argparse.ArgumentParser(description="the CPU stand-ins beside the kernels that they replace")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows: list[Mapping[str, Any]] = []
    head = provenance.of(__file__, SEED)
    for one in CHECKS:
        row = compare(one, load, "cuda")
        rows.append(row)
        print(f"{'holds' if row['holds'] else 'DOES NOT HOLD':<14}{row['name']:<36}{row['value']} {row['must']}")
        if "error" in row:
            print(row["error"])
        missing = [{"stand_in": target, "reason": reason} for target, reason in MISSING.items()]
        # After each: a card that a kernel brought down leaves what was found before.
        report = {**head, "engine": table.DECODE, "rows": rows, "missing": missing}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
