"""GLM-DSA attention under decode context parallelism (DCP): the calls that the engine's files make.

Layout. The allocator hands out virtual slots, one number space for the DCP group. The latent row of slot ``s`` lies on
rank ``s % D``, in local row ``s // D``, as MLA's does: the engine's own write kernel stripes it. The index keys are
replicated, so every rank scores every token and selects the same virtual slots. A draft's pool has the same layout.

The selection becomes local at the last moment, at the attention kernel: upstream of it the same slots are shared
between layers, draft steps and engines. Each rank attends over what it owns, with the query heads of all ranks, and
returns its part and the log of its sum (LSE); the engine merges the parts. Every mode with rows takes this one path
(decode, verify, draft-extend, extend), since no other path can read a striped pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.research import dsa_dcp_check, dsa_dcp_guard, gates, retract
from sglang.srt.runtime_context import get_parallel

if TYPE_CHECKING:
    from torch import Tensor

GATE = dsa_dcp_guard.GATE
ON: bool = gates.enabled(GATE)
PAGE = dsa_dcp_guard.PAGE

# Whether the LSE of this process's kernels is a natural logarithm; None until a DSA pool was made under DCP.
_natural: bool | None = None


def active() -> bool:
    """Tell whether this process runs a DSA model under DCP with the gate on. True from its first pool on."""
    return _natural is not None


def index_copies(server_args: Any) -> int:
    """Tokens whose index keys a rank stores for each latent row that it stores: what the memory budget needs."""
    copies: int = server_args.dcp_size if ON else 1
    return copies


def pool_class(cls: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    """Give what the engine calls in place of a DSA pool's class.

    The engine sizes and pages a draft's pool for replicated rows, ``D`` times the target's. Ours is striped like the
    target's: the write kernel stripes every MLA pool, and prefill sends both alike.

    Args:
        cls: the pool's class, called with its size in tokens and keyword arguments.
        owner: the ``KVCacheConfigurator``; read are ``server_args``, ``model_config`` and ``loc_space_scale``.

    Returns:
        ``cls`` itself with the gate off or without DCP.

    Raises:
        dsa_dcp_guard.DsaDcpRefused: with the gate on and DCP, if this engine's arguments do not fit.
    """
    global _natural
    args = owner.server_args
    if not ON or args.dcp_size == 1:
        return cls
    dsa_dcp_guard.check(args, owner.model_config.hf_config, cls.__name__)  # type: ignore[attr-defined]
    _natural = dsa_dcp_guard.NATURAL[args.dsa_decode_backend]
    scale, size = owner.loc_space_scale, args.dcp_size

    def make(tokens: int, *, page_size: int, **others: Any) -> Any:
        rows, page = tokens // scale, page_size // scale
        # The allocator hands out (rows // page + 1) pages of page * D slots; the pool adds one page of its own.
        pool = cls(rows, page_size=page, index_buf_size=rows * size + page * (size - 1), **others)
        retract.declare(pool, latent=retract.STRIPED, index=retract.REPLICATED)
        return pool

    return make


def query_heads(own: int) -> int:
    """Heads that an attention kernel sees: those of the whole DCP group, ``own`` of them this rank's."""
    return own * get_parallel().attn_dcp_size if active() else own


def try_kernels(backend: Any) -> None:
    """Run the attention kernels of a new ``DeepseekSparseAttnBackend`` once, on rows whose result is known.

    Raises:
        dsa_dcp_check.KernelDiffers: with the patch active, if a kernel's output, or the base of its LSE, is not what
            the table of known kernels says.
    """
    if active():
        dsa_dcp_check.try_kernels(backend, dsa_dcp_guard.NATURAL)


def gathers_q(forward_batch: Any) -> bool:
    """Tell whether this forward gathers query heads and merges parts: every one with rows. Stock: decode and verify."""
    mode = forward_batch.forward_mode
    if active():
        return not mode.is_idle()
    return bool(mode.is_decode() or mode.is_target_verify())


def localise(slots: Tensor) -> Tensor:
    """Turn selected slots into this rank's rows, right before a kernel reads them.

    Args:
        slots: int32 ``[tokens, selected]`` virtual slots, -1 where nothing was selected.

    Returns:
        The same shape and dtype: ``s // D`` where ``s % D`` is this rank, else -1. Inactive: ``slots`` itself.

    Raises:
        dsa_dcp_check.SelectionDiffers: the check is on, and the ranks did not select the same.
    """
    if not active():
        return slots
    import torch

    parallel = get_parallel()
    rank, size = parallel.attn_dcp_rank, parallel.attn_dcp_size
    if dsa_dcp_check.ON:
        dsa_dcp_check.compare(slots, parallel.dcp_group)
    if slots.is_cuda:
        from sglang.srt.research.kernels import dcp_localise

        return dcp_localise.localise(slots, rank, size)
    owned = (slots >= 0) & (slots.remainder(size) == rank)
    return torch.where(owned, slots.div(size, rounding_mode="floor"), -1)


def part(out: Tensor, lse: Tensor, heads: int) -> Any:
    """Give what the attention backend returns for a kernel's result.

    Args:
        out: the kernel's output without the padding's heads.
        lse: float32 ``[tokens, padded heads]``, with a last dimension of 1 or without; +inf for a row without keys.
        heads: query heads without padding.

    Returns:
        ``out`` itself; active: ``(out [tokens, heads, width], lse [tokens, heads])``.
    """
    if not active():
        return out
    # The gather of all ranks' LSE wants adjacent memory, which a padded one is not.
    lse = lse.reshape(lse.shape[0], -1)[:, :heads].contiguous()
    return out.reshape(lse.shape[0], heads, -1), lse


def ask_lse() -> dict[str, bool]:
    """Arguments with which FlashInfer's sparse MLA returns its LSE beside its output; none when inactive."""
    return {"return_lse": True} if active() else {}


def flashinfer_part(result: Any) -> Any:
    """Give what FlashInfer's sparse MLA returned, ``[tokens, 1, heads, width]`` alone or with its LSE, as `part`."""
    if not active():
        return result.squeeze(1)
    out, lse = result
    return part(out.squeeze(1), lse, out.shape[-2])


def natural_lse(attention_backend: str | None) -> bool:
    """Tell whether the parts of ``attention_backend`` are merged with e: ours to answer for the DSA backend alone."""
    return attention_backend in ("dsa", "nsa") and _natural is True
