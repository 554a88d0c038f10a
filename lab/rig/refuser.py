"""Stands in front of a prefill engine, passes questions on to it, and refuses every request after a while.

What a prefill engine that fails looks like to the router and to the decode engine: healthy, registered, reachable at
its bootstrap port, and an HTTP error for each request, which has reached the decode engine by then.

Run: ``python -m lab.rig.refuser PORT ENGINE_PORT STATUS SECONDS``
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lab.rig.ports import HOST

READY = "rig: refuser is ready"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Handler(BaseHTTPRequestHandler):
    """One connection; ``server`` is the :class:`Refuser`."""

    protocol_version = "HTTP/1.1"
    server: Refuser

    def do_GET(self) -> None:
        """Pass a question on: health, models, server information."""
        try:
            with _OPENER.open(f"http://{HOST}:{self.server.engine}{self.path}", timeout=60) as answer:
                self._answer(answer.status, answer.read(), answer.headers.get_content_type())
        except urllib.error.HTTPError as error:
            self._answer(error.code, error.read(), error.headers.get_content_type())
        except OSError as error:
            self._answer(502, str(error).encode(), "text/plain")

    def do_POST(self) -> None:
        """Take a request, and refuse it once the decode engine has had the time to accept it."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(self.server.seconds)
        sys.stderr.write(f"rig: refused path={self.path} status={self.server.status}\n")
        body = {"error": {"message": "the rig refuses", "code": self.server.status}}
        self._answer(self.server.status, json.dumps(body).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Every look at its health is not worth a line."""


class Refuser(ThreadingHTTPServer):
    """Serves on ``port`` in front of the engine on port ``engine``; answers ``status`` after ``seconds``."""

    daemon_threads = True

    def __init__(self, port: int, engine: int, status: int, seconds: float) -> None:
        super().__init__((HOST, port), Handler)
        self.engine, self.status, self.seconds = engine, status, seconds


def main(words: list[str]) -> None:
    """Serve until killed."""
    port, engine, status = (int(word) for word in words[:3])
    server = Refuser(port, engine, status, float(words[3]))
    print(READY, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
