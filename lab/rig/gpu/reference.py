"""Runs inside an engine on the GPU machine: a top-k of plain Torch, in the exact one's place or beside the stock one.

``PATCHBUNDLE_RIG_TOPK=reference``: where the gate ``SGLANG_RESEARCH_EXACT_TOPK`` is on, every selection is made by
:func:`select` instead of the kernel. ``PATCHBUNDLE_RIG_TOPK=watch``: every fused selection is made as the engine makes
it and by :func:`select` besides; rows whose members differ are counted, and told when the cache is emptied.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

from lab.rig.gpu import counts
from lab.rig.standins import hook

# Rows that are sorted at once: 512 rows of 100,000 columns take 600 MB.
ROWS = 512


def _one(scores: Any, first: Any, last: Any, k: int) -> Any:
    """Columns of the ``k`` best scores of some rows inside their windows, ascending, -1 behind; int64."""
    import torch

    width = scores.shape[1]
    columns = torch.arange(width, device=scores.device)
    inside = (columns >= first[:, None]) & (columns < last[:, None])
    keys = torch.where(inside & ~scores.isnan(), scores.float(), -torch.inf)
    # Stable: among equal scores the lowest column comes first.
    order = torch.sort(keys, dim=1, descending=True, stable=True).indices[:, :k]
    count = (last - first).clamp(min=0, max=k)
    kept = torch.where(torch.arange(order.shape[1], device=scores.device) < count[:, None], order, width)
    kept = torch.nn.functional.pad(kept.sort(dim=1).values, (0, k - kept.shape[1]), value=width)
    return torch.where(kept < width, kept, -1)


def select(
    scores: Any,
    lengths: Any,
    k: int,
    *,
    starts: Any = None,
    offsets: Any = None,
    table: Any = None,
    page_size: int = 1,
    segments: Any = None,
    segment_table: Any = None,
    table_may_be_short: bool = False,
) -> Any:
    """What ``exact_topk.select`` says, by a stable sort; scores inside the windows are finite.

    Args:
        scores: float ``[rows, width]``; the others as there.

    Returns:
        int32 ``[rows, k]``.
    """
    import torch

    rows, width = scores.shape
    first = torch.zeros_like(lengths) if starts is None else starts
    last = (first + lengths.clamp(min=0)).clamp(max=width)
    parts = [slice(low, low + ROWS) for low in range(0, rows, ROWS)]
    chosen = torch.cat([_one(scores[part], first[part], last[part], k) for part in parts] or [scores.new_zeros(0, k)])
    local = torch.where(chosen < 0, -1, chosen - first[:, None])
    if offsets is not None:
        local = torch.where(local < 0, -1, local + offsets[:, None])
    if table is not None:
        at = torch.arange(rows, device=scores.device)
        if segments is not None:
            at = torch.searchsorted(segments.long(), at, right=True) - 1
            outside = (at < 0) | (at >= segments.shape[0] - 1)
            at = at.clamp(min=0, max=segments.shape[0] - 2)
            at = at if segment_table is None else segment_table.long()[at]
            local = torch.where(outside[:, None], -1, local)
        page = local.clamp(min=0) // page_size
        known = (local >= 0) & (page < table.shape[1])
        slots = table[at[:, None], page.clamp(max=table.shape[1] - 1)].long() * page_size + local % page_size
        local = torch.where(known, slots, -1)
    return local.to(torch.int32)


def _replace(module: ModuleType) -> None:
    vars(module)["select"] = select
    vars(module)["prepare"] = lambda device: None


class _Watch:
    """Counts rows of stock selections whose members are not the reference's."""

    def __init__(self) -> None:
        self.rows = 0
        self.wrong: Any = 0
        self.again: Any = 0

    def install(self, module: ModuleType) -> None:
        """Compare every fused selection of the funnel."""
        backend: Any = module.DSATopKBackend
        stock = backend.topk_transform

        def topk_transform(
            this: Any,
            logits: Any,
            lengths: Any,
            topk: int,
            topk_transform_method: Any,
            attn_metadata: Any,
            cu_seqlens_q_topk: Any = None,
            topk_indices_offset: Any = None,
            row_starts: Any = None,
            batch_idx_list: Any = None,
            force_unfused_topk: bool = False,
        ) -> Any:
            more = (cu_seqlens_q_topk, topk_indices_offset, row_starts, batch_idx_list)
            arguments = (logits, lengths, topk, topk_transform_method, attn_metadata, *more)
            found = stock(this, *arguments, force_unfused_topk)
            if not force_unfused_topk:
                second = stock(this, *arguments, force_unfused_topk)
                exact_topk = importlib.import_module("sglang.srt.research.exact_topk")
                kernel = importlib.import_module("sglang.srt.research.kernels.exact_topk")
                theirs, vars(kernel)["select"] = kernel.select, select
                try:
                    right = exact_topk.transform(*arguments)
                finally:
                    vars(kernel)["select"] = theirs
                self.rows += found.shape[0]
                differs = found.sort(dim=1).values != right.sort(dim=1).values
                self.wrong = self.wrong + differs.any(dim=1).sum()
                self.again = self.again + (found != second).any(dim=1).sum()
            return found

        backend.topk_transform = topk_transform

    def tell(self, module: ModuleType) -> None:
        """Tell the counts whenever the cache is emptied."""

        def counted() -> dict[str, int]:
            return {"rows": self.rows, "wrong": int(self.wrong), "unlike_again": int(self.again)}

        counts.tell(module, "selections", counted)


def register(mode: str) -> None:
    """Register with the import hook what ``mode`` names; nothing when it is empty.

    Raises:
        ValueError: another mode.
    """
    if mode == "reference":
        hook.after("sglang.srt.research.kernels.exact_topk")(_replace)
    elif mode == "watch":
        watch = _Watch()
        hook.after("sglang.srt.layers.attention.dsa.dsa_topk_backend")(watch.install)
        hook.after("sglang.srt.managers.scheduler")(watch.tell)
    elif mode:
        raise ValueError(f"PATCHBUNDLE_RIG_TOPK={mode}: reference or watch")
    hook.install()


register(os.environ.get("PATCHBUNDLE_RIG_TOPK", ""))
