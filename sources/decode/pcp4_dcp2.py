"""Decode's half of the permission PCP4 -> DCP2, and a prefill that does not fit fails its requests alone.

The stock engine with DCP takes KV from prefills without CP only, and raises for every prefill that it cannot use: one
with another CP size, page size or KV dtype. That error leaves the scheduler's loop, and the whole decode engine ends
because of one wrong prefill. Here such a prefill is refused: each of its requests fails with the reason, and the others
go on. So is one that has no gate set, with CP or without: no message of it tells how many layers it sends or what its
index pages look like, and only its own half of the patch compares that with what is registered here. Nothing of a
refusal is kept, so a prefill that comes back in order is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.research import gates, narrow_topology
from sglang.srt.research.narrow_topology import ATTN_TP_SIZE, DECODE_DCP_SIZE, ENABLED, GATE, MARK, MARKED

logger = logging.getLogger(__name__)


def check_manager(mgr: Any) -> None:
    """Refuse a KV manager of another topology at start; does nothing with the gate unset.

    Args:
        mgr: the manager under construction, its sizes known.

    Raises:
        ValueError: the gate is set and a condition fails; the message names each one.
    """
    if not ENABLED:
        return
    wanted: tuple[tuple[str, Any], ...] = (
        ("dcp_size", DECODE_DCP_SIZE),
        ("attn_tp_size", ATTN_TP_SIZE),
        ("attn_cp_size", 1),
        ("pp_size", 1),
        ("is_mla_backend", True),
        ("is_hybrid_mla_backend", False),
        ("enable_all_cp_ranks_for_transfer", False),
    )
    backend = ("disaggregation_transfer_backend", ("mooncake", "mooncake_tcp"))
    gates.require(
        GATE,
        [
            ("disaggregation_mode", "decode", mgr.disaggregation_mode.value),
            *gates.facts_of(mgr, wanted),
            *gates.facts_of(mgr.server_args, (backend, *gates.NO_OUTER_CACHE)),
        ],
    )


def allows(mgr: Any, info: Any, response: Any) -> bool:
    """Tell whether a decode engine with DCP may take KV from the prefill that sent ``response``.

    Args:
        mgr: the decode engine's KV manager.
        info: the prefill's topology.
        response: the bootstrap reply that held it.

    Raises:
        ValueError: the gate is set and the prefill is not of the one pair of topologies, or without CP, or does not
            compare what this engine registers; the message names each condition that fails.
    """
    if not ENABLED:
        return bool(info.attn_cp_size == 1)
    wanted: tuple[tuple[str, Any], ...] = (
        ("attn_cp_size", (1, narrow_topology.PREFILL_CP_SIZE)),
        ("attn_tp_size", (1, ATTN_TP_SIZE) if info.attn_cp_size == 1 else ATTN_TP_SIZE),
        ("dp_size", 1),
        ("pp_size", 1),
        ("enable_dsa_cache_layer_split", False),
    )
    mark = (f"the prefill's header {MARK} (it has the gate set too)", MARKED, response.headers.get(MARK))
    gates.require(GATE, [*((f"the prefill's {name}", *rest) for name, *rest in gates.facts_of(info, wanted)), mark])
    return True


def try_ensure(queue: Any, bootstrap_addr: str, reqs: Sequence[Any]) -> bool | None:
    """Look a prefill up as the stock engine does; fail its requests where the stock engine would end.

    Args:
        queue: the decode engine's queue of requests before allocation.
        bootstrap_addr: the prefill's address.
        reqs: the requests that wait for it.

    Returns:
        What ``try_ensure_parallel_info`` does, or None when the prefill is refused and ``reqs`` have been failed.

    Raises:
        Exception: with the gate unset, whatever the look-up raises.
    """
    look_up = queue.kv_manager.try_ensure_parallel_info
    if not ENABLED:
        return bool(look_up(bootstrap_addr))
    try:
        return bool(look_up(bootstrap_addr))
    except Exception as error:
        reason = f"The prefill at {bootstrap_addr} is refused: {error}"
    logger.error("%s; %d requests fail", reason, len(reqs))
    for decode_req in reqs:
        # None after a request was cleaned up while it waited here.
        if decode_req.kv_receiver is not None:
            decode_req.kv_receiver.abort()
            queue.kv_manager.record_failure(decode_req.req.bootstrap_room, reason)
    # The time of this attempt stays: a storm of requests looks a refused prefill up once in a while, not each time.
    queue._ensure_retry_count.pop(bootstrap_addr, None)
    return None
