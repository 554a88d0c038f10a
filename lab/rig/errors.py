"""The one exception the rig raises for anything an operator can act on."""

from __future__ import annotations


class RigError(Exception):
    """A refusal or a failure, told in one paragraph: what was found, what was needed, what to do next.

    Attributes:
        kind: a short stable word for scripts (``disk``, ``memory``, ``port``, ``tree``, ``model``, ``crash`` ...).
        tail: the last log lines that belong to it, oldest first; empty when there are none.
    """

    def __init__(self, kind: str, message: str, tail: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.tail = tail

    def as_json(self) -> dict[str, object]:
        """The error as a plain mapping, for ``--json``."""
        return {"error": self.kind, "message": str(self), "tail": list(self.tail)}
