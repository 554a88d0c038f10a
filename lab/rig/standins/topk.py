"""Stand-ins for the top-k kernels of sgl-kernel, with their own signatures, for any ``topk``.

The wheel's wrappers accept ``topk == 2048`` only; a tiny model whose index top-k is smaller than its prompts needs
less. Selection is exact here: the ``topk`` largest scores of a row's window, ties to the lower position. The real
kernels choose among ties in any order, so a test must not depend on one. Positions beyond a row's length and slots
beyond the selected ones are -1. A row not longer than ``topk`` gives 0, 1, 2, ... in order, as the real ones do.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fast_topk_transform_fused", "fast_topk_transform_ragged_fused", "fast_topk_v2"]


def fast_topk_v2(score: Tensor, lengths: Tensor, topk: int, row_starts: Tensor | None = None) -> Tensor:
    """Select positions, relative to each row's window.

    Args:
        score: [T, L] float. lengths: [T] int. row_starts: [T] int or none: first column of each row's window.

    Returns:
        [T, topk] int32.
    """
    out = torch.full((score.shape[0], topk), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        start = 0 if row_starts is None else int(row_starts[row])
        window = score[row, start : start + length]
        if length <= topk:
            chosen = torch.arange(max(length, 0))
        else:
            chosen = torch.sort(window, descending=True, stable=True).indices[:topk]
        out[row, : chosen.numel()] = chosen.int()
    return out


def fast_topk_transform_fused(
    score: Tensor,
    lengths: Tensor,
    page_table_size_1: Tensor,
    cu_seqlens_q: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
) -> Tensor:
    """Select positions and turn them into slots.

    Args:
        page_table_size_1: [B, L] int32, the slot of each position of each request.
        cu_seqlens_q: [B + 1] int32, rows of each request in ``score``.

    Returns:
        [T, topk] int32 slots, -1 where nothing was selected.
    """
    chosen = fast_topk_v2(score, lengths, topk, row_starts)
    rows = torch.arange(score.shape[0])
    request = torch.searchsorted(cu_seqlens_q.long(), rows, right=True) - 1
    slots = page_table_size_1[request].gather(1, chosen.clamp_min(0).long()).int()
    return slots.masked_fill(chosen < 0, -1)


def fast_topk_transform_ragged_fused(
    score: Tensor,
    lengths: Tensor,
    topk_indices_offset: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
) -> Tensor:
    """Select positions and add each row's offset into the flattened keys.

    Args:
        topk_indices_offset: [T] int.

    Returns:
        [T, topk] int32, -1 where nothing was selected.
    """
    chosen = fast_topk_v2(score, lengths, topk, row_starts)
    return (chosen + topk_indices_offset[:, None].int()).masked_fill(chosen < 0, -1)
