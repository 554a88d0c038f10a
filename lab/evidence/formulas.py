"""The formulas behind recomputed claims, by name: each gives a quantity, from calls into ``lab.models``."""

from __future__ import annotations

from functools import partial

from lab.evidence import ledger
from lab.evidence.claims import Formula
from lab.evidence.quantity import Quantity
from lab.models import boundary, capacity, collectives, fleet, transfer
from lab.models.boundary import Layout, Shape, entry, sent
from lab.models.capacity import Keeping, Kv, Model

OBSERVED = Quantity(110_464, "tokens")  # the deployment's prefill pool
PREFIX, FRESH, OUTPUT = (Quantity(length, "tokens") for length in (73_728, 8_192, 600))  # the acceptance's requests
RATE, CARDS = 3.40, 40  # requests per second, cards
SHARD = Quantity(Shape().shard, "bytes")


def shards(size: Quantity) -> Quantity:
    return Quantity(size.over(SHARD).value, "S")


def mib(size: Quantity) -> Quantity:
    return size.over(Quantity(1 << 20, "bytes")).named("MiB")


def gib(size: Quantity) -> Quantity:
    return size.over(Quantity(1 << 30, "bytes")).named("GiB")


def _entry(layout: Layout) -> Quantity:
    return Quantity(sent(entry(layout, Shape())), "bytes")


def _part(layout: Layout, number: int) -> Quantity:
    return shards(Quantity(entry(layout, Shape())[number].sent, "bytes"))


def _layer(layout: Layout) -> Quantity:
    return _entry(layout) + Quantity(sent(boundary.exit_(layout, Shape())), "bytes")


def _pool(tokens: Quantity, layers: int | None = None, kv: Kv = Kv.FP8) -> Quantity:
    return Quantity(capacity.pool(Model(kv=kv), int(tokens.value), layers), "bytes")


def _index_share(kv: Kv) -> Quantity:
    return Quantity(capacity.INDEX_ROW, "bytes").share(Quantity(kv.value, "bytes"))


def _filter_loses() -> Quantity:
    """What is lost if each of four layer owners sends the tokens of its own range alone."""
    owners = transfer.by_source(transfer.Way.LAYER_OWNER, [20] * 4, 4096, 1)
    whole = Quantity(sum(owners), "bytes")
    return (whole - Quantity(sum(part // 4 for part in owners), "bytes")).share(whole)


def _locked(requests: int) -> Quantity:
    """The most tokens that the simulated worker had locked at once; its sends do not end in the time that counts."""
    one = fleet.Fleet(fleet.Design.CP0, int(OBSERVED.value), workers=1, slow=1e6)
    load = fleet.Load(requests=requests, burst=requests, prefixes=1)
    return Quantity(fleet.simulate(one, load).peak_locked, "tokens")


def _busiest() -> Quantity:
    ways = (transfer.Way.CP0, transfer.Way.LAYER_OWNER)
    cp0, owners = (
        Quantity(max(transfer.by_source(way, capacity.owned(78, 4), int(PREFIX.value), Kv.FP8.value)), "bytes")
        for way in ways
    )
    return cp0.over(owners)


_QWEN = transfer.HeadSlices(layers=48, heads=4, head=128, itemsize=2, source_tp=1, destination_tp=4)
ms, rate, requests = (partial(Quantity, unit=unit) for unit in ("ms", "req/s", "requests"))

FORMULAS: dict[str, Formula] = {
    # Tokens of a request, times requests a second, over cards.
    "offered_load": lambda: (RATE / CARDS * (PREFIX + FRESH + OUTPUT)).named("tokens/s/GPU"),
    "request_input": lambda: PREFIX + FRESH,
    "shard": lambda: mib(SHARD),
    "all_reduce_entry": lambda: shards(_entry(Layout.ALL_REDUCE)),
    "input_sp_entry": lambda: shards(_entry(Layout.INPUT_SP)),
    "all_reduce_entry_mib": lambda: mib(_entry(Layout.ALL_REDUCE)),
    "input_sp_entry_mib": lambda: mib(_entry(Layout.INPUT_SP)),
    "input_sp_more_mib": lambda: mib(_entry(Layout.INPUT_SP) - _entry(Layout.ALL_REDUCE)),
    "input_sp_more": lambda: _entry(Layout.INPUT_SP).above(_entry(Layout.ALL_REDUCE)),
    "persistent_saves": lambda: shards(_layer(Layout.ALL_REDUCE) - _layer(Layout.PERSISTENT)),
    "part_all_reduce": lambda: _part(Layout.ALL_REDUCE, 0),
    "part_cp_gather": lambda: _part(Layout.ALL_REDUCE, 1),
    "part_reduce_scatter": lambda: _part(Layout.INPUT_SP, 0),
    "part_world_gather": lambda: _part(Layout.INPUT_SP, 1),
    "part_residual": lambda: _part(Layout.INPUT_SP, 2),
    "input_sp_rate_gain": lambda: rate(0.724529).above(rate(0.687809)),
    "gpu_union_drop": lambda: (ms(1440.734) - ms(1364.046)).share(ms(1440.734)),
    "communication_drop": lambda: ms(813.190) - ms(737.978),
    "full_copy_gain": lambda: requests(51).above(requests(46)),
    "full_pool": lambda: gib(_pool(OBSERVED)),
    "split_pool_least": lambda: gib(_pool(OBSERVED, 19)),
    "split_pool_most": lambda: gib(_pool(OBSERVED, 20)),
    "split_saves": lambda: gib(_pool(OBSERVED) - _pool(OBSERVED, 20)),
    "split_of_8192": lambda: gib(_pool(FRESH, 20, Kv.BF16)),
    "copy_of_8192": lambda: gib(_pool(FRESH, kv=Kv.BF16)),
    "prefix_leaves": lambda: OBSERVED - PREFIX,
    "four_fit": lambda: _locked(6),
    "five_do_not": lambda: PREFIX + 5 * FRESH,
    "two_unshared": lambda: 2 * (PREFIX + FRESH),
    "dcp2_capacity": lambda: Quantity(capacity.gain(Model(), Keeping.DCP, 2), "×"),
    "dcp4_capacity": lambda: Quantity(capacity.gain(Model(), Keeping.DCP, 4), "×"),
    "busiest_source": _busiest,
    "slice_item": lambda: Quantity(_QWEN.item, "bytes"),
    "slice_stride": lambda: Quantity(_QWEN.stride, "bytes"),
    "slice_batches": lambda: Quantity(_QWEN.batches, "calls"),
    "slice_batch": lambda: Quantity(_QWEN.batch(1024), "bytes"),
    "slice_descriptors": lambda: Quantity(_QWEN.descriptors(1024), "descriptors"),
    "zigzag_segment": lambda: Quantity(len(transfer.zigzag(4096, 4)[0][0]), "tokens"),
    "cp_stores": lambda: Quantity(sum(map(len, transfer.zigzag(4096, 4)[0])), "tokens"),
    "all_cp_range": lambda: Quantity(max(transfer.by_source(transfer.Way.ALL_CP, [1] * 4, 4096, 1)) / 4, "tokens"),
    "filter_loses": _filter_loses,
    "index_share_bf16": lambda: _index_share(Kv.BF16),
    "index_share_fp8": lambda: _index_share(Kv.FP8),
    "padded_heads": lambda: Quantity(64, "heads").over(Quantity(4, "heads")),
    "look_up_age": lambda: Quantity(ledger.MOST_DAYS, "days"),
    "broadcast_of_four": lambda: Quantity(collectives.broadcast_total(4, 1), "×"),
}
