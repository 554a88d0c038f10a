"""The comparison of stand-ins with kernels: each check agrees with its own stand-in, and sees one that is broken."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.rig.gpu import standins
from lab.rig.standins import attention, flashinfer_mla, indexer, interpreter, page, speculative, table, tables, topk


class Launched:
    """A Triton kernel as it is launched: the grid in brackets, then the arguments."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        return self.call


def expanded(pages: Tensor, positions: Tensor, rows: list[int], output_num_tokens: int) -> Tensor:
    slots = tables.slots_of(pages.repeat_interleave(torch.tensor(rows), 0), positions)
    return torch.cat([slots, torch.full((output_num_tokens - len(slots), slots.shape[1]), -1, dtype=torch.int32)])


ALLOCATION = "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func"
LOCATIONS = "sglang.kernels.ops.speculative.cache_locs:"
EAGLE = "sglang.kernels.ops.speculative.eagle:"
# What the checks load by these names on a GPU; here the stand-ins in the kernels' own signatures.
SAME: dict[str, Any] = {
    "sgl_kernel.flash_mla": attention,
    "sgl_kernel.top_k:fast_topk_v2": topk.fast_topk_v2,
    "sgl_kernel.top_k:fast_topk_transform_fused": topk.fast_topk_transform_fused,
    "sgl_kernel.top_k:fast_topk_transform_ragged_fused": topk.fast_topk_transform_ragged_fused,
    "sglang.kernels.ops.quantization.hadamard:hadamard_transform": indexer.hadamard_transform,
    "deep_gemm:fp8_mqa_logits": indexer.mqa_logits,
    "deep_gemm:fp8_paged_mqa_logits": indexer.paged_mqa_logits,
    "deep_gemm:get_paged_mqa_logits_metadata": lambda lengths, page_size, processors: None,
    "deep_gemm:get_num_sms": lambda: 8,
    "torch:mm": lambda x, weight, out_dtype: x.to(out_dtype) @ weight.to(out_dtype),
    "sglang.kernels.ops.attention.dsa.quant_k_cache:quantize_k_cache_separate": attention.quantize_separate,
    "lab.rig.gpu.convert:converted": interpreter.convert,
    ALLOCATION: lambda rows, held, start, end, slots, count: speculative.assign_req_to_token_pool(
        rows, held, start, end, slots, held.shape[1]
    ),
    f"{LOCATIONS}assign_extend_cache_locs": Launched(
        lambda rows, held, start, end, out, width, upper: speculative.assign_extend_cache_locs(
            rows, held, start, end, out, width
        )
    ),
    f"{LOCATIONS}assign_draft_cache_locs_contiguous": Launched(speculative.assign_draft_cache_locs_contiguous),
    f"{EAGLE}fill_bonus_tokens_func": lambda tokens, lengths, out, width, count: speculative.fill_bonus_tokens(
        tokens, lengths, out, width
    ),
    f"{EAGLE}fill_accept_out_cache_loc_func": lambda index, slots, out, size: speculative.fill_accept_out_cache_loc(
        index, slots, out
    ),
    "sgl_kernel:build_tree_kernel_efficient": speculative.build_tree,
    "sgl_kernel:verify_tree_greedy": speculative.verify_tree_greedy,
    f"{standins.TRANSFORM}transform_index_page_table_decode_fast": tables.slots_of,
    f"{standins.TRANSFORM}transform_index_page_table_prefill_fast": expanded,
    "sglang.kernels.ops.attention.pad:seqlens_expand_triton": tables.seqlens_expand,
    "flashinfer:BatchMLAPagedAttentionWrapper": flashinfer_mla.BatchMLAPagedAttentionWrapper,
}


@pytest.mark.parametrize("one", standins.CHECKS, ids=lambda one: one.name)
def test_a_check_agrees_when_the_kernel_is_the_stand_in(one: standins.Check) -> None:
    row = standins.compare(one, SAME.__getitem__, "cpu")
    assert row["holds"], row
    assert row["value"] <= one.most


def moved(value: Any) -> Any:
    """Another value of the same kind: numbers a quarter larger and one more, bits the other way round."""
    if isinstance(value, tuple):
        return tuple(map(moved, value))
    if value.dtype == torch.bool:
        return ~value
    if value.dtype == torch.uint8:
        return value ^ 64
    return (value.float() * 1.25 + 1).to(value.dtype)


def wrong(thing: Any) -> Any:
    """What computes something else: what it returns is moved, or what it writes."""
    if isinstance(thing, Launched):
        return Launched(wrong(thing.call))
    if thing is attention:
        kernels = {name: wrong(getattr(attention, name)) for name in ("flash_mla_sparse_fwd", "flash_mla_with_kvcache")}
        return SimpleNamespace(**kernels, get_mla_metadata=lambda **_: (torch.zeros(1, 7), torch.zeros(7)))
    if thing is flashinfer_mla.BatchMLAPagedAttentionWrapper:

        class Other(flashinfer_mla.BatchMLAPagedAttentionWrapper):
            def run(self, *args: Any, **kwargs: Any) -> Any:
                out, lse = super().run(*args, **kwargs)
                assert lse is not None
                return out, lse * math.log(2.0)  # the other base

        return Other

    def call(*args: Any, **kwargs: Any) -> Any:
        before = [one.clone() if isinstance(one, Tensor) else None for one in args]
        made = thing(*args, **kwargs)
        for one, other in zip(args, before, strict=True):
            if other is not None and not torch.equal(one, other):
                one.copy_(moved(one))
        return made if made is None or isinstance(made, int) else moved(made)

    return call


@pytest.mark.parametrize("one", standins.CHECKS, ids=lambda one: one.name)
def test_a_check_sees_a_kernel_that_computes_something_else(one: standins.Check) -> None:
    row = standins.compare(one, lambda name: wrong(SAME[name]), "cpu")
    assert not row["holds"]
    # An error would say nothing of the comparison.
    assert "Error" not in row.get("error", "") and (row["value"] is None or row["value"] > one.most), row


def test_a_kernel_that_is_not_there_does_not_hold_and_says_why() -> None:
    def load(name: str) -> Any:
        raise ImportError(f"no {name}")

    row = standins.compare(standins.CHECKS[0], load, "cpu")
    assert row["holds"] is False and row["value"] is None and "no sgl_kernel.flash_mla" in row["error"]


def test_every_stand_in_for_a_kernel_is_compared_or_named_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert standins.uncovered() == []
    known = {one.target for one in table.TABLE}
    assert {target for one in standins.CHECKS for target in one.standins} | standins.MISSING.keys() <= known
    monkeypatch.setattr(standins, "MISSING", {})
    assert "sgl_kernel.flash_attn:flash_attn_varlen_func" in standins.uncovered()


def test_the_page_tells_of_each_stand_in_what_was_found(tmp_path: Path) -> None:
    target = "sgl_kernel.top_k:fast_topk_v2"
    row = {"stand_ins": [target], "value": 0.0, "must": "<= 0", "holds": True}
    missing = {"stand_in": "sgl_kernel.flash_attn:flash_attn_varlen_func", "reason": "not there"}
    result = tmp_path / page.RESULT
    assert "| not compared |" in page.text(tmp_path)
    result.parent.mkdir(parents=True)
    result.write_text(json.dumps({"rows": [row, {**row, "holds": False, "value": None}], "missing": [missing]}))
    lines = {line.split("`")[1]: line for line in page.text(tmp_path).splitlines() if line.startswith("| `")}
    assert "agrees: 0, 0; **differs**: an error, 0" in lines[target]
    assert "not compared: not there" in lines["sgl_kernel.flash_attn:flash_attn_varlen_func"]
    result.write_text("[]")
    assert "cannot be read: TypeError" in page.text(tmp_path)
