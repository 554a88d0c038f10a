"""The arithmetic reproduces every figure of the notes, agrees with brute force on small cases, and refuses nonsense."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.evidence import claims
from lab.models.addresses import Chain, Place, Shards, Stripes
from lab.models.capacity import (
    Budget,
    Keeping,
    Kv,
    Model,
    Reserve,
    fits,
    gain,
    owned,
    pool,
    tokens,
)
from lab.models.collectives import Collective, Op, broadcast_total
from lab.models.fleet import Design, Fleet, Load, simulate
from lab.models.transfer import (
    HeadSlices,
    Packing,
    Way,
    broadcast_latency,
    by_pair,
    by_source,
    paired_runs,
    runs,
    zigzag,
)

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
OBSERVED = 110_464


# Collectives.


@given(st.sampled_from(Op), st.integers(1, 8), st.integers(0, 64))
def test_a_collective_sends_what_a_ring_sends(op: Op, ranks: int, part: int) -> None:
    """Counted piece by piece: in each of n - 1 steps a rank hands one part to its neighbour."""
    steps = (ranks - 1) * (2 if op is Op.ALL_REDUCE else 1)
    assert Collective("it", op, ranks, ranks * part).sent == sum(part for _ in range(steps))


@given(st.integers(1, 8), st.integers(0, 64))
def test_a_broadcast_reaches_every_other_rank_once(ranks: int, whole: int) -> None:
    assert broadcast_total(ranks, whole) == sum(whole for _ in range(1, ranks))


# Capacity.


def test_the_observed_pool_costs_what_was_reported_with_and_without_a_layer_split() -> None:
    model = Model()
    assert owned(78, 4) == [20, 20, 19, 19]
    assert round(pool(model, OBSERVED) / GIB, 2) == 6.33
    assert [round(pool(model, OBSERVED, layers) / GIB, 2) for layers in (19, 20)] == [1.54, 1.62]
    assert round((pool(model, OBSERVED) - pool(model, OBSERVED, 20)) / GIB, 1) == 4.7


def test_the_split_of_8192_tokens_costs_what_was_reported() -> None:
    model = Model(kv=Kv.BF16)
    assert [round(pool(model, 8192, layers) / GIB, 2) for layers in (78, 20)] == [0.77, 0.20]


def test_one_prefix_and_four_fresh_parts_fit_and_five_do_not() -> None:
    assert fits(OBSERVED, 73_728, *[8_192] * 4) and 73_728 + 4 * 8_192 == 106_496
    assert not fits(OBSERVED, 73_728, *[8_192] * 5) and 73_728 + 5 * 8_192 == 114_688
    assert not fits(OBSERVED, 81_920, 81_920)


def test_dcp_gains_less_than_its_ranks_because_index_keys_are_on_every_rank() -> None:
    assert round(gain(Model(), Keeping.DCP, 2), 2) == 1.71
    assert 2.66 <= gain(Model(), Keeping.DCP, 4) <= 2.67
    assert gain(Model(), Keeping.PAGE_SHARD, 4) == pytest.approx(4)


@given(
    st.sampled_from(Keeping),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(0, 1 << 22),
    st.sampled_from(Kv),
    st.integers(0, 40),
)
def test_what_is_said_to_fit_fits_byte_for_byte(
    keeping: Keeping, ranks: int, layers: int, budget: int, kv: Kv, longest: int
) -> None:
    """Every row is laid down in turn, rank by rank; one page more would not have fitted."""
    model, page = Model(layers, kv), 4

    def needed(count: int) -> int:
        pages = count // page
        if keeping is Keeping.FULL:
            return (pages + 1) * page * sum(kv.value + 132 for _ in range(layers))
        if keeping is Keeping.LAYER_SPLIT:
            spare = 1 if ranks > 1 else 0  # the scratch into which another owner's layer comes
            return max((pages + 1) * page * (own + spare) * (kv.value + 132) for own in owned(layers, ranks))
        if keeping is Keeping.PAGE_SHARD:
            spare = (longest + page) * (kv.value + 132) if ranks > 1 and longest else 0
            return (-(-pages // ranks) + 1) * page * sum(kv.value + 132 for _ in range(layers)) + spare
        slots = (-(-pages // ranks) + 1) * page
        return slots * sum(kv.value + ranks * 132 for _ in range(layers))

    held = tokens(model, keeping, ranks, Budget(budget), page, gathered=longest)
    if held:
        assert needed(held) <= budget
    step = page * (ranks if keeping in (Keeping.PAGE_SHARD, Keeping.DCP) else 1)
    assert needed(held + step) > budget


def test_page_shards_hold_less_than_their_ranks_times_a_copy_for_what_is_gathered() -> None:
    budget = Budget(int(6.33 * GIB))
    plain = tokens(Model(), Keeping.PAGE_SHARD, 4, budget)
    held = tokens(Model(), Keeping.PAGE_SHARD, 4, budget, gathered=81_920)
    assert plain == 4 * OBSERVED > held > 3.9 * OBSERVED
    # One rank has every page at hand.
    assert tokens(Model(), Keeping.PAGE_SHARD, 1, budget, gathered=81_920) == OBSERVED


def test_what_a_model_names_as_its_evidence_is_there() -> None:
    known = {claim.id for claim in claims.read(ROOT)[0]}
    named = [
        (path.name, name)
        for path in (ROOT / "lab/models").glob("*.py")
        for name in re.findall(r"evidence\s+id\s+``([^`]+)``", path.read_text(encoding="utf-8"))
    ]
    assert len(named) >= 2
    assert [pair for pair in named if pair[1] not in known] == []


def test_what_is_reserved_holds_no_tokens() -> None:
    model = Model()
    whole = tokens(model, Keeping.FULL, 1, Budget(8 * GIB))
    assert tokens(model, Keeping.FULL, 1, Budget(9 * GIB, Reserve(workspace=GIB // 2, pack=GIB // 2))) == whole
    with pytest.raises(ValueError, match="are reserved of"):
        tokens(model, Keeping.FULL, 1, Budget(1, Reserve(draft=2)))


# Transfer.


def test_the_head_slices_of_the_notes() -> None:
    path = HeadSlices(layers=48, heads=4, head=128, itemsize=2, source_tp=1, destination_tp=4)
    assert (path.item, path.stride, path.batches) == (256, 1024, 96)
    assert path.descriptors(1024) == 1024
    assert path.batch(1024) == 256 << 10


def test_the_zigzag_of_the_notes() -> None:
    ranks = zigzag(4096, 4)
    assert ranks[1] == [range(512, 1024), range(3072, 3584)]
    assert sorted(token for rank in ranks for part in rank for token in part) == list(range(4096))


@given(st.integers(1, 8), st.integers(1, 6))
def test_a_zigzag_gives_each_token_to_one_rank_and_each_rank_the_same_work(cp: int, size: int) -> None:
    chunk = 2 * cp * size
    ranks = [[token for part in parts for token in part] for parts in zigzag(chunk, cp)]
    assert sorted(token for rank in ranks for token in rank) == list(range(chunk))
    # Token t looks at t + 1 tokens: the sums differ by nothing.
    assert len({sum(token + 1 for token in rank) for rank in ranks}) == 1


@given(st.integers(1, 3), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 12))
def test_head_slices_are_what_a_walk_over_every_byte_finds(
    layers: int, source_tp: int, times: int, head: int, tokens: int
) -> None:
    """Every byte of a destination rank's heads, K and V apart, from where it lies to where it goes."""
    destination_tp = source_tp * times
    path = HeadSlices(layers, 8, head, 2, source_tp, destination_tp)
    here, there = 8 // source_tp * head * 2, 8 // destination_tp * head * 2
    way = [(token * here + byte, token * there + byte) for token in range(tokens) for byte in range(there)]
    pieces = paired_runs([source for source, _ in way], [target for _, target in way])
    assert (path.stride, path.item) == (here, there)
    assert path.batch(tokens) == len(way)
    assert path.descriptors(tokens) == pieces
    assert path.batches == sum(1 for _ in ("K", "V") for _ in range(layers))
    # All heads of all tokens, K and V, leave the sources once and arrive once.
    every = 2 * layers * tokens * 8 * head * 2
    assert path.to_each(tokens) * destination_tp == path.from_each(tokens) * source_tp == every


@given(st.integers(1, 5), st.integers(0, 300), st.integers(1, 4), st.sampled_from([8, 16]), st.integers(1, 4))
def test_every_way_of_sending_is_what_asking_row_by_row_who_sends_it_finds(
    sources: int, count: int, depth: int, page: int, ranks: int
) -> None:
    layers = owned(max(depth, 1), sources)
    pages = -(-count // page)
    ends = [sum(pages // sources + (rank < pages % sources) for rank in range(upto + 1)) for upto in range(sources)]

    def sender(way: Way, layer: int, token: int) -> int:
        if way is Way.CP0:
            return 0
        if way is Way.LAYER_OWNER:
            return next(rank for rank in range(sources) if layer < sum(layers[: rank + 1]))
        if way is Way.ALL_CP:
            return next(rank for rank in range(sources) if token // page < ends[rank])
        return token // page % sources

    for way in Way:
        found = [[0] * ranks for _ in range(sources)]
        for layer in range(sum(layers)):
            for token in range(count):
                found[sender(way, layer, token)][Stripes(ranks).place(token).rank] += 3
        assert by_source(way, layers, count, 3, page) == [sum(sizes) for sizes in found]
        assert by_pair(way, layers, count, 3, ranks, page) == found
        whole = by_pair(way, layers, count, 3, ranks, page, copies=True)
        assert whole == [[sum(sizes)] * ranks for sizes in found]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 700), st.integers(1, 5))
def test_every_way_sends_every_row_once_and_the_sources_differ(layers: list[int], count: int, row: int) -> None:
    page = 16
    depth, sources = sum(layers), len(layers)
    for way in Way:
        sent = by_source(way, layers, count, row, page)
        assert sum(sent) == depth * count * row
        assert min(sent) >= 0
    owner = [sum(depth * row for token in range(count) if token // page % sources == rank) for rank in range(sources)]
    assert by_source(Way.PAGE_OWNER, layers, count, row, page) == owner
    assert by_source(Way.CP0, layers, count, row, page)[0] == depth * count * row


def test_layer_owners_and_ranges_of_tokens_load_the_sources_alike_when_layers_divide() -> None:
    layers = owned(80, 4)
    assert by_source(Way.LAYER_OWNER, layers, 4096, 656) == by_source(Way.ALL_CP, layers, 4096, 656)


def test_layer_owners_that_also_filtered_by_token_would_lose_three_quarters() -> None:
    layers = owned(80, 4)
    sent = sum(size // 4 for size in by_source(Way.LAYER_OWNER, layers, 4096, 656))
    assert sent * 4 == sum(by_source(Way.CP0, layers, 4096, 656))


@given(
    st.lists(st.integers(0, 30), unique=True, max_size=20).flatmap(
        lambda source: st.tuples(st.just(source), st.permutations(list(range(len(source)))))
    )
)
def test_runs_are_what_a_walk_over_both_ends_finds(pair: tuple[list[int], list[int]]) -> None:
    source, destination = pair
    pieces: list[list[tuple[int, int]]] = []
    for row in zip(source, destination, strict=True):
        if pieces and (pieces[-1][-1][0] + 1, pieces[-1][-1][1] + 1) == row:
            pieces[-1].append(row)
        else:
            pieces.append([row])
    assert paired_runs(source, destination) == len(pieces)
    assert runs(destination) == paired_runs(destination, destination)


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 50), st.integers(1, 40), st.integers(0, 200))
def test_slices_cover_every_row_once_and_each_fits(buffer: int, layers: int, item: int, grid: int, rows: int) -> None:
    packing = Packing(buffer, (item,) * layers, grid)
    if buffer < layers * item:
        with pytest.raises(ValueError, match="does not hold one row"):
            packing.slices(rows)
        return
    slices = packing.slices(rows)
    assert [row for part in slices for row in part] == list(range(rows))
    assert all(packing.fits(len(part)) for part in slices)
    assert (len(slices) <= 1) == packing.fits(rows)


def test_a_layer_split_shows_the_index_broadcast_and_what_the_indexer_does_not_cover() -> None:
    assert broadcast_latency(1.0, 8.0, 5.0) == 4.0
    assert broadcast_latency(1.0, 4.0, 5.0) == 1.0


# Addresses.


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 500))
def test_every_global_slot_has_one_place_and_comes_back(owners: int, page: int, location: int) -> None:
    shards = Shards(owners, page)
    assert shards.location(shards.place(location)) == location
    places = {shards.place(other) for other in range(owners * page * 3)}
    assert places == {Place(rank, slot) for rank in range(owners) for slot in range(page * 3)}


@given(st.data())
def test_the_chain_brings_every_token_once_and_back(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 40))
    sources = data.draw(st.lists(st.integers(0, 300), min_size=count, max_size=count, unique=True))
    destinations = data.draw(st.lists(st.integers(0, 300), min_size=count, max_size=count, unique=True))
    shards, stripes = Shards(data.draw(st.integers(1, 4)), 8), Stripes(data.draw(st.integers(1, 4)))
    chain = Chain(shards, stripes, tuple(sources), tuple(destinations))
    moved = [
        move for owner in range(shards.owners) for rank in range(stripes.ranks) for move in chain.between(owner, rank)
    ]
    assert sorted(move.token for move in moved) == list(range(count))
    for move in moved:
        assert chain.token(move.destination) == move.token
        assert shards.location(move.source) == sources[move.token]


def test_one_prefill_page_feeds_several_decode_ranks() -> None:
    chain = Chain(Shards(4), Stripes(2), tuple(range(64)), tuple(range(64)))
    assert [len(chain.between(0, rank)) for rank in (0, 1)] == [32, 32]


def test_a_slot_given_out_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="given out twice"):
        Chain(Shards(2), Stripes(2), (1, 1), (1, 2))
    with pytest.raises(KeyError, match="holds no token"):
        Chain(Shards(2), Stripes(2), (1,), (2,)).token(Place(0, 0))


# The fleet.


def test_the_simulation_meets_the_static_bounds() -> None:
    """Sends that do not end in the time that counts: what is inside at once is what the pool holds."""
    one = Fleet(Design.CP0, OBSERVED, workers=1, slow=1e6)
    shared = simulate(one, Load(requests=6, burst=6, prefixes=1))
    assert (shared.peak_inside, shared.peak_locked) == (4, 106_496)
    alone = simulate(one, Load(requests=2, burst=2, cold=1.0))
    assert (alone.peak_inside, alone.peak_locked) == (1, 81_920)


@pytest.mark.parametrize(
    ("design", "shares"),
    [(Design.CP0, [78, 0, 0, 0]), (Design.LAYER_SPLIT, [20, 20, 19, 19]), (Design.PAGE_SHARD, [19.5] * 4)],
)
def test_two_requests_take_the_times_that_a_hand_computes(design: Design, shares: list[float]) -> None:
    """At once, of one prefix: the fresh part of the second is computed and sent behind the whole of the first."""
    found = simulate(Fleet(design, 2 * OBSERVED, workers=1), Load(requests=2, burst=2, prefixes=1))
    whole, hit = 81_920 / 30_000, 8_192 / 30_000
    send = 81_920 * 788 * max(shares) / 10e9
    first, second = whole + send, max(whole + hit, whole + send) + send
    assert found.latencies == pytest.approx([first, second], rel=1e-12)
    assert found.sent == [2 * 81_920 * 788 * share for share in shares]
    assert (found.hits, found.evictions, found.peak_inside, found.peak_locked) == (1, 0, 2, 73_728 + 2 * 8_192)


@pytest.mark.parametrize("design", Design)
def test_every_request_ends_every_byte_is_sent_and_the_seed_decides(design: Design) -> None:
    fleet, load = Fleet(design, 2 * OBSERVED), Load(requests=120, cold=0.2, burst=3)
    first, second = simulate(fleet, load), simulate(fleet, load)
    assert first == second != simulate(fleet, load, seed=18)
    assert first.finished == 120
    assert sum(first.sent) == 120 * (73_728 + 8_192) * 78 * 788
    assert 0 < first.hit_share < 1


def test_one_sender_carries_nearly_four_times_an_owners_share() -> None:
    load = Load(requests=120, prefixes=1)
    one = {design: simulate(Fleet(design, 4 * OBSERVED, workers=1), load) for design in Design}
    ratio = max(one[Design.CP0].sent) / max(one[Design.LAYER_SPLIT].sent)
    assert 3.8 < ratio < 4
    assert max(one[Design.CP0].sent) == sum(one[Design.CP0].sent)
    assert one[Design.ROTATED].hot_spot < 1.1
    assert sum(one[Design.CP0].sent) == sum(one[Design.LAYER_SPLIT].sent)


def test_a_slow_decode_keeps_tokens_locked_and_requests_waiting() -> None:
    load = Load(requests=200, rate=6)
    quick = simulate(Fleet(Design.CP0, OBSERVED), load)
    slow = simulate(Fleet(Design.CP0, OBSERVED, slow=8), load)
    assert slow.latency(0.5) > 2 * quick.latency(0.5)
    assert max(slow.waits) > max(quick.waits)


def test_more_prefixes_than_the_pool_holds_are_computed_again() -> None:
    few = simulate(Fleet(Design.CP0, OBSERVED), Load(requests=200, prefixes=4))
    many = simulate(Fleet(Design.CP0, OBSERVED), Load(requests=200, prefixes=40))
    assert few.evictions == 0 < many.evictions
    assert few.hit_share > 2 * many.hit_share


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: simulate(Fleet(Design.CP0, 81_919), Load()), "never fit"),
        (lambda: Load(cold=1.5), "cold share"),
        (lambda: Load(rate=0), "above zero"),
        (lambda: Fleet(Design.CP0, 0), "positive"),
        (lambda: Fleet(Design.CP0, 1, slow=0.5), "factor"),
        (lambda: Model(0), "no model"),
        (lambda: pool(Model(), 100), "whole number of pages"),
        (lambda: pool(Model(), 128, 79), "79 of 78 layers"),
        (lambda: owned(78, 0), "no 0 owners"),
        (lambda: zigzag(100, 8), "equal segments"),
        (lambda: HeadSlices(1, 4, 1, 1, 4, 2), "does not divide"),
        (lambda: HeadSlices(1, 3, 1, 1, 1, 2), "no 2 equal parts"),
        (lambda: by_source(Way.CP0, [], 1, 1), "0 sources"),
        (lambda: by_pair(Way.CP0, [], 1, 1, 1), "0 sources"),
        (lambda: by_pair(Way.CP0, [1], 1, 1, 0), "0 decode ranks"),
        (lambda: paired_runs([1], []), "go to"),
        (lambda: Shards(0), "0 owners"),
        (lambda: Shards(1).place(-1), "slot -1"),
        (lambda: Shards(1).location(Place(1, 0)), "in no pool"),
        (lambda: Stripes(1).location(Place(0, -1)), "in no pool"),
        (lambda: fits(-1), "not negative"),
        (lambda: Collective("it", Op.ALL_GATHER, 0, 1), "no collective"),
        (lambda: broadcast_total(0, 1), "no broadcast"),
        (lambda: tokens(Model(), Keeping.DCP, 0, Budget(1)), "0 ranks"),
    ],
)
def test_nonsense_is_refused_by_name(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
