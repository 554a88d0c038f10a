"""The indexer's kernels, the top-k and the page-table transforms against formulas that are written another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.rig.standins import indexer, tables, topk


def _fp8(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def _matrix(width: int) -> Tensor:
    """Hadamard by its closed form: (-1) to the number of common one bits."""
    return torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(width)] for i in range(width)])


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_the_rotation_is_the_product_with_the_matrix_of_bit_parities(width: int) -> None:
    x = torch.randn(3, 2, width)
    assert torch.allclose(indexer.hadamard_transform(x, 0.3), (x @ _matrix(width)) * 0.3, atol=1e-4)


def test_rotating_twice_gives_the_vector_back_and_keeps_its_dtype() -> None:
    x = torch.randn(5, 128).to(torch.bfloat16)
    twice = indexer.hadamard_transform(indexer.hadamard_transform(x.float(), 128**-0.5), 128**-0.5)
    assert torch.allclose(twice, x.float(), atol=1e-4)
    assert indexer.hadamard_transform(x).dtype == torch.bfloat16


@pytest.mark.parametrize("width", [0, 3, 96])
def test_a_width_that_is_no_power_of_two_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"width {width}"):
        indexer.hadamard_transform(torch.zeros(2, width))


def _logit(q: Tensor, weights: Tensor, key: Tensor, scale: float) -> float:
    """One logit in Python floats."""
    total = 0.0
    for head in range(q.shape[0]):
        product = sum(a * b for a, b in zip(q[head].float().tolist(), key.float().tolist(), strict=True))
        total += float(weights[head]) * max(product, 0.0)
    return total * scale


def test_packed_index_logits_follow_the_plain_formula_inside_each_window() -> None:
    q, keys, scales, weights = _fp8(3, 4, 128), _fp8(6, 128), torch.rand(6), torch.randn(3, 4)
    start, end = torch.tensor([0, 2, 1]), torch.tensor([4, 6, 1])
    out = indexer.mqa_logits(q, (keys, scales), weights, start, end, clean_logits=False)
    assert out.shape == (3, 6)
    for row in range(3):
        for key in range(6):
            if start[row] <= key < end[row]:
                want = _logit(q[row], weights[row], keys[key], float(scales[key]))
                assert out[row, key].item() == pytest.approx(want, rel=1e-4, abs=1e-4)
            else:
                assert out[row, key].item() == -math.inf


def _pages(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Index pages as bytes, with their keys and scales beside them."""
    keys, scales = _fp8(count, 64, 128), torch.rand(count, 64) + 0.1
    raw = torch.cat([keys.view(torch.uint8).reshape(count, -1), scales.view(torch.uint8).reshape(count, -1)], 1)
    return raw.view(count, 64, 1, 132), keys, scales


@pytest.mark.parametrize("form", ["rows", "column"])
def test_paged_index_logits_equal_the_packed_ones_over_the_same_keys(form: str) -> None:
    cache, keys, scales = _pages(5)
    table = torch.tensor([[4, 1, 0], [2, 3, 0]], dtype=torch.int32)
    lens = torch.tensor([100, 64])
    q, weights = _fp8(2, 1, 4, 128), torch.randn(2, 4)
    out = indexer.paged_mqa_logits(
        q, cache, weights, lens if form == "rows" else lens[:, None], table, None, 192, clean_logits=False
    )
    for index, length in enumerate(lens.tolist()):
        used = table[index].long()
        flat, scale = keys[used].reshape(-1, 128)[:length], scales[used].reshape(-1)[:length]
        want = indexer.mqa_logits(
            q[index], (flat, scale), weights[index : index + 1], torch.tensor([0]), torch.tensor([length])
        )
        assert torch.allclose(out[index, :length], want[0], atol=1e-4)
        assert bool((out[index, length:] == -math.inf).all())


def test_draft_tokens_of_one_request_each_see_their_own_length() -> None:
    cache, _, _ = _pages(2)
    q, weights = _fp8(1, 3, 4, 128), torch.randn(3, 4)
    lens = torch.tensor([[70, 71, 72]])
    out = indexer.paged_mqa_logits(q, cache, weights, lens, torch.tensor([[1, 0]], dtype=torch.int32), None, 128)
    assert [int((row > -math.inf).sum()) for row in out] == [70, 71, 72]


def test_a_padded_request_of_length_zero_reads_nothing() -> None:
    cache, _, _ = _pages(1)
    bad_page = torch.full((1, 1), 10**6, dtype=torch.int32)
    out = indexer.paged_mqa_logits(_fp8(1, 1, 4, 128), cache, torch.randn(1, 4), torch.tensor([0]), bad_page, None, 64)
    assert bool((out == -math.inf).all())


def test_the_quantiser_keeps_its_values_and_names_an_indexed_device() -> None:
    def original(x: Tensor, block_size: int, scale_fmt: str | None) -> tuple[Tensor, Tensor]:
        assert (block_size, scale_fmt) == (128, "ue8m0")
        return x.to(torch.float8_e4m3fn), torch.ones(x.shape[0], 1)

    x = torch.randn(3, 128)
    values, scales = indexer.act_quant(original)(x, 128, "ue8m0")
    assert values.device.index == 0
    assert values[:2].device.index == 0
    assert torch.full((2,), 1, device=values.device).device.type == "cpu"
    assert torch.equal(values.as_subclass(Tensor).float(), x.to(torch.float8_e4m3fn).float())
    assert type(scales) is Tensor


def test_the_head_gates_are_summed_in_float32() -> None:
    class Holder:
        class weights_proj:
            weight = torch.randn(4, 64).to(torch.bfloat16)

    x = torch.randn(3, 64).to(torch.bfloat16)
    out = indexer.weights_proj(Holder, x)
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), x.double() @ Holder.weights_proj.weight.double().T, atol=1e-4)


# Top-k


def test_the_largest_scores_of_each_window_are_selected() -> None:
    score = torch.randn(4, 40)
    starts, lengths = torch.tensor([0, 5, 10, 0]), torch.tensor([40, 20, 30, 9])
    out = topk.fast_topk_v2(score, lengths, 8, starts)
    for row in range(4):
        window = score[row, starts[row] : starts[row] + lengths[row]]
        bound = window.sort(descending=True).values[7]
        assert {i for i, value in enumerate(window.tolist()) if value >= bound} == set(out[row].tolist())


def test_ties_go_to_the_lower_position() -> None:
    score = torch.arange(5000).remainder(3).float()[None]
    want = [i for i in range(5000) if i % 3 == 2][:40]
    assert topk.fast_topk_v2(score, torch.tensor([5000]), 40).tolist() == [want]


def test_a_short_row_is_selected_whole_in_order_then_minus_one() -> None:
    assert topk.fast_topk_v2(torch.randn(1, 9), torch.tensor([3]), 5).tolist() == [[0, 1, 2, -1, -1]]


@pytest.mark.parametrize("length", [0, -2])
def test_a_padded_row_selects_nothing(length: int) -> None:
    assert topk.fast_topk_v2(torch.randn(1, 9), torch.tensor([length]), 3).tolist() == [[-1, -1, -1]]


def test_selected_positions_become_slots_of_their_own_request() -> None:
    score, table = torch.randn(3, 12), torch.randperm(24).view(2, 12).int()
    lengths, bounds = torch.tensor([12, 12, 2]), torch.tensor([0, 2, 3])
    positions = topk.fast_topk_v2(score, lengths, 4)
    slots = topk.fast_topk_transform_fused(score, lengths, table, bounds, 4)
    for row, request in enumerate([0, 0, 1]):
        want = [-1 if p < 0 else int(table[request, p]) for p in positions[row].tolist()]
        assert slots[row].tolist() == want


def test_ragged_positions_are_shifted_and_minus_one_is_not() -> None:
    out = topk.fast_topk_transform_ragged_fused(
        torch.randn(2, 6), torch.tensor([2, 1]), torch.tensor([10, 50]), 3, torch.tensor([1, 0])
    )
    assert out.tolist() == [[10, 11, -1], [50, -1, -1]]


# Page tables


def _refuses(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("the real kernel must not be called for this width")


def test_narrow_selections_are_looked_up_and_wide_ones_go_to_the_real_kernel() -> None:
    table = torch.randperm(60).view(3, 20).int()
    positions = torch.randint(-1, 20, (3, 5), dtype=torch.int32)
    out = tables.decode_slots(_refuses)(table, positions)
    for row in range(3):
        assert out[row].tolist() == [-1 if p < 0 else int(table[row, p]) for p in positions[row].tolist()]
    wide: Callable[..., Tensor] = tables.decode_slots(lambda *_: torch.tensor([7]))
    assert wide(table, torch.zeros(3, 2048, dtype=torch.int32)).tolist() == [7]


def test_a_given_result_is_written() -> None:
    table, room = torch.arange(10).view(1, 10).int(), torch.zeros(1, 2, dtype=torch.int32)
    out = tables.decode_slots(_refuses)(table, torch.tensor([[3, -1]]), room)
    assert out is room
    assert room.tolist() == [[3, -1]]


def test_prefill_rows_use_their_requests_table_and_padding_is_minus_one() -> None:
    table = torch.randperm(40).view(2, 20).int()
    positions = torch.randint(0, 20, (4, 3), dtype=torch.int32)
    out = tables.prefill_slots(_refuses)(table, positions, [2, 1], output_num_tokens=6)
    assert out.shape == (6, 3)
    for row, request in enumerate([0, 0, 1]):
        assert out[row].tolist() == [int(table[request, p]) for p in positions[row].tolist()]
    assert bool((out[3:] == -1).all())


def test_an_expanded_table_has_one_row_for_each_query() -> None:
    table = torch.randperm(60).view(3, 20).int()
    positions = torch.tensor([[1], [2], [3]])
    out = tables.prefill_slots(_refuses)(table, positions, [3], page_table_is_expanded=True)
    assert out.flatten().tolist() == [int(table[row, row + 1]) for row in range(3)]


def test_tables_and_rows_that_do_not_fit_are_refused() -> None:
    table = torch.zeros(2, 20, dtype=torch.int32)
    with pytest.raises(ValueError, match="2 tables for 3 rows"):
        tables.decode_slots(_refuses)(table, torch.zeros(3, 5, dtype=torch.int32))
    with pytest.raises(ValueError, match="4 real rows"):
        tables.prefill_slots(_refuses)(table, torch.zeros(3, 5, dtype=torch.int32), [2, 2])
    with pytest.raises(ValueError, match="page size 64"):
        tables.prefill_slots(_refuses)(table, torch.zeros(3, 5, dtype=torch.int32), [3], page_size=64)


def test_each_new_row_may_see_one_key_more_than_the_row_before_and_never_less_than_none() -> None:
    out = tables.seqlens_expand(torch.tensor([3, 0, 2]), torch.tensor([10, 4, 1]), 5, 3)
    assert out.dtype == torch.int32
    assert out.tolist() == [8, 9, 10, 0, 1]
