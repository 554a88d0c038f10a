"""Stand-ins for the sparse attention kernels of flash_mla (package sgl-kernel).

Maths of both, for one query row and one head, over the rows ``i`` that its index list names::

    s_i = scale * <q, k_i>        out = sum_i softmax(s)_i * k_i[:d_v]        lse = log(sum_i exp(s_i))

An index below 0 or beyond the cache is skipped anywhere in the list; entries from ``topk_length`` on are skipped
too. A row without any valid index gives out 0 and lse +inf. The sparse bf16 kernel writes the lse in base 2, the
fp8 decode kernel in base e: measured on sm_90, where the real kernels disagree in exactly this way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "dequantize_rows",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "quantize_rows",
    "quantize_separate",
]

FP8_ROW_BYTES = 656
_NOPE = 512
_TILE = 128
_TILES = _NOPE // _TILE
_FP8_MAX = 448.0


def quantize_rows(rows: Tensor) -> Tensor:
    """Pack latent rows as the fp8 cache does: 512 fp8 values, 4 fp32 scales, 64 bf16 values.

    Args:
        rows: [T, 576] float.

    Returns:
        [T, 656] uint8.
    """
    tiles = rows[:, :_NOPE].float().reshape(-1, _TILES, _TILE)
    scale = tiles.abs().amax(-1) / _FP8_MAX
    # The kernel has no floor under its scale. A tile of zeros reads back as zeros, whatever its bytes.
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    packed = (tiles * inverse[..., None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return torch.cat(
        [
            packed.reshape(-1, _NOPE).view(torch.uint8),
            scale.contiguous().view(torch.uint8),
            rows[:, _NOPE:].to(torch.bfloat16).contiguous().view(torch.uint8),
        ],
        dim=1,
    )


def quantize_separate(k_nope: Tensor, k_rope: Tensor, tile_size: int = 128) -> tuple[Tensor, Tensor]:
    """Pack rows whose two parts come apart, as the engine's pool stores them.

    Args:
        k_nope: [T, 512] or [T, 1, 512] float. k_rope: [T, 64] or [T, 1, 64] float.

    Returns:
        [T, 1, 528] uint8 (values, then scales) and [T, 1, 128] uint8 (bf16 bytes).

    Raises:
        ValueError: another tile size or widths.
    """
    rows = torch.cat([part.reshape(-1, part.shape[-1]).to(torch.bfloat16) for part in (k_nope, k_rope)], dim=1)
    if tile_size != _TILE or k_nope.shape[-1] != _NOPE or rows.shape[1] != _NOPE + 64:
        raise ValueError(f"tiles of {tile_size}, parts of {k_nope.shape[-1]} and {k_rope.shape[-1]}")
    packed = quantize_rows(rows)[:, None]
    split = _NOPE + 4 * _TILES
    return packed[..., :split].contiguous(), packed[..., split:].contiguous()


def dequantize_rows(cache: Tensor) -> Tensor:
    """Unpack 656-byte rows.

    Args:
        cache: any shape whose last dimension is 656 bytes, a one-byte dtype.

    Returns:
        [rows, 576] float32.

    Raises:
        ValueError: rows of another size.
    """
    if cache.shape[-1] * cache.element_size() != FP8_ROW_BYTES:
        raise ValueError(f"rows of {cache.shape[-1] * cache.element_size()} bytes, expected {FP8_ROW_BYTES}")
    raw = cache.reshape(-1, cache.shape[-1]).view(torch.uint8)
    values = raw[:, :_NOPE].contiguous().view(torch.float8_e4m3fn).float().reshape(-1, _TILES, _TILE)
    scales = raw[:, _NOPE : _NOPE + 4 * _TILES].contiguous().view(torch.float32)
    rope = raw[:, _NOPE + 4 * _TILES :].contiguous().view(torch.bfloat16).float()
    return torch.cat([(values * scales[..., None]).reshape(-1, _NOPE), rope], dim=1)


def _attend(q: Tensor, rows: Tensor, keys: Tensor, scale: float, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
    """Attend over named rows.

    Args:
        q: [T, H, D] float. rows: [T, K] int, negative or too large: skipped. keys: [N, D] float.

    Returns:
        out [T, H, d_v] float32, max score [T, H] float32, natural lse [T, H] float32 (+inf where no row is valid).
    """
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, d_v)
    top = torch.full((tokens, heads), -math.inf)
    lse = torch.full((tokens, heads), math.inf)
    for token in range(tokens):
        named = rows[token]
        named = named[(named >= 0) & (named < keys.shape[0])].long()
        if named.numel() == 0:
            continue
        key = keys[named].float()
        score = q[token].float() @ key.T * scale
        top[token] = score.amax(-1)
        lse[token] = torch.logsumexp(score, -1)
        out[token] = torch.softmax(score, -1) @ key[:, :d_v]
    return out, top, lse


def _cut(rows: Tensor, length: Tensor | None) -> Tensor:
    """Index lists [T, K] with everything from ``length`` [T] on turned into -1."""
    if length is None:
        return rows
    column = torch.arange(rows.shape[1], device=rows.device)
    return rows.masked_fill(column[None] >= length[:, None], -1)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sparse attention over plain rows.

    Args:
        q: [T, H, D]. kv: [N, 1, D] or [N, D]. indices: [T, 1, K] int32. topk_length: [T] int, or none.

    Returns:
        out [T, H, d_v] in q's dtype, max score [T, H] float32, lse [T, H] float32 in base 2.

    Raises:
        NotImplementedError: an attention sink.
    """
    if attn_sink is not None:
        raise NotImplementedError("attention sinks have no CPU stand-in")
    keys = kv.reshape(-1, kv.shape[-1])
    out, top, lse = _attend(q, _cut(indices[:, 0], topk_length), keys, sm_scale, d_v)
    return out.to(q.dtype), top, lse / math.log(2.0)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse attention over the fp8 cache of 656-byte rows.

    Args:
        q: [B, S, H, 576]. k_cache: [blocks, page, 1, 656] one-byte. indices: [B, S, K] int32, slots.

    Returns:
        out [B, S, H, head_dim_v] in q's dtype, natural lse [B, H, S] float32.

    Raises:
        NotImplementedError: dense attention, a second cache, a sink, or a cache that is not fp8.
    """
    if indices is None or not is_fp8_kvcache:
        raise NotImplementedError("only sparse attention over the fp8 cache has a CPU stand-in")
    if attn_sink is not None or extra_k_cache is not None or extra_indices_in_kvcache is not None:
        raise NotImplementedError("attention sinks and a second cache have no CPU stand-in")
    batch, steps, heads, width = q.shape
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    length = None if topk_length is None else topk_length.repeat_interleave(steps)
    rows = _cut(indices.reshape(batch * steps, -1), length)
    out, _, lse = _attend(q.reshape(batch * steps, heads, width), rows, dequantize_rows(k_cache), scale, head_dim_v)
    return (
        out.to(q.dtype).reshape(batch, steps, heads, head_dim_v),
        lse.reshape(batch, steps, heads).transpose(1, 2).contiguous(),
    )


def get_mla_metadata(
    cache_seqlens: Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, Tensor | None]:
    """How the kernel would split its work. The stand-ins never read it; only the shapes are kept.

    Returns:
        [1, 8] int32 zeros and [B + 1] int32 zeros.

    Raises:
        NotImplementedError: called without lengths, the form that only the newer kernels have.
    """
    if cache_seqlens is None:
        raise NotImplementedError("the scheduler object of the newer flash_mla has no CPU stand-in")
    return torch.zeros(1, 8, dtype=torch.int32), torch.zeros(cache_seqlens.numel() + 1, dtype=torch.int32)
