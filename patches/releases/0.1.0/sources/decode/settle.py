"""Results that are still queued are read before a decode engine retracts requests.

With overlap scheduling the loop launches step N before it reads the result of step N - 1. A retraction in step N
therefore meets requests whose last tokens nobody has read: they are thrown away, and without speculation one more row
is counted as committed than the history has tokens for. Here the queue is read first. Then history and KV agree, and
memory is judged by what is really in use: a request that has just finished makes room by itself.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from sglang.srt.research import gates

logger = logging.getLogger(__name__)

GATE = "SGLANG_RESEARCH_SETTLE_BEFORE_RETRACT"
ON: bool = gates.enabled(GATE)


class SettleRefused(RuntimeError):
    """The gate is on in an engine that settling was not made for. Raised at the start."""


def admit(scheduler: Any) -> None:
    """Check the engine at its start.

    Args:
        scheduler: the engine's ``Scheduler`` with its worker, pools and disaggregation mode.

    Raises:
        SettleRefused: the gate is on and a condition does not hold; the message names it.
    """
    if not ON:
        return
    args = scheduler.server_args
    _need(scheduler.disaggregation_mode.value == "decode", "--disaggregation-mode decode")
    _need(scheduler.enable_overlap, "overlap scheduling: without it no result is ever left unread")
    _need(scheduler.ps.pp_size == 1, f"one pipeline stage, found {scheduler.ps.pp_size}")
    _need(args.dllm_algorithm is None, "an autoregressive model: a diffusion model's results were never settled so")
    _need(not scheduler.enable_hisparse, "no HiSparse, with which it was never tried")
    _need(
        not (args.enable_hierarchical_cache or args.disaggregation_decode_enable_offload_kvcache),
        "neither a hierarchical cache nor offloaded KV, with which it was never tried",
    )
    pool = scheduler.req_to_token_pool
    _need(not hasattr(pool, "mamba_pool"), f"KV that is addressed by position alone; {type(pool).__name__} has state")


def before_retract(scheduler: Any, batch: Any) -> None:
    """Read what is queued if this step is about to retract; called before the engine looks for finished requests.

    ``last_batch`` is set to None with it. The event loop takes one result from the queue whenever there is a last
    batch, and from an empty queue it cannot.

    Args:
        scheduler: the engine's ``Scheduler``.
        batch: the running ``ScheduleBatch``; finished requests are filtered out of it.
    """
    if not ON:
        return
    batch.filter_batch()
    if batch.is_empty() or not _retracts(scheduler, batch):
        return
    while scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.last_batch = None
    for request in batch.reqs:
        if not request.finished():
            _judge(request)


def _retracts(scheduler: Any, batch: Any) -> bool:
    """Tell by the engine's own two conditions whether it retracts in this step."""
    from sglang.srt.managers import scheduler as engine

    forced = engine.TEST_RETRACT and scheduler.forward_ct % engine.TEST_RETRACT_INTERVAL == 0
    return forced or not batch.check_decode_mem()


def _judge(request: Any) -> None:
    """Have a request fail whose history does not end one token behind its KV: what would be saved is not its state."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    history, committed = request.seqlen - 1, request.kv_committed_len
    if history == committed or request.to_finish:
        return
    message = f"{GATE}: {committed} committed KV rows for a history of {history}; the request cannot be retracted"
    logger.error("%s: request %s", message, request.rid)
    request.to_finish = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR)


def _need(holds: bool, condition: str) -> None:
    if not holds:
        raise SettleRefused(f"{GATE} is on, but needs {condition}")
