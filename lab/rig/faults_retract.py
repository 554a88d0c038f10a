"""More planted faults, of the patches whose harm is in the drafts: what is lost at a retraction, and a draft's seed.

Registered by being imported, beside those of ``lab.rig.faults``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from lab.rig.faults import fault

_DRAFT = ("sglang.srt.research.retract_draft", "mla-retract-patched", "retract-draft-kv", "decode")
_SETTLE = ("sglang.srt.research.settle", "mla-retract-patched", "settle-before-retract", "decode")
_SEED = ("sglang.srt.research.seed", "draft-seed", "draft-seed-recompute", "decode")


@fault("draft-kv-left-out", "the target's KV alone is saved and restored, as the stock engine does", *_DRAFT)
def _draft_kv_left_out(module: ModuleType) -> None:
    vars(module).update(save=lambda *args: None, restore=lambda *args: True)


def _of_record(module: ModuleType, change: Callable[[Any, Any, Any], Any]) -> None:
    """Let ``change`` make another record of each: it is given the record, the draft's pool and the slots."""
    right = module.save

    def save(request: Any, indices: Any, allocator: Any) -> None:
        right(request, indices, allocator)
        request.kv_cache_cpu = change(request.kv_cache_cpu, allocator.research_draft.pool, indices)

    vars(module)["save"] = save


# Rows in another order would change nothing: each carries its position.
@fault("draft-kv-doubled", "each other row of the draft's copy is that of the token before", *_DRAFT)
def _draft_kv_doubled(module: ModuleType) -> None:
    def doubled(record: Any, pool: Any, slots: Any) -> Any:
        return replace(record, draft=pool.get_cpu_copy(slots[::2].repeat_interleave(2)[: len(slots)]))

    _of_record(module, doubled)


@fault("draft-kv-short-record", "a record's boundary lies one before the end of what is in it", *_DRAFT)
def _draft_kv_short_record(module: ModuleType) -> None:
    _of_record(module, lambda record, pool, slots: replace(record, boundary=record.boundary - 1))


@fault("settle-left-out", "requests are retracted while results are unread, as the stock engine does", *_SETTLE)
def _settle_left_out(module: ModuleType) -> None:
    vars(module)["before_retract"] = lambda scheduler, batch: None


@fault("settle-results-dropped", "the queue is emptied before a retraction, and what was in it is not read", *_SETTLE)
def _settle_results_dropped(module: ModuleType) -> None:
    right = module.before_retract

    def before_retract(scheduler: Any, batch: Any) -> None:
        scheduler.process_batch_result = lambda *result: None
        try:
            right(scheduler, batch)
        finally:
            del scheduler.process_batch_result

    vars(module)["before_retract"] = before_retract


@fault(
    "seed-crosses-stages", "a selection of draft-extend and of the prefill seeds each draft loop, as in stock", *_SEED
)
def _seed_crosses_stages(module: ModuleType) -> None:
    vars(module).update(crosses_stages=lambda stock: stock, carried=lambda seeds: seeds)
