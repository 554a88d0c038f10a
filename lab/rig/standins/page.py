"""The page of the docs that shows the table of stand-ins."""

from __future__ import annotations

from lab.rig.standins import table

__all__ = ["text"]

_HEAD = """# Stand-ins of the rig

What does not run on a machine without a GPU, and what runs in its place; all else that an engine imports is its own.
See [the rig](rig.md). `make claims` writes this page from `lab/rig/standins/table.py`.

"""


def text() -> str:
    """The whole page."""
    return _HEAD + table.markdown()
