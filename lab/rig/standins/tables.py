"""Stand-ins for Triton kernels around the page tables, where their launching functions refuse a CPU.

The kernels that turn selected positions into slots are compiled for 2048 selected positions. With exactly that many
they run, interpreted; a tiny model that selects fewer goes through the formulas here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["decode_slots", "prefill_slots", "seqlens_expand", "slots_of"]

KERNEL_WIDTH = 2048


def slots_of(page_table: Tensor, positions: Tensor) -> Tensor:
    """Look each position up in its row: ``out[t, j] = page_table[t, positions[t, j]]``, -1 stays -1.

    Args:
        page_table: [T, L] int. positions: [T, K] int.

    Returns:
        [T, K] int32.
    """
    found = page_table.gather(1, positions.clamp_min(0).long()).int()
    return found.masked_fill(positions < 0, -1)


def decode_slots(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the decode transform: one row of the page table for each row of positions.

    The wrapped function takes ``page_table`` [T, L], ``topk_indices`` [T, K] and returns [T, K] int32 slots.
    """

    def transform_index_page_table_decode_fast(
        page_table: Tensor, topk_indices: Tensor, result: Tensor | None = None, page_size: int = 1
    ) -> Tensor:
        if topk_indices.shape[1] == KERNEL_WIDTH:
            return original(page_table, topk_indices, result, page_size)
        if page_size != 1 or page_table.shape[0] != topk_indices.shape[0]:
            raise ValueError(f"page size {page_size}, {page_table.shape[0]} tables for {topk_indices.shape[0]} rows")
        slots = slots_of(page_table, topk_indices)
        return slots if result is None else result.copy_(slots)

    return transform_index_page_table_decode_fast


def prefill_slots(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the prefill transform: one row of the page table for each request, or for each row if expanded.

    The wrapped function takes ``page_table`` [B or T, L], ``topk_indices`` [T, K], the rows of each request, and
    returns [output_num_tokens, K] int32 slots; rows beyond the requests' hold -1.
    """

    def transform_index_page_table_prefill_fast(
        page_table: Tensor,
        topk_indices: Tensor,
        extend_lens_cpu: list[int],
        page_size: int = 1,
        output_num_tokens: int | None = None,
        page_table_is_expanded: bool = False,
        cu_seqlens_q: Tensor | None = None,
    ) -> Tensor:
        if topk_indices.shape[1] == KERNEL_WIDTH:
            return original(
                page_table,
                topk_indices,
                extend_lens_cpu,
                page_size,
                output_num_tokens,
                page_table_is_expanded,
                cu_seqlens_q,
            )
        rows, width = topk_indices.shape
        real = sum(extend_lens_cpu)
        total = rows if output_num_tokens is None else output_num_tokens
        if page_size != 1 or not real <= rows <= total:
            raise ValueError(f"page size {page_size}; {real} real rows, {rows} rows of positions, {total} wanted")
        out = torch.full((total, width), -1, dtype=torch.int32)
        if page_table_is_expanded:
            tables = page_table[:real]
        else:
            tables = page_table.repeat_interleave(torch.tensor(extend_lens_cpu), dim=0)
        out[:real] = slots_of(tables, topk_indices[:real])
        return out

    return transform_index_page_table_prefill_fast


def seqlens_expand(extend_seq_lens: Tensor, seq_lens: Tensor, total_len: int, max_q_len: int) -> Tensor:
    """The number of keys that each new row may see.

    A request with ``n`` new rows and ``L`` keys gives ``L - n + 1, ..., L``, never below 0 (padded rows).

    Args:
        extend_seq_lens, seq_lens: [B] int. total_len: the sum of the first.

    Returns:
        [total_len] int32.
    """
    out = torch.zeros(total_len, dtype=torch.int32)
    filled = 0
    for new, length in zip(extend_seq_lens.tolist(), seq_lens.tolist(), strict=True):
        out[filled : filled + new] = torch.arange(length - new + 1, length + 1, dtype=torch.int32).clamp_min(0)
        filled += new
    return out
