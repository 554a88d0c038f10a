"""Scripted prefill (P) and decode (D) servers on 127.0.0.1 that stand where engines would, for tests of the router.

All servers of one process share their clock, their script and their log. D waits for the KV of its bootstrap room,
which P hands over when its script says so. Behaviour is set for all requests by POST /control, or for one request by a
JSON object after ``@@`` at the end of its prompt. Times in the log are seconds of CLOCK_MONOTONIC, which is one clock
for all processes of the machine.

Run: ``python -m lab.router.servers '[{"name": "P", "port": 41011, "role": "prefill"}]' MODEL_FOLDER``
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NoReturn

from aiohttp import web

ROUTES = ("/v1/chat/completions", "/v1/completions", "/generate")
WIRE = ("stream", "stream_options", "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank")
# What differs from run to run: in a body, and among the headers.
OWN_FIELDS = ("bootstrap_room", "bootstrap_port")
OWN_HEADERS = ("host", "content-length", "x-request-id")
# A soak runs for minutes; the last events and rooms are enough.
KEPT = 20000
DONE = b"data: [DONE]\n\n"
EVENTS = "text/event-stream; charset=utf-8"
# Ways in which P hands its KV over: it is well, it answers JSON to a stream too, its answer is no JSON.
HANDS_OVER = ("ok", "ok_json", "ok_broken")
# Ways in which P fails; ``hang`` and ``hang_body`` report nothing, all others do.
FAILURES = (
    "http500",
    "http503",
    "http400",
    "http413",
    "http429",
    "sse_error",
    "sse_late_error",
    "json_error",
    "malformed",
    "empty",
    "truncated",
    "midbody",
    "no_done",
    "reset",
    "ctype",
    "abort",
    "hang",
    "hang_body",
)
# A status, and the start of a body that never ends.
STALLED = "http500_stalled"


@dataclass(frozen=True)
class Script:
    """What the servers do with a request. All times are seconds."""

    p_mode: str = "ok"
    """One of HANDS_OVER or FAILURES, or STALLED."""
    p_delay: float = 0.05
    """P hands over its KV, or fails, this long after the request."""
    p_late: float = 0.0
    """P answers this long after its KV."""
    p_pad: int = 0
    """Bytes of padding in P's good answer."""
    d_mode: str = "ok"
    """ok, http500, http400, reset (all before headers), cut (a reset after the first token, or in a JSON answer),
    cut_inside (a reset within the second event), sse_error (after the first token)."""
    d_first: float = 0.2
    """D's first token comes this long after its KV, D's failure this long after the request."""
    d_tokens: int = 5
    d_gap: float = 0.05
    d_pad: int = 0
    """Bytes of padding in each of D's tokens."""
    d_stays: float = 0.0
    """D leaves its stream open for this long after the closing marker."""
    d_timeout: float = 30.0
    """D gives up its KV after this long and answers 500."""
    d_headers_early: bool = False
    """D sends 200 at once, as /generate does to a stream; else with the first token or the answer, as chat does."""
    d_hold: int = 0
    """D sends no token before this many requests have come to all D servers of its process."""
    d_no_kv: bool = False
    """D needs no P: a regular router is in front."""


@dataclass
class World:
    """The state that all servers of this process share."""

    script: Script = field(default_factory=Script)
    log: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))
    active: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    rooms: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    received: int = 0

    def note(self, what: str, **more: Any) -> None:
        """Log an event with the time it happened."""
        self.log.append({"t": time.monotonic(), "what": what, **more})

    def enter(self, key: str) -> None:
        """Count a request in at ``key``."""
        self.active[key] = self.active.get(key, 0) + 1
        self.peak[key] = max(self.peak.get(key, 0), self.active[key])

    def leave(self, key: str) -> None:
        """Count a request out."""
        self.active[key] -= 1

    def kv(self, room: int) -> asyncio.Future[None]:
        """The future that P completes for ``room``."""
        if room not in self.rooms:
            if len(self.rooms) > KEPT:
                self.rooms.pop(next(iter(self.rooms)))
            self.rooms[room] = asyncio.get_running_loop().create_future()
        return self.rooms[room]


def prompt_of(body: dict[str, Any]) -> str:
    """The text of a request of any route."""
    if messages := body.get("messages"):
        return str(messages[0]["content"])
    value = body.get("prompt", body.get("text")) or ""
    return value[0] if isinstance(value, list) else value


def script_of(script: Script, body: dict[str, Any]) -> Script:
    """The script of one request: the common one with the request's own changes."""
    _, mark, own = prompt_of(body).rpartition("@@")
    return replace(script, **json.loads(own)) if mark else script


def rooms_of(body: dict[str, Any]) -> list[int]:
    """The bootstrap rooms of a request: one, or one for each of a batch."""
    room = body.get("bootstrap_room")
    return room if isinstance(room, list) else [] if room is None else [room]


def item(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def wire_of(request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
    """All that came of a request but what differs from run to run: the path, the headers, a digest of the body."""
    known = {name: value for name, value in body.items() if name not in OWN_FIELDS}
    headers = {name.lower(): value for name, value in request.headers.items() if name.lower() not in OWN_HEADERS}
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return {"path": request.path_qs, "headers": dict(sorted(headers.items())), "body": digest}


def answer(route: str, body: dict[str, Any], text: str, streamed: bool, reason: str | None) -> Any:
    """One answer (or stream item) in the shape of ``route``, with logprobs when they were asked for."""
    if route == "/generate":
        finish = {"type": reason} if reason else None
        meta: dict[str, Any] = {"id": "x", "finish_reason": finish, "prompt_tokens": 3, "completion_tokens": 1}
        if body.get("return_logprob"):
            leg = "p" if text == "p" else "d"
            meta["input_token_logprobs"] = [[-0.5, 1, leg], [-0.25, 2, leg]]
        one = {"text": text, "output_ids": [7], "meta_info": meta}
        batch = body.get("input_ids")
        return [one] * len(batch) if batch and isinstance(batch[0], list) and not streamed else one
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if route == "/v1/completions":
        choice["text"] = text
    else:
        choice["delta" if streamed else "message"] = {"role": "assistant", "content": text}
    return {"id": "x", "object": "chat.completion", "choices": [choice], "usage": {"prompt_tokens": 3}}


async def begin(request: web.Request, kind: str, status: int = 200) -> web.StreamResponse:
    """Begin an answer of the content type ``kind``, in chunks."""
    response = web.StreamResponse(status=status, headers={"Content-Type": kind})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


def cut(request: web.Request) -> None:
    """Reset the request's connection."""
    if request.transport is not None:
        request.transport.abort()


async def prefill(request: web.Request) -> web.StreamResponse:
    """P's leg: do what the script says."""
    world: World = request.app[WORLD]
    body = await request.json()
    script, rooms = script_of(world.script, body), rooms_of(body)
    key = f"{request.app[NAME]}@{rank_of(body)}"
    world.enter(key)
    where = [body.get("bootstrap_host"), body.get("bootstrap_port")]
    seen = {name: body.get(name) for name in WIRE}
    world.note("P.recv", key=key, rooms=rooms, where=where, seen=seen, wire=wire_of(request, body))
    try:
        await asyncio.sleep(script.p_delay)
        if script.p_mode in HANDS_OVER:
            for room in rooms:
                if not world.kv(room).done():
                    world.kv(room).set_result(None)
        if script.p_late:
            await asyncio.sleep(script.p_late)
        if script.p_mode not in ("ok", "ok_json", "hang", "hang_body"):
            # A client cannot know of the failure before now; the test measures from here.
            world.note("P.report", key=key, rooms=rooms)
        return await prefill_answer(request, body, script)
    except (asyncio.CancelledError, ConnectionError):
        world.note("P.abort", key=key, rooms=rooms)
        raise
    finally:
        world.leave(key)


async def prefill_answer(request: web.Request, body: dict[str, Any], script: Script) -> web.StreamResponse:
    """Answer as P in one of the modes."""
    route, mode = request.path, script.p_mode
    streaming = bool(body.get("stream")) and mode != "ok_json"
    good = answer(route, body, "p", streaming, "length")
    if script.p_pad:
        good["pad"] = "x" * script.p_pad
    error = {"error": {"message": "KVTransferError", "code": 500}}
    if mode == STALLED:
        response = await begin(request, "application/json", 500)
        await response.write(b'{"error"')
        await asyncio.sleep(3600)
    if mode.startswith("http"):
        return web.json_response({"error": {"message": f"P says {mode[4:]}"}}, status=int(mode[4:]))
    if mode == "reset":
        cut(request)
        return web.Response()
    if mode == "hang":
        await asyncio.sleep(3600)
    if mode == "ctype":
        return web.Response(body=b"<html>proxy</html>", content_type="text/html")
    if mode == "json_error":
        return web.json_response(error)
    if mode in ("malformed", "ok_broken"):
        return web.Response(body=b'{"id":"x","choices":[', content_type="application/json")
    if mode == "empty":
        return web.Response(body=b"", content_type="text/event-stream" if streaming else "application/json")
    if mode in ("truncated", "hang_body"):
        length = {"Content-Length": "500"} if mode == "truncated" else {}
        response = web.StreamResponse(headers={"Content-Type": "application/json"} | length)
        await response.prepare(request)
        await response.write(b'{"id":"x"')
        if mode == "hang_body":
            await asyncio.sleep(3600)
        if request.transport is not None:
            request.transport.close()
        return response
    if not streaming:
        if mode in ("sse_error", "sse_late_error"):
            return web.json_response(error)
        if mode in ("midbody", "no_done"):
            response = await begin(request, "application/json")
            await response.write(json.dumps(good).encode()[:-9])
            if mode == "midbody":
                await asyncio.sleep(0.02)
                cut(request)
            await response.write_eof()
            return response
        return web.json_response(answer(route, body, "p", False, "abort") if mode == "abort" else good)
    response = await begin(request, EVENTS)
    if mode == "abort":
        good = answer(route, body, "p", True, "abort")
    if mode != "sse_error":
        await response.write(item(good))
    if mode in ("sse_error", "sse_late_error"):
        await response.write(item(error))
    if mode == "midbody":
        await asyncio.sleep(0.02)
        cut(request)
        return response
    if mode != "no_done":
        await response.write(DONE)
    await response.write_eof()
    return response


def rank_of(body: dict[str, Any]) -> Any:
    """The data-parallel rank that a request is pinned to, under either of its names."""
    return body.get("routed_dp_rank", body.get("data_parallel_rank"))


async def decode(request: web.Request) -> web.StreamResponse:
    """D's leg: wait for the KV of the rooms, then stream or answer; note when the router lets go."""
    world: World = request.app[WORLD]
    body = await request.json()
    script, rooms = script_of(world.script, body), rooms_of(body)
    key = f"{request.app[NAME]}@{rank_of(body)}"
    world.enter(key)
    world.received += 1
    rank, wire = body.get("disagg_prefill_dp_rank"), wire_of(request, body)
    world.note("D.recv", key=key, rooms=rooms, stream=body.get("stream"), prefill_rank=rank, wire=wire)
    try:
        response = await decode_answer(request, world, body, script, key, rooms)
        world.note("D.done", key=key, rooms=rooms)
        return response
    except (asyncio.CancelledError, ConnectionError):
        world.note("D.abort", key=key, rooms=rooms)
        raise
    finally:
        world.leave(key)


async def fail(request: web.Request, world: World, key: str, rooms: list[int]) -> NoReturn:
    """Reset D's connection in the middle of its answer."""
    world.note("D.report", key=key, rooms=rooms)
    cut(request)
    raise ConnectionResetError


async def decode_answer(
    request: web.Request, world: World, body: dict[str, Any], script: Script, key: str, rooms: list[int]
) -> web.StreamResponse:
    """Answer as D."""
    streaming, route = bool(body.get("stream")), request.path
    kind = EVENTS if streaming else "application/json"
    response = await begin(request, kind) if script.d_headers_early else None
    if script.d_mode in ("http500", "http400", "reset") and response is None:
        await asyncio.sleep(script.d_first)
        world.note("D.report", key=key, rooms=rooms)
        if script.d_mode == "reset":
            cut(request)
            return web.Response()
        return web.json_response({"error": {"message": f"D says {script.d_mode[4:]}"}}, status=int(script.d_mode[4:]))
    if not script.d_no_kv:
        try:
            # Not wait_for: in Python 3.11 it swallows an abort that comes together with the KV.
            async with asyncio.timeout(script.d_timeout):
                await asyncio.gather(*(asyncio.shield(world.kv(room)) for room in rooms))
        except TimeoutError:
            world.note("D.kv_timeout", key=key, rooms=rooms)
            if response is None:
                return web.json_response({"error": {"message": "KV timeout"}}, status=500)
            error = {"error": {"message": "KV timeout"}}
            await response.write(item(error) + DONE if streaming else json.dumps(error).encode())
            return response
    while world.received < script.d_hold:
        await asyncio.sleep(0.02)
    await asyncio.sleep(script.d_first)
    if not streaming:
        await asyncio.sleep(script.d_tokens * script.d_gap)
        whole = answer(route, body, "hi", False, "stop")
        if response is None and script.d_mode != "cut":
            return web.json_response(whole)
        response = response or await begin(request, kind)
        if script.d_mode == "cut":
            await response.write(json.dumps(whole).encode()[:-9])
            await fail(request, world, key, rooms)
        await response.write(json.dumps(whole).encode())
        await response.write_eof()
        return response
    if response is None:
        response = await begin(request, kind)
    for index in range(script.d_tokens):
        event = item(answer(route, body, str(index) + "x" * script.d_pad, True, None))
        if index and script.d_mode == "cut_inside":
            await response.write(event[: len(event) // 2])
            await asyncio.sleep(script.d_gap)
            await fail(request, world, key, rooms)
        await response.write(event)
        await asyncio.sleep(script.d_gap)
        if script.d_mode == "cut":
            await fail(request, world, key, rooms)
        if script.d_mode == "sse_error":
            await response.write(item({"error": {"message": "D failed later"}}))
            break
    await response.write(DONE)
    if script.d_stays:
        world.note("D.said", key=key, rooms=rooms)
        await asyncio.sleep(script.d_stays)
    await response.write_eof()
    return response


async def control(request: web.Request) -> web.Response:
    """GET reads the counters and the log; POST sets the whole script and starts counters and log afresh."""
    world: World = request.app[WORLD]
    if request.method == "POST":
        wanted = await request.json()
        known = {one.name for one in fields(Script)}
        if unknown := set(wanted) - known:
            return web.json_response({"unknown": sorted(unknown)}, status=400)
        world.script = Script(**wanted)
        world.log.clear()
        world.received = 0
        world.peak = {key: value for key, value in world.active.items() if value}
        world.rooms = {room: kv for room, kv in world.rooms.items() if not kv.done()}
    return web.json_response(
        {"script": asdict(world.script), "log": list(world.log), "active": world.active, "peak": world.peak}
    )


WORLD = web.AppKey("world", World)
NAME = web.AppKey("name", str)


async def serve(world: World, model: str, name: str, port: int, role: str, dp: int = 1) -> None:
    """Start one server: ``role`` is prefill, decode or null (one that needs no P), ``dp`` its data-parallel size."""

    async def server_info(request: web.Request) -> web.Response:
        known = {"model_path": model, "served_model_name": "mock", "tp_size": 1, "dp_size": dp, "version": "mock"}
        return web.json_response(known | {"disaggregation_mode": role, "max_running_requests": 64})

    async def model_info(request: web.Request) -> web.Response:
        return web.json_response({"model_path": model, "is_generation": True, "model_type": "mock"})

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def fan_out(request: web.Request) -> web.Response:
        world.note("fan-out", key=name, path=request.path)
        return web.json_response([{"dp_rank": 0, "num_tokens": 5}])

    app = web.Application(client_max_size=1 << 26)
    app[WORLD], app[NAME] = world, name
    for path in ("/health", "/health_generate"):
        app.router.add_get(path, health)
    for path in ("/server_info", "/get_server_info"):
        app.router.add_get(path, server_info)
    for path in ("/model_info", "/get_model_info"):
        app.router.add_get(path, model_info)
    app.router.add_get("/get_load", fan_out)
    app.router.add_post("/flush_cache", fan_out)
    app.router.add_get("/control", control)
    app.router.add_post("/control", control)
    for path in ROUTES:
        app.router.add_post(path, prefill if role == "prefill" else decode)
    # Without handler_cancellation a handler runs on after its client has gone, and no abort is ever seen.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()


async def main(servers: list[dict[str, Any]], model: str) -> None:
    """Serve until killed."""
    world = World()
    for server in servers:
        await serve(world, model, **server)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2]))
