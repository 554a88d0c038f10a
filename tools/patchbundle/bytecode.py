"""Compiled bytecode: the copy of a module that the interpreter may run instead of its source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from patchbundle.tree import Tree


@dataclass(frozen=True)
class Cache:
    """A compiled file. ``folder`` is the tree it stands in, ``path`` its path there, ``module`` the source's.

    ``kind`` tells how an interpreter checks it: by the source's time stamp, by its hash, or not at all
    ("unchecked"): the last would go on running the old code whatever stands in the source.
    """

    folder: Path
    path: str
    module: str
    kind: str
    stamp: tuple[int, int] | None = None  # (mtime in s, size in bytes) of the source it was made from

    def hides(self, mtime: int, size: int) -> bool:
        """Whether an interpreter would take it for that of a source with this time stamp, unread."""
        return self.kind == "unchecked" or (self.kind == "timestamp" and self.stamp == (mtime & 0xFFFFFFFF, size))


def find(tree: Tree, modules: Iterable[str], prefixes: Iterable[Path] = ()) -> list[Cache]:
    """The compiled files of ``modules``: beside them, and under each pycache prefix."""
    found: list[Cache] = []
    for module in modules:
        if module.endswith(".py"):
            found += _in_folder(tree, f"{module.rpartition('/')[0]}/__pycache__".lstrip("/"), module)
    for prefix in prefixes:
        # A prefix repeats the absolute folder of the source below itself.
        mirrored = prefix / tree.root.relative_to(tree.root.anchor)
        if mirrored.is_dir():
            with Tree(mirrored) as other:
                for module in modules:
                    if module.endswith(".py"):
                        found += _in_folder(other, module.rpartition("/")[0], module)
    return found


def _in_folder(tree: Tree, folder: str, module: str) -> Iterator[Cache]:
    stem = module.rpartition("/")[2].removesuffix(".py")
    for name, kind in sorted(tree.listing(folder).items()):
        # module.cpython-311.pyc, module.cpython-311.opt-1.pyc
        if kind == "file" and name.startswith(f"{stem}.") and name.endswith(".pyc"):
            path = f"{folder}/{name}" if folder else name
            yield _read(tree, path, module)


def _read(tree: Tree, path: str, module: str) -> Cache:
    data = tree.find(path).data or b""
    if len(data) < 16:
        return Cache(tree.root, path, module, "damaged")
    flags = int.from_bytes(data[4:8], "little")
    if flags & 1:
        return Cache(tree.root, path, module, "checked" if flags & 2 else "unchecked")
    stamp = (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little"))
    return Cache(tree.root, path, module, "timestamp", stamp)
