"""The two-GPU script: what it checks by itself, without an engine."""

from __future__ import annotations

import importlib
import json
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lab.rig import cache, client, deployment, models, ports
from lab.rig.client import Answer, Request
from lab.rig.errors import RigError
from lab.rig.gpu import dsa_parts, filled, pack, two
from lab.rig.standins import attention
from tests.engine.conftest import Trees, bundle, patched

assert bundle and patched  # fixtures of the engine tests
ROOT = Path(__file__).parents[2]
SAID = {True: "holds", False: "**does not hold**", None: "not measured"}


def answers(*texts: tuple[int, ...], lp: float = 0.0, steps: int = 0) -> list[Answer]:
    return [Answer(ids=text, logprobs=(lp,) * len(text), verify_steps=steps) for text in texts]


class Stub:
    """In a deployment's place: counts its ends, and has a log."""

    def __init__(self, log: str = "") -> None:
        self.downs, self.words = 0, log

    def up(self, limit: float) -> None:
        pass

    def down(self) -> None:
        self.downs += 1

    def log(self, name: str) -> str:
        return self.words


def running(
    name: str, found: dict[str, Any] | None = None, replies: list[Answer] | None = None, log: str = ""
) -> two.Running:
    (variant,) = [one for one in two.VARIANTS if one.name == name]
    stub: Any = Stub(log)
    return two.Running(variant, stub, 0, found or {}, replies or [])


def report(*work: two.Running, **more: Any) -> dict[str, bool | None]:
    pairs = two.compared(work)
    found = {"runs": {one.variant.name: one.found for one in work}, "compared": pairs, "size": {"repeats": 200}}
    return two.verdicts({**found, "logprob_farther": two.farther(pairs), **more})


NOISE = "logprob DCP2-TP2 no larger than TP1-TP2"


@pytest.mark.parametrize(("ours", "holds"), [(0.1, True), (0.3, True), (0.31, False)])
def test_dcp_may_move_a_logprob_as_far_as_another_rank_does_and_no_further(ours: float, holds: bool) -> None:
    work = [
        running("tp2", replies=answers((1, 2))),
        running("tp1", replies=answers((1, 2), lp=0.3)),
        running("dcp2", replies=answers((1, 2), lp=ours)),
    ]
    assert report(*work)[NOISE] is holds
    assert report(*work[:2])[NOISE] is None
    work[2].answers = [Answer(error="gone")]
    assert report(*work)[NOISE] is None


FARTHER = "mean logprob difference DCP2-TP2 no larger than TP1-TP2's within its interval"


@pytest.mark.parametrize(
    ("ours", "holds"),
    [((0.2, 0.4, 0.1, 0.3), True), ((0.1, 0.2, 0.05, 0.1), True), ((0.3, 0.5, 0.25, 0.45), False)],
)
def test_the_mean_difference_over_prompts_of_their_own_is_no_larger(ours: tuple[float, ...], holds: bool) -> None:
    work = [running(name, replies=answers((1, 2))) for name in ("tp2", "tp1", "dcp2")]
    for one, each in zip(work, ((0.0,) * 4, (0.2, 0.4, 0.15, 0.3), ours), strict=True):
        one.apart = [answer for lp in each for answer in answers((1, 2), lp=lp)]
    assert report(*work)[FARTHER] is holds
    assert report(*work[:2])[FARTHER] is None


def test_a_difference_below_the_steps_of_float32_is_none_and_one_above_them_is_one() -> None:
    for each, holds in ((two.ROUNDING / 2, True), (two.ROUNDING * 2, False)):
        work = [running(name, replies=answers((1, 2))) for name in ("tp2", "tp1")]
        work.append(running("dcp2", replies=answers((1, 2), lp=each)))
        for one, lp in zip(work, (0.0, 0.0, each), strict=True):
            one.apart = answers((1, 2), (1, 2), lp=lp)
        found = report(*work)
        assert (found[NOISE], found[FARTHER], found[MEDIAN]) == (holds, holds, holds)


def test_a_mean_whose_interval_is_wide_shows_nothing() -> None:
    found = {"high": 0.06, "low": -0.05, "median_high": 0.0, "medians": {"tp1": 0.1}}
    assert report(logprob_farther=found)[FARTHER] is None
    assert report(logprob_farther={**found, "high": 0.05})[FARTHER] is True
    assert report(logprob_farther={**found, "high": 0.05, "low": 0.01})[FARTHER] is False


MEDIAN = "median logprob difference DCP2-TP2 at most a quarter above TP1-TP2's"


def distances(added: float) -> dict[str, bool | None]:
    """Verdicts over as many prompts as on two GPUs, most of them near and a few far away, as measured there."""
    chance = random.Random(5)

    def each(base: float) -> list[float]:
        return [
            base + (chance.uniform(0.2, 1.2) if chance.random() < 0.06 else chance.gauss(0.05, 0.01)) for _ in "x" * 256
        ]

    work = [running(name, replies=answers((1, 2))) for name in ("tp2", "tp1", "dcp2")]
    for one, values in zip(work, ([0.0] * 256, each(0.0), each(added)), strict=True):
        one.apart = [answer for lp in values for answer in answers((1, 2), lp=lp)]
    return report(*work)


def test_what_moves_every_prompt_is_seen_behind_the_few_that_are_far_away() -> None:
    assert distances(0.0)[MEDIAN] is True
    assert distances(0.002)[MEDIAN] is True
    assert distances(0.02)[MEDIAN] is False
    assert report()[MEDIAN] is None


def test_farther_and_nearer_prompts_are_told_beside_the_mean() -> None:
    work = [running(name, replies=answers((1, 2))) for name in ("tp2", "tp1", "dcp2")]
    for one, each in zip(work, ((0.0,) * 4, (0.2, 0.4, 0.3, 0.3), (0.3, 0.2, 0.4, 0.3)), strict=True):
        one.apart = [answer for lp in each for answer in answers((1, 2), lp=lp)]
    work[1].apart[3] = Answer(ids=(1, 3), logprobs=(0.3, 0.3))
    found = two.farther(two.compared(work))
    assert found is not None
    assert (found["farther"], found["nearer"]) == (2, 1)
    assert found["median"] == pytest.approx(0.05) and found["mean"] == 0.0
    assert found["means"]["dcp2"] == pytest.approx(0.3) and found["medians"]["tp1"] == pytest.approx(0.3)
    assert found["same_texts"] == {"tp1": 3, "dcp2": 4}
    assert found["median_low"] < found["median"] < found["median_high"]


def test_each_length_and_batch_has_its_largest_and_its_mean_difference() -> None:
    def made(*texts: tuple[tuple[int, ...], float, str]) -> list[Answer]:
        return [Answer(ids=ids, logprobs=(lp,) * len(ids), tag=tag) for ids, lp, tag in texts]

    left = made(
        ((1, 2), 0.1, "40 x 1:0"), ((1, 2), 0.2, "40 x 2:0"), ((1, 5), 0.4, "40 x 2:1"), ((5,), 1.0, "60 x 1:0")
    )
    right = made(
        ((1, 2), 0.0, "40 x 1:0"), ((1, 2), 0.0, "40 x 2:0"), ((1, 3), 0.0, "40 x 2:1"), ((4,), 0.0, "60 x 1:0")
    )
    assert two.cells(left, right) == [
        {"batch": "40 x 1", "requests": 1, "same_texts": 1, "tokens": 2, "logprob": 0.1, "mean": 0.1},
        {"batch": "40 x 2", "requests": 2, "same_texts": 1, "tokens": 3, "logprob": 0.4, "mean": 0.266667},
        {"batch": "60 x 1", "requests": 1, "same_texts": 0, "tokens": 0, "logprob": 0.0, "mean": None},
    ]


def test_an_engine_that_failed_or_an_answer_that_did_makes_it_red() -> None:
    words = "every engine answered everything"
    assert report(running("tp2", {"errors": []}))[words] is True
    assert report(running("tp2", {"errors": ["status 500"]}))[words] is False
    assert report(running("tp2"), running("dcp2", {"failed": "crash"}))[words] is False


def test_an_engine_that_was_not_asked_leaves_the_answer_open() -> None:
    words = "every engine answered everything"
    assert report(running("tp2", {"errors": []}), running("dcp2"))[words] is None
    assert report()[words] is None


def test_the_capacity_is_that_of_the_logged_pools_beside_the_predicted_one() -> None:
    pool = {"tokens": 2_097_152, "gb_as_logged": 3.08}
    runs = {"tp2": {"pool": pool}, "dcp2": {"pool": {**pool, "gb_as_logged": 1.8}}}
    assert two.capacity(runs) == {
        "predicted": two.PREDICTED,
        "measured": 1.711,
        "between": [1.704, 1.719],
        "tokens_a_gb": {"tp2": 680_894, "dcp2": 1_165_084},
    }
    assert two.capacity({"tp2": {"pool": pool}}) is None
    assert two.capacity({**runs, "dcp2": {"pool": {**pool, "gb_as_logged": None}}}) is None


@pytest.mark.parametrize(
    ("text", "lp", "graph", "eager", "holds"),
    [
        ((1, 2), 0.0, (5, 0), (0, 5), True),
        ((1, 3), 0.0, (5, 0), (0, 5), False),
        ((1, 2), 1e-6, (5, 0), (0, 5), False),
        ((1, 2), 0.0, (5, 0), (5, 0), False),
        ((1, 2), 0.0, (5, 0), (0, 0), False),
        ((1, 2), 0.0, (5, 1), (0, 5), False),
        ((1, 2), 0.0, (0, 0), (0, 5), False),
        ((1, 2), 0.0, (5, 0), (1, 4), False),
    ],
)
def test_a_replayed_graph_brings_the_eager_text_to_the_last_bit(
    text: tuple[int, ...], lp: float, graph: tuple[int, int], eager: tuple[int, int], holds: bool
) -> None:
    def logged(steps: tuple[int, int]) -> dict[str, Any]:
        return {"logged_steps": {"graph": steps[0], "eager": steps[1]}}

    work = [
        running("dcp2", logged(graph), answers((1, 2))),
        running("dcp2 eager", logged(eager), answers(text, lp=lp)),
    ]
    assert report(*work)[two.GRAPHS] is holds
    assert report(*work[:1])[two.GRAPHS] is None
    work[1].answers = [Answer(error="gone")]
    assert report(*work)[two.GRAPHS] is None


def test_steps_with_and_without_a_graph_are_counted_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "[TP0] {} batch, #running-req: 1, #token: 64, token usage: 0.00, cuda graph: {}, {} throughput"
    seen = [("Decode", True, "gen"), ("Decode", True, "gen"), ("Decode", False, "gen"), ("Prefill", False, "input")]
    serve(monkeypatch)
    one = running("tp1", log="\n".join(line.format(*words) for words in seen))
    one.ask(SMALL)
    assert one.found["logged_steps"] == {"graph": 2, "eager": 1}
    assert one.found["logged_prefills"] == {"graph": 0, "eager": 1}


@pytest.mark.parametrize(
    ("accept", "holds"),
    [
        ((3.0, 2.0, 4.0, 3.0), True),
        ((3.1, 1.9, 4.1, 2.9), True),
        ((2.9, 1.8, 3.9, 2.7), False),
        ((3.1, 2.2, 4.1, 3.3), False),
    ],
)
def test_acceptance_is_equal_when_the_interval_of_its_paired_difference_holds_zero(
    accept: tuple[float, ...], holds: bool
) -> None:
    pair = {"tp2 eagle 3/1/4": (3.0, 2.0, 4.0, 3.0), "dcp2 eagle 3/1/4": accept}
    work = [running(name, {"accept_each": list(each)}, answers(*[(1, 2)] * 4)) for name, each in pair.items()]
    assert report(*work)["acceptance 3/1/4 equal within its interval"] is holds
    assert report(*work)["acceptance 5/1/6 equal within its interval"] is None
    work[1].answers[0] = Answer(error="gone")
    assert report(*work)["acceptance 3/1/4 equal within its interval"] is None


def test_an_interval_too_wide_to_show_anything_is_no_result() -> None:
    pair = {"tp2 eagle 3/1/4": (3.0, 2.0, 4.0, 3.0), "dcp2 eagle 3/1/4": (4.0, 1.0, 5.0, 2.0)}
    work = [running(name, {"accept_each": list(each)}, answers(*[(1, 2)] * 4)) for name, each in pair.items()]
    assert two.compared(work)[0]["accept"]["mean"] == 0
    assert report(*work)["acceptance 3/1/4 equal within its interval"] is None


@pytest.mark.parametrize(("half", "holds"), [(0.099, True), (0.101, None)])
def test_a_tenth_of_a_token_to_either_side_is_narrow_enough(half: float, holds: bool | None) -> None:
    pair = {"left": "dcp2 eagle 3/1/4", "right": "tp2 eagle 3/1/4", "errors": 0}
    found = {"compared": [{**pair, "accept": {"mean": 0.0, "low": -half, "high": half, "n": 9}}]}
    assert report(**found)["acceptance 3/1/4 equal within its interval"] is holds


def test_beside_it_stands_the_acceptance_over_the_same_texts() -> None:
    work = [running(name, replies=answers((1, 2))) for name in ("tp2 eagle 3/1/4", "dcp2 eagle 3/1/4")]
    work[0].apart = answers((1, 2, 3), (1, 2, 3), (1, 2, 3), steps=1)
    work[1].apart = [*answers((1, 2, 3), (1, 2, 3), steps=2), *answers((1, 2, 4), steps=1)]
    (pair,) = two.compared(work)
    assert pair["apart_same_texts"] == 2
    assert pair["accept_same_texts"] == {"mean": -1.0, "low": -1.0, "high": -1.0, "n": 2}


SMALL = two.Size((40, 60), (1, 2), 4, 3, 50, 4, (1,), 30, 4, 1, 2, 2, 40, 4, 1.0)


def serve(monkeypatch: pytest.MonkeyPatch, fails: int = 0) -> list[list[Request]]:
    """Answer every batch, but the one of that number and all behind it; what was sent."""
    sent: list[list[Request]] = []

    def send_batch(port: int, requests: list[Request], timeout: float, logprobs: bool = True) -> list[Answer]:
        sent.append(requests)
        if fails and len(sent) >= fails:
            raise OSError("gone")
        return [Answer(ids=(0, 1, 2, 3), logprobs=(0.0,) * 4, verify_steps=len(one.prompt) % 3 + 1) for one in requests]

    monkeypatch.setattr(client, "send_batch", send_batch)
    monkeypatch.setattr(client, "flush", lambda port, limit: None)
    return sent


def test_every_prompt_is_sent_once_and_those_that_share_their_beginning_are_one_observation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = serve(monkeypatch)
    one = running("tp2 eagle 3/1/4")
    one.ask(SMALL)
    prompts = [request.prompt for batch in sent for request in batch]
    assert [len(batch) for batch in sent] == [1, 2, 1, 2, 2, 1]
    assert len(set(prompts)) == len(prompts) == 9
    assert len({prompt[:16] for prompt in prompts[:3]}) == 1
    assert len({prompt[0:16] for prompt in prompts[6:]}) == 3
    # Lengths 40, 41, 42 take 2, 3 and 1 steps; 60, 61, 62 take 1, 2 and 3.
    assert one.found["accept_each"] == [round((1.5 + 1 + 3) / 3, 4)] * 2 + [1.0] * 3
    assert len(one.answers) == 6 and len(one.apart) == 3
    plain = running("dcp2 checked")
    plain.ask(SMALL)
    assert not plain.apart


def test_of_a_decode_half_what_a_retraction_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "rig: offload rid=a rows=40 committed=38 out=2 jumps=0",
        "rig: offload rid=b rows=41 committed=41 out=2 jumps=0",
    ]
    one = running(
        "dcp2 half retracted", log="\n".join([*lines, "rig: lost rid=b tokens=3", "rig: lost rid=b tokens=2"])
    )
    sent: list[Request] = []

    def send_named(port: int, requests: list[Request], timeout: float) -> list[Answer]:
        sent.extend(requests)
        return [Answer(ids=(1, number), retractions=1, verify_steps=2) for number in range(len(requests))]

    monkeypatch.setattr(two, "send_named", send_named)
    one.ask(SMALL)
    assert [request.rid for request in sent] == ["half.01of02", "half.02of02"]
    told = {"retractions": 2, "lost": 5, "rows_behind": 2, "verify_steps": 4, "different_texts": 2, "errors": []}
    assert one.found == told and len(one.answers) == 2


def test_an_engine_that_stops_answering_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = serve(monkeypatch, fails=3)
    one = running("tp2", log="SelectionDiffers: 1 of 9 rows")
    two.side_by_side([one], lambda it: it.ask(SMALL))
    assert len(sent) == 3
    assert "gone" in one.found["failed"] and one.found["selections_differ"]
    assert not one.answers
    assert report(one)["every engine answered everything"] is False


def test_steps_are_timed_in_turns_and_the_first_turn_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    times = iter([9.0, 9.0, 1.0, 2.0, 1.0, 2.0, 3.0, 4.0])

    def step(self: two.Running, count: int, size: two.Size) -> float:
        order.append(self.variant.name)
        if self.variant.name == "tp1":
            raise RigError("crash", "gone")
        return next(times)

    monkeypatch.setattr(two.Running, "step", step)
    work = [running("tp2"), running("dcp2"), running("tp1")]
    two.time_in_turns(work, 8, replace(SMALL, rounds=3))
    assert order == ["tp1", "dcp2", "tp2", "tp2", "dcp2", "dcp2", "tp2", "tp2", "dcp2"]
    assert work[0].found["step_ms"] == {"8": 2.0} and work[0].found["step_ms_range"] == {"8": [1.0, 3.0]}
    assert work[1].found["step_ms_range"] == {"8": [1.0, 4.0]}
    assert "step_ms" not in work[2].found and "gone" in work[2].found["failed"]


def test_a_step_is_what_one_token_more_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer takes 50 ms, and each token 10 ms more."""
    now = [0.0]
    asked: list[list[Request]] = []

    def send_batch(port: int, requests: list[Request], timeout: float, logprobs: bool = True) -> list[Answer]:
        asked.append(requests)
        now[0] += 0.05 + 0.01 * requests[0].new
        return answers(*[(1,)] * len(requests))

    monkeypatch.setattr(client, "send_batch", send_batch)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert running("tp2").step(8, replace(SMALL, steps=4)) == pytest.approx(10.0)
    assert [[len(batch), batch[0].new, len(batch[0].prompt)] for batch in asked] == [[8, 1, 30], [8, 5, 30]]


class Where:
    """In the place of two GPUs."""

    size, backend, device = SMALL, "gloo", "cpu"

    def spec(self, variant: two.Variant, port: int) -> Any:
        return variant

    def waves(self) -> tuple[tuple[two.Variant, ...], ...]:
        return (two.VARIANTS[:3],)

    def parts(self) -> Any:
        raise ZeroDivisionError("no kernels")


@pytest.mark.parametrize("limit", [1e9, 0.0])
def test_a_part_that_fails_or_is_cut_is_named_and_takes_nothing_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: float
) -> None:
    stubs: list[Stub] = []

    def deployed(folder: Path, specs: list[two.Variant]) -> Stub:
        stubs.append(Stub("KV size: 1.5 GB"))
        return stubs[-1]

    serve(monkeypatch)
    monkeypatch.setattr(deployment, "Deployment", deployed)
    monkeypatch.setattr(deployment, "new_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(client, "send", lambda *given, **more: Answer(ids=(1,)))
    monkeypatch.setattr(client, "get", lambda *given, **more: {"max_total_num_tokens": 640})
    emptied: list[int] = []
    monkeypatch.setattr(client, "flush", lambda port, *given: emptied.append(port))
    monkeypatch.setattr(two, "collectives", lambda *given: [{"rows": 1}])
    where: Any = Where()
    out = tmp_path / "out.json"
    monkeypatch.setattr(Where, "size", replace(SMALL, unmeasured=tuple(report())))
    run = two.Run(where, {"size": {"repeats": 200, "unmeasured": tuple(report())}}, out, limit, time.monotonic(), 7.0)
    run.go(())
    run.note("ended")
    found = json.loads(out.read_text())
    assert [stub.downs for stub in stubs] == [1, 1, 1]
    assert not two.whole(found)
    assert found["parts_seconds"]["before"] == 7.0
    assert found["command_seconds"] == pytest.approx(found["seconds"] + 7, abs=0.11)
    if limit:
        assert found["parts_failed"] == {"kernels by themselves": "ZeroDivisionError: no kernels"}
        assert found["cut"] == [] and found["collectives_us"] == found["collectives_us_again"] == [{"rows": 1}]
        assert {"collectives", "start of 3 engines", "tp2 asked", "collectives again"} <= set(found["parts_seconds"])
        assert found["verdicts"]["every engine answered everything"] is True
        assert len(set(emptied)) == 3
        assert found["capacity"]["measured"] == 2.0
        assert {name for name, one in found["runs"].items() if "step_ms" in one} == {"tp2", "dcp2"}
        assert two.whole({**found, "parts_failed": {}})
        assert not two.whole({**found, "parts_failed": {}, "verdicts": {"one": False}})
    else:
        assert found["cut"][:2] == ["collectives", "kernels by themselves"]
        assert found["cut"][-1] == "collectives again"
        assert {"tp2 asked", "dcp2 pool", "steps of 1: tp2, dcp2"} <= set(found["cut"])


def test_what_was_not_measured_is_red_but_where_the_size_says_so() -> None:
    names = tuple(report())
    green: dict[str, Any] = {"verdicts": dict.fromkeys(names, True), "cut": [], "parts_failed": {}}
    for size in (two.GPU, two.CPU):
        green["size"] = {"unmeasured": size.unmeasured}
        assert two.whole(green)
        for name in names:
            assert two.whole({**green, "verdicts": {**green["verdicts"], name: None}}) is (name in size.unmeasured)
            assert not two.whole({**green, "verdicts": {**green["verdicts"], name: False}})
    assert not two.GPU.unmeasured
    assert set(two.CPU.unmeasured) < set(names) and len(two.CPU.unmeasured) == 2


def test_an_engine_that_does_not_come_up_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    nothing: Any = None
    run = two.Run(nothing, {"size": {"repeats": 2}}, tmp_path / "out.json", two.KEPT + 0.1, time.monotonic())
    run.work = [running("tp2"), running("dcp2")]
    run.work[1].is_up.set()
    run.wait(run.work)
    stubs: list[Any] = [one.deployment for one in run.work]
    assert [stub.downs for stub in stubs] == [1, 0]
    assert "not there after" in run.work[0].found["failed"]
    assert "failed" not in run.work[1].found


def test_where_texts_part_both_choices_are_told() -> None:
    left = [Answer(ids=(1, 2, 3), logprobs=(-0.1, -0.8, -2.0)), *answers((1, 2))]
    right = [Answer(ids=(1, 4, 3), logprobs=(-0.1, -0.75, -1.0)), *answers((1, 2))]
    assert two.parted(left, right) == [(-0.8, -0.75)]
    assert two.is_tie(-0.8, -0.75)
    assert not two.is_tie(-0.8, -0.95), "one choice is likelier than the other"
    assert not two.is_tie(-0.4, -0.42), "a token that is likelier than half has no equal"


GOOD = {"retractions": 3, "lost": 0, "rows_behind": 0, "different_texts": 2}


@pytest.mark.parametrize(
    ("found", "text", "holds"),
    [
        ({}, (1, 2), True),
        ({}, (1, 3), False),
        ({"retractions": 0}, (1, 2), False),
        ({"lost": 1}, (1, 2), False),
        ({"rows_behind": 1}, (1, 2), False),
        ({"different_texts": 1}, (1, 2), False),
        ({"calm": 1}, (1, 2), False),
    ],
)
def test_a_retraction_loses_nothing_and_changes_no_text(
    found: dict[str, Any], text: tuple[int, ...], holds: bool
) -> None:
    words = "retracted: nothing lost, texts as without or parted at a tie"
    work = [
        running("dcp2 half", dict(GOOD, retractions=found.get("calm", 0)), answers((1, 2), (5, 6), lp=-0.2)),
        running("dcp2 half retracted", GOOD | found, answers(text, (5, 6), lp=-0.2)),
    ]
    assert report(*work)[words] is holds
    assert report(*work[:1])[words] is None
    # As likely as the other, and no likelier than half: a tie.
    for one in work:
        one.answers = [Answer(ids=answer.ids, logprobs=(-0.7, -0.7)) for answer in one.answers]
    assert report(*work)[words] is (holds or text == (1, 3))


@pytest.mark.parametrize(
    ("steps", "retractions", "holds"),
    [
        ((7, 9), (1, 0), True),
        ((8, 9), (1, 0), True),
        ((7, 10), (1, 0), False),
        ((9, 9), (1, 0), False),
        ((6, 9), (1, 0), False),
        ((9, 9), (2, 0), True),
    ],
)
def test_a_retraction_costs_a_step_at_most(steps: tuple[int, int], retractions: tuple[int, int], holds: bool) -> None:
    def made(steps: tuple[int, int], retractions: tuple[int, int]) -> list[Answer]:
        return [
            Answer(ids=(1, number), logprobs=(0.0, 0.0), verify_steps=step, retractions=times)
            for number, (step, times) in enumerate(zip(steps, retractions, strict=True))
        ]

    calm = running("dcp2 half", dict(GOOD, retractions=0), made((7, 9), (0, 0)))
    forced = running("dcp2 half retracted", dict(GOOD, retractions=1), made(steps, retractions))
    assert report(calm, forced)["retracted: nothing lost, texts as without or parted at a tie"] is holds
    # With no text the same there is no step to compare: nothing is shown.
    calm.answers = [replace(one, ids=(2, 3), logprobs=(-0.7, -0.7)) for one in calm.answers]
    forced.answers = [replace(one, logprobs=(-0.7, -0.7)) for one in forced.answers]
    assert report(calm, forced)["retracted: nothing lost, texts as without or parted at a tie"] is False


@pytest.mark.parametrize("width", [528, 656])
def test_a_filled_pool_has_rows_of_its_own_on_every_rank_and_the_same_index_keys(width: int) -> None:
    def pool(rank: int) -> SimpleNamespace:
        dtype = torch.float8_e4m3fn if width == 656 else torch.float32
        made = SimpleNamespace(
            kv_lora_rank=512,
            kv_buffer=[torch.zeros(128, 1, width, dtype=dtype) for _ in range(2)],
            index_k_with_scale_buffer=[torch.zeros(3, 64 * 132, dtype=torch.uint8) for _ in range(2)],
        )
        filled.fill(made, rank)
        return made

    one, again, other = pool(0), pool(0), pool(1)
    for layer in range(2):
        rows = [made.kv_buffer[layer].view(torch.uint8) for made in (one, again, other)]
        assert torch.equal(rows[0], rows[1])
        assert not (rows[0] == rows[2]).all(-1).any()
        assert len(rows[0].unique(dim=0)) == 128
        keys = [made.index_k_with_scale_buffer[layer] for made in (one, other)]
        assert torch.equal(*keys)
        assert len(keys[0][:, :8192].reshape(-1, 128).unique(dim=0)) == 3 * 64
        assert (keys[0][:, 8192:].contiguous().view(torch.float32) >= 0.5).all()
    assert not torch.equal(one.kv_buffer[0].view(torch.uint8), one.kv_buffer[1].view(torch.uint8))
    if width == 656:
        raw = one.kv_buffer[0].view(torch.uint8)
        assert raw[..., :512].contiguous().view(torch.float8_e4m3fn).float().std().item() == pytest.approx(1, abs=0.05)
        assert (raw[..., 512:528].contiguous().view(torch.float32) == 1).all()
        assert raw[..., 528:].contiguous().view(torch.bfloat16).float().std().item() == pytest.approx(1, abs=0.05)


def repeated(
    added: tuple[int, int] = (50, 50), times: int = 200, texts: int = 1, at_least: int = 50, **more: Any
) -> dict[str, Any]:
    rows = {"before": [9, 9], "after": [9 + one for one in added], "at_least": at_least}
    return {"repeated": {"times": times, "different_texts": texts}, "selections_compared": rows, **more}


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        ({}, None),
        (repeated(), True),
        (repeated((60, 60)), True),
        (repeated((0, 0)), False),
        (repeated((49, 49)), False),
        (repeated((50, 60)), False),
        (repeated((0, 0), at_least=0), False),
        (repeated(times=199), False),
        (repeated(texts=2), False),
        (repeated(failed="crash"), False),
        ({"failed": "crash", "selections_differ": True}, False),
    ],
)
def test_selections_that_nobody_compared_prove_nothing(found: dict[str, Any], holds: bool | None) -> None:
    words = "selections the same on both ranks"
    assert report(running("dcp2 checked", found))[words] is holds
    assert report(running("dcp2 checked", found), running("dcp2 eagle 3/1/4", repeated()))[words] is holds
    assert report()[words] is None


class Counting(Stub):
    """An engine of two ranks that tells what it compared when its cache is emptied."""

    def __init__(self, tells: tuple[int, ...] = (1, 1, 0, 0)) -> None:
        super().__init__("SGLANG_RESEARCH_DSA_DCP_CHECK: 900 rows compared across the ranks, none differed\n")
        self.tells, self.rows, self.differed = tells, 100, 0

    def flush(self, port: int, limit: float) -> None:
        for rank in self.tells:
            self.words += f"rig: compared rank={rank} rows={self.rows} differed={self.differed}\n"
        self.words += "rig: compared rank=0 rows=7"


def repeats(monkeypatch: pytest.MonkeyPatch, engine: Counting, size: two.Size, grows: int = 15) -> two.Running:
    """Have the prompt sent over and over."""
    sent: list[tuple[int, ...]] = []

    def send_batch(port: int, requests: list[Request], timeout: float, logprobs: bool = True) -> list[Answer]:
        sent.extend(request.prompt for request in requests)
        engine.rows += grows
        return [Answer(ids=tuple(range(one.new))) for one in requests]

    monkeypatch.setattr(client, "send_batch", send_batch)
    monkeypatch.setattr(client, "flush", engine.flush)
    one = running("dcp2 checked")
    one.deployment = engine  # type: ignore[assignment]
    one.repeat(size)
    assert len(set(sent)) == 1 and len(sent) == size.repeats
    return one


def test_what_the_repetitions_added_is_told_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    one = repeats(monkeypatch, Counting(), replace(SMALL, repeats=200), grows=16)
    rows = {"before": [100, 100], "after": [3300, 3300], "at_least": 200 * 8 * 2}
    assert one.found["selections_compared"] == rows
    assert one.found["repeated"] == {"times": 200, "different_texts": 1}
    assert report(one)["selections the same on both ranks"] is True
    few = repeats(monkeypatch, Counting(), replace(SMALL, repeats=3), grows=16)
    assert few.found["repeated"]["times"] == 3
    assert report(few)["selections the same on both ranks"] is False
    # Eager prefills alone: a row each, which is less than the texts were chosen from.
    lazy = repeats(monkeypatch, Counting(), replace(SMALL, repeats=200), grows=2)
    assert report(lazy)["selections the same on both ranks"] is False
    for name in two.GPU_MODELS.values():
        assert models.get(name).config["num_hidden_layers"] == two.LAYERS
    for name in two.CPU_MODELS.values():
        assert models.get(name).config["num_hidden_layers"] == two.LAYERS


def test_a_rank_that_tells_nothing_or_has_seen_a_difference_fails_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two, "SOON", 0.0)
    for tells, words in (((0,), "[1, 0] lines"), ((1, 0, 0), "[2, 1] lines"), ((), "[0, 0] lines")):
        with pytest.raises(RigError, match=re.escape(words)):
            repeats(monkeypatch, Counting(tells), SMALL)
    silent = Counting()
    silent.flush(0, 0.0)
    silent.tells = ()
    with pytest.raises(RigError, match=re.escape("[0, 0] lines")):
        repeats(monkeypatch, silent, SMALL)
    engine = Counting()
    engine.differed = 3
    one = running("dcp2 checked")
    one.deployment = engine  # type: ignore[assignment]
    monkeypatch.setattr(client, "flush", engine.flush)
    two.side_by_side([one], lambda it: it.repeat(SMALL))
    assert one.found["selections_differ"]
    assert report(one)["selections the same on both ranks"] is False


def test_an_engine_tells_what_its_rank_compared_when_its_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    selections = importlib.import_module(two.SELECTIONS)
    check = ModuleType("sglang.srt.research.dsa_dcp_check")
    vars(check)["compared"] = lambda: {"cuda:0": [40, 1], "cpu": [2, 0]}
    research = ModuleType("sglang.srt.research")
    vars(research)["dsa_dcp_check"] = check
    for module in (ModuleType("sglang"), ModuleType("sglang.srt"), research, check):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))

    class Scheduler:
        def flush_cache(self, empty: bool) -> str:
            return f"emptied {empty}"

    scheduler: Any = SimpleNamespace(Scheduler=Scheduler)
    selections._tell(scheduler)
    assert Scheduler().flush_cache(True) == "emptied True"
    (event,) = deployment.parse_events(capsys.readouterr().err)
    assert (event.name, event.values) == ("compared", {"rank": "1", "rows": "42", "differed": "1"})
    assert waited, "the last forward was not waited for"


def test_one_case_of_the_kernels_that_does_not_hold_is_enough() -> None:
    words = "merged parts are the whole"
    assert report(kernels=[{"holds": True}, {"holds": True}])[words] is True
    assert report(kernels=[{"holds": True}, {"holds": False}])[words] is False
    assert report(kernels={"failed": "no module"})[words] is None


EAGLE = "--speculative-algorithm=EAGLE --speculative-num-steps={} --speculative-eagle-topk=1"
EAGLE += " --speculative-num-draft-tokens={}"
HALF = "--disaggregation-mode=decode --disaggregation-transfer-backend=fake"
GATE = {"SGLANG_RESEARCH_DSA_DCP": "1"}
CHECKS = {"SGLANG_RESEARCH_DSA_DCP_CHECK": "1", "PATCHBUNDLE_RIG_HOOKS": "lab.rig.gpu.selections"}
RECOVERS = {
    "SGLANG_RESEARCH_DCP_RETRACT": "1",
    "SGLANG_RESEARCH_SETTLE_BEFORE_RETRACT": "1",
    "SGLANG_RESEARCH_RETRACT_DRAFT_KV": "1",
    "SGLANG_RESEARCH_DRAFT_SEED_RECOMPUTE": "1",
    "PATCHBUNDLE_RIG_HOOKS": "lab.rig.observe,lab.rig.levers,lab.rig.gpu.filled",
}
# Of each engine: ranks, tokens of its pool, its model, its other flags, its other variables.
ENGINES: dict[str, tuple[int, int, str, str, dict[str, str]]] = {
    "tp2": (2, 2_097_152, "m", "", {}),
    "tp1": (1, 262_144, "m", "", {}),
    "dcp2": (2, 1_048_576, "m", "--dcp-size=2", GATE),
    "dcp2 eager": (2, 131_072, "m", "--dcp-size=2 --disable-cuda-graph", GATE),
    "dcp2 checked": (2, 131_072, "m", "--dcp-size=2", GATE | CHECKS),
    "tp2 eagle 3/1/4": (2, 262_144, "m", EAGLE.format(3, 4), {}),
    "dcp2 eagle 3/1/4": (2, 131_072, "m", f"--dcp-size=2 {EAGLE.format(3, 4)}", GATE | CHECKS),
    "tp2 eagle 5/1/6": (2, 262_144, "m", EAGLE.format(5, 6), {}),
    "dcp2 eagle 5/1/6": (2, 131_072, "m", f"--dcp-size=2 {EAGLE.format(5, 6)}", GATE),
    "dcp2 half": (2, 131_072, "i", f"--dcp-size=2 {EAGLE.format(5, 6)} {HALF}", GATE | RECOVERS),
    "dcp2 half retracted": (
        2,
        131_072,
        "i",
        f"--dcp-size=2 {EAGLE.format(5, 6)} {HALF}",
        {**GATE, **RECOVERS, "PATCHBUNDLE_RIG_RETRACT": "3,6,9,12,15"},
    ),
}
# What every engine has.
FLAGS = """
    --load-format=auto --sampling-backend=pytorch --grammar-backend=none --host=127.0.0.1 --port=1 --skip-server-warmup
    --max-running-requests=32 --random-seed=0 --cuda-graph-bs-decode 1 8 32 --sleep-on-idle --disable-custom-all-reduce
    --enforce-disable-flashinfer-allreduce-fusion --mem-fraction-static=0.5 --context-length=131072
    --kv-cache-dtype=fp8_e4m3 --dsa-prefill-backend=flashmla_kv --dsa-decode-backend=flashmla_kv
"""
VARIABLES = {
    "SGLANG_RESEARCH_EXACT_TOPK": "1",
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}


def test_every_engine_is_started_as_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "SGLANG_DSA_TOPK_BROADCAST"):
        monkeypatch.setenv(name, "1")  # of this process: no engine's
    where = object.__new__(two.OnGpu)
    vars(where).update(
        trees={"patched": Path("p"), "stock": Path("s")}, own=Path("h"), models={False: Path("m"), True: Path("i")}
    )
    assert ports.HOST == "127.0.0.1"
    assert [one.name for one in two.VARIANTS] == list(ENGINES)
    for variant in two.VARIANTS:
        ranks, tokens, model, flags, variables = ENGINES[variant.name]
        spec = where.spec(variant, 1)
        own = f"--model-path={model} --tp-size={ranks} --max-total-tokens={tokens} {flags}"
        assert sorted(spec.argv[3:]) == sorted(f"{FLAGS} {own}".split())
        assert spec.argv[1:3] == ("-m", "sglang.launch_server")
        told = re.compile("SGLANG_|PATCHBUNDLE_RIG_(RETRACT|HOOKS)|NCCL_|TORCH_SYMM|NVSHMEM_")
        assert {name: value for name, value in spec.env.items() if told.match(name)} == VARIABLES | variables


def test_on_a_cpu_the_same_engines_have_the_same_gates_and_hooks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    where = object.__new__(two.OnCpu)
    vars(where).update(
        folder=tmp_path, tree=SimpleNamespace(), python=Path("python"), models={False: Path("m"), True: Path("i")}
    )
    taken: list[tuple[Any, tuple[str, ...]]] = []
    monkeypatch.setattr(two, "engine_spec", lambda engine, folder, hooks: taken.append((engine, hooks)))
    for variant in two.VARIANTS:
        where.spec(variant, 1)
        engine, hooks = taken[-1]
        ranks, _, model, flags, variables = ENGINES[variant.name]
        env = {name: value for name, value in variables.items() if name != "PATCHBUNDLE_RIG_HOOKS"}
        assert engine.env == env | {"SGLANG_DSA_TOPK_BROADCAST": "1"}
        assert sorted(engine.flags) == sorted(flags.split())
        assert (engine.tp, engine.model) == (ranks, Path(model))
        last = variables.get("PATCHBUNDLE_RIG_HOOKS", "lab.rig.forks").split(",")[-1]
        assert hooks[:3] == ("lab.rig.observe", "lab.rig.levers", "lab.rig.forks") and hooks[-1] == last
    assert [one.name for wave in where.waves() for one in wave] == [one.name for one in two.VARIANTS if one.cpu]
    assert {two.CHECKED[1], "dcp2 half retracted", "tp1", "dcp2"} <= {one.name for one in two.VARIANTS if one.cpu}


def test_the_collectives_are_timed_without_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    class Rank:
        returncode = 0

        def __init__(self, argv: list[str], env: dict[str, str], **more: Any) -> None:
            started.append(env)

        def communicate(self, timeout: float = 0) -> tuple[str, str]:
            return "[]", ""

        def kill(self) -> None:
            pass

    monkeypatch.setattr(subprocess, "Popen", Rank)
    assert two.collectives("nccl", "cuda", 1) == []
    assert len(started) == 2
    for env in started:
        assert {name: value for name, value in env.items() if name in two.NO_MULTICAST} == {
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "NVSHMEM_DISABLE_NVLS": "1",
        }


@pytest.mark.parametrize("carried", [True, False])
def test_the_result_names_the_patched_files_and_whether_kernels_were_carried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, carried: bool
) -> None:
    (tmp_path / "one.py").write_text("1", encoding="ascii")
    pack.archive(tmp_path, ["one.py"], tmp_path / pack.PATCHED)
    taken: list[str] = []
    if carried:
        (tmp_path / pack.KERNELS).write_bytes(b"")
    monkeypatch.setattr(cache, "root", lambda: tmp_path)
    monkeypatch.setattr(two, "unpack", lambda given, home: {})
    monkeypatch.setattr(models, "ensure", lambda *given: tmp_path)
    monkeypatch.setattr(shutil, "unpack_archive", lambda path, *given, **more: taken.append(Path(path).name))
    made = two.OnGpu(tmp_path).made_of
    assert made == {"patched_sha256": pack.content(tmp_path / pack.PATCHED), "carried_kernels": carried}
    assert taken == ([pack.KERNELS] if carried else [])


# A row without any key has a sum of 0, whose logarithm the engine's own merge takes.
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_kernel_check_holds_for_kernels_as_they_are_and_for_no_others(
    patched: Trees, monkeypatch: pytest.MonkeyPatch, fp8: bool, ranks: int
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tree = patched("decode")
    correct = dsa_parts.file(tree / "sglang/kernels/ops/attention/dcp_kernels.py").correct_attn_out
    localise = dsa_parts.file(tree / "sglang/srt/research/kernels/dcp_localise.py").localise

    def holds(flash: Any = attention, local: Any = localise, merge: Any = correct) -> bool:
        kernel = dsa_parts.Kernel(flash, fp8, 4, 64, 6, 64)
        found: bool = dsa_parts.case(kernel, ranks, 64 * 16, merge, local, "cpu")["holds"]
        return found

    def keep(slots: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return torch.where(slots >= 0, slots // size, -1)

    def other_base(*given: Any, is_lse_base_on_e: bool) -> Any:
        return correct(*given, is_lse_base_on_e=not is_lse_base_on_e)

    assert holds()
    assert not holds(local=keep)
    assert not holds(merge=other_base)

    def reads_what_minus_one_names(**given: Any) -> Any:
        return attention.flash_mla_sparse_fwd(**{**given, "indices": given["indices"].clamp_min(0)})

    if not fp8:
        assert not holds(flash=SimpleNamespace(flash_mla_sparse_fwd=reads_what_minus_one_names))


def test_the_collectives_are_timed_by_two_processes_and_an_error_is_told() -> None:
    rows = two.collectives("gloo", "cpu", 2)
    assert [row["rows"] for row in rows] == [1, 6]
    assert all(value > 0 for row in rows for value in row.values())
    with pytest.raises(RigError, match="nothing"):
        two.collectives("nothing", "cpu", 1)


def page() -> str:
    return " ".join((ROOT / "docs" / "dsa-dcp.md").read_text(encoding="utf-8").split())


def result(name: str) -> Any:
    return json.loads((ROOT / "evidence" / "engine" / name).read_text(encoding="utf-8"))


def span(found: dict[str, Any] | None) -> str:
    """As the page tells an interval."""
    return "-" if found is None else f"{found['mean']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}] of {found['n']}"


def test_the_documentation_says_what_was_measured_of_the_kernels() -> None:
    text, found = page(), result("h200-x2.json")
    alone = [row for row in result("h200-dsa-parts.json")["rows"] if "kernel" in row]
    for cases in (alone, found["kernels"]):
        assert f"{sum(case['holds'] for case in cases)} of {len(cases)} cases hold" in text
        assert f"over 1 + the value, is {max(case['max_error'] for case in cases):.4f}" in text
        assert f"it is {min(case['wrong_base_error'] for case in cases if case['rows'] >= 3):.3f} or more" in text
    shown = [case for case in alone if case["heads"] == 64 and case["ranks"] == 2]
    assert len(shown) == 6
    for case in shown:
        row = f"| `{case['kernel']}` | {case['rows']} | {case['attention_us']:.1f} | {case['localise_us']:.1f} |"
        assert row in text
    names = ("gather queries", "gather LSE", "reduce-scatter outputs", "broadcast selection", "all-reduce hidden")
    for timed, again in zip(found["collectives_us"], found["collectives_us_again"], strict=True):
        cells = " | ".join(f"{timed[name]:.1f} / {again[name]:.1f}" for name in names)
        assert f"| {timed['rows']} | {cells} |" in text


def test_the_documentation_says_what_was_measured_of_the_engines() -> None:
    text, found = page(), result("h200-x2.json")
    for pair in found["compared"]:
        same = f"{pair['same_texts']} of {pair['requests']}"
        ties = sum(two.is_tie(*choices) for choices in pair["parted"])
        parted = f"{ties} of {len(pair['parted'])}" if pair["parted"] else "-"
        assert f"| {pair['left']} | {pair['right']} | {same} | {pair['logprob']:.4g} | {parted} |" in text
    pairs, runs = {pair["left"]: pair for pair in found["compared"]}, found["runs"]
    assert not found["cut"] and not found["parts_failed"]
    assert not [held for held in runs.values() if held["errors"] or "failed" in held]
    for name, run in runs.items():
        if "step_ms" in run:
            times = (f"{run['step_ms'][count]:.3f} ({{}} to {{}})" for count in ("1", "8", "32"))
            ranges = (run["step_ms_range"][count] for count in ("1", "8", "32"))
            cells = (cell.format(*(f"{one:.3f}" for one in ends)) for cell, ends in zip(times, ranges, strict=True))
            assert f"| {name} | {' | '.join(cells)} |" in text
    assert "They do not rank the two" in text
    for chain in ("3/1/4", "5/1/6"):
        accepted = " | ".join(f"{runs[f'{name} eagle {chain}']['accept']:.3f}" for name in ("tp2", "dcp2"))
        pair = pairs[f"dcp2 eagle {chain}"]
        assert f"| {chain} | {accepted} | {span(pair['accept'])} | {span(pair['accept_same_texts'])} |" in text
    capacity = found["capacity"]
    for name in ("tp2", "dcp2"):
        assert f"| {name} | {runs[name]['pool']['gb_as_logged']:.2f} | {capacity['tokens_a_gb'][name]:,} |" in text
    assert f"{capacity['measured']} times as many, predicted {capacity['predicted']:.2f};" in text
    assert "the ratio lies between {} and {}.".format(*capacity["between"]) in text
    pair, run = pairs["dcp2 half retracted"], runs["dcp2 half retracted"]
    assert f"{run['retractions']} retractions" in text
    assert f"{pair['same_texts']} of {pair['requests']} texts" in text
    assert f"{run['verify_steps']} verification steps in all, {runs['dcp2 half']['verify_steps']} without" in text
    for one, other in pair["parted"]:
        assert f"{one} and {other}" in text


def test_the_documentation_says_how_far_log_probabilities_are_apart() -> None:
    text, found = page(), result("h200-x2.json")
    cells = {
        pair["left"]: {cell["batch"]: cell for cell in pair["cells"]}
        for pair in found["compared"]
        if pair["left"] in ("dcp2", "tp1")
    }
    assert len(cells["dcp2"]) == len(two.GPU.lengths) * len(two.GPU.batches) == 9
    for batch, ours in cells["dcp2"].items():
        values = (one[name] for one in (ours, cells["tp1"][batch]) for name in ("logprob", "mean"))
        row = " | ".join("-" if value is None else f"{value:.4f}" for value in values)
        assert f"| {batch.replace(' x ', ' | ')} | {row} |" in text
    away = found["logprob_farther"]
    means, medians = (f"{away[name]['tp1']:.4f} | {away[name]['dcp2']:.4f}" for name in ("means", "medians"))
    assert f"| mean | {means} | {span(away)} |" in text
    ends = f"{away['median']:+.4f} [{away['median_low']:+.4f}, {away['median_high']:+.4f}] of {away['n']}"
    assert f"| median | {medians} | {ends} |" in text
    assert f"| same text as TP2 | {away['same_texts']['tp1']} | {away['same_texts']['dcp2']} |" in text
    prefills = {name: found["runs"][name]["logged_prefills"] for name in ("tp1", "tp2", "dcp2")}
    graphs = ", ".join(f"{one['graph']} of {sum(one.values())} with {name.upper()}" for name, one in prefills.items())
    assert f"Of the prefills that were logged, {graphs} ran in a CUDA graph" in text
    assert f"{away['farther']} prompts, nearer in {away['nearer']}" in text
    # A page that calls them alike, or one farther, says what the interval says.
    assert ("DCP2 is a little farther from TP2 than one rank is" in text) is (away["median_low"] > 0)


def test_the_documentation_says_how_many_selections_were_compared() -> None:
    text, found = page(), result("h200-x2.json")
    for name in two.CHECKED:
        run = found["runs"][name]
        rows = run["selections_compared"]
        added = rows["after"][0] - rows["before"][0]
        told = f"added {added:,} rows to {rows['before'][0]:,} (at least {rows['at_least']:,} demanded)"
        assert f"brought 1 text and {told}" in text
        assert run["repeated"] == {"times": 200, "different_texts": 1}
    assert "200 repetitions" in text
    # The demanded number alone would be met by prefills. Plain, every row can be told: two layers, a prompt of 5,000
    # tokens, whose last 8 are computed again each time that the rest was cached, and 8 decode steps of each repetition.
    prefill, ends, steps = (2 * rows for rows in (5000, 199 * 8, 200 * 8))
    rows = found["runs"]["dcp2 checked"]["selections_compared"]
    assert [after - before for before, after in zip(rows["before"], rows["after"], strict=True)] == 2 * [
        prefill + ends + steps
    ]
    assert f"{prefill:,} are the prefill of the first repetition, {ends:,} the ends of the other 199 prompts" in text
    assert f" {steps:,} the decode steps" in text
    drafted = found["runs"]["dcp2 eagle 3/1/4"]["selections_compared"]
    assert drafted["after"][0] - drafted["before"][0] > 3 * (5000 + 199 * 8)


def test_one_command_made_it_under_eight_minutes_of_the_files_that_it_names() -> None:
    found = result("h200-x2.json")
    text = " ".join((ROOT / "docs" / "rig.md").read_text(encoding="utf-8").split())
    assert found["seconds"] < found["command_seconds"] < 480
    assert found["parts_seconds"]["before"] > 0, "the boundary was not timed with it"
    assert f"took {found['command_seconds']} seconds" in text
    assert ("the kernels beside the archives that an earlier run had compiled" in text) is found["carried_kernels"]
    assert re.fullmatch("[0-9a-f]{64}", found["patched_sha256"])
    assert {"lab/rig/gpu/selections.py", "lab/rig/gpu/counts.py", "lab/rig/gpu/filled.py"} <= set(found["modules"])


def test_each_verdict_stands_in_the_documentation() -> None:
    text, found = page(), result("h200-x2.json")
    # What was measured is judged by the rule of today: the file's own verdicts are not taken on trust.
    assert found["verdicts"] == two.verdicts(found)
    for words, holds in found["verdicts"].items():
        assert f"| {words} | {SAID[holds]} |" in text


@pytest.mark.parametrize("name", ["README.md", "docs/limits.md", "docs/rig.md"])
def test_other_pages_say_how_many_verdicts_hold(name: str) -> None:
    verdicts = result("h200-x2.json")["verdicts"]
    text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    told = re.findall(r"(\d+) of (\d+) verdicts", text)
    assert told == [(str(sum(holds is True for holds in verdicts.values())), str(len(verdicts)))]
    assert "missed what" not in text


def test_a_batch_goes_as_one_body_under_the_names_of_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []

    def post(port: int, path: str, body: Any, timeout: float) -> Any:
        bodies.append(body)
        meta = {"num_retractions": 2, "spec_verify_ct": 3, "output_token_logprobs": [[-0.5, 4, None]]}
        return [{"output_ids": [4], "meta_info": meta} for _ in body["input_ids"]]

    monkeypatch.setattr(client, "post", post)
    named = [Request((1, 2), 1, "x", "half.01of02"), Request((3,), 1, "y", "half.02of02")]
    found = two.send_named(1, named, 1.0)
    assert [(one.rid, one.tag, one.retractions, one.verify_steps) for one in found] == [
        ("half.01of02", "x", 2, 3),
        ("half.02of02", "y", 2, 3),
    ]
    assert [body["rid"] for body in bodies] == [["half.01of02", "half.02of02"]]
    monkeypatch.setattr(client, "post", lambda *given: [])
    with pytest.raises(RigError, match="shorter"):
        two.send_named(1, named, 1.0)
