"""The patch settle-before-retract: what overlap scheduling left unread is read before a decode engine retracts.

Scheduler, event loop, batches, queues, relay, allocator and pools are the tree's own; see `node` for the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.engine.decode.node import PAGE, Node, Settings, drain, text
from tests.engine.decode.world import GATES, World

Tree = Callable[[str], Path]
KINDS = pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])


@pytest.fixture(scope="module")
def old(stock: Tree) -> World:
    return World(stock("decode"))


@pytest.fixture(scope="module")
def new(patched: Tree) -> World:
    return World(patched("decode"), ["settle"])


@pytest.fixture(scope="module")
def ungated(patched: Tree) -> World:
    return World(patched("decode"))


def force(node: Node, *rounds: int) -> Iterator[Callable[[Node], None]]:
    """A plan that forces a retraction in these rounds, counted from 1, and drains."""
    for count, action in enumerate(drain(node), 1):
        yield Node.retract if count in rounds else action


def two(world: World, speculative: bool, *rounds: int, **options: Any) -> Node:
    """Two requests, retraction forced in ``rounds``, run to the end."""
    node = Node(world, speculative=speculative, **options)
    node.request([5, 6, 7, 8, 9], 20)
    node.request([1, 2, 3], 15)
    node.run(force(node, *rounds))
    return node


def texts(node: Node) -> list[list[int]]:
    return [list(seen.request.output_ids_through_stop) for seen in node.requests]


def expected(node: Node) -> list[list[int]]:
    return [text(seen.prompt, seen.new) for seen in node.requests]


# The event loop, as three traces

HEAD = ["run 1", "run 2", "result 1", "run 3", "result 2", "run 4", "result 3"]


def test_the_unpatched_loop_retracts_before_it_reads_the_last_result(old: World) -> None:
    with old.entered():
        node = two(old, False, 5)
    assert node.trace[:11] == [*HEAD, "offload r0", "run 5", "result 4", "run 6"]
    assert texts(node) == expected(node)


def test_the_patched_loop_reads_it_first_and_keeps_its_overlap(new: World) -> None:
    with new.entered():
        node = two(new, False, 5)
    assert node.trace[:14] == [*HEAD, "result 4", "offload r0", "run 5", "run 6", "result 5", "run 7", "result 6"]
    assert node.trace[-2:] == ["result 20", "result 21"]
    assert texts(node) == expected(node)


def test_without_the_reset_of_the_last_batch_the_loop_loses_its_overlap_and_ends_in_an_error(new: World) -> None:
    with new.entered():
        settle = new.module("research.settle")
        stock = settle.before_retract

        def forgetful(scheduler: Any, batch: Any) -> None:
            last = scheduler.last_batch
            stock(scheduler, batch)
            scheduler.last_batch = last

        node = Node(new, speculative=False)
        node.request([5, 6, 7, 8, 9], 20)
        node.request([1, 2, 3], 15)
        with (
            mock.patch.object(settle, "before_retract", forgetful),
            pytest.raises(IndexError, match="pop from an empty deque"),
        ):
            node.run(force(node, 5))
    assert node.trace[:13] == [*HEAD, "result 4", "offload r0", "run 5", "result 5", "run 6", "result 6"]


# What is lost, and what is counted


@KINDS
def test_a_retraction_loses_no_token_and_counts_the_rows_it_saves(old: World, new: World, speculative: bool) -> None:
    with old.entered():
        before = two(old, speculative, 4, 7, 9)
    with new.entered():
        after = two(new, speculative, 4, 7, 9)
    behind = [[gap for seen in node.requests for gap in seen.rows_behind] for node in (before, after)]
    assert behind[0] and set(behind[0]) == {0 if speculative else 1}
    assert behind[1] and set(behind[1]) == {0}
    assert before.lost >= len(behind[0]) and after.lost == 0
    assert texts(before) == texts(after) == expected(after)


@KINDS
def test_without_the_gate_every_outcome_is_the_unpatched_engines(old: World, ungated: World, speculative: bool) -> None:
    with old.entered():
        before = two(old, speculative, 3, 5, 8, 9, 12)
    with ungated.entered():
        after = two(ungated, speculative, 3, 5, 8, 9, 12)
    assert (after.trace, after.lost, texts(after)) == (before.trace, before.lost, texts(before))
    assert [seen.rows_behind for seen in after.requests] == [seen.rows_behind for seen in before.requests]


@KINDS
def test_rounds_without_a_retraction_are_the_unpatched_engines(old: World, new: World, speculative: bool) -> None:
    with old.entered():
        before = two(old, speculative)
    with new.entered():
        after = two(new, speculative)
    assert after.trace == before.trace and after.retractions == 0


def test_a_result_that_finishes_a_request_makes_room_by_itself(old: World, new: World) -> None:
    """When memory runs out, the result that nobody has read yet is the last of a request: none need be retracted."""
    retractions = {}
    for name, world in (("old", old), ("new", new)):
        with world.entered():
            node = Node(world, speculative=False, pages=6, slots=2)
            node.queue.num_reserved_decode_tokens = 0
            node.request([1] * (2 * PAGE), 3)  # three pages; its last token is made in step 2
            node.request([2] * (3 * PAGE - 2), 12)  # three pages; step 3 needs a seventh
            node.run(drain(node))
            assert texts(node) == expected(node)
            retractions[name] = node.retractions
    assert retractions == {"old": 1, "new": 0}


@KINDS
def test_memory_that_really_runs_out_still_retracts(new: World, speculative: bool) -> None:
    with new.entered():
        node = Node(new, speculative=speculative, pages=14, slots=4)
        node.queue.num_reserved_decode_tokens = 0
        for start in (3, 5, 7):
            node.request([start] * 6, 24)
        node.run(drain(node))
    assert node.retractions >= 1 and node.lost == 0
    assert texts(node) == expected(node)


def test_a_single_request_is_never_retracted_but_may_be_settled(new: World) -> None:
    with new.entered():
        node = Node(new, speculative=False)
        node.request([4, 5], 12)
        node.run(force(node, 3, 4, 5))
    assert node.retractions == 0 and texts(node) == expected(node)


def test_everything_that_is_queued_is_read_in_order(new: World) -> None:
    with new.entered():
        settle = new.module("research.settle")
        read: list[int] = []
        scheduler = SimpleNamespace(
            result_queue=deque([(1, "a"), (2, "b"), (3, "c")]),
            last_batch="the last",
            forward_ct=7,
            process_batch_result=lambda batch, result: read.append(batch),
        )
        batch = SimpleNamespace(
            filter_batch=lambda: None, is_empty=lambda: False, check_decode_mem=lambda: False, reqs=[]
        )
        settle.before_retract(scheduler, batch)
        assert read == [1, 2, 3] and scheduler.last_batch is None and not scheduler.result_queue
        scheduler.last_batch, scheduler.result_queue = "the last", deque([(4, "d")])
        batch.check_decode_mem = lambda: True
        settle.before_retract(scheduler, batch)
        assert read == [1, 2, 3] and scheduler.last_batch == "the last"
        batch.is_empty, batch.check_decode_mem = (lambda: True), lambda: False
        settle.before_retract(scheduler, batch)
        assert read == [1, 2, 3], "an empty batch has nothing to retract"


def test_a_step_whose_last_request_finishes_while_it_settles_is_idle(new: World) -> None:
    with new.entered():
        node = Node(new, speculative=False)
        seen = node.request([4, 5], 3)
        node.run(force(node, 3))
    assert seen.request.finished() and node.trace[-1] == "idle" and not node.scheduler.result_queue


# A request whose history does not fit its rows


@pytest.mark.parametrize("retracted", [True, False], ids=["retracted", "kept"])
def test_a_request_out_of_step_fails_with_a_message_and_the_others_go_on(new: World, retracted: bool) -> None:
    with new.entered():
        node = Node(new, speculative=True)
        first, second = node.request([5, 6, 7, 8, 9], 40), node.request([1, 2, 3, 4], 40)
        bad, good = (first, second) if retracted else (second, first)

        def plan() -> Iterator[Callable[[Node], None]]:
            for count, action in enumerate(drain(node), 1):
                if count == 4 and retracted:  # the engine retracts the shorter history
                    bad.request.output_ids.pop()
                elif count == 4:
                    bad.request.output_ids.append(11)
                yield Node.retract if count == 4 else action

        node.run(plan())
    reason = bad.request.finished_reason.to_json()
    assert reason["type"] == "abort" and reason["status_code"] == 500
    assert GATES["settle"] in reason["message"] and "committed KV rows for a history of" in reason["message"]
    assert bool(bad.rows_behind) == retracted
    assert list(good.request.output_ids_through_stop) == text(good.prompt, good.new)
    assert len(node.allocator.free_pages) + len(node.allocator.release_pages) == node.free_pages


def test_a_request_that_is_being_aborted_anyway_keeps_its_own_reason(new: World) -> None:
    with new.entered():
        node = Node(new, speculative=True)
        node.request([5, 6, 7, 8, 9], 30)
        seen = node.request([1, 2, 3], 30)

        def plan() -> Iterator[Callable[[Node], None]]:
            for count, action in enumerate(drain(node), 1):
                if count == 4:
                    seen.request.output_ids.append(11)
                    node.abort(seen)
                yield Node.retract if count == 4 else action

        node.run(plan())
    assert seen.request.finished_reason.to_json()["message"] == "Aborted"


def test_a_reason_to_end_that_no_result_has_taken_up_stays(new: World) -> None:
    """A request that joined in this very round is in no result: what told it to end is still there."""
    with new.entered():
        settle = new.module("research.settle")
        request = SimpleNamespace(
            rid="r", finished=lambda: False, seqlen=9, kv_committed_len=4, to_finish="told before"
        )
        scheduler = SimpleNamespace(result_queue=deque(), last_batch=None, forward_ct=1)
        batch = SimpleNamespace(
            filter_batch=lambda: None, is_empty=lambda: False, check_decode_mem=lambda: False, reqs=[request]
        )
        settle.before_retract(scheduler, batch)
        assert request.to_finish == "told before"
        request.to_finish = None
        settle.before_retract(scheduler, batch)
        assert "4 committed KV rows for a history of 8" in request.to_finish.message


def test_a_request_that_the_settled_results_finish_is_not_judged(new: World) -> None:
    """Its last result may have brought more rows than its history kept; it is at its end, and is not retracted."""
    with new.entered():
        settle = new.module("research.settle")
        ended: list[str] = []
        request = SimpleNamespace(rid="r", finished=lambda: bool(ended), seqlen=9, kv_committed_len=11, to_finish=None)
        scheduler = SimpleNamespace(
            result_queue=deque([("batch", "result")]),
            last_batch="the last",
            forward_ct=1,
            process_batch_result=lambda batch, result: ended.append("by length"),
        )
        batch = SimpleNamespace(
            filter_batch=lambda: None, is_empty=lambda: False, check_decode_mem=lambda: False, reqs=[request]
        )
        settle.before_retract(scheduler, batch)
        assert ended and vars(request)["to_finish"] is None
        ended.clear()
        settle.before_retract(scheduler, batch)
        assert "11 committed KV rows for a history of 8" in request.to_finish.message


# Where the gate is refused


def engine(**changes: Any) -> Any:
    arguments = Settings(dllm_algorithm=None)
    one = Settings(
        server_args=arguments,
        disaggregation_mode=SimpleNamespace(value="decode"),
        enable_overlap=True,
        ps=SimpleNamespace(pp_size=1),
        req_to_token_pool=SimpleNamespace(),
    )
    for name, value in changes.items():
        setattr(arguments if name in ARGUMENTS else one, name, value)
    return one


ARGUMENTS = ("dllm_algorithm", "enable_hierarchical_cache", "disaggregation_decode_enable_offload_kvcache")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"disaggregation_mode": SimpleNamespace(value="prefill")}, "--disaggregation-mode decode"),
        ({"disaggregation_mode": SimpleNamespace(value="null")}, "--disaggregation-mode decode"),
        ({"enable_overlap": False}, "overlap scheduling"),
        ({"ps": SimpleNamespace(pp_size=2)}, "one pipeline stage, found 2"),
        ({"dllm_algorithm": "LowConfidence"}, "autoregressive"),
        ({"enable_hisparse": True}, "HiSparse"),
        ({"enable_hierarchical_cache": True}, "hierarchical cache"),
        ({"disaggregation_decode_enable_offload_kvcache": True}, "offloaded KV"),
        ({"req_to_token_pool": SimpleNamespace(mamba_pool=object())}, "position alone; SimpleNamespace has state"),
    ],
)
def test_an_engine_that_it_was_not_made_for_does_not_start(
    new: World, ungated: World, changes: dict[str, Any], told: str
) -> None:
    with new.entered():
        settle = new.module("research.settle")
        settle.admit(engine())
        with pytest.raises(settle.SettleRefused, match=told) as error:
            settle.admit(engine(**changes))
        assert GATES["settle"] in str(error.value)
    with ungated.entered():
        ungated.module("research.settle").admit(engine(**changes))


def test_a_gate_that_is_neither_on_nor_off_stops_the_start(patched: Tree) -> None:
    world = World(patched("decode"), **{GATES["settle"]: "perhaps"})
    with world.entered(), pytest.raises(ValueError, match="neither on"):
        world.module("research.settle")


def test_the_engine_asks_at_its_start_and_in_each_step(patched: Tree) -> None:
    text_of = (patched("decode") / "sglang/srt/managers/scheduler.py").read_text(encoding="utf-8")
    start = text_of.index("def init_disaggregation")
    assert start < text_of.index("settle.admit(self)") < text_of.index("get_draft_kv_pool(", start)
    step = text_of.index("def update_running_batch")
    assert step < text_of.index("settle.before_retract(self, batch)") < text_of.index("batch.filter_batch()", step)


def test_the_model_of_these_tests_notices_one_wrong_row(new: World) -> None:
    with new.entered():
        node = Node(new, speculative=False)
        seen = node.request([4, 5, 6], 12)

        def plan() -> Iterator[Callable[[Node], None]]:
            for count, action in enumerate(drain(node), 1):
                if count == 4:
                    slot = int(node.slots.req_to_token[seen.request.req_pool_idx, 1])
                    node.target.kv_buffer[0][slot] += 1
                yield action

        node.run(plan())
    assert texts(node) != expected(node)
