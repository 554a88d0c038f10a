"""Runs inside every engine process, for few cores: forks in place of spawns, and loops that rest while they wait.

An engine's further processes are forked, so that it is imported once.

The engine spawns them, since a process that has touched a GPU cannot be forked. Here none has. Each spawned process
would import the whole engine again, which is most of what a start costs on a CPU, and most of the memory.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from types import ModuleType
from typing import Any

from lab.rig.standins.hook import after
from lab.rig.standins.start import leash

# What a scheduler imports only once it runs: imported before the fork, so once for all ranks.
LATER = (
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.disaggregation.mooncake.conn",
    "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.models.registry",
)

# The engine itself sets it later.
FOLDER = "PROMETHEUS_MULTIPROC_DIR"


@after("sglang.srt.entrypoints.engine")
def _fork(module: ModuleType) -> None:
    choose = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        choose("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = set_start_method
    # A forked process has a new parent to end with.
    os.register_at_fork(after_in_child=leash)
    # One of them imports what keeps the metrics, which looks there and then for the folder that all processes share.
    if "--enable-metrics" in sys.argv and FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="metrics-")
    for name in LATER:
        importlib.import_module(name)


@after("sglang.srt.managers.data_parallel_controller")
def _sleep(module: ModuleType) -> None:
    """Have the data-parallel controller wait for its next message; the flag by which schedulers do so is not for it."""
    receive = module.sock_recv

    def sock_recv(socket: Any, flags: int = 0) -> Any:
        if flags:
            # Asked not to wait. It turns round without an answer, as it does by itself, only ten times a second.
            socket.poll(100)
        return receive(socket, flags=flags)

    vars(module)["sock_recv"] = sock_recv


@after("sglang.srt.managers.scheduler")
def _rest(module: ModuleType) -> None:
    """Have a scheduler rest between two looks at what it waits for; the engine's own flag is for one without requests.

    A D whose KV is on its way would turn its loop at full speed, and take a core from the P that computes it.
    """
    scheduler: Any = module.Scheduler
    stock = scheduler.on_idle

    def on_idle(self: Any) -> None:
        stock(self)
        if not self.is_fully_idle():
            time.sleep(0.002)

    scheduler.on_idle = on_idle
