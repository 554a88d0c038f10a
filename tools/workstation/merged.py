"""What a stack of layers comes to, as far as a distribution is concerned.

Folders and links of the whole image are kept, for names lead through them; of files those that are asked for.
What is kept does not grow with the bytes of the image.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from patchbundle.errors import BundleError, Reason
from workstation.interest import Keep
from workstation.tarstream import Entry, Reader

_HOPS = 40
# More than these no image has, and more would be held in memory.
MEMBERS = 2_000_000
_DEPTH = 200  # folders above each other
_NAME = 4096  # letters of a name
# Bytes of names, targets and attributes that are held in memory.
HELD = 1 << 28
_NODE = 600  # bytes of a node itself
_SHARED = 1 << 25  # bytes of a file that is kept for its second name's sake
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"


class Wanted(Protocol):
    """Which files are kept."""

    def keep(self, path: str) -> Keep | None:
        """How much of a file; None if it is of no concern."""


@dataclass
class Node:
    """What stands at a path after the layers so far. ``entry`` is None of a folder that no layer names.

    ``data`` is the place of a file's bytes; None if there are more of them than are wanted, or none were.
    """

    layer: int
    entry: Entry | None
    data: Path | None = None
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "folder" if self.entry is None else self.entry.kind


class Merged:
    """The view. Layers go in from the lowest on; ``spool`` is a folder for the bytes of wanted files.

    ``extra`` are paths whose files are kept as well: those that :attr:`missing` told of after an earlier reading.
    """

    def __init__(self, wanted: Wanted, spool: Path, extra: Set[str] = frozenset()) -> None:
        self.root = Node(-1, None)
        self.missing: set[str] = set()  # wanted paths that share a file of no concern: its bytes went by
        self._wanted = wanted
        self._spool = spool
        self._count = 0
        self._held = 0
        self._layer = -1
        self._where = ""
        self._extra = extra
        self._parents: dict[str, tuple[Node, str]] = {}

    def add(self, reader: Reader, where: str) -> None:
        """Read a layer, to its end.

        Raises:
            BundleError: LAYER, for what no layer should hold.
        """
        self._layer += 1
        self._where = where
        self._parents = {}
        for entry in reader:
            self._count += 1
            if self._count > MEMBERS:
                raise self._refuse(f"the {self._count}th member of the image", f"up to {MEMBERS}")
            if entry.kind == "device":
                raise self._refuse(f"a device, {entry.name}", "no devices")
            self._take(entry, reader)

    def find(self, path: str) -> Node | None:
        """What stands exactly at ``path``; no link is followed."""
        node: Node | None = self.root
        for part in _parts(path):
            node = node.children.get(part) if node else None
        return node

    def lead(self, path: str) -> str | None:
        """The path that ``path`` comes to, links followed, whether or not there is anything; None if it leads nowhere:
        through something else than a folder, in a circle, too deep."""
        found: list[str] = []
        todo = list(reversed(path.split("/")))
        hops = 0
        while todo:
            part = todo.pop()
            if part in ("", ".", ".."):
                found = found[:-1] if part == ".." else found
                continue
            node = self.find("/".join([*found, part]))
            if node is not None and node.kind == "link":
                assert node.entry is not None
                hops += 1
                found = [] if node.entry.target.startswith("/") else found
                todo += reversed(node.entry.target.split("/"))
            elif node is not None and node.kind != "folder":
                return None
            else:
                found.append(part)
            if hops > _HOPS or len(found) > _DEPTH:
                return None
        return "/".join(found)

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Every path that is kept, with what stands there; folders before what is in them."""
        stack = [("", self.root)]
        while stack:
            path, node = stack.pop()
            if path:
                yield path, node
            below = f"{path}/" if path else ""
            stack += [(f"{below}{name}", child) for name, child in sorted(node.children.items(), reverse=True)]

    def _take(self, entry: Entry, reader: Reader) -> None:
        head, name = self._split(entry.name)
        if not name:  # the root itself
            self.root.entry = entry if entry.kind == "folder" else self.root.entry
            return
        parent, above = self._parent(head)
        if name.startswith(_WHITEOUT):
            self._whiteout(parent, name, entry.name)
            return
        path = f"{above}/{name}" if above else name
        old = parent.children.get(name)
        if entry.kind == "folder":
            children = old.children if old is not None and old.kind == "folder" else {}
            self._put(parent, name, Node(self._layer, entry, None, children), old)
        elif entry.kind == "link":
            self._put(parent, name, Node(self._layer, entry), old)
        else:
            node = self._shared(entry, path) if entry.kind == "hardlink" else self._file(entry, path, reader)
            self._put(parent, name, node, old)

    def _file(self, entry: Entry, path: str, reader: Reader) -> Node | None:
        keep = Keep(_SHARED) if path in self._extra else self._wanted.keep(path)
        if keep is None:
            return None
        if entry.is_sparse:
            raise self._refuse(f"{entry.name}, a file with holes", "plain files where the distribution is")
        if entry.kind != "file" or (entry.size > keep.limit and not keep.head):
            return Node(self._layer, entry)
        place = self._spool / str(self._count)
        place.write_bytes(reader.data(keep.limit))
        return Node(self._layer, entry, place)

    def _shared(self, entry: Entry, path: str) -> Node | None:
        """A second name of a file that is there already, in this layer or a lower one."""
        head, name = self._split(entry.target)
        folder, above = self._parent(head)
        first = folder.children.get(name)
        if first is None:
            if path in self._extra or self._wanted.keep(path) is not None:
                self._hold(len(above) + len(name))
                self.missing.add(f"{above}/{name}" if above else name)
            return None
        if first.kind == "folder" or first.entry is None:
            raise self._refuse(f"{entry.name}, a second name of a folder", "second names of files")
        return Node(self._layer, first.entry, first.data)

    def _put(self, parent: Node, name: str, node: Node | None, old: Node | None) -> None:
        if old is not None and (node is None or node.children is not old.children):
            self._parents = {}
        if node is not None:
            self._hold(len(name), node.entry)
            parent.children[name] = node
            if node.kind == "link":
                self._parents = {}
        elif old is not None:
            del parent.children[name]

    def _hold(self, letters: int, entry: Entry | None = None) -> None:
        """Count what is kept; what was kept of lower layers and is hidden now counts too."""
        self._held += _NODE + letters
        if entry is not None:
            self._held += len(entry.name) + len(entry.target)
            self._held += sum(len(name) + len(data) for name, data in entry.attributes.items())
        if self._held > HELD:
            raise self._refuse(f"more than {HELD} bytes of names and attributes", "as many as a real image has")

    def _whiteout(self, parent: Node, name: str, written: str) -> None:
        self._parents = {}
        if name == _OPAQUE:
            self._prune(parent)
        elif name.startswith(_WHITEOUT * 2):
            raise self._refuse(written, "whiteouts, and no other file that begins with .wh..wh.")
        else:
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in ("", ".", ".."):
                raise self._refuse(written, "the whiteout of a name")
            old = parent.children.get(hidden)
            if old is not None and old.layer == self._layer:
                # Some readers then keep the file, others do not.
                raise self._refuse(f"{written} after the file itself", "whiteouts of what lower layers hold")
            if old is not None:
                self._prune(old)
                if not old.children:
                    del parent.children[hidden]

    def _prune(self, folder: Node) -> None:
        """Take away what lower layers left in a folder."""
        for name, child in list(folder.children.items()):
            self._prune(child)
            if child.layer < self._layer and not child.children:
                del folder.children[name]

    def _split(self, written: str) -> tuple[tuple[str, ...], str]:
        if written.startswith("/"):
            raise self._refuse(f"the absolute name {written}", "names that lead on from the image's root")
        if len(written) > _NAME:
            raise self._refuse(f"a name of {len(written)} letters", f"names of up to {_NAME}")
        parts = _parts(written)
        if ".." in parts or "\0" in written:
            raise self._refuse(f"the name {written}", "names without '..'")
        return parts[:-1], parts[-1] if parts else ""

    def _parent(self, parts: tuple[str, ...]) -> tuple[Node, str]:
        """The folder of that name, made if no layer named it yet, and its path; links on the way are followed."""
        name = "/".join(parts)
        known = self._parents.get(name)
        if known is None:
            self._hold(len(name))
            known = self._parents[name] = self._folder(parts)
        return known

    def _folder(self, parts: tuple[str, ...]) -> tuple[Node, str]:
        trail = [("", self.root)]
        todo = list(reversed(parts))
        hops = 0
        while todo:
            part = todo.pop()
            if part == "..":
                trail = trail[:-1] or trail
                continue
            if len(trail) > _DEPTH:
                raise self._refuse(f"more than {_DEPTH} folders above {part}", "names of a plausible depth")
            path, node = trail[-1]
            path = f"{path}/{part}" if path else part
            child = node.children.get(part)
            if child is None:
                self._hold(len(part))
                child = node.children[part] = Node(self._layer, None)
            if child.kind == "link":
                assert child.entry is not None
                hops += 1
                if hops > _HOPS:
                    raise self._refuse(f"links in a circle at {path}", "links that end somewhere")
                target = child.entry.target
                trail = trail[:1] if target.startswith("/") else trail
                todo += reversed(_parts(target))
            elif child.kind == "folder":
                trail.append((path, child))
            else:
                raise self._refuse(f"something below {path}, which is a {child.kind}", "folders above every member")
        path, node = trail[-1]
        return node, path

    def _refuse(self, found: str, expected: str) -> BundleError:
        return BundleError(Reason.LAYER, self._where, expected=expected, found=found)


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part not in ("", "."))
