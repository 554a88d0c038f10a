"""Stand-ins for the CUDA device calls of PyTorch that the engine makes without asking for the device first.

On a CPU every operation is finished when its call returns. So an event is always reached, a stream has nothing
to wait for, and the current device is the only one. What this hides is stated in the table: no race between
streams can be seen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

__all__ = [
    "CAPABILITY",
    "Event",
    "Stream",
    "current_stream",
    "default_stream",
    "get_device_capability",
    "record_stream",
    "set_device",
    "stream",
    "synchronize",
    "unpinned_torch",
]

CAPABILITY = (9, 0)


class Event:
    """An event that is reached as soon as it is recorded. Its times, in milliseconds, are all the same: 0."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded = False

    def record(self, stream: Any = None) -> None:
        self._recorded = True

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Tell that the work before the event is done: always, as on a real event that was never recorded."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two recorded events: 0.

        Raises:
            RuntimeError: one of them was never recorded, as the real one raises.
        """
        if not (self._recorded and end._recorded):
            raise RuntimeError("both events must be recorded before calculating elapsed time")
        return 0.0


class Stream:
    """A stream whose work is done at once, in the order of the calls."""

    cuda_stream = 0
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, and return it."""
        made = Event() if event is None else event
        made.record(self)
        return made

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


_ONLY = Stream()


def current_stream(device: Any = None) -> Stream:
    """The only stream there is."""
    return _ONLY


def default_stream(device: Any = None) -> Stream:
    """The only stream there is. A function of its own: torch refuses one function under two names."""
    return _ONLY


@contextmanager
def stream(stream: Any) -> Iterator[None]:
    """Run the block as it is: one stream is as good as another."""
    yield


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """The capability of the deployment's proving ground, sm_90: 64 heads a kernel, no Blackwell paths."""
    return CAPABILITY


def synchronize(device: Any = None) -> None:
    """Return at once: the device's work is done."""


def set_device(device: Any) -> None:
    """Do nothing: there is one device."""


def record_stream(self: Any, s: Any) -> None:
    """Do nothing: CPU memory is never reused while the stream of another device still reads it."""


class _UnpinnedTorch(ModuleType):
    """PyTorch, except that new tensors are made in ordinary host memory whatever is asked for."""

    def __init__(self, original: ModuleType) -> None:
        super().__init__(original.__name__)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def tensor(self, data: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        """``torch.tensor`` without pinned memory."""
        return torch.tensor(data, **kwargs)


def unpinned_torch(original: ModuleType) -> ModuleType:
    """Wrap the name ``torch`` of one module, which asks for pinned memory without asking for the device first."""
    return _UnpinnedTorch(original)
