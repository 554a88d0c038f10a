"""Stand-ins for the paged MLA attention of FlashInfer, at the interface of its wrapper; the engine's backend runs.

Shapes: ``B`` requests, ``T`` query rows of all of them, ``H`` heads, ``L`` latent width, ``R`` rope width.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = ["BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "host_torch"]


class BatchMLAPagedAttentionWrapper:
    """Softmax over each request's own rows, absorbed MLA, in float32; LSE in base 2, -inf for a row without keys."""

    def __init__(self, float_workspace_buffer: Tensor, *args: Any, **kwargs: Any) -> None:
        """Take what the wrapper takes; there is no workspace to keep."""

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Remember which rows belong to which request.

        Args:
            qo_indptr: [B + 1] int, first query row of each request.
            kv_indptr: [B + 1] int, first entry of each request in ``kv_indices``.
            kv_indices: int, row numbers in the cache.
            kv_len_arr: [B] int, rows of each request that count.
        """
        if page_size != 1:
            raise NotImplementedError(f"page size {page_size}: the engine plans with 1")
        self.queries = qo_indptr.tolist()
        self.starts = kv_indptr.tolist()
        self.rows = kv_indices.clone()
        self.lengths = kv_len_arr.tolist()
        self.causal = causal
        self.scale = sm_scale

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q_nope: [T, H, L].
            q_pe: [T, H, R].
            ckv_cache: [rows, 1, L].
            kpe_cache: [rows, 1, R].

        Returns:
            [T, H, L] in the dtype of ``q_nope``, and with ``return_lse`` the LSE [T, H] float32 besides.
        """
        result = torch.zeros_like(q_nope) if out is None else out.zero_()
        total = torch.full(q_nope.shape[:2], -math.inf, dtype=torch.float32)
        query = torch.cat([q_nope, q_pe], -1).float()
        for index, length in enumerate(self.lengths):
            first, last = self.queries[index], self.queries[index + 1]
            if length == 0 or first == last:
                continue
            rows = self.rows[self.starts[index] : self.starts[index] + length].long()
            values = ckv_cache[rows, 0].float()
            keys = torch.cat([values, kpe_cache[rows, 0].float()], -1)
            scores = torch.einsum("thd,kd->thk", query[first:last], keys) * self.scale
            if self.causal:
                place = torch.arange(length - (last - first), length)
                hidden = torch.arange(length)[None] > place[:, None]
                scores = scores.masked_fill(hidden[:, None], -math.inf)
            total[first:last] = torch.logsumexp(scores, -1) / math.log(2.0)
            weights = torch.softmax(scores, -1).nan_to_num(0.0)
            result[first:last] = torch.einsum("thk,kd->thd", weights, values).to(result.dtype)
        return (result, total) if return_lse else result


class BatchPrefillWithRaggedKVCacheWrapper:
    """Refuses to run: the rig starts this backend with --flashinfer-mla-disable-ragged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what the wrapper takes."""

    def begin_forward(self, *args: Any, **kwargs: Any) -> None:
        """Refuse.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the ragged wrapper has no stand-in: use --flashinfer-mla-disable-ragged")


class _HostTorch(ModuleType):
    """PyTorch, except that new tensors asked for by the name ``cuda`` are made in host memory."""

    def __init__(self, original: ModuleType) -> None:
        super().__init__(original.__name__)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def empty(self, *size: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """``torch.empty``; ``cuda`` becomes the CPU."""
        made: Tensor = torch.empty(*size, device="cpu" if device == "cuda" else device, **kwargs)
        return made


def host_torch(original: ModuleType) -> ModuleType:
    """Wrap the name ``torch`` of one module, which asks for its index buffers as ``device="cuda"``."""
    return _HostTorch(original)
