"""The files of concern of an image, laid out as a tree of their own for the ordinary run to change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patchbundle.errors import BundleError
from patchbundle.target import Target
from workstation.interest import Interest
from workstation.merged import Merged, Node
from workstation.tarstream import Entry

# What the tools need of their own copy, whatever bits the image's has.
FILE_BITS, FOLDER_BITS = 0o600, 0o700


class Layout:
    """``tree`` stands for the image's root; ``prefix`` is the distribution's root in the image.

    ``mirror`` is the folder in which interpreters of the image keep its compiled files, if it is another one.
    """

    def __init__(self, tree: Path, view: Merged, interest: Interest, prefix: str, mirror: str | None) -> None:
        self.tree = tree
        self.view = view
        self.prefix = prefix
        self._interest = interest
        self.root = tree / prefix
        self._mirror = mirror
        self.root.mkdir(parents=True)
        for path, node in view.walk():
            if self._is_of_concern(path, node):
                self._lay(path, node)

    def _is_of_concern(self, path: str, node: Node) -> bool:
        if self._mirror is not None and _below(path, self._mirror) and (path.endswith(".pyc") or node.kind == "link"):
            return True
        rel = _below(path, self.prefix)
        return bool(rel) and (node.kind not in ("folder", "link") or self._interest.is_laid_out(rel, node.kind))

    def _lay(self, path: str, node: Node) -> None:
        place = self.tree / path
        for above in reversed(place.relative_to(self.tree).parents[:-1]):
            self._make(above.as_posix())
        if node.kind == "folder":
            self._make(path)
        elif node.kind == "link":
            # Where it leads is the image's matter: here it must lead nowhere.
            place.symlink_to("a-link-of-the-image")
        elif node.kind == "fifo":
            os.mkfifo(place)
        else:
            assert node.entry is not None
            if node.data is not None:
                place.write_bytes(node.data.read_bytes())
            with open(place, "ab") as stream:
                stream.truncate(node.entry.size)
            place.chmod(node.entry.mode | FILE_BITS)

    def _make(self, path: str) -> None:
        place = self.tree / path
        if not place.is_symlink() and not place.is_dir():
            place.mkdir()
        entry = self.entry(path)
        if entry is not None and entry.kind == "folder":
            place.chmod(entry.mode | FOLDER_BITS)

    def entry(self, path: str) -> Entry | None:
        """What the image's layers say of a path; None if they do not name it."""
        node = self.view.find(path)
        return node.entry if node is not None else None

    def target(self, found: Target) -> Target:
        """The target that was found here, with the image's own place of bytecode."""
        return found._replace(mirrors=(self.tree / self._mirror,) if self._mirror is not None else ())

    @contextmanager
    def named_as_in_the_image(self) -> Iterator[None]:
        """Refusals of the ordinary run name paths of the image, as they are to be typed in a container of it."""
        try:
            yield
        except BundleError as error:
            where, expected, found, step = (
                text.replace(f"{self.tree}/", "/") if text else text
                for text in (error.where, error.expected, error.found, error.next_step)
            )
            raise BundleError(
                error.reason,
                f"the image: {where}",
                expected=expected,
                found=found,
                next_step=f"in a container of it: {step}",
                exit_code=error.exit_code,
            ) from None


def _below(path: str, folder: str) -> str:
    """The path as seen from the folder; empty if it is not below it."""
    return path if not folder else path.removeprefix(f"{folder}/") if path.startswith(f"{folder}/") else ""
