"""Runs inside every engine process: levers that a boot's file may pull, each by one variable; unset they do nothing.

None of them changes what is computed. They make rare moments happen on demand and at the same place every time, so
that no scenario depends on how busy the machine is.

* ``PATCHBUNDLE_RIG_PACK_BYTES=N`` caps every pack buffer, so that what does not fit is seen with small prompts.
* ``PATCHBUNDLE_RIG_RETRACT=8,20`` forces a retraction at these steps of a gathered send (see below) on D, and
  ``random:0.9`` at nine steps of ten, whatever runs: at the same ones in every run.
* ``PATCHBUNDLE_RIG_POISON_SEED=1`` gives every draft loop of D a selection from outside that names one token alone.
* ``PATCHBUNDLE_RIG_TRANSFER_FAIL=2`` lets the second KV transfer call of P fail, as a broken connection does.
* ``PATCHBUNDLE_RIG_TRANSFER_HOLD=60`` lets P wait so many seconds before every KV transfer: to end somebody meanwhile.
* ``PATCHBUNDLE_RIG_CP_SIZE=2`` gives the prefill of ``cp4-attention-tp2`` two CP ranks in place of four: half the
  processes, the same two attention ranks in each. A D that takes KV from it (``pcp4-dcp2``) needs it too.
* ``PATCHBUNDLE_RIG_ROTATE_SOURCES=1`` at P and D lets the CP rank that sends a request's KV be its room modulo the CP
  size, where the engine always takes rank 0. Each rank has all of it, so the same bytes arrive.
* ``PATCHBUNDLE_RIG_SPLIT_PENDING=1`` leaves each broadcast that fetches a layer of a split cache ahead of its use
  pending until somebody waits for it, as the stream of a GPU does. Over gloo it would be done when its call returns.

A *gathered* send needs no variable: its requests carry names like ``calm.01of03``, and D starts none of them before
all three are there, in the order of their names. What is batched with what is then the same in every run.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lab.rig.say import say
from lab.rig.standins.hook import after

_GATHERED = re.compile(r"(.+)\.\d+of(\d+)")
_steps = 0


def gathered(name: object) -> tuple[str, int] | None:
    """The send and its number of requests in the name of a gathered request; ``None`` for every other name."""
    match = _GATHERED.fullmatch(str(name))
    return (match[1], int(match[2])) if match else None


class Gathering:
    """Which gathered sends are complete: every member has arrived or has failed."""

    def __init__(self) -> None:
        self.failed: dict[str, int] = {}
        self.complete: set[str] = set()

    def fail(self, name: object) -> None:
        """A request will never arrive; the others do not wait for it."""
        group = gathered(name)
        if group:
            self.failed[group[0]] = self.failed.get(group[0], 0) + 1

    def waits(self, names: list[object]) -> bool:
        """Whether somebody among the arrived ``names`` must wait for others."""
        here: dict[tuple[str, int], int] = {}
        for group in map(gathered, names):
            if group and group[0] not in self.complete:
                here[group] = here.get(group, 0) + 1
        for (send, count), arrived in here.items():
            if arrived + self.failed.get(send, 0) < count:
                return True
        self.complete |= {send for send, _ in here}
        return False


@after("sglang.srt.disaggregation.decode")
def _gather(module: ModuleType) -> None:
    one = Gathering()
    abort = module.prepare_abort
    mixin: Any = module.SchedulerDisaggregationDecodeMixin
    batch = mixin.get_new_prebuilt_batch

    def prepare_abort(request: Any, *args: Any, **kwargs: Any) -> Any:
        one.fail(request.rid)
        return abort(request, *args, **kwargs)

    def get_new_prebuilt_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _steps
        known = len(one.complete)
        if one.waits([request.rid for request in self.waiting_queue]):
            return None
        if len(one.complete) > known:
            _steps = 0
            self.waiting_queue.sort(key=lambda request: str(request.rid))
        return batch(self, *args, **kwargs)

    vars(module)["prepare_abort"] = prepare_abort
    mixin.get_new_prebuilt_batch = get_new_prebuilt_batch


def retraction_steps(text: str) -> tuple[Callable[[int], bool], bool]:
    """At which steps a retraction is forced, and whether the steps of any requests count, or of gathered ones alone.

    Args:
        text: numbers of steps, ``4,14``; or ``random:SHARE``, which every rank draws alike.
    """
    word, _, share = text.partition(":")
    if word == "random":
        return (lambda step: random.Random(step).random() < float(share)), True
    steps = {int(step) for step in text.split(",")}
    return steps.__contains__, False


@after("sglang.srt.managers.scheduler")
def _retract(module: ModuleType) -> None:
    text = os.environ.get("PATCHBUNDLE_RIG_RETRACT", "")
    if not text:
        return
    due, whoever = retraction_steps(text)
    scheduler: Any = module.Scheduler
    update = scheduler.update_running_batch

    def update_running_batch(self: Any, batch: Any) -> Any:
        global _steps
        # The last request is never retracted: only steps with company count.
        counted = [one for one in batch.reqs if (whoever or gathered(one.rid) is not None) and not one.finished()]
        together = len(counted) > 1
        _steps += together
        # The engine's own switch for tests, turned on for one step.
        vars(module)["TEST_RETRACT_INTERVAL"] = 1
        vars(module)["TEST_RETRACT"] = together and due(_steps)
        try:
            return update(self, batch)
        finally:
            vars(module)["TEST_RETRACT"] = False

    scheduler.update_running_batch = update_running_batch


@after("sglang.srt.speculative.eagle_worker_v2")
def _poison_seed(module: ModuleType) -> None:
    if not os.environ.get("PATCHBUNDLE_RIG_POISON_SEED"):
        return
    worker: Any = module.EagleDraftWorker
    stock = worker.draft

    def draft(self: Any, batch: Any) -> Any:
        import torch

        info = batch.spec_info
        rows = 0 if batch.forward_mode.is_idle() else int(info.topk_index.shape[0])
        if rows:
            # Where the engine would read what draft-extend left there. The first token of a text tells a draft nothing.
            seeds = torch.full((rows, self.dsa_index_topk), -1, dtype=torch.int32)
            seeds[:, 0] = 0
            info.dsa_topk_indices = seeds
            say("poisoned", rows=rows)
        return stock(self, batch)

    worker.draft = draft


@after("sglang.srt.disaggregation.mooncake.conn")
def _disturb_transfer(module: ModuleType) -> None:
    failing = int(os.environ.get("PATCHBUNDLE_RIG_TRANSFER_FAIL", "0"))
    seconds = float(os.environ.get("PATCHBUNDLE_RIG_TRANSFER_HOLD", "0"))
    if not failing and not seconds:
        return
    manager: Any = module.MooncakeKVManager
    send, calls, lock = manager._transfer_data, [0], threading.Lock()

    def transfer_data(self: Any, session: Any, blocks: Any) -> Any:
        with lock:
            calls[0] += 1
            fails = calls[0] == failing
        if fails:
            say("broken", call=failing)
            return -1
        if seconds:
            say("held", seconds=seconds)
            time.sleep(seconds)
        return send(self, session, blocks)

    manager._transfer_data = transfer_data


@after("sglang.srt.disaggregation.common.staging_buffer")
def _cap_pack_buffer(module: ModuleType) -> None:
    cap = int(os.environ.get("PATCHBUNDLE_RIG_PACK_BYTES", "0"))
    if not cap:
        return
    buffer: Any = module.StagingBuffer
    stock = buffer.__init__

    def init(self: Any, size_bytes: int, *args: Any, **kwargs: Any) -> None:
        stock(self, min(size_bytes, cap), *args, **kwargs)

    buffer.__init__ = init


class Pending:
    """Stands where a split cache has a communicator of its own for broadcasts: they run when they are waited for."""

    def __init__(self, broadcast: Callable[[Any, int], None]) -> None:
        self.now = broadcast
        self.waiting: list[tuple[Any, int]] = []
        self.ahead = False

    def change_state(self, enable: bool) -> contextlib.AbstractContextManager[None]:
        """Nothing to switch."""
        return contextlib.nullcontext()

    def broadcast(self, tensor: Any, src: int) -> None:
        """Send what ``tensor`` holds now, or, fetching ahead, what it will hold when somebody waits."""
        if self.ahead:
            self.waiting.append((tensor, src))
        else:
            self.now(tensor, src)

    def wait(self) -> None:
        """Run what is pending, in its order."""
        for tensor, src in self.waiting:
            self.now(tensor, src)
        self.waiting.clear()


@after("sglang.srt.mem_cache.dsa_cache_layer_split")
def _leave_broadcasts_pending(module: ModuleType) -> None:
    if not os.environ.get("PATCHBUNDLE_RIG_SPLIT_PENDING"):
        return
    pool: Any = module.LayerSplitDSATokenToKVPool
    prefetch, finalize = pool.prefetch_kv_buffer, pool._finalize_pending_kv_broadcast

    def _init_layer_broadcast_comm(self: Any) -> None:
        import torch

        group = module.get_parallel().attn_cp_group
        ranks = group.ranks
        self.layer_broadcast_comm = Pending(
            lambda tensor, src: torch.distributed.broadcast(tensor, src=ranks[src], group=group.cpu_group)
        )

    def prefetch_kv_buffer(self: Any, *args: Any, **kwargs: Any) -> None:
        self.layer_broadcast_comm.ahead = True
        try:
            prefetch(self, *args, **kwargs)
        finally:
            self.layer_broadcast_comm.ahead = False

    def _finalize_pending_kv_broadcast(self: Any, **kwargs: Any) -> None:
        if self.pending_remote_kv_broadcast:
            say("pending", layer=self.pending_remote_kv_layer_id)
            self.layer_broadcast_comm.wait()
        finalize(self, **kwargs)

    pool._init_layer_broadcast_comm = _init_layer_broadcast_comm
    pool.prefetch_kv_buffer = prefetch_kv_buffer
    pool._finalize_pending_kv_broadcast = _finalize_pending_kv_broadcast


@after("sglang.srt.research.cp_topology")
@after("sglang.srt.research.narrow_topology")
def _fewer_cp_ranks(module: ModuleType) -> None:
    ranks = int(os.environ.get("PATCHBUNDLE_RIG_CP_SIZE", "0"))
    if ranks and hasattr(module, "PREFILL_CP_SIZE"):
        vars(module)["PREFILL_CP_SIZE"] = ranks
    elif ranks:
        vars(module).update(CP_SIZE=ranks, TP_SIZE=ranks * module.ATTN_TP_SIZE)


class OfRoom:
    """A KV manager as one request's sender sees it: whether this rank sends depends on the request's room."""

    def __init__(self, manager: Any, room: int) -> None:
        self._manager = manager
        self.is_dummy_cp_rank = manager.attn_cp_rank != room % manager.attn_cp_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


@after("sglang.srt.disaggregation.common.conn")
def _rotate_sources(module: ModuleType) -> None:
    if not os.environ.get("PATCHBUNDLE_RIG_ROTATE_SOURCES"):
        return
    sender: Any = module.CommonKVSender
    receiver: Any = module.CommonKVReceiver
    begin, setup = sender.__init__, receiver._setup_bootstrap_infos

    def init(self: Any, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *args: Any, **kwargs: Any) -> None:
        begin(self, OfRoom(mgr, bootstrap_room), bootstrap_addr, bootstrap_room, *args, **kwargs)

    def setup_bootstrap_infos(self: Any) -> Any:
        self.target_cp_ranks = [self.bootstrap_room % self.prefill_info.attn_cp_size]
        return setup(self)

    sender.__init__, receiver._setup_bootstrap_infos = init, setup_bootstrap_infos
    # State that every rank has alike is left to rank 0 by the engine, which may not be the one that sends.
    module.CommonKVManager._should_skip_cp_replicated_state_transfer = lambda self: False
