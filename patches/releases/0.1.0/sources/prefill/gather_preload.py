"""Make the pack buffers, their streams and every variant of the gather kernel before the first transfer worker starts.

The stock engine makes the buffers in the bootstrap thread, at the first registration of a decode rank, and compiles and
loads the gather kernel in a transfer worker, at the first request: on a live server, beside the collectives of the
forward pass, where loading a module may wait for them. Running out of memory there ends the thread and nothing else.

Here all of it happens while the KV manager is made, where an error stops the start. Triton compiles a variant for a
row count of one, for multiples of sixteen and for all others; the pointers are aligned alike, and the number of layers
is in the grid alone, so these three are all that there are. For one profile only: chunks of 16,384 tokens, pages of 64,
DCP2.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from sglang.srt.research import gates, narrow_topology

GATE = "SGLANG_RESEARCH_DCP_GATHER_PRELOAD"
ENABLED: bool = gates.enabled(GATE)

CHUNK_TOKENS = 16384
PAGE_SIZE = 64
ROW_COUNTS = (1, 16, 17)
"""A row count for each variant of the kernel: one, a multiple of sixteen, another."""

logger = logging.getLogger(__name__)

_STATE = "_research_gather_preload"


class _State:
    """One manager's preload: under way, done, or failed."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.dcp_size: int | None = None


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

    cfg = resolved_view(server_args)
    wanted: tuple[tuple[str, Any], ...] = (("chunked_prefill_size", CHUNK_TOKENS), ("page_size", PAGE_SIZE))
    # That gate's own check asks for prefill, Mooncake, whole caches; and it is what refuses a peer of another DCP size.
    narrow = (narrow_topology.GATE, True, narrow_topology.ENABLED)
    gates.require(GATE, [narrow, *gates.facts_of(cfg, wanted)])


def once(init: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """Decorate the manager's ``_init_dcp_pack_buffers_once``: whoever calls it waits for the preload of that manager.

    With the gate unset the function comes back as it is. Otherwise the wrapper makes nothing itself.
    """
    if not ENABLED:
        return init

    @functools.wraps(init)
    def wait(mgr: Any, dcp_size: int) -> None:
        state = _state_of(mgr)
        state.done.wait()
        if dcp_size != state.dcp_size:
            raise RuntimeError(f"{GATE}: the pack buffers are made for DCP size {state.dcp_size}, not {dcp_size}")

    return wait


def preload(mgr: Any) -> None:
    """Make buffers, streams and kernels of ``mgr``; does nothing with the gate unset.

    Args:
        mgr: the prefill's KV manager, its queues made and its transfer workers not started.

    Raises:
        ValueError: the gate is set and the profile is another one; the message names each condition.
        RuntimeError: a buffer is missing or too small, or the kernel gave other bytes than it should.
    """
    if not ENABLED:
        return
    state = _state_of(mgr)
    try:
        if mgr.is_dummy_cp_rank:
            # It never sends: buffers would take gigabytes of its memory for nothing.
            logger.info("%s: this CP rank sends nothing, nothing is made", GATE)
            return
        start = time.monotonic()
        _check_profile(mgr)
        init = type(mgr)._init_dcp_pack_buffers_once.__wrapped__
        init(mgr, narrow_topology.DECODE_DCP_SIZE)
        buffers = mgr._dcp_pack_buffers or ()
        if len(buffers) != len(mgr.transfer_queues):
            raise RuntimeError(f"{GATE}: {len(buffers)} pack buffers for {len(mgr.transfer_queues)} transfer workers")
        for buffer in buffers:
            for rows in ROW_COUNTS:
                _run(mgr, buffer, rows)
        state.dcp_size = narrow_topology.DECODE_DCP_SIZE
        seconds = time.monotonic() - start
        logger.info("%s: %d buffers and %d kernels ready in %.2f s", GATE, len(buffers), len(ROW_COUNTS), seconds)
    finally:
        # Also after a failure: a bootstrap thread that waits here would keep the process from ending.
        state.done.set()


def _check_profile(mgr: Any) -> None:
    from sglang.srt.runtime_context import get_parallel, max_prefill_buffer_tokens

    gates.require(
        GATE,
        [
            ("tokens of a chunk", CHUNK_TOKENS, max_prefill_buffer_tokens()),
            ("page_size", PAGE_SIZE, mgr.kv_args.page_size),
            ("dcp_size", 1, mgr.dcp_size),
            ("is_mla_backend", True, bool(mgr.is_mla_backend)),
            ("layers with KV", True, bool(mgr.kv_args.kv_item_lens)),
            ("enable_dsa_cache_layer_split", False, bool(get_parallel().enable_dsa_cache_layer_split)),
        ],
    )


def _run(mgr: Any, buffer: Any, rows: int) -> None:
    """Gather row 0 of every layer ``rows`` times into ``buffer`` and see that all copies of a layer are the same.

    Row 0 is in every pool: it belongs to the page that requests never get.
    """
    from sglang.srt.disaggregation.common.dcp_pack import try_pack_dcp_src

    page = mgr.kv_args.page_size
    item_lens = [length // page for length in mgr.kv_args.kv_item_lens]
    packed = try_pack_dcp_src(
        pack_buffer=buffer,
        kv_data_ptrs=mgr.kv_args.kv_data_ptrs,
        src_token_indices=np.zeros(rows, dtype=np.int64),
        token_item_lens=item_lens,
    )
    if packed is None:
        raise RuntimeError(f"{GATE}: {rows} rows of {sum(item_lens)} bytes do not fit {buffer.get_size()} bytes")
    first = 0
    for length in item_lens:
        copies = buffer.buffer.narrow(0, first, rows * length).view(rows, length)
        if not bool((copies == copies[0]).all()):
            raise RuntimeError(f"{GATE}: the gather of {rows} rows of {length} bytes gave other bytes than the row's")
        first += rows * length
