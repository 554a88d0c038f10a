"""load-at-dispatch end to end: one script on the stock build and on the patched build, gate unset and set."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from lab.router.build import Result
from lab.router.harness import EVEN, ONE_SHOT, Answer, Bench, Seen, chat
from lab.router.servers import FAILURES
from tests.router.router_requests import FAULTY, GOOD, PD, burst, generate, start, trace

GATE = "SMG_PD_LOAD_AT_DISPATCH"
ON = {GATE: "1"}
Case = tuple[str, dict[str, str]]
STOCK: Case = ("stock", {})
UNSET: Case = ("patched", {})
SET: Case = ("patched", ON)
BOTH_OFF = pytest.mark.parametrize("case", [STOCK, UNSET], ids=["stock", "unset"])
ALL = pytest.mark.parametrize("case", [STOCK, UNSET, SET], ids=["stock", "unset", "set"])


async def received(bench: Bench) -> None:
    """Wait until D has the request that was asked last, however long a busy machine takes for it."""
    while not (await bench.seen()).count("D.recv"):
        await asyncio.sleep(0.01)


async def loads_until_headers(bench: Bench, body: dict[str, Any], route: str) -> set[tuple[int, int]]:
    """The loads that the router shows while a request waits for D's headers: D holds them until a second one comes."""
    await bench.script(p_delay=0.05, d_hold=2, d_first=0.05, d_tokens=2)
    asked = asyncio.create_task(bench.ask(body, route))
    await received(bench)
    samples = set()
    for _ in range(8):
        await asyncio.sleep(0.05)
        samples.add(await bench.loads())
    assert not asked.done()
    answers = await asyncio.gather(asked, bench.ask(body, route))
    assert [answer.status for answer in answers] == [200, 200]
    return samples


class TestBeforeTheHeadersOfD:
    """The load of a request that has been sent and of which nothing has come back."""

    @BOTH_OFF
    @pytest.mark.parametrize(("route", "make"), [("/v1/chat/completions", chat), ("/generate", generate)])
    def test_a_stream_counts_for_nothing_without_the_gate(self, bench: Any, case: Case, route: str, make: Any) -> None:
        one = bench(*case)
        assert one.run(loads_until_headers(one, make(True), route)) == {(0, 0)}

    @pytest.mark.parametrize(("route", "make"), [("/v1/chat/completions", chat), ("/generate", generate)])
    def test_a_stream_counts_on_both_legs_with_the_gate(self, bench: Any, route: str, make: Any) -> None:
        one = bench(*SET)
        assert one.run(loads_until_headers(one, make(True), route)) == {(1, 1)}

    @ALL
    def test_a_request_that_is_not_streamed_counts_once_on_both_legs(self, bench: Any, case: Case) -> None:
        one = bench(*case)
        assert one.run(loads_until_headers(one, chat(False), "/v1/chat/completions")) == {(1, 1)}

    def test_a_stream_still_counts_once_after_its_headers(self, bench: Any) -> None:
        one = bench(*SET)
        one.run(one.script(p_delay=0.02, d_first=0.05, d_tokens=3, d_gap=1.0))

        async def sample() -> set[tuple[int, int]]:
            asked = asyncio.create_task(one.ask(chat(True)))
            await received(one)
            await asyncio.sleep(0.4)
            seen = {await one.loads() for _ in range(5)}
            assert not asked.done()
            await asked
            return seen

        assert one.run(sample()) == {(1, 1)}


class TestRelease:
    """Whatever ends a request, both loads are back at zero."""

    @ALL
    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
    def test_a_request_that_ends_well(self, bench: Any, case: Case, stream: bool) -> None:
        one = bench(*case)
        one.run(one.script(d_first=0.05, d_tokens=2, d_gap=0.01))
        assert one.run(one.ask(chat(stream))).status == 200
        assert one.run(one.settle(1.0))[1] == (0, 0)

    @ALL
    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
    def test_every_way_in_which_p_fails(self, bench: Any, case: Case, stream: bool) -> None:
        one = bench(*case)
        one.run(one.script(p_delay=0.02, d_timeout=0.3, d_first=0.05))

        async def all_at_once() -> list[Answer]:
            bodies = [chat(stream, p_mode=mode) for mode in FAILURES]
            return list(await asyncio.gather(*(one.ask(body, seconds=1.5) for body in bodies)))

        answers = one.run(all_at_once())
        assert all(answer.status != 200 or answer.error for answer in answers)
        seen, loads = one.run(one.settle(2.0))
        assert loads == (0, 0)
        assert seen.count("P.recv") == len(FAILURES)

    @ALL
    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
    @pytest.mark.parametrize("mode", ["http500", "http400", "reset"])
    def test_d_fails_before_its_headers(self, bench: Any, case: Case, stream: bool, mode: str) -> None:
        one = bench(*case)
        one.run(one.script(d_mode=mode, d_first=0.1))
        assert one.run(one.ask(chat(stream), seconds=5)).status != 200
        assert one.run(one.settle(1.0))[1] == (0, 0)

    @ALL
    @pytest.mark.parametrize("mode", ["cut", "sse_error"])
    def test_d_fails_after_its_first_token(self, bench: Any, case: Case, mode: str) -> None:
        one = bench(*case)
        one.run(one.script(d_mode=mode, d_first=0.1))
        one.run(one.ask(chat(True), seconds=5))
        assert one.run(one.settle(1.0))[1] == (0, 0)

    @ALL
    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
    def test_the_client_leaves_before_the_headers(self, bench: Any, case: Case, stream: bool) -> None:
        one = bench(*case)
        one.run(one.script(d_first=5.0))
        assert one.run(one.ask(chat(stream), seconds=0.5)).error
        seen, loads = one.run(one.settle(1.0))
        assert loads == (0, 0) and seen.count("D.abort") == 1 and seen.busy == 0

    @ALL
    def test_the_client_leaves_in_mid_stream(self, bench: Any, case: Case) -> None:
        one = bench(*case)
        one.run(one.script(d_first=0.05, d_tokens=100, d_gap=0.05))
        assert one.run(one.ask(chat(True), seconds=0.5)).error
        seen, loads = one.run(one.settle(1.0))
        assert loads == (0, 0) and seen.count("D.abort") == 1 and seen.busy == 0

    @BOTH_OFF
    def test_without_the_gate_a_silent_d_runs_on_for_a_client_that_has_left(self, bench: Any, case: Case) -> None:
        seen, loads = self.leave_a_silent_d(bench(*case))
        assert loads == (0, 0) and seen.count("D.abort") == 0 and seen.busy == 1

    def test_with_the_gate_a_silent_d_ends_with_its_client(self, bench: Any) -> None:
        seen, loads = self.leave_a_silent_d(bench(*SET))
        assert loads == (0, 0) and seen.count("D.abort") == 1 and seen.busy == 0

    @staticmethod
    def leave_a_silent_d(one: Bench) -> tuple[Seen, tuple[int, int]]:
        one.run(one.script(d_first=0.05, d_tokens=3, d_gap=3.0))
        answer = one.run(one.ask(chat(True), seconds=0.6))
        assert answer.status == 200 and answer.error and b"data: " in answer.body
        found = one.run(one.settle(1.0))
        one.run(one.settle(8.0))
        return found

    @ALL
    def test_every_attempt_of_a_retried_request(self, bench: Any, case: Case) -> None:
        one = bench(*case, flags=("--disable-circuit-breaker", "--retry-max-retries", "3"))
        one.run(one.script(p_mode="http500", p_delay=0.02, d_timeout=0.1))

        async def sample() -> tuple[Answer, set[tuple[int, int]]]:
            asked = asyncio.create_task(one.ask(chat(True)))
            samples = set()
            while not asked.done():
                samples.add(await one.loads())
                await asyncio.sleep(0.01)
            return await asked, samples

        answer, samples = one.run(sample())
        seen, loads = one.run(one.settle(1.0))
        assert answer.status == 500 and seen.count("D.recv") == 3
        assert max(samples) <= (1, 1) and loads == (0, 0)

    def test_a_hundred_requests_that_end_in_all_ways_at_once(self, bench: Any) -> None:
        one = bench(*SET)
        one.run(one.script(p_delay=0.02, d_timeout=0.4, d_first=0.05, d_tokens=3, d_gap=0.02))

        async def all_at_once() -> None:
            asked = []
            for index in range(100):
                script = {"p_mode": (*FAILURES, "ok", "ok")[index % 20]} if index % 3 else {"d_mode": "http500"}
                asked.append(one.ask(chat(index % 2 == 0, **script), seconds=0.1 + index % 7 * 0.1))
            await asyncio.gather(*asked)

        one.run(all_at_once())
        seen, loads = one.run(one.settle(3.0))
        assert loads == (0, 0) and seen.busy == 0


class TestSpread:
    """32 simultaneous arrivals over 4 D servers, with thresholds that send any difference to the least loaded."""

    FLAGS = (*ONE_SHOT, *EVEN)

    def spreads(self, one: Bench, stream: bool, bursts: int) -> list[list[int]]:
        found = []
        for _ in range(bursts):
            # A request that ended before the last has come would rightly unbalance the rest.
            one.run(one.script(p_delay=0.05, d_hold=32, d_first=0.05, d_tokens=2, d_gap=0.05))
            spread, answers = one.run(burst(one, stream))
            assert {answer.status for answer in answers} == {200}
            assert one.run(one.settle(2.0))[1] == (0, 0)
            found.append(spread)
        return found

    @BOTH_OFF
    def test_streams_pile_up_without_the_gate(self, bench: Any, case: Case) -> None:
        spreads = self.spreads(bench(*case, flags=self.FLAGS), True, 3)
        assert any(max(spread) - min(spread) >= 2 or len(spread) < 4 for spread in spreads), spreads

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
    def test_with_the_gate_each_gets_eight_every_time(self, bench: Any, stream: bool) -> None:
        assert self.spreads(bench(*SET, flags=self.FLAGS), stream, 10) == [[8, 8, 8, 8]] * 10


@pytest.mark.parametrize(
    ("route", "body", "script"), [one[1:] for one in GOOD + FAULTY], ids=[one[0] for one in GOOD + FAULTY]
)
def test_with_the_gate_unset_a_request_leaves_the_trace_of_the_stock_build(
    bench: Any, route: str, body: dict[str, Any], script: dict[str, Any]
) -> None:
    traces = []
    for case in (STOCK, UNSET):
        one = bench(*case)
        one.run(one.script(p_delay=0.02, d_first=0.05, d_tokens=3, d_gap=0.03, **script))
        traces.append(trace(one, body, route, 5.0))
    assert traces[0] == traces[1]


@pytest.mark.parametrize("value", ["2", "maybe", "yes please", "1,0", "\u00fc"])
def test_a_malformed_gate_stops_the_start_and_is_named(built: dict[str, Result], value: str) -> None:
    done = start(built["patched"], {GATE: value}, *PD)
    assert done.returncode != 0
    assert GATE in done.stderr and "neither on" in done.stderr and "panicked" not in done.stderr


def test_the_gate_outside_of_pd_mode_stops_the_start(built: dict[str, Result]) -> None:
    done = start(built["patched"], ON, "--worker-urls", "http://127.0.0.1:1")
    assert done.returncode != 0 and "--pd-disaggregation" in done.stderr and "panicked" not in done.stderr


def test_the_gate_over_grpc_workers_stops_the_start(built: dict[str, Result]) -> None:
    grpc = ("--pd-disaggregation", "--prefill", "grpc://127.0.0.1:1", "8998", "--decode", "grpc://127.0.0.1:1")
    done = start(built["patched"], ON, *grpc, "--model-path", "/nowhere")
    assert done.returncode != 0 and "gRPC" in done.stderr and "panicked" not in done.stderr


def test_the_router_says_at_start_which_gate_is_on_and_what_it_was_built_from(
    bench: Any, built: dict[str, Result]
) -> None:
    text = bench(*SET).log_file("router").read_text()
    assert f"{GATE} is on" in text and built["patched"].receipt["series"] in text
    assert GATE not in bench(*UNSET).log_file("router").read_text()


PIECES, PIECE = 96, 1 << 20
"""Far more than the sockets between D and the client hold."""


async def unread(bench: Bench, until_done: bool) -> tuple[bool, int]:
    """Ask for a long stream and take nothing yet; returns whether D was rid of it, and how many pieces came then.

    Args:
        until_done: wait until D is, however long that takes; else give it two seconds.
    """
    await bench.script(d_first=0.05, d_tokens=PIECES, d_gap=0, d_pad=PIECE)
    limit = aiohttp.ClientTimeout(total=120)
    async with bench.client.post(bench.router + "/v1/chat/completions", json=chat(True), timeout=limit) as response:
        for _ in range(600 if until_done else 20):
            await asyncio.sleep(0.1)
            if done := bool((await bench.seen()).count("D.done")):
                break
        body = await response.read()
    return done, body.count(b"x" * PIECE)


class TestSlowClient:
    """A client that takes nothing for a while of what it asked for."""

    @BOTH_OFF
    def test_the_router_takes_a_stream_of_any_length_into_its_memory_without_the_gate(
        self, bench: Any, case: Case
    ) -> None:
        one = bench(*case)
        assert one.run(unread(one, until_done=True)) == (True, PIECES)

    def test_d_waits_for_its_client_with_the_gate_and_nothing_is_lost(self, bench: Any) -> None:
        one = bench(*SET)
        assert one.run(unread(one, until_done=False)) == (False, PIECES)
        assert one.run(one.settle(1.0))[1] == (0, 0)

    @pytest.mark.parametrize("gated", [False, True])
    def test_the_limit_of_a_whole_request_counts_the_clients_time_with_the_gate(self, bench: Any, gated: bool) -> None:
        one = bench("patched", ON if gated else {}, flags=(*ONE_SHOT, "--request-timeout-secs", "3"))

        async def late() -> int:
            await one.script(d_first=0.05, d_tokens=PIECES, d_gap=0, d_pad=PIECE)
            limit = aiohttp.ClientTimeout(total=120)
            got = 0
            async with one.client.post(one.router + "/v1/chat/completions", json=chat(True), timeout=limit) as response:
                await asyncio.sleep(5)
                try:
                    async for part in response.content.iter_any():
                        got += part.count(b"data: [DONE]")
                except aiohttp.ClientError:
                    assert gated
            return got

        assert one.run(late()) == (0 if gated else 1)
        assert one.run(one.settle(1.0))[1] == (0, 0)
