"""A small server that answers as an engine or a router does; started as ``python fake_engine.py PORT NAME``."""

from __future__ import annotations

import array
import fcntl
import gzip
import json
import os
import stat
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lab.rig.engine import LISTENS, READY

NAME = sys.argv[2]
# Twelve steps begin in it, so it holds eleven whole ones: 10 us of the top-k and 90 us of another kernel each.
TRACE = {
    "traceEvents": [
        {"cat": "kernel", "name": name, "dur": dur, "ts": 100.0 * step + at}
        for step in range(12)
        for name, dur, at in (("topk", 10.0, 0.0), ("mm", 90.0, 10.0))
    ]
}
PROFILED = threading.Event()
ASKED: list[list[int]] = []


def say(line: str) -> None:
    """Write one line of the log, and wait until the keeper has taken it.

    A test that asks for the log right after an answer found it without the line, on a busy machine: a real engine takes
    longer for its answer than the keeper for a line.
    """
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    unread = array.array("i", [1])
    while stat.S_ISFIFO(os.fstat(1).st_mode) and unread[0]:
        time.sleep(0.001)
        fcntl.ioctl(1, termios.FIONREAD, unread)


def one(prompt: list[int], new: int) -> dict[str, Any]:
    """The answer to one prompt."""
    ASKED.append(prompt)
    ids = [(sum(prompt) + place) % 97 + ("wrong" in NAME) for place in range(new)]
    if "forgetful" in NAME and ASKED.count(prompt) > 1:
        ids[-1] += 1
    meta: dict[str, Any] = {"output_token_logprobs": [[-0.5, one, None] for one in ids]}
    if "speculative" in NAME or "seed" in NAME:
        meta["spec_verify_ct"] = 2 if "stock poisoned" in NAME else 1
    return {"output_ids": ids, "meta_info": meta}


def generate(body: dict[str, Any]) -> Any:
    """The answer to one request, or to several in one body."""
    prompts, settings = body["input_ids"], body["sampling_params"]
    if isinstance(settings, dict):
        return one(prompts, settings["max_new_tokens"])
    if "wide" in NAME:
        PROFILED.clear()
        for _ in range(10):
            say(
                f"Decode batch, #running-req: {len(prompts)}, cuda graph: True, gen throughput (token/s): 500.00, #q: 0"
            )
        PROFILED.wait(20)
    return [one(prompt, each["max_new_tokens"]) for prompt, each in zip(prompts, settings, strict=True)]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        answer: Any = {}
        if self.path.startswith("/flush_cache"):
            if "watched" in NAME:
                say("rig: selections rows=9 wrong=2 unlike_again=1")
            if "poisoned" in NAME:
                say(f"rig: seeds loops=5 poisoned={5 if 'stock' in NAME else 0}")
        elif self.path == "/start_profile":
            (Path(body["output_dir"]) / "trace.json.gz").write_bytes(gzip.compress(json.dumps(TRACE).encode()))
            PROFILED.set()
        elif self.path == "/v1/chat/completions":
            answer = {"choices": [{"message": {"content": "" if "silent" in NAME else "words"}}]}
        elif "failing" in NAME:
            self.send_error(500)
            return
        else:
            answer = generate(body)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"workers": 2 * [{"is_healthy": True}]}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    if "dying" in NAME:
        sys.exit("no room in here")
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        say(READY)
        say(LISTENS)
        server.serve_forever()
