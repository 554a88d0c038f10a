"""Running processes that still have the code of before a change."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    started: float  # seconds since the epoch


def older_than(root: Path, changed: float) -> list[Process]:
    """Processes that use the tree at ``root`` and started before ``changed`` (seconds since the epoch).

    A process uses it if it has a file below it mapped, if its command line names it, or if it was started by the
    interpreter of the virtual environment that the tree stands in. Processes of others,
    which the system does not let us look into, are not seen. This process and those that it was started by are left
    out: a shell or a supervisor that names the tree in this very command line.
    """
    boot = _boot_time()
    own = _ancestors()
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in own:
            try:
                started = boot + int(_fields(entry)[19]) / os.sysconf("SC_CLK_TCK")
                if started < changed and _uses(entry, root):
                    name = (entry / "comm").read_text(encoding="utf-8", errors="replace").strip()
                    result.append(Process(int(entry.name), name, started))
            except OSError:
                continue
    return sorted(result, key=lambda process: process.pid)


def _uses(entry: Path, root: Path) -> bool:
    needle = os.fsencode(root) + b"/"
    command = (entry / "cmdline").read_bytes()
    if needle in command or needle in (entry / "maps").read_bytes():
        return True
    # A virtual environment is there for its own interpreter. Of /usr/bin that cannot be said.
    environment = root.parents[2] if len(root.parents) > 2 else root
    own = os.fsencode(environment / "bin") + b"/"
    return (environment / "pyvenv.cfg").exists() and command.startswith(own)


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


def _boot_time() -> float:
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
