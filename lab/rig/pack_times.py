"""Runs inside every engine process: what ``benchmarks/bounded_pack.py`` needs there, each by one variable.

None of it changes what is computed or sent.

* ``PATCHBUNDLE_RIG_PACK_TIMES=1`` lets P tell of each DCP send when it was queued, when it began and ended, and what
  gathering and sending took. The innermost functions are timed, so that no other observer's line is in a figure.
* ``PATCHBUNDLE_RIG_PLAIN_GATHER=1`` gathers rows by a plain copy. The engine's kernel runs in Triton's interpreter
  here, whose time would be all that is seen.
* ``PATCHBUNDLE_RIG_TORN=1`` hands out a pool's pages in an order in which no two neighbours follow each other.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from lab.rig.say import say
from lab.rig.standins.hook import after

_now = threading.local()


def _on(name: str) -> bool:
    return bool(os.environ.get(f"PATCHBUNDLE_RIG_{name}"))


def timed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``call``, its seconds added to this thread's ``name`` whatever becomes of it."""

    def timing(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            setattr(_now, name, getattr(_now, name, 0.0) + time.perf_counter() - began)

    return timing


@after("sglang.srt.disaggregation.common.dcp_pack")
def _time_gather(module: ModuleType) -> None:
    if _on("PACK_TIMES"):
        vars(module)["try_pack_dcp_src"] = timed(module.try_pack_dcp_src, "gather")


@after("sglang.srt.disaggregation.mooncake.conn")
def _time_send(module: ModuleType) -> None:
    if not _on("PACK_TIMES"):
        return
    manager: Any = module.MooncakeKVManager
    queue, status, dcp, transfer = (
        getattr(manager, name)
        for name in ("add_transfer_request", "check_status", "send_kvcache_dcp", "_transfer_data")
    )
    write = timed(transfer, "send")

    def add_transfer_request(self: Any, bootstrap_room: int, *args: Any, **kwargs: Any) -> Any:
        say("queued", room=bootstrap_room, at=time.perf_counter_ns() // 1000)
        return queue(self, bootstrap_room, *args, **kwargs)

    def check_status(self: Any, room: Any) -> Any:
        # The worker asks for a room's status right before it sends for it, on the same thread.
        _now.room = room
        return status(self, room)

    def _transfer_data(self: Any, session: Any, blocks: Any) -> Any:
        _now.batches = getattr(_now, "batches", 0) + 1
        _now.blocks = getattr(_now, "blocks", 0) + len(blocks)
        _now.bytes = getattr(_now, "bytes", 0) + sum(int(block[2]) for block in blocks)
        return write(self, session, blocks)

    def send_kvcache_dcp(self: Any, *args: Any, **kwargs: Any) -> Any:
        _now.gather = _now.send = 0.0
        _now.batches = _now.blocks = _now.bytes = 0
        began, used = time.perf_counter_ns(), time.process_time()
        try:
            return dcp(self, *args, **kwargs)
        finally:
            used, ended = time.process_time() - used, time.perf_counter_ns()
            say(
                "sent",
                room=_now.room,
                began=began // 1000,
                ended=ended // 1000,
                gather=round(_now.gather * 1e6),
                send=round(_now.send * 1e6),
                cpu=round(used * 1e6),
                batches=_now.batches,
                blocks=_now.blocks,
                bytes=_now.bytes,
                buffers=sum(buffer.get_size() for buffer in self._dcp_pack_buffers or ()),
            )

    manager.add_transfer_request, manager.check_status = add_transfer_request, check_status
    manager.send_kvcache_dcp, manager._transfer_data = send_kvcache_dcp, _transfer_data


def copy_rows(pointers: Sequence[int], rows: Any, pack: Any, sizes: Sequence[int]) -> None:
    """The release's gather by a plain copy: each layer's ``rows``, of ``sizes`` bytes each, one layer after another.

    Args:
        pointers: address of each layer's pool, in memory that this process can read.
        rows: int64 of shape (n,).
        pack: uint8, at least as long as all rows of all layers.
    """
    import torch

    count, offset = int(rows.numel()), 0
    high = int(rows.max()) + 1 if count else 0
    for pointer, size in zip(pointers, sizes, strict=True):
        memory = (ctypes.c_uint8 * (high * size)).from_address(pointer)
        source = torch.frombuffer(memory, dtype=torch.uint8).view(high, size) if high else pack.new_empty(0, size)
        pack[offset : offset + count * size].view(count, size).copy_(source.index_select(0, rows))
        offset += count * size


@after("sglang.kernels.ops.kvcache.pd_dcp_gather")
def _gather_plainly(module: ModuleType) -> None:
    if _on("PLAIN_GATHER"):
        vars(module)["copy_mla_rows_into_pack"] = copy_rows


def torn(pages: Any) -> Any:
    """Every second page of ``pages``, then the others."""
    import torch

    return torch.cat((pages[::2], pages[1::2]))


@after("sglang.srt.mem_cache.allocator.paged")
def _tear(module: ModuleType) -> None:
    if not _on("TORN"):
        return
    allocator: Any = module.PagedTokenToKVPoolAllocator
    clear, merge = allocator.clear, allocator.merge_and_sort_free

    def cleared(self: Any) -> None:
        clear(self)
        self.free_pages = torn(self.free_pages)

    def merged(self: Any) -> None:
        merge(self)
        # What was sorted is in a row again; what already was torn stays so, for its neighbours are two apart.
        self.free_pages = torn(self.free_pages.sort().values)

    allocator.clear, allocator.merge_and_sort_free = cleared, merged
