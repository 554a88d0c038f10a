"""Processes that end with their parent, and ending exactly the processes that one parent started.

Three ties hold a deployment together. The keeper (see keeper.py) asks the kernel to kill it when its own parent dies
and sees the end of its standard input besides; every member is killed by the kernel when the keeper dies; and the
keeper is a *subreaper*, so that whatever a member started and left behind becomes the keeper's own child and is found.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``signum`` to this process when its parent ends.

    Args:
        parent: the process id the caller believes to be its parent; when it is gone already this process ends now,
            since the kernel tells of later deaths only.
    """
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process ``pid`` started; ``None`` when there is no such live process.

    A process id is used again some day, a pair of id and start time is not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def children(pid: int) -> list[int]:
    """Process ids of the direct children of ``pid``, of all its threads; empty when it is gone."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii").split())
        except OSError:
            continue
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of everything below ``pid``, parents before children."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def kill_descendants(seconds: float = 20.0) -> list[int]:
    """Kill and reap everything below the calling process, which must be a subreaper; return what is left (normally []).

    A process that starts another while it is being killed loses: its child becomes ours and the next round finds it.
    """
    own = os.getpid()
    until = time.monotonic() + seconds
    while True:
        for pid in descendants(own):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while True:
                # A kill is asynchronous: wait for one child to be gone, then look for the next generation.
                done, _ = os.waitpid(-1, os.WNOHANG)
                if done == 0:
                    break
        except ChildProcessError:
            return []
        if time.monotonic() > until:
            return descendants(own)
        time.sleep(0.01)


def memory(pid: int) -> int:
    """Proportional set size in bytes of ``pid`` and everything below it; a process that ends meanwhile counts 0."""
    total = 0
    for one in [pid, *descendants(pid)]:
        try:
            text = Path(f"/proc/{one}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue
        for line in text.splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
                break
    return total
