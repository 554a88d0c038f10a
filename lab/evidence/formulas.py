"""The formulas behind recomputed claims: unit and function, by name. Each is a call into ``lab.models``."""

from __future__ import annotations

from lab.evidence.claims import Formula
from lab.models import boundary, capacity, collectives, fleet, transfer
from lab.models.boundary import Layout, Shape, entry, sent

MIB, GIB = 1 << 20, 1 << 30
OBSERVED = 110_464  # tokens of the deployment's prefill pool
PREFIX, FRESH, OUTPUT = 73_728, 8_192, 600  # tokens of the acceptance's requests
RATE, CARDS = 3.40, 40  # requests per second, cards


def _entry(layout: Layout) -> float:
    return float(sent(entry(layout, Shape())))


def _part(layout: Layout, number: int) -> float:
    return entry(layout, Shape())[number].sent / Shape().shard


def _filter_loses() -> float:
    """Percent of the payload, if each of four layer owners sent the tokens of its own range alone."""
    owners = transfer.by_source(transfer.Way.LAYER_OWNER, [20] * 4, 4096, 1)
    return 100 - sum(part // 4 for part in owners) / sum(owners) * 100


def _locked(requests: int) -> float:
    """The most tokens that the simulated worker had locked at once; its sends do not end in the time that counts."""
    one = fleet.Fleet(fleet.Design.CP0, OBSERVED, workers=1, slow=1e6)
    return fleet.simulate(one, fleet.Load(requests=requests, burst=requests, prefixes=1)).peak_locked


def _busiest() -> float:
    layers = capacity.owned(78, 4)
    cp0, owners = (
        transfer.by_source(way, layers, PREFIX, capacity.Kv.FP8.value)
        for way in (transfer.Way.CP0, transfer.Way.LAYER_OWNER)
    )
    return max(cp0) / max(owners)


_QWEN = transfer.HeadSlices(layers=48, heads=4, head=128, itemsize=2, source_tp=1, destination_tp=4)

FORMULAS: dict[str, tuple[str, Formula]] = {
    "offered_load": ("tokens/s/GPU", lambda: (PREFIX + FRESH + OUTPUT) * RATE / CARDS),
    "request_input": ("tokens", lambda: PREFIX + FRESH),
    "shard": ("MiB", lambda: Shape().shard / MIB),
    "all_reduce_entry": ("S", lambda: _entry(Layout.ALL_REDUCE) / Shape().shard),
    "input_sp_entry": ("S", lambda: _entry(Layout.INPUT_SP) / Shape().shard),
    "all_reduce_entry_mib": ("MiB", lambda: _entry(Layout.ALL_REDUCE) / MIB),
    "input_sp_entry_mib": ("MiB", lambda: _entry(Layout.INPUT_SP) / MIB),
    "input_sp_more_mib": ("MiB", lambda: (_entry(Layout.INPUT_SP) - _entry(Layout.ALL_REDUCE)) / MIB),
    "input_sp_more": ("%", lambda: (_entry(Layout.INPUT_SP) / _entry(Layout.ALL_REDUCE) - 1) * 100),
    "persistent_saves": (
        "S",
        lambda: (
            (
                sum(sent(part(Layout.ALL_REDUCE, Shape())) for part in (entry, boundary.exit_))
                - sum(sent(part(Layout.PERSISTENT, Shape())) for part in (entry, boundary.exit_))
            )
            / Shape().shard
        ),
    ),
    "part_all_reduce": ("S", lambda: _part(Layout.ALL_REDUCE, 0)),
    "part_cp_gather": ("S", lambda: _part(Layout.ALL_REDUCE, 1)),
    "part_reduce_scatter": ("S", lambda: _part(Layout.INPUT_SP, 0)),
    "part_world_gather": ("S", lambda: _part(Layout.INPUT_SP, 1)),
    "part_residual": ("S", lambda: _part(Layout.INPUT_SP, 2)),
    "full_copy_gain": ("%", lambda: (51 / 46 - 1) * 100),
    "slice_descriptors": ("runs", lambda: _QWEN.descriptors(1024)),
    "all_cp_range": ("tokens", lambda: max(transfer.by_source(transfer.Way.ALL_CP, [1] * 4, 4096, 1)) / 4),
    "filter_loses": ("%", _filter_loses),
    "index_share_bf16": ("%", lambda: capacity.INDEX_ROW / capacity.Kv.BF16.value * 100),
    "index_share_fp8": ("%", lambda: capacity.INDEX_ROW / capacity.Kv.FP8.value * 100),
    "padded_heads": ("×", lambda: 64 / 4),
    "input_sp_rate_gain": ("%", lambda: (0.724529 / 0.687809 - 1) * 100),
    "gpu_union_drop": ("%", lambda: (1 - 1364.046 / 1440.734) * 100),
    "communication_drop": ("ms", lambda: 813.190 - 737.978),
    "full_pool": ("GiB", lambda: capacity.pool(capacity.Model(), OBSERVED) / GIB),
    "split_pool_least": ("GiB", lambda: capacity.pool(capacity.Model(), OBSERVED, 19) / GIB),
    "split_pool_most": ("GiB", lambda: capacity.pool(capacity.Model(), OBSERVED, 20) / GIB),
    "split_saves": (
        "GiB",
        lambda: (capacity.pool(capacity.Model(), OBSERVED) - capacity.pool(capacity.Model(), OBSERVED, 20)) / GIB,
    ),
    "split_of_8192": ("GiB", lambda: capacity.pool(capacity.Model(kv=capacity.Kv.BF16), FRESH, 20) / GIB),
    "copy_of_8192": ("GiB", lambda: capacity.pool(capacity.Model(kv=capacity.Kv.BF16), FRESH) / GIB),
    "prefix_leaves": ("tokens", lambda: OBSERVED - PREFIX),
    "four_fit": ("tokens", lambda: _locked(6)),
    "five_do_not": ("tokens", lambda: PREFIX + 5 * FRESH),
    "two_unshared": ("tokens", lambda: 2 * (PREFIX + FRESH)),
    "dcp2_capacity": ("×", lambda: capacity.gain(capacity.Model(), capacity.Keeping.DCP, 2)),
    "dcp4_capacity": ("×", lambda: capacity.gain(capacity.Model(), capacity.Keeping.DCP, 4)),
    "busiest_source": ("×", _busiest),
    "slice_item": ("bytes", lambda: _QWEN.item),
    "slice_stride": ("bytes", lambda: _QWEN.stride),
    "slice_batches": ("runs", lambda: _QWEN.batches),
    "slice_batch": ("bytes", lambda: _QWEN.batch(1024)),
    "zigzag_segment": ("tokens", lambda: len(transfer.zigzag(4096, 4)[0][0])),
    "cp_stores": ("tokens", lambda: 4096 // 4),
    "broadcast_of_four": ("×", lambda: collectives.broadcast_total(4, 1)),
}
