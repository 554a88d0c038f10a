"""Which names may be paths inside a target."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from patchbundle.errors import BundleError, Reason

# Everything that a transaction puts beside the files it changes starts with this, so that nothing
# else may: an interrupted run is recognised, and cleaned up, by these names alone.
RESERVED = ".patchbundle"
_CONTROL = re.compile("[\x00-\x1f\x7f]")


def check(path: str, where: str, next_step: str = "") -> str:
    """Return ``path`` if it is a plain relative path, in forward slashes, that stays inside its root.

    Raises:
        BundleError: NAME, with what is wrong with it.
    """
    fault = _fault(path)
    if fault:
        raise BundleError(
            Reason.NAME,
            where,
            expected="a relative path without '.', '..', '//', backslashes or control characters",
            found=f"{path!r}: {fault}",
            next_step=next_step,
        )
    return path


def below(root: Path, name: str, where: str) -> str:
    """The path inside ``root`` that somebody named, relative to it or from the top of the machine.

    Raises:
        BundleError: NAME, if it is not inside.
    """
    path = Path(name)
    if path.is_absolute() and path.is_relative_to(root):
        path = path.relative_to(root)
    return check(str(path) if name else "", where, "name a file inside the tree, relative to its root")


def _fault(path: str) -> str | None:
    if not path:
        return "empty"
    if path.startswith("/"):
        return "absolute"
    if "\\" in path:
        return "backslash"
    if _CONTROL.search(path):
        return "control character"
    for part in path.split("/"):
        if part in {"", ".", ".."}:
            return f"component {part!r}"
        if len(part.encode("utf-8", "surrogatepass")) > 255:
            return "component longer than 255 bytes"
        if part.casefold() == ".git":
            return "component '.git'"
        if part.casefold().startswith(RESERVED):
            return f"component reserved for the tool itself ({RESERVED}*)"
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return "not valid Unicode"
    return None


def fold(path: str) -> str:
    """The form under which two paths are the same on a file system that ignores case or Unicode form."""
    # Unicode's canonical caseless match: the decomposition comes first, or an iota subscript keeps an accent apart.
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", path).casefold())


def check_together(paths: Iterable[str], where: str) -> None:
    """Refuse paths that cannot be files of one tree.

    Raises:
        BundleError: COLLISION, if two paths, or two folders above them, are one on some file system;
            PARENT, if one path is a folder above another.
    """
    seen: dict[str, str] = {}
    files = dict.fromkeys(paths)
    for path in files:
        above = parents(path)
        for step in (*above, path):
            other = seen.setdefault(fold(step), step)
            if other != step:
                raise BundleError(Reason.COLLISION, where, found=f"{other!r} and {step!r}")
        for parent in above:
            if parent in files:
                raise BundleError(Reason.PARENT, f"{where}: {path}", found=f"{parent} is a file")


def parents(path: str) -> list[str]:
    """The folders above ``path``, outermost first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
