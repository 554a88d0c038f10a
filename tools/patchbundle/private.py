"""What a support ticket needs not know: where on its machine a tree lies, and whose it is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# An absolute path of two components or more: the last one alone says what it is. Of an address the slashes stand
# behind another one.
_PATH = re.compile(r"(?<![\w/$.…-])(?:/[^\s/'\":,;()]+)+(/[^\s/'\":,;()]+)")


def names_of(places: Iterable[tuple[str, Path | str | None]]) -> dict[str, str]:
    """Folder -> the name that stands for it, for each way in which it may be written; longest first."""
    found: dict[str, str] = {}
    for name, place in places:
        if place:
            for text in (str(place), str(Path(place).absolute()), os.path.realpath(place)):
                if text.strip("/."):
                    found.setdefault(text.rstrip("/"), name)
    return dict(sorted(found.items(), key=lambda item: len(item[0]), reverse=True))


def scrubbed(value: Any, places: Mapping[str, str]) -> Any:
    """A JSON value with the known folders by their names, and of any other absolute path only its last component."""
    if isinstance(value, str):
        for folder, name in places.items():
            value = re.sub(rf"(?<![\w/.-]){re.escape(folder)}(?![\w.-])", name, value)
        return _PATH.sub(r"/…\1", value)
    if isinstance(value, Mapping):
        return {scrubbed(key, places): scrubbed(item, places) for key, item in value.items()}
    return [scrubbed(item, places) for item in value] if isinstance(value, (list, tuple)) else value
