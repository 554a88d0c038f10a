"""The patch retract-draft-kv: the draft's KV of a retracted request comes back with the target's.

Requests, pools and allocators are the tree's own. Bytes are compared on pools of real shapes; what it means for the
drafts, for aborts and for other requests is seen in the engine's own event loop (see `node`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engine.decode.node import Node, drain, text
from tests.engine.decode.pair import PAGE, Pair, scribble
from tests.engine.decode.world import GATES, World

Tree = Callable[[str], Path]
KINDS = ("mla", "dsa", "dsa fp8")


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The DSA pool waits for the GPU by its full name."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture(scope="module")
def old(stock: Tree) -> World:
    return World(stock("decode"))


@pytest.fixture(scope="module")
def new(patched: Tree) -> World:
    return World(patched("decode"), ["draft", "settle", "dcp"])


@pytest.fixture(scope="module")
def alone(patched: Tree) -> World:
    return World(patched("decode"), ["draft"])


@pytest.fixture(scope="module")
def ungated(patched: Tree) -> World:
    return World(patched("decode"))


# Bytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_unpatched_engine_brings_back_the_target_alone(old: World, kind: str) -> None:
    with old.entered(), Pair(old, kind) as pair:
        back = pair.trip([2, 6, 1], [5, 3, 4])
    assert all(back["target"]) and not any(back["draft"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 151, 192])
def test_both_come_back_at_other_pages(new: World, kind: str, tokens: int) -> None:
    with new.entered(), Pair(new, kind, tokens=tokens) as pair:
        new.module("research.retract_draft").admit(pair.scheduler, pair.draft)
        back = pair.trip([2, 6, 1], [5, 3, 4])
    assert all(back["target"]) and all(back["draft"])
    assert "kv_cache_cpu" not in vars(pair.request) and not pair.request.to_finish


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_under_dcp_a_draft_comes_back_by_the_rows_that_the_write_kernel_uses(new: World, ranks: int) -> None:
    with new.entered():
        for rank in range(ranks):
            with Pair(new, "mla", ranks=ranks, rank=rank, tokens=PAGE * ranks + 7) as pair:
                new.module("research.retract_draft").admit(pair.scheduler, pair.draft)
                assert pair.draft.research_layout.latent == "striped"
                back = pair.trip([2, 6], [5, 3])
                assert all(back["target"]) and all(back["draft"])


@pytest.mark.parametrize("kind", ["dsa", "dsa fp8"])
def test_under_dcp_a_dsa_draft_comes_back_by_its_declared_rows(new: World, kind: str) -> None:
    with new.entered():
        for rank in range(4):
            with Pair(new, kind, ranks=4, rank=rank, tokens=PAGE * 4 + 7) as pair:
                new.module("research.retract_draft").admit(pair.scheduler, pair.draft)
                back = pair.trip([2, 6], [5, 3])
                assert all(back["target"]) and all(back["draft"])


def test_a_draft_whose_rows_are_said_to_be_raw_is_copied_so(new: World) -> None:
    with new.entered(), Pair(new, "mla", ranks=2, rank=1, tokens=130) as pair:
        new.module("research.retract").declare(pair.draft, latent="raw")
        new.module("research.retract_draft").admit(pair.scheduler, pair.draft)
        assert pair.draft.research_layout.latent == "raw"
        scribble(pair.draft, 3)
        slots = pair.take([2, 6])
        then = pair.draft.kv_buffer[0][slots].clone()
        pair.offload()
        scribble(pair.draft, 4)
        after = pair.take([5, 3])
        pair.load()
        assert torch.equal(pair.draft.kv_buffer[0][after].view(torch.uint8), then.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_gate_what_is_saved_is_the_unpatched_engines(old: World, ungated: World, kind: str) -> None:
    saved = []
    for world in (old, ungated):
        with world.entered(), Pair(world, kind) as pair:
            if world is ungated:
                world.module("research.retract_draft").admit(pair.scheduler, pair.draft)
            scribble(pair.target, 5)
            pair.take([2, 6, 1])
            pair.offload()
            saved.append(pair.request.kv_cache_cpu)
            back = pair.trip([2, 6, 1], [5, 3, 4])
            assert all(back["target"]) and not any(back["draft"])
    flat = [torch.cat([chunk.view(torch.uint8).flatten() for chunk in chunks(one)]) for one in saved]
    assert type(saved[0]) is type(saved[1]) and torch.equal(*flat)


def chunks(saved: Any) -> list[torch.Tensor]:
    if isinstance(saved, torch.Tensor):
        return [saved]
    return [part for one in (saved.values() if isinstance(saved, dict) else saved) for part in chunks(one)]


def test_a_copy_that_fails_has_freed_nothing(new: World) -> None:
    with new.entered():
        node, _, _ = crowd(new)

        def plan() -> Iterator[Callable[[Node], None]]:
            for count, action in enumerate(drain(node), 1):
                yield Node.retract if count == 3 else action

        def full(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("no room on the host")

        with mock.patch.object(node.draft, "get_cpu_copy", full), pytest.raises(MemoryError, match="no room"):
            node.run(plan())
        node.check()
        assert all(seen.request.kv is not None for seen in node.requests)


# In the event loop


def crowd(world: World, **options: Any) -> tuple[Node, Any, Any]:
    node = Node(world, speculative=True, **options)
    return node, node.request([5, 6, 7, 8, 9], 40), node.request([1, 2, 3], 40)


def force(node: Node, rounds: dict[int, Callable[[Node], None]]) -> Iterator[Callable[[Node], None]]:
    for count, action in enumerate(drain(node), 1):
        yield rounds.get(count, action)


def check_texts(node: Node) -> None:
    for seen in node.requests:
        assert list(seen.request.output_ids_through_stop) == text(seen.prompt, seen.new)


def test_the_drafts_of_a_retracted_request_stay_as_good_as_before(old: World, alone: World, new: World) -> None:
    poor = {}
    for name, world in (("stock", old), ("alone", alone), ("settled", new)):
        with world.entered():
            node, _, _ = crowd(world)
            node.run(force(node, {3: Node.retract, 6: Node.retract}))
        check_texts(node)
        assert node.retractions == 2
        poor[name] = [seen.poor for seen in node.requests if seen.rows_behind]
    assert sum(poor["stock"]) > 20, "from the retraction on nothing drafted is accepted"
    assert sum(poor["alone"]) == 2, "one step a retraction, whose first draft starts from old state"
    assert sum(poor["settled"]) == 0


def test_the_first_draft_after_the_return_starts_from_the_last_step(new: World) -> None:
    with new.entered():
        node, first, second = crowd(new, seeds=True)
        seen: list[Any] = []

        def look(node: Node) -> None:
            (request,) = node.queue.retracted_queue or [None]
            if request is not None:
                seen.append(
                    (request.seqlen - 1, float(request.hidden_states_tensor), int(request.output_dsa_topk_indices))
                )

        node.run(force(node, {4: Node.retract, 5: look}))
    assert seen and all(hidden == boundary == selected for boundary, hidden, selected in seen)
    for one in (first, second):
        if one.rows_behind:
            boundary = int(one.request.hidden_states_tensor)
            assert boundary > len(one.prompt)
            assert int(one.request.output_dsa_topk_indices) == boundary
            assert one.request.output_topk_index.dtype == torch.int64
    assert sum(one.poor for one in (first, second)) == 0


def test_what_is_relayed_for_another_boundary_is_not_taken(alone: World) -> None:
    with alone.entered():
        node, first, second = crowd(alone, seeds=True)
        node.run(force(node, {4: Node.retract}))
    (one,) = [one for one in (first, second) if one.rows_behind]
    assert int(one.request.hidden_states_tensor) == len(one.prompt) == int(one.request.output_dsa_topk_indices)


@pytest.mark.parametrize("reason", ["", "no overlap", "a result is unread", "nothing was relayed yet"])
def test_each_reason_to_keep_the_old_state_is_enough(alone: World, reason: str) -> None:
    relayed = {"topk_p_buf": torch.tensor([9.0, 0.25]), "topk_index_buf": torch.tensor([9, 7])}
    relay = SimpleNamespace(
        _forward_buf_initialized=reason != "nothing was relayed yet", need_hidden_states=False, **relayed
    )
    scheduler = SimpleNamespace(
        enable_overlap=reason != "no overlap", result_queue=["x"] * (reason == "a result is unread"), future_map=relay
    )
    request = SimpleNamespace(
        req_pool_idx=1, output_topk_p="old", output_topk_index="old", output_dsa_topk_indices=None
    )
    with alone.entered():
        alone.module("research.retract_draft")._note_first_draft(request, scheduler)
    kept = (request.output_topk_p, request.output_topk_index)
    assert kept == ("old", "old") if reason else [float(one) for one in kept] == [0.25, 7]


def test_a_request_without_a_seed_is_given_none(new: World) -> None:
    with new.entered():
        node, first, second = crowd(new)
        node.run(force(node, {4: Node.retract}))
    assert first.request.output_dsa_topk_indices is None and second.request.output_dsa_topk_indices is None


def test_a_request_without_a_seed_is_given_none_where_another_has_one(new: World) -> None:
    with new.entered():
        node, first, second = crowd(new, seeds=True)
        stock = node.batching.Req.offload_kv_cache

        def offload(request: Any, *args: Any) -> None:
            request.output_dsa_topk_indices = None
            stock(request, *args)

        with mock.patch.object(node.batching.Req, "offload_kv_cache", offload):
            node.run(force(node, {4: Node.retract}))
        assert node.scheduler.future_map.dsa_topk_indices_buf is not None
    (one,) = [one for one in (first, second) if one.rows_behind]
    assert one.request.output_dsa_topk_indices is None
    check_texts(node)


def test_without_overlap_the_pools_come_back_and_the_state_stays(alone: World) -> None:
    with alone.entered():
        node, _, _ = crowd(alone, overlap=False)
        node.run(force(node, {3: Node.retract}))
    check_texts(node)
    (one,) = [one for one in node.requests if one.rows_behind]
    assert one.poor == 1 and int(one.request.hidden_states_tensor) == len(one.prompt)


def test_retracted_twice_and_more_it_still_comes_back(new: World) -> None:
    with new.entered():
        node, _, _ = crowd(new)
        node.run(force(node, dict.fromkeys(range(3, 40, 2), Node.retract)))
    assert max(one.request.retraction_count for one in node.requests) >= 3
    check_texts(node)
    assert sum(one.poor for one in node.requests) == 0


def test_an_abort_while_it_is_retracted_frees_the_record_and_leaks_nothing(new: World) -> None:
    with new.entered():
        node, first, second = crowd(new, pages=12)
        gone: list[Any] = []

        def abort(node: Node) -> None:
            for one in (first, second):
                if one.request in node.queue.retracted_queue:
                    gone.append(one)
                    node.abort(one)

        def retract(node: Node) -> None:
            node.queue.num_reserved_decode_tokens = 48  # too much for it to come back at once
            node.retract()

        node.run(force(node, {3: retract, 4: abort}))
    (one,) = gone
    assert "kv_cache_cpu" not in vars(one.request) and one.request.req_pool_idx is None
    (other,) = [seen for seen in node.requests if seen is not one]
    assert list(other.request.output_ids_through_stop) == text(other.prompt, other.new)
    assert len(node.allocator.free_pages) + len(node.allocator.release_pages) == node.free_pages


def test_a_pause_that_retracts_saves_nothing_as_before(new: World) -> None:
    with new.entered():
        node, _, _ = crowd(new)

        def pause(node: Node) -> None:
            node.queue.held_rebootstrap_reqs = []
            node.scheduler.pause_generation(SimpleNamespace(mode="retract"))
            node.scheduler._engine_paused = False

        plan = force(node, {4: pause})
        with mock.patch.object(
            node.scheduler, "kv_events_publisher", SimpleNamespace(publish_kv_events=lambda: None), create=True
        ):
            node.run(plan)
    assert node.retractions == 0 and len(node.queue.held_rebootstrap_reqs) == 2
    assert not any("kv_cache_cpu" in vars(seen.request) for seen in node.requests)


def boundary(node: Node, request: Any) -> None:
    request.kv_cache_cpu = replace(request.kv_cache_cpu, boundary=request.kv_cache_cpu.boundary - 1)


def history(node: Node, request: Any) -> None:
    request.output_ids.append(3)


def no_record(node: Node, request: Any) -> None:
    request.kv_cache_cpu = request.kv_cache_cpu.target


def layers(node: Node, request: Any) -> None:
    target, draft = request.kv_cache_cpu.geometry
    request.kv_cache_cpu = replace(request.kv_cache_cpu, geometry=(target, (*draft, *draft)))


def width(node: Node, request: Any) -> None:
    _, draft = request.kv_cache_cpu.geometry
    request.kv_cache_cpu = replace(request.kv_cache_cpu, geometry=((("torch.float32", (1, 5)),), draft))


def dtype(node: Node, request: Any) -> None:
    target, _ = request.kv_cache_cpu.geometry
    request.kv_cache_cpu = replace(request.kv_cache_cpu, geometry=(target, (("torch.bfloat16", (1, 4)),)))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (boundary, r"a record of \d+ tokens for a history of"),
        (history, r"a record of \d+ tokens for a history of"),
        (no_record, "a copy of the target alone .list. instead of a record"),
        (layers, "a draft pool of 2 buffers"),
        (width, "a target pool of 1 buffers"),
        (dtype, "a draft pool of 1 buffers .*bfloat16"),
    ],
)
def test_a_record_that_does_not_fit_fails_its_request_and_no_other(new: World, spoil: Any, told: str) -> None:
    with new.entered():
        node, first, second = crowd(new, pages=40)
        third = node.request([8, 8, 8, 8], 30)
        spoiled: list[Any] = []
        stock = node.batching.Req.load_kv_cache

        def load(request: Any, *args: Any) -> None:
            if not spoiled:
                spoiled.append(request)
                spoil(node, request)
            stock(request, *args)

        with mock.patch.object(node.batching.Req, "load_kv_cache", load):
            node.run(force(node, {4: Node.retract}))
    (bad,) = [seen for seen in (first, second, third) if seen.request in spoiled]
    reason = bad.request.finished_reason.to_json()
    assert reason["type"] == "abort" and reason["status_code"] == 500
    assert GATES["draft"] in reason["message"]
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(reason["message"])
    assert "kv_cache_cpu" not in vars(bad.request) and bad.request.skip_radix_cache_insert
    for seen in node.requests:
        if seen is not bad:
            assert list(seen.request.output_ids_through_stop) == text(seen.prompt, seen.new)
    assert len(node.allocator.free_pages) + len(node.allocator.release_pages) == node.free_pages
    assert set(node.slots.free_slots) == node.free_slots


def test_a_table_that_is_too_short_for_the_history_fails_the_request(new: World) -> None:
    with new.entered(), Pair(new, "mla", tokens=70) as pair:
        module = new.module("research.retract_draft")
        module.admit(pair.scheduler, pair.draft)
        slots = pair.take([2, 6])
        pair.offload()
        assert not module.restore(pair.request, slots[:-1], pair.allocator)
        assert "a history of 70 and 69 slots" in pair.request.to_finish.message
        assert "kv_cache_cpu" not in vars(pair.request)


@pytest.mark.parametrize(
    ("kind", "layer", "index"),
    [
        ("mla", ("torch.float32", (1, 16)), ()),
        ("dsa", ("torch.bfloat16", (1, 16)), (("torch.uint8", (PAGE * (128 + 4),)),)),
        ("dsa fp8", ("torch.uint8", (1, 656)), (("torch.uint8", (PAGE * (128 + 4),)),)),
    ],
)
def test_a_record_tells_type_and_shape_of_every_buffer(new: World, kind: str, layer: Any, index: Any) -> None:
    with new.entered(), Pair(new, kind, layers=2) as pair:
        new.module("research.retract_draft").admit(pair.scheduler, pair.draft)
        pair.take([2, 6, 1])
        pair.offload()
    assert pair.request.kv_cache_cpu.geometry == ((layer, layer, *index, *index), (layer, *index))


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("change", ["type", "index"])
def test_a_pool_that_became_another_one_fails_the_request(new: World, role: str, change: str) -> None:
    with new.entered(), Pair(new, "dsa") as pair:
        module = new.module("research.retract_draft")
        module.admit(pair.scheduler, pair.draft)
        slots = pair.take([2, 6, 1])
        pair.offload()
        pool = getattr(pair, role)
        if change == "type":
            pool.kv_buffer = [buffer.view(torch.float16) for buffer in pool.kv_buffer]
        else:
            pool.index_k_with_scale_buffer = [buffer[:, :-4] for buffer in pool.index_k_with_scale_buffer]
        assert not module.restore(pair.request, slots, pair.allocator)
    assert f"cannot be restored: a {role} pool of" in pair.request.to_finish.message


def test_a_request_that_is_being_aborted_anyway_keeps_its_own_reason(new: World) -> None:
    with new.entered(), Pair(new, "mla", tokens=70) as pair:
        module = new.module("research.retract_draft")
        module.admit(pair.scheduler, pair.draft)
        slots = pair.take([2, 6])
        pair.offload()
        pair.request.to_finish = "told before"
        assert not module.restore(pair.request, slots[:-1], pair.allocator)
    assert pair.request.to_finish == "told before"
    assert "kv_cache_cpu" not in vars(pair.request) and pair.request.skip_radix_cache_insert


# Where the gate is refused


def changed(pair: Pair, change: str) -> tuple[Any, Any]:
    """The scheduler and the draft pool of an engine that is wrong in one way."""
    one, pool = pair.scheduler, pair.draft
    module = pair.world.module("speculative.eagle_worker_v2")
    if change == "prefill":
        one.disaggregation_mode = SimpleNamespace(value="prefill")
    elif change == "no draft":
        pool = None
    elif change == "worker":
        one.draft_worker = SimpleNamespace(draft_worker=object.__new__(type("MultiLayerEagleDraftWorker", (), {})))
    elif change == "subclass":
        one.draft_worker.draft_worker = object.__new__(type("Standalone", (module.EagleDraftWorker,), {}))
    elif change == "topk":
        one.server_args.speculative_eagle_topk = 4
    elif change == "own pool":
        pool = pair.target
    elif change == "hisparse":
        one.enable_hisparse = True
    elif change == "hierarchical":
        one.server_args.enable_hierarchical_cache = True
    elif change == "offloaded":
        one.server_args.disaggregation_decode_enable_offload_kvcache = True
    elif change == "small":
        pool = pair.pool(4 * PAGE, 1)
    elif change in ("draft fp4", "draft mha", "draft split"):
        names = {"fp4": "MLATokenToKVPoolFP4", "mha": "MHATokenToKVPool", "split": "LayerSplitDSATokenToKVPool"}
        pool = object.__new__(type(names[change.split()[1]], (), {}))
    else:
        pair.allocator._kvcache = object.__new__(type("MLATokenToKVPoolFP4", (), {}))
    return one, pool


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("prefill", "--disaggregation-mode decode"),
        ("no draft", "a draft that has KV of its own"),
        ("worker", "single EAGLE layer, found MultiLayerEagleDraftWorker"),
        ("subclass", "single EAGLE layer, found Standalone"),
        ("topk", "--speculative-eagle-topk 1, found 4"),
        ("own pool", "a pool of the draft's own"),
        ("hisparse", "HiSparse"),
        ("hierarchical", "hierarchical cache"),
        ("offloaded", "offloaded KV"),
        ("small", "draft rows for 576 slots, found 320"),
        ("draft fp4", "pool for the draft, found MLATokenToKVPoolFP4: .*scale rows"),
        ("draft mha", "pool for the draft, found MHATokenToKVPool: .*not known"),
        ("draft split", "pool for the draft, found LayerSplitDSATokenToKVPool: .*some of its layers"),
        ("target fp4", "pool for the target, found MLATokenToKVPoolFP4: .*scale rows"),
    ],
)
def test_an_engine_that_it_was_not_made_for_does_not_start(new: World, ungated: World, change: str, told: str) -> None:
    with new.entered(), Pair(new, "mla") as pair:
        module = new.module("research.retract_draft")
        with pytest.raises(module.RetractDraftRefused, match=told) as error:
            module.admit(*changed(pair, change))
        assert GATES["draft"] in str(error.value) and not hasattr(pair.allocator, "research_draft")
    with ungated.entered(), Pair(ungated, "mla") as pair:
        ungated.module("research.retract_draft").admit(*changed(pair, change))
        assert not hasattr(pair.allocator, "research_draft")


def test_under_dcp_the_target_has_to_be_copied_right_too(alone: World) -> None:
    with alone.entered(), Pair(alone, "mla", ranks=2) as pair:
        module = alone.module("research.retract_draft")
        with pytest.raises(module.RetractDraftRefused, match=GATES["dcp"]):
            module.admit(pair.scheduler, pair.draft)


def test_under_dcp_the_layout_of_a_dsa_draft_has_to_be_declared(new: World) -> None:
    with new.entered(), Pair(new, "mla", ranks=2) as pair:
        pair.kind = "dsa"
        draft = pair.pool(8 * PAGE * 2, 1)
        module = new.module("research.retract_draft")
        with pytest.raises(module.RetractDraftRefused, match="a declared layout"):
            module.admit(pair.scheduler, draft)
        new.module("research.retract").declare(draft, latent="raw", index="replicated")
        with pytest.raises(new.module("research.retract").RetractLayoutError, match="raw latent rows for"):
            module.admit(pair.scheduler, draft)
        wide = pair.pool(8 * PAGE * 2 + PAGE, 1)
        new.module("research.retract").declare(wide, latent="raw", index="replicated")
        module.admit(pair.scheduler, wide)
        assert wide.research_layout.index == "replicated"


def test_a_gate_that_is_neither_on_nor_off_stops_the_start(patched: Tree) -> None:
    world = World(patched("decode"), **{GATES["draft"]: "2"})
    with world.entered(), pytest.raises(ValueError, match="neither on"):
        world.module("research.retract_draft")


def test_the_engine_asks_at_its_start(patched: Tree) -> None:
    source = (patched("decode") / "sglang/srt/managers/scheduler.py").read_text(encoding="utf-8")
    found = source.index("get_draft_kv_pool(", source.index("def init_disaggregation"))
    assert (
        found < source.index("retract_draft.admit(self, draft_token_to_kv_pool)") < source.index("DecodePreallocQueue(")
    )
