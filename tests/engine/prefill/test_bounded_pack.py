"""bounded-pack: a DCP relayout goes through the pack buffer in slices, and a doubtful buffer is never written again.

The real sender and worker of the patched file run beside those of the unpatched one; see pack_rig.py.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.load import stub
from tests.engine.prefill.pack_rig import GATE, PEER, Engine, Metric, Plan, Tree, World, intact

Root = Callable[[str], Path]
OTHER = "127.0.0.1:2"
THIRD = "127.0.0.1:3"


@pytest.fixture(scope="module")
def base(stock: Root) -> Tree:
    return Tree(stock("prefill"))


@pytest.fixture(scope="module")
def off(patched: Root) -> Tree:
    return Tree(patched("prefill"))


@pytest.fixture(scope="module")
def on(patched: Root) -> Tree:
    return Tree(patched("prefill"), gate="1")


@contextmanager
def counts(tree: Tree) -> Iterator[dict[str, int]]:
    """Give how far the tree's counters move within the block (filled in at its end)."""
    moved: dict[str, int] = {}
    before = tree.pack.COUNTERS.snapshot()
    yield moved
    moved.update({name: n - before[name] for name, n in tree.pack.COUNTERS.snapshot().items() if n != before[name]})


def fails_at(index: int, status: int = -7) -> Callable[[int], int | None]:
    return lambda call: status if call == index else None


def trusted(tree: Tree, buffer: Any) -> bool:
    """Tell by behaviour whether the tree would still pack into ``buffer``: a fitting send reads it."""
    world, engine = World(), Engine()
    plan = world.plan(16)
    assert tree.send(tree.manager(world, engine), world, plan, buffer) == 0
    assert world.arrived(plan)
    return engine.reads(buffer)


# --- gate unset: the base's own behaviour ---------------------------------------------------------------------------

BUFFERS = {
    "no buffer": None,
    "less than a row": 71,
    "one row": 72,
    "too small": 72 * 20,
    "exact": 72 * 56,
    "large": 9000,
}


@pytest.mark.parametrize("custom_pool", [False, True], ids=["batched", "custom pool"])
@pytest.mark.parametrize("size", BUFFERS.values(), ids=BUFFERS)
def test_with_the_gate_unset_every_transferred_block_and_call_is_the_stock_one(
    base: Tree, off: Tree, size: int | None, custom_pool: bool
) -> None:
    world = World(threads=1)
    buffer = None if size is None else base.buffer(size)
    plan = world.plan(111, rank=1, offset=1)
    calls = []
    for tree in (base, off):
        engine = Engine()
        assert tree.send(tree.manager(world, engine, custom_pool=custom_pool), world, plan, buffer) == 0
        assert world.arrived(plan)
        world.clear()
        calls.append(engine.calls)
    assert calls[0] == calls[1]
    assert buffer is None or "_research_pack_state" not in vars(buffer)


@pytest.mark.parametrize("custom_pool", [False, True], ids=["batched", "custom pool"])
def test_with_the_gate_unset_a_failure_leaves_the_buffer_in_use_as_in_stock(
    base: Tree, off: Tree, custom_pool: bool
) -> None:
    for tree in (base, off):
        world, engine = World(threads=1), Engine(fails_at(0))
        manager, buffer = tree.manager(world, engine, custom_pool=custom_pool), tree.buffer(9000)
        assert tree.send(manager, world, world.plan(64), buffer) == -7
        calls = len(engine.calls)
        assert tree.send(manager, world, world.plan(64), buffer) == 0
        assert engine.reads(buffer, since=calls)


def test_with_the_gate_unset_the_sender_is_not_even_wrapped(base: Tree, off: Tree, on: Tree) -> None:
    sender = off.conn.MooncakeKVManager.send_kvcache_dcp
    assert not hasattr(sender, "__wrapped__")
    assert sender.__code__.co_varnames[:12] == base.conn.MooncakeKVManager.send_kvcache_dcp.__code__.co_varnames[:12]
    assert hasattr(on.conn.MooncakeKVManager.send_kvcache_dcp, "__wrapped__")


def test_with_the_gate_unset_the_worker_sends_says_and_keeps_what_the_stock_worker_does(base: Tree, off: Tree) -> None:
    def run(tree: Tree) -> tuple[Any, ...]:
        world, engine = World(), Engine(fails_at(1))
        plans = [world.plan(100), world.plan(60), world.plan(80)]
        manager, buffer = tree.manager(world, engine), tree.buffer(72 * 40)
        manager._dcp_pack_buffers = [buffer]
        for room, (plan, peer) in enumerate(zip(plans, (PEER, OTHER, THIRD), strict=True)):
            tree.enlist(manager, world, room, plan, peer)
        tree.work(manager, world, [tree.chunk(room, plan) for room, plan in enumerate(plans)])
        assert "_research_pack_state" not in vars(buffer)
        places = [*world.source, *world.target, buffer.buffer, world.aux_source, world.aux_target]

        def place(address: int) -> tuple[int, int]:
            """Make an address comparable between two runs: which memory, and how far into it."""
            for number, held in enumerate(places):
                if 0 <= address - held.data_ptr() < held.numel():
                    return number, address - held.data_ptr()
            raise AssertionError("an address outside every pool")

        calls = [(peer, [(place(s), place(t), n) for s, t, n in blocks]) for peer, blocks in engine.calls]
        return calls, manager.told, manager.request_status, manager.failed_sessions, dict(manager.session_failures)

    assert run(base) == run(off)


def test_with_the_gate_unset_no_argument_is_refused(off: Tree) -> None:
    off.pack.check_start(SimpleNamespace())


def test_a_gate_word_that_is_neither_on_nor_off_stops_the_import(patched: Root) -> None:
    with pytest.raises(ValueError, match=f"{GATE}='maybe'"):
        Tree(patched("prefill"), gate="maybe")


PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def sends(draw: st.DrawFn) -> tuple[World, Plan, int, bool]:
    """Draw pools, a send between permuted pages, a buffer size in bytes, and whether layers go one by one."""
    page = draw(st.sampled_from([1, 2, 4, 8]))
    lens = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    dcp = draw(st.integers(2, 4))
    world = World(lens=lens, page=page, pages=24, seed=draw(st.integers(0, 9)), threads=draw(st.integers(1, 3)))
    tokens = draw(st.integers(0, 20 * page))
    offset = draw(st.integers(0, 5))
    prefix = draw(st.integers(0, 3)) * page * dcp
    plan = world.plan(tokens, dcp=dcp, rank=draw(st.integers(0, dcp - 1)), offset=offset, prefix=prefix)
    rows = draw(st.one_of(st.integers(0, 1), st.integers(len(plan.pairs(page)) // 6 + 1, 12 * page)))
    return world, plan, rows * world.row + draw(st.integers(0, world.row - 1)), draw(st.booleans())


@PROPERTY
@given(sends())
def test_any_send_is_delivered_exactly_and_within_the_buffer(
    base: Tree, off: Tree, on: Tree, drawn: tuple[World, Plan, int, bool]
) -> None:
    world, plan, size, custom_pool = drawn
    buffer, made = on.buffer(max(size, 1)), {}
    for name, tree in (("stock", base), ("off", off), ("on", on)):
        made[name] = engine = Engine()
        assert tree.send(tree.manager(world, engine, custom_pool=custom_pool), world, plan, buffer) == 0
        assert world.arrived(plan) and intact(buffer) and not engine.torn
        world.clear()
    assert sorted(made["stock"].blocks) == sorted(made["off"].blocks)
    rows = len(plan.pairs(world.page))
    if buffer.get_size() >= rows * world.row or buffer.get_size() < world.row:
        assert sorted(made["on"].blocks) == sorted(made["stock"].blocks)
    else:
        assert all(buffer.get_ptr() <= s < buffer.get_ptr() + buffer.get_size() for s, _, _ in made["on"].blocks)
    world.executor.shutdown()


# --- gate set: delivery in slices -----------------------------------------------------------------------------------

SENDS = {
    "one whole stretch": {"tokens": 240},
    "odd tail": {"tokens": 233},
    "the other rank, odd tail": {"tokens": 233, "rank": 1},
    "early sent prefix": {"tokens": 200, "offset": 4},
    "prefix that splits a target page": {"tokens": 200, "offset": 3, "rank": 1},
    "prefix known to the peer": {"tokens": 200, "prefix": 32},
    "both prefixes": {"tokens": 187, "offset": 5, "prefix": 48, "rank": 1},
    "four ranks": {"tokens": 301, "dcp": 4, "rank": 3},
    "four ranks, prefix in the middle of a page": {"tokens": 301, "dcp": 4, "rank": 2, "offset": 7, "prefix": 64},
}
ROWS = {"pages": 24, "pages and a bit": 37, "less than a page": 7}


@pytest.mark.parametrize("custom_pool", [False, True], ids=["batched", "custom pool"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("send", SENDS.values(), ids=SENDS)
def test_a_send_beyond_the_buffer_arrives_byte_for_byte(
    on: Tree, send: dict[str, int], rows: int, custom_pool: bool
) -> None:
    world, engine = World(lens=(24, 7, 40)), Engine()
    plan, buffer = world.plan(**send), on.buffer(rows * world.row + 17)
    with counts(on) as moved:
        assert on.send(on.manager(world, engine, custom_pool=custom_pool), world, plan, buffer) == 0
    assert world.arrived(plan)
    assert intact(buffer)
    assert not engine.torn
    sent = len(plan.pairs(world.page))
    assert moved["triggers"] == 1 and moved["bytes"] == sent * world.row
    assert moved["slices"] >= -(-sent // rows) and len(engine.calls) == moved["slices"] * (3 if custom_pool else 1)
    world.executor.shutdown()


def test_a_buffer_of_one_row_still_delivers(on: Tree) -> None:
    world, engine = World(lens=(24, 7)), Engine()
    plan, buffer = world.plan(41, rank=1), on.buffer(world.row)
    assert on.send(on.manager(world, engine), world, plan, buffer) == 0
    assert world.arrived(plan) and intact(buffer)
    assert len(engine.calls) == 20


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(29, [20, 24, 24, 24, 24, 24, 24, 24, 12]), (8, [4, *[8] * 24, 4]), (7, [*[7] * 28, 4])],
    ids=["pages", "one page", "less than a page"],
)
def test_a_slice_holds_as_many_whole_pages_as_fit_and_ends_where_a_page_ends(
    on: Tree, rows: int, sizes: list[int]
) -> None:
    world, engine = World(), Engine()
    plan, buffer = world.plan(400, offset=1), on.buffer(rows * world.row)
    assert on.send(on.manager(world, engine), world, plan, buffer) == 0
    assert [sum(length for _, _, length in blocks) // world.row for _, blocks in engine.calls] == sizes


@pytest.mark.parametrize("send", SENDS.values(), ids=SENDS)
def test_slices_need_no_more_descriptors_than_a_buffer_that_holds_everything(on: Tree, send: dict[str, int]) -> None:
    world = World()
    plan, made = world.plan(**send), []
    plan.target_pages = plan.target_pages % (world.pages // 2) * 2  # no page follows another, so no run spans two
    for size in (29 * world.row, 9999 * world.row):
        engine = Engine()
        assert on.send(on.manager(world, engine), world, plan, on.buffer(size)) == 0
        made.append(sorted((target, length) for _, target, length in engine.blocks))
    assert made[0] == made[1]


def test_a_peer_with_more_layers_gets_those_of_this_stage(on: Tree) -> None:
    world, engine = World(), Engine()
    plan, manager = world.plan(200), on.manager(world, engine)
    manager.kv_args.prefill_start_layer = 2
    elsewhere = [torch.zeros_like(world.target[0]) for _ in range(2)]
    ours, world.target = world.target, [*elsewhere, *world.target]
    assert on.send(manager, world, plan, on.buffer(24 * world.row)) == 0
    world.target = ours
    assert world.arrived(plan)
    assert not any(bool(pool.any()) for pool in elsewhere)


def test_lengths_beyond_the_layers_of_this_stage_are_left_out(on: Tree) -> None:
    world, engine = World(), Engine()
    plan, buffer = world.plan(200), on.buffer(24 * world.row)
    world.lens = (*world.lens, 999)
    assert on.send(on.manager(world, engine), world, plan, buffer) == 0
    assert world.arrived(plan)
    assert len(engine.calls) == 5


def test_layers_paired_by_their_ids_arrive_in_the_right_pools(on: Tree) -> None:
    world, engine = World(), Engine()
    plan, manager = world.plan(200), on.manager(world, engine)
    manager.kv_args.kv_layer_ids = [4, 5, 6]
    with on.active():
        status = manager.send_kvcache_dcp(
            PEER,
            plan.source_pages,
            [world.target[i].data_ptr() for i in (2, 0, 1)],
            plan.target_pages,
            dcp_token_item_lens=list(world.lens),
            dst_dcp_size=2,
            dst_dcp_rank=0,
            src_page_offset=0,
            decode_prefix_len=0,
            num_kv_tokens=plan.tokens,
            executor=world.executor,
            dst_layer_ids=[6, 4, 5],
            pack_buffer=on.buffer(24 * world.row),
        )
    assert status == 0
    assert world.arrived(plan)


# --- gate set: sends that stay stock --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "extra", "slices"),
    [(56, 0, 0), (56, -1, 2), (55, 0, 2), (57, 0, 0)],
    ids=["equal", "a byte less", "a row less", "more"],
)
def test_a_send_that_just_fits_goes_in_one_shot(on: Tree, base: Tree, rows: int, extra: int, slices: int) -> None:
    world, engine, stock_engine = World(), Engine(), Engine()
    plan, buffer = world.plan(112), on.buffer(rows * 72 + extra)
    with counts(on) as moved:
        assert on.send(on.manager(world, engine), world, plan, buffer) == 0
    assert moved.get("slices", 0) == slices
    assert world.arrived(plan)
    assert base.send(base.manager(world, stock_engine), world, plan, buffer) == 0
    assert (engine.calls == stock_engine.calls) == (slices == 0)


def test_a_buffer_below_one_row_leaves_the_send_to_stock(on: Tree, base: Tree) -> None:
    world, engines = World(), (Engine(), Engine())
    plan, buffer = world.plan(112), on.buffer(71)
    with counts(on) as moved:
        for tree, engine in zip((base, on), engines, strict=True):
            assert tree.send(tree.manager(world, engine), world, plan, buffer) == 0
    assert engines[0].calls == engines[1].calls
    assert not moved


def test_no_rows_for_this_rank_touch_nothing(on: Tree) -> None:
    world, engine, buffer = World(), Engine(), on.buffer(9000)
    with counts(on) as moved:
        assert on.send(on.manager(world, engine), world, world.plan(1, rank=1), buffer) == 0
        assert on.send(on.manager(world, engine), world, world.plan(0), buffer) == 0
    assert not engine.calls and not moved
    assert bool((buffer.fenced == 0xA5).all())


def test_a_send_that_cannot_be_planned_raises_as_in_stock_and_costs_no_buffer(on: Tree, base: Tree) -> None:
    world, buffer = World(), on.buffer(20 * 72)
    plan = world.plan(100)
    plan.target_pages = plan.target_pages[:2]
    messages = []
    for tree in (base, on):
        with pytest.raises(ValueError, match="Insufficient destination DCP pages") as caught:
            tree.send(tree.manager(world, Engine()), world, plan, buffer)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert trusted(on, buffer)


def test_a_failed_send_that_never_used_the_buffer_costs_no_buffer(on: Tree) -> None:
    world, buffer = World(lens=(600, 600)), on.buffer(1100)
    with counts(on) as moved:
        assert on.send(on.manager(world, Engine(fails_at(0))), world, world.plan(64), buffer) == -7
    assert not moved
    assert trusted(on, buffer)


# --- gate set: the buffer is not touched while it is read -----------------------------------------------------------


@pytest.mark.parametrize("custom_pool", [False, True], ids=["batched", "custom pool"])
def test_the_buffer_does_not_change_while_a_slow_transfer_of_a_slice_is_pending(on: Tree, custom_pool: bool) -> None:
    world = World()
    plan, buffer = world.plan(240), on.buffer(24 * world.row)
    during: list[bool] = []
    together = threading.Barrier(3 if custom_pool else 1)

    def act(index: int) -> None:
        together.wait(10)
        before = buffer.buffer.clone()
        time.sleep(0.03 if index % 3 == 0 else 0.001)
        during.append(torch.equal(before, buffer.buffer))

    engine = Engine(act)
    assert on.send(on.manager(world, engine, custom_pool=custom_pool), world, plan, buffer) == 0
    assert all(during) and len(during) == len(engine.calls) == (15 if custom_pool else 5)
    assert not engine.torn
    assert world.arrived(plan)
    assert engine.most_running == (3 if custom_pool else 1)


def test_the_next_slice_waits_for_the_slowest_of_many_layers(on: Tree) -> None:
    world, gathered = World(lens=(16,) * 6, threads=6), []
    slow_may_end = threading.Event()
    plan, buffer = world.plan(96), on.buffer(24 * world.row)

    def act(index: int) -> None:
        if index == 2:
            assert slow_may_end.wait(10)

    engine, pack = Engine(act), on.dcp_pack.try_pack_dcp_src

    def watched(**kwargs: Any) -> Any:
        gathered.append(engine.running)
        return pack(**kwargs)

    with mock.patch.object(on.dcp_pack, "try_pack_dcp_src", watched):
        sender = threading.Thread(
            target=on.send, args=(on.manager(world, engine, custom_pool=True), world, plan, buffer)
        )
        sender.start()
        deadline = time.monotonic() + 10
        while engine.running != 1 or len(engine.calls) < 6:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(0.05)
        assert len(engine.calls) == 6  # five layers are done, none of the next slice has begun
        slow_may_end.set()
        sender.join(10)
    assert gathered == [0, 0]
    assert not engine.torn
    assert world.arrived(plan)


# --- gate set: failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("custom_pool", [False, True], ids=["batched", "custom pool"])
@pytest.mark.parametrize("bad", [0, 1, 4], ids=["first", "second", "last"])
def test_a_slice_that_fails_ends_the_send_and_the_buffers_use(on: Tree, bad: int, custom_pool: bool) -> None:
    world = World(threads=1)
    plan, buffer = world.plan(240), on.buffer(24 * world.row)
    engine = Engine(fails_at(bad * 3 if custom_pool else bad))
    manager = on.manager(world, engine, custom_pool=custom_pool)
    with counts(on) as moved:
        assert on.send(manager, world, plan, buffer) == -7
    assert len(engine.calls) == bad * (3 if custom_pool else 1) + 1
    assert moved == {"triggers": 1, "poisons": 1} | ({"slices": bad, "bytes": bad * 24 * 72} if bad else {})
    assert world.arrived(plan, rows=bad * 24)

    held = buffer.fenced.clone()
    for later in (world.plan(240), world.plan(16)):
        world.clear()
        since = len(engine.calls)
        assert on.send(manager, world, later, buffer) == 0
        assert world.arrived(later)
        assert not engine.reads(buffer, since=since)
    assert torch.equal(held, buffer.fenced)
    world.executor.shutdown()


@pytest.mark.parametrize("drain", [False, True], ids=["early return", "deferred release"])
def test_one_failed_layer_of_a_slice_waits_for_its_slow_sibling_and_nothing_is_reused(on: Tree, drain: bool) -> None:
    world = World(lens=(16,) * 8, threads=2)
    plan, buffer, ended = world.plan(96), on.buffer(24 * world.row), threading.Event()
    submit, writes = world.executor.submit, []

    def keep(*args: Any) -> Any:
        writes.append(submit(*args))
        return writes[-1]

    def act(index: int) -> int | None:
        if index == 0:
            deadline = time.monotonic() + 10
            while sum(write.done() for write in writes) < 7:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(0.05)
            ended.set()
        return -3 if index == 1 else None

    engine = Engine(act)
    manager = on.manager(world, engine, custom_pool=True, drain=drain)
    with mock.patch.object(world.executor, "submit", keep), counts(on) as moved:
        assert on.send(manager, world, plan, buffer) == -3
    assert ended.is_set() and engine.running == 0
    assert not engine.torn
    assert len(engine.calls) == 2  # the layers that had not begun never do
    assert moved == {"triggers": 1, "poisons": 1}
    assert not trusted(on, buffer)


@pytest.mark.parametrize("gate", [True, False], ids=["patched", "stock"])
def test_a_one_shot_pack_that_returns_early_is_not_overwritten_under_its_sibling(
    on: Tree, base: Tree, gate: bool
) -> None:
    tree, world = (on if gate else base), World(lens=(24, 24), threads=2)
    first, second = world.plan(100), world.plan(100)
    buffer, go_on = tree.buffer(9000), threading.Event()

    def act(index: int) -> int | None:
        if index == 0:
            assert go_on.wait(10)
        return -3 if index == 1 else None

    engine = Engine(act)
    manager = tree.manager(world, engine, custom_pool=True)
    assert tree.send(manager, world, first, buffer) == -3
    assert engine.running == 1  # the sibling still reads
    assert tree.send(manager, world, second, buffer, peer=OTHER) == 0
    go_on.set()
    world.executor.shutdown(wait=True)
    # Stock overwrites what the sibling reads: what this guards against is real, and the test can see it.
    assert engine.torn == ([] if gate else [0])


@pytest.mark.parametrize("custom_pool", [False, True], ids=["batched", "custom pool"])
def test_a_one_shot_pack_that_fails_ends_the_buffers_use(on: Tree, custom_pool: bool) -> None:
    world, buffer = World(), on.buffer(9000)
    manager = on.manager(world, Engine(fails_at(0)), custom_pool=custom_pool)
    with counts(on) as moved:
        assert on.send(manager, world, world.plan(64), buffer) == -7
    assert moved == {"poisons": 1}
    assert not trusted(on, buffer)


@pytest.mark.parametrize("custom_pool", [False, True], ids=["batched", "custom pool"])
def test_a_one_shot_pack_that_raises_raises_as_in_stock_and_ends_the_buffers_use(
    on: Tree, base: Tree, custom_pool: bool
) -> None:
    def act(index: int) -> None:
        raise OSError("the link is gone")

    buffer = on.buffer(9000)
    for tree in (base, on):
        world = World(threads=1)
        with pytest.raises(OSError, match="the link is gone"):
            tree.send(tree.manager(world, Engine(act), custom_pool=custom_pool), world, world.plan(64), buffer)
    assert not trusted(on, buffer)


@pytest.mark.parametrize("custom_pool", [False, True], ids=["batched", "custom pool"])
def test_an_engine_that_raises_within_a_slice_fails_the_send_but_not_the_thread(on: Tree, custom_pool: bool) -> None:
    def act(index: int) -> None:
        if index >= 3:
            raise OSError("the link is gone")

    world, buffer = World(threads=1), on.buffer(24 * 72)
    manager = on.manager(world, Engine(act), custom_pool=custom_pool)
    assert on.send(manager, world, world.plan(240), buffer) == -1
    assert not trusted(on, buffer)


@pytest.mark.parametrize("answer", [None, "odd"], ids=["nothing", "a word"])
def test_an_engine_that_answers_no_number_counts_as_failed(on: Tree, answer: Any) -> None:
    world, engine, buffer = World(), Engine(), on.buffer(24 * 72)
    manager = on.manager(world, engine)
    manager._transfer_data = lambda session, blocks: answer
    assert on.send(manager, world, world.plan(240), buffer) == -1
    assert not trusted(on, buffer)


@pytest.mark.parametrize("when", [0, 2], ids=["first slice", "third slice"])
def test_a_gather_that_raises_fails_the_send_but_not_the_thread(on: Tree, when: int) -> None:
    world, engine, buffer = World(), Engine(), on.buffer(24 * 72)
    gather = on.dcp_pack.copy_mla_rows_into_pack
    done: list[Any] = []

    def failing(*args: Any) -> None:
        if len(done) == when:
            raise RuntimeError("out of memory")
        done.append(gather(*args))

    with mock.patch.object(on.dcp_pack, "copy_mla_rows_into_pack", failing), counts(on) as moved:
        assert on.send(on.manager(world, engine), world, world.plan(240), buffer) == -1
    assert len(engine.calls) == when
    assert moved["poisons"] == 1 and moved.get("slices", 0) == when
    assert not trusted(on, buffer)


def test_an_executor_that_takes_no_more_layers_fails_the_send_after_those_it_took(on: Tree) -> None:
    world, buffer = World(threads=1), on.buffer(24 * 72)
    engine = Engine(lambda index: time.sleep(0.03))
    manager, submit = on.manager(world, engine, custom_pool=True), world.executor.submit

    def failing(*args: Any) -> Any:
        if engine.calls:
            raise RuntimeError("cannot schedule new futures after shutdown")
        taken = submit(*args)
        while not engine.calls:
            time.sleep(0.001)
        return taken

    with mock.patch.object(world.executor, "submit", failing):
        assert on.send(manager, world, world.plan(240), buffer) == -1
    assert len(engine.calls) == 1 and engine.running == 0
    assert not engine.torn
    assert not trusted(on, buffer)


def test_layers_of_the_last_slice_cancelled_by_another_hand_are_not_taken_for_sent(on: Tree) -> None:
    world, buffer = World(threads=1), on.buffer(24 * 72)

    def act(index: int) -> None:
        if index == 3:
            world.executor.shutdown(wait=False, cancel_futures=True)

    engine = Engine(act)
    manager, submit = on.manager(world, engine, custom_pool=True), world.executor.submit
    submitted: list[Any] = []

    def together(function: Any, *args: Any) -> Any:
        """Let a slice's first layer begin only when all three are queued."""
        whole = len(submitted) // 3 * 3 + 3

        def held() -> Any:
            deadline = time.monotonic() + 10
            while len(submitted) < whole:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            return function(*args)

        submitted.append(submit(held))
        return submitted[-1]

    plan, status = world.plan(96), []
    with mock.patch.object(world.executor, "submit", together):
        sender = threading.Thread(
            target=lambda: status.append(on.send(manager, world, plan, buffer)),
            daemon=True,  # a wait that never ends is a failure here, not a hang
        )
        sender.start()
        sender.join(20)
    assert status == [-1]
    assert len(submitted) == 6 and len(engine.calls) == 4
    assert not trusted(on, buffer)


def test_a_send_that_never_ended_leaves_the_buffer_untrusted(on: Tree) -> None:
    world, buffer = World(), on.buffer(24 * 72)

    def act(index: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on.send(on.manager(world, Engine(act)), world, world.plan(240), buffer)
    assert not trusted(on, buffer)


def test_a_buffer_in_use_by_another_send_is_not_shared(on: Tree) -> None:
    world, other, buffer = World(), World(seed=1), on.buffer(9000)
    inside = Engine()
    plan = other.plan(64)

    def act(index: int) -> None:
        assert on.send(on.manager(other, inside), other, plan, buffer) == 0

    engine = Engine(act)
    outer = world.plan(64)
    assert on.send(on.manager(world, engine), world, outer, buffer) == 0
    assert not inside.reads(buffer) and not engine.torn
    assert world.arrived(outer) and other.arrived(plan)
    assert trusted(on, buffer)


# --- gate set: the worker -------------------------------------------------------------------------------------------


def test_after_a_failure_the_worker_serves_healthy_peers_row_by_row(on: Tree) -> None:
    world, engine = World(), Engine(fails_at(1))
    plans = [world.plan(200), world.plan(200), world.plan(40)]
    manager, buffer = on.manager(world, engine), on.buffer(24 * world.row)
    manager._dcp_pack_buffers = [buffer]
    for room, (plan, peer) in enumerate(zip(plans, (PEER, OTHER, THIRD), strict=True)):
        on.enlist(manager, world, room, plan, peer)
    with counts(on) as moved:
        on.work(manager, world, [on.chunk(0, plans[0])])
        held, since = buffer.fenced.clone(), len(engine.calls)
        assert manager.failed_sessions == {PEER} and manager.request_status[0] == on.poll.Failed
        for room in (1, 2):
            world.clear()
            on.work(manager, world, [on.chunk(room, plans[room])])
            assert world.arrived(plans[room])
            assert manager.request_status[room] == on.poll.Success
    assert not engine.reads(buffer, since=since)
    assert torch.equal(held, buffer.fenced)
    assert moved["per_token"] == 2 and moved["poisons"] == 1
    assert manager.failed_sessions == {PEER}


def test_the_worker_sees_an_untrusted_buffer_as_none(on: Tree) -> None:
    world, buffer = World(), on.buffer(9000)
    manager = on.manager(world, Engine())
    manager._dcp_pack_buffers = [buffer]
    manager.send_kvcache_dcp = sender = mock.Mock(return_value=0)
    for room in (0, 1):
        plan = world.plan(64)
        on.enlist(manager, world, room, plan)
        on.work(manager, world, [on.chunk(room, plan)])
        on.send(on.manager(world, Engine(fails_at(0))), world, world.plan(64), buffer)
    assert [call.kwargs["pack_buffer"] for call in sender.call_args_list] == [buffer, None]


def test_one_workers_failure_leaves_the_other_workers_buffer_in_use(on: Tree) -> None:
    world, engine = World(), Engine(fails_at(0))
    plans = [world.plan(200), world.plan(200)]
    manager = on.manager(world, engine)
    manager._dcp_pack_buffers = buffers = [on.buffer(24 * world.row) for _ in range(2)]
    for room, (plan, peer) in enumerate(zip(plans, (PEER, OTHER), strict=True)):
        on.enlist(manager, world, room, plan, peer)
        on.work(manager, world, [on.chunk(room, plan)], worker=room)
    assert not trusted(on, buffers[0])
    assert engine.reads(buffers[1]) and trusted(on, buffers[1])


def abort(manager: Any, tree: Tree, room: int, how: str) -> None:
    if how == "failed":
        manager.update_status(room, tree.poll.Failed)
    else:
        manager.request_status.pop(room)


@pytest.mark.parametrize("how", ["failed", "cleared"])
@pytest.mark.parametrize("last", [True, False], ids=["last chunk", "early chunk"])
def test_an_abort_between_slices_stops_the_send_without_blame(on: Tree, how: str, last: bool) -> None:
    world = World()
    plan, buffer = world.plan(240), on.buffer(24 * world.row)
    engine = Engine()
    manager = on.manager(world, engine, drain=True)
    engine.act = lambda index: abort(manager, on, 5, how) if index == 1 else None
    manager._dcp_pack_buffers = [buffer]
    on.enlist(manager, world, 5, plan)
    manager._deferred_ack_targets[5] = ("127.0.0.1", 9)
    with counts(on) as moved:
        on.work(manager, world, [on.chunk(5, plan, last=last)])
    assert len(engine.calls) == 2 and world.arrived(plan, rows=48)
    assert not bool(world.aux_target.any())
    # Neither a dead session nor a success with rows missing: the peer hears of a failure, then that all is drained.
    assert manager.failed_sessions == set() and not manager.session_failures
    assert manager.request_status.get(5) == (on.poll.Failed if how == "failed" else None)
    assert [frames[1] if len(frames) == 3 and frames[0] == b"5" else frames[0] for _, frames in manager.told] == [
        b"0",
        b"ABORT_ACK",
    ]
    assert manager._staging_outstanding.get(5, 0) == 0
    assert moved == {"triggers": 1, "slices": 2, "bytes": 48 * 72, "aborts": 1}
    assert trusted(on, buffer)


def test_an_abort_that_comes_with_the_last_slice_ends_as_in_stock(on: Tree, base: Tree) -> None:
    told = []
    for tree, size, calls in ((base, 9999, 1), (on, 24 * 72, 3)):
        world, engine = World(), Engine()
        plan, manager = world.plan(144), tree.manager(world, engine)

        def act(index: int, manager: Any = manager, tree: Tree = tree, last: int = calls - 1) -> None:
            if index == last:
                abort(manager, tree, 5, "failed")

        engine.act = act
        manager._dcp_pack_buffers = [tree.buffer(size)]
        tree.enlist(manager, world, 5, plan)
        tree.work(manager, world, [tree.chunk(5, plan)])
        assert world.arrived(plan)
        assert len(engine.calls) == calls + 1  # and the auxiliary data
        told.append((manager.told, manager.request_status, manager.failed_sessions))
    assert told[0] == told[1]


def test_a_room_aborted_before_its_second_rank_is_served_sends_that_rank_nothing(on: Tree) -> None:
    world = World()
    plans = [world.plan(200), world.plan(200, rank=1)]
    engine = Engine()
    manager = on.manager(world, engine)
    engine.act = lambda index: abort(manager, on, 5, "failed") if index == 4 else None
    manager._dcp_pack_buffers = [on.buffer(24 * world.row)]
    for plan, peer in zip(plans, (PEER, OTHER), strict=True):
        on.enlist(manager, world, 5, plan, peer)
        manager.transfer_infos[5][peer].required_dst_info_num = 2
    on.work(manager, world, [on.chunk(5, plans[0])])
    assert {peer for peer, _ in engine.calls} == {PEER}
    assert manager.failed_sessions == set()
    assert manager.request_status[5] == on.poll.Failed


def test_a_peer_that_cannot_be_told_of_the_abort_does_not_end_the_thread(on: Tree) -> None:
    world = World()
    plan = world.plan(240)
    engine = Engine()
    manager = on.manager(world, engine)
    engine.act = lambda index: abort(manager, on, 5, "failed") if index == 1 else None
    manager._dcp_pack_buffers = [on.buffer(24 * world.row)]
    manager._send_multipart_locked = mock.Mock(side_effect=OSError("no route"))
    on.enlist(manager, world, 5, plan)
    on.work(manager, world, [on.chunk(5, plan)])
    assert len(engine.calls) == 2
    assert manager._send_multipart_locked.call_count == 1


def test_an_engines_own_status_is_never_taken_for_an_abort(on: Tree) -> None:
    world, engine = World(), Engine(fails_at(0, status=int(on.pack.ABORTED)))
    plan, manager = world.plan(240), on.manager(world, engine)
    manager._dcp_pack_buffers = [on.buffer(24 * world.row)]
    on.enlist(manager, world, 5, plan)
    on.work(manager, world, [on.chunk(5, plan)])
    assert manager.failed_sessions == {PEER}
    assert on.pack.ABORTED != 0


# --- the gather's grid ----------------------------------------------------------------------------------------------


class _Grid:
    """Stands for the gather kernel where only its grid is asked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.seen.append((*grid, kwargs["BLOCK_SIZE"]))


@pytest.mark.parametrize("lens", [(656,) * 79, (1152,) * 61, (576, 656, 132), (1,), (70_000_000,)], ids=str)
def test_the_row_limit_is_the_most_that_the_gathers_grid_can_hold(on: Tree, lens: tuple[int, ...]) -> None:
    limit, grid = on.pack.rows_that_fit(1 << 60, lens), _Grid()
    with mock.patch.object(on.gather, "_copy_mla_rows_into_pack_kernel", grid):
        for rows in (limit, limit + 1):
            on.gather.copy_mla_rows_into_pack(
                [0] * len(lens), SimpleNamespace(numel=lambda rows=rows: rows), SimpleNamespace(device="cpu"), lens
            )
    (_, fits, block), (_, fails, _) = grid.seen
    assert fits <= on.pack.GRID_Y_LIMIT < fails
    assert block == on.pack.GATHER_BLOCK_BYTES


def test_known_row_limits(on: Tree) -> None:
    assert on.pack.rows_that_fit(1 << 60, (656,) * 79) == 102_298
    assert on.pack.rows_that_fit(1 << 60, (1152,) * 61) == 58_253
    assert on.pack.rows_that_fit(1 << 60, ()) == 0


def test_a_send_that_fits_the_buffer_but_not_the_grid_is_sliced(on: Tree) -> None:
    world, engine, sizes = World(lens=(100, 40)), Engine(), []
    plan, buffer, gather = world.plan(300), on.buffer(99_999), on.dcp_pack.copy_mla_rows_into_pack

    def limited(sources: Any, rows: torch.Tensor, pack: torch.Tensor, lens: list[int]) -> None:
        sizes.append(int(rows.numel()))
        assert -(-sizes[-1] * max(lens) // 1024) <= 4, "the launch would fail on a device"
        gather(sources, rows, pack, lens)

    with (
        mock.patch.object(on.pack, "GRID_Y_LIMIT", 4),
        mock.patch.object(on.dcp_pack, "copy_mla_rows_into_pack", limited),
    ):
        assert on.send(on.manager(world, engine), world, plan, buffer) == 0
    assert sizes == [40, 40, 40, 30]
    assert world.arrived(plan)


# --- descriptors ----------------------------------------------------------------------------------------------------

# GLM-5.x: 78 layers and one draft layer, rows of 656 bytes, pages of 64; DCP2, 16,384 tokens a prefill chunk.
# tokens of one send: (rows of a rank, slices, descriptors of stock, descriptors in slices)
DESCRIPTORS = {
    16_384: (8_192, 0, 10_112, 10_112),
    32_768: (16_384, 0, 20_224, 20_224),
    73_728: (36_864, 3, 2_912_256, 45_504),
    81_920: (40_960, 3, 3_235_840, 50_560),
}


@pytest.mark.parametrize("tokens", DESCRIPTORS)
def test_descriptors_of_a_send_as_the_real_planner_and_sender_make_them(base: Tree, on: Tree, tokens: int) -> None:
    layers, page, numbers = 79, 64, np.random.default_rng(tokens)
    size = base.dcp_pack.dcp_pack_buffer_bytes([656 * page], page, 16_384, 2)
    source = numbers.permutation(2_000)[: tokens // page].astype(np.int32)
    target = numbers.permutation(1_000)[: tokens // page // 2].astype(np.int32) * 2  # no page follows another
    found = []
    for tree in (base, on):
        world = World(lens=(656,), page=page, pages=1)
        manager = tree.manager(world, Engine())
        manager._transfer_data = mock.Mock(return_value=0)
        buffer = SimpleNamespace(
            fits=lambda n: n <= size,
            get_size=lambda: size,
            get_ptr=lambda: 0,
            get_gather_stream=tree.buffer(1).get_gather_stream,
            buffer=torch.empty(size, dtype=torch.uint8, device="meta"),
        )
        with mock.patch.object(tree.dcp_pack, "copy_mla_rows_into_pack"):
            assert tree.send(manager, world, Plan(source, target, tokens), buffer) == 0
        found.append([len(call.args[1]) for call in manager._transfer_data.call_args_list])
    rows, slices, stock_blocks, sliced_blocks = DESCRIPTORS[tokens]
    assert rows == tokens // 2
    assert len(found[1]) == max(slices, 1)
    # Every layer has the same runs, so one layer is counted and multiplied.
    assert (sum(found[0]) * layers, sum(found[1]) * layers) == (stock_blocks, sliced_blocks)


def test_the_table_on_the_page_is_the_one_that_is_counted() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")
    for tokens, counts in DESCRIPTORS.items():
        row = [f"{count:,}" if count else "-" for count in (tokens, *counts)]
        assert row in [line.split() for line in page.splitlines()]


# --- start-up, counters, other backends -----------------------------------------------------------------------------

GOOD = {
    "disaggregation_mode": "prefill",
    "disaggregation_transfer_backend": "mooncake",
    "dcp_size": 1,
    "enable_hierarchical_cache": False,
    "hicache_storage_backend": None,
    "enable_lmcache": False,
}


def start(tree: Tree, **flags: Any) -> None:
    """Run the tree's own start-up check of the disaggregation flags."""
    cfg: Any = SimpleNamespace(**{**GOOD, **flags})

    def same(args: Any) -> Any:
        return args

    def declare(args: Any, why: str, **changed: Any) -> None:
        args.__dict__.update(changed)

    views = {"resolving_view": same, "resolved_view": same, "model_config_of": same, "declare_resolution": declare}
    overrides = stub("sglang.srt.arg_groups.overrides", **views)
    hook = tree.fresh("sglang/srt/arg_groups/pd_disaggregation_hook.py", {overrides.__name__: overrides})
    with mock.patch.dict(os.environ):
        hook.handle_pd_disaggregation(cfg)


def test_the_topology_that_the_patch_is_made_for_starts(on: Tree) -> None:
    start(on)
    start(on, disaggregation_transfer_backend="mooncake_tcp", disaggregation_ib_device=None)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("disaggregation_mode", "null"),
        ("disaggregation_mode", "decode"),
        ("disaggregation_transfer_backend", "nixl"),
        ("disaggregation_transfer_backend", "mori"),
        ("disaggregation_transfer_backend", "ascend"),
        ("dcp_size", 2),
        ("enable_hierarchical_cache", True),
        ("hicache_storage_backend", "file"),
        ("enable_lmcache", True),
    ],
)
def test_any_other_topology_is_refused_at_start_by_name(on: Tree, off: Tree, flag: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{GATE} is set, but: {flag} must be .*got {value!r}"):
        start(on, **{flag: value})
    if value != "decode":  # stock's own decode branch asks for flags that are none of ours
        start(off, **{flag: value})


def test_a_refusal_names_every_condition_that_fails(on: Tree) -> None:
    with pytest.raises(ValueError, match=r"disaggregation_mode.*; disaggregation_transfer_backend.*; enable_lmcache"):
        start(on, disaggregation_mode="decode", disaggregation_transfer_backend="nixl", enable_lmcache=True)


@pytest.mark.parametrize("backend", ["nixl", "mori", "ascend", "fake"])
def test_the_other_backends_senders_do_not_know_the_patch(stock: Root, patched: Root, backend: str) -> None:
    path = f"sglang/srt/disaggregation/{backend}/conn.py"
    assert b"bounded_pack" not in (patched("prefill") / path).read_bytes()
    digests = {hashlib.sha256((root("prefill") / path).read_bytes()).hexdigest() for root in (stock, patched)}
    assert len(digests) == 1


def test_counts_of_two_threads_add_up_and_are_read_together(on: Tree) -> None:
    counters, inside, go_on = on.pack.Counters(), threading.Event(), threading.Event()
    seen: list[dict[str, int]] = []

    class Slow(int):
        """An amount whose addition can be held up half way."""

        def __radd__(self, other: int) -> int:
            inside.set()
            assert go_on.wait(10)
            return other + int(self)

    threads = [
        threading.Thread(target=lambda: counters.add(slices=1, bytes=Slow(3))),
        threading.Thread(target=lambda: counters.add(slices=1, bytes=3)),
        threading.Thread(target=lambda: seen.append(counters.snapshot())),
    ]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[2].start()
    threads[2].join(0.1)
    assert not seen
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert seen[0]["bytes"] == 3 * seen[0]["slices"] >= 3
    assert (counters.snapshot()["slices"], counters.snapshot()["bytes"]) == (2, 6)


def test_a_count_that_does_not_exist_is_an_error(on: Tree) -> None:
    with pytest.raises(KeyError):
        on.pack.Counters().add(slice=1)


def test_the_counts_are_exported_where_the_engines_metrics_are(on: Tree) -> None:
    world, name = World(), "sglang:research_dcp_pack_slices_total"
    before = {metric: Metric.made[metric].value for metric in Metric.made}
    with counts(on) as moved:
        on.send(on.manager(world, Engine()), world, world.plan(240), on.buffer(24 * world.row))
    assert Metric.made[name].value - before[name] == moved["slices"] == 5
    assert set(on.pack.COUNTERS.snapshot()) == {
        m[len("sglang:research_dcp_pack_") : -len("_total")] for m in before if "research" in m
    }


def test_with_the_gate_unset_no_metric_is_made(patched: Root) -> None:
    with mock.patch.dict(Metric.made, clear=True):
        Tree(patched("prefill"))
        assert not [name for name in Metric.made if "research" in name]


def test_metrics_are_made_with_the_sender_and_not_at_import_when_the_engine_has_no_folder_for_them_yet(
    on: Tree,
) -> None:
    with mock.patch.dict(Metric.made, clear=True), mock.patch.dict(os.environ, {GATE: "1"}):
        pack = on.fresh("sglang/srt/research/bounded_pack.py", {})
        assert not Metric.made
        with on.active():
            pack.guarded(len)
        assert len(Metric.made) == len(pack.COUNTERS.snapshot())


@pytest.mark.parametrize("fault", [ImportError, ValueError], ids=["no package", "name taken"])
def test_metrics_that_cannot_be_made_leave_the_counts_readable(on: Tree, fault: type[Exception]) -> None:
    counters = on.pack.Counters()
    broken = stub("prometheus_client", Counter=mock.Mock(side_effect=fault))
    with mock.patch.dict(sys.modules, {"prometheus_client": broken}):
        counters.publish()
    counters.add(triggers=2)
    assert counters.snapshot()["triggers"] == 2


def test_a_metric_that_cannot_be_written_does_not_end_the_transfer(on: Tree) -> None:
    world, engine = World(), Engine()
    plan, buffer = world.plan(240), on.buffer(24 * world.row)
    with mock.patch.object(Metric, "inc", side_effect=OSError("disk full")):
        assert on.send(on.manager(world, engine), world, plan, buffer) == 0
    assert world.arrived(plan)


def test_giving_up_a_buffer_is_logged_once_with_its_status(on: Tree, caplog: pytest.LogCaptureFixture) -> None:
    world, buffer = World(), on.buffer(24 * 72)
    for _ in range(2):
        on.send(on.manager(world, Engine(fails_at(0))), world, world.plan(240), buffer)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len([text for text in errors if "given up" in text and "status -7" in text]) == 1
