"""Streams of which the router reads more than it hands on: P's log-probabilities merged into D's events, and a D that
leaves its connection open behind the closing marker. Stock, and patched under every set of gates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lab.router.harness import Answer, Bench, Seen, chat
from tests.router.router_requests import generate, least, trace

STRICT, LOAD = {"SMG_PD_STRICT_ACK": "1"}, {"SMG_PD_LOAD_AT_DISPATCH": "1"}
HASTY, SMALL = {"SMG_PD_ACK_TIMEOUT_MS": "500"}, {"SMG_PD_ACK_MAX_BYTES": "4096"}
STOCK: tuple[str, dict[str, str]] = ("stock", {})
PATCHED = [("patched", gates) for gates in ({}, LOAD, STRICT, STRICT | LOAD)]
NAMES = ["unset", "load", "strict", "both"]
LENIENT = pytest.mark.parametrize("case", [STOCK, *PATCHED[:2]], ids=["stock", *NAMES[:2]])
STRICTLY = pytest.mark.parametrize("gates", [STRICT, STRICT | LOAD], ids=NAMES[2:])

# Time for D to have the request before P fails, on a busy machine too.
P_FAILS = 0.25
LOGPROBS = generate(True) | {"return_logprob": True, "logprob_start_len": 0}
OF_P = [[-0.5, 1, "p"], [-0.25, 2, "p"]]
OF_D = [[-0.5, 1, "d"], [-0.25, 2, "d"]]
# Requests for a stream with log-probabilities, and what P and D do with them; of the events that D sends, what the
# pinned router makes of their log-probabilities (None: there are none, it hands on D's bytes).
GOOD: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "generate": ("/generate", LOGPROBS, {}, OF_P + OF_D),
    "generate, P late": ("/generate", LOGPROBS, {"p_late": 0.6}, OF_P + OF_D),
    "generate, P later than all of D": ("/generate", LOGPROBS, {"p_late": 0.6, "d_first": 0.0}, OF_P + OF_D),
    "generate, D's headers early": ("/generate", LOGPROBS, {"d_headers_early": True}, OF_P + OF_D),
    "generate, P answers events": ("/generate", LOGPROBS, {"p_mode": "ok"}, OF_D),
    "generate, D ends with an error": ("/generate", LOGPROBS, {"d_mode": "sse_error"}, OF_P + OF_D),
    "generate, a batch": ("/generate", LOGPROBS | {"text": None, "input_ids": [[1, 2], [3]]}, {}, OF_D),
    "generate, none asked for": ("/generate", generate(True), {}, None),
    "chat": ("/v1/chat/completions", chat(True) | {"logprobs": True}, {}, None),
    "chat, P late": ("/v1/chat/completions", chat(True) | {"logprobs": True}, {"p_late": 0.6}, None),
    "completions": ("/v1/completions", {"model": "mock", "prompt": "p", "stream": True, "logprobs": 1}, {}, None),
}


def events(body: str) -> list[Any]:
    """The JSON of a stream's events; it must end with the closing marker."""
    *found, marker, nothing = body.split("\n\n")
    assert (marker, nothing) == ("data: [DONE]", ""), body
    return [json.loads(event.removeprefix("data: ")) for event in found]


def kept(seen: Seen) -> tuple[int, int, int]:
    return seen.count("P.recv"), seen.count("D.recv"), seen.count("D.abort")


class TestJsonOfP:
    """P answers a request for a stream with plain JSON, whose log-probabilities go into each of D's events."""

    @pytest.mark.parametrize(("route", "body", "script", "expected"), GOOD.values(), ids=list(GOOD))
    def test_the_client_has_the_bytes_of_the_stock_build(
        self, bench: Any, route: str, body: dict[str, Any], script: dict[str, Any], expected: Any
    ) -> None:
        traces = []
        for variant, gates in (STOCK, *PATCHED):
            one: Bench = bench(variant, gates)
            one.run(one.script(**{"p_mode": "ok_json", "p_delay": 0.02, "d_first": 0.05, "d_tokens": 3} | script))
            traces.append(trace(one, body, route, 5.0))
        stock, *patched = traces
        assert stock["status"] == 200 and not stock["error"] and stock["loads"] == (0, 0)
        told = [
            event["meta_info"].get("input_token_logprobs") for event in events(stock["body"]) if "meta_info" in event
        ]
        assert told == [expected] * len(told) and bool(told) == (route == "/generate")
        for name, one_trace in zip(NAMES, patched, strict=True):
            assert one_trace == stock, name

    @pytest.mark.parametrize(("variant", "gates"), [STOCK, *PATCHED], ids=["stock", *NAMES])
    def test_nothing_reaches_the_client_before_p_has_answered(
        self, bench: Any, variant: str, gates: dict[str, str]
    ) -> None:
        one: Bench = bench(variant, gates)
        one.run(one.script(p_mode="ok_json", p_late=0.6, d_first=0.0, d_headers_early=True))
        answer = one.run(one.ask(LOGPROBS, "/generate"))
        assert answer.status == 200 and answer.headers_at - answer.began >= 0.6

    @LENIENT
    def test_broken_json_is_not_merged_and_not_told(self, bench: Any, case: tuple[str, dict[str, str]]) -> None:
        one: Bench = bench(*case)
        one.run(one.script(p_mode="ok_broken", p_delay=0.02, d_first=0.05, d_tokens=3))
        found = trace(one, LOGPROBS, "/generate", 5.0)
        assert found["status"] == 200 and not found["error"] and found["loads"] == (0, 0)
        assert [event["meta_info"]["input_token_logprobs"] for event in events(found["body"])] == [OF_D] * 3
        stock: Bench = bench(*STOCK)
        stock.run(stock.script(p_mode="ok_broken", p_delay=0.02, d_first=0.05, d_tokens=3))
        assert trace(stock, LOGPROBS, "/generate", 5.0) == found

    @STRICTLY
    @pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
    def test_broken_json_is_a_failure_of_p_with_the_strict_acknowledgement(
        self, bench: Any, gates: dict[str, str], early: bool
    ) -> None:
        one: Bench = bench("patched", gates)
        one.run(one.script(p_mode="ok_broken", p_delay=P_FAILS, p_late=0.1, d_first=5.0, d_headers_early=early))
        answer = one.run(one.ask(LOGPROBS, "/generate"))
        assert refused(answer, 502) == "prefill_ack_cut"
        seen, loads = one.run(one.settle())
        assert kept(seen) == (1, 1, 1) and (seen.busy, loads) == (0, (0, 0))

    @STRICTLY
    def test_json_beyond_the_deadline_is_a_failure_though_d_streams_already(
        self, bench: Any, gates: dict[str, str]
    ) -> None:
        one: Bench = bench("patched", gates | HASTY)
        one.run(one.script(p_mode="ok_json", p_late=5.0, d_first=0.0, d_tokens=100))
        answer = one.run(one.ask(LOGPROBS, "/generate"))
        assert refused(answer, 504) == "prefill_ack_timeout"
        seen, loads = one.run(one.settle())
        assert kept(seen) == (1, 1, 1) and seen.count("P.abort") == 1 and (seen.busy, loads) == (0, (0, 0))

    @STRICTLY
    def test_json_beyond_what_may_be_kept_is_refused(self, bench: Any, gates: dict[str, str]) -> None:
        one: Bench = bench("patched", gates | SMALL)
        one.run(one.script(p_mode="ok_json", p_delay=P_FAILS, p_late=0.1, p_pad=1 << 20, d_first=5.0))
        answer = one.run(one.ask(LOGPROBS, "/generate"))
        assert refused(answer, 502) == "prefill_ack_too_long"
        seen, loads = one.run(one.settle())
        assert kept(seen) == (1, 1, 1) and (seen.busy, loads) == (0, (0, 0))


def refused(answer: Answer, status: int) -> Any:
    """The code of a refusal that the client could read to its end."""
    assert answer.status == status and not answer.error
    assert int(answer.headers["content-length"]) == len(answer.body)
    return json.loads(answer.body)["error"]["code"]


class TestDStays:
    """The pinned router ends a stream at its closing marker, not at the end of D's connection."""

    @pytest.mark.parametrize(("variant", "gates"), [STOCK, *PATCHED], ids=["stock", *NAMES])
    @pytest.mark.parametrize(
        ("route", "body"), [("/v1/chat/completions", chat(True)), ("/generate", LOGPROBS)], ids=["chat", "logprobs"]
    )
    def test_the_marker_ends_the_client_s_stream_and_d_is_let_go(
        self, bench: Any, variant: str, gates: dict[str, str], route: str, body: dict[str, Any]
    ) -> None:
        script = {"p_mode": "ok_json", "p_delay": 0.02, "d_first": 0.05, "d_tokens": 3, "d_stays": 20.0}
        one: Bench = bench(variant, gates)

        def one_try() -> float:
            one.run(one.script(**script))
            answer = one.run(one.ask(body, route))
            assert answer.status == 200 and not answer.error and answer.body.endswith(b"data: [DONE]\n\n")
            seen, loads = one.run(one.settle())
            (said,), (abort,) = seen.events("D.said"), seen.events("D.abort")
            assert (seen.busy, loads) == (0, (0, 0))
            return float(max(answer.ended, abort["t"]) - said["t"])

        assert least(one_try, 0.5) <= 0.5

    def test_all_that_is_seen_of_it_is_what_is_seen_of_the_stock_build(self, bench: Any) -> None:
        traces = []
        for variant, gates in (STOCK, *PATCHED):
            one: Bench = bench(variant, gates)
            one.run(one.script(p_delay=0.02, d_first=0.05, d_tokens=3, d_stays=20.0))
            traces.append(trace(one, chat(True), "/v1/chat/completions", 5.0))
        assert traces[0]["loads"] == (0, 0) and traces[1:] == traces[:1] * len(PATCHED)


class TestBrokenStream:
    """With the strict acknowledgement alone the stream runs through the pump of the stock build."""

    @pytest.mark.parametrize("mode", ["cut", "sse_error"])
    @STRICTLY
    def test_a_stream_that_breaks_ends_with_an_event_that_says_so(
        self, bench: Any, mode: str, gates: dict[str, str]
    ) -> None:
        one: Bench = bench("patched", gates)
        one.run(one.script(d_mode=mode, d_first=0.1))
        answer = one.run(one.ask(chat(True)))
        # A blank line more stands before the event where D's own last one was ended: no event for a client.
        *_, broken, marker = [event for event in answer.body.decode().split("\n\n") if event]
        assert answer.status == 200 and not answer.error
        assert "error" in json.loads(broken.removeprefix("data: ")) and marker == "data: [DONE]"
        assert one.run(one.settle())[1] == (0, 0)
