"""Steps of a scenario on a deployment of small servers instead of engines: kills, drains, leaving clients, turns."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lab.rig import boot, client, deployment, runner, trees
from lab.rig.errors import RigError
from lab.rig.measure import MEASURES
from lab.rig.scenario import Drain, Refusal, Send
from lab.rig.tree import Tree


class Server(ThreadingHTTPServer):
    """Answers as an engine does; ``order`` is what reached it, ``end`` breaks its streams off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.order: list[str] = []
        self.end = threading.Event()
        self.idle = True
        self.bad = ""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path.startswith("/flush_cache"):
            self.send_response(200 if self.server.idle else 400)
            self.end_headers()
            return
        self.server.order.append(body.get("rid", ""))
        self.send_response(200)
        self.end_headers()
        if body.get("stream"):
            self._stream(body["sampling_params"]["max_new_tokens"])
        else:
            self.wfile.write(json.dumps(self._state(1)).encode())

    def _state(self, tokens: int) -> dict[str, Any]:
        return {"output_ids": list(range(tokens)), "meta_info": {"output_token_logprobs": [[-0.5, 1, None]] * tokens}}

    def _stream(self, tokens: int) -> None:
        for count in range(1, tokens + 1):
            if self.server.end.is_set():
                return
            text = self.server.bad or json.dumps(self._state(count))
            try:
                self.wfile.write(f"data: {text}\n\n".encode())
            except OSError:
                return
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Deployment(deployment.Deployment):
    """Remembers who was killed and with which lines the logs are."""

    killed: list[str]
    said: dict[str, list[deployment.Event]]
    server: Server

    def check(self, wait: float = 0.0) -> None:
        pass

    def kill(self, name: str) -> None:
        self.killed.append(name)
        self.server.end.set()

    def mark(self) -> None:
        pass

    def events(self, name: str) -> list[deployment.Event]:
        return self.said.get(name, [])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield one
        one.end.set()
        one.shutdown()
        thread.join()


@pytest.fixture
def running(server: Server, tmp_path: Path) -> runner.Running:
    which = boot.parse("b", 'model = "mla"\n[engine.P]\nrole = "prefill"\n[engine.D]\nrole = "decode"\n')
    trees_of = {(role, "stock"): Tree(role, tmp_path, "x") for role in ("prefill", "decode")}
    made = {
        part.name: runner.make_engine(part, trees_of, {"prefill": tmp_path, "decode": tmp_path}, server.server_port, 1)
        for part in which.parts
    }
    one = Deployment(tmp_path, [])
    one.killed, one.said, one.server = [], {}, server
    return runner.Running(which, one, made, {})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path / "cache"))


def killed(running: runner.Running) -> list[str]:
    one = running.deployment
    assert isinstance(one, Deployment)
    return one.killed


def test_a_member_is_killed_once_at_the_named_token(running: runner.Running) -> None:
    result = runner.do_send(running, Send("s", ("D",), count=2, new=100000, together=True, kill="D", at=3))
    assert killed(running) == ["D"]
    assert all("ended before its closing line" in answer.error for answer in result.answers)


def test_a_member_is_killed_once_it_says_so(running: runner.Running) -> None:
    one = running.deployment
    assert isinstance(one, Deployment)
    one.said["P"] = [deployment.Event("held", {})]
    # The stream has no end of its own worth waiting for: only the kill ends it.
    runner.do_send(running, Send("s", ("D",), count=1, new=10**8, kill="P", at="held", leave=10**8))
    assert killed(running) == ["P"]


@pytest.mark.parametrize(
    ("log", "ends"),
    [
        ("Scheduler hit an exception: \nValueError: no room\n", True),
        ("Scheduler hit an exception: \nValueError: another\n", False),
        ("handled: ValueError: no room\n", False),
    ],
)
def test_a_member_that_is_to_end_by_itself_does_so_with_the_named_words(
    running: runner.Running, tmp_path: Path, log: str, ends: bool
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "P.log").write_text(log)
    new = 10**8 if ends else 2
    send = Send("s", ("D",), count=1, new=new, kill="P", says="ValueError: no room", leave=new)
    if not ends:
        with pytest.raises(RigError, match="P was not killed"):
            runner.do_send(running, send)
    else:
        runner.do_send(running, send)
    assert killed(running) == ["P"] * ends
    # Said before the request is sent: the keeper must not take the end for a crash.
    assert (tmp_path / "expected-P").exists()


def test_a_kill_that_never_came_is_an_error_and_not_a_pass(running: runner.Running) -> None:
    with pytest.raises(RigError, match="D was not killed"):
        runner.do_send(running, Send("s", ("D",), count=1, new=2, kill="D", at=50))
    with pytest.raises(RigError, match="P was not killed"):
        runner.do_send(running, Send("t", ("D",), count=1, new=2, kill="P", at="never"))
    assert killed(running) == []


def started(monkeypatch: pytest.MonkeyPatch, running: runner.Running, error: RigError | None) -> list[Any]:
    asked: list[Any] = []

    def start(which: boot.Boot, trees: runner.Trees, **more: Any) -> runner.Running:
        asked.append(more["only"])
        if error:
            raise error
        return running

    monkeypatch.setattr(runner, "start", start)
    return asked


def test_an_engine_that_must_not_start_is_started_alone_and_says_why(
    running: runner.Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = started(monkeypatch, running, RigError("crash", "P: lost", ("ValueError: G needs H", "the end")))
    result = runner.do_refusal(running.boot, Refusal("no", "P", "G needs H"), {})
    assert result.refused == "P: lost" and asked == [{"P"}]
    assert MEASURES["refused"].of({"no": result}, ["no"]) == 1


@pytest.mark.parametrize(
    "error", [RigError("crash", "P: lost", ("ValueError: another",)), RigError("memory", "G needs H", ("G needs H",))]
)
def test_an_engine_that_ends_of_something_else_was_not_refused(
    running: runner.Running, monkeypatch: pytest.MonkeyPatch, error: RigError
) -> None:
    started(monkeypatch, running, error)
    with pytest.raises(RigError, match=str(error)):
        runner.do_refusal(running.boot, Refusal("no", "P", "G needs H"), {})


def test_an_engine_that_starts_was_not_refused_and_is_ended(
    running: runner.Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, running, None)
    ended: list[bool] = []
    monkeypatch.setattr(running.deployment, "down", lambda: ended.append(True))
    result = runner.do_refusal(running.boot, Refusal("no", "P", "G needs H"), {})
    assert MEASURES["refused"].of({"no": result}, ["no"]) == 0 and ended == [True]


def test_a_client_that_leaves_keeps_what_it_has(running: runner.Running) -> None:
    (answer,) = runner.do_send(running, Send("s", ("D",), count=1, new=100000, leave=4)).answers
    assert answer.ids == (0, 1, 2, 3) and not answer.error


def test_a_stream_with_an_error_in_it_is_an_error(running: runner.Running, server: Server) -> None:
    server.bad = '{"error": {"message": "gone"}}'
    (answer,) = runner.do_send(running, Send("s", ("D",), count=1, new=4, leave=4)).answers
    assert "gone" in answer.error


def test_a_stream_that_is_no_json_is_an_error(running: runner.Running, server: Server) -> None:
    server.bad = "<html>"
    (answer,) = runner.do_send(running, Send("s", ("D",), count=1, new=4, leave=4)).answers
    assert answer.error


def test_gathered_requests_carry_their_place_and_reach_prefill_in_their_order(
    running: runner.Running, server: Server
) -> None:
    result = runner.do_send(running, Send("calm", ("P", "D"), count=3, gathered=True))
    assert all(not answer.error for answer in result.answers)
    places = [name.rpartition(".")[2] for name in server.order]
    assert sorted(set(places)) == ["00of03", "01of03", "02of03"]
    # Each goes to P and to D; nothing of a later one comes before P has the one before it.
    assert places.index("01of03") > places.index("00of03") and places.index("02of03") > places.index("01of03")


def test_two_gathered_sends_of_one_name_are_two_groups(running: runner.Running, server: Server) -> None:
    for _ in range(2):
        runner.do_send(running, Send("calm", ("P", "D"), count=1, gathered=True))
    assert len({name.rpartition(".")[0] for name in server.order}) == 2


def test_a_drain_waits_for_what_the_engines_printed(running: runner.Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def events(name: str) -> list[deployment.Event]:
        asked.append(name)
        return [deployment.Event("pools", {"tokens": "0", "requests": "0"})] * (len(asked) > 4)

    monkeypatch.setattr(running.deployment, "events", events)
    result = runner.do_drain(running, Drain("end", ("P", "D")))
    assert MEASURES["held"].of({"end": result}, ["end"]) == 0 and len(asked) > 4


def test_a_drain_that_an_engine_refuses_says_who(
    running: runner.Running, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "KEEPER_LAG", 0.2)
    assert runner.do_drain(running, Drain("end", ("P", "D"))).refused == ""
    server.idle = False
    assert runner.do_drain(running, Drain("end", ("P", "D"), 1.0)).refused.startswith("P is not idle after 1 s")


def test_own_trees_are_turned_and_must_stand_where_the_turn_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, bool]] = []
    levels = iter(["last", "base", "base"])
    monkeypatch.setattr(trees, "apply", lambda role, root, revert: done.append((role, revert)))
    monkeypatch.setattr(trees, "recognise", lambda one, allow_drift: next(levels))
    own = {("decode", "own"): Tree("decode", tmp_path, "x"), ("decode", "stock"): Tree("decode", tmp_path, "x")}
    runner.turn_trees(own, "apply", lambda text: None)
    runner.turn_trees(own, "revert", lambda text: None)
    assert done == [("decode", False), ("decode", True)]
    with pytest.raises(RigError, match="stands at base after apply"):
        runner.turn_trees(own, "apply", lambda text: None)


def test_an_own_tree_is_a_copy_that_is_gone_afterwards(tmp_path: Path) -> None:
    stock = tmp_path / "stock"
    (stock / "sglang/srt").mkdir(parents=True)
    (stock / "sglang/srt/server_args.py").touch()
    (stock / "sglang/_version.py").write_text("__version__ = version = '0.5.17'\n")
    which = boot.parse("b", 'model = "mla"\n[engine.D]\nrole = "decode"\ntree = "own"\n')
    with runner.own_trees(which, {("decode", "stock"): Tree("decode", stock, "0.5.17")}, lambda text: None) as found:
        root = found["decode", "own"].root
        assert root != stock and (root / "sglang/srt/server_args.py").is_file()
    assert not root.exists() and stock.exists()


def test_a_stream_tells_how_far_it_is(server: Server) -> None:
    heard: list[int] = []
    body = {"sampling_params": {"max_new_tokens": 3}}
    last = client.stream(server.server_port, "/generate", body, 10.0, heard.append)
    assert heard == [1, 2, 3] and len(last["output_ids"]) == 3


class Pair(BaseHTTPRequestHandler):
    """Both engines of a pair: P counts how many it works on at once, D answers none before all three are there."""

    all_there = threading.Barrier(3)
    lock = threading.Lock()
    working, most = 0, 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/p/generate":
            with self.lock:
                Pair.working += 1
                Pair.most = max(Pair.most, Pair.working)
            threading.Event().wait(0.1)
            with self.lock:
                Pair.working -= 1
        else:
            self.all_there.wait(20)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"output_ids": [1], "meta_info": {}}')

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_in_line_prefill_works_on_one_alone_while_decode_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = client.post
    with ThreadingHTTPServer(("127.0.0.1", 0), Pair) as both:

        def post(port: int, path: str, body: Any, timeout: float) -> Any:
            return stock(both.server_port, "/p" + path if port == 1 else path, body, timeout)

        monkeypatch.setattr(client, "post", post)
        thread = threading.Thread(target=both.serve_forever)
        thread.start()
        requests = [client.Request((1,), 1, str(index)) for index in range(3)]
        answers = client.send_all(client.Route(2, 1, 1), requests, together=True, timeout=30, in_line=True)
        both.shutdown()
        thread.join()
    assert [answer.ids for answer in answers] == [(1,)] * 3
    assert Pair.most == 1
