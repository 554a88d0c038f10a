"""Compiled bytecode: the copy of a module that the interpreter may run instead of its source."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from patchbundle import names
from patchbundle.errors import BundleError, Reason
from patchbundle.tree import Tree


class Cache(NamedTuple):
    """A compiled file. ``folder`` is the tree it stands in, ``path`` its path there, ``module`` the source's.

    ``kind`` tells how an interpreter checks it: by the source's time stamp, by its hash, or not at all
    ("unchecked"): the last would go on running the old code whatever stands in the source. "damaged", "link",
    "unreadable" and "closed" (a whole folder) say why that cannot be told. A link may also stand in the place of
    a whole folder; it is not followed.
    """

    folder: Path
    path: str
    module: str
    kind: str
    stamp: tuple[int, int] | None = None  # (mtime in s, size in bytes) of the source it was made from
    magic: bytes = b""  # of the interpreter that made it
    digest: bytes = b""  # the source's, as that interpreter takes it, where it is not checked by a time stamp

    def replaces(self, source: bytes) -> bool:
        """Whether an interpreter would run it in place of ``source`` without a look at that, and it is not its code.

        A link counts, wherever it leads. So does code that is never checked and comes from another kind of
        interpreter than this one: its digest of the source cannot be taken here.
        """
        if self.kind == "link":
            return True
        if self.kind != "unchecked":
            return False
        return self.magic != importlib.util.MAGIC_NUMBER or self.digest != importlib.util.source_hash(source)

    def hides(self, mtime: int, size: int) -> bool:
        """Whether an interpreter would take it for that of a source with this time stamp, unread."""
        return self.kind in {"unchecked", "link", "unreadable", "closed"} or (
            self.kind == "timestamp" and self.stamp == (mtime & 0xFFFFFFFF, size)
        )


def find(tree: Tree, modules: Iterable[str], mirrors: Iterable[Path] = ()) -> list[Cache]:
    """The compiled files of ``modules``: beside them, and in each folder that mirrors the tree for bytecode.

    A folder of caches that may not be looked into is one result, of kind "closed".

    Raises:
        BundleError: UNREADABLE, if a folder cannot be read for another reason.
    """
    sources = [module for module in modules if module.endswith(".py")]
    found = _beside(tree, sources, lambda folder: f"{folder}/__pycache__".lstrip("/"))
    for mirror in mirrors:
        try:
            other = Tree(mirror)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            found += [Cache(mirror, "", module, "closed") for module in sources[:1]]
            continue
        with other:
            # The interpreter follows a link anywhere below the prefix.
            found += _beside(other, sources, lambda folder: folder, links_above=True)
    seen: dict[str, Cache] = {}
    for cache in found:
        seen.setdefault(f"{cache.folder}/{cache.path}", cache)
    return list(seen.values())


# Run by an interpreter for its own bytecode: which of these would it run although they are not their source's? A crash
# over one of them is an answer too, so each is named before it is read.
_FORGED = """
import importlib.util, marshal, os, sys
for index, (path, source) in enumerate(zip(sys.argv[1::2], sys.argv[2::2])):
    print(index, flush=True)
    with open(path, "rb") as stream:
        data = stream.read()
    with open(source, "rb") as stream:
        text = stream.read()
        status = os.fstat(stream.fileno())
    flags = int.from_bytes(data[4:8], "little")
    parts = (int(status.st_mtime), status.st_size)
    stamp = b"".join((part & 0xFFFFFFFF).to_bytes(4, "little") for part in parts)
    meant = importlib.util.source_hash(text) if flags & 1 else stamp
    if data[:4] == importlib.util.MAGIC_NUMBER and data[8:16] == meant:
        level = path.rpartition(".opt-")[2].removesuffix(".pyc")
        made = compile(text, source, "exec", dont_inherit=True, optimize=int(level) if level in ("1", "2") else 0)
        try:
            same = marshal.loads(data[16:]) == made
        except (EOFError, ValueError, TypeError):
            same = False
        if not same:
            print("forged", flush=True)
"""


def forged(caches: Iterable[Cache], root: Path, python: str) -> list[Cache]:
    """Those of ``caches`` that ``python`` would run in place of their source below ``root`` and that are other code.

    It compiles each source and compares the code, its line numbers included. What another interpreter made, or what it
    would not run, is not among them. Only the interpreter itself reads the code, in a process of its own.
    """
    left = [cache for cache in caches if cache.kind in {"timestamp", "checked", "unchecked"}]
    found: list[Cache] = []
    if left:
        import subprocess
    while left:
        words = [str(part) for cache in left for part in (cache.folder / cache.path, root / cache.module)]
        done = subprocess.run([python, "-I", "-S", "-c", _FORGED, *words], capture_output=True, text=True, check=False)
        at = -1
        for line in done.stdout.split():
            if line == "forged":
                found.append(left[at])
            else:
                at = int(line)
        if done.returncode and at >= 0:
            # It could not even be read.
            found += [cache for cache in left[at : at + 1] if cache not in found]
        elif done.returncode:
            raise BundleError(Reason.UNREADABLE, python, expected="a Python interpreter", found=done.stderr[-200:])
        left = left[at + 1 :] if done.returncode else []
    return found


def _beside(
    tree: Tree, sources: Iterable[str], place: Callable[[str], str], *, links_above: bool = False
) -> list[Cache]:
    """The compiled files of ``sources``; ``place`` tells where those of a folder are. Each place is listed once."""
    stems: dict[str, dict[str, str]] = {}
    for module in sources:
        folder, _, name = module.rpartition("/")
        stems.setdefault(place(folder), {})[name.removesuffix(".py")] = module
    found: list[Cache] = []
    for folder, modules in stems.items():
        above = names.parents(folder) if links_above else []
        kinds = {path: _kind(tree, path) for path in (*above, folder) if path}
        link = next((path for path, kind in kinds.items() if kind == "link"), None)
        # A folder that is a link, or closed, is told of once.
        first = next(iter(modules.values()))
        if link is not None:
            found.append(Cache(tree.root, link, first, "link"))
            continue
        if kinds.get(folder) == "absent":
            continue
        try:
            listing = tree.listing(folder)
        except BundleError as error:
            # A disk that fails for a moment is no closed folder: what hides a change may lie in it.
            if not isinstance(error.__cause__, PermissionError):
                raise
            found.append(Cache(tree.root, folder, first, "closed"))
            continue
        for name, kind in sorted(listing.items()):
            # module.cpython-311.pyc, module.cpython-311.opt-1.pyc
            found_for = _module_of(name, modules) if kind in {"file", "link"} else None
            if found_for is not None:
                path = f"{folder}/{name}" if folder else name
                found.append(
                    _read(tree, path, found_for) if kind == "file" else Cache(tree.root, path, found_for, "link")
                )
    return found


def _kind(tree: Tree, path: str) -> str:
    try:
        return tree.kind(path)
    except BundleError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        return "closed"


def _module_of(name: str, modules: Mapping[str, str]) -> str | None:
    """The module whose compiled file has this name. A module's own name may have dots too."""
    if not name.endswith(".pyc"):
        return None
    parts = name.split(".")
    stems = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((modules[stem] for stem in stems if stem in modules), None)


def _read(tree: Tree, path: str, module: str) -> Cache:
    try:
        data = tree.head(path, 16)
    except OSError:
        return Cache(tree.root, path, module, "unreadable")
    if len(data) < 16:
        return Cache(tree.root, path, module, "damaged")
    flags = int.from_bytes(data[4:8], "little")
    if flags & 1:
        return Cache(tree.root, path, module, "checked" if flags & 2 else "unchecked", None, data[:4], data[8:16])
    stamp = (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little"))
    return Cache(tree.root, path, module, "timestamp", stamp)
