"""The draft model's KV is saved and restored with the target's when a decode engine retracts a request.

The stock engine saves the target's pool alone. The draft's rows of the resumed request are then whatever others left
there: the text stays verified, but hardly a drafted token is accepted until the request ends.

What is saved is one record, and it is restored as one or not at all. A request whose record does not fit fails; the
others go on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.research import gates, retract

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

GATE = "SGLANG_RESEARCH_RETRACT_DRAFT_KV"
ON: bool = gates.enabled(GATE)

# One draft layer's worker; the others keep several pools, none, or the target's own.
_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"

Geometry = tuple[tuple[str, tuple[int, ...]], ...]


class RetractDraftRefused(RuntimeError):
    """The gate is on in an engine that this was not made for. Raised at the start."""


@dataclass(frozen=True)
class Draft:
    """What an allocator knows of the draft that shares its slots.

    Attributes:
        pool: the draft's KV pool.
        scheduler: the engine's ``Scheduler``; read are ``future_map``, ``enable_overlap`` and ``result_queue``.
    """

    pool: Any
    scheduler: Any


@dataclass(frozen=True)
class Record:
    """Everything that is saved of a retracted request.

    Attributes:
        boundary: tokens whose KV is in it, all but the last one of the history.
        target, draft: the pools' own copies on the CPU.
        geometry: type and shape of an entry in each buffer of both pools.
    """

    boundary: int
    target: Any
    draft: Any
    geometry: tuple[Geometry, Geometry]


def admit(scheduler: Any, pool: Any) -> None:
    """Check the engine at its start, and let the target's allocator know the draft's pool.

    Args:
        scheduler: the engine's ``Scheduler`` with its worker, pools and disaggregation mode.
        pool: the draft's KV pool, or None.

    Raises:
        RetractDraftRefused: the gate is on and a condition does not hold; the message names it.
        sglang.srt.research.retract.RetractLayoutError: with DCP, the draft's layout is not known or does not fit.
    """
    if not ON:
        return
    args, allocator = scheduler.server_args, scheduler.token_to_kv_pool_allocator
    target = allocator.get_kvcache()
    _need(scheduler.disaggregation_mode.value == "decode", "--disaggregation-mode decode")
    _need(pool is not None, "speculative decoding with a draft that has KV of its own")
    worker = type(scheduler.draft_worker.draft_worker)
    name = f"{worker.__module__}.{worker.__qualname__}"
    _need(name == _WORKER, f"the worker of a single EAGLE layer, found {worker.__qualname__}")
    _need(args.speculative_eagle_topk == 1, f"--speculative-eagle-topk 1, found {args.speculative_eagle_topk}")
    _need(pool is not target, "a pool of the draft's own, found the target's")
    for role, one in (("target", target), ("draft", pool)):
        why = retract.unknown(one)
        _need(not why, f"a plain MLA or DSA pool for the {role}, found {type(one).__name__}: {why}")
    _need(not scheduler.enable_hisparse, "no HiSparse, with which it was never tried")
    _need(
        not (args.enable_hierarchical_cache or args.disaggregation_decode_enable_offload_kvcache),
        "neither a hierarchical cache nor offloaded KV, with which it was never tried",
    )
    if args.dcp_size > 1:
        _need(retract.active(), f"{retract.GATE}=1 as well, since there is decode context parallelism")
        if getattr(pool, "research_layout", None) is None:
            # The engine's write kernel stripes every MLA pool, also one that has rows for all slots. Where the index
            # pages of a DSA draft lie is for those to declare who make DSA run under DCP at all.
            _need(not hasattr(pool, "index_k_with_scale_buffer"), "a declared layout for the draft's DSA pool")
            retract.declare(pool, latent=retract.STRIPED)
        retract.admit(allocator, pool)
    else:
        end = (allocator.size // allocator.page_size + 1) * allocator.page_size
        for buffer in pool.kv_buffer:
            _need(buffer.shape[0] >= end, f"draft rows for {end} slots, found {buffer.shape[0]}")
    allocator.research_draft = Draft(pool, scheduler)


def save(request: Any, indices: Tensor, allocator: Any) -> None:
    """Complete what was saved of the target to a record, and note what the first draft after the return starts from.

    Nothing of the request was freed yet. Without the gate, and without a draft, ``kv_cache_cpu`` stays as it is.

    Args:
        request: the ``Req`` being retracted; its ``kv_cache_cpu`` becomes a :class:`Record`.
        indices: ``[boundary]``, the slots of its tokens, as the target's copy took them.
        allocator: the engine's allocator.
    """
    draft: Draft | None = getattr(allocator, "research_draft", None)
    if draft is None:
        return
    target = allocator.get_kvcache()
    request.kv_cache_cpu = Record(
        boundary=request.seqlen - 1,
        target=request.kv_cache_cpu,
        draft=draft.pool.get_cpu_copy(indices),
        geometry=(_geometry(target), _geometry(draft.pool)),
    )
    _note_first_draft(request, draft.scheduler)


def restore(request: Any, indices: Tensor, allocator: Any) -> bool:
    """Restore the draft's part of a record and leave the target's to the engine; refuse a record that does not fit.

    A request that is refused is told to finish with an error. It has its slots by now; the engine frees them when it
    finishes, which is before the first step.

    Args:
        request: the ``Req`` that comes back; its ``kv_cache_cpu`` becomes the target's copy alone.
        indices: ``[boundary]``, its new slots.
        allocator: the engine's allocator.

    Returns:
        Whether the engine may go on and load the target's copy.
    """
    draft: Draft | None = getattr(allocator, "research_draft", None)
    if draft is None:
        return True
    record = request.kv_cache_cpu
    why = _unfit(record, request, indices, (_geometry(allocator.get_kvcache()), _geometry(draft.pool)))
    if why:
        _fail(request, why)
        return False
    draft.pool.load_cpu_copy(record.draft, indices)
    request.kv_cache_cpu = record.target
    return True


def _unfit(record: Any, request: Any, indices: Tensor, geometry: tuple[Geometry, Geometry]) -> str:
    if not isinstance(record, Record):
        return f"a copy of the target alone ({type(record).__name__}) instead of a record"
    history = request.seqlen - 1
    if not record.boundary == history == len(indices):
        return f"a record of {record.boundary} tokens for a history of {history} and {len(indices)} slots"
    for role, then, now in zip(("target", "draft"), record.geometry, geometry, strict=True):
        if then != now:
            return f"a {role} pool of {len(then)} buffers {then[:1]}, which now has {len(now)} buffers {now[:1]}"
    return ""


def _fail(request: Any, why: str) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    message = f"{GATE}: the retracted request cannot be restored: {why}"
    logger.error("%s: request %s", message, request.rid)
    del request.kv_cache_cpu
    # Its slots hold what others left there: no tree may learn them.
    request.skip_radix_cache_insert = True
    request.to_finish = request.to_finish or FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR)


def _note_first_draft(request: Any, scheduler: Any) -> None:
    """Put the relayed rows of the last step where the engine looks for those of the prefill.

    The stock engine starts the first draft after the return from what the prefill sent with the first token. The
    relay's rows are those of this boundary only if no result is left unread; else the old ones stay, which costs one
    step of drafts. Without overlap nothing is relayed. The copy of the pools has waited for the device.
    """
    relay = scheduler.future_map
    if not scheduler.enable_overlap or scheduler.result_queue or not relay._forward_buf_initialized:
        return
    row = request.req_pool_idx
    request.output_topk_p = relay.topk_p_buf[row].cpu()
    request.output_topk_index = relay.topk_index_buf[row].cpu()
    if relay.need_hidden_states:
        request.hidden_states_tensor = relay.hidden_states_buf[row].cpu()
    # A request that came with a seed had its row written, whatever the batch relayed later.
    if request.output_dsa_topk_indices is not None and relay.dsa_topk_indices_buf is not None:
        request.output_dsa_topk_indices = relay.dsa_topk_indices_buf[row].cpu()


def _geometry(pool: Any) -> Geometry:
    buffers = (*pool.kv_buffer, *getattr(pool, "index_k_with_scale_buffer", ()))
    return tuple((str(buffer.dtype), tuple(buffer.shape[1:])) for buffer in buffers)


def _need(holds: bool, condition: str) -> None:
    if not holds:
        raise RetractDraftRefused(f"{GATE} is on, but needs {condition}")
