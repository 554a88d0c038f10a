"""News: the fragments of ``changelog.d`` as notes of one release, and as its part of the change log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_VERSION = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")
_NONE = "No version has been released yet.\n"
BREAKING = "- Breaking:"


class ReleaseError(Exception):
    """This is no state to release; the text says why."""


@dataclass(frozen=True)
class News:
    """The fragments and what they say: one text an item, those first that must be done otherwise now."""

    fragments: tuple[Path, ...]
    items: tuple[str, ...]

    @property
    def breaks(self) -> bool:
        return any(item.startswith(BREAKING) for item in self.items)

    @property
    def text(self) -> str:
        return "".join(self.items)


def read(root: Path) -> News:
    """The fragments below ``root``.

    Raises:
        ReleaseError: there are none, or one is no list.
    """
    fragments = sorted(path for path in (root / "changelog.d").glob("*.md") if path.name != "README.md")
    items: list[str] = []
    for path in fragments:
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.startswith("- "):
                items.append(line)
            elif line.startswith("  ") and items:
                items[-1] += line
            else:
                raise ReleaseError(f"{path.name}: a list is expected, not {line!r}")
    if not items:
        raise ReleaseError("changelog.d holds no news: there is nothing to release")
    return News(tuple(fragments), tuple(sorted(items, key=lambda item: not item.startswith(BREAKING))))


def check_version(version: str, before: Sequence[str], news: News) -> None:
    """The policy of CONTRIBUTING.md.

    Raises:
        ReleaseError: the version does not follow from the last one and from the news.
    """
    number = _number(version)
    if not before:
        return
    last = max(_number(item) for item in before)
    if number <= last:
        raise ReleaseError(f"{version} does not come after {'.'.join(map(str, last))}: raise __version__")
    # Before 1.0 the second number says it.
    kept = 1 if last[0] else 2
    if news.breaks and number[:kept] == last[:kept]:
        raise ReleaseError(f"news that begin with 'Breaking:' need a higher {('first', 'second')[kept - 1]} number")


def _number(version: str) -> tuple[int, ...]:
    if not _VERSION.fullmatch(version):
        raise ReleaseError(f"{version} is no version of the form X.Y.Z")
    return tuple(map(int, version.split(".")))


def fold(changes: str, version: str, date: str, news: News) -> str:
    """The change log with a new part on top."""
    head, sign, rest = changes.replace(_NONE, "").partition("\n## ")
    return f"{head.rstrip()}\n\n## {version} ({date})\n\n{news.text}" + (f"\n## {rest}" if sign else "")
