"""Gates: the environment switches of the patches, all off by default.

A gate is read once, when the module that uses it is imported, so that a running engine never
changes its mind half way. A value that is neither on nor off stops the start: an operator who
wrote ``SGLANG_RESEARCH_X=yes please`` must not run for weeks without the patch.
"""

import os

_ON = frozenset({"1", "true", "yes", "on"})
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
