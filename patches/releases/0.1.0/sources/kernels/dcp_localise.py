"""From slots of the whole DCP group to the rows of one rank: one small launch for each attention layer."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

BLOCK = 1024


# Triton compiles annotations too, and knows no others than its own.
@triton.jit
def _localise(slots, rows, count, rank, size: tl.constexpr, block: tl.constexpr):  # noqa: ANN001, ANN202
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    slot = tl.load(slots + place, mask=inside, other=-1)
    owned = (slot >= 0) & (slot % size == rank)
    tl.store(rows + place, tl.where(owned, slot // size, -1), mask=inside)


def localise(slots: Tensor, rank: int, size: int) -> Tensor:
    """Give the local row of each slot that ``rank`` of ``size`` owns, and -1 for every other entry.

    Args:
        slots: int32 ``[rows, selected]`` on a GPU, -1 where nothing was selected.

    Returns:
        A new tensor of the same shape and dtype. Safe to capture in a CUDA graph.
    """
    slots = slots.contiguous()
    rows = torch.empty_like(slots)
    count = slots.numel()
    if count:
        _localise[(triton.cdiv(count, BLOCK),)](slots, rows, count, rank, size, BLOCK)
    return rows
