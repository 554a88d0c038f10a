"""Running processes that have code of a tree: since when, how it is known, and with which gates."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# An interpreter by its own name, or an engine by the title that it gives itself.
_PYTHON = re.compile(r"python|sglang")


class Process(NamedTuple):
    """A process that uses a tree.

    ``older``: it started before the tree was changed, or descends from one that did and uses the tree: a fork has the
    code of its parent. ``gates``: of those that were asked for, the ones in the environment that it was started with;
    None where that may not be looked at.
    """

    pid: int
    name: str
    started: float  # seconds since the epoch, up to a hundredth too early
    older: bool
    known_by: tuple[str, ...]
    gates: Mapping[str, str] | None


class Census(NamedTuple):
    """The processes of a tree, and the number of interpreters of others that may not be looked into."""

    processes: tuple[Process, ...]
    closed: int

    @property
    def older(self) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.older)


def of_tree(root: Path, changed: float, gates: Collection[str] = ()) -> Census:
    """The processes that use the tree at ``root``, which was last changed at ``changed`` (seconds since the epoch).

    A process uses it if its command line names it, if it was started by the interpreter of the virtual environment
    that the tree stands in, if it has a file below it mapped, or if it is an interpreter with the tree on its
    PYTHONPATH or as its working folder. Of the processes of others the system mostly shows the command line alone.
    This process and those that it was started by are left out: a shell or a supervisor that names the tree in this
    very command line.
    """
    # The clock of /proc counts from the boot, in hundredths of a second: one that has just started may look older.
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    own = _ancestors()
    found: dict[int, Process] = {}
    parents: dict[int, int] = {}
    closed = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in own:
            continue
        try:
            fields = _fields(entry)
            known, is_closed = _uses(entry, root)
            closed += is_closed
            if known:
                pid, started = int(entry.name), boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")
                name = (entry / "comm").read_text(encoding="utf-8", errors="replace").strip()
                parents[pid] = int(fields[1])
                found[pid] = Process(pid, name, started, started < changed, known, _gates(entry, gates))
        except OSError:
            continue
    return Census(tuple(_with_forks(found, parents)), closed)


def older_than(root: Path, changed: float) -> list[Process]:
    """The processes of the tree at ``root`` that have the code of before ``changed`` (seconds since the epoch)."""
    return list(of_tree(root, changed).older)


def _with_forks(found: Mapping[int, Process], parents: Mapping[int, int]) -> Iterator[Process]:
    for pid, process in sorted(found.items()):
        above, older = parents[pid], process.older
        while above in found and not older:
            older, above = found[above].older, parents[above]
        yield process._replace(older=older)


def _uses(entry: Path, root: Path) -> tuple[tuple[str, ...], bool]:
    """How it is known that a process uses the tree, and whether it may be an interpreter that cannot be looked into."""
    needle = os.fsencode(root)
    command = (entry / "cmdline").read_bytes()
    known = ["command line"] if needle + b"/" in command or needle in command.split(b"\0") else []
    # A virtual environment is there for its own interpreter. Of /usr/bin that cannot be said.
    environment = root.parents[2] if len(root.parents) > 2 else root
    own = os.fsencode(environment / "bin") + b"/"
    if os.access(environment / "pyvenv.cfg", os.F_OK) and command.startswith(own):
        known.append("interpreter")
    name = (entry / "comm").read_text(encoding="utf-8", errors="replace")
    python = _PYTHON.search(name) is not None or _PYTHON.search(os.fsdecode(command.split(b"\0")[0])) is not None
    try:
        if needle + b"/" in (entry / "maps").read_bytes():
            known.append("open file")
        if python and needle in _environment(entry).get(b"PYTHONPATH", b"").split(b":"):
            known.append("PYTHONPATH")
        if python and (entry / "cwd").readlink() == root:
            known.append("working folder")
    except PermissionError:
        return tuple(known), python and not known
    return tuple(known), False


def _gates(entry: Path, gates: Collection[str]) -> dict[str, str] | None:
    try:
        environment = _environment(entry)
    except PermissionError:
        return None
    texts = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    return {name: texts[name] for name in sorted(gates) if name in texts}


def _environment(entry: Path) -> dict[bytes, bytes]:
    pairs = (item.partition(b"=") for item in (entry / "environ").read_bytes().split(b"\0"))
    return {name: value for name, sign, value in pairs if sign}


def _ancestors() -> set[int]:
    """This process, its parent, and so on up."""
    found: set[int] = set()
    pid = os.getpid()
    while pid and pid not in found:
        found.add(pid)
        try:
            pid = int(_fields(Path("/proc") / str(pid))[1])
        except OSError:
            break
    return found


def _fields(entry: Path) -> list[str]:
    """What /proc says of a process, from its state on: [1] is its parent, [19] its start in ticks since the boot."""
    # The name may hold spaces and parentheses: fields are counted after the last one.
    return (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
