"""Checks that need the whole engine but no running one: the stand-ins beside the real kernels, interpreted.

Run by ``test_real_kernels.py`` with an engine environment's own Python, which has no pytest. Prints one line of JSON:
each check's name with an empty string, or with what went wrong.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lab.rig.standins import attention, indexer, interpreter, speculative, table, tables

CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


@check
def every_stand_in_is_in_place_after_its_module_was_imported() -> None:
    version = os.environ["PATCHBUNDLE_RIG_ENGINE"]
    for entry in table.for_version(version):
        module = importlib.import_module(entry.module)
        if entry.how == "empty":
            assert not [name for name in vars(module) if not name.startswith("__")], entry.target
            continue
        found: Any = module
        for part in entry.name.split("."):
            found = getattr(found, part)
        source, _, name = entry.by.partition(":")
        ours = getattr(importlib.import_module(f"lab.rig.standins.{source}"), name)
        if entry.how == "wrap":
            code = getattr(found, "__code__", None)
            where = type(found).__module__ if code is None else code.co_filename.replace(os.sep, ".")
            assert f"lab.rig.standins.{source}" in where, entry.target
        else:
            assert found is ours, entry.target


@check
def the_real_quantiser_of_the_indexer_rounds_as_the_definition_says() -> None:
    kernel = importlib.import_module("sglang.kernels.ops.attention.dsa.triton_kernel")
    x = torch.randn(9, 3, 128).to(torch.bfloat16) * torch.logspace(-3, 3, 9)[:, None, None].to(torch.bfloat16)
    for scale_format in (None, "ue8m0"):
        values, scales = kernel.act_quant(x, 128, scale_format)
        wide = x.float()
        want = wide.abs().amax(-1, keepdim=True).clamp_min(1e-4) * (1.0 / 448.0)
        if scale_format is not None:
            want = torch.exp2(torch.ceil(torch.log2(want)))
        assert torch.allclose(scales, want, rtol=1e-6, atol=0)
        back = values.as_subclass(Tensor).float() * scales
        # Half a step of three bits of mantissa, and half of the smallest step: a lost carry would be half the value.
        bound = torch.maximum(wide.abs() / 16, scales * 2.0**-10) * 1.001
        assert bool(((back - wide).abs() <= bound).all())


@check
def a_value_beyond_the_range_is_clamped_by_this_version_of_pytorch_too() -> None:
    got = interpreter.convert(torch.tensor([449.0, 1e6, -1e6, float("inf")]), torch.float8_e4m3fn)
    assert got.float().tolist() == [448.0, 448.0, -448.0, 448.0]


@check
def the_real_row_packer_writes_the_same_bytes() -> None:
    kernel = importlib.import_module("sglang.kernels.ops.attention.dsa.quant_k_cache")
    nope, rope = torch.randn(5, 512).to(torch.bfloat16), torch.randn(5, 64).to(torch.bfloat16)
    nope = nope * torch.logspace(-2, 2, 5)[:, None].to(torch.bfloat16)
    real = kernel._quantize_k_cache_fast_separate(k_nope=nope, k_rope=rope, group_size=128)
    ours = attention.quantize_separate(nope, rope)
    for one, other in zip(real, ours, strict=True):
        assert torch.equal(one.reshape(5, -1).view(torch.uint8), other.reshape(5, -1))


@check
def the_real_index_writer_makes_pages_that_the_logits_read() -> None:
    accessor = importlib.import_module("sglang.kernels.ops.attention.dsa.index_buf_accessor")

    class Pool:
        page_size = 64
        index_head_dim = 128

    cache = torch.zeros(4, 64 * 132, dtype=torch.uint8)
    keys, scales = torch.randn(100, 128).to(torch.float8_e4m3fn), torch.rand(100, 1) + 0.1
    slots = torch.randperm(64)[:36].add(64).tolist() + torch.arange(128, 192).tolist()
    accessor.SetKAndS.execute(Pool, buf=cache, loc=torch.tensor(slots), index_k=keys, index_k_scale=scales)
    table_ = torch.tensor([[2]], dtype=torch.int32)
    q, weights = torch.randn(1, 1, 4, 128).to(torch.float8_e4m3fn), torch.randn(1, 4)
    paged = indexer.paged_mqa_logits(q, cache.view(4, 64, 1, 132), weights, torch.tensor([64]), table_, None, 64)
    want = indexer.mqa_logits(q[:, 0], (keys[36:], scales[36:, 0]), weights, torch.tensor([0]), torch.tensor([64]))
    assert torch.equal(paged, want)
    back, back_scale = accessor.GetKAndS.execute(Pool, cache, table_, torch.tensor([64]), 64, 64)
    assert torch.equal(back, keys[36:].view(torch.uint8))
    assert torch.equal(back_scale.view(torch.float32), scales[36:])


@check
def the_real_page_table_transforms_agree_at_the_width_they_accept() -> None:
    kernel = importlib.import_module("sglang.kernels.ops.attention.dsa.transform_index")
    page_table = torch.randperm(2 * 300).view(2, 300).int()
    positions = torch.randint(-1, 300, (2, 2048), dtype=torch.int32)
    real = kernel.transform_index_page_table_decode(page_table=page_table, topk_indices=positions)
    assert torch.equal(real, tables.slots_of(page_table, positions))
    rows = torch.randint(-1, 300, (5, 2048), dtype=torch.int32)
    real = kernel.transform_index_page_table_prefill(
        page_table=page_table, topk_indices=rows, extend_lens_cpu=[3, 2], output_num_tokens=6
    )
    want = tables.slots_of(page_table.repeat_interleave(torch.tensor([3, 2]), 0), rows)
    assert torch.equal(real[:5], want)
    assert bool((real[5:] == -1).all())


@check
def the_real_length_kernel_agrees() -> None:
    kernel = importlib.import_module("sglang.kernels.ops.attention.pad").seqlens_expand_kernel
    new, lengths = torch.tensor([3, 1, 4], dtype=torch.int32), torch.tensor([9, 5, 2], dtype=torch.int32)
    offsets = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    out = torch.empty(8, dtype=torch.int32)
    kernel[(3,)](new, lengths, offsets, out, 3, BLOCK=4)
    assert torch.equal(out, tables.seqlens_expand(new, lengths, 8, 4))


def _tree(topk: int, steps: int, count: int) -> tuple[Tensor, Tensor]:
    """A random tree as the draft makes it: the parents' places and the selected candidates, in rising order.

    Step 0 proposes ``topk`` candidates; every later step expands ``topk`` of the step before into ``topk`` each.
    """
    parents, children = [-1, *range(topk)], list(range(topk))
    offset = topk
    for _ in range(1, steps):
        grown = [offset + i for i in range(topk * topk)]
        children += grown
        parents += [grown[int(i)] for i in torch.randperm(topk * topk)[:topk].sort().values]
        offset += topk * topk
    parents = parents[: topk * (steps - 1) + 1]
    while True:
        chosen = sorted(children[int(i)] for i in torch.randperm(len(children))[: count - 1])
        if all(one // topk == 0 or parents[one // topk] in chosen for one in chosen):
            return torch.tensor([parents]), torch.tensor([chosen])


@check
def the_real_tree_kernels_build_and_verify_the_same_trees() -> None:
    module = importlib.import_module("sglang.srt.speculative.eagle_utils")
    build = importlib.import_module("sglang.kernels.ops.speculative.spec_tree").sgl_build_tree_kernel_efficient_triton
    for topk, steps, count, mode in ((1, 3, 4, 0), (1, 3, 4, 1), (2, 3, 5, 0), (2, 3, 5, 1), (3, 2, 6, 1)):
        pairs = [_tree(topk, steps, count) for _ in range(2)]
        parents, chosen = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
        lengths = torch.tensor([5, 8])
        size = int(((lengths + count) * count).sum()) if mode == 0 else 2 * count * count
        made = []
        for real in (True, False):
            mask, positions = torch.ones(size, dtype=torch.bool), torch.zeros(2 * count, dtype=torch.int64)
            index, following, sibling = (torch.full((2, count), -1) for _ in range(3))
            outputs = (mask, positions, index, following, sibling)
            if real:
                before = torch.cumsum(lengths, 0) - lengths
                build[(2,)](
                    parents, chosen, lengths, before, *outputs, topk=topk, depth=steps, draft_token_num=count,
                    tree_mask_mode=mode, batch_size=2, parent_list_stride=parents.stride(0),
                    selected_index_stride=chosen.stride(0),
                )  # fmt: skip
            else:
                speculative.build_tree(parents, chosen, lengths, *outputs, topk, steps, count, mode)
            made.append(outputs)
        for one, other in zip(*made, strict=True):
            assert torch.equal(one, other), (topk, steps, count, mode)
        candidates, wanted = torch.randint(0, 3, (2, count)), torch.randint(0, 3, (2, count))
        accepted = []
        for verify in (module.verify_tree_greedy_triton, speculative.verify_tree_greedy):
            predicts = torch.full((2 * count,), -1, dtype=torch.int32)
            index, number = torch.full((2, steps + 1), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
            verify(predicts, index, number, candidates, *made[0][2:], wanted)
            accepted.append((predicts, index, number))
        for one, other in zip(*accepted, strict=True):
            assert torch.equal(one, other), (topk, steps, count)


def main() -> None:
    out = {}
    for function in CHECKS:
        torch.manual_seed(20261129)
        try:
            function()
            out[function.__name__] = ""
        except Exception:
            out[function.__name__] = traceback.format_exc(limit=-3)
    sys.stdout.write(json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
