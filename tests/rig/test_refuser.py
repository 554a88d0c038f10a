"""The refuser: questions reach the engine, requests do not."""

from __future__ import annotations

import http.server
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.rig import client
from lab.rig.ports import HOST
from lab.rig.refuser import Refuser


class Engine(http.server.BaseHTTPRequestHandler):
    posts = 0

    def do_GET(self) -> None:
        body = json.dumps({"path": self.path}).encode()
        self.send_response(200 if self.path != "/none" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        Engine.posts += 1

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(server: http.server.HTTPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def port() -> Iterator[int]:
    Engine.posts = 0
    with serving(http.server.ThreadingHTTPServer((HOST, 0), Engine)) as engine:
        with serving(Refuser(0, engine, 503, 0.2)) as port:
            yield port


def test_a_question_is_the_engines(port: int) -> None:
    assert client.get(port, "/server_info?x=1") == {"path": "/server_info?x=1"}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        client.get(port, "/none")


def test_a_request_is_refused_after_a_while_and_never_reaches_the_engine(port: int) -> None:
    began = time.monotonic()
    with pytest.raises(OSError, match=r"status 503: .*the rig refuses"):
        client.post(port, "/generate", {"input_ids": [1]}, 10.0)
    assert time.monotonic() - began >= 0.2 and Engine.posts == 0


def test_an_engine_that_is_gone_is_a_bad_gateway() -> None:
    with serving(http.server.ThreadingHTTPServer((HOST, 0), Engine)) as engine:
        pass
    with serving(Refuser(0, engine, 500, 0.0)) as port:
        with pytest.raises(urllib.error.HTTPError, match="502"):
            client.get(port, "/health")
