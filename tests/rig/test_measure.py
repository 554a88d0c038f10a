"""Measures: each counts what it says, and none holds because there was nothing to count."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from lab.rig import client, runner, scenario
from lab.rig.client import Answer
from lab.rig.measure import MEASURES, NothingToMeasure, Result, rows
from lab.rig.observe import pool_bytes


def answer(*ids: int, shift: float = 0.0, **more: object) -> Answer:
    return dataclasses.replace(
        Answer(ids=ids, logprobs=tuple(-float(one) - shift for one in ids)),
        **more,  # type: ignore[arg-type]
    )


Lines = Sequence[tuple[str, dict[str, str]]]


def result(*answers: Answer, prefill: Lines = (), decode: Lines = ()) -> Result:
    return Result(answers, {"P": prefill, "D": decode}, "P", "D")


def value(measure: str, *names: str, **results: Result) -> float:
    return MEASURES[measure].of(results, names)


GOOD = result(answer(1, 2, 3), answer(4, 5, 6))


def test_equal_texts_are_counted() -> None:
    assert value("same_texts", "a", "b", a=GOOD, b=result(answer(1, 2, 3), answer(4, 5, 7))) == 1
    assert value("different_texts", "a", "b", a=GOOD, b=result(answer(1, 2, 3), answer(4, 5, 7))) == 1


def test_a_failed_request_is_never_an_equal_text() -> None:
    bad = result(answer(error="no"), answer(4, 5, 6))
    assert value("same_texts", "a", "b", a=bad, b=bad) == 1
    assert value("errors", "a", a=bad) == 1 and value("done", "a", a=bad) == 1


def test_an_empty_text_is_not_done() -> None:
    assert value("done", "a", a=result(answer())) == 0


def test_a_text_that_is_only_a_beginning_differs() -> None:
    assert value("same_texts", "a", "b", a=GOOD, b=result(answer(1, 2), answer(4, 5, 6))) == 1
    assert value("first_difference", "a", "b", a=GOOD, b=result(answer(1, 2), answer(4, 5, 6))) == 2


def test_logprobs_count_up_to_the_first_difference_only() -> None:
    other = result(answer(1, 2, 3, shift=0.25), answer(9, 5, 6, shift=7.0))
    assert value("logprob", "a", "b", a=GOOD, b=other) == pytest.approx(0.25)


def test_a_missing_logprob_is_an_infinite_difference() -> None:
    short = result(Answer(ids=(1, 2, 3), logprobs=(-1.0,)), answer(4, 5, 6))
    assert value("logprob", "a", "b", a=GOOD, b=short) == float("inf")


@pytest.mark.parametrize("measure", ["logprob", "first_difference"])
def test_a_failed_request_leaves_no_difference_to_measure(measure: str) -> None:
    with pytest.raises(NothingToMeasure, match="failed"):
        value(measure, "a", "b", a=GOOD, b=result(answer(error="x"), answer(4, 5, 6)))


def test_sends_of_different_size_are_not_compared() -> None:
    with pytest.raises(IndexError):
        value("same_texts", "a", "b", a=GOOD, b=result(answer(1, 2, 3)))
    with pytest.raises(ValueError, match="cannot compare"):
        client.compare([], [])
    with pytest.raises(ValueError, match="cannot compare"):
        client.compare([answer(1)], [])


def test_acceptance_is_taken_over_the_chosen_requests() -> None:
    both = result(
        answer(*range(31), verify_steps=10, retractions=0), answer(*range(31), verify_steps=30, retractions=2)
    )
    assert value("accept", "a", a=both) == pytest.approx(1.5)
    assert value("accept", "a.kept", a=both) == 3
    assert value("accept", "a.retracted", a=both) == 1
    assert value("retractions", "a", a=both) == 2


def test_the_same_requests_are_compared_when_some_are_chosen() -> None:
    left = result(answer(1, 1), answer(2, 9, retractions=1))
    assert value("different_texts", "a.retracted", "b", a=left, b=result(answer(7, 7), answer(2, 2))) == 1
    assert value("same_texts", "a.kept", "b", a=left, b=result(answer(1, 1), answer(2, 2))) == 1


@pytest.mark.parametrize(
    ("measure", "name"),
    [
        ("accept", "a.retracted"),
        ("accept", "a"),
        ("accept", "a.kept"),
        ("retractions", "a.retracted"),
        ("errors", "a.other"),
    ],
)
def test_nothing_chosen_is_nothing_measured(measure: str, name: str) -> None:
    with pytest.raises(NothingToMeasure):
        value(measure, name, a=GOOD)


def transfer(kind: str, blocks: int, size: int) -> tuple[str, dict[str, str]]:
    return "transfer", {"kind": kind, "blocks": str(blocks), "bytes": str(size)}


def test_transfers_are_told_apart_by_kind() -> None:
    one = result(
        answer(1),
        prefill=[transfer("kv", 3, 100), transfer("aux", 50, 7), transfer("kv", 2, 50), transfer("state", 1, 9)],
    )
    assert value("blocks", "a", a=one) == 3
    assert value("bytes", "a", a=one) == 150
    assert value("index_bytes", "a", a=one) == 9
    assert value("transfer_calls", "a", a=one) == 2
    assert value("saved_bytes", "a", "b", a=one, b=result(answer(1), prefill=[transfer("kv", 1, 30)])) == 120


@pytest.mark.parametrize(
    "measure", ["blocks", "bytes", "index_bytes", "transfer_calls", "rows_behind", "decode_cached"]
)
def test_without_the_engines_lines_nothing_is_measured(measure: str) -> None:
    with pytest.raises(NothingToMeasure):
        value(measure, "a", a=GOOD)


def test_retraction_lines_are_added_up() -> None:
    lines = [
        ("offload", {"rows": "45", "committed": "46"}),
        ("offload", {"rows": "50", "committed": "50"}),
        ("lost", {"tokens": "4"}),
        ("lost", {"tokens": "1"}),
    ]
    assert value("lost", "a", a=result(answer(1), decode=lines)) == 5
    assert value("rows_behind", "a", a=result(answer(1), decode=lines)) == 1


def test_rows_saved_beyond_the_committed_ones_are_a_distance_too() -> None:
    lines = [("offload", {"rows": "45", "committed": "46"}), ("offload", {"rows": "53", "committed": "50"})]
    assert value("rows_behind", "a", a=result(answer(1), decode=lines)) == 3
    assert value("rows_behind", "a", a=result(answer(1), decode=lines[1:])) == 3


def test_acceptance_and_steps_are_compared_with_the_same_requests() -> None:
    before = result(answer(*range(13), verify_steps=3), answer(*range(9), verify_steps=2))
    after = result(answer(*range(13), verify_steps=6, retractions=2), answer(*range(9), verify_steps=2))
    assert value("accept_kept", "b.retracted", "a", a=before, b=after) == 0.5
    assert value("accept_kept", "b", "a", a=before, b=after) == 0.625
    assert value("extra_steps", "b.retracted", "a", a=before, b=after) == 1.5
    lines = [("offload", {}), ("lost", {"tokens": "4"}), ("lost", {"tokens": "1"})]
    assert value("lost_each", "b", b=dataclasses.replace(after, events={"P": [], "D": lines})) == 2.5


@pytest.mark.parametrize("measure", ["accept_kept", "extra_steps"])
def test_without_a_verified_step_nothing_is_compared(measure: str) -> None:
    plain = result(answer(1, 2, 3, retractions=1))
    with pytest.raises(NothingToMeasure, match="verified"):
        value(measure, "a", "b", a=plain, b=plain)


@pytest.mark.parametrize("measure", ["lost_each", "extra_steps"])
def test_without_a_retraction_there_is_nothing_for_each(measure: str) -> None:
    calm = result(answer(1, 2, 3, verify_steps=1))
    with pytest.raises(NothingToMeasure, match="nothing was retracted"):
        value(measure, *["a", "a"][: MEASURES[measure].arguments], a=calm)


def test_the_most_torn_of_the_retracted_requests_counts() -> None:
    lines = [("offload", {"jumps": "0"}), ("offload", {"jumps": "3"}), ("offload", {"jumps": "1"})]
    assert value("jumps", "a", a=result(answer(1), decode=lines)) == 3
    with pytest.raises(NothingToMeasure, match="nothing was retracted"):
        value("jumps", "a", a=result(answer(1)))


def test_the_last_look_into_the_cache_counts_for_each_request() -> None:
    looks = [
        ("prefix", {"rid": "x", "tokens": "64"}),
        ("prefix", {"rid": "x", "tokens": "128"}),
        ("prefix", {"rid": "y", "tokens": "0"}),
    ]
    assert value("decode_cached", "a", a=result(answer(1), decode=looks)) == 128


def test_what_p_found_is_unknown_behind_a_router() -> None:
    with pytest.raises(NothingToMeasure, match="not seen"):
        value("prefill_cached", "a", a=GOOD)
    assert value("prefill_cached", "a", a=result(answer(1, prefill_cached=64))) == 64


def test_a_hold_without_a_measurement_does_not_hold() -> None:
    text = (
        'about="x"\nboot="b"\nhold=["accept(one) < 9", "lost(one) == 0", "errors(one) == 0", "done(one) == 2"]\n'
        '[[step]]\nsend="one"\nto=["P","D"]'
    )
    lines = runner.judge(scenario.parse("s", text), {"one": GOOD})
    assert [line.holds for line in lines] == [False, False, True, True]
    assert lines[0].measured is None and "verified" in lines[0].note
    assert lines[1].measured is None and "nothing was retracted" in lines[1].note


def test_prompts_come_from_the_seed_alone() -> None:
    one = client.prompts(3, 3, 50, vary=10, prefix=20)
    assert one == client.prompts(3, 3, 50, vary=10, prefix=20) != client.prompts(4, 3, 50, vary=10, prefix=20)
    assert [len(prompt) for prompt in one] == [50, 60, 70]
    assert len({prompt[:20] for prompt in one}) == 1 and len({prompt[20:40] for prompt in one}) == 3
    assert len({prompt[:20] for prompt in client.prompts(3, 3, 50)}) == 3


def sent(room: int, size: int, kind: str = "kv", cp: int = 0, tp: int = 0) -> tuple[str, dict[str, str]]:
    values = {"room": str(room), "bytes": str(size), "kind": kind, "cp": str(cp), "tp": str(tp), "blocks": "1"}
    return "transfer", values


def test_bytes_are_counted_by_source() -> None:
    one = result(answer(1), prefill=[sent(7, 10), sent(7, 5, cp=1), sent(7, 3, cp=1, tp=1), sent(7, 9, "state", cp=2)])
    assert [value("bytes", name, a=one) for name in ("a", "a.cp0", "a.cp1")] == [18, 10, 8]
    assert value("sources", "a", a=one) == 3
    with pytest.raises(NothingToMeasure, match=r"a\.cp2: no transfer of kv"):
        value("bytes", "a.cp2", a=one)


def rooms(*ranks: int) -> list[tuple[str, dict[str, str]]]:
    return [("room", {"rid": str(index), "room": "1", "rank": str(rank)}) for index, rank in enumerate(ranks)]


def test_the_distance_between_the_ranks_of_d_is_counted() -> None:
    assert value("uneven", "e", e=result(answer(1), decode=rooms(0, 1, 1, 0))) == 0
    assert value("uneven", "e", e=result(answer(1), decode=rooms(0, 1, 1, 1))) == 2


@pytest.mark.parametrize("ranks", [(), (1, 1, 1)])
def test_one_rank_alone_is_not_even(ranks: tuple[int, ...]) -> None:
    with pytest.raises(NothingToMeasure):
        value("uneven", "e", e=result(answer(1), decode=rooms(*ranks)))


def test_a_cut_connection_tells_the_client_nothing() -> None:
    errors = ("status 502: x", f"{client.BROUGHT}: y", "the stream ended before its closing line", "timed out")
    assert value("told", "e", e=result(*(answer(error=error) for error in errors), answer(1))) == 2


def test_of_a_send_that_asks_for_words_only_those_are_counted_who_were_told_them() -> None:
    errors = ("status 500: refused: a draft", "status 500: other", "no route: refused: a draft")
    one = Result(tuple(answer(error=error) for error in errors), says="refused: a draft")
    assert value("told", "e", e=one) == 1


def pools(tokens: int, requests: int) -> tuple[str, dict[str, str]]:
    return "pools", {"tokens": str(tokens), "requests": str(requests), "cached": "64"}


def test_what_any_rank_holds_is_held() -> None:
    assert value("held", "e", e=Result((), {"D": [pools(0, 0), pools(0, 0)], "P": [pools(0, 0)]})) == 0
    assert value("held", "e", e=Result((), {"D": [pools(0, 0), pools(64, 1)], "P": [pools(0, 0)]})) == 65
    # More free than there is means that something was given back twice; it does not make up for what is held.
    assert value("held", "e", e=Result((), {"D": [pools(-64, 0)], "P": [pools(64, 0)]})) == 128


@pytest.mark.parametrize(
    "drained",
    [
        Result((), {"D": [pools(0, 0)]}, refused="P is not idle after 10 s"),
        Result((), {"D": [pools(0, 0)], "P": []}),
        Result((), {}),
    ],
)
def test_an_engine_that_does_not_tell_what_it_holds_does_not_pass_for_empty(drained: Result) -> None:
    with pytest.raises(NothingToMeasure):
        value("held", "e", e=drained)


def test_an_engine_that_is_not_idle_in_time_has_no_time() -> None:
    assert value("drained", "e", e=Result((), {}, seconds=1.5)) == 1.5
    with pytest.raises(NothingToMeasure, match="not idle"):
        value("drained", "e", e=Result((), {}, seconds=1.5, refused="P is not idle"))


def test_each_request_has_a_row_with_its_own_bytes_and_hits() -> None:
    decode = [("room", {"rid": "x", "room": "7"}), ("room", {"rid": "y", "room": "8"})]
    decode.append(("prefix", {"rid": "y", "tokens": "64"}))
    one = result(
        answer(1, 2, rid="x", tag="0", prefill_cached=128),
        answer(3, rid="z", tag="1"),
        answer(4, rid="y", tag="2"),
        prefill=[sent(7, 10), sent(7, 5), sent(8, 1), sent(7, 3, "state"), sent(9, 99)],
        decode=decode,
    )
    first, unknown, last = rows("a", dataclasses.replace(one, prompts=(100, 101, 102)))
    assert (first["kv_bytes"], first["index_bytes"], first["p_hit"], first["d_hit"]) == (15, 3, 128, None)
    assert (first["send"], first["request"], first["prompt"], first["tokens"]) == ("a", "0", 100, 2)
    assert (unknown["kv_bytes"], unknown["index_bytes"], unknown["p_hit"]) == (None, None, None)
    assert (last["kv_bytes"], last["index_bytes"], last["d_hit"]) == (1, 0, 64)


@pytest.mark.parametrize(
    ("measure", "event", "key"),
    [
        ("prefill_evicted", "evicted", "tokens"),
        ("decode_evicted", "evicted", "tokens"),
        ("poisoned", "poisoned", "rows"),
    ],
)
def test_what_one_side_told_is_added_up_and_the_other_sides_is_not(measure: str, event: str, key: str) -> None:
    own: Lines = [(event, {key: "64"}), (event, {key: "128"}), ("other", {key: "7"})]
    other: Lines = [(event, {key: "1000"})]
    prefill = measure.startswith("prefill")
    told = result(answer(1), prefill=own if prefill else other, decode=other if prefill else own)
    assert value(measure, "a", a=told) == 192
    assert value(measure, "a", a=result(answer(1))) == 0


def test_the_busiest_rank_is_that_with_the_most_bytes_of_all_its_calls() -> None:
    sent = [
        ("transfer", {"kind": "kv", "cp": cp, "tp": "0", "bytes": size})
        for cp, size in (("0", "3"), ("1", "2"), ("1", "3"))
    ]
    state = ("transfer", {"kind": "state", "cp": "0", "tp": "0", "bytes": "90"})
    result = Result((), {"P": [*sent, state]}, "P", "D")
    assert MEASURES["busiest"].of({"one": result}, ["one"]) == 5 / 8
    assert MEASURES["busiest"].of({"one": Result((), {"P": sent[:1]}, "P", "D")}, ["one"]) == 1
    with pytest.raises(NothingToMeasure):
        MEASURES["busiest"].of({"one": Result((), {"P": [state]}, "P", "D")}, ["one"])


def test_a_pools_bytes_are_those_of_the_rank_that_has_the_most() -> None:
    told = [("pools", {"tokens": "0", "requests": "0", "bytes": size}) for size in ("7", "9")]
    assert MEASURES["pool_bytes"].of({"end": Result((), {"P": told})}, ["end"]) == 9
    for result in (Result((), {"P": []}), Result((), {"P": told}, refused="P is not idle")):
        with pytest.raises(NothingToMeasure):
            MEASURES["pool_bytes"].of({"end": result}, ["end"])


def test_the_bytes_of_a_pool_count_each_memory_once() -> None:
    whole, part = torch.zeros(4, 8), torch.zeros(3, dtype=torch.uint8)
    pool = SimpleNamespace(kv=[whole, whole[1:], None], index=(part,), size=7, name="pool", view=whole.view(-1))
    assert pool_bytes(pool) == 4 * 8 * 4 + 3
