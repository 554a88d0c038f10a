"""Requests to a deployment: greedy, with the log-probabilities of every token, straight to a pair or by the router."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lab.rig.ports import HOST

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
    """

    prompt: tuple[int, ...]
    new: int
    tag: str = ""


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


def post(port: int, path: str, body: Mapping[str, Any], timeout: float) -> Any:
    """Send ``body`` as JSON and return the answer's JSON.

    Raises:
        OSError: no answer in ``timeout`` seconds, or a status that is not 200 (with the answer's text).
    """
    request = urllib.request.Request(
        f"http://{HOST}:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with _OPENER.open(request, timeout=timeout) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")[:400]
        raise OSError(f"status {error.code}: {text}") from error


def flush(port: int, limit: float = 60.0) -> None:
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
    return {
        "input_ids": list(request.prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": request.new, "ignore_eos": True},
        "return_logprob": True,
    }


def send(route: Route, request: Request, timeout: float = 120.0, room: int | None = None) -> Answer:
    """Send one request and wait for its whole answer; an error is part of the answer, not an exception."""
    body = _body(request)
    began = time.monotonic()
    prefill: dict[str, Any] = {}
    helper: threading.Thread | None = None
    if route.prefill_port:
        body["bootstrap_host"] = HOST
        body["bootstrap_port"] = route.bootstrap
        body["bootstrap_room"] = random.SystemRandom().randrange(1, 2**40) if room is None else room

        def ask_prefill() -> None:
            try:
                prefill["answer"] = post(route.prefill_port, "/generate", body, timeout)
            except OSError as error:
                prefill["error"] = str(error)

        helper = threading.Thread(target=ask_prefill, daemon=True)
        helper.start()
    try:
        answer = post(route.port, "/generate", body, timeout)
    except OSError as error:
        if helper is not None:
            helper.join(1.0)  # a prefill that failed too says so at once; one that hangs is not waited for
        told = str(error) + ("; prefill: " + prefill["error"] if "error" in prefill else "")
        return Answer(error=told, seconds=time.monotonic() - began, tag=request.tag)
    if helper is not None:
        helper.join(timeout)
    meta = answer["meta_info"]
    return Answer(
        ids=tuple(answer["output_ids"]),
        logprobs=tuple(entry[0] for entry in meta.get("output_token_logprobs") or ()),
        cached=int(meta.get("cached_tokens") or 0),
        prefill_cached=int(prefill["answer"]["meta_info"].get("cached_tokens") or 0) if "answer" in prefill else -1,
        retractions=int(meta.get("num_retractions") or 0),
        verify_steps=int(meta.get("spec_verify_ct") or 0),
        seconds=time.monotonic() - began,
        tag=request.tag,
    )


def send_all(route: Route, requests: Sequence[Request], together: bool, timeout: float = 120.0) -> list[Answer]:
    """Send ``requests`` one after another, or all of them ``together``; answers in the order of the requests."""
    if not together:
        return [send(route, request, timeout) for request in requests]
    answers: list[Answer] = [Answer(error="not sent")] * len(requests)

    def one(index: int) -> None:
        answers[index] = send(route, requests[index], timeout)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


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
