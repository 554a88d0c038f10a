"""A small server that answers as an engine does; started as ``python fake_engine.py PORT NAME``."""

from __future__ import annotations

import gzip
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lab.rig.engine import LISTENS, READY

NAME = sys.argv[2]
TRACE = {"traceEvents": [{"cat": "kernel", "name": "topk", "dur": 10.0}, {"cat": "kernel", "name": "mm", "dur": 90.0}]}


def say(line: str) -> None:
    """Write one line of the log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        answer: dict[str, Any] = {}
        if self.path.startswith("/flush_cache"):
            if "watched" in NAME:
                say("rig: selections rows=9 wrong=2 unlike_again=1")
        elif self.path == "/start_profile":
            (Path(body["output_dir"]) / "trace.json.gz").write_bytes(gzip.compress(json.dumps(TRACE).encode()))
        else:
            prompt, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
            ids = [(sum(prompt) + place) % 97 + ("wrong" in NAME) for place in range(new)]
            answer = {"output_ids": ids, "meta_info": {"output_token_logprobs": [[-0.5, one, None] for one in ids]}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        say(READY)
        say(LISTENS)
        server.serve_forever()
