"""One process of a deployment as its keeper sees it: what to start, how it says that it is ready, what is a crash."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

TAIL = 40
# What the engines print when a process of theirs is lost. Left alone they then wait a minute for core dumps.
FATAL = (
    "Scheduler hit an exception",
    "DetokenizerManager hit an exception",
    "TokenizerManager hit an exception",
    "DataParallelController hit an exception",
    "Received sigquit from a child process",
    "stand-ins: ",
    "rig-fatal:",
)


@dataclass(frozen=True)
class Spec:
    """What the keeper is to start.

    Attributes:
        name: the member's name in the deployment, also of its log file.
        argv: the command line.
        env: the whole environment.
        ready: every one of these must have been printed before the member counts as ready.
        after: names of members that must be ready first.
        port: where it serves, for ``status``.
        role: ``prefill``, ``decode`` or ``router``.
        tree: the engine tree it runs, empty for the router's wheel.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready: tuple[str, ...]
    role: str
    port: int
    after: tuple[str, ...] = ()
    tree: str = ""

    def as_json(self) -> dict[str, Any]:
        """A plain mapping that ``from_json`` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Spec:
        """Read what ``as_json`` wrote."""
        values = dict(data)
        for name in ("argv", "ready", "after"):
            values[name] = tuple(values[name])
        return cls(**values)


@dataclass
class Watch:
    """Follows the log lines of one member; knows nothing of processes, so that it is tested with plain text."""

    ready: tuple[str, ...]
    seen: set[str] = field(default_factory=set)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))
    fatal: str = ""

    def line(self, text: str) -> None:
        """Take one line of the log."""
        self.tail.append(text)
        for marker in self.ready:
            if marker in text:
                self.seen.add(marker)
        if not self.fatal:
            for marker in FATAL:
                if marker in text:
                    self.fatal = text.strip()

    @property
    def is_ready(self) -> bool:
        """Whether every awaited line was seen."""
        return self.seen.issuperset(self.ready)
