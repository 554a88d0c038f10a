"""The attention stand-ins against plain loops in double precision, and against what was measured on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.rig.standins import attention, flash_attention, flashinfer_mla


def _plain(
    q: list[float], keys: list[list[float]], values: list[list[float]], scale: float
) -> tuple[list[float], float]:
    """One query, one head, in Python floats: output and natural LSE."""
    scores = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    out = [
        sum(weight * value[column] for weight, value in zip(weights, values, strict=True)) / total
        for column in range(len(values[0]))
    ]
    return out, top + math.log(total)


def _close(got: Tensor, want: list[float], tolerance: float = 2e-5) -> bool:
    return bool(torch.allclose(got.double().flatten(), torch.tensor(want, dtype=torch.float64), atol=tolerance, rtol=0))


def test_sparse_attention_follows_the_plain_formula_over_the_named_rows() -> None:
    q, kv = torch.randn(3, 2, 24), torch.randn(50, 1, 24)
    rows = torch.stack([torch.randperm(50)[:7] for _ in range(3)]).int()
    rows[1, 3] = -1
    out, top, lse = attention.flash_mla_sparse_fwd(q, kv, rows[:, None], 0.3, d_v=16)
    for token in range(3):
        named = [row for row in rows[token].tolist() if row >= 0]
        keys = kv[named, 0].tolist()
        for head in range(2):
            want, natural = _plain(q[token, head].tolist(), keys, [key[:16] for key in keys], 0.3)
            assert _close(out[token, head], want)
            assert lse[token, head].item() == pytest.approx(natural / math.log(2), abs=1e-5)
            scores = [0.3 * sum(a * b for a, b in zip(q[token, head].tolist(), key, strict=True)) for key in keys]
            assert top[token, head].item() == pytest.approx(max(scores), abs=1e-5)


def test_the_two_sparse_kernels_disagree_in_the_base_of_their_lse_as_on_sm_90() -> None:
    rows = torch.randn(40, 576)
    cache = attention.quantize_rows(rows).view(torch.float8_e4m3fn).view(40, 1, 1, 656)
    plain = attention.dequantize_rows(cache)
    q, named = torch.randn(2, 3, 576), torch.randint(0, 40, (2, 9), dtype=torch.int32)
    _, _, base_two = attention.flash_mla_sparse_fwd(q, plain, named[:, None], 0.05)
    out, natural = attention.flash_mla_with_kvcache(
        q[:, None], cache, None, None, 512, None, softmax_scale=0.05, is_fp8_kvcache=True, indices=named[:, None]
    )
    assert out.shape == (2, 1, 3, 512)
    assert natural.shape == (2, 3, 1)
    assert torch.allclose(natural[:, :, 0], base_two * math.log(2), atol=1e-5)
    assert not torch.allclose(natural[:, :, 0], base_two, atol=0.5)


def test_an_index_below_zero_or_beyond_the_cache_is_skipped_anywhere() -> None:
    q, kv = torch.randn(2, 1, 8), torch.randn(6, 1, 8)
    holes = torch.tensor([[-1, 2, 99, 4, -1], [0, -1, 5, -1, 6]]).int()
    dense = torch.tensor([[2, 4], [0, 5]]).int()
    with_holes = attention.flash_mla_sparse_fwd(q, kv, holes[:, None], 1.0, d_v=8)
    without = attention.flash_mla_sparse_fwd(q, kv, dense[:, None], 1.0, d_v=8)
    for one, other in zip(with_holes, without, strict=True):
        assert torch.equal(one, other)


def test_entries_beyond_the_given_length_do_not_count() -> None:
    q, kv = torch.randn(2, 1, 8), torch.randn(6, 1, 8)
    rows = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]).int()
    cut = attention.flash_mla_sparse_fwd(q, kv, rows[:, None], 1.0, d_v=8, topk_length=torch.tensor([2, 3]))
    marked = torch.tensor([[0, 1, -1, -1], [3, 2, 1, -1]]).int()
    assert torch.equal(cut[0], attention.flash_mla_sparse_fwd(q, kv, marked[:, None], 1.0, d_v=8)[0])


def test_a_row_without_keys_gives_zeros_and_an_infinite_lse() -> None:
    out, _, lse = attention.flash_mla_sparse_fwd(
        torch.randn(1, 2, 8), torch.randn(4, 1, 8), torch.full((1, 1, 3), -1), 1.0, d_v=8
    )
    assert torch.equal(out, torch.zeros(1, 2, 8))
    assert torch.equal(lse, torch.full((1, 2), math.inf))


def test_partial_results_merge_to_the_whole_only_with_the_right_base() -> None:
    # Peaked scores and ranks of unequal mass: a wrong base must show.
    q, kv = torch.randn(4, 2, 16) * 3, torch.randn(30, 1, 16)
    rows = torch.stack([torch.randperm(30)[:12] for _ in range(4)]).int()
    whole = attention.flash_mla_sparse_fwd(q, kv, rows[:, None], 0.5, d_v=16)[0]
    parts = [attention.flash_mla_sparse_fwd(q, kv, rows[:, None, a:b], 0.5, d_v=16) for a, b in ((0, 3), (3, 12))]
    lse = torch.stack([part[2] for part in parts])
    right = torch.softmax(lse * math.log(2), 0)
    wrong = torch.softmax(lse, 0)
    out = torch.stack([part[0] for part in parts])
    assert torch.allclose((out * right[..., None]).sum(0), whole, atol=1e-5)
    assert not torch.allclose((out * wrong[..., None]).sum(0), whole, atol=1e-2)


def test_packed_rows_read_back_within_the_step_of_their_format() -> None:
    rows = torch.randn(20, 576) * torch.logspace(-3, 2, 20)[:, None]
    packed = attention.quantize_rows(rows)
    assert packed.shape == (20, 656)
    back = attention.dequantize_rows(packed)
    largest = rows[:, :512].reshape(20, 4, 128).abs().amax(-1).repeat_interleave(128, 1)
    # Half a step of a value with 3 bits of mantissa, and below its smallest normal one half of that fixed step.
    bound = torch.maximum(rows[:, :512].abs() / 16, largest / 448 * 2**-10)
    assert bool(((back[:, :512] - rows[:, :512]).abs() <= bound * 1.001).all())
    assert torch.equal(back[:, 512:], rows[:, 512:].to(torch.bfloat16).float())


def test_a_tile_of_zeros_reads_back_as_zeros() -> None:
    rows = torch.randn(1, 576)
    rows[:, 128:256] = 0
    back = attention.dequantize_rows(attention.quantize_rows(rows))
    assert torch.equal(back[:, 128:256], torch.zeros(1, 128))
    assert bool(torch.isfinite(back).all())


def test_rows_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="576 bytes"):
        attention.dequantize_rows(torch.zeros(4, 576, dtype=torch.uint8))


def test_packing_in_two_parts_gives_the_same_bytes_also_from_float32() -> None:
    rows = torch.randn(6, 576).to(torch.bfloat16)
    nope, rope = attention.quantize_separate(rows[:, None, :512].float(), rows[:, None, 512:].float())
    assert (nope.shape, rope.shape) == ((6, 1, 528), (6, 1, 128))
    assert torch.equal(torch.cat([nope, rope], -1)[:, 0], attention.quantize_rows(rows))


@pytest.mark.parametrize("widths", [(511, 64), (512, 63)])
def test_packing_parts_of_other_widths_is_refused(widths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="parts of"):
        attention.quantize_separate(torch.zeros(1, widths[0]), torch.zeros(1, widths[1]))


@pytest.mark.parametrize(
    "extra",
    [
        {"attn_sink": torch.zeros(1)},
        {"extra_k_cache": torch.zeros(1)},
        {"indices": None},
        {"is_fp8_kvcache": False},
    ],
)
def test_the_fp8_kernel_refuses_what_it_does_not_cover(extra: dict[str, Any]) -> None:
    named: dict[str, Any] = {"is_fp8_kvcache": True, "indices": torch.zeros(1, 1, 1, dtype=torch.int32), **extra}
    cache = torch.zeros(1, 1, 1, 656, dtype=torch.uint8)
    with pytest.raises(NotImplementedError):
        attention.flash_mla_with_kvcache(torch.zeros(1, 1, 1, 576), cache, None, None, 512, None, **named)


def test_a_sink_of_the_bf16_kernel_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="sink"):
        attention.flash_mla_sparse_fwd(
            torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), torch.zeros(1, 1, 1), 1.0, attn_sink=torch.zeros(1)
        )


def test_the_work_split_has_the_shapes_that_are_copied_between_buffers() -> None:
    tiles, splits = attention.get_mla_metadata(torch.tensor([3, 4, 5]), 1, 1, 64, True, 2048)
    assert tiles.dtype == torch.int32
    assert splits is not None
    assert splits.shape == (4,)
    with pytest.raises(NotImplementedError):
        attention.get_mla_metadata()


# FlashAttention-3


def _fa_signature(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    qv: Any = None,
    cache_seqlens: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    sinks: Any = None,
    out: Any = None,
) -> Any:
    raise AssertionError("the real kernel must not be called")


def _varlen_signature(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    softmax_scale: Any = None,
    causal: bool = False,
    qv: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
    sinks: Any = None,
    out: Any = None,
) -> Any:
    raise AssertionError("the real kernel must not be called")


_paged = flash_attention.paged(_fa_signature)
_packed = flash_attention.packed(_varlen_signature)


def _cache(lengths: list[int], page: int, groups: int, width: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A paged cache with its pages in random order, the table, and each request's rows in order."""
    pages = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(pages) + 2)
    cache = torch.randn(sum(pages) + 2, page, groups, width)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    rows, used = [], 0
    for index, count in enumerate(pages):
        table[index, :count] = order[used : used + count].int()
        rows.append(cache[order[used : used + count]].flatten(0, 1)[: lengths[index]])
        used += count
    return cache, table, rows


@pytest.mark.parametrize(
    ("causal", "window", "softcap"), [(True, (-1, -1), 0.0), (False, (-1, -1), 0.0), (True, (3, 0), 2.5)]
)
def test_paged_attention_follows_the_plain_formula(causal: bool, window: tuple[int, int], softcap: float) -> None:
    lengths, new = [9, 5], [4, 1]
    keys, table, key_rows = _cache(lengths, 4, 2, 8)
    torch.manual_seed(1)
    values = torch.randn(keys.shape[0], 4, 2, 6)
    value_rows = [values[table[i, : -(-n // 4)].long()].flatten(0, 1)[:n] for i, n in enumerate(lengths)]
    q = torch.randn(5, 4, 8)
    out, lse = _paged(
        q,
        keys,
        values,
        cache_seqlens=torch.tensor(lengths),
        page_table=table,
        cu_seqlens_q=torch.tensor([0, 4, 5]),
        causal=causal,
        window_size=window,
        softcap=softcap,
        return_softmax_lse=True,
    )
    assert out.shape == (5, 4, 6)
    assert lse.shape == (4, 5)
    row = 0
    for request, length in enumerate(lengths):
        for step in range(new[request]):
            at = length - new[request] + step
            seen = [j for j in range(length) if (not causal or j <= at) and (window[0] < 0 or j >= at - window[0])]
            for head in range(4):
                scores = [8**-0.5 * float(q[row, head] @ key_rows[request][j, head // 2]) for j in seen]
                if softcap:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                want = [
                    sum(w * float(value_rows[request][j, head // 2, c]) for w, j in zip(weights, seen, strict=True))
                    / sum(weights)
                    for c in range(6)
                ]
                assert _close(out[row, head], want)
                assert lse[head, row].item() == pytest.approx(top + math.log(sum(weights)), abs=1e-5)
            row += 1


def test_absorbed_attention_equals_attention_over_the_joined_rows() -> None:
    lengths = [7, 12]
    latent, table, rows = _cache(lengths, 4, 1, 20)
    q_all = torch.randn(3, 5, 20)
    out = _paged(
        q_all[..., 16:],
        latent[..., 16:],
        latent[..., :16],
        qv=q_all[..., :16],
        cache_seqlens=torch.tensor(lengths),
        page_table=table,
        cu_seqlens_q=torch.tensor([0, 2, 3]),
        softmax_scale=0.2,
        causal=True,
    )
    for row, (request, last) in enumerate([(0, 6), (0, 7), (1, 12)]):
        keys = rows[request][:last, 0]
        for head in range(5):
            want, _ = _plain(q_all[row, head].tolist(), keys.tolist(), keys[:, :16].tolist(), 0.2)
            assert _close(out[row, head], want)


def test_queries_may_come_as_a_rectangle_without_bounds() -> None:
    lengths = [6, 6]
    keys, table, _ = _cache(lengths, 4, 1, 8)
    q = torch.randn(2, 3, 2, 8)
    named = {"cache_seqlens": torch.tensor(lengths), "page_table": table, "causal": True, "return_softmax_lse": True}
    out, lse = _paged(q, keys, keys, **named)
    flat, flat_lse = _paged(q.flatten(0, 1), keys, keys, cu_seqlens_q=torch.tensor([0, 3, 6]), **named)
    assert torch.equal(out.flatten(0, 1), flat)
    assert torch.equal(lse, flat_lse.reshape(2, 2, 3).transpose(0, 1))


def test_packed_attention_equals_paged_attention_over_the_same_keys() -> None:
    lengths = [9, 5]
    keys, table, rows = _cache(lengths, 4, 2, 8)
    q = torch.randn(14, 4, 8)
    bounds = torch.tensor([0, 9, 14])
    packed, lse = _packed(q, torch.cat(rows), torch.cat(rows), bounds, bounds, causal=True, return_softmax_lse=True)
    paged, paged_lse = _paged(
        q,
        keys,
        keys,
        cache_seqlens=torch.tensor(lengths),
        page_table=table,
        cu_seqlens_q=bounds,
        causal=True,
        return_softmax_lse=True,
    )
    assert torch.allclose(packed, paged, atol=1e-6)
    assert torch.allclose(lse, paged_lse, atol=1e-6)


def test_a_query_before_every_key_gives_zeros() -> None:
    out, lse = _packed(
        torch.randn(3, 1, 4),
        torch.randn(1, 1, 4),
        torch.randn(1, 1, 4),
        torch.tensor([0, 3]),
        torch.tensor([0, 1]),
        causal=True,
        return_softmax_lse=True,
    )
    assert torch.equal(out[:2], torch.zeros(2, 1, 4))
    assert lse[0, :2].tolist() == [-math.inf, -math.inf]


def test_a_given_output_is_written_and_the_dtype_of_the_queries_kept() -> None:
    room = torch.zeros(2, 1, 4, dtype=torch.bfloat16)
    q, k = torch.randn(2, 1, 4).bfloat16(), torch.randn(2, 1, 4)
    bounds = torch.tensor([0, 2])
    out = _packed(q, k, k, bounds, bounds, out=room)
    assert out.dtype == torch.bfloat16
    assert out.data_ptr() == room.data_ptr()
    assert bool((room != 0).any())


@pytest.mark.parametrize("extra", [{"k": torch.zeros(1)}, {"sinks": torch.zeros(1)}])
def test_an_argument_without_a_formula_is_an_error(extra: dict[str, Any]) -> None:
    keys, table, _ = _cache([3], 4, 1, 8)
    with pytest.raises(NotImplementedError, match=next(iter(extra))):
        _paged(
            torch.randn(1, 1, 8),
            keys,
            keys,
            cache_seqlens=torch.tensor([3]),
            page_table=table,
            cu_seqlens_q=torch.tensor([0, 1]),
            **extra,
        )


def test_a_cache_without_a_page_table_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="page table"):
        _paged(torch.randn(1, 1, 8), torch.randn(1, 4, 1, 8), torch.randn(1, 4, 1, 8), cache_seqlens=torch.tensor([3]))


def test_scheduling_arguments_change_nothing() -> None:
    keys, table, _ = _cache([6], 4, 1, 8)
    q = torch.randn(2, 1, 8)
    named = {"cache_seqlens": torch.tensor([6]), "page_table": table, "cu_seqlens_q": torch.tensor([0, 2])}
    assert torch.equal(_paged(q, keys, keys, **named), _paged(q, keys, keys, num_splits=7, max_seqlen_q=2, **named))


# FlashInfer MLA


def test_flashinfer_attention_equals_flash_attention_over_the_same_rows() -> None:
    lengths, new = [7, 12], [2, 1]
    cache = torch.randn(40, 1, 20)
    rows = [torch.randperm(40)[:length] for length in lengths]
    q = torch.randn(3, 5, 20)
    wrapper = flashinfer_mla.BatchMLAPagedAttentionWrapper(torch.empty(1))
    wrapper.plan(
        torch.tensor([0, 2, 3]),
        torch.tensor([0, 7, 19]),
        torch.cat(rows),
        torch.tensor(lengths),
        5,
        16,
        4,
        1,
        True,
        0.2,
        torch.float32,
        torch.float32,
    )
    out, lse = wrapper.run(q[..., :16], q[..., 16:], cache[..., :16], cache[..., 16:], return_lse=True)
    packed = torch.cat([cache[one] for one in rows])
    want, natural = _packed(
        q,
        packed,
        packed[..., :16],
        torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()]),
        torch.tensor([0, 7, 19]),
        softmax_scale=0.2,
        causal=True,
        return_softmax_lse=True,
    )
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.allclose(lse * math.log(2), natural.T, atol=1e-5)


def test_a_request_without_rows_on_this_rank_gives_zeros_and_minus_infinity() -> None:
    wrapper = flashinfer_mla.BatchMLAPagedAttentionWrapper(torch.empty(1))
    empty = torch.zeros(0, dtype=torch.int32)
    wrapper.plan(
        torch.tensor([0, 1]), torch.tensor([0, 0]), empty, torch.tensor([0]), 2, 4, 2, 1, False, 1.0, torch.float32,
        torch.float32,
    )  # fmt: skip
    result = wrapper.run(
        torch.randn(1, 2, 4), torch.randn(1, 2, 2), torch.randn(3, 1, 4), torch.randn(3, 1, 2), return_lse=True
    )
    assert isinstance(result, tuple)
    assert torch.equal(result[0], torch.zeros(1, 2, 4))
    assert torch.equal(result[1], torch.full((1, 2), -math.inf))


def test_the_ragged_wrapper_and_other_page_sizes_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="disable-ragged"):
        flashinfer_mla.BatchPrefillWithRaggedKVCacheWrapper().begin_forward()
    one = torch.tensor([0, 1])
    with pytest.raises(NotImplementedError, match="page size 64"):
        flashinfer_mla.BatchMLAPagedAttentionWrapper(torch.empty(1)).plan(
            one, one, one, one, 1, 4, 2, 64, True, 1.0, torch.float32, torch.float32
        )


def test_memory_asked_for_as_cuda_is_host_memory_and_the_rest_is_torch() -> None:
    proxy: Any = flashinfer_mla.host_torch(torch)
    assert proxy.empty(3, dtype=torch.int32, device="cuda").device.type == "cpu"
    assert proxy.empty(2, 2).shape == (2, 2)
    assert proxy.cumsum is torch.cumsum
