"""Stand-ins for the kernels of the sparse attention's indexer: Hadamard rotation, index logits, head gates.

The indexer's own forward, its chunking, its page tables and its top-k funnel run as they are in the wheel; so do
its Triton kernels (quantiser, index writes and reads), in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["act_quant", "deep_gemm", "hadamard_transform", "mqa_logits", "paged_mqa_logits", "weights_proj"]

PAGE = 64
HEAD = 128


class IndexedTensor(torch.Tensor):
    """A CPU tensor that names its device ``cpu:0``. The indexer asserts that its queries are on an indexed device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu", 0)


def act_quant(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap the quantiser: the same values, on an indexed device.

    Returns:
        A function with the quantiser's signature: x [..., D] float to values [..., D] fp8 and scales
        [..., D / block_size] float32.
    """

    def act_quant(x: Tensor, block_size: int = 128, scale_fmt: str | None = None) -> tuple[Tensor, Tensor]:
        values, scales = original(x, block_size, scale_fmt)
        return values.as_subclass(IndexedTensor), scales

    return act_quant


def hadamard_transform(x: Tensor, scale: float = 1.0) -> Tensor:
    """Multiply the last dimension by Sylvester's Hadamard matrix and ``scale``.

    ``H_1 = [1]``, ``H_2n = [[H_n, H_n], [H_n, -H_n]]``, as log2(n) butterfly passes in float32.

    Args:
        x: [..., n] float, n a power of two.

    Returns:
        [..., n] in x's dtype.

    Raises:
        ValueError: n is not a power of two.
    """
    width = x.shape[-1]
    if width & (width - 1) or width == 0:
        raise ValueError(f"width {width} is not a power of two")
    value = x.float()
    half = 1
    while half < width:
        pair = value.reshape(*x.shape[:-1], width // (2 * half), 2, half)
        first, second = pair[..., 0, :], pair[..., 1, :]
        value = torch.stack([first + second, first - second], dim=-2)
        half *= 2
    return (value.reshape(x.shape) * scale).to(x.dtype)


def _score(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[T, K] = sum over heads of weights [T, H] times relu(q [T, H, D] . keys [K, D])."""
    heads = torch.einsum("thd,kd->thk", q.float(), keys).relu_()
    return torch.einsum("thk,th->tk", heads, weights.float())


def mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    **_: Any,
) -> Tensor:
    """Index logits over packed keys (deep_gemm.fp8_mqa_logits).

    ``logits[t, k] = scale_k * sum_h weights[t, h] * relu(<q[t, h], key_k>)``

    Args:
        q: [T, H, 128] fp8. kv: keys [K, 128] fp8 and scales [K] float32. weights: [T, H] float32.
        cu_seq_len_k_start, cu_seq_len_k_end: [T] int, each row's window.

    Returns:
        [T, K] float32. Outside its window a row holds -inf: with ``clean_logits`` the kernel promises it, without
        it the caller must not read there, so -inf makes a caller that does read visible.
    """
    plain = q.as_subclass(torch.Tensor)
    keys, scales = kv
    logits = _score(plain, weights, keys.float()) * scales.reshape(-1)[None]
    column = torch.arange(logits.shape[1])[None]
    outside = (column < cu_seq_len_k_start[:, None]) | (column >= cu_seq_len_k_end[:, None])
    return logits.masked_fill(outside, float("-inf"))


def paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_meta: Any,
    max_context_len: int,
    clean_logits: bool = True,
    **_: Any,
) -> Tensor:
    """Index logits over the paged index cache (deep_gemm.fp8_paged_mqa_logits). A page: 64 keys of 128 fp8, then
    64 float32 scales.

    Args:
        q: [B, S, H, 128] fp8. kv_cache: [pages, 64, 1, 132] one-byte. weights: [B * S, H] float32.
        context_lens: [B, S] or [B] or [B, 1] int. block_tables: [B, P] int32.

    Returns:
        [B * S, max_context_len] float32, -inf from a row's length on.
    """
    plain = q.as_subclass(torch.Tensor)
    batch, steps = plain.shape[:2]
    pages = kv_cache.reshape(kv_cache.shape[0], -1).view(torch.uint8)
    lengths = context_lens.reshape(batch, -1).expand(batch, steps).reshape(-1)
    out = torch.full((batch * steps, max_context_len), float("-inf"))
    for index in range(batch):
        longest = int(lengths[index * steps : (index + 1) * steps].max())
        if longest <= 0:
            continue
        used = pages[block_tables[index, : -(-longest // PAGE)].long()]
        keys = used[:, : PAGE * HEAD].contiguous().view(torch.float8_e4m3fn).float().reshape(-1, HEAD)
        scales = used[:, PAGE * HEAD :].contiguous().view(torch.float32).reshape(-1)
        rows = slice(index * steps, (index + 1) * steps)
        logits = _score(plain[index], weights[rows], keys) * scales[None]
        out[rows, :longest] = logits[:, :longest]
    return out.masked_fill(torch.arange(max_context_len)[None] >= lengths[:, None], float("-inf"))


def _schedule(context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
    """[num_sms + 1, 2] int32 zeros: the logits above are not split over processors."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32)


deep_gemm = SimpleNamespace(
    fp8_mqa_logits=mqa_logits,
    fp8_paged_mqa_logits=paged_mqa_logits,
    get_num_sms=lambda: 8,
    get_paged_mqa_logits_metadata=_schedule,
)


def weights_proj(self: Any, x: Any) -> Tensor:
    """Project the head gates: x [T, hidden] times the weight [H, hidden], summed in float32.

    Returns:
        [T, H] float32.
    """
    return torch.nn.functional.linear(x.float(), self.weights_proj.weight.float())
