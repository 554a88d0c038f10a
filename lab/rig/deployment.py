"""A deployment: a folder with its specification, its logs and its state, and the keeper that runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.rig import cache, leash
from lab.rig.client import get
from lab.rig.errors import RigError
from lab.rig.keeper import SPEC, STATE
from lab.rig.member import Spec
from lab.rig.tree import REPOSITORY

# Proportional set sizes that were seen with the tiny models: an engine with what its ranks share, and each rank.
MEMORY_PER_ENGINE = 1_000_000_000
MEMORY_PER_RANK = 400_000_000
# Logs, state and compiled Python of one run.
DISK = 1_000_000_000
_EVENT = re.compile(r"rig: (\S+)(.*)")
_PAIR = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True)
class Event:
    """One line that an engine's observer printed."""

    name: str
    values: Mapping[str, str]

    def number(self, key: str) -> int:
        """The value of ``key`` as an integer."""
        return int(self.values[key])


def parse_events(text: str) -> list[Event]:
    """Find the observer's lines in the text of a log."""
    found = []
    for match in _EVENT.finditer(text):
        found.append(Event(match.group(1), dict(_PAIR.findall(match.group(2)))))
    return found


def available_memory(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that processes may still take: the machine's, or less where a control group (v2) has a limit.

    Raises:
        RigError: kind ``memory``; the kernel does not tell.
    """
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii"))
    if match is None:
        raise RigError("memory", f"{meminfo} does not tell how much memory is available")
    available = int(match.group(1)) * 1024
    # A machine without such a group has no such files, one without a limit says "max".
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        counts = {name: int(number) for name, number in lines}
        cached = counts["active_file"] + counts["inactive_file"]
        available = min(available, limit - used + cached)
    return available


def need_memory(
    engines: int, ranks: int, meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")
) -> None:
    """Refuse to start more engines, with so many ranks together, than the memory holds.

    Raises:
        RigError: kind ``memory``, with the number needed and the number available.
    """
    needed = engines * MEMORY_PER_ENGINE + ranks * MEMORY_PER_RANK
    available = available_memory(meminfo, group)
    if available < needed:
        raise RigError(
            "memory",
            f"{engines} engines with {ranks} ranks need {needed / 1e9:.1f} GB of memory, "
            f"{available / 1e9:.1f} GB are free",
        )


@dataclass
class Deployment:
    """One running set of engines, with or without a router.

    Attributes:
        folder: its folder in the cache.
        specs: what runs.
        tied: whether it ends with this process (and then ``keeper`` is our child) or lives on by itself.
    """

    folder: Path
    specs: Sequence[Spec]
    tied: bool = True
    keeper: subprocess.Popen[bytes] | None = None
    say: Callable[[str], None] = lambda text: None
    marks: dict[str, int] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """What the keeper last wrote.

        Raises:
            RigError: kind ``state``; nothing readable is there.
        """
        return read_state(self.folder)

    def up(self, limit: float = 600.0) -> dict[str, Any]:
        """Start everything and return the state once all members are ready.

        Args:
            limit: seconds within which all of them must be ready.

        Raises:
            RigError: kind ``crash``, with the last log lines of the member that was lost.
        """
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        (self.folder / "logs").mkdir(exist_ok=True)
        (self.folder / SPEC).write_text(json.dumps([spec.as_json() for spec in self.specs]), encoding="utf-8")
        argv = [sys.executable, "-m", "lab.rig.keeper", str(self.folder), f"--limit={limit}"]
        if self.tied:
            argv += ["--tied", f"--parent={os.getpid()}"]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        with (self.folder / "logs" / "keeper.log").open("wb") as errors:
            self.keeper = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.PIPE if self.tied else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        state = self._follow(limit + 60)
        for spec in self.specs:
            if spec.role == "router":
                wait_for_router(spec.port, len(spec.after), self.check)
        if not self.tied and self.keeper is not None and self.keeper.stdout is not None:
            self.keeper.stdout.close()
        return state

    def _follow(self, limit: float) -> dict[str, Any]:
        """Read the keeper's lines until everything is ready or something is lost."""
        assert self.keeper is not None and self.keeper.stdout is not None
        told: set[str] = set()
        until = time.monotonic() + limit
        selector = selectors.DefaultSelector()
        selector.register(self.keeper.stdout, selectors.EVENT_READ)
        rest = b""
        while selector.select(max(0.0, until - time.monotonic())):
            data = os.read(self.keeper.stdout.fileno(), 1 << 16)
            if not data:
                log = (self.folder / "logs" / "keeper.log").read_text(encoding="utf-8", errors="replace")
                raise RigError("crash", "the keeper ended", tuple(log.splitlines()[-10:]))
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                state: dict[str, Any] = json.loads(line)
                for name, member in state["members"].items():
                    if member["ready_after_s"] is not None and name not in told:
                        told.add(name)
                        self.say(f"{name} ready after {member['ready_after_s']:.0f} s")
                if state["phase"] in ("crashed", "stopped"):
                    self.down()
                    raise RigError("crash", state["reason"] or "stopped while starting", tuple(state["tail"]))
                if state["phase"] == "ready":
                    return state
        self.down()
        raise RigError("crash", f"not ready within {limit:.0f} s")

    def check(self, wait: float = 0.0) -> None:
        """Raise when a member was lost meanwhile.

        Args:
            wait: seconds to give the keeper, which may learn of a loss later than the client whose connection broke.

        Raises:
            RigError: kind ``crash``.
        """
        if wait and self.keeper is not None:
            # Its end is what says that something was lost.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.keeper.wait(wait)
        state = self.state()
        if state["phase"] in ("crashed", "lost"):
            raise RigError("crash", state["reason"] or "the keeper is gone", tuple(state["tail"]))

    def log(self, name: str) -> str:
        """The whole log of the member ``name`` so far."""
        return (self.folder / "logs" / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def mark(self) -> None:
        """Remember how far every log is; ``events`` then tells only of what came later."""
        for spec in self.specs:
            path = self.folder / "logs" / f"{spec.name}.log"
            self.marks[spec.name] = path.stat().st_size if path.exists() else 0

    def events(self, name: str) -> list[Event]:
        """The observer's lines of the member ``name`` since the last ``mark``."""
        return parse_events(self.new_log(name))

    def memory(self) -> int:
        """Proportional set size in bytes of all members together."""
        return sum(leash.memory(member["pid"]) for member in self.state()["members"].values())

    def expect(self, name: str) -> None:
        """Announce that the member ``name`` ends: the keeper lets it go without calling it a crash."""
        (self.folder / f"expected-{name}").touch()

    def new_log(self, name: str) -> str:
        """The log of the member ``name`` since the last ``mark``."""
        with (self.folder / "logs" / f"{name}.log").open("rb") as source:
            source.seek(self.marks.get(name, 0))
            return source.read().decode("utf-8", "replace")

    def kill(self, name: str) -> None:
        """Kill the member ``name`` with all its processes; the keeper lets it go without calling it a crash.

        Raises:
            RigError: kind ``scenario``; there is no such member.
        """
        members = self.state()["members"]
        if name not in members:
            raise RigError("scenario", f"no member {name!r} to kill")
        member = members[name]
        if leash.start_time(member["pid"]) != member["start_time"]:
            return
        self.expect(name)
        for pid in [*leash.descendants(member["pid"]), member["pid"]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def down(self) -> None:
        """End everything that this deployment started, and wait until it is gone."""
        if self.keeper is not None:
            if self.keeper.stdin is not None:
                self.keeper.stdin.close()
            self.keeper.terminate()
            try:
                self.keeper.wait(30)
            except subprocess.TimeoutExpired:
                self.keeper.kill()
                self.keeper.wait(10)
            if self.keeper.stdout is not None:
                self.keeper.stdout.close()
        else:
            end(self.folder)
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)


def read_state(folder: Path) -> dict[str, Any]:
    """The state a keeper wrote in ``folder``; phase ``lost`` when the keeper is gone without having said so.

    Raises:
        RigError: kind ``state``; no readable state is there.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
        keeper = state["keeper"]
        alive = leash.start_time(int(keeper["pid"])) == keeper["start_time"]
        if missing := {"phase", "reason", "tail"} - set(state):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        if not all("pid" in member for member in state["members"].values()):
            raise ValueError("a member lacks its process")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RigError("state", f"no deployment in {folder} ({error!r})") from error
    if state["phase"] in ("starting", "ready") and not alive:
        state["phase"] = "lost"
    return state


def end(folder: Path) -> bool:
    """End the deployment of ``folder`` if its keeper still runs; tell whether it did.

    The keeper is known by process id and start time together, so that a process that got the id later is never
    touched. The keeper ends its own children; nothing else is signalled, except members whose keeper was lost, and
    those again only by id and start time.
    """
    state = read_state(folder)
    pid, started = int(state["keeper"]["pid"]), state["keeper"]["start_time"]
    if started is not None and leash.start_time(pid) == started:
        handle = os.pidfd_open(pid)
        try:
            # The id could have been given away between the look and the open; the descriptor cannot.
            if leash.start_time(pid) == started:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                waiter = selectors.DefaultSelector()
                waiter.register(handle, selectors.EVENT_READ)
                if not waiter.select(40):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
        return True
    ended = False
    for member in state["members"].values():
        started = member.get("start_time")
        if started is not None and leash.start_time(member["pid"]) == started:
            for one in [*leash.descendants(member["pid"]), member["pid"]]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            ended = True
    return ended


def wait_for_router(port: int, workers: int, check: Callable[[], None], limit: float = 600.0) -> None:
    """Wait until the router lists ``workers`` healthy workers.

    Raises:
        RigError: kind ``router``; it does not within ``limit`` seconds. Whatever ``check`` raises.
    """
    until = time.monotonic() + limit
    told = "no answer yet"
    while time.monotonic() < until:
        check()
        try:
            listed = get(port, "/workers", 5.0)
            healthy = [worker for worker in listed["workers"] if worker.get("is_healthy")]
            if len(healthy) >= workers:
                return
            told = f"{len(healthy)} of {workers} workers healthy"
        except (OSError, ValueError, KeyError) as error:
            told = str(error)
        # The router tells of its workers only when asked: ask again, never just wait and hope.
        time.sleep(0.2)
    raise RigError("router", f"the router on port {port} is not ready: {told}")


def runs_folder() -> Path:
    """Where deployments have their folders."""
    return cache.root() / "runs"


def new_folder(name: str) -> Path:
    """Make a fresh folder for a run called ``name``."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise RigError("name", f"{name!r} is no name for a run: letters, digits, dot, dash, underscore")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = runs_folder() / f"{name}-{stamp}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder
