"""Conversion of floats by the card itself, for ``standins.py``; apart, since importing Triton fixes how it runs."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton import language as tl

BLOCK = 1024


# Triton compiles annotations too, and knows no others than its own.
@triton.jit  # type: ignore[untyped-decorator]
def _convert(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < count
    value = tl.load(source + place, mask=inside)
    tl.store(target + place, value.to(target.dtype.element_ty), mask=inside)


def converted(source: Tensor, target: torch.dtype) -> Tensor:
    """Convert ``source``, on a GPU, to another float type; to nearest, beyond an fp8 type's range to its largest."""
    made = torch.empty(source.shape, dtype=target, device=source.device)
    _convert[(triton.cdiv(source.numel(), BLOCK),)](source, made, source.numel(), block=BLOCK)
    return made
