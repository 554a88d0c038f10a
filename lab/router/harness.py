"""Start scripted servers and a built router on free loopback ports, wait until every worker is healthy, ask, and stop.

Everything binds to and talks to 127.0.0.1. A stock router is never started with --dp-aware in PD mode: it would take
``http://127.0.0.1:port@rank`` for a URL with a user name and send to 0.0.0.rank.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from lab.router.build import REPOSITORY, Result
from lab.router.servers import Script

EVEN = ("--balance-abs-threshold", "0", "--balance-rel-threshold", "1.0")
ONE_SHOT = ("--disable-retries", "--disable-circuit-breaker")
T = TypeVar("T")


class StartError(Exception):
    """A process did not come up; the text holds the tail of its log."""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago, all different."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


@dataclass
class Answer:
    """What a client got. Times are seconds of CLOCK_MONOTONIC; ``status`` is 0 when the connection gave an error."""

    began: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    headers_at: float = 0.0
    ended: float = 0.0
    body: bytes = b""
    error: str = ""

    @property
    def seconds(self) -> float:
        """From the request to the end of the answer."""
        return self.ended - self.began


@dataclass
class Seen:
    """What the scripted servers saw since the script was last set."""

    log: list[dict[str, Any]]
    active: dict[str, int]
    peak: dict[str, int]

    def events(self, what: str) -> list[dict[str, Any]]:
        """The events of one kind, in order."""
        return [event for event in self.log if event["what"] == what]

    def count(self, what: str) -> int:
        """How many events of one kind there were."""
        return len(self.events(what))

    def spread(self, what: str = "D.recv") -> list[int]:
        """Events of one kind by server and rank, largest first."""
        keys = [event["key"] for event in self.events(what)]
        return sorted((keys.count(key) for key in set(keys)), reverse=True)

    @property
    def busy(self) -> int:
        """Requests that are still with a server."""
        return sum(self.active.values())


class Bench:
    """A router between scripted servers.

    ``decodes`` D servers, each of ``dp`` ranks when ``dp_aware``; ``prefills`` P servers of ``prefill_dp`` ranks.
    ``regular``: no PD, D servers that need no P. ``apart``: each D server is a process of its own, which P's KV cannot
    reach (script ``d_no_kv``). ``environment`` is added to the router's. ``servers``: the command line of other servers
    than the scripted ones, from a model folder and ports; they have no script. Use as a context manager.
    """

    def __init__(
        self,
        built: Result,
        *,
        flags: Sequence[str] = ONE_SHOT,
        environment: Mapping[str, str] | None = None,
        decodes: int = 4,
        prefills: int = 1,
        dp: int = 1,
        prefill_dp: int = 1,
        dp_aware: bool = False,
        regular: bool = False,
        apart: bool = False,
        policy: str = "cache_aware",
        servers: Callable[[Path, Sequence[int]], list[str]] | None = None,
    ) -> None:
        if dp_aware and not regular and "dp-aware-pd-dispatch" not in built.receipt["patches"]:
            raise ValueError("a PD router without dp-aware-pd-dispatch must not run --dp-aware: it leaves 127.0.0.1")
        self.built, self.flags, self.environment = built, tuple(flags), dict(environment or {})
        self.decodes, self.prefills, self.dp, self.dp_aware, self.regular = decodes, prefills, dp, dp_aware, regular
        self.policy, self.prefill_dp, self.apart, self.servers = policy, prefill_dp, apart, servers
        self.processes: list[subprocess.Popen[bytes]] = []
        self.runner = asyncio.Runner()

    def __enter__(self) -> Bench:
        self.folder = tempfile.TemporaryDirectory()
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        # A model path that is no folder makes the router look the name up on a public hub.
        model = Path(self.folder.name) / "model"
        model.mkdir()
        router, metrics, *ports = free_ports(2 + self.prefills + self.decodes)
        self.router, self.metrics_url = f"http://127.0.0.1:{router}", f"http://127.0.0.1:{metrics}/metrics"
        self.prefill_ports, self.decode_ports = ports[: self.prefills], ports[self.prefills :]
        role = "null" if self.regular else "decode"
        servers: list[dict[str, Any]] = []
        for index, port in enumerate(self.prefill_ports):
            servers.append({"name": f"P{index}", "port": port, "role": "prefill", "dp": self.prefill_dp})
        for index, port in enumerate(self.decode_ports):
            servers.append({"name": f"D{index}", "port": port, "role": role, "dp": self.dp})
        split = self.prefills if self.apart else len(servers)
        groups = [servers[:split], *([server] for server in servers[split:])]
        self.controls, self.server_processes = [f"http://127.0.0.1:{group[0]['port']}/control" for group in groups], []
        for index, group in enumerate(groups):
            command = [sys.executable, "-m", "lab.router.servers", json.dumps(group), str(model)]
            if self.servers:
                command = self.servers(model, [server["port"] for server in group])
            self._run(f"servers{index}", command, {"PYTHONPATH": str(REPOSITORY)})
            self.server_processes.append(self.processes[-1])
        for index, url in enumerate(self.controls):
            self.wait(functools.partial(self._answers, url), 60, f"servers{index}")
        self.expected = self.decodes * (self.dp if self.dp_aware else 1)
        if not self.regular:
            self.expected += self.prefills * (self.prefill_dp if self.dp_aware else 1)
        self._run("router", self.command(router, metrics), {"PYTHONPATH": str(self.built.folder)} | self.environment)
        self.router_process = self.processes[-1]
        self.wait(self._ready, 90, "router")

    def command(self, router: int, metrics: int) -> list[str]:
        """The command line of the router."""
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(router)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--policy", self.policy]
        urls = [f"http://127.0.0.1:{port}" for port in self.decode_ports]
        if self.regular:
            command += ["--worker-urls", *urls]
        else:
            command.append("--pd-disaggregation")
            for port in self.prefill_ports:
                command += ["--prefill", f"http://127.0.0.1:{port}", "8998"]
            for url in urls:
                command += ["--decode", url]
        return [*command, *(["--dp-aware"] if self.dp_aware else []), *self.flags]

    def _run(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("SMG_")}
        clean |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", **environment}
        with open(self.log_file(name), "wb") as output:
            self.processes.append(
                subprocess.Popen(command, env=clean, stdout=output, stderr=subprocess.STDOUT, process_group=0)
            )

    def _stop(self) -> None:
        if session := getattr(self, "session", None):
            self.run(session.close())
        self.runner.close()
        for process in reversed(self.processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.folder.cleanup()

    def log_file(self, name: str) -> Path:
        """Where the output of ``router`` or ``servers`` goes."""
        return Path(self.folder.name) / f"{name}.log"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this bench's loop."""
        return self.runner.run(work)

    @property
    def client(self) -> aiohttp.ClientSession:
        """The client's session, without a limit on connections."""
        if not hasattr(self, "session"):
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        return self.session

    def wait(self, condition: Callable[[], Awaitable[bool]], seconds: float, name: str) -> None:
        """Wait until ``condition`` holds.

        Raises:
            StartError: it did not within ``seconds``, or a process ended.
        """

        async def poll() -> bool:
            limit = time.monotonic() + seconds
            while time.monotonic() < limit and all(one.poll() is None for one in self.processes):
                try:
                    if await condition():
                        return True
                except (TimeoutError, aiohttp.ClientError):
                    pass
                await asyncio.sleep(0.1)
            return False

        if not self.run(poll()):
            raise StartError(f"{name} did not come up:\n{self.log_file(name).read_text(errors='replace')[-3000:]}")

    async def _answers(self, url: str) -> bool:
        async with self.client.get(url) as response:
            return response.status == 200

    async def _ready(self) -> bool:
        workers = await self.workers()
        return len(workers) == self.expected and all(worker.get("is_healthy", True) for worker in workers)

    async def workers(self) -> list[dict[str, Any]]:
        """The router's own view of its workers."""
        async with self.client.get(self.router + "/workers", timeout=aiohttp.ClientTimeout(total=5)) as response:
            found: list[dict[str, Any]] = (await response.json())["workers"]
            return found

    async def loads(self) -> tuple[int, int]:
        """Load of all P and of all D workers, as the router counts it."""
        prefill = decode = 0
        for worker in await self.workers():
            if int(worker["url"].rpartition(":")[2].partition("@")[0]) in self.prefill_ports:
                prefill += worker["load"]
            else:
                decode += worker["load"]
        return prefill, decode

    async def metric(self, name: str, *labels: str) -> float:
        """Sum of one metric over the lines that hold all of the ``labels``."""
        async with self.client.get(self.metrics_url) as response:
            lines = (await response.text()).splitlines()
        found = [
            line for line in lines if line.startswith((name + "{", name + " ")) and all(one in line for one in labels)
        ]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    async def script(self, **changes: Any) -> None:
        """Set the script of the servers and start their log afresh."""
        for url in self.controls:
            async with self.client.post(url, json=asdict(Script(**changes))) as response:
                assert response.status == 200, await response.text()

    async def seen(self) -> Seen:
        """What the servers saw."""
        found = Seen([], {}, {})
        for url in self.controls:
            try:
                async with self.client.get(url) as response:
                    state = await response.json()
            except aiohttp.ClientConnectionError:
                continue  # a server that a test has killed
            found.log += state["log"]
            found.active |= state["active"]
            found.peak |= state["peak"]
        found.log.sort(key=lambda event: float(event["t"]))
        return found

    async def settle(self, seconds: float = 3.0) -> tuple[Seen, tuple[int, int]]:
        """Wait until no server is busy and the router counts nothing, at most ``seconds``; return both as they are."""
        limit = time.monotonic() + seconds
        while True:
            seen, loads = await self.seen(), await self.loads()
            if (seen.busy == 0 and loads == (0, 0)) or time.monotonic() > limit:
                return seen, loads
            await asyncio.sleep(0.02)

    async def ask(
        self,
        body: Mapping[str, Any],
        route: str = "/v1/chat/completions",
        seconds: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Ask the router and read to the end; a client that is still waiting after ``seconds`` leaves."""
        got = Answer(time.monotonic())
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self.client.post(self.router + route, json=body, timeout=limit, headers=headers) as response:
                got.status, got.headers_at = response.status, time.monotonic()
                got.headers = {name.lower(): value for name, value in response.headers.items()}
                async for part in response.content.iter_any():
                    got.body += part
        except (TimeoutError, aiohttp.ClientError) as error:
            got.error = type(error).__name__
        got.ended = time.monotonic()
        return got


def chat(stream: bool, text: str = "shared prefix " * 50, **script: Any) -> dict[str, Any]:
    """A chat request; ``script`` changes what the servers do with this one."""
    own = "@@" + json.dumps(script) if script else ""
    message = {"role": "user", "content": text + own}
    return {"model": "mock", "messages": [message], "stream": stream, "max_tokens": 5}
