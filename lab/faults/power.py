"""What a loss of power may leave of a run: its calls are written down, and replayed without what was not synchronised.

The model: a folder maps names to files; a change of a file's bytes or attributes is on the disk after an fsync of the
file, a change of names after one of the folder, and never before. Of everything else at the moment of the loss any
part may be there, in any choice, whatever the order: a later rename without the file that it names, half of a write,
its length without its bytes. One rename is whole or not at all; so it is on every file system with a journal.
A file system that orders more than this leaves fewer states. One that ignores fsync is outside of it.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import os
import random
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from lab.faults.calls import SYNCS, UNKNOWN, Call, visited
from lab.faults.scene import Image, Scene
from patchbundle import disk
from patchbundle.errors import BundleError, Exit

# What may have become of a change that nobody synchronised. Only a write can be there in part.
LOST, KEPT, HALF, ZEROS = range(4)
_FIRST_JOURNAL = 4  # changes: made, written, its mode, renamed


@dataclass(frozen=True)
class Change:
    """One change of one inode: of a folder's names, or of a file's bytes or attributes.

    ``make`` carries it out on the inodes; ``inode`` is the one whose fsync makes it safe.
    """

    kind: str
    inode: int
    name: str = ""
    other: str = ""
    child: int = 0
    data: bytes = b""
    offset: int = 0
    mode: int = 0

    @property
    def fates(self) -> tuple[int, ...]:
        return (LOST, KEPT, HALF, ZEROS) if self.kind == "write" else (LOST, KEPT)


@dataclass(frozen=True)
class Sync:
    """An fsync of one inode."""

    inode: int


@dataclass
class Inode:
    """A file's bytes, or a folder's names; and its mode with the kind."""

    mode: int
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, int] = field(default_factory=dict)

    def copy(self) -> Inode:
        return Inode(self.mode, bytearray(self.data), dict(self.names))


@dataclass(frozen=True)
class Site:
    """A call in the source of our package: the function that it stands in, a file and its lines, from 1."""

    function: str
    file: str
    first: int
    last: int

    def is_above(self) -> bool:
        """Whether whoever asks was called from here."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.file and self.first <= frame.f_lineno <= self.last:
                return True
            frame = frame.f_back
        return False


def syncs() -> list[tuple[Site, str]]:
    """Every call of a change in place that synchronises something, with its source: whatever has "sync" in its name.

    An overlay is left out: it is a new folder that nothing runs from yet, and no recovery speaks of it.
    """
    found = []
    paths = Path(disk.__file__).parent.glob("*.py")
    for path in sorted(path for path in paths if path.stem != "overlay"):
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
        for function in (node for node in nodes if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and "sync" in ast.unparse(node.func).rpartition(".")[2]:
                    place = (f"{path.stem}.{function.name}", str(path), node.lineno, node.end_lineno or node.lineno)
                    found.append((Site(*place), ast.unparse(node)))
    return found


class Killed(BaseException):
    """Nothing in a run answers this: it stops as if it were killed, and what was not synchronised still is not."""


class Log:
    """A visitor that makes every call and writes down what it does to the tree at ``root``.

    The process that makes the change after ``killed_at`` of them is killed once, by :class:`Killed`; others go on.
    An fsync that comes from the place ``without`` in our code is not made.
    Calls that change something in a way that it does not know raise NotImplementedError.
    """

    def __init__(self, root: Path) -> None:
        self.entries: list[Change | Sync] = []
        self.killed_at: int | None = None
        self.without: Site | None = None
        self.start: dict[int, Inode] = {}
        self._known: dict[tuple[int, int], int] = {}
        self._ends: dict[int, int] = {}
        self.root = self._read(root)

    def _read(self, place: Path) -> int:
        number = self._new(os.lstat(place))
        inode = self.start[number] = Inode(place.lstat().st_mode)
        if stat.S_ISDIR(inode.mode):
            inode.names = {name: self._read(place / name) for name in sorted(os.listdir(place))}
        else:
            inode.data += place.read_bytes()
        return number

    def _new(self, status: os.stat_result) -> int:
        number = len(self._known) + len(self._ends) + len(self.start) + len(self.entries) + 1
        self._known[status.st_dev, status.st_ino] = number
        return number

    def _at(self, where: int | str | os.PathLike[str]) -> int:
        status = os.stat(where)
        return self._known[status.st_dev, status.st_ino]

    def __call__(self, call: Call) -> Any:
        if call.name in UNKNOWN:
            raise NotImplementedError(f"the model does not know {call.name}")
        if call.name in SYNCS and self.without is not None and self.without.is_above():
            return None
        if call.name in SYNCS:
            result = call.make()
            self.entries.append(Sync(self._at(call.arguments[0])))
            return result
        if not call.changes:
            return call.make()
        if self.killed_at is not None and sum(isinstance(entry, Change) for entry in self.entries) == self.killed_at:
            self.killed_at = None
            raise Killed
        known = self._before(call)
        result = call.make()
        self._after(call, result, known)
        return result

    def _before(self, call: Call) -> int:
        """The inode that a name stands for, while it does."""
        if call.name in ("link", "rename"):
            folder = call.options["src_dir_fd"]
            status = os.stat(call.arguments[0], dir_fd=folder, follow_symlinks=False)
            return self._known[status.st_dev, status.st_ino]
        return 0

    def _after(self, call: Call, result: Any, known: int) -> None:
        first = call.arguments[0]
        if call.name == "write":
            inode = self._at(first)
            offset = self._ends.get(inode, 0)
            self._ends[inode] = offset + result
            self._add("write", inode, data=bytes(call.arguments[1][:result]), offset=offset)
        elif call.name == "fchmod":
            self._add("mode", self._at(first), mode=call.arguments[1])
        elif call.name in ("fchown", "setxattr"):
            # The images do not hold owners and attributes.
            self._add("other", self._at(first))
        elif call.name in ("unlink", "rmdir"):
            self._add("remove", self._at(call.options["dir_fd"]), name=first)
        elif call.name == "link":
            self._add("name", self._at(call.options["dst_dir_fd"]), name=call.arguments[1], child=known)
        elif call.name == "rename":
            folders = {self._at(call.options[side]) for side in ("src_dir_fd", "dst_dir_fd")}
            if len(folders) != 1:
                raise NotImplementedError("the model does not know a rename from one folder to another")
            self._add("rename", folders.pop(), name=call.arguments[1], other=first, child=known)
        else:
            folder = call.options["dir_fd"]
            if call.kind == "create" and not call.arguments[1] & os.O_EXCL:
                raise NotImplementedError("the model does not know a file that is opened over another")
            child = self._new(os.stat(first, dir_fd=folder, follow_symlinks=False))
            kind = "create" if call.kind == "create" else "mkdir"
            mode = call.arguments[2] if kind == "create" else call.arguments[1]
            self._add(kind, self._at(folder), name=first, child=child, mode=mode)

    def _add(self, kind: str, inode: int, **details: Any) -> None:
        self.entries.append(Change(kind, inode, **details))

    # Replay.

    def image(self, fates: Mapping[int, int]) -> Image:
        """The tree after every entry by its fate; ``fates`` maps an entry's place to it, others are kept."""
        inodes = {number: inode.copy() for number, inode in self.start.items()}
        for place, entry in enumerate(self.entries):
            if isinstance(entry, Sync):
                continue
            fate = fates.get(place, KEPT)
            if entry.child and entry.child not in inodes:
                kind = stat.S_IFDIR if entry.kind == "mkdir" else stat.S_IFREG
                inodes[entry.child] = Inode(kind | entry.mode)
            if fate != LOST:
                _make(inodes[entry.inode], entry, fate)
        image: Image = {}
        _collect(inodes, self.root, "", image)
        return image

    def losses(self, bound: int, chance: random.Random) -> Iterator[tuple[int, dict[int, int]]]:
        """Every moment of the run with the fates that a loss of power may deal then, up to ``bound`` of them each.

        A moment is after so many entries; all later ones are lost. Of its choices those that lose its last change
        belong to an earlier moment. Where there are more than ``bound``, these are taken: all kept, all lost, and at
        random some with one alone kept or lost, and others.
        """
        pending: dict[int, Change] = {}
        later = dict.fromkeys(range(len(self.entries)), LOST)
        for place, entry in enumerate(self.entries):
            del later[place]
            if isinstance(entry, Sync):
                pending = {at: change for at, change in pending.items() if change.inode != entry.inode}
                continue
            others = list(pending.items())
            for fates in _choices([change.fates for _, change in others], bound, chance):
                chosen = {at: fate for (at, _), fate in zip(others, fates, strict=True)}
                for fate in entry.fates[1:]:
                    yield place + 1, {**later, **chosen, place: fate}
            pending[place] = entry

    def left(self) -> list[int]:
        """The places of the changes that nobody had synchronised at the end."""
        synced: dict[int, int] = {}
        for place, entry in enumerate(self.entries):
            if isinstance(entry, Sync):
                synced[entry.inode] = place
        changes = enumerate(self.entries)
        return [at for at, entry in changes if isinstance(entry, Change) and synced.get(entry.inode, -1) < at]


def _make(inode: Inode, change: Change, fate: int) -> None:
    if change.kind in ("create", "mkdir", "name", "rename"):
        if change.kind == "rename" and inode.names.get(change.other) == change.child:
            del inode.names[change.other]
        inode.names[change.name] = change.child
    elif change.kind == "remove":
        inode.names.pop(change.name, None)
    elif change.kind == "mode":
        inode.mode = stat.S_IFMT(inode.mode) | change.mode
    elif change.kind == "write":
        data = change.data[: len(change.data) // 2] if fate == HALF else change.data
        data = bytes(len(data)) if fate == ZEROS else data
        inode.data.extend(bytes(max(0, change.offset - len(inode.data))))
        inode.data[change.offset : change.offset + len(data)] = data


def _collect(inodes: Mapping[int, Inode], number: int, prefix: str, image: Image) -> None:
    for name, child in sorted(inodes[number].names.items()):
        inode = inodes[child]
        image[prefix + name] = (inode.mode, bytes(inode.data))
        if stat.S_ISDIR(inode.mode):
            _collect(inodes, child, f"{prefix}{name}/", image)


def _choices(fates: Sequence[Sequence[int]], bound: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
    """All choices of one fate each; of more than ``bound`` so many: see :meth:`Log.losses`."""
    if math.prod(len(each) for each in fates) <= bound:
        yield from itertools.product(*fates)
        return
    seen = {tuple(each for _ in fates): None for each in (KEPT, LOST)}
    while len(seen) < bound:
        alone = chance.randrange(len(fates))
        others, one = chance.choice([(KEPT, LOST), (LOST, KEPT)])
        seen[tuple(one if at == alone else others for at in range(len(fates)))] = None
        seen[tuple(chance.choice(each) for each in fates)] = None
    yield from seen


# The states that a loss leaves, and where each ends.


@dataclass
class Losses:
    """The states of one scene. ``bound`` is how many choices are taken at one moment.

    Beside the run itself: ``deeper`` runs are killed, spread evenly, and as many in the first journal, and recovered
    before the power is lost; and the recoveries of so many of the states that a loss left lose their power in turn.
    Both recover on, and back. Of ``every`` so many choices one is taken.
    """

    scene: Scene
    bound: int = 64
    deeper: int = 6
    every: int = 1
    seed: int = 0
    without: Site | None = None
    states: int = 0
    choices: int = 0

    def check(self, direction: str) -> None:
        """A run in one direction.

        Raises:
            AssertionError: a state from which recovery does not end old or new, or a run or recovery that said that
                it was done and had not synchronised all of it.
        """
        scene, image = self.scene, self.scene.images[direction]
        run = self._recorded(image, lambda: scene.change(direction))
        some = self._states(run, direction)
        self._durable(run, direction, "new")
        changes = sum(isinstance(entry, Change) for entry in run.entries)
        spread = {part * (changes - 1) // max(self.deeper - 1, 1) for part in range(self.deeper)}
        for killed_at in sorted(spread | set(range(min(self.deeper, _FIRST_JOURNAL)))):
            for back in (False, True):
                self._recovery(image, direction, back, killed_at)
        for image in some:
            for back in (False, True):
                self._recovery(image, direction, back)

    def _recovery(self, image: Image, direction: str, back: bool, killed_at: int | None = None) -> None:
        def stopped_and_recovered() -> None:
            if killed_at is not None:
                with contextlib.suppress(Killed):
                    self.scene.change(direction)
            try:
                self.scene.recover(back)
            except BundleError as error:
                assert back and error.exit_code == Exit.RECOVERY_NEEDED, str(error)
                self.scene.recover()

        log = self._recorded(image, stopped_and_recovered, killed_at)
        end = self.scene.end(direction)
        self._states(log, direction)
        self._durable(log, direction, end)

    def _recorded(self, image: Image, function: Callable[[], object], killed_at: int | None = None) -> Log:
        self.scene.lay(image)
        log = Log(self.scene.root)
        log.killed_at, log.without = killed_at, self.without
        with visited(log):
            function()
        # The model's own proof: with nothing lost it makes the tree that is there.
        assert log.image({}) == self.scene.seen(), "the log does not tell all that was done"
        return log

    def _states(self, log: Log, direction: str) -> list[Image]:
        """Every different tree that a loss during the log leaves; from each, recovery ends old or new.

        ``deeper`` of them are returned, drawn on the way: all of a long series' took eleven gigabytes.
        """
        seen: set[int] = set()
        some: list[Image] = []
        chance, drawn = random.Random(self.seed), random.Random(self.seed)
        for moment, fates in log.losses(self.bound, random.Random(self.seed)):
            if self.every > 1 and chance.randrange(self.every):
                continue
            self.choices += 1
            image = log.image(fates)
            key = hash(tuple((path, mode, data) for path, (mode, data) in image.items()))
            if key in seen:
                continue
            seen.add(key)
            self.scene.lay(image)
            with _told(f"{direction}, power lost after call {moment}"):
                self.scene.end_of_recovery(direction)
            if len(some) < self.deeper:
                some.append(image)
            elif (at := drawn.randrange(len(seen))) < self.deeper:
                some[at] = image
        self.states += len(seen)
        return some

    def _durable(self, log: Log, direction: str, end: str) -> None:
        """What was reported is so after a loss of power too."""
        left = log.left()
        fates = [entry.fates for at in left if isinstance(entry := log.entries[at], Change)]
        for chosen in _choices(fates, self.bound, random.Random(self.seed)):
            self.scene.lay(log.image(dict(zip(left, chosen, strict=True))))
            self.states += 1
            with _told(f"{direction}, power lost after the end, which was {end}"):
                found = self.scene.end(direction)
                assert found == end, f"it is {found}"


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Let what goes wrong in here say where it was."""
    try:
        yield
    except (AssertionError, BundleError, OSError) as error:
        raise AssertionError(f"{where}: {error}") from error
