"""Runs inside every engine process: its further processes are forked, so that an engine is imported once.

The engine spawns them, since a process that has touched a GPU cannot be forked. Here none has. Each spawned process
would import the whole engine again, which is most of what a start costs on a CPU, and most of the memory.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from types import ModuleType

from lab.rig.standins.hook import after
from lab.rig.standins.start import leash

# What a scheduler imports only once it runs: imported before the fork, so once for all ranks.
LATER = (
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.disaggregation.mooncake.conn",
    "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.models.registry",
)


@after("sglang.srt.entrypoints.engine")
def _fork(module: ModuleType) -> None:
    choose = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        choose("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = set_start_method
    # A forked process has a new parent to end with.
    os.register_at_fork(after_in_child=leash)
    for name in LATER:
        importlib.import_module(name)
