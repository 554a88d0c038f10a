"""Errors of the stand-ins. All of them are raised before an engine serves anything."""

from __future__ import annotations

__all__ = ["StandInConflict", "StandInError", "StandInMoved", "UnknownVersion"]


class StandInError(RuntimeError):
    """Something is wrong with the stand-ins themselves; the engine must not start."""


class UnknownVersion(StandInError):
    """The engine's version is not one of those that the table was written for."""


class StandInMoved(StandInError):
    """The function that a stand-in replaces is missing, or its parameters are not the expected ones."""


class StandInConflict(StandInError):
    """A stand-in would replace a function that one of our patches changes, and so hide the patch."""
