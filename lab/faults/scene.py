"""A tree to stop runs on: the touched files of a base, its real RECORD, and what both look like at either end."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from patchbundle import fetch, processes, transaction, work
from patchbundle import target as target_module
from patchbundle.bases import Base
from patchbundle.disk import Disk
from patchbundle.errors import BundleError, Exit
from patchbundle.identity import EXECUTABLE
from patchbundle.manifest import Bundle
from patchbundle.plan import Plan
from patchbundle.state import State
from patchbundle.target import Target
from patchbundle.tree import Tree

# Path -> mode with its kind, and bytes. Folders stand before what is in them.
Image = dict[str, tuple[int, bytes]]

DIRECTIONS = ("apply", "revert")
_UNCHECKED, _CHECKED = 1, 3


@dataclass
class Scene:
    """A tree at ``root``, and its images at the two ends of its series: ``images["apply"]`` is where apply begins."""

    bundle: Bundle
    target: Target
    root: Path
    images: dict[str, Image] = field(default_factory=dict)
    plans: dict[str, tuple[State, Plan]] = field(default_factory=dict)
    levels: dict[tuple[tuple[str, tuple[int, bytes]], ...], int | None] = field(default_factory=dict)

    @classmethod
    def of(cls, bundle: Bundle, root: Path) -> Scene:
        """Of the tree at ``root``, which stands at its base. It gets the bytecode that an interpreter may leave, beside
        the modules and, with the prefix that it may have, in a folder that mirrors the tree."""
        with mock.patch.dict(os.environ, PYTHONPYCACHEPREFIX=str(root / "__pycache__")):
            scene = cls(bundle, target_module.discover(bundle, root=root), root)
        for direction in DIRECTIONS:
            scene._compile()
            scene.images[direction] = scene.seen()
            scene.plans[direction] = work.make_plan(bundle, scene.target, direction, None)
            scene.change(direction)
        scene.lay(scene.images["apply"])
        return scene

    @property
    def operations(self) -> int:
        return len(self.plans["apply"][1].operations)

    def _compile(self) -> None:
        """Bytecode beside the pinned modules: of each kind that an interpreter checks in its own way."""
        with Tree(self.root) as tree:
            state = work.look(self.bundle, self.target, tree)
        modules = [path for path in state.pins.paths if path.endswith(".py") and state.found[path].data is not None]
        for number, path in enumerate(modules[:6]):
            source = self.root / path
            flags = (_UNCHECKED, 0, _CHECKED)[number % 3]
            digest = importlib.util.source_hash(source.read_bytes()) if flags else bytes(8)
            for folder in (source.parent / "__pycache__", *((m / path).parent for m in self.target.mirrors)):
                folder.mkdir(parents=True, exist_ok=True)
                place = folder / f"{source.stem}.cpython-311.pyc"
                place.write_bytes(importlib.util.MAGIC_NUMBER + flags.to_bytes(4, "little") + digest)

    def lay(self, image: Image) -> None:
        """Make the tree be as in ``image``, in the same folder."""
        shutil.rmtree(self.root)
        self.root.mkdir()
        lay(image, self.root)

    def seen(self) -> Image:
        return image_of(self.root)

    def change(self, direction: str) -> None:
        """Apply or revert all of it, by the plan that was made for this tree."""
        with transaction.locked(self.root) as disk:
            self.carry_out(direction, disk)

    def carry_out(self, direction: str, disk: Disk) -> None:
        state, plan = self.plans[direction]
        work.execute(self.bundle, self.target, state, plan, disk=disk)

    def recover(self, back: bool = False) -> str:
        """One of old, new and clean.

        Raises:
            BundleError: as :func:`transaction.recover`.
        """
        return transaction.recover(self.root, back=back)[0]

    def end(self, direction: str) -> str:
        """Old or new, by the bytes of the whole tree, nothing of ours beside them; and ``status`` agrees.

        Raises:
            AssertionError: neither.
        """
        whole = self.seen()
        seen = without_bytecode(whole)
        ours = [path for path in seen if ".patchbundle" in path]
        assert not ours, f"left behind: {', '.join(ours)}"
        other = DIRECTIONS[1 - DIRECTIONS.index(direction)]
        level = self._level(whole)
        for word, start in (("old", direction), ("new", other)):
            if seen == without_bytecode(self.images[start]):
                expected = self.plans[start][1].start.level
                assert level == expected, f"the bytes are those of level {expected}, status says {level}"
                return word
        old = without_bytecode(self.images[direction])
        raise AssertionError(f"neither old nor new: {sorted(path for path in seen if seen[path] != old.get(path))}")

    def _level(self, image: Image) -> int | None:
        """What ``status`` says of the tree, which is as in ``image``. Of two trees without a difference it is asked
        once: most of many thousand ends are one of a few."""
        key = tuple(image.items())
        if key not in self.levels:
            # Which processes are older than a change is another question, and a slow one.
            with mock.patch.object(processes, "of_tree", return_value=processes.Census((), 0)):
                self.levels[key] = work.status(self.bundle, self.target).state.level
        return self.levels[key]

    def end_of_recovery(self, direction: str, back: bool = False) -> str:
        """Recover, and where that ends. ``--back`` may be refused, with the words to go on; then go on."""
        try:
            told = self.recover(back)
        except BundleError as error:
            assert back and error.exit_code == Exit.RECOVERY_NEEDED, str(error)
            told = self.recover()
        found = self.end(direction)
        assert told in (found, "clean"), f"recover says {told}, the tree is {found}"
        return found


def real(bundle: Bundle, base: Base, folder: Path) -> Scene:
    """The files of a real base that its series touches, with the base's own RECORD, in ``folder``."""
    root = folder / "tree"
    pinned = set(bundle.pins(base).paths)
    # What tells version and release stands in the others; the rest of 4,000 files is nothing to a run.
    for path, file in fetch.members(fetch.fetch(base, fetch.default_archive(base))):
        if path in pinned or ".dist-info/" in path or path in ("PKG-INFO", "Cargo.toml"):
            place = root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.data)
            place.chmod(0o755 if file.mode == EXECUTABLE else 0o644)
    (root / base.marker).parent.mkdir(parents=True, exist_ok=True)
    return Scene.of(bundle, root)


def image_of(root: Path) -> Image:
    """Everything below ``root``."""
    image: Image = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = f"{folder}/{entry.name}" if folder else entry.name
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    folders.append(path)
                image[path] = (mode, Path(entry.path).read_bytes() if stat.S_ISREG(mode) else b"")
    return image


def lay(image: Image, root: Path) -> None:
    """Write everything of an image into an empty folder."""
    for path, (mode, data) in image.items():
        place = root / path
        if stat.S_ISDIR(mode):
            place.mkdir()
        else:
            place.write_bytes(data)
        place.chmod(stat.S_IMODE(mode))


def without_bytecode(image: Image) -> Image:
    """A cache that is missing changes nothing; whether one that is there hides a change, ``status`` tells."""
    return {path: item for path, item in image.items() if "__pycache__" not in path}
