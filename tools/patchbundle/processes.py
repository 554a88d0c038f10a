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

    A process uses it if it has a file below it mapped or its command line names it. Processes of others,
    which the system does not let us look into, are not seen.
    """
    boot = _boot_time()
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                started = boot + _start_ticks(entry) / os.sysconf("SC_CLK_TCK")
                if started < changed and _uses(entry, root):
                    name = (entry / "comm").read_text(encoding="utf-8", errors="replace").strip()
                    result.append(Process(int(entry.name), name, started))
            except OSError:
                continue
    return sorted(result, key=lambda process: process.pid)


def _uses(entry: Path, root: Path) -> bool:
    needle = os.fsencode(root) + b"/"
    # A virtual environment's interpreter is named by a path that contains its site-packages' parents.
    environment = os.fsencode(root.parents[2]) + b"/bin/" if root.name == "site-packages" else needle
    command = (entry / "cmdline").read_bytes()
    return needle in command or environment in command or needle in (entry / "maps").read_bytes()


def _start_ticks(entry: Path) -> int:
    # The name may hold spaces and parentheses: fields are counted after the last one.
    return int((entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])


def _boot_time() -> float:
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
