"""Prefill's half of the permission PCP4 -> DCP2: refuse what would send too little, too early or to the wrong peer.

Nothing functional keeps a CP4 prefill from serving a DCP2 decode engine: CP rank 0 holds the whole KV and the relayout
takes any number of DCP ranks. A prefill without CP may have the gate too, for its guards: the decode engine takes KV
from no other. What is needed are guards, and that none of them ends a thread of the engine: the stock
bootstrap thread dies silently of a registration that it cannot serve, and the transfer worker of a state of the wrong
length, and then every request of this prefill waits for its timeout.

Three more things are closed here. A decode engine that was refused fails request by request, with the reason in the
log. Index state whose page lists differ in length fails its request, where stock cuts the longer list. And a cached
prefix that is sent early is read only after the forward pass that may still be writing it: stock records an event for
that, which its Mooncake backend never looks at.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.research import cp_topology, gates, narrow_topology
from sglang.srt.research.narrow_topology import ATTN_TP_SIZE, DECODE_DCP_SIZE, ENABLED, GATE, MARK, MARKED

logger = logging.getLogger(__name__)

_STATE = "_research_pcp4_dcp2"


class _Mismatch(int):
    """A status that is told from every other by identity, and is non-zero for callers that do not know it."""


STATE_MISMATCH = _Mismatch(-1)
"""Status of a state transfer whose page lists differ in length. Nothing of it was sent."""


class _State:
    """What one manager remembers: decode sessions that were refused, and writes that early sends must wait for."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self.writes: dict[int, Any] = {}


def _state_of(mgr: Any) -> _State:
    state: _State = vars(mgr).setdefault(_STATE, _State())
    return state


def check_start(server_args: Any) -> None:
    """Refuse to start with the gate set where the patch was not made for; does nothing with the gate unset.

    Args:
        server_args: the server arguments at the end of their resolution.

    Raises:
        ValueError: the gate is set and a condition fails; the message names each one.
    """
    if not ENABLED:
        return
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.environ import envs

    cfg = resolved_view(server_args)
    wanted: tuple[tuple[str, Any], ...] = (
        ("disaggregation_mode", "prefill"),
        ("disaggregation_transfer_backend", "mooncake"),
        ("dcp_size", 1),
        ("enable_dsa_cache_layer_split", False),
        *gates.NO_OUTER_CACHE,
    )
    all_ranks = "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"
    halves = [(cp_topology.GATE, True, cp_topology.ENABLED)] if (cfg.attn_cp_size or 1) > 1 else []
    gates.require(
        GATE,
        [
            *halves,
            *gates.facts_of(cfg, wanted),
            (all_ranks, False, bool(getattr(envs, all_ranks).get())),
        ],
    )


def check_manager(mgr: Any) -> None:
    """Refuse a KV manager of another topology before it registers; does nothing with the gate unset.

    Args:
        mgr: the manager under construction, its sizes known.

    Raises:
        ValueError: the gate is set and a condition fails; the message names each one.
    """
    if not ENABLED:
        return
    wanted: tuple[tuple[str, Any], ...] = (
        ("attn_cp_size", (1, narrow_topology.PREFILL_CP_SIZE)),
        ("attn_tp_size", (1, ATTN_TP_SIZE) if mgr.attn_cp_size == 1 else ATTN_TP_SIZE),
        ("attn_dp_size", 1),
        ("pp_size", 1),
        ("dcp_size", 1),
        ("is_mla_backend", True),
        ("is_hybrid_mla_backend", False),
        ("enable_all_cp_ranks_for_transfer", False),
    )
    gates.require(GATE, gates.facts_of(mgr, wanted))


def reply_headers() -> dict[str, str] | None:
    """Return the headers by which a bootstrap reply says that this prefill passed its checks; None with no gate."""
    return {MARK: MARKED} if ENABLED else None


def refuses(mgr: Any, registration: Any) -> bool:
    """Tell whether a decode rank's registration cannot be served, and remember why. Always False with the gate unset.

    Args:
        mgr: the manager; with the gate set its pack buffers are ready when this returns False.
        registration: the decode rank's ``KVArgsRegisterInfo``.
    """
    if not ENABLED:
        return False
    session, refused = registration.mooncake_session_id, _state_of(mgr).refused
    try:
        gates.require(
            GATE,
            [
                ("the peer's DCP size", DECODE_DCP_SIZE, registration.dst_dcp_size),
                ("the peer's DCP rank", tuple(range(DECODE_DCP_SIZE)), registration.dst_dcp_rank),
                ("the peer's attention TP size", ATTN_TP_SIZE, registration.dst_attn_tp_size),
                *_geometry(mgr.kv_args, registration),
            ],
        )
        # What the stock thread does next, here where an error is caught: the second call of each changes nothing.
        mgr.requires_dcp_relayout(registration.dst_dcp_size, registration.dst_dcp_rank)
        mgr.prepare_dcp_token_item_lens([registration.dst_kv_item_len] * len(mgr.kv_args.kv_item_lens))
        mgr._init_dcp_pack_buffers_once(registration.dst_dcp_size)
    except Exception as error:
        refused[session] = str(error)
        logger.error("The decode session %s is refused: %s", session, error)
        return True
    refused.pop(session, None)
    return False


def _geometry(own: Any, registration: Any) -> list[tuple[str, Any, Any]]:
    """What both ends must hold alike, as facts for ``gates.require``.

    Stock compares the size of a row alone. Layers that the prefill has not, as those of a draft, it leaves as they were
    in the decode engine's memory; of a layer too many its worker dies; index pages go out by the prefill's own size,
    over the peer's next page where that is smaller.
    """
    here, there = own.state_item_lens, registration.dst_state_item_lens
    rows, peers = own.state_data_ptrs, registration.dst_state_data_ptrs
    return [
        ("the peer's KV layers, those of a draft among them", len(own.kv_data_ptrs), len(registration.dst_kv_ptrs)),
        ("the peer's state components", len(here), len(there)),
        *(
            (f"the peer's bytes a page of each layer of state component {number}", [*sizes], [*theirs])
            for number, (sizes, theirs) in enumerate(zip(here, there, strict=False))
        ),
        *(
            (f"the peer's layers of state component {number}", len(sizes), len(theirs))
            for number, (sizes, theirs) in enumerate(zip(rows, peers, strict=False))
        ),
    ]


def turned_away(mgr: Any, req: Any, prefill_rank: int) -> bool:
    """Fail a request of a refused decode session, at both ends; False for every other request.

    Args:
        mgr: the manager.
        req: the ``TransferInfo`` of one decode rank.
        prefill_rank: this sender's number in the decode rank's count of responses.
    """
    if not ENABLED or req.is_dummy:
        return False
    reason = _state_of(mgr).refused.get(req.mooncake_session_id)
    if reason is None:
        return False
    _fail(mgr, req, prefill_rank, f"The decode session {req.mooncake_session_id} was refused: {reason}")
    return True


def state_differs(mgr: Any, state_type: Any, source: Sequence[Any], target: Sequence[Any]) -> bool:
    """Tell whether index pages may not be sent because the two lists differ in length. False with the gate unset."""
    if not ENABLED or len(source) == len(target):
        return False
    logger.error("%s pages: %d here, %d at the peer; nothing of them is sent", state_type, len(source), len(target))
    return True


def state_refused(mgr: Any, status: int, req: Any, prefill_rank: int) -> bool:
    """Fail a request whose state was not sent because of its length. Its session, in order otherwise, goes on."""
    if status is not STATE_MISMATCH:
        return False
    _fail(mgr, req, prefill_rank, "The index state's pages differ in number between prefill and decode")
    return True


def _fail(mgr: Any, req: Any, prefill_rank: int, reason: str) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    mgr.record_failure(req.room, reason)
    mgr.update_status(req.room, KVPoll.Failed)
    try:
        mgr.sync_status_to_decode_endpoint(req.endpoint, req.dst_port, req.room, KVPoll.Failed, prefill_rank)
    except Exception:
        # The worker thread would end with it. The peer has its own timeout.
        logger.exception("Room %s: the peer could not be told of the failure", req.room)


def hand_over(sender: Any) -> None:
    """Pass the event of a forward pass that may still write what ``sender`` sends now on to the transfer worker."""
    if not ENABLED:
        return
    event = vars(sender).pop("_early_send_wait_event", None)
    if event is None:
        return
    writes, known = _state_of(sender.kv_mgr).writes, sender.kv_mgr.request_status
    for room in [room for room in writes if room not in known]:
        writes.pop(room, None)  # its chunk was dropped before a worker saw it
    writes[sender.bootstrap_room] = event


def await_writes(mgr: Any, room: int) -> None:
    """Wait, in the transfer worker, until the pages of ``room`` that are sent early have been written."""
    if not ENABLED:
        return
    event = _state_of(mgr).writes.pop(room, None)
    if event is not None:
        event.synchronize()
