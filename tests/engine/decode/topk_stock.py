"""What the selection kernels return, written down for a CPU: the stock engine's and, by its contract, ours.

The funnel under test is the engine's own file. These stand where it would launch a kernel, and each records its call.
All choose by the oracle, so that two routes agree exactly when they hand over the same rows, windows and tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.engine.decode import topk_oracle as oracle
from tests.engine.load import stub


def _row(
    scores: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    row: int,
    k: int,
    table: Tensor | None,
    page: int,
    offset: int,
) -> Tensor:
    start = 0 if starts is None else int(starts[row])
    chosen = oracle.by_partition(scores[row].numpy(), int(lengths[row]), k, start)
    if table is not None:
        return torch.from_numpy(oracle.padded(chosen, k, oracle.paged(table.numpy(), page)))
    return torch.from_numpy(oracle.padded(chosen + offset, k))


def _owner(segments: Tensor, row: int) -> int:
    return next(j for j in range(segments.shape[0] - 1) if segments[j] <= row < segments[j + 1])


class Kernels:
    """Fakes of every kernel that the funnel can reach; ``calls`` holds their names in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ours: list[dict[str, Any]] = []

    # The stock engine's.
    def fast_topk_v2(self, score: Tensor, lengths: Tensor, topk: int, row_starts: Tensor | None = None) -> Tensor:
        self.calls.append("fast_topk_v2")
        return torch.stack([_row(score, lengths, row_starts, i, topk, None, 1, 0) for i in range(score.shape[0])])

    def fast_topk_transform_fused(
        self,
        score: Tensor,
        lengths: Tensor,
        page_table_size_1: Tensor,
        cu_seqlens_q: Tensor,
        topk: int,
        row_starts: Tensor | None = None,
    ) -> Tensor:
        self.calls.append("fast_topk_transform_fused")
        count = score.shape[0]
        assert page_table_size_1.shape[0] == cu_seqlens_q.shape[0] - 1
        plain = row_starts is None and page_table_size_1.shape[0] == count
        owner = [i if plain else _owner(cu_seqlens_q, i) for i in range(count)]
        return torch.stack(
            [_row(score, lengths, row_starts, i, topk, page_table_size_1[owner[i]], 1, 0) for i in range(count)]
        )

    def fast_topk_transform_ragged_fused(
        self, score: Tensor, lengths: Tensor, topk_indices_offset: Tensor, topk: int, row_starts: Tensor | None = None
    ) -> Tensor:
        self.calls.append("fast_topk_transform_ragged_fused")
        offsets = topk_indices_offset.tolist()
        return torch.stack(
            [_row(score, lengths, row_starts, i, topk, None, 1, offsets[i]) for i in range(score.shape[0])]
        )

    def topk_transform_512_v2(
        self, scores: Tensor, lengths: Tensor, table: Tensor, out: Tensor, page: int, plan: Tensor
    ) -> None:
        self.calls.append("topk_transform_512_v2")
        for i in range(scores.shape[0]):
            out[i] = _row(scores, lengths, None, i, out.shape[1], table[i], page, 0)

    def _flashinfer(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(f"flashinfer.{name}")
            if name == "top_k":
                return torch.topk(args[0], args[1], dim=-1)
            return torch.full((args[0].shape[0], args[3]), 5, dtype=torch.int32)

        return call

    # Ours, by its contract.
    def select(
        self,
        scores: Tensor,
        lengths: Tensor,
        k: int,
        *,
        starts: Tensor | None = None,
        offsets: Tensor | None = None,
        table: Tensor | None = None,
        page_size: int = 1,
        segments: Tensor | None = None,
        segment_table: Tensor | None = None,
        table_may_be_short: bool = False,
    ) -> Tensor:
        self.calls.append("ours")
        self.ours.append({"page_size": page_size, "table": table, "offsets": offsets, "starts": starts})
        for tensor in (lengths, starts, offsets, table, segments, segment_table):
            assert tensor is None or (tensor.dtype == torch.int32 and tensor.stride(-1) == 1)
        made = []
        for i in range(scores.shape[0]):
            own = None
            if table is not None:
                at = i if segments is None else _owner(segments, i)
                own = table[at if segment_table is None else int(segment_table[at])]
            offset = 0 if offsets is None else int(offsets[i])
            made.append(_row(scores, lengths, starts, i, k, own, page_size, offset))
        return torch.stack(made)

    def modules(self, fuse: bool, v2: bool) -> dict[str, ModuleType]:
        """Stand-ins for what the funnel's file imports."""

        def switch(value: Any) -> Any:
            return SimpleNamespace(get=lambda: value)

        envs = SimpleNamespace(
            SGLANG_DSA_FUSE_TOPK=switch(fuse),
            SGLANG_OPT_USE_TOPK_V2=switch(v2),
            SGLANG_DSA_TOPK_FLASHINFER_DETERMINISTIC=switch(False),
            SGLANG_DSA_TOPK_FLASHINFER_TIE_BREAK=switch(None),
        )
        names: Sequence[str] = ("fast_topk_v2", "fast_topk_transform_fused", "fast_topk_transform_ragged_fused")
        infer = ("top_k", "top_k_page_table_transform", "top_k_ragged_transform")
        return {
            "sglang.srt.environ": stub("environ", envs=envs),
            "sgl_kernel": stub("sgl_kernel", **{name: getattr(self, name) for name in names}),
            "flashinfer": stub("flashinfer", **{name: self._flashinfer(name) for name in infer}),
            "sglang.kernels.ops.attention.dsv4.topk": stub("topk", topk_transform_512_v2=self.topk_transform_512_v2),
        }
