"""Gates: the environment switches of the patches, all off by default.

A gate is read once, when the module that uses it is imported, so that a running engine never
changes its mind half way. A value that is neither on nor off stops the start: an operator who
wrote ``SGLANG_RESEARCH_X=yes please`` must not run for weeks without the patch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

_ON = frozenset({"1", "true", "yes", "on"})
_PREFIX = "SGLANG_RESEARCH_"
_OFF = frozenset({"", "0", "false", "no", "off"})


def enabled(name: str) -> bool:
    """Tell whether the gate ``name`` is on; unset or empty means off.

    Raises:
        ValueError: the variable holds anything but an on or off word.
    """
    value = os.environ.get(name, "")
    word = value.strip().lower()
    if word in _ON:
        return True
    if word in _OFF:
        return False
    raise ValueError(f"{name}={value!r} is neither on (1, true, yes, on) nor off (0, false, no, off, unset)")


NO_OUTER_CACHE: tuple[tuple[str, Any], ...] = (
    ("enable_hierarchical_cache", False),
    ("hicache_storage_backend", None),
    ("enable_lmcache", False),
)
"""Conditions of every patch: none was ever run beside a cache outside of the engine's memory."""


def require(gate: str, facts: Iterable[tuple[str, Any, Any]]) -> None:
    """Refuse to go on with ``gate`` set unless every fact is as wanted.

    Args:
        gate: the gate's variable, for the message.
        facts: (name of the condition, wanted value, value found). A tuple as wanted value lists alternatives.

    Raises:
        ValueError: at least one differs; the message names each one that does.
    """
    wrong = [
        f"{name} must be {' or '.join(map(repr, wanted)) if isinstance(wanted, tuple) else repr(wanted)}, got {found!r}"
        for name, wanted, found in facts
        if (found not in wanted if isinstance(wanted, tuple) else found != wanted)
    ]
    if wrong:
        raise ValueError(f"{gate} is set, but: " + "; ".join(wrong))


def facts_of(cfg: Any, wanted: Iterable[tuple[str, Any]]) -> list[tuple[str, Any, Any]]:
    """Read the facts for ``require`` from ``cfg``: one attribute for each (name, wanted value)."""
    return [(name, value, getattr(cfg, name)) for name, value in wanted]


def active() -> list[str]:
    """The gates that are on, in the order of the alphabet."""
    return sorted(name for name in os.environ if name.startswith(_PREFIX) and os.environ[name].strip().lower() in _ON)
