"""The engine's side of the exact top-k: both funnels of the sparse-attention indexer end here when the gate is on.

The stock selection keeps a bounded number of candidates in the order in which threads arrive. It can return wrong
members and another order at every launch, so ranks that should agree need not. With the gate on, every selection of
the DSA indexer is the exact one of ``kernels/exact_topk.cu``: ties to the lowest position, ascending, -1 behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.research import gates

if TYPE_CHECKING:
    from torch import Tensor

GATE = "SGLANG_RESEARCH_EXACT_TOPK"
ON: bool = gates.enabled(GATE)


class ExactTopkRefused(RuntimeError):
    """The gate is on where the exact top-k was not made for. Raised at the start, or before a launch."""


def refuse(what: str) -> None:
    """Stop the start of an engine part whose top-k does not pass through our funnel.

    Raises:
        ExactTopkRefused: the gate is on.
    """
    if ON:
        raise ExactTopkRefused(f"{GATE} is on, but the exact top-k was not made for {what}")


def admit(backend: Any, server_args: Any) -> None:
    """Check an attention backend at its start and build the kernel, so that no request and no capture has to.

    Args:
        backend: the ``DeepseekSparseAttnBackend`` being made; read are ``device``, ``dsa_topk_backend``,
            ``dsa_index_topk``, ``real_page_size`` and ``hisparse_coordinator``.
        server_args: the engine's arguments.

    Raises:
        ExactTopkRefused: the gate is on and a condition does not hold; the message names it.
        sglang.srt.research.kernels.build.KernelBuildError: no usable source, card or compiler.
    """
    if not ON:
        return
    import torch
    from sglang.srt.research.kernels import exact_topk as kernel

    if torch.version.hip is not None or torch.device(backend.device).type != "cuda":
        raise ExactTopkRefused(f"{GATE} is on, but {backend.device} is not a CUDA device")
    if not backend.dsa_topk_backend.is_sgl_kernel():
        raise ExactTopkRefused(
            f"{GATE} is on together with --dsa-topk-backend {backend.dsa_topk_backend.value}: choose one of them"
        )
    if backend.hisparse_coordinator is not None:
        raise ExactTopkRefused(f"{GATE} is on together with HiSparse, which it was never tried with")
    if server_args.enable_hierarchical_cache:
        raise ExactTopkRefused(f"{GATE} is on together with a hierarchical cache, which it was never tried with")
    if not backend.dsa_index_topk or not 1 <= backend.dsa_index_topk <= kernel.LARGEST_K:
        raise ExactTopkRefused(f"{GATE} is on, but the model selects {backend.dsa_index_topk} positions, not 1 to 2048")
    page = backend.real_page_size
    if page < 1 or page & (page - 1):
        raise ExactTopkRefused(f"{GATE} is on, but the page size {page} is not a power of two")
    kernel.prepare(backend.device)


def rows(scores: Tensor, lengths: Tensor, k: int, row_starts: Tensor | None) -> Tensor:
    """Select without a map: positions relative to each row's start.

    Args:
        scores: float32 ``[rows, width]``, columns adjacent.
        lengths: ``[rows]``.
        k: positions to select.
        row_starts: ``[rows]`` or None.

    Returns:
        int32 ``[rows, k]``.

    Raises:
        sglang.srt.research.kernels.exact_topk.TopkArgumentError: an argument that the kernel does not serve.
    """
    from sglang.srt.research.kernels import exact_topk as kernel

    return kernel.select(scores, _int32(lengths), k, starts=_int32(row_starts))


def transform(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    method: Any,
    metadata: Any,
    cu_seqlens_q: Tensor | None,
    offsets: Tensor | None,
    row_starts: Tensor | None,
    batch: Any,
) -> Tensor:
    """Select and map, where the stock engine fuses the two.

    Args:
        scores: float32 ``[rows, width]``, columns adjacent; columns behind a row's length hold anything.
        lengths: ``[rows]``.
        k: positions to select.
        method: the engine's ``TopkTransformMethod``, PAGED or RAGGED.
        metadata: the engine's ``DSAMetadata``; read are its page tables and ``page_size``.
        cu_seqlens_q: int32 ``[requests + 1]``, the rows of each request.
        offsets: ``[rows]``, for RAGGED.
        row_starts: ``[rows]`` or None.
        batch: the table row of each request (list or tensor), or None for their own order.

    Returns:
        int32 ``[rows, k]``: slots of the KV cache for PAGED, positions plus offset for RAGGED.

    Raises:
        ExactTopkRefused: the metadata that the method needs is not there.
        sglang.srt.research.kernels.exact_topk.TopkArgumentError: an argument that the kernel does not serve.
    """
    from sglang.srt.research.kernels import exact_topk as kernel

    lengths, starts = _int32(lengths), _int32(row_starts)
    if method.name == "RAGGED":
        if offsets is None:
            raise ExactTopkRefused("RAGGED selection without topk_indices_offset")
        return kernel.select(scores, lengths, k, starts=starts, offsets=_int32(offsets))
    if method.name != "PAGED":
        raise ExactTopkRefused(f"unknown selection method {method!r}")
    count = scores.shape[0]
    if starts is None and batch is None and metadata.real_page_table.shape[0] == count:
        # Decode-shaped: one table row for each score row. Only this table is there in every CUDA graph.
        return kernel.select(
            scores, lengths, k, table=metadata.real_page_table, page_size=metadata.page_size, table_may_be_short=True
        )
    table = metadata.page_table_1
    if table is None or cu_seqlens_q is None:
        raise ExactTopkRefused("PAGED selection of several rows a request without page_table_1 and cu_seqlens_q")
    requests = cu_seqlens_q.shape[0] - 1
    if batch is not None:
        batch = _table_rows(batch, scores)
        if batch.shape[0] != requests:
            raise ExactTopkRefused(
                f"PAGED selection for {requests} requests, but {batch.shape[0]} table rows are named"
            )
    elif table.shape[0] != requests:
        raise ExactTopkRefused(f"PAGED selection for {requests} requests, but page_table_1 has {table.shape[0]} rows")
    # Packed rows are as wide as all requests together, a table row as the longest of them; lengths stay inside it.
    return kernel.select(
        scores,
        lengths,
        k,
        starts=starts,
        table=table,
        segments=_int32(cu_seqlens_q),
        segment_table=batch,
        table_may_be_short=True,
    )


def _int32(tensor: Any) -> Any:
    import torch

    return None if tensor is None else tensor.to(torch.int32).contiguous()


def _table_rows(batch: Any, scores: Tensor) -> Tensor:
    import torch

    return torch.as_tensor(batch, dtype=torch.int32, device=scores.device).contiguous()
