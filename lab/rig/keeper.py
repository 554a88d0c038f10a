"""The one process that owns a deployment: it starts the members, follows their logs, and ends them all.

It runs as ``python -m lab.rig.keeper RUN`` in the folder ``RUN`` of one deployment, which holds ``spec.json``. Each
change of state is one line of JSON on standard output and the new content of ``RUN/state.json``. With ``--tied`` it
ends with its parent: the parent holds its standard input open, and the kernel tells of the parent's death besides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lab.rig import leash
from lab.rig.member import Spec, Watch

STATE = "state.json"
SPEC = "spec.json"


@dataclass
class _Running:
    spec: Spec
    process: subprocess.Popen[bytes]
    watch: Watch
    log: IO[bytes]
    began: float
    pidfd: int
    start_time: int | None
    seconds: float | None = None
    rest: bytes = b""


@dataclass
class Keeper:
    """Runs the members of one deployment until told to stop or until one of them is lost."""

    folder: Path
    specs: list[Spec]
    limit: float
    tied: bool
    running: dict[str, _Running] = field(default_factory=dict)
    phase: str = "starting"
    reason: str = ""
    tail: list[str] = field(default_factory=list)
    stopping: bool = False

    def run(self) -> int:
        """Serve until the end; 0 after an ordered stop, 1 after a crash."""
        leash.adopt_orphans()
        self.selector = selectors.DefaultSelector()
        self._catch_signals()
        if self.tied:
            self.selector.register(sys.stdin.buffer, selectors.EVENT_READ, self._parent_spoke)
        began = time.monotonic()
        try:
            self._start_due()
            self._tell()
            while not self.stopping:
                wait = None
                if self.phase == "starting":
                    wait = max(0.0, began + self.limit - time.monotonic())
                events = self.selector.select(wait)
                for key, _ in events:
                    action: Callable[[], None] = key.data
                    action()
                if self.phase == "starting" and time.monotonic() - began > self.limit:
                    late = [name for name, member in self.running.items() if member.seconds is None]
                    self._crash(late[0] if late else "", f"not ready within {self.limit:.0f} s")
        finally:
            left = leash.kill_descendants()
            if self.phase != "crashed":
                self.phase = "stopped"
            if left:
                self.reason += f" processes that would not end: {left}"
            self._tell()
        return 1 if self.phase == "crashed" else 0

    def _catch_signals(self) -> None:
        receive, send = os.pipe()
        os.set_blocking(send, False)
        os.set_blocking(receive, False)
        signal.set_wakeup_fd(send, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        # The handler only sets a flag; the byte in the pipe is what wakes the selector.
        self.selector.register(receive, selectors.EVENT_READ, lambda: self._drain(receive))

    def _drain(self, pipe: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(pipe, 4096)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _parent_spoke(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            self.stopping = True

    def _start_due(self) -> None:
        ready = {name for name, member in self.running.items() if member.seconds is not None}
        for spec in self.specs:
            if spec.name not in self.running and ready.issuperset(spec.after):
                self._start(spec)

    def _start(self, spec: Spec) -> None:
        own = os.getpid()
        # The log handle lives as long as the member.
        log = (self.folder / "logs" / f"{spec.name}.log").open("wb", buffering=0)
        process = subprocess.Popen(
            spec.argv,
            env=dict(spec.env),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: leash.die_with_parent(own),
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        pidfd = os.pidfd_open(process.pid)
        member = _Running(spec, process, Watch(spec.ready), log, time.monotonic(), pidfd, leash.start_time(process.pid))
        self.running[spec.name] = member
        self.selector.register(process.stdout, selectors.EVENT_READ, lambda: self._read(member))
        self.selector.register(pidfd, selectors.EVENT_READ, lambda: self._ended(member))

    def _read(self, member: _Running) -> None:
        assert member.process.stdout is not None
        try:
            data = os.read(member.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(member.process.stdout)
            return
        member.log.write(data)
        *lines, member.rest = (member.rest + data).split(b"\n")
        for line in lines:
            member.watch.line(line.decode("utf-8", "replace"))
        if member.watch.fatal and not self.stopping and not self._expected(member):
            self._crash(member.spec.name, member.watch.fatal)
        elif member.seconds is None and member.watch.is_ready:
            member.seconds = time.monotonic() - member.began
            self._start_due()
            if all(spec.name in self.running and self.running[spec.name].seconds is not None for spec in self.specs):
                self.phase = "ready"
            self._tell()

    def _ended(self, member: _Running) -> None:
        self.selector.unregister(member.pidfd)
        os.close(member.pidfd)
        self._read_rest(member)
        code = member.process.wait()
        if self._expected(member):
            return
        if not self.stopping:
            self._crash(member.spec.name, member.watch.fatal or f"ended with exit status {code}")

    def _expected(self, member: _Running) -> bool:
        """Whether a scenario announced that it kills this member."""
        return (self.folder / f"expected-{member.spec.name}").exists()

    def _read_rest(self, member: _Running) -> None:
        assert member.process.stdout is not None
        with contextlib.suppress(BlockingIOError, ValueError):
            while data := os.read(member.process.stdout.fileno(), 1 << 16):
                member.log.write(data)
                *lines, member.rest = (member.rest + data).split(b"\n")
                for line in lines:
                    member.watch.line(line.decode("utf-8", "replace"))

    def _crash(self, name: str, reason: str) -> None:
        if self.phase == "crashed":
            return
        if name in self.running:
            self._read_rest(self.running[name])
            self.tail = list(self.running[name].watch.tail)
        self.phase = "crashed"
        self.reason = f"{name}: {reason}" if name else reason
        self.stopping = True

    def _state(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "reason": self.reason,
            "tail": self.tail,
            "tied": self.tied,
            "keeper": {"pid": os.getpid(), "start_time": leash.start_time(os.getpid())},
            "members": {
                name: {
                    "pid": member.process.pid,
                    "start_time": member.start_time,
                    "role": member.spec.role,
                    "port": member.spec.port,
                    "tree": member.spec.tree,
                    "ready_after_s": None if member.seconds is None else round(member.seconds, 1),
                }
                for name, member in self.running.items()
            },
        }

    def _tell(self) -> None:
        state = self._state()
        text = json.dumps(state)
        fresh = self.folder / (STATE + ".new")
        fresh.write_text(text + "\n", encoding="utf-8")
        fresh.rename(self.folder / STATE)
        # Whoever started a detached deployment stops listening once it is ready.
        with contextlib.suppress(BrokenPipeError, ValueError):
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def main() -> int:
    """Entry point of the keeper process."""
    parser = argparse.ArgumentParser(description="owns the processes of one deployment")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tied", action="store_true", help="end with the parent")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds within which every member must be ready")
    parser.add_argument("--parent", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.tied:
        leash.die_with_parent(arguments.parent, signal.SIGTERM)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    specs = [Spec.from_json(entry) for entry in json.loads((arguments.folder / SPEC).read_text(encoding="utf-8"))]
    (arguments.folder / "logs").mkdir(exist_ok=True)
    code = Keeper(arguments.folder, specs, arguments.limit, arguments.tied).run()
    # Standard output may be a pipe that nobody reads any more; an exit through the interpreter would complain.
    os._exit(code)


if __name__ == "__main__":
    main()
