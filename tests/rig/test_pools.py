"""``lab.models`` against the wheels: sizes of their own pools, and what their own send methods hand over.

``make test-engine``; no engine is started. The trees are the patched ones; no patch changes what is asked here.
"""

from __future__ import annotations

from typing import Any

import pytest

from lab.models import capacity, transfer
from lab.models.addresses import Place, Stripes
from lab.models.capacity import INDEX_ROW, Kv, Model, owned
from lab.models.transfer import HeadSlices, Way, by_source, paired_runs
from tests.rig.pools_inside import LAYERS, PAGE, PAGES, QWEN, TOKENS

pytestmark = pytest.mark.rig

Found = dict[str, Any]


@pytest.fixture
def found(wheel: Found) -> Found:
    """What the pools and senders of a wheel said."""
    pools: Found = wheel["pools"]
    return pools


def test_bytes_of_a_pool_and_of_a_token_are_those_of_its_storages(found: Found) -> None:
    assert len(found["sizes"]) == 4
    for row in found["sizes"]:
        model = Model(row["layers"], Kv[row["kind"].upper()])
        assert row["latent"] + row["index"] == capacity.pool(model, row["tokens"])
        assert (row["latent"], row["index"]) == tuple(
            (row["tokens"] + PAGE) * bytes_of_a_token for bytes_of_a_token in (model.latent, model.index)
        )
        assert (row["item"], row["state"]) == (PAGE * model.kv.value, PAGE * INDEX_ROW)


def test_a_rank_of_a_layer_split_keeps_its_layers_and_scratch_for_one(found: Found) -> None:
    model, layers = Model(LAYERS), owned(LAYERS, 4)
    assert [row["kept"] for row in found["splits"]] == [capacity.pool(model, TOKENS, own) for own in layers]
    assert {row["scratch"] for row in found["splits"]} == {capacity.scratch(model, TOKENS)}


def test_layer_owners_send_what_the_model_says_each_of_them_sends(found: Found) -> None:
    wanted = by_source(Way.LAYER_OWNER, owned(LAYERS, 4), 5 * PAGE, Kv.FP8.value)
    assert [row["sent"] for row in found["splits"]] == wanted


@pytest.mark.parametrize("destination", [2, 4])
def test_head_slices_are_the_calls_descriptors_lengths_and_strides_of_the_sender(
    found: Found, destination: int
) -> None:
    path = HeadSlices(**QWEN, itemsize=2, source_tp=1, destination_tp=destination)
    real, tokens = found["slices"][str(destination)], len(PAGES) * PAGE
    assert real["calls"] == path.batches
    assert real["descriptors"] == [path.descriptors(tokens)]
    assert real["lengths"] == real["target strides"] == [path.item]
    assert real["source strides"] == [path.stride]
    assert real["bytes"] == [path.batch(tokens)] * path.batches


def test_a_whole_copy_is_one_call_and_a_descriptor_for_each_piece_contiguous_at_both_ends(found: Found) -> None:
    real = found["whole"]
    assert real["calls"] == 1
    assert real["descriptors"] == LAYERS * paired_runs(real["source"], real["target"])
    assert real["bytes"] == sum(by_source(Way.CP0, [LAYERS], len(PAGES) * PAGE, Kv.FP8.value))


def test_ranges_of_all_context_parallel_ranks_are_those_of_the_engines_filter(found: Found) -> None:
    for pages, ranges in found["ranges"].items():
        assert by_source(Way.ALL_CP, [1] * 4, int(pages) * PAGE, 1) == [4 * PAGE * count for count in ranges]


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_under_dcp_are_dealt_one_by_one_a_descriptor_for_each_row_and_layer(found: Found, ranks: int) -> None:
    stripes = Stripes(ranks)
    rows = [PAGES[token // PAGE] * PAGE + token % PAGE for token in range(found["relayout"][str(ranks)][0]["tokens"])]
    for real in found["relayout"][str(ranks)]:
        mine = [token for token in range(len(rows)) if stripes.place(token).rank == real["rank"]]
        slots = [stripes.place(token).slot for token in mine]
        assert real["to"] == slots and all(
            stripes.location(Place(real["rank"], slot)) == token for slot, token in zip(slots, mine, strict=True)
        )
        assert real["descriptors"] == LAYERS * paired_runs([rows[token] for token in mine], slots)
        assert real["bytes"] == LAYERS * len(mine) * Kv.FP8.value


def test_the_filter_and_the_owners_of_the_releases_agree_with_each_other(found: Found) -> None:
    """Equal payload a rank when layers divide evenly: facts of the notes, on both ways of the engine."""
    even = by_source(Way.LAYER_OWNER, owned(8, 4), 64 * PAGE, 656)
    assert even == by_source(Way.ALL_CP, owned(8, 4), 64 * PAGE, 656)
    assert found["ranges"]["64"] == [16] * 4
    assert transfer.crossing(81_920, 73_728) == (8_192, 81_920)
