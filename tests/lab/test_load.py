"""The load generator: what it sends, how strictly it reads, and that nothing planted escapes it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import acceptance_plot
from lab.load import workers
from lab.load.accounting import Clock, Sent, Window, account, baab, growth, outstanding, paired, quantile
from lab.load.queues import allowed
from lab.load.run import Endpoint, Log, Loop, Unusable, digest
from lab.load.stream import Answer, Failure, Reader
from lab.load.strict import Strict
from lab.load.verdict import arrivals_end, judge, reported
from lab.load.workload import Arrivals, Prompt, Workload, requests, times

ROOT = Path(__file__).parents[2]


# What is sent.


def test_the_default_is_the_deployments_acceptance() -> None:
    workload = Workload()
    assert workload.prefix + workload.suffix == 81_920
    assert (workload.new, workload.rate, workload.prefixes) == (600, 3.40, 4)


def test_requests_share_whole_prefixes_in_turn_and_nothing_else() -> None:
    made = list(requests(Workload(rate=10, seconds=1, prefix=30, suffix=20, new=1, prefixes=3)))
    heads = {one.prefix: tuple(one.prompt[:30]) for one in made}
    assert len(made) == 10 and len(set(heads.values())) == 3
    assert all(tuple(one.prompt[:30]) == heads[one.prefix] and len(one.prompt) == 50 for one in made)
    assert len({tuple(one.prompt[30:]) for one in made}) == 10
    assert [one.prefix for one in made[:4]] == [0, 1, 2, 0]


def test_the_same_seed_sends_the_same_and_another_does_not() -> None:
    workload = Workload(rate=10, seconds=2, prefix=3, suffix=3, new=1, arrivals=Arrivals.POISSON, prompt=Prompt.TEXT)
    first, second, other = (list(requests(replace(workload, seed=seed))) for seed in (17, 17, 18))
    assert first == second != other


def test_prompts_are_made_one_at_a_time() -> None:
    """Six megabytes of pointers if they were all there at once."""
    tracemalloc.start()
    try:
        count = sum(1 for _ in requests(Workload(rate=40, seconds=10, prefix=1000, suffix=1000)))
        assert count == 400 and tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_fixed_arrivals_are_even_and_poisson_ones_are_not() -> None:
    fixed = times(Workload(rate=4, seconds=100))
    poisson = times(Workload(rate=4, seconds=100, arrivals=Arrivals.POISSON))
    assert len(fixed) == 400 and fixed[:3] == [0, 0.25, 0.5]
    assert 320 < len(poisson) < 480 and poisson == sorted(poisson)
    assert len({round(b - a, 6) for a, b in itertools.pairwise(poisson)}) > 100


def test_a_smaller_workload_has_the_same_shape() -> None:
    small = Workload().smaller(256)
    assert (small.prefix, small.suffix, small.new) == (288, 32, 2)
    assert small.rate == 3.40


@pytest.mark.parametrize(
    "bad",
    [
        {"rate": 0},
        {"seconds": 0},
        {"suffix": 0},
        {"prefix": -1},
        {"prefixes": 0},
        {"vocabulary": 1000},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"seconds": float("nan")},
    ],
)
def test_a_load_that_is_none_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"no load|at least one|no ids"):
        Workload(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="factor"):
        Workload().smaller(0)


# How an answer is read.


def chunk(text: str, count: int | None, finish: str | None = None, **more: Any) -> str:
    usage = {} if count is None else {"usage": {"prompt_tokens": 7, "completion_tokens": count}}
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **usage, **more})


GOOD = [
    chunk("a", 1),
    chunk("a", 2),
    chunk("ß", 3, "length"),
    json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}),
    "[DONE]",
]


def stream(events: list[str], end: str = "\n") -> bytes:
    return "".join(f"data: {event}{end}{end}" for event in events).encode()


def answer(events: list[str], expected: int | None = 3) -> Answer:
    reader = Reader(expected)
    reader.feed(stream(events))
    return reader.end()


def test_a_whole_answer_holds() -> None:
    good = answer(GOOD)
    assert (good.failure, good.text, good.tokens, good.prompt_tokens, good.finish) == (None, "aaß", 3, 7, "length")
    assert good.counted and good.chunks == 3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=80), st.sampled_from(["\n", "\r\n"]))
def test_where_the_bytes_are_cut_does_not_matter(cuts: list[int], end: str) -> None:
    data = b": comment\n" + stream(GOOD, end)
    reader, at, texts = Reader(3), 0, 0
    for cut in cuts:
        texts += reader.feed(data[at : at + cut])
        at += cut
    texts += reader.feed(data[at:])
    assert reader.end() == answer(GOOD)
    assert texts == 3


def test_a_chat_answer_is_read_too() -> None:
    events = [
        json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        json.dumps({"choices": [{"delta": {"content": "a"}}]}),
        json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
        "[DONE]",
    ]
    read = answer(events)
    assert (read.failure, read.text, read.finish, read.counted) == (None, "a", "stop", False)


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        (GOOD[:-1], Failure.LOST_MARKER),
        ([], Failure.LOST_MARKER),
        ([GOOD[0], GOOD[1], chunk("b", 3), *GOOD[3:]], Failure.NO_FINISH),
        ([GOOD[0], GOOD[0], *GOOD[1:]], Failure.DUPLICATE),
        ([GOOD[1], GOOD[0], *GOOD[2:]], Failure.REORDERED),
        ([*GOOD[:2], chunk("b", 2, "length"), *GOOD[3:]], Failure.LOST_CHUNK),
        ([*GOOD[:2], chunk("b", 2, "length"), chunk("", 2), GOOD[4]], Failure.LOST_CHUNK),
        ([GOOD[0], json.dumps({"error": {"message": "no"}}), "[DONE]"], Failure.ERROR),
        ([GOOD[0], "{", *GOOD[1:]], Failure.MALFORMED),
        (["[]", *GOOD], Failure.MALFORMED),
        ([json.dumps({"choices": [{}]}), *GOOD], Failure.MALFORMED),
        ([*GOOD, chunk("more", 4)], Failure.AFTER_END),
        ([*GOOD, "[DONE]"], Failure.AFTER_END),
        ([*GOOD[:3], chunk("more", 4), *GOOD[3:]], Failure.AFTER_END),
    ],
)
def test_each_way_to_fail_has_its_name(events: list[str], failure: Failure) -> None:
    assert answer(events).failure is failure


def test_bytes_that_are_no_text_are_malformed() -> None:
    reader = Reader()
    reader.feed(b"data: \xff\n\n")
    assert reader.end().failure is Failure.MALFORMED


@pytest.mark.parametrize(
    "event",
    [
        "1",
        "null",
        '"text"',
        "[" * 100_000,
        '{"choices": 5}',
        '{"choices": {"a": 1}}',
        '{"choices": [null]}',
        '{"choices": [{"delta": null}]}',
        '{"choices": [{"text": "x"}], "usage": [1]}',
        '{"choices": [{"text": "x"}], "usage": "much"}',
        '{"choices": [{"text": "x"}], "usage": {"completion_tokens": "1"}}',
        '{"choices": [{"text": "x"}], "usage": {"completion_tokens": 1.0}}',
        '{"choices": [{"text": "x"}], "usage": {"completion_tokens": true}}',
        '{"choices": [{"text": "x"}], "usage": {"completion_tokens": -1}}',
        '{"choices": [{"text": "x"}], "usage": {"completion_tokens": 1, "prompt_tokens": null}}',
        '{"choices": [], "usage": {"completion_tokens": [3]}}',
        '{"choices": [], "usage": {"prompt_tokens_details": [3]}}',
        '{"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": "3"}}}',
    ],
)
def test_an_odd_event_is_malformed_and_breaks_nothing(event: str) -> None:
    reader = Strict(3)
    reader.feed(stream([event, *GOOD]))
    found = reader.end()
    assert found.failure is Failure.MALFORMED and found.detail
    assert all(type(count) is int for count in (found.tokens, found.prompt_tokens, found.cached_tokens))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "text", "delta", "content", "usage", "completion_tokens", "prompt_tokens",
                 "prompt_tokens_details", "cached_tokens", "finish_reason", "error"]
            ), inner, max_size=3),
        max_leaves=12,
    )
)  # fmt: skip
def test_no_event_raises(event: Any) -> None:
    reader = Strict(3)
    reader.feed(stream([GOOD[0], json.dumps(event), *GOOD[1:]]))
    found = reader.end()
    json.dumps(vars(found), default=str)
    assert found.tokens + found.prompt_tokens + found.cached_tokens >= 0


def test_a_strict_reader_reads_whole_answers_as_the_other_does() -> None:
    told = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    for usage in (told, {**told, "prompt_tokens_details": {"cached_tokens": None}}):
        reader = Strict(3)
        reader.feed(stream([*GOOD[:3], json.dumps({"choices": [], "usage": usage}), GOOD[4]]))
        found = reader.end()
        assert (found.failure, found.tokens, found.prompt_tokens) == (None, 3, 7)
        assert found.cached_tokens == (4 if usage is told else 0)


def with_ids(*lengths: int, tokens: int | None = None) -> list[str]:
    """Chunks that bring so many ids each, and an end that says how many there were."""
    chunks = []
    for number, length in enumerate(lengths, 1):
        choice = {"text": "x", "token_ids": [5] * length, "finish_reason": "length" if number == len(lengths) else None}
        chunks.append(json.dumps({"choices": [choice]}))
    usage = {"prompt_tokens": 7, "completion_tokens": sum(lengths) if tokens is None else tokens}
    return [*chunks, json.dumps({"choices": [], "usage": usage}), "[DONE]"]


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        (with_ids(1, 2, 0, 3), None),
        (with_ids(1, 2, 0, 2, tokens=6), Failure.LOST_CHUNK),  # one in the middle
        (with_ids(1, 2, 0, 4, tokens=6), Failure.DUPLICATE),
        ([*with_ids(1, 2, 3)[:2], *with_ids(1, 2, 3)[1:]], Failure.DUPLICATE),
        ([with_ids(1, 2, 3)[0], *with_ids(1, 2, 3)[2:]], Failure.LOST_CHUNK),
        ([event.replace("[5]", "5") for event in with_ids(1, 2, 3)], Failure.MALFORMED),
    ],
)
def test_ids_tell_of_a_chunk_that_is_lost_in_the_middle(events: list[str], failure: Failure | None) -> None:
    reader = Strict(6)
    reader.feed(stream(events))
    found = reader.end()
    assert found.failure is failure and (found.counted or failure is Failure.MALFORMED)


def test_an_endpoint_is_asked_for_a_count_in_each_chunk_or_for_ids() -> None:
    (request,) = list(requests(Workload(rate=1, seconds=1, prefix=1, suffix=1)))
    usage, ids = (Endpoint("http://x", "tiny", ids=ids).body(request, 3) for ids in (False, True))
    assert usage["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "return_token_ids" not in usage and ids["return_token_ids"] is True
    assert ids["stream_options"] == {"include_usage": True}


def test_an_answer_that_counts_nothing_is_not_whole() -> None:
    reader = Strict(3)
    reader.feed(stream([chunk("a", None), chunk("b", None), chunk("c", None, "length"), "[DONE]"]))
    assert reader.end().failure is Failure.LOST_CHUNK


# The account.


def log_of(count: int, rate: float = 3.40, takes: float = 20.0, **more: Any) -> list[Sent]:
    """Synthetic requests of the deployment's shape that all end in time."""
    return [
        Sent(n, n / rate, n / rate, n / rate + 1, n / rate + takes, None, 81_920, 73_728, 600, (0.03,), **more)
        for n in range(count)
    ]


def test_the_reported_throughput_is_the_offered_load() -> None:
    """(81,920 + 600) x 3.40 / 40, from a replayed log of a thousand requests: what arrived, and what ended."""
    report = account(log_of(1000), Window(50, 250), cards=40)
    assert round(report.offered_tokens_per_card, 1) == 7014.2
    assert round(report.tokens_per_card, 1) == 7014.2
    assert report.sustained and not report.invalid and not report.failures


def test_a_server_that_is_too_slow_is_not_called_sustained() -> None:
    """It serves nine in ten; the offered load stays what it was, what ended does not."""
    slow = [replace(one, ended=20 + one.number / 3.06) for one in log_of(1000)]
    report = account(slow, Window(50, 250), cards=40)
    assert not report.sustained
    assert report.growth == pytest.approx(0.34 * 200, rel=0.1)
    assert round(report.offered_tokens_per_card, 1) == 7014.2
    assert report.tokens_per_card == pytest.approx(7014.2 * 0.9, rel=0.01)


def test_a_queue_that_only_wanders_is_sustained() -> None:
    wavy = [replace(one, ended=(one.ended or 0) + (one.number % 7)) for one in log_of(1000)]
    assert account(wavy, Window(50, 250), cards=40).sustained
    assert abs(growth(wavy, Window(50, 250))) < 3


@pytest.mark.parametrize(
    ("over", "window"), [(1.05, Window(50, 250)), (1.03, Window(120, 540)), (1.2, Window(120, 200))]
)
def test_a_small_overload_is_not_sustained(over: float, window: Window) -> None:
    """``account`` alone lets one in twenty pass."""
    slow = [replace(one, ended=20 + one.number * over / 3.40) for one in log_of(2040)]
    assert not reported(slow, window, 40).sustained


def test_random_arrivals_in_a_steady_system_are_sustained() -> None:
    for seed in range(20):
        due = times(Workload(rate=3.40, seconds=600, arrivals=Arrivals.POISSON, seed=seed))
        steady = [Sent(n, at, at, at + 1, at + 20, None, 81_920, 0, 600) for n, at in enumerate(due)]
        report = reported(steady, Window(120, 540), 40)
        assert report.sustained and not report.invalid, (seed, report.growth)


def test_a_window_after_the_arrivals_is_never_sustained() -> None:
    """Nine in ten are served, but the window sees mostly how what is left is worked off: it does not grow there."""
    slow = [replace(one, ended=20 + one.number / 3.06) for one in log_of(1000)]
    report = reported(slow, Window(250, 350), 40)
    assert account(slow, Window(250, 350), 40).sustained
    assert not report.sustained
    assert report.invalid == ["requests arrived until 294.4 s, the window ends at 350 s: a backlog cannot grow after"]
    assert arrivals_end([]) == 0.0


def test_a_queue_may_wander_by_its_root() -> None:
    assert (allowed([0, 0, 0]), allowed([100]), allowed([0, 4, 9])) == (1.0, 30.0, 6.0)


def test_requests_that_never_ended_are_outstanding() -> None:
    sent = [replace(one, ended=None) for one in log_of(100)]
    assert outstanding(sent, 10.0) == 35
    assert not account(sent, Window(0, 25), cards=1).sustained


@pytest.mark.parametrize(
    ("change", "clocks", "window", "said"),
    [
        ({}, [Clock(0, 0), Clock(1, 1), Clock(2, 9)], Window(50, 250), "clock jump"),
        ({"started": 1e4}, [], Window(50, 250), "did not hold its rate"),
        ({"counted": False}, [], Window(50, 250), "does not count tokens by chunk"),
        ({}, [], Window(400, 500), "no request was due"),
        ({}, [], Window(50, 60), "shorter than one request"),
        ({"failure": Failure.CUT}, [], Window(50, 250), "no request ended"),
    ],
)
def test_each_reason_not_to_believe_a_figure_is_named(
    change: dict[str, Any], clocks: list[Clock], window: Window, said: str
) -> None:
    sent = [replace(one, **change) for one in log_of(1000)]
    assert any(said in reason for reason in account(sent, window, 40, clocks).invalid)


def test_failures_are_counted_by_name_and_not_as_done() -> None:
    sent = [replace(one, failure=Failure.ERROR) if one.number % 2 else one for one in log_of(1000)]
    report = account(sent, Window(50, 250), cards=40)
    assert report.failures == {"error-in-200": 500}
    assert report.rate == pytest.approx(1.7, rel=0.02)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values)


def test_pairs_are_compared_with_their_interval() -> None:
    same = paired("it", [1.0, 2.0, 3.0], [1.5, 2.5, 3.5])
    assert (same.mean, same.low, same.high, same.n) == (0.5, 0.5, 0.5, 3)
    with pytest.raises(ValueError, match="no two pairs"):
        paired("it", [1.0], [2.0])
    assert baab(1) == "BA" and baab(2) == "BAAB" and baab(4) == "BAABBAAB"
    with pytest.raises(ValueError, match="0 pairs"):
        baab(0)


# The workers.

WHOLE = Window(0, 10)


def metrics(requests: int, prompt: int, cached: int = 0, queued: int = 0, made: int = 0) -> str:
    lines = [
        "# TYPE sglang:generation_tokens_total counter",
        f"sglang:generation_tokens_total {made}",
        "# TYPE sglang:num_requests_total counter",
        f'sglang:num_requests_total{{tp_rank="0"}} {requests}',
        "# TYPE sglang:prompt_tokens_total counter",
        f"sglang:prompt_tokens_total {prompt}",
        "# TYPE sglang:cached_tokens_total counter",
        f'sglang:cached_tokens_total{{cache_source="device"}} {cached}',
        "# TYPE sglang:num_queue_reqs gauge",
        f"sglang:num_queue_reqs {queued}",
        "# TYPE sglang:num_decode_transfer_queue_reqs gauge",
        f"sglang:num_decode_transfer_queue_reqs {queued}",
    ]
    return "\n".join(lines) + "\n"


def test_a_workers_share_is_exact() -> None:
    readings = [
        workers.read(metrics(5, 100, 40)),
        workers.read(metrics(6, 120, 41, 3)),
        workers.read(metrics(9, 400, 140)),
    ]
    readings = [replace(reading, at=float(at)) for at, reading in enumerate(readings)]
    share = workers.share("P", readings, Window(1, 3))
    assert (share.requests, share.prompt, share.cached, share.computed) == (4, 300, 100, 200)
    assert (share.queued_begin, share.queued_end, share.peak_queued, share.left) == (6, 0, 6, 0)
    assert share.grew == -12 and share.allowed == pytest.approx(3 * 3**0.5)


def test_an_engine_that_had_no_request_has_no_counters_yet() -> None:
    reading = workers.read("# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 0\n")
    assert (reading.requests, reading.prompt, reading.queued) == (0, 0, 0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: workers.read("{"), "no metrics page"),
        (lambda: workers.read("# nothing\n"), "--enable-metrics"),
        (lambda: workers.share("P", [], WHOLE), "no difference"),
        (lambda: workers.share("P", [workers.read(metrics(n, 9)) for n in (5, 1)], WHOLE), "was restarted"),
        (lambda: workers.share("P", [workers.read(metrics(n, 9)) for n in (5, 1, 7)], WHOLE), "was restarted"),
        (lambda: workers.read(metrics(5, 9).replace(" 9", " NaN")), "no number"),
    ],
)
def test_metrics_that_say_nothing_are_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises(workers.NoMetrics, match=said):
        make()


def test_a_miscounted_worker_and_one_that_is_not_empty_are_named() -> None:
    one = workers.share("P", [workers.read(metrics(0, 0)), workers.read(metrics(9, 9, 0, 2))], WHOLE)
    broken = [replace(sent, failure=Failure.CUT) for sent in log_of(10)]
    assert workers.mismatches([one], broken) == [
        "miscounted: the workers had 9 requests, the generator sent 10",
        "P still holds 4 requests",
    ]
    named = [replace(sent, worker="P" if sent.number < 8 else "Q") for sent in broken[:9]]
    other = replace(one, worker="Q", requests=0, left=0)
    assert workers.mismatches([one, other], named)[:2] == [
        "miscounted: P had 9 requests, 8 were sent",
        "miscounted: Q had 0 requests, 1 were sent",
    ]


def test_tokens_that_a_worker_counts_otherwise_are_named() -> None:
    sent = log_of(2)
    share = workers.Share("D", 2, 163_840, 0, 163_840, 1200, 0, 0, 0, 0.0, 1.0, 0)
    assert workers.mismatches([share], sent, decode=True) == []
    assert workers.mismatches([replace(share, prompt=163_839)], sent) == [
        "miscounted: the workers had 163839 prompt tokens, the answers say 163840"
    ]
    assert workers.mismatches([replace(share, made=1199)], sent) == []
    assert workers.mismatches([replace(share, made=1199)], sent, decode=True) == [
        "miscounted: the workers had 1199 tokens made, the answers say 1200"
    ]


def test_a_queue_that_grows_at_one_worker_is_not_sustained() -> None:
    """What ends in time elsewhere does not hide it."""
    log = Log(sent=log_of(1000))
    looks = [(float(at), workers.read(metrics(0 if at < 50 else 1000, 81_920_000 * (at >= 50)))) for at in range(295)]
    log.readings = {
        "P": [replace(reading, at=at, queued=0.0) for at, reading in looks],
        "Q": [replace(reading, at=at, queued=at / 5, requests=0, prompt=0) for at, reading in looks],
    }
    report, shares = judge(log, Window(50, 250), 40, {"prefill": ["P", "Q"]}, 0.1)
    assert not report.sustained and report.growth <= 1
    assert [round(one.grew) for one in shares] == [0, 40] and shares[1].grew > shares[1].allowed
    log.readings["Q"] = [replace(reading, queued=0.0) for reading in log.readings["Q"]]
    assert judge(log, Window(50, 250), 40, {"prefill": ["P", "Q"]}, 0.1)[0].sustained


# The loop, against a server on this machine.


@dataclass
class Server:
    """An endpoint with a fault, if one is named."""

    fault: str = ""
    takes: float = 0.02
    worker: str = ""
    port: int = 0
    served: int = 0
    waiting: int = 0
    started: list[float] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def metrics(self, _: web.Request) -> web.Response:
        if self.fault == "no metrics":
            return web.Response(text="# nothing\n")
        served = max(self.served - (self.fault == "miscounted"), 0)
        few = self.fault == "tokens miscounted"
        made = max(self.served * 3 - few, 0)
        return web.Response(text=metrics(served, self.served * 7, queued=self.waiting, made=made))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.started.append(asyncio.get_running_loop().time())
        body = await request.json()
        new = body["max_tokens"]
        if self.fault == "status":
            return web.json_response({"error": {"message": "busy"}}, status=503)
        if self.fault == "json":
            return web.json_response({"choices": []})
        named = {"x-worker": self.worker} if self.worker else {}
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream", **named})
        await out.prepare(request)
        if self.fault == "one at a time":
            self.waiting += 1
            async with self.turn:
                self.waiting -= 1
                await asyncio.sleep(self.takes)
        async for event in self.events(new, bool(body.get("return_token_ids"))):
            await out.write(f"data: {event}\n\n".encode())
        if self.fault == "cut":
            assert request.transport is not None
            request.transport.abort()
            return out
        self.served += 1
        await out.write_eof()
        return out

    async def events(self, new: int, ids: bool) -> AsyncIterator[str]:
        if self.fault == "odd" and len(self.started) == 5:
            yield json.dumps({"choices": [{"text": "x"}], "usage": {"completion_tokens": "three"}})
        for count in range(1, new + 1):
            await asyncio.sleep(60 if self.fault == "silent" else self.takes / new)
            if self.fault == "lost in the middle" and count == 2:
                continue
            finish = "length" if count == new else None
            if ids:
                yield json.dumps({"choices": [{"text": "x", "token_ids": [5], "finish_reason": finish}]})
            else:
                yield chunk("x", count, finish)
            if self.fault == "duplicate" and count == 1:
                yield chunk("x", count)
        if ids:
            yield json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": new}})
        if self.fault == "error":
            yield json.dumps({"error": {"message": "lost"}})
        if self.fault not in ("lost marker", "cut"):
            yield "[DONE]"


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start servers, each in a loop of its own; end them all afterwards."""
    ends: list[Callable[[], None]] = []

    def start(**options: Any) -> Server:
        server, ready = Server(**options), threading.Event()
        loop = asyncio.new_event_loop()

        async def begin() -> web.AppRunner:
            app = web.Application(client_max_size=1 << 24)
            app.router.add_get("/v1/models", server.models)
            app.router.add_get("/metrics", server.metrics)
            app.router.add_post("/v1/completions", server.complete)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            server.port = runner.addresses[0][1]
            ready.set()
            return runner

        runner = loop.run_until_complete(begin())
        thread = threading.Thread(target=loop.run_forever)
        thread.start()

        async def finish(runner: web.AppRunner) -> None:
            await runner.cleanup()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        def end() -> None:
            asyncio.run_coroutine_threadsafe(finish(runner), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

        ends.append(end)
        return server

    yield start
    for end in ends:
        end()


WORKLOAD = Workload(rate=40, seconds=0.5, prefix=8, suffix=4, new=3)


def loaded(server: Server, timeout: float = 10, **more: Any) -> Log:
    log = Log()
    base = f"http://127.0.0.1:{server.port}"
    loop = Loop(Endpoint(base, "tiny", timeout), requests(WORKLOAD), 3, {"P": base}, 0.1, **more)
    asyncio.run(loop.run(log))
    return log


def test_every_request_leaves_at_its_time_whatever_came_before(serve: Callable[..., Server]) -> None:
    """A server that takes longer than all arrivals together: a closed loop would have waited for it."""
    server = serve(takes=1.0)
    log = loaded(server)
    assert len(log.sent) == 20 and all(one.done for one in log.sent)
    assert max(server.started) - min(server.started) < 1.0
    assert [one.number for one in log.sent] == list(range(20))
    assert {one.tokens for one in log.sent} == {3}
    assert workers.share("P", log.readings["P"], WHOLE).requests == 20


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("lost marker", Failure.LOST_MARKER),
        ("duplicate", Failure.DUPLICATE),
        ("error", Failure.ERROR),
        ("status", Failure.STATUS),
        ("json", Failure.CONTENT_TYPE),
        ("cut", Failure.CUT),
        ("silent", Failure.TIMEOUT),
    ],
)
def test_a_planted_fault_fails_by_its_name(serve: Callable[..., Server], fault: str, failure: Failure) -> None:
    log = loaded(serve(fault=fault), timeout=1.0)
    assert {one.failure for one in log.sent} == {failure}


def test_a_text_is_known_by_its_digest_and_a_failure_by_its_words(serve: Callable[..., Server]) -> None:
    assert {(one.text, one.detail) for one in loaded(serve()).sent} == {(digest("xxx"), "")}
    assert digest("xxx") != digest("xxy") and digest("") == ""
    assert all("503" in one.detail and "busy" in one.detail for one in loaded(serve(fault="status")).sent)


def test_a_client_that_leaves_is_neither_done_nor_failed(serve: Callable[..., Server]) -> None:
    log, server = Log(), serve(takes=1.5)
    base = f"http://127.0.0.1:{server.port}"
    made = [replace(one, leave=one.number % 2) for one in requests(WORKLOAD)]
    asyncio.run(Loop(Endpoint(base, "tiny", 10), made, 3).run(log))
    left = [one for one in log.sent if one.left]
    assert [one.number % 2 for one in left] == [1] * 10 and not any(one.done or one.failure for one in left)
    assert all(one.ended is not None and one.ended - one.started < 1.0 for one in left)
    assert sum(one.done for one in log.sent) == 10


def test_a_load_that_is_over_sends_no_more_and_waits_for_what_was_sent(serve: Callable[..., Server]) -> None:
    log = Log()
    base = f"http://127.0.0.1:{serve(takes=0.3).port}"
    loop = Loop(Endpoint(base, "tiny", 10), requests(WORKLOAD), 3, over=lambda: len(loop._open) >= 4)
    asyncio.run(loop.run(log))
    assert len(log.sent) == 4 and all(one.done for one in log.sent) and log.began > 0


def test_a_clock_that_jumps_is_seen(serve: Callable[..., Server]) -> None:
    ticks = iter(range(10_000))
    log = loaded(serve(), clock=lambda: Clock(n := next(ticks), n + (100 if n > 1 else 0)))
    assert any("clock jump" in reason for reason in account(log.sent, Window(0, 0.5), 1, log.clocks, 10).invalid)


def test_an_endpoint_that_is_down_and_a_model_that_is_not_there_end_before_the_load(
    serve: Callable[..., Server],
) -> None:
    with pytest.raises(Unusable, match="does not answer"):
        asyncio.run(Loop(Endpoint("http://127.0.0.1:1", "tiny"), [], 1).run(Log()))
    server = serve()
    with pytest.raises(Unusable, match="serves tiny, not huge"):
        asyncio.run(Loop(Endpoint(f"http://127.0.0.1:{server.port}", "huge"), [], 1).run(Log()))
    assert server.started == []


SCRIPT = str(ROOT / "benchmarks" / "acceptance.py")
# As if somebody set the clock of the machine while the load runs: every two seconds, however long the start takes.
JUMP = """
import runpy, sys, time
real, began = time.time, time.monotonic()
time.time = lambda: real() + 60 * ((time.monotonic() - began) // 2)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def words(server: Server, *options: str, out: Path | None = None) -> list[str]:
    base = f"http://127.0.0.1:{server.port}"
    return [
        SCRIPT, base, "--model=tiny", f"--prefill=P={base}", "--rate=40", "--seconds=1", "--window", "0.1", "0.9",
        "--prefix=8", "--suffix=4", "--new=3", "--cards=1", "--late=5", "--json", *options,
        *([f"--out={out}"] if out is not None else []),
    ]  # fmt: skip


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def script(
    server: Server, *options: str, out: Path | None = None, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *before, *words(server, *options, out=out)],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )


def broken(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Names of the rows that do not hold. No number is no JSON, so none is read as one."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    told = json.loads(done.stdout, parse_constant=refuse)
    assert done.returncode == (1 if any(row["holds"] is False for row in told["rows"]) else 0)
    return {row["name"] for row in told["rows"] if row["holds"] is False}


def test_the_script_writes_the_run_and_its_page(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(worker="P")
    base = f"http://127.0.0.1:{server.port}"
    done = script(server, f"--decode=P={base}", "--label=scripted", out=tmp_path / "run.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    assert rows["failures"] == 0 and rows["sustained"] == 1
    result = json.loads((tmp_path / "run.json").read_text())
    assert len(result["sent"]) == 40 and (result["label"], result["count"]) == ("scripted", "usage")
    assert [(one["requests"], one["prompt"], one["made"]) for one in result["workers"]] == [(40, 280, 120)] * 2
    page = (tmp_path / "run.html").read_text()
    assert "<svg" in page and "src=" not in page and "sustained" in page


REASONS = "reasons not to believe it"


@pytest.mark.parametrize(
    ("fault", "options", "wrong", "said", "failures"),
    [
        ("lost marker", (), {"failures"}, "no request ended", {"lost-marker": 40}),
        ("duplicate", (), {"failures"}, "no request ended", {"duplicate-chunk": 40}),
        ("lost in the middle", ("--count=ids",), {"failures"}, "no request ended", {"lost-chunk": 40}),
        ("", ("--count=ids",), set(), "", {}),
        ("error", (), {"failures"}, "no request ended", {"error-in-200": 40}),
        ("odd", (), {"failures"}, "", {"malformed": 1}),
        (
            "one at a time",
            ("--rate=10", "--seconds=4", "--window", "0", "4"),
            {"sustained", "queue of P grew by"},
            "",
            {},
        ),
        ("miscounted", (), set(), "miscounted: the workers had 39 requests", {}),
        ("tokens miscounted", (), set(), "miscounted: the workers had 119 tokens made, the answers say 120", {}),
        ("no metrics", (), set(), "--enable-metrics", {}),
        ("", ("--late=0",), set(), "did not hold its rate", {}),
        ("slow", ("--rate=20", "--seconds=2", "--window", "1.5", "2"), set(), "is shorter than one request", {}),
    ],
)
def test_what_is_planted_fails_the_script_by_its_name_and_the_run_is_kept(
    serve: Callable[..., Server],
    tmp_path: Path,
    fault: str,
    options: tuple[str, ...],
    wrong: set[str],
    said: str,
    failures: dict[str, int],
) -> None:
    server = serve(fault=fault, takes={"one at a time": 0.2, "slow": 1.2}.get(fault, 0.02))
    role = [f"--decode=D=http://127.0.0.1:{server.port}"] if fault == "tokens miscounted" else []
    done = script(server, *options, *role, out=tmp_path / "run.json")
    assert broken(done) == wrong | ({REASONS} if said else set()), done.stdout + done.stderr
    assert said in done.stderr
    kept = json.loads((tmp_path / "run.json").read_text())
    assert len(kept["sent"]) == 40 and kept["report"]["failures"] == failures
    assert any(said in reason for reason in kept["report"]["invalid"]) == bool(said)
    assert "NaN" not in (tmp_path / "run.json").read_text()


def test_a_worker_that_had_anothers_request_fails_the_script(serve: Callable[..., Server]) -> None:
    """The sum is right."""
    server = serve(worker="Q")
    empty = serve()
    done = script(server, f"--prefill=Q=http://127.0.0.1:{empty.port}")
    assert broken(done) == {REASONS}
    assert "miscounted: P had 40 requests, 0 were sent" in done.stderr


def test_a_clock_that_jumps_fails_the_script(serve: Callable[..., Server], tmp_path: Path) -> None:
    # It looks once a second, and for the last time when all has ended.
    options = ("--seconds=3", "--window", "0.1", "2.9")
    done = script(serve(), *options, out=tmp_path / "run.json", before=("-c", JUMP))
    assert broken(done) == {REASONS}
    assert "clock jump: the wall clock moved " in done.stderr
    assert len(json.loads((tmp_path / "run.json").read_text())["sent"]) == 120


def test_two_endpoints_are_loaded_in_turn_and_compared_in_pairs(serve: Callable[..., Server], tmp_path: Path) -> None:
    quick, slow = serve(), serve(takes=0.3)
    done = script(quick, f"--against=http://127.0.0.1:{slow.port}", out=tmp_path / "run.json")
    rows = {row["name"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    assert rows["whole p50, B - A, n = 2"] == pytest.approx(0.28, abs=0.15)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        f"run-{n}{arm}.json" for n, arm in enumerate("BAAB", 1)
    ]


@pytest.mark.parametrize(
    ("fault", "row", "said"),
    [
        ("lost marker", "failures", "no request ended"),
        ("odd", "failures", ""),
        ("one at a time", "sustained", ""),
        ("miscounted", REASONS, "miscounted"),
    ],
)
def test_every_run_of_a_comparison_must_hold(serve: Callable[..., Server], fault: str, row: str, said: str) -> None:
    """One arm is fine; what is planted in the other fails the comparison, run by run. Workers of both are named."""
    good, bad = serve(), serve(fault=fault, takes=0.08 if fault == "one at a time" else 0.02)
    base = f"http://127.0.0.1:{bad.port}"
    done = script(good, f"--against={base}", f"--prefill=Q={base}")
    found = broken(done)
    # The fifth request of all is odd, and the first of all is not counted.
    wanted = {"run 1B"} if fault in ("odd", "miscounted") else {"run 1B", "run 4B"}
    assert {name.partition(": ")[0] for name in found if name.endswith(row)} == wanted
    assert all(name.startswith(tuple(wanted)) for name in found)
    assert said in done.stderr


@pytest.mark.parametrize("against", [False, True])
def test_a_run_that_is_interrupted_is_judged_and_kept(
    serve: Callable[..., Server], tmp_path: Path, against: bool
) -> None:
    server = serve(takes=1.0)
    more = [f"--against=http://127.0.0.1:{server.port}"] if against else []
    asked = words(server, "--seconds=60", "--window", "1", "59", *more, out=tmp_path / "run.json")
    # A shell starts what is to run behind with this signal ignored, and a child would take that over.
    with subprocess.Popen(
        [sys.executable, *asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:  # fmt: skip
        try:
            until = time.monotonic() + 60
            while server.served < 5 and time.monotonic() < until:
                time.sleep(0.05)
            running.send_signal(signal.SIGINT)
            out, told = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 1 and "invalid: the run was interrupted" in told, told
    names = {row["name"] for row in json.loads(out)["rows"] if row["holds"] is False}
    assert names >= ({"runs that are missing", "run 1B: sustained"} if against else {"sustained", REASONS})
    kept = json.loads((tmp_path / ("run-1B.json" if against else "run.json")).read_text())
    sent = kept["sent"]
    assert len({one["number"] for one in sent}) == len(sent) >= 20
    assert any(one["ended"] is None for one in sent) and sum(one["ended"] is not None for one in sent) >= 5
    assert kept["report"]["sustained"] is False


def test_an_endpoint_that_is_gone_later_keeps_the_runs_before(serve: Callable[..., Server], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *words(serve(), out=tmp_path / "run.json"), "--against=http://127.0.0.1:1"],
        capture_output=True, text=True, timeout=60, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 1 and "http://127.0.0.1:1 does not answer" in done.stderr
    server = serve()
    more = words(server, f"--against=http://127.0.0.1:{server.port}", out=tmp_path / "run.json")[2:]
    done = subprocess.run(
        [sys.executable, SCRIPT, "http://127.0.0.1:1", *more],
        capture_output=True, text=True, timeout=60, env=ENVIRONMENT,
    )  # fmt: skip
    assert broken(done) >= {"runs that are missing", f"run 2A: {REASONS}"}
    assert "invalid: http://127.0.0.1:1 does not answer" in done.stderr
    assert len(json.loads((tmp_path / "run-1B.json").read_text())["sent"]) == 40


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--rate=0"], 2, "is no load"),
        (["--rate=nan"], 2, "is no load"),
        (["--late=nan"], 2, "are to be seconds"),
        (["--window", "3", "2"], 2, "a window from"),
        (["--window", "2", "3"], 2, "requests arrive until 1 s: a backlog cannot grow after"),
        (["--window", "0.5", "1.5"], 2, "requests arrive until 1 s: a backlog cannot grow after"),
        (["--prefill=P=http://127.0.0.1:2"], 2, "named twice"),
        (["--out=/nowhere/run.json"], 2, "/nowhere is no folder that can be written to"),
        (["--model=huge"], 1, "serves tiny, not huge"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused_before_the_first_request(
    serve: Callable[..., Server], options: list[str], code: int, said: str
) -> None:
    server = serve()
    done = script(server, *options)
    assert done.returncode == code
    assert said in " ".join(done.stderr.split())
    assert server.started == []


@pytest.mark.parametrize("name", ["acceptance", "acceptance-overload"])
def test_the_picture_beside_a_kept_run_is_drawn_from_it(tmp_path: Path, name: str) -> None:
    result = ROOT / "evidence" / "rig" / f"{name}.json"
    acceptance_plot.draw(result, tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == result.with_suffix(".svg").read_text()


@pytest.mark.parametrize(
    ("name", "sustained", "said"), [("acceptance", True, ""), ("acceptance-overload", False, "hold")]
)
def test_the_verdict_of_a_kept_run_is_that_of_today(name: str, sustained: bool, said: str) -> None:
    """What was kept is judged again: its workers had what was sent, and P's queue grew where more came than went."""
    kept = json.loads((ROOT / "evidence" / "rig" / f"{name}.json").read_text())
    sent = [
        Sent(**{**one, "failure": Failure(one["failure"]) if one["failure"] else None, "gaps": ()})
        for one in kept["sent"]
    ]
    report = reported(sent, Window(**kept["window"]), 2)
    assert report.sustained is sustained and kept["report"]["sustained"] is sustained
    assert report.growth == pytest.approx(kept["report"]["growth"])
    for one in kept["workers"]:
        share = workers.Share(**one)
        assert workers.mismatches([share], sent, decode=share.worker == "D") == []
        assert (share.grew <= share.allowed) or not sustained
    assert [said in reason for reason in kept["report"]["invalid"]] == [True] * bool(said)
