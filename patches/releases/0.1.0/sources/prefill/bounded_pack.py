"""Send a long prefill-to-decode DCP relayout through the registered pack buffer in slices.

The stock sender packs all rows of a send into one buffer or none: a send that does not fit falls back to one
transfer descriptor for each row and layer. Here such a send is cut into slices. Each slice is packed with the
stock gather, sent, and proven complete before the next slice may overwrite the buffer.

The rule that everything serves: a pack buffer is written only while it is *trusted*. It loses trust before its
first byte is written and gets it back only when every transfer that reads it has ended well. A failed or timed
out transfer may still be reading it, so nothing gives trust back after a failure, and the worker that owns the
buffer goes on with per-row transfers for the rest of the process's life. This covers the stock single-shot pack
too, whose wait may return while sibling writes still read the buffer.

A buffer belongs to one transfer worker, and a worker is one thread. So the state of a buffer needs no lock; the
counters, which all workers share, have one.

Mooncake only: NIXL splits its buffer by rank and reads it asynchronously, so a slice's end cannot be proven there.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.research import gates

GATE = "SGLANG_RESEARCH_DCP_BOUNDED_PACK"
ENABLED: bool = gates.enabled(GATE)

GATHER_BLOCK_BYTES = 1024
"""Bytes that one program of the stock gather kernel copies (its BLOCK_SIZE)."""

GRID_Y_LIMIT = 65535
"""Most blocks that CUDA allows in a grid's y direction, which is where the gather puts a layer's bytes."""

FAILED = -1
"""Status of a send that failed before the transfer engine gave a status of its own."""


class _Aborted(int):
    """A status that is told from every engine status by identity, and is non-zero for callers that do not know it."""


ABORTED = _Aborted(-1)
"""Status of a send that stopped between two slices because its room was aborted. Nothing is in flight then."""

logger = logging.getLogger(__name__)

_STATE = "_research_pack_state"
_METRICS = {
    "triggers": "Sends that did not fit the pack buffer and went through it in slices.",
    "slices": "Slices packed, sent and proven complete.",
    "bytes": "Bytes of the slices counted above.",
    "poisons": "Pack buffers given up for good after a failed transfer.",
    "aborts": "Sliced sends stopped between two slices because their room was aborted.",
    "per_token": "Sends that went row by row because their worker's pack buffer is given up.",
}


class Counters:
    """Monotonic counts of one process, safe to add to from several threads and to read at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(_METRICS, 0)
        self._published: dict[str, Any] = {}

    def publish(self) -> None:
        """Export each count through ``prometheus_client`` from now on, where the engine's own metrics are.

        Not at import: ``prometheus_client`` must not be loaded before the engine has chosen its metrics folder.
        Without the package the counts stay readable in this process alone.
        """
        try:
            from prometheus_client import Counter

            self._published = {
                name: Counter(f"sglang:research_dcp_pack_{name}_total", text) for name, text in _METRICS.items()
            }
        except Exception:
            logger.warning("The bounded pack's counts are not exported as metrics", exc_info=True)

    def add(self, **amounts: int) -> None:
        """Add ``amounts`` to the counts of those names, all at once for a reader.

        Raises:
            KeyError: no such count.
        """
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount
        for name, amount in amounts.items():
            metric = self._published.get(name)
            if metric is not None:
                try:
                    metric.inc(amount)
                except Exception:
                    # A metric that cannot be written must not end the thread that moves the data.
                    logger.debug("Count %s is not exported", name, exc_info=True)

    def snapshot(self) -> dict[str, int]:
        """Return all counts as they stand together at one moment."""
        with self._lock:
            return dict(self._values)


COUNTERS = Counters()


class _State:
    """What is known about one pack buffer: whether it may be written, and the room that its worker serves now."""

    __slots__ = ("room", "trusted")

    def __init__(self) -> None:
        self.trusted = True
        self.room: int | None = None


def _state_of(buffer: Any) -> _State:
    # On the buffer itself, so that it can neither outlive the buffer nor be mixed up by a reused id.
    state: _State = vars(buffer).setdefault(_STATE, _State())
    return state


def check_start(cfg: Any) -> None:
    """Refuse to start with the gate set where the patch was not made for; does nothing with the gate unset.

    Args:
        cfg: the server arguments, read after the transfer backend is resolved.

    Raises:
        ValueError: the gate is set and a condition fails; the message names each one.
    """
    if not ENABLED:
        return
    wanted = (("disaggregation_mode", "prefill"), ("disaggregation_transfer_backend", "mooncake"), ("dcp_size", 1))
    gates.require(GATE, gates.facts_of(cfg, (*wanted, *gates.NO_OUTER_CACHE)))
    logger.info("%s is set: a DCP relayout that exceeds the pack buffer is sent in slices", GATE)


def borrow(buffer: Any, room: int) -> Any:
    """Return the worker's pack buffer for a send of ``room``, or None when it must not be written any more.

    With the gate unset the buffer comes back as it is.
    """
    if not ENABLED or buffer is None:
        return buffer
    state = _state_of(buffer)
    if not state.trusted:
        COUNTERS.add(per_token=1)
        return None
    state.room = room
    return buffer


def guarded(send: Callable[..., int]) -> Callable[..., int]:
    """Decorate the manager's ``send_kvcache_dcp`` so that a send which fails costs the buffer its trust.

    With the gate unset the function comes back as it is. Otherwise the wrapper returns and raises what ``send``
    does; it only withholds a buffer that is given up, and settles the buffer's state when ``send`` has ended.
    """
    if not ENABLED:
        return send
    COUNTERS.publish()

    @functools.wraps(send)
    def guard(mgr: Any, *args: Any, pack_buffer: Any = None, **kwargs: Any) -> int:
        if pack_buffer is None:
            return send(mgr, *args, pack_buffer=None, **kwargs)
        state = _state_of(pack_buffer)
        if not state.trusted:
            COUNTERS.add(per_token=1)
            return send(mgr, *args, pack_buffer=None, **kwargs)
        status: int | None = None
        try:
            status = send(mgr, *args, pack_buffer=pack_buffer, **kwargs)
            return status
        finally:
            # Still trusted: this send never wrote the buffer, so whatever happened cannot be reading it.
            if not state.trusted:
                if status is ABORTED or (status is not None and status == 0):
                    state.trusted = True
                else:
                    _give_up(state, status)

    return guard


def _give_up(state: _State, status: int | None) -> None:
    COUNTERS.add(poisons=1)
    logger.error(
        "A transfer from the DCP pack buffer failed (room %s, status %s) and may still be reading it: the buffer is "
        "given up, its worker sends row by row from now on. Counts: %s",
        state.room,
        "none, it raised" if status is None else status,
        COUNTERS.snapshot(),
    )


def rows_that_fit(buffer_bytes: int, item_lens: Sequence[int]) -> int:
    """Return how many rows one gather into ``buffer_bytes`` can take; ``item_lens`` are a row's bytes in each layer.

    Both limits count: the buffer's size, and the grid that the stock gather launches for its longest row.
    """
    row_bytes = sum(item_lens)
    if row_bytes <= 0:
        return 0
    return min(buffer_bytes // row_bytes, GRID_Y_LIMIT * GATHER_BLOCK_BYTES // max(item_lens))


def slice_edges(rows: int, capacity: int, page: int, first_row: int) -> Iterator[tuple[int, int]]:
    """Cut ``range(rows)`` into ``(low, high)`` slices of at most ``capacity`` rows.

    Slices hold whole pages where a page fits at all, and all but the last end where a destination page ends
    (``first_row`` is the destination row of row 0), so that cutting splits no page into two descriptors.
    """
    step = capacity - capacity % page or capacity
    low = 0
    high = step - first_row % page if step >= page else step
    while low < rows:
        yield low, min(high, rows)
        low, high = high, high + step


def maybe_send(
    mgr: Any,
    peer: str,
    src_ptrs: Sequence[int],
    src_rows: npt.NDArray[np.integer[Any]],
    dst_ptrs: Sequence[int],
    dst_rows: npt.NDArray[np.integer[Any]],
    item_lens: Sequence[int],
    pack_buffer: Any,
    executor: concurrent.futures.ThreadPoolExecutor,
) -> int | None:
    """Send ``src_rows`` in slices if they exceed the pack buffer; None leaves the send to the stock code.

    Args:
        mgr: the Mooncake KV manager.
        peer: session id of the decode rank.
        src_ptrs: base address of each layer's pool here.
        src_rows: rows of those pools, int64 of shape (n,), n > 0.
        dst_ptrs: base address of each layer's pool at the peer, at least as many as ``src_ptrs``.
        dst_rows: where each row goes, int64 of shape (n,).
        item_lens: bytes of one row in each layer.
        pack_buffer: this worker's registered buffer, or None.
        executor: this worker's threads, used only with a custom memory pool.

    Returns:
        None with the gate unset, without a buffer, with a buffer too small for one row, or where the rows fit.
        Otherwise 0, ``ABORTED``, or the first non-zero status. It never raises for a slice that fails: the stock
        worker thread would die of it.
    """
    if not ENABLED or pack_buffer is None:
        return None
    item_lens = item_lens[: len(src_ptrs)]
    capacity = rows_that_fit(pack_buffer.get_size(), item_lens)
    if capacity == 0:
        return None
    state = _state_of(pack_buffer)
    if src_rows.size <= capacity:
        # The stock code writes the buffer next.
        state.trusted = False
        return None
    COUNTERS.add(triggers=1)
    try:
        page = int(mgr.kv_args.page_size)
        for low, high in slice_edges(src_rows.size, capacity, page, int(dst_rows[0])):
            if _is_aborted(mgr, state.room):
                COUNTERS.add(aborts=1)
                logger.info("Room %s was aborted, %d of %d rows sent", state.room, low, src_rows.size)
                return ABORTED
            state.trusted = False
            layers = _pack(src_ptrs, src_rows[low:high], dst_ptrs, dst_rows[low:high], item_lens, pack_buffer)
            status = _transfer(mgr, peer, layers, executor)
            if status != 0:
                return status
            COUNTERS.add(slices=1, bytes=(high - low) * sum(item_lens))
        return 0
    except Exception:
        logger.exception("Sending room %s in slices failed", state.room)
        return FAILED


def _is_aborted(mgr: Any, room: int | None) -> bool:
    """Tell whether the room has failed or is gone: the peer may have given its pages to another request by now."""
    if room is None:
        return False
    from sglang.srt.disaggregation.base.conn import KVPoll

    try:
        return bool(mgr.check_status(room) == KVPoll.Failed)
    except KeyError:
        return True


def _pack(
    src_ptrs: Sequence[int],
    src_rows: npt.NDArray[np.integer[Any]],
    dst_ptrs: Sequence[int],
    dst_rows: npt.NDArray[np.integer[Any]],
    item_lens: Sequence[int],
    pack_buffer: Any,
) -> list[list[tuple[int, int, int]]]:
    """Gather one slice into the buffer and return each layer's (source, destination, bytes) blocks.

    Raises:
        RuntimeError: the buffer refused the slice.
    """
    from sglang.srt.disaggregation.common.dcp_pack import try_pack_dcp_src
    from sglang.srt.disaggregation.common.utils import group_concurrent_contiguous

    packed = try_pack_dcp_src(
        pack_buffer=pack_buffer, kv_data_ptrs=src_ptrs, src_token_indices=src_rows, token_item_lens=item_lens
    )
    if packed is None:
        raise RuntimeError(f"a slice of {src_rows.size} rows does not fit the pack buffer")
    bases, packed_rows = packed
    src_runs, dst_runs = group_concurrent_contiguous(packed_rows, dst_rows)
    runs = [(int(src[0]), int(dst[0]), len(src)) for src, dst in zip(src_runs, dst_runs, strict=True)]
    return [
        [(base + src * size, dst_ptr + dst * size, count * size) for src, dst, count in runs]
        for base, dst_ptr, size in zip(bases, dst_ptrs[: len(bases)], item_lens, strict=True)
    ]


def _transfer(
    mgr: Any, peer: str, layers: list[list[tuple[int, int, int]]], executor: concurrent.futures.ThreadPoolExecutor
) -> int:
    """Send the blocks of all layers; return only when no write of them is under way in this process.

    Returns:
        0, or the first non-zero status; layers that had not begun by then are left out. A write that raised, or
        that somebody else cancelled, counts as failed.
    """
    if not mgr.enable_custom_mem_pool:
        return int(mgr._transfer_data(peer, [block for blocks in layers for block in blocks]))
    bad: list[int] = []

    def write(blocks: list[tuple[int, int, int]]) -> None:
        if bad:
            return
        try:
            status = int(mgr._transfer_data(peer, blocks))
        except Exception:
            logger.exception("A layer's write failed")
            status = FAILED
        if status != 0:
            bad.append(status)

    writes: list[concurrent.futures.Future[None]] = []
    try:
        for blocks in layers:
            writes.append(executor.submit(write, blocks))
    except Exception:
        # The executor takes no more. What it has taken must still end before the caller may go on.
        logger.exception("%d of %d layers could be submitted", len(writes), len(layers))
        bad.append(FAILED)
    # In their order, not as they complete: that wait would never end for a write that a shutdown has cancelled.
    for future in writes:
        try:
            future.result()
        except concurrent.futures.CancelledError:
            bad.append(FAILED)
    return bad[0] if bad else 0


def stopped(mgr: Any, status: int, req: Any, prefill_rank: int) -> bool:
    """Tell whether ``status`` says that the room was aborted between two slices; if so, tell the peer that it failed.

    Such a send is neither a success (rows are missing) nor a fault of the peer's session (which stock would shut out).
    Without the message a peer that did not abort by itself would wait for its timeout.
    """
    if status is not ABORTED:
        return False
    from sglang.srt.disaggregation.base.conn import KVPoll

    try:
        mgr.sync_status_to_decode_endpoint(req.endpoint, req.dst_port, req.room, KVPoll.Failed, prefill_rank)
    except Exception:
        logger.exception("Room %s: the peer could not be told of the abort", req.room)
    return True
