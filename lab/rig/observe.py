"""Runs inside every engine process: proves which tree was imported, and prints what the scenarios count.

It wraps functions to look at them, and passes everything through; nothing is replaced. Each line starts with ``rig:``
and holds ``key=value`` pairs, so that a scenario reads numbers from the log and never from a guess.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from types import ModuleType
from typing import Any

from lab.rig import pack_times  # noqa: F401  first, so that what it times holds no line of this module
from lab.rig.say import say
from lab.rig.standins.hook import after


def foreign_modules(root: str) -> list[str]:
    """Loaded modules of the engine whose file is not below ``root``."""
    found = []
    for name, module in list(sys.modules.items()):
        if name == "sglang" or name.startswith("sglang."):
            path = getattr(module, "__file__", None)
            if path and not os.path.realpath(path).startswith(os.path.realpath(root) + os.sep):
                found.append(f"{name} from {path}")
    return found


@after("sglang.srt.managers.scheduler")
def _prove_tree(module: ModuleType) -> None:
    root = os.environ.get("PATCHBUNDLE_RIG_TREE", "")
    foreign = foreign_modules(root)
    if not root or foreign:
        say("fatal", root=root, foreign=";".join(foreign[:3]))
        sys.stderr.write(f"rig-fatal: modules of the engine from outside {root}: {foreign[:3]}\n")
        sys.stderr.flush()
        os._exit(71)
    loaded = sum(name.startswith("sglang.") for name in list(sys.modules))
    ours = sorted(name.removeprefix("sglang.srt.research.") for name in sys.modules if ".srt.research." in name)
    say("tree", root=root, scheduler=module.__file__, modules=loaded, foreign=0, ours=",".join(ours) or "none")


@after("sglang.srt.managers.schedule_batch")
def _watch_retraction(module: ModuleType) -> None:
    request: Any = module.Req
    offload, load = request.offload_kv_cache, request.load_kv_cache

    def offload_kv_cache(self: Any, slots: Any, allocator: Any) -> Any:
        rows = self.seqlen - 1
        pages = slots.req_to_token[self.req_pool_idx, : rows : allocator.page_size] // allocator.page_size
        jumps = int((pages[1:] - pages[:-1] != 1).sum())
        say("offload", rid=self.rid, rows=rows, committed=self.kv_committed_len, out=len(self.output_ids), jumps=jumps)
        return offload(self, slots, allocator)

    def load_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        say("restore", rid=self.rid, rows=self.seqlen - 1)
        return load(self, *args, **kwargs)

    request.offload_kv_cache, request.load_kv_cache = offload_kv_cache, load_kv_cache


@after("sglang.srt.managers.scheduler_components.batch_result_processor")
def _watch_lost_results(module: ModuleType) -> None:
    owners = [
        value for value in vars(module).values() if "process_batch_result_decode" in getattr(value, "__dict__", {})
    ]
    if not owners:
        # Nothing would ever be counted as lost then.
        raise AttributeError(f"{module.__name__} has no process_batch_result_decode")
    for owner in owners:
        stock = vars(owner)["process_batch_result_decode"]

        def process(self: Any, batch: Any, result: Any, *args: Any, _stock: Any = stock, **kwargs: Any) -> Any:
            for index, request in enumerate(batch.reqs):
                if request.is_retracted:
                    lengths = getattr(result, "accept_lens", None)
                    say("lost", rid=request.rid, tokens=int(lengths[index]) if lengths is not None else 1)
            return _stock(self, batch, result, *args, **kwargs)

        owner.process_batch_result_decode = process


@after("sglang.srt.disaggregation.mooncake.conn")
def _watch_transfer(module: ModuleType) -> None:
    manager: Any = module.MooncakeKVManager
    now = threading.local()
    transfer, status = manager._transfer_data, manager.check_status

    def check_status(self: Any, room: Any) -> Any:
        # The worker asks for the status of a room right before it sends that room's chunk, on the same thread.
        now.room = room
        return status(self, room)

    def transfer_data(self: Any, session: Any, blocks: Any) -> Any:
        say(
            "transfer",
            kind=getattr(now, "kind", "kv"),
            blocks=len(blocks),
            bytes=sum(int(block[2]) for block in blocks),
            room=getattr(now, "room", 0),
            cp=self.attn_cp_rank,
            tp=self.attn_tp_rank,
        )
        return transfer(self, session, blocks)

    manager._transfer_data, manager.check_status = transfer_data, check_status
    # What is not KV is sent by functions of its own, on the same thread.
    for name, word in (("send_aux", "aux"), ("maybe_send_extra", "state")):
        stock = getattr(manager, name)

        def tagged(self: Any, *args: Any, _stock: Any = stock, _word: str = word, **kwargs: Any) -> Any:
            now.kind = _word
            try:
                return _stock(self, *args, **kwargs)
            finally:
                now.kind = "kv"

        setattr(manager, name, functools.wraps(stock)(tagged))


@after("sglang.srt.disaggregation.decode")
def _watch_decode_prefix(module: ModuleType) -> None:
    queue: Any = module.DecodePreallocQueue
    add, match = queue.add, queue._match_prefix_and_lock

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        say("room", rid=request.rid, room=request.bootstrap_room, rank=self.scheduler.ps.dp_rank)
        return add(self, request, *args, **kwargs)

    def match_prefix_and_lock(self: Any, request: Any) -> Any:
        found = match(self, request)
        say("prefix", rid=request.rid, tokens=len(found.prefix_indices))
        return found

    queue.add, queue._match_prefix_and_lock = add_request, match_prefix_and_lock


@after("sglang.srt.mem_cache.base_prefix_cache")
def _watch_evictions(module: ModuleType) -> None:
    cache: Any = module.BasePrefixCache
    update = cache.update_eviction_metrics

    def update_eviction_metrics(self: Any, num_evicted: int, *args: Any, **kwargs: Any) -> Any:
        # Every kind of cache tells it here, also when nothing was left to evict.
        if num_evicted:
            say("evicted", tokens=num_evicted)
        return update(self, num_evicted, *args, **kwargs)

    cache.update_eviction_metrics = update_eviction_metrics


def pool_bytes(pool: Any) -> int:
    """Bytes of all tensors of a pool, each memory once: what a rank has set aside for KV and for index keys."""
    found: dict[int, int] = {}
    waiting = list(vars(pool).values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, list | tuple):
            waiting += value
        elif hasattr(value, "untyped_storage"):
            memory = value.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    return sum(found.values())


@after("sglang.srt.managers.scheduler")
def _watch_pools(module: ModuleType) -> None:
    """Tell what an idle engine still holds, when it is asked to empty its cache: after that all pools look empty."""
    scheduler: Any = module.Scheduler
    flush = scheduler.flush_cache

    def flush_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_fully_idle():
            allocator, slots = self.token_to_kv_pool_allocator, self.req_to_token_pool
            # The cache counts tokens, the allocator whole pages.
            page = allocator.page_size
            cached = -(-self.tree_cache.evictable_size() // page) * page
            total = slots.size + getattr(slots, "pre_alloc_size", 0)
            say(
                "pools",
                tokens=allocator.size // page * page - allocator.available_size() - cached,
                cached=cached,
                requests=total - len(slots.free_slots),
                bytes=pool_bytes(allocator.get_kvcache()),
            )
        return flush(self, *args, **kwargs)

    scheduler.flush_cache = flush_cache
