"""dp-aware-pd-dispatch and pd-cache-tree end to end. The harness never starts a stock PD router with --dp-aware."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lab.router.build import Result
from lab.router.harness import EVEN, ONE_SHOT, Answer, Bench, chat
from tests.router.router_requests import PD, burst, generate, start

DEFAULT = ONE_SHOT
EVENLY = (*ONE_SHOT, *EVEN)
COUNTED = {"SMG_PD_LOAD_AT_DISPATCH": "1"}


def ranked(bench: Any, flags: tuple[str, ...] = DEFAULT, **options: Any) -> Bench:
    """A patched router over one D of four ranks."""
    one: Bench = bench("patched", COUNTED, flags=flags, decodes=1, dp=4, dp_aware=True, **options)
    return one


def test_the_harness_refuses_to_start_a_stock_pd_router_with_ranks(built: dict[str, Result]) -> None:
    with pytest.raises(ValueError, match="leaves 127"):
        Bench(built["stock"], dp_aware=True)


def test_every_rank_is_a_worker_and_all_traffic_stays_with_the_servers(bench: Any) -> None:
    one = ranked(bench, EVENLY)
    one.run(one.script(d_first=0.3, d_tokens=2))
    spread, answers = one.run(burst(one, True, 8))
    seen = one.run(one.seen())
    assert {answer.status for answer in answers} == {200}
    assert {event["key"] for event in seen.events("D.recv")} == {f"D0@{rank}" for rank in range(4)}
    assert spread == [2, 2, 2, 2]


def test_p_is_told_where_it_is_and_of_no_rank_when_it_has_only_one(bench: Any) -> None:
    one = ranked(bench, EVENLY)
    one.run(one.script(d_first=0.05))
    one.run(one.ask(chat(True)))
    seen = one.run(one.seen())
    (event,) = seen.events("P.recv")
    assert event["where"] == ["127.0.0.1", 8998]
    assert event["seen"]["data_parallel_rank"] is None and event["seen"]["routed_dp_rank"] is None
    assert seen.events("D.recv")[0]["prefill_rank"] is None
    assert seen.events("D.recv")[0]["rooms"] == event["rooms"]


def test_with_ranks_on_both_sides_both_legs_learn_the_prefill_rank(bench: Any) -> None:
    one = ranked(bench, EVENLY, prefill_dp=2)
    one.run(one.script(d_first=0.3, d_tokens=2))
    spread, _ = one.run(burst(one, True, 8))
    seen = one.run(one.seen())
    assert spread == [2, 2, 2, 2] and sorted(seen.spread("P.recv")) == [4, 4]
    ranks = {event["rooms"][0]: event["seen"]["disagg_prefill_dp_rank"] for event in seen.events("P.recv")}
    for event in seen.events("P.recv"):
        assert event["key"] == f"P0@{ranks[event['rooms'][0]]}" and event["where"] == ["127.0.0.1", 8998]
    assert {event["rooms"][0]: event["prefill_rank"] for event in seen.events("D.recv")} == ranks
    assert set(ranks.values()) == {0, 1}


@pytest.mark.parametrize("rank", [-1, 4, 1000])
def test_a_rank_that_does_not_exist_is_a_400_and_is_sent_nowhere(bench: Any, rank: int) -> None:
    one = ranked(bench, EVENLY)
    one.run(one.script())
    answer = one.run(one.ask(generate(False) | {"data_parallel_rank": rank}, "/generate"))
    assert answer.status == 400 and b"0 to 3" in answer.body
    assert one.run(one.settle())[0].log == []


@pytest.mark.parametrize("name", ["data_parallel_rank", "routed_dp_rank"])
@pytest.mark.parametrize("rank", ["two", 1.5, 1 << 70, [0]])
def test_a_rank_that_is_no_number_is_a_400_too(bench: Any, name: str, rank: Any) -> None:
    one = ranked(bench, EVENLY)
    one.run(one.script())
    body = {"model": "mock", "prompt": "p", "max_tokens": 3, name: rank}
    answer = one.run(one.ask(body, "/v1/completions"))
    assert answer.status == 400 and name.encode() in answer.body and b"0 to 3" in answer.body
    assert one.run(one.settle())[0].log == []


def test_a_clients_own_rank_gives_way_to_the_routers_choice(bench: Any) -> None:
    one = ranked(bench, EVENLY)
    one.run(one.script(d_first=0.3))

    async def all_at_once() -> list[Answer]:
        body = generate(False) | {"data_parallel_rank": 3}
        return list(await asyncio.gather(*(one.ask(body, "/generate") for _ in range(4))))

    assert {answer.status for answer in one.run(all_at_once())} == {200}
    seen = one.run(one.seen())
    assert seen.spread() == [1, 1, 1, 1]
    assert {event["seen"]["data_parallel_rank"] for event in seen.events("P.recv")} == {None}


def test_default_thresholds_keep_a_shared_prefix_on_one_rank(bench: Any) -> None:
    one = ranked(bench)
    one.run(one.script(d_first=0.5, d_tokens=2))
    spread, answers = one.run(burst(one, True))
    assert {answer.status for answer in answers} == {200} and spread == [32]
    assert one.run(one.settle())[1] == (0, 0)


@pytest.mark.parametrize("size", [20, 32])
def test_evaluation_thresholds_give_every_rank_its_share_in_twenty_of_twenty_bursts(bench: Any, size: int) -> None:
    one = ranked(bench, EVENLY)
    spreads = []
    for _ in range(20):
        # A request that ended before the last has come would rightly unbalance the rest.
        one.run(one.script(p_delay=0.05, d_hold=size, d_first=0.05, d_tokens=2))
        spreads.append(one.run(burst(one, True, size))[0])
        assert one.run(one.settle(10.0))[1] == (0, 0)
    assert spreads == [[size // 4] * 4] * 20


def test_flush_loads_and_metrics_reach_the_server_itself(bench: Any) -> None:
    one = ranked(bench, EVENLY)
    one.run(one.script())

    async def call() -> tuple[int, list[dict[str, Any]]]:
        async with one.client.post(one.router + "/flush_cache") as response:
            status = response.status
        async with one.client.get(one.router + "/get_loads") as response:
            return status, (await response.json())["workers"]

    status, loads = one.run(call())
    assert status == 200 and {load["load"] for load in loads} == {5} and len(loads) == 5
    paths = [event["path"] for event in one.run(one.seen()).events("fan-out")]
    assert paths.count("/flush_cache") == 5 and paths.count("/get_load") == 5


# What a reader of URLs takes for the address 0.0.0.2 (or 0.0.0.0).
RANKED = pytest.mark.parametrize(
    "behind", ["@2", "@0", "@2/", "@2?x", "@2#x", "@2:80", "@2:80/x", "@2 ", "@2.", "@0x2", "@%32"]
)


@RANKED
@pytest.mark.parametrize(
    "flags",
    [(*PD, "--decode"), ("--pd-disaggregation", "--decode", "http://127.0.0.1:1", "--prefill"), ("--worker-urls",)],
    ids=["decode", "prefill", "regular"],
)
def test_a_rank_in_a_workers_url_stops_the_start(built: dict[str, Result], flags: tuple[str, ...], behind: str) -> None:
    done = start(built["patched"], {}, *flags, f"http://127.0.0.1:1{behind}")
    assert done.returncode != 0 and "http://127.0.0.1:1 and let --dp-aware" in done.stderr
    assert "panicked" not in done.stderr


@RANKED
def test_a_rank_in_the_url_of_a_worker_that_is_added_is_a_400(bench: Any, behind: str) -> None:
    one = ranked(bench, EVENLY)

    async def add() -> tuple[int, str]:
        worker = {"url": f"http://127.0.0.1:1{behind}", "worker_type": "decode"}
        async with one.client.post(one.router + "/workers", json=worker) as response:
            return response.status, await response.text()

    status, text = one.run(add())
    assert status == 400 and "--dp-aware" in text


def share_a_prefix(one: Bench, size: int = 12) -> list[int]:
    """One after the other, so that load says nothing and only the prefix can tell where to go."""
    one.run(one.script(p_delay=0.01, d_first=0.02, d_tokens=1, d_gap=0.01))
    for index in range(size):
        assert one.run(one.ask(chat(False, "shared prefix " * 100 + str(index)))).status == 200
    spread: list[int] = one.run(one.seen()).spread()
    return spread


def test_a_stock_pd_router_has_no_tree_and_scatters_a_shared_prefix(bench: Any) -> None:
    assert len(share_a_prefix(bench("stock"), 20)) > 1


def test_the_patched_one_keeps_it_on_one_worker(bench: Any) -> None:
    assert share_a_prefix(bench("patched")) == [12]


def test_a_policy_without_a_tree_is_as_it_was(bench: Any) -> None:
    for variant in ("stock", "patched"):
        assert share_a_prefix(bench(variant, policy="round_robin")) == [3, 3, 3, 3]
