"""Where the rows of a retracted request lie under decode context parallelism (DCP).

With DCP the allocator hands out *virtual* slots: one number space for the whole DCP group. Of a token in
virtual slot ``s`` the MLA write kernel stores the latent row on rank ``s % D`` alone, in local row ``s // D``
("striped"). The engine's copies to and from the CPU index the local buffers with the virtual slots themselves.

A pool whose layout nobody stated is refused. The pool of an allocator is admitted when the allocator is made,
after its class and its sizes have been checked. Any other pool (a draft's) has the same class but not always the
same layout, so its owner must :func:`declare` it before it can be admitted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang.srt.research import gates
from sglang.srt.runtime_context import get_parallel

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

GATE = "SGLANG_RESEARCH_DCP_RETRACT"
ON: bool = gates.enabled(GATE)

STRIPED = "striped"  # slot s: rank s % D, row s // D
RAW = "raw"  # slot s: every rank, row s
REPLICATED = "replicated"  # index pages only: slot s in page s // page_size, on every rank

_MODULE = "sglang.srt.mem_cache.memory_pool"
_POOLS = frozenset({f"{_MODULE}.MLATokenToKVPool", f"{_MODULE}.DSATokenToKVPool"})
_HYBRID = f"{_MODULE}.HybridLinearKVPool"
# Exact classes count: a subclass may move its rows. These are the ones that somebody will meet.
_WHY_NOT = {
    "MLATokenToKVPoolFP4": "the engine's copy leaves out its scale rows",
    "LayerSplitDSATokenToKVPool": "a rank holds only some of its layers, and its own copy code is not localised",
    "HiSparseDSATokenToKVPool": "its rows are found through a mapping, and it has no copy to the CPU",
    "UnifiedMLATokenToKVPool": "its rows are numbered by page and layer together",
    "NPUMLATokenToKVPool": "its buffers are paged, and its own copy code is not localised",
}


class RetractLayoutError(RuntimeError):
    """A pool or a list of slots whose place in memory is not known for sure."""


@dataclass(frozen=True)
class Layout:
    """What is known about a pool.

    Attributes:
        latent: ``STRIPED``, ``RAW``, or None where nobody stated it.
        index: ``REPLICATED``, ``STRIPED``, or None for a pool without index pages; before admission None also
            means "to be told from the number of pages".
        page: virtual slots in a page of the allocator; 0 before admission.
        end: the first virtual slot that the allocator never hands out; 0 before admission.
    """

    latent: str | None = None
    index: str | None = None
    page: int = 0
    end: int = 0


def declare(pool: Any, *, latent: str | None = None, index: str | None = None) -> None:
    """State the layout of ``pool`` where its class and sizes do not tell it; to be called before :func:`admit`.

    Does nothing with the gate off or without DCP.

    Args:
        pool: an MLA or DSA pool of the engine.
        latent: ``STRIPED`` or ``RAW`` for the latent rows.
        index: ``REPLICATED`` or ``STRIPED`` for the index pages of a DSA pool.

    Raises:
        RetractLayoutError: the pool's class has no layout that we know, or a word is not one of the above.
    """
    if not active():
        return
    _refuse_unknown(pool)
    _need(latent in (None, STRIPED, RAW), f"latent rows {STRIPED} or {RAW}, not {latent!r}")
    _need(index in (None, STRIPED, REPLICATED), f"index pages {STRIPED} or {REPLICATED}, not {index!r}")
    pool.research_layout = Layout(latent, index)


def admit(allocator: Any, pool: Any = None) -> None:
    """Check ``pool`` against the slots that ``allocator`` hands out, and keep the outcome on the pool.

    Does nothing with the gate off or without DCP. Reads only ``size``, ``page_size`` and the buffers' shapes.

    Args:
        allocator: the engine's allocator; it hands out whole pages from page 1 on, ``size // page_size`` of them.
        pool: a declared pool that shares these slots; None for the allocator's own, which is striped.

    Raises:
        RetractLayoutError: the layout is not known, or the pool is too small for it; the message names the condition.
    """
    if not active():
        return
    own = pool is None
    pool = allocator.get_kvcache() if own else pool
    if own and _name(pool) == _HYBRID:
        pool = pool.full_kv_pool  # the other half is state, addressed by request
    _refuse_unknown(pool)
    layout: Layout = getattr(pool, "research_layout", Layout())
    if layout.latent is None:
        _need(own, f"a statement where the latent rows of {type(pool).__name__} lie, as it is not the allocator's own")
        layout = replace(layout, latent=STRIPED)
    size = _size()
    page = allocator.page_size
    layout = replace(layout, page=page, end=(allocator.size // page + 1) * page)
    share = size if layout.latent == STRIPED else 1
    _need(layout.page % share == 0, f"allocator pages of a multiple of {share} slots, found {layout.page}")
    for buffer in pool.kv_buffer:
        _need(
            buffer.shape[0] * share >= layout.end,
            f"{layout.latent} latent rows for {layout.end} slots, found {buffer.shape[0]} rows in a layer",
        )
    if hasattr(pool, "index_k_with_scale_buffer"):
        layout = _with_index(pool, layout, size)
    pool.research_layout = layout
    logger.info(
        "%s: %s over %d ranks: latent rows %s, index pages %s",
        GATE,
        type(pool).__name__,
        size,
        layout.latent,
        layout.index or "none",
    )


def latent_rows(pool: Any, indices: Tensor) -> Tensor:
    """Give the rows of this rank's ``kv_buffer`` that hold the tokens in ``indices``.

    With the gate off, without DCP, and for a raw pool this is ``indices`` itself.

    Args:
        pool: an admitted pool.
        indices: ``[tokens]`` int32 or int64, the virtual slots of a request from its first token on.

    Returns:
        ``[owned]`` of the same dtype and device, in token order. Rank ``r`` owns tokens ``r, r + D, r + 2 D, ...``,
        so the count follows from the length alone: rows saved from one set of pages fit any other.

    Raises:
        RetractLayoutError: the pool was not admitted, or the slots are not whole pages from a page's start on.
    """
    if not active():
        return indices
    layout = _layout(pool)
    if layout.latent == RAW:
        return indices
    _check_slots(indices, layout)
    rank, size = _rank(), _size()
    return indices[rank::size] // size


def index_pages(pool: Any, indices: Tensor) -> Tensor:
    """Give the pages of this rank's ``index_k_with_scale_buffer`` that hold the tokens in ``indices``.

    Args:
        pool: an admitted DSA pool.
        indices: as for :func:`latent_rows`.

    Returns:
        ``[pages]`` of the same dtype and device, in token order: all of the request's pages where the index is
        replicated, those of the owned tokens where it is striped.

    Raises:
        RetractLayoutError: as for :func:`latent_rows`.
    """
    if active():
        layout = _layout(pool)
        if layout.index == STRIPED:
            indices = latent_rows(pool, indices)
        elif layout.latent == STRIPED:
            _check_slots(indices, layout)
    page: int = pool.page_size
    return indices[::page] // page


def unknown(pool: Any) -> str:
    """Say why the rows of ``pool`` are not where an MLA or DSA pool has them; empty if they are."""
    return "" if _name(pool) in _POOLS else _WHY_NOT.get(type(pool).__name__, "where its rows lie is not known")


def active() -> bool:
    """Tell whether the gate is on and the process is one of a DCP group of two or more."""
    return ON and _size() > 1


def _size() -> int:
    size: int = get_parallel().attn_dcp_size
    return size


def _rank() -> int:
    rank: int = get_parallel().attn_dcp_rank
    return rank


def _refuse_unknown(pool: Any) -> None:
    """Raise RetractLayoutError unless ``pool`` is exactly an MLA or DSA pool, on a build whose write kernels stripe."""
    import torch

    # The fp8 and fused write kernels for ROCm store every slot as it comes.
    _need(torch.version.hip is None, "CUDA or a CPU, found a ROCm build")
    why = unknown(pool)
    _need(not why, f"an MLA or DSA pool, found {type(pool).__name__}: {why}")


def _with_index(pool: Any, layout: Layout, size: int) -> Layout:
    """Add the index layout of a DSA pool, from what was declared and from its page count; refuse what fits neither."""
    striped = layout.index == STRIPED
    _need(not striped or layout.latent == STRIPED, "striped latent rows under striped index pages")
    layout = replace(layout, index=STRIPED if striped else REPLICATED)
    unit = pool.page_size * (size if striped else 1)
    _need(layout.page % unit == 0, f"allocator pages of a multiple of {unit} slots, found {layout.page}")
    pages = -(-layout.end // unit)
    for buffer in pool.index_k_with_scale_buffer:
        _need(
            buffer.shape[0] >= pages,
            f"{pages} {layout.index} index pages for {layout.end} slots, found {buffer.shape[0]} in a layer"
            + ("" if striped else "; a striped index has to be declared"),
        )
    return layout


def _layout(pool: Any) -> Layout:
    layout: Layout = getattr(pool, "research_layout", Layout())
    if layout.page == 0:
        _refuse_unknown(pool)
        _need(False, f"a pool that was admitted before it is copied; this {type(pool).__name__} was not")
    return layout


def _check_slots(indices: Tensor, layout: Layout) -> None:
    """Refuse slots that are not whole pages of the allocator in token order (the last may be short), or not its own.

    Nothing here depends on the rank, so the ranks of a group refuse together. Costs two waits for the device, where
    the copy has just waited anyway.
    """
    import torch

    _need(
        indices.ndim == 1 and indices.dtype in (torch.int32, torch.int64),
        f"a flat list of int32 or int64 slots, found {indices.dtype} of shape {list(indices.shape)}",
    )
    count = indices.numel()
    if count == 0:
        return
    page, end = layout.page, layout.end
    place = torch.arange(count, dtype=indices.dtype, device=indices.device) % page
    _need(torch.equal(indices % page, place), f"slots that fill pages of {page} in token order from a page's start on")
    low, high = torch.stack(indices.aminmax()).tolist()
    _need(page <= low and high < end, f"slots from {page} (page 0 is the pad) to {end - 1}, found {low} to {high}")


def _need(holds: bool, condition: str) -> None:
    if not holds:
        raise RetractLayoutError(f"{GATE}=1 with decode context parallelism needs {condition}")


def _name(pool: Any) -> str:
    return f"{type(pool).__module__}.{type(pool).__qualname__}"
