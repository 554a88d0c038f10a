"""Requests, traces and starts that the end-to-end tests of the router share."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from lab.router.build import Result
from lab.router.harness import Answer, Bench, chat, free_ports
from lab.router.servers import FAILURES

PD = ("--pd-disaggregation", "--prefill", "http://127.0.0.1:1", "8998", "--decode", "http://127.0.0.1:1")


def generate(stream: bool, text: str = "shared prefix " * 50, **script: Any) -> dict[str, Any]:
    """A /generate request."""
    own = "@@" + json.dumps(script) if script else ""
    return {"text": text + own, "stream": stream, "sampling_params": {"max_new_tokens": 5}}


def least(one_try: Callable[[], float], limit: float, tries: int = 3) -> float:
    """The least of the delays of some tries, which end with the first within ``limit``.

    A promise in seconds is one about the router. What that adds is in each try; what a busy machine adds is not.
    """
    delays = [one_try()]
    while min(delays) > limit and len(delays) < tries:
        delays.append(one_try())
    return min(delays)


async def burst(bench: Bench, stream: bool, size: int = 32) -> tuple[list[int], list[Answer]]:
    """Requests of one shared prefix that arrive at the same time; how D's servers saw them spread."""
    bodies = [chat(stream, "shared prefix " * 100 + str(index)) for index in range(size)]
    answers = await asyncio.gather(*(bench.ask(body) for body in bodies))
    return (await bench.seen()).spread(), list(answers)


def trace(one: Bench, body: dict[str, Any], route: str, seconds: float) -> dict[str, Any]:
    """All that can be seen of one request from outside, without what differs by nature (times, rooms, ports)."""
    answer = one.run(one.ask(body, route, seconds))
    seen, loads = one.run(one.settle(2.0))
    headers = {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}
    events = [
        (event["what"], event["key"][0], event.get("seen"), event.get("wire"), event.get("stream"))
        for event in seen.log
    ]
    text = re.sub(r"127\.0\.0\.1:\d+", "HOST", answer.body.decode())
    return {"status": answer.status, "headers": headers, "body": text, "error": answer.error, "loads": loads} | {
        "events": sorted(events, key=repr)
    }


GOOD: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (f"{name}-{'stream' if stream else 'json'}", route, {**body, "stream": stream}, {})
    for stream in (True, False)
    for name, route, body in [
        ("chat", "/v1/chat/completions", chat(True)),
        ("completions", "/v1/completions", {"model": "mock", "prompt": "p", "max_tokens": 3}),
        ("generate", "/generate", {"text": "p", "sampling_params": {"max_new_tokens": 3}}),
        ("logprobs", "/generate", {"text": "p", "return_logprob": True, "logprob_start_len": 0}),
        ("batch", "/generate", {"input_ids": [[1, 2], [3]]}),
    ]
]
FAULTY = [
    (
        f"{mode}-{'stream' if stream else 'json'}",
        "/v1/chat/completions",
        chat(stream),
        {"p_mode": mode, "d_timeout": 0.2},
    )
    for stream in (True, False)
    for mode in FAILURES
    if not mode.startswith("hang")
]


def start(built: Result, environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    """Start a router that must refuse to; it is given 20 seconds to do so."""
    port, metrics = free_ports(2)
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), *flags]
    path = {"PYTHONPATH": str(built.folder), "PATH": "/usr/bin:/bin", "NO_PROXY": "127.0.0.1"}
    return subprocess.run(command, env=path | environment, capture_output=True, text=True, timeout=20)
