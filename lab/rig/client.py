"""Requests to a deployment: greedy, with the log-probabilities of every token, straight to a pair or by the router."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from lab.rig.ports import HOST

# How the error of a stream that ended with one begins.
BROUGHT = "the stream brought an error"
# No proxy, whatever the environment says: everything is on this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Route:
    """Where a request goes: to ``port``, and to the prefill engine beside it when it is a pair without a router."""

    port: int
    prefill_port: int = 0
    bootstrap: int = 0


@dataclass(frozen=True)
class Request:
    """One greedy request.

    Attributes:
        prompt: token ids.
        new: tokens to generate.
        tag: its name in tables.
        rid: the name under which the engines know it; they make one up when it is empty.
        leave: the client closes the connection after so many tokens; 0 stays to the end.
    """

    prompt: tuple[int, ...]
    new: int
    tag: str = ""
    rid: str = ""
    leave: int = 0


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        ids: generated token ids.
        logprobs: natural log-probability of each, as the engine reports it.
        cached: prompt tokens that D (or the lone engine) found in its radix cache.
        prefill_cached: the same on P; -1 when the prefill engine's own answer is not seen.
        retractions: how often the request was retracted.
        verify_steps: steps of speculative verification.
        error: empty, or what went wrong.
        rid: the name under which the engines know it.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    cached: int = 0
    prefill_cached: int = -1
    retractions: int = 0
    verify_steps: int = 0
    seconds: float = 0.0
    error: str = ""
    tag: str = ""
    rid: str = ""

    @property
    def accept_length(self) -> float:
        """Tokens a verification step; 0 without speculation."""
        return (len(self.ids) - 1) / self.verify_steps if self.verify_steps else 0.0

    def as_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)


def prompts(seed: int, count: int, length: int, vary: int = 0, prefix: int = 0) -> list[tuple[int, ...]]:
    """Seeded prompts of printable bytes.

    Args:
        length: tokens of the first prompt; each next one is ``vary`` longer.
        prefix: leading tokens that all of them share.
    """
    shared = random.Random(seed)
    head = [shared.randrange(33, 120) for _ in range(prefix)]
    made = []
    for index in range(count):
        own = random.Random(seed * 1000 + index + 1)
        made.append((*head, *(own.randrange(33, 120) for _ in range(length + vary * index - prefix))))
    return made


@contextmanager
def _opened(port: int, path: str, body: Mapping[str, Any], timeout: float) -> Iterator[Any]:
    """The answer to a POST of ``body`` as JSON; every way in which it can break is an OSError."""
    request = urllib.request.Request(
        f"http://{HOST}:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with _OPENER.open(request, timeout=timeout) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")[:400]
        raise OSError(f"status {error.code}: {text}") from error
    except http.client.HTTPException as error:
        raise OSError(f"the answer broke off: {error!r}") from error


def post(port: int, path: str, body: Mapping[str, Any], timeout: float) -> Any:
    """Send ``body`` as JSON and return the answer's JSON.

    Raises:
        OSError: no answer in ``timeout`` seconds, or a status that is not 200 (with the answer's text).
    """
    return json.loads(post_text(port, path, body, timeout))


def post_text(port: int, path: str, body: Mapping[str, Any], timeout: float) -> bytes:
    """``post`` for an answer that is no JSON."""
    with _opened(port, path, body, timeout) as answer:
        text: bytes = answer.read()
        return text


def stream(
    port: int, path: str, body: Mapping[str, Any], timeout: float, heard: Callable[[int], None], leave: int = 0
) -> Any:
    """Send ``body``, read the answer as it comes, and return its last state as JSON.

    Args:
        heard: is told the number of tokens so far, each time that some came.
        leave: close the connection after so many tokens.

    Raises:
        OSError: as ``post``; or the stream brought an error, or ended before its closing line.
    """
    last: Any = None
    with _opened(port, path, {**body, "stream": True}, timeout) as answer:
        for line in answer:
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return last
            if not data:
                continue
            part = json.loads(data)
            if "error" in part:
                raise OSError(f"{BROUGHT}: {str(part['error'])[:400]}")
            last = part
            heard(len(last["output_ids"]))
            if leave and len(last["output_ids"]) >= leave:
                return last
    raise OSError("the stream ended before its closing line")


def flush(port: int, limit: float = 240.0) -> None:
    """Empty the radix cache of the engine on ``port``.

    The engine refuses while a request is still being cleared away, so it is asked to wait for that itself.

    Raises:
        OSError: it refuses for longer than ``limit`` seconds.
    """
    request = urllib.request.Request(f"http://{HOST}:{port}/flush_cache?timeout={limit:.0f}", b"", method="POST")
    with _OPENER.open(request, timeout=limit + 10):
        pass


def get(port: int, path: str, timeout: float = 10.0) -> Any:
    """Return the JSON answer of a GET."""
    with _OPENER.open(f"http://{HOST}:{port}{path}", timeout=timeout) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def _body(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {
        "input_ids": list(request.prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": request.new, "ignore_eos": True},
        "return_logprob": True,
    }
    if request.rid:
        body["rid"] = request.rid
    return body


class _Prefill(threading.Thread):
    """Asks the prefill engine of a pair for its part of a request, beside the decode engine; sets ``sent`` after it."""

    def __init__(self, port: int, body: Mapping[str, Any], timeout: float, sent: threading.Event) -> None:
        super().__init__(daemon=True)
        self.port, self.body, self.timeout, self.sent = port, body, timeout, sent
        self.answer: dict[str, Any] = {}
        self.error = ""
        self.start()

    def run(self) -> None:
        try:
            self.answer = post(self.port, "/generate", self.body, self.timeout)
        except (OSError, ValueError) as error:
            self.error = str(error)
        finally:
            self.sent.set()


def send(
    route: Route,
    request: Request,
    timeout: float = 120.0,
    heard: Callable[[int], None] | None = None,
    sent: threading.Event | None = None,
) -> Answer:
    """Send one request and wait for its whole answer; an error is part of the answer, not an exception.

    Args:
        heard: is told the number of tokens so far; the answer is then read as a stream.
        sent: is set once the prefill engine has answered, or the whole request has.
    """
    body = _body(request)
    began = time.monotonic()
    sent = sent or threading.Event()
    prefill: _Prefill | None = None
    if route.prefill_port:
        body["bootstrap_host"] = HOST
        body["bootstrap_port"] = route.bootstrap
        body["bootstrap_room"] = random.SystemRandom().randrange(1, 2**40)
        prefill = _Prefill(route.prefill_port, body, timeout, sent)
    try:
        if heard is not None or request.leave:
            answer = stream(route.port, "/generate", body, timeout, heard or (lambda count: None), request.leave)
        else:
            answer = post(route.port, "/generate", body, timeout)
    except (OSError, ValueError) as error:
        if prefill is not None:
            prefill.join(1.0)  # a prefill that failed too says so at once; one that hangs is not waited for
        told = str(error) + (f"; prefill: {prefill.error}" if prefill is not None and prefill.error else "")
        return Answer(error=told, seconds=time.monotonic() - began, tag=request.tag, rid=request.rid)
    finally:
        sent.set()
    seconds = time.monotonic() - began
    if prefill is not None and not request.leave:
        prefill.join(timeout)
    meta = answer["meta_info"]
    found = prefill.answer.get("meta_info") if prefill is not None else None
    return Answer(
        ids=tuple(answer["output_ids"]),
        logprobs=tuple(entry[0] for entry in meta.get("output_token_logprobs") or ()),
        cached=int(meta.get("cached_tokens") or 0),
        prefill_cached=-1 if found is None else int(found.get("cached_tokens") or 0),
        retractions=int(meta.get("num_retractions") or 0),
        verify_steps=int(meta.get("spec_verify_ct") or 0),
        seconds=seconds,
        tag=request.tag,
        rid=str(meta.get("id") or request.rid),
    )


def send_all(
    route: Route,
    requests: Sequence[Request],
    together: bool,
    timeout: float = 120.0,
    heard: Callable[[int], None] | None = None,
    in_line: bool = False,
) -> list[Answer]:
    """Send ``requests`` one after another, or all of them ``together``; answers in the order of the requests.

    Args:
        in_line: with ``together``, the next one is sent when the prefill engine has answered the one before, so that
            it always works on one alone.
    """
    if not together:
        return [send(route, request, timeout, heard) for request in requests]
    answers: list[Answer] = [Answer(error="not sent")] * len(requests)

    def one(index: int, sent: threading.Event) -> None:
        answers[index] = send(route, requests[index], timeout, heard, sent)

    threads = []
    for index in range(len(requests)):
        sent = threading.Event()
        threads.append(threading.Thread(target=one, args=(index, sent)))
        threads[-1].start()
        if in_line:
            sent.wait(timeout)
    for thread in threads:
        thread.join()
    return answers


def send_batch(port: int, requests: Sequence[Request], timeout: float, logprobs: bool = True) -> list[Answer]:
    """Send ``requests`` in one body: the engine's scheduler takes them up at once, in their order.

    Raises:
        OSError: as ``post``.
        ValueError: another number of answers.
    """
    body = {
        "input_ids": [list(request.prompt) for request in requests],
        "sampling_params": [
            {"temperature": 0, "max_new_tokens": request.new, "ignore_eos": True} for request in requests
        ],
        "return_logprob": logprobs,
    }
    began = time.monotonic()
    found = []
    for request, answer in zip(requests, post(port, "/generate", body, timeout), strict=True):
        meta = answer["meta_info"]
        found.append(
            Answer(
                ids=tuple(answer["output_ids"]),
                logprobs=tuple(entry[0] for entry in meta.get("output_token_logprobs") or ()),
                cached=int(meta.get("cached_tokens") or 0),
                verify_steps=int(meta.get("spec_verify_ct") or 0),
                seconds=time.monotonic() - began,
                tag=request.tag,
            )
        )
    return found


@dataclass(frozen=True)
class Difference:
    """How the answers of two runs of the same requests differ."""

    requests: int
    same_texts: int
    first_token: dict[str, int] = field(default_factory=dict)
    logprob: float = 0.0
    errors: int = 0

    @property
    def equal(self) -> bool:
        """Whether every text is the same and no request failed."""
        return self.same_texts == self.requests and self.errors == 0

    @property
    def bitwise(self) -> bool:
        """Whether texts and log-probabilities are the same to the last bit."""
        return self.equal and self.logprob == 0.0


def compare(left: Sequence[Answer], right: Sequence[Answer]) -> Difference:
    """Compare two runs request by request.

    ``first_token`` tells for each request whose text differs the index of the first differing token; ``logprob`` is
    the largest absolute difference over the tokens before it.

    Raises:
        ValueError: the runs have different numbers of requests, or none.
    """
    if len(left) != len(right) or not left:
        raise ValueError(f"cannot compare {len(left)} answers with {len(right)}")
    same = errors = 0
    first: dict[str, int] = {}
    worst = 0.0
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        if one.error or other.error:
            errors += 1
            continue
        agree = 0
        while agree < min(len(one.ids), len(other.ids)) and one.ids[agree] == other.ids[agree]:
            agree += 1
        if one.ids == other.ids:
            same += 1
        else:
            first[one.tag or str(index)] = agree
        pairs = list(zip(one.logprobs, other.logprobs, strict=False))[:agree]
        if one.ids == other.ids and len(one.logprobs) != len(other.logprobs):
            worst = float("inf")
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
    return Difference(len(left), same, first, worst, errors)
