"""Runs inside an engine on the GPU machine: tells what was counted there, each time that the cache is emptied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def tell(module: ModuleType, name: str, counts: Callable[[], Mapping[str, int]]) -> None:
    """Print ``counts`` under ``name`` whenever the scheduler of ``module`` empties its cache."""
    scheduler: Any = module.Scheduler
    flush = scheduler.flush_cache

    def flush_cache(this: Any, *args: Any, **kwargs: Any) -> Any:
        sys.stderr.write(f"rig: {name} {' '.join(f'{word}={number}' for word, number in counts().items())}\n")
        sys.stderr.flush()
        return flush(this, *args, **kwargs)

    scheduler.flush_cache = flush_cache
