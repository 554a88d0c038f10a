"""Runs inside every engine process: one Triton kernel at a time.

Triton's interpreter changes functions of ``triton.language`` for the time of a kernel and puts them back afterwards.
Two threads that run kernels at once (a scheduler, and the thread that packs KV for a transfer) would undo each other's
change, and the engine would end with an error that has nothing to do with it. A GPU has no such limit.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

from lab.rig.standins.hook import after


@after("triton.runtime.interpreter")
def _one_kernel_at_a_time(module: ModuleType) -> None:
    executor: Any = module.GridExecutor
    stock = executor.__call__
    # A kernel may be started from within a kernel's launch hook on the same thread.
    lock = threading.RLock()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return stock(self, *args, **kwargs)

    executor.__call__ = call
