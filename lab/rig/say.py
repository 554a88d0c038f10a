"""How a line of observation is printed inside an engine; ``deployment.parse_events`` reads it."""

from __future__ import annotations

import sys


def say(event: str, **values: object) -> None:
    """Print one line of observation in one write, so that lines of several processes do not mix."""
    text = " ".join([f"rig: {event}", *(f"{name}={value}" for name, value in values.items())])
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
