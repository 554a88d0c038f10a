"""Stand-ins for FlashAttention-3: paged attention over the cache, and attention over packed keys.

Maths, for query row ``i`` of ``n`` in a sequence of ``L`` keys and one head:

    s_j = scale * (<q_i, k_j> + <qv_i, v_j>)      the second term only where ``qv`` is given
    causal: j <= L - n + i                        window: j >= L - n + i - left, j <= L - n + i + right
    softcap: s_j = cap * tanh(s_j / cap)
    out_i = sum_j softmax(s)_j * v_j              lse_i = log(sum_j exp(s_j))

all in float32. A row that sees no key gives out 0 and lse -inf. Query heads share key heads in equal groups.
An argument that these formulas do not cover is an error, never ignored.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["attend", "no_schedule", "packed", "paged"]

# How the real kernels split and schedule their work; no effect on the result.
_SCHEDULING = frozenset(
    {
        "cu_seqlens_k_new",
        "max_seqlen_k",
        "max_seqlen_q",
        "num_splits",
        "only_qv",
        "pack_gqa",
        "rotary_interleaved",
        "scheduler_metadata",
        "sm_margin",
        "ver",
    }
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qv: Tensor | None,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence.

    Args:
        q: [n, H, D]. k: [L, G, D]. v: [L, G, E]. qv: [n, H, E] or none.

    Returns:
        out [n, H, E] float32, lse [n, H] float32.
    """
    count, heads, _ = q.shape
    length, groups, _ = k.shape
    keys = k.float().repeat_interleave(heads // groups, dim=1)
    values = v.float().repeat_interleave(heads // groups, dim=1)
    score = torch.einsum("nhd,lhd->nhl", q.float(), keys)
    if qv is not None:
        score = score + torch.einsum("nhe,lhe->nhl", qv.float(), values)
    score = score * scale
    if softcap > 0.0:
        score = softcap * torch.tanh(score / softcap)
    at = torch.arange(count)[:, None] + (length - count)
    key = torch.arange(length)[None]
    left, right = window
    seen = torch.ones(count, length, dtype=torch.bool)
    if causal:
        seen &= key <= at
    if left >= 0:
        seen &= key >= at - left
    if right >= 0:
        seen &= key <= at + right
    score = score.masked_fill(~seen[:, None], -math.inf)
    lse = torch.logsumexp(score, dim=-1) if length else torch.full((count, heads), -math.inf)
    weight = torch.softmax(score, dim=-1).nan_to_num(0.0)
    return torch.einsum("nhl,lhe->nhe", weight, values), lse


def _named(signature: inspect.Signature, known: Iterable[str], args: Any, kwargs: Any) -> dict[str, Any]:
    """The call's arguments by name.

    Raises:
        NotImplementedError: an argument that the stand-in does not know is not at its default.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named: dict[str, Any] = bound.arguments
    for name, value in named.items():
        if name in known or name in _SCHEDULING:
            continue
        default = signature.parameters[name].default
        if value is not None and value is not default and value != default:
            raise NotImplementedError(f"{name}={value!r} has no CPU stand-in")
    return named


def _run(named: dict[str, Any], pieces: list[tuple[slice, Tensor, Tensor]], q: Tensor, qv: Tensor | None) -> Any:
    """Attend piece by piece; each piece is its rows of ``q`` and its keys and values."""
    width = q.shape[-1] + (0 if qv is None else qv.shape[-1])
    scale = width**-0.5 if named["softmax_scale"] is None else float(named["softmax_scale"])
    window = named["window_size"]
    values = named["v_cache"] if "v_cache" in named else named["v"]
    out = torch.zeros(*q.shape[:2], values.shape[-1])
    lse = torch.full(q.shape[:2], -math.inf)
    for rows, key, value in pieces:
        out[rows], lse[rows] = attend(
            q[rows],
            key,
            value,
            qv=None if qv is None else qv[rows],
            scale=scale,
            causal=bool(named["causal"]),
            window=(-1, -1) if window is None else (int(window[0]), int(window[1])),
            softcap=float(named["softcap"] or 0.0),
        )
    return out, lse


_PAGED = (
    *("q", "k_cache", "v_cache", "qv", "cache_seqlens", "page_table", "cu_seqlens_q", "softmax_scale", "causal"),
    *("window_size", "softcap", "return_softmax_lse", "out"),
)


def paged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for ``flash_attn_with_kvcache``, whatever further scheduling arguments a version has.

    The function that takes its place expects q [T, H, D] with cu_seqlens_q [B + 1], or q [B, S, H, D] without it;
    k_cache [blocks, page, G, D], v_cache [blocks, page, G, E], page_table [B, P] int, cache_seqlens [B] int. It
    returns out [T, H, E] or [B, S, H, E] in q's dtype, and with return_softmax_lse also lse [H, T] or [B, H, S].
    """
    signature = inspect.signature(original)

    def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
        named = _named(signature, _PAGED, args, kwargs)
        q, qv, starts, table = named["q"], named["qv"], named["cu_seqlens_q"], named["page_table"]
        shape = q.shape
        if table is None:
            raise NotImplementedError("attention over a cache without a page table has no CPU stand-in")
        if starts is None:
            starts = torch.arange(0, (shape[0] + 1) * shape[1], shape[1])
            q = q.reshape(-1, *shape[2:])
            qv = None if qv is None else qv.reshape(-1, *qv.shape[2:])
        page = named["k_cache"].shape[1]
        pieces = []
        bounds = starts.tolist()
        for index, length in enumerate(named["cache_seqlens"].tolist()):
            rows = slice(bounds[index], bounds[index + 1])
            if rows.stop <= rows.start:
                continue
            used = table[index, : -(-length // page)].long()
            key, value = (named[one][used].flatten(0, 1)[:length] for one in ("k_cache", "v_cache"))
            pieces.append((rows, key, value))
        out, lse = _run(named, pieces, q, qv)
        dense = named["cu_seqlens_q"] is None
        out = out.to(q.dtype).reshape(*shape[:-1], out.shape[-1])
        if named.get("out") is not None:
            out = named["out"].copy_(out.reshape(named["out"].shape))
        if not named["return_softmax_lse"]:
            return out
        lse = lse.reshape(shape[0], shape[1], -1).transpose(1, 2) if dense else lse.T
        return out, lse.contiguous()

    return flash_attn_with_kvcache


_PACKED = (
    *("q", "k", "v", "qv", "cu_seqlens_q", "cu_seqlens_k", "softmax_scale", "causal", "window_size", "softcap"),
    *("return_softmax_lse", "out"),
)


def packed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for ``flash_attn_varlen_func``.

    The function that takes its place expects q [T, H, D], k [K, G, D], v [K, G, E], cu_seqlens_q and cu_seqlens_k
    [B + 1] int. It returns out [T, H, E] in q's dtype, and with return_softmax_lse also lse [H, T].
    """
    signature = inspect.signature(original)

    def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> Any:
        named = _named(signature, _PACKED, args, kwargs)
        q = named["q"]
        rows, keys = named["cu_seqlens_q"].tolist(), named["cu_seqlens_k"].tolist()
        pieces = [
            (slice(rows[i], rows[i + 1]), named["k"][keys[i] : keys[i + 1]], named["v"][keys[i] : keys[i + 1]])
            for i in range(len(rows) - 1)
            if rows[i + 1] > rows[i]
        ]
        out, lse = _run(named, pieces, q, named["qv"])
        out = out.to(q.dtype)
        if named.get("out") is not None:
            out = named["out"].copy_(out.reshape(named["out"].shape))
        return (out, lse.T.contiguous()) if named["return_softmax_lse"] else out

    return flash_attn_varlen_func


def no_schedule(*_: Any, **__: Any) -> None:
    """No work split."""
