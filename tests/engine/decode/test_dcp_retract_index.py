"""The patch dcp-retract-index: a retracted request's rows under decode context parallelism (DCP).

The pools and allocators are the engine's own, of the unpatched and of the patched tree, on a CPU. A DCP group is one
pool and one allocator for each rank, used in turn. Where a token lies is worked out here one slot at a time, by the
rule of the engine's write kernels, which `test_the_write_kernel_stripes_every_mla_pool` and the test after it run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.decode.stubs import GATE, Engine, engine

LAYERS = 2
PAGES = 6  # pages of the allocator, besides page 0
INDEX_PAGE = 64  # the DSA pool allows no other
KEY, SCALE = 128, 4  # bytes of an index entry
RANKS = (1, 2, 4, 8)
KINDS = ("mla", "dsa", "dsa fp8", "dsa, striped index")

Tree = Callable[[str], Path]


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The DSA pool waits for the GPU by its full name."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture(scope="module")
def old(stock: Tree) -> Engine:
    return engine(stock("decode"), "1")


@pytest.fixture(scope="module")
def new(patched: Tree) -> Engine:
    return engine(patched("decode"), "1")


@pytest.fixture(scope="module")
def ungated(patched: Tree) -> Engine:
    return engine(patched("decode"), None)


def mla(tree: Engine, *, size: int, page: int, cls: str = "MLATokenToKVPool", layers: int = LAYERS) -> Any:
    return getattr(tree.pools, cls)(size, page, torch.float32, 12, 4, layers, "cpu", False)


def dsa(tree: Engine, *, size: int, index_size: int | None = None, fp8: bool = False) -> Any:
    dtype, width = (torch.float8_e4m3fn, 656) if fp8 else (torch.float32, 16)
    return tree.pools.DSATokenToKVPool(
        size, INDEX_PAGE, 12, dtype, 4, LAYERS, "cpu", KEY, False, width, index_buf_size=index_size
    )


def allocator(tree: Engine, pool: Any, *, size: int, page: int) -> Any:
    return tree.allocators.PagedTokenToKVPoolAllocator(size, page, torch.float32, "cpu", pool, False)


class Group:
    """A DCP group in one process: for each rank the pool and the allocator that the engine would give it."""

    def __init__(self, tree: Engine, size: int, kind: str = "mla", *, page: int = 4, chunk: int | None = None) -> None:
        self.tree, self.size, self.kind = tree, size, kind
        page = page if kind == "mla" else INDEX_PAGE
        self.wide = page * size
        self.striped_index = kind == "dsa, striped index" and size > 1
        rows = PAGES * page
        self.pools, self.allocators = [], []
        for rank in range(size):
            with tree.rank(rank, size):
                if kind == "mla":
                    pool = mla(tree, size=rows, page=page)
                else:  # a replicated index spans all slots; its pool adds one local page by itself
                    span = rows if self.striped_index else rows * size + page * (size - 1)
                    pool = dsa(tree, size=rows, index_size=span, fp8=kind == "dsa fp8")
                if self.striped_index and tree.retract:
                    tree.retract.declare(pool, index="striped")
                pool.cpu_offloading_chunk_size = chunk or pool.cpu_offloading_chunk_size
                self.pools.append(pool)
                self.allocators.append(allocator(tree, pool, size=rows * size, page=self.wide))

    def slots(self, pages: list[int], count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        assert count <= len(pages) * self.wide and all(1 <= page <= PAGES for page in pages)
        return torch.tensor([pages[t // self.wide] * self.wide + t % self.wide for t in range(count)], dtype=dtype)

    def save(self, slots: torch.Tensor) -> list[Any]:
        saved = []
        for rank, own in enumerate(self.allocators):
            with self.tree.rank(rank, self.size):
                saved.append(own.get_cpu_copy(slots))
        return saved

    def restore(self, saved: list[Any], slots: torch.Tensor) -> None:
        for rank, own in enumerate(self.allocators):
            with self.tree.rank(rank, self.size):
                own.load_cpu_copy(saved[rank], slots)

    def noise(self, seed: int) -> None:
        """Other requests write everywhere."""
        for rank, pool in enumerate(self.pools):
            scribble(pool, seed * self.size + rank)

    def image(self) -> list[list[torch.Tensor]]:
        return [[buffer.clone() for buffer in buffers(pool)] for pool in self.pools]

    def cells(self, slots: torch.Tensor) -> list[tuple[torch.Tensor, list[int]]]:
        """All of the request's memory: (a buffer's bytes by entry, its entries there), by rank, in token order."""
        found = []
        for rank, pool in enumerate(self.pools):
            rows = [slot // self.size for slot in slots.tolist() if slot % self.size == rank]
            found += [(buffer.view(torch.uint8).flatten(1), rows) for buffer in pool.kv_buffer]
            entries = rows if self.striped_index else slots.tolist()
            for buffer in getattr(pool, "index_k_with_scale_buffer", []):  # a page: all keys, then all scales
                keys, scales = buffer.split([INDEX_PAGE * KEY, INDEX_PAGE * SCALE], dim=1)
                found += [(keys.reshape(-1, KEY), entries), (scales.reshape(-1, SCALE), entries)]
        return found

    def read(self, slots: torch.Tensor) -> list[torch.Tensor]:
        return [memory[entries] for memory, entries in self.cells(slots)]


def buffers(pool: Any) -> list[torch.Tensor]:
    return [*pool.kv_buffer, *getattr(pool, "index_k_with_scale_buffer", [])]


def scribble(pool: Any, seed: int) -> None:
    """Fill a pool with bytes that hardly repeat."""
    random = torch.Generator().manual_seed(seed)
    block = torch.randint(0, 256, (50_021,), generator=random, dtype=torch.uint8)  # a prime, so no row meets itself
    for number, buffer in enumerate(buffers(pool)):
        view = buffer.view(torch.uint8).view(-1)
        view.copy_(block.roll(1009 * number).repeat(len(view) // len(block) + 1)[: len(view)])


def round_trip(group: Group, before: torch.Tensor, after: torch.Tensor) -> None:
    """Retract from `before`, let others overwrite everything, resume at `after`; nothing else may change."""
    group.noise(1)
    mine = group.read(before)
    saved = group.save(before)
    group.noise(2)
    untouched = group.image()
    group.restore(saved, after)
    assert same(group.read(after), mine)
    for rank, pool in enumerate(group.pools):
        rows = {slot // group.size for slot in after.tolist() if slot % group.size == rank}
        pages = {entry // INDEX_PAGE for entry in (rows if group.striped_index else after.tolist())}
        for number, (now, then) in enumerate(zip(buffers(pool), untouched[rank], strict=True)):
            others = torch.ones(len(now), dtype=torch.bool)
            others[list(rows if number < LAYERS else pages)] = False
            assert same(now[others], then[others])


def same(left: Any, right: Any) -> bool:
    """Bit for bit, through the lists and dicts of a saved copy."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if not isinstance(left, torch.Tensor):
        return bool(left == right)
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# What the unpatched engine does


def test_the_unpatched_engine_saves_the_wrong_rows_of_low_slots_and_says_nothing(old: Engine) -> None:
    group = Group(old, 2)
    slots = group.slots([1, 2], 11)
    group.noise(1)
    rows = [chunk[:] for chunk in group.save(slots)[0][0]]
    assert same(rows, [group.pools[0].kv_buffer[0][slots]])
    assert not same(rows, [group.pools[0].kv_buffer[0][slots[0::2] // 2]])


def test_the_unpatched_engine_writes_over_the_rows_of_another_request(old: Engine) -> None:
    group = Group(old, 2)
    mine, neighbour = group.slots([1], 8), group.slots([2, 3], 16)
    group.noise(1)
    saved = group.save(mine)
    group.noise(2)
    theirs = group.read(neighbour)
    group.restore(saved, mine)
    assert not same(group.read(neighbour), theirs)


@pytest.mark.parametrize("size", RANKS[1:])
def test_the_unpatched_engine_fails_on_slots_above_its_rows(old: Engine, size: int) -> None:
    group = Group(old, size)
    with pytest.raises(IndexError, match="out of bounds"):
        group.save(group.slots([PAGES], group.wide))


# The layout, from the engine's own write kernel


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("spanning", [False, True], ids=["local rows", "rows for all slots"])
def test_the_write_kernel_stripes_every_mla_pool(old: Engine, size: int, spanning: bool) -> None:
    scale = size if spanning else 1  # the engine sizes a draft's pool for all slots, and this does not unstripe it
    slots = torch.arange(4 * size, 4 * size + 21)
    values = torch.arange(1.0, 22.0).view(21, 1, 1)
    for rank in range(size):
        pool = mla(old, size=24 * scale, page=4 * scale, layers=1)
        with old.rank(rank, size):
            old.write(pool, slots, values.expand(21, 1, 12).contiguous(), values.expand(21, 1, 4).contiguous())
        expected = torch.zeros_like(pool.kv_buffer[0])
        for slot, value in zip(slots.tolist(), values, strict=True):
            if slot % size == rank:
                expected[slot // size] = value
        assert torch.equal(pool.kv_buffer[0], expected)


@pytest.mark.parametrize("size", RANKS)
def test_the_index_write_kernel_stores_every_slot_on_every_rank(old: Engine, size: int) -> None:
    slots = torch.arange(INDEX_PAGE - 5, INDEX_PAGE + 6)
    keys = torch.randint(0, 120, (11, KEY), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(11, 1)
    for rank in range(size):
        pool = dsa(old, size=2 * INDEX_PAGE)
        with old.rank(rank, size):
            old.write_index(pool, slots, keys, scales)
        expected = torch.zeros_like(pool.index_k_with_scale_buffer[0])
        for token, slot in enumerate(slots.tolist()):
            page, place = divmod(slot, INDEX_PAGE)
            expected[page, place * KEY : (place + 1) * KEY] = keys[token].view(torch.uint8)
            start = INDEX_PAGE * KEY + place * SCALE
            expected[page, start : start + SCALE] = scales[token].view(torch.uint8)
        assert torch.equal(pool.index_k_with_scale_buffer[0], expected)


# Round trips


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", RANKS)
def test_a_request_comes_back_whole_at_other_pages(new: Engine, kind: str, size: int) -> None:
    group = Group(new, size, kind)
    wide = group.wide
    for count in (1, size - 1, size, size + 1, wide - 1, wide, wide + 1, 2 * wide + size // 2 + 1, 3 * wide):
        round_trip(group, group.slots([2, 6, 1], count), group.slots([5, 3, 4], count))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_both_slot_types_come_back_and_keep_their_type(new: Engine, kind: str, dtype: torch.dtype) -> None:
    group = Group(new, 4, kind)
    before, after = group.slots([6, 2], group.wide + 3, dtype), group.slots([2, 5], group.wide + 3, dtype)
    round_trip(group, before, after)
    with new.rank(1, 4):
        assert new.retract.latent_rows(group.pools[1], before).dtype == dtype
        if kind != "mla":
            assert new.retract.index_pages(group.pools[1], before).dtype == dtype


def test_pages_may_overlap_between_the_two_ends(new: Engine) -> None:
    group = Group(new, 2)
    round_trip(group, group.slots([1, 2, 3], 23), group.slots([3, 1, 2], 23))


def test_slots_of_the_engines_own_allocator_come_back(new: Engine) -> None:
    group = Group(new, 4, "dsa")
    first = [own.alloc(2 * group.wide) for own in group.allocators]
    second = [own.alloc(2 * group.wide) for own in group.allocators]
    assert all(torch.equal(first[0], other) for other in first)
    round_trip(group, first[0][:-3], second[0][:-3])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_owns_no_token_saves_and_restores_no_row(new: Engine, kind: str) -> None:
    group = Group(new, 8, kind)
    before, after = group.slots([2], 3), group.slots([4], 3)
    for rank, saved in enumerate(group.save(before)):
        latent = saved if kind == "mla" else saved["kv"]
        assert [len(chunk) for layer in latent for chunk in layer] == ([1] * LAYERS if rank < 3 else [])
        if group.striped_index:
            assert len(saved["index_k"][0]) == (1 if rank < 3 else 0)
    round_trip(group, before, after)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", RANKS)
def test_a_request_without_tokens_is_no_trouble(new: Engine, kind: str, size: int) -> None:
    group = Group(new, size, kind)
    none = torch.empty(0, dtype=torch.int32)
    round_trip(group, none, none)


@pytest.mark.parametrize(
    ("chunk", "count", "expected"),
    [(8, 16, [8]), (8, 18, [8, 1]), (8, 14, [7]), (3, 16, [3, 3, 2]), (1, 6, [1, 1, 1]), (8, 1, [1])],
)
def test_a_chunk_counts_the_rows_of_the_rank_and_not_the_slots(
    new: Engine, chunk: int, count: int, expected: list[int]
) -> None:
    group = Group(new, 2, chunk=chunk)
    saved = group.save(group.slots([1, 2, 3], count))
    assert [[len(part) for part in layer] for layer in saved[0]] == [expected] * LAYERS
    round_trip(group, group.slots([1, 2, 3], count), group.slots([6, 4, 5], count))


@pytest.mark.parametrize("kind", ["dsa", "dsa, striped index"])
@pytest.mark.parametrize("chunk", [1, 64, 128, 200])
def test_index_pages_come_back_in_chunks_too(new: Engine, kind: str, chunk: int) -> None:
    group = Group(new, 2, kind, chunk=chunk)
    round_trip(group, group.slots([1, 2, 3], 300), group.slots([6, 4, 5], 300))


def test_two_requests_do_not_meet(new: Engine) -> None:
    group = Group(new, 4, "dsa")
    one, two = group.slots([1, 4], group.wide + 5), group.slots([2, 3], group.wide + 9)
    group.noise(3)
    mine, yours = group.read(one), group.read(two)
    saved_one, saved_two = group.save(one), group.save(two)
    group.noise(4)
    group.restore(saved_one, group.slots([6, 2], group.wide + 5))
    group.restore(saved_two, group.slots([1, 5], group.wide + 9))
    assert same(group.read(group.slots([6, 2], group.wide + 5)), mine)
    assert same(group.read(group.slots([1, 5], group.wide + 9)), yours)


def test_a_resumed_request_of_another_length_is_refused_by_the_engine(new: Engine) -> None:
    group = Group(new, 2)
    saved = group.save(group.slots([1], 8))
    with pytest.raises(AssertionError):
        group.restore(saved, group.slots([2], 6))


def test_the_state_half_of_a_hybrid_pool_gets_its_own_ids(new: Engine) -> None:
    size, state = 2, mock.Mock()
    pools = []
    for rank in range(size):
        with new.rank(rank, size):
            pool = new.pools.HybridLinearKVPool(
                24, torch.float32, 4, 1, 16, [0, 2], "cpu", state, use_mla=True, kv_lora_rank=12, qk_rope_head_dim=4
            )
            pools.append((pool, allocator(new, pool, size=48, page=8)))
    before, after = torch.arange(8, 19), torch.arange(24, 35)
    for rank, (pool, own) in enumerate(pools):
        latent = pool.full_kv_pool.kv_buffer
        for layer, buffer in enumerate(latent):
            buffer[4:10] = torch.arange(6.0).view(6, 1, 1) + 10 * layer + 100 * rank
        with new.rank(rank, size):
            copy = own.get_cpu_copy(before, mamba_indices=torch.tensor([5]))
            own.load_cpu_copy(copy, after, mamba_indices=torch.tensor([7]))
        for layer, buffer in enumerate(latent):
            owned = 6 - rank
            assert buffer[12 : 12 + owned, 0, 0].tolist() == [t + 10 * layer + 100 * rank for t in range(owned)]
            assert not buffer[12 + owned :].any()
    assert [call.args[0].tolist() for call in state.get_cpu_copy.call_args_list] == [[5]] * size
    assert [call.args[1].tolist() for call in state.load_cpu_copy.call_args_list] == [[7]] * size


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_request_comes_back_at_any_pages(new: Engine, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(RANKS), "ranks")
    page = data.draw(st.integers(1, 5), "page")
    group = Group(new, size, page=page, chunk=data.draw(st.integers(1, 9), "chunk"))
    pages = data.draw(st.integers(1, PAGES), "pages")
    count = data.draw(st.integers(0, pages * group.wide), "tokens")
    ends = []
    for end in ("before", "after"):
        order = data.draw(st.permutations(range(1, PAGES + 1)), end)
        ends.append(group.slots(order[:pages], count, data.draw(st.sampled_from([torch.int32, torch.int64]))))
    round_trip(group, *ends)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_exactly_whole_pages_in_order_are_accepted_and_by_every_rank_alike(new: Engine, data: st.DataObject) -> None:
    size, page = data.draw(st.sampled_from(RANKS[1:]), "ranks"), data.draw(st.integers(1, 3), "page")
    group = Group(new, size, page=page)
    count = data.draw(st.integers(1, 3 * group.wide), "tokens")
    slots = group.slots(data.draw(st.permutations(range(1, PAGES + 1)))[:3], count)
    end = (PAGES + 1) * group.wide
    for _ in range(data.draw(st.integers(0, 2), "changes")):
        place = data.draw(st.integers(0, count - 1), "place")
        slots[place] = data.draw(st.integers(-group.wide, end + group.wide), "slot")
    whole = all(s % group.wide == t % group.wide and group.wide <= s < end for t, s in enumerate(slots.tolist()))
    for rank, pool in enumerate(group.pools):
        with new.rank(rank, size):
            if whole:
                expected = [s // size for s in slots.tolist() if s % size == rank]
                assert new.retract.latent_rows(pool, slots).tolist() == expected
            else:
                with pytest.raises(new.retract.RetractLayoutError, match="needs slots"):
                    new.retract.latent_rows(pool, slots)


# Off means off


def outcome(action: Callable[[], Any]) -> Any:
    """What an action gives: its value, or its exception's type and words."""
    try:
        return action()
    except Exception as error:
        return type(error), str(error)


def outcomes(tree: Engine, size: int) -> list[Any]:
    """Every result of saving and restoring that these pools give, right or wrong, and the memory it leaves behind."""
    results: list[Any] = []
    for kind in ("mla", "dsa", "fp4", "short index"):
        for rank in range(size):
            with tree.rank(rank, size):
                if kind == "dsa":
                    pool = dsa(tree, size=PAGES * INDEX_PAGE, index_size=(PAGES * size + size - 1) * INDEX_PAGE)
                elif kind == "short index":
                    pool = dsa(tree, size=PAGES * INDEX_PAGE)
                else:
                    cls = "MLATokenToKVPoolFP4" if kind == "fp4" else "MLATokenToKVPool"
                    pool = mla(tree, size=24, page=4, cls=cls)
                scribble(pool, rank)
                page = pool.page_size * size
                own = allocator(tree, pool, size=PAGES * page, page=page)
                pool.cpu_offloading_chunk_size = 5
                whole = torch.arange(page, 3 * page - 1)
                wild = torch.tensor([9, 3, 3, 17, 0, 11])
                ordered = [whole, whole[:1], whole[:0], whole[1:].int(), whole + 4 * page]
                for before in (*ordered, whole.flip(0), wild, wild.int()):
                    saved = outcome(partial(own.get_cpu_copy, before))
                    results.append(saved)
                    if not isinstance(saved, tuple):
                        results.append(outcome(partial(own.load_cpu_copy, saved, before.flip(0))))
                        results.append([buffer.clone() for buffer in buffers(pool)])
    return results


@pytest.mark.parametrize("size", RANKS)
def test_without_the_gate_every_outcome_is_the_unpatched_engines(old: Engine, ungated: Engine, size: int) -> None:
    ours, theirs = outcomes(ungated, size), outcomes(old, size)
    assert same(ours, theirs)
    if size > 1:  # the comparison saw the failures as well
        assert any(isinstance(result, tuple) and result[0] is IndexError for result in theirs)


def test_with_the_gate_and_one_rank_every_outcome_is_the_unpatched_engines(old: Engine, new: Engine) -> None:
    assert same(outcomes(new, 1), outcomes(old, 1))


@pytest.mark.parametrize(("tree", "size"), [("ungated", 2), ("new", 1)])
def test_an_idle_patch_hands_back_the_list_itself_and_leaves_no_mark(
    request: pytest.FixtureRequest, tree: str, size: int
) -> None:
    engine_: Engine = request.getfixturevalue(tree)
    with engine_.rank(0, size):
        pool = mla(engine_, size=24, page=4, cls="MLATokenToKVPoolFP4")
        engine_.retract.declare(pool, latent="no such word")
        allocator(engine_, pool, size=24 * size, page=4 * size)
        slots = torch.tensor([7, 7, 1])
        assert engine_.retract.latent_rows(pool, slots) is slots
        assert engine_.retract.index_pages(pool, slots).tolist() == [1]
    assert not hasattr(pool, "research_layout")


@pytest.mark.parametrize("value", ["maybe", "2", "on!"])
def test_a_gate_that_is_neither_on_nor_off_stops_the_start(patched: Tree, value: str) -> None:
    with pytest.raises(ValueError, match=GATE):
        engine(patched("decode"), value)


@pytest.mark.parametrize("value", ["0", "off", ""])
def test_a_gate_that_says_off_is_off(patched: Tree, value: str) -> None:
    assert not engine(patched("decode"), value).retract.ON


# Pools that are not striped, or not the allocator's own


@pytest.mark.parametrize("index", [False, True], ids=["mla", "dsa"])
def test_a_raw_pool_is_copied_as_the_unpatched_engine_would(new: Engine, old: Engine, index: bool) -> None:
    size, page = 2, INDEX_PAGE
    saved = []
    for tree in (old, new):
        with tree.rank(1, size):
            target = mla(tree, size=4 * page, page=page)
            own = allocator(tree, target, size=8 * page, page=2 * page)
            draft = dsa(tree, size=10 * page) if index else mla(tree, size=8 * page, page=2 * page)
            if tree.retract:
                tree.retract.declare(draft, latent="raw")
                tree.retract.admit(own, draft)
            scribble(draft, 5)
            slots = torch.arange(2 * page, 5 * page - 3)
            saved.append(draft.get_cpu_copy(slots))
            draft.load_cpu_copy(saved[-1], slots + 4 * page)
            saved.append([buffer.clone() for buffer in draft.kv_buffer])
            if tree.retract:
                assert tree.retract.latent_rows(draft, slots) is slots
    assert same(saved[:2], saved[2:])


def test_a_declared_striped_draft_comes_back_like_its_target(new: Engine) -> None:
    group = Group(new, 4, "dsa")
    drafts = Group(new, 4, "dsa")
    for rank, draft in enumerate(drafts.pools):
        del draft.research_layout
        with new.rank(rank, 4):
            new.retract.declare(draft, latent="striped")
            new.retract.admit(group.allocators[rank], draft)
    round_trip(drafts, drafts.slots([3, 1], 300), drafts.slots([2, 6], 300))


def test_a_draft_whose_layout_nobody_stated_is_refused(new: Engine) -> None:
    with new.rank(0, 2):
        own = allocator(new, mla(new, size=24, page=4), size=48, page=8)
        draft = mla(new, size=48, page=8)
        with pytest.raises(new.retract.RetractLayoutError, match="statement where the latent rows of MLATokenToKVPool"):
            new.retract.admit(own, draft)
        with pytest.raises(new.retract.RetractLayoutError, match="admitted before it is copied"):
            draft.get_cpu_copy(torch.arange(8, 16))


def test_a_declaration_alone_admits_nothing(new: Engine) -> None:
    with new.rank(0, 2):
        pool = mla(new, size=24, page=4)
        new.retract.declare(pool, latent="raw")
        with pytest.raises(new.retract.RetractLayoutError, match="admitted before it is copied"):
            pool.load_cpu_copy([[], []], torch.arange(8, 16))


@pytest.mark.parametrize("word", [{"latent": "replicated"}, {"index": "raw"}, {"latent": ""}, {"index": "Striped"}])
def test_a_layout_that_does_not_exist_cannot_be_declared(new: Engine, word: dict[str, str]) -> None:
    with new.rank(0, 2), pytest.raises(new.retract.RetractLayoutError, match=r"(rows|pages) striped or \w+, not '"):
        new.retract.declare(mla(new, size=24, page=4), **word)


# Refused at the start: when the allocator is made


def refused(tree: Engine, pool: Any, words: str, *, size: int, page: int) -> None:
    with pytest.raises(tree.retract.RetractLayoutError, match=words) as error:
        allocator(tree, pool, size=size, page=page)
    assert str(error.value).startswith(f"{GATE}=1 with decode context parallelism needs ")


def test_an_fp4_pool_is_refused_at_the_start_and_at_the_copy(new: Engine) -> None:
    words = "MLATokenToKVPoolFP4: the engine's copy leaves out its scale rows"
    with new.rank(1, 2):
        pool = mla(new, size=24, page=4, cls="MLATokenToKVPoolFP4")
        refused(new, pool, words, size=48, page=8)
        with pytest.raises(new.retract.RetractLayoutError, match=words):
            pool.get_cpu_copy(torch.arange(8, 16))
        with pytest.raises(new.retract.RetractLayoutError, match=words):
            new.retract.declare(pool, latent="striped")


def test_a_layer_split_pool_is_refused_at_the_start(new: Engine) -> None:
    cls = new.layer_split.LayerSplitDSATokenToKVPool
    with new.rank(0, 2):  # made without its constructor, which wants the ranks' broadcast group
        refused(new, object.__new__(cls), "LayerSplitDSATokenToKVPool: a rank holds only some", size=48, page=8)


@pytest.mark.parametrize("base", ["MLATokenToKVPool", "DSATokenToKVPool", "KVCache", "HybridLinearKVPool"])
def test_a_pool_of_a_class_that_nobody_checked_is_refused_at_the_start(new: Engine, base: str) -> None:
    unknown: Any = type("FuturePool", (getattr(new.pools, base),), {})
    unknown.__abstractmethods__ = frozenset()
    with new.rank(0, 2):
        refused(new, object.__new__(unknown), "FuturePool: where its rows lie is not known", size=48, page=8)


def test_an_mha_pool_is_refused_at_the_start_alone_or_inside_a_hybrid_pool(new: Engine) -> None:
    plain = object.__new__(new.pools.MHATokenToKVPool)
    hybrid = object.__new__(new.pools.HybridLinearKVPool)
    hybrid.full_kv_pool = plain
    with new.rank(0, 2):
        for pool in (plain, hybrid):
            refused(new, pool, "an MLA or DSA pool, found MHATokenToKVPool", size=48, page=8)


def test_a_rocm_build_is_refused_at_the_start(new: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with new.rank(0, 2):
        refused(new, mla(new, size=24, page=4), "found a ROCm build", size=48, page=8)


def test_the_stock_index_of_a_dsa_pool_is_refused_at_the_start(new: Engine) -> None:
    with new.rank(0, 2):
        words = r"10 replicated index pages for 640 slots, found 5 in a layer; a striped index has to be declared"
        refused(new, dsa(new, size=256), words, size=512, page=128)


def test_one_index_page_too_few_is_refused_and_one_more_is_enough(new: Engine) -> None:
    with new.rank(0, 2):
        exact = 512 + INDEX_PAGE  # the pool adds a page
        refused(new, dsa(new, size=256, index_size=exact - 2), "10 replicated index pages", size=512, page=128)
        allocator(new, dsa(new, size=256, index_size=exact - 1), size=512, page=128)


def test_a_striped_index_needs_its_share_of_pages(new: Engine) -> None:
    with new.rank(0, 2):
        short, enough = dsa(new, size=256, index_size=192), dsa(new, size=256)
        for pool in (short, enough):
            new.retract.declare(pool, index="striped")
        refused(new, short, "5 striped index pages for 640 slots, found 4", size=512, page=128)
        allocator(new, enough, size=512, page=128)


def test_a_striped_index_under_raw_rows_is_refused(new: Engine) -> None:
    with new.rank(0, 2):
        pool = dsa(new, size=1024)
        new.retract.declare(pool, latent="raw", index="striped")
        refused(new, pool, "striped latent rows under striped index pages", size=512, page=128)


def test_too_few_rows_in_one_layer_are_refused_at_the_start(new: Engine) -> None:
    with new.rank(0, 2):
        pool = mla(new, size=24, page=4)
        pool.kv_buffer[1] = pool.kv_buffer[1][:-1]
        refused(new, pool, "striped latent rows for 56 slots, found 27 rows in a layer", size=48, page=8)


def test_too_few_raw_rows_are_refused_at_the_start(new: Engine) -> None:
    with new.rank(0, 2):
        own = allocator(new, mla(new, size=24, page=4), size=48, page=8)
        draft = mla(new, size=47, page=8)
        new.retract.declare(draft, latent="raw")
        with pytest.raises(new.retract.RetractLayoutError, match="raw latent rows for 56 slots, found 55"):
            new.retract.admit(own, draft)


@pytest.mark.parametrize(("size", "page"), [(2, 5), (4, 6), (8, 4)])
def test_allocator_pages_that_ranks_cannot_share_are_refused_at_the_start(new: Engine, size: int, page: int) -> None:
    with new.rank(0, size):
        refused(new, mla(new, size=240, page=4), f"a multiple of {size} slots, found {page}", size=240, page=page)


def test_allocator_pages_that_cut_an_index_page_are_refused_at_the_start(new: Engine) -> None:
    with new.rank(0, 2):
        refused(new, dsa(new, size=256, index_size=1024), "a multiple of 64 slots, found 96", size=480, page=96)
        pool = dsa(new, size=256)
        new.retract.declare(pool, index="striped")
        refused(new, pool, "a multiple of 128 slots, found 64", size=512, page=64)


def test_a_size_that_is_no_whole_number_of_pages_is_fine(new: Engine) -> None:
    with new.rank(0, 2):
        pool = mla(new, size=27, page=4)  # the allocator floors: 54 slots are 6 pages of 8, the last slot is 55
        allocator(new, pool, size=54, page=8)
        assert new.retract.latent_rows(pool, torch.arange(48, 56)).tolist() == [24, 25, 26, 27]
        with pytest.raises(new.retract.RetractLayoutError, match="to 55, found 56"):
            new.retract.latent_rows(pool, torch.arange(56, 57))


# Refused at the copy


@pytest.mark.parametrize("kind", ["mla", "dsa", "dsa, striped index"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda slots, wide: slots + 1, "from a page's start on"),
        (lambda slots, wide: slots[1:], "from a page's start on"),
        (lambda slots, wide: slots.flip(0), "in token order"),
        (lambda slots, wide: torch.cat([slots[:3], slots[4:]]), "in token order"),
        (lambda slots, wide: slots * 0, "in token order"),
        (lambda slots, wide: slots - 2 * wide, "page 0 is the pad"),
        (lambda slots, wide: slots - 3 * wide, "page 0 is the pad"),
        (lambda slots, wide: slots + PAGES * wide, "page 0 is the pad"),
        (lambda slots, wide: slots.view(1, -1), "a flat list of int32 or int64 slots"),
        (lambda slots, wide: slots.short(), "a flat list of int32 or int64 slots"),
        (lambda slots, wide: slots.float(), "a flat list of int32 or int64 slots"),
        (lambda slots, wide: slots > 0, "a flat list of int32 or int64 slots"),
    ],
)
def test_slots_that_do_not_fit_are_refused_by_every_rank_before_a_row_moves(
    new: Engine, kind: str, change: Callable[[torch.Tensor, int], torch.Tensor], words: str
) -> None:
    group = Group(new, 2, kind)
    good = group.slots([2, 3], group.wide + 5)
    saved = group.save(good)
    before = group.image()
    bad = change(good, group.wide)
    for rank, own in enumerate(group.allocators):
        with new.rank(rank, 2):
            with pytest.raises(new.retract.RetractLayoutError, match=words):
                own.get_cpu_copy(bad)
            with pytest.raises(new.retract.RetractLayoutError, match=words):
                own.load_cpu_copy(saved[rank], bad)
            if kind != "mla":
                with pytest.raises(new.retract.RetractLayoutError, match=words):
                    new.retract.index_pages(group.pools[rank], bad)
    assert same(group.image(), before)
