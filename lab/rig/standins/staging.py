"""Stand-in for the device memory of the transfer's pack buffer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["host_memory"]


def host_memory(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of the pack buffer: the same bytes, in host memory.

    The engine asks for ``cuda:<number>`` by name. Size, packing, slicing and sending stay its own.
    """
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["device"] = "cpu"
        original(*bound.args, **bound.kwargs)

    return __init__
