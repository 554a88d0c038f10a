"""The cache that is split by layers is stock's, and what was suspected of its broadcasts, on eight processes.

Two faults were suspected by reading. The fallback without NCCL passes a rank of the CP group where Torch asks for a
rank of the world: true, and without effect in every topology in which stock lets a cache be split, where both numbers
are the same. With two attention TP ranks it takes another owner's rows, so cp4-attention-tp2 refuses a split cache. The
index keys are broadcast without the communicator that the KV has for itself: no fault, they arrive right without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.prefill.conftest import Ranks
from tests.engine.prefill.cp_ranks import LAYERS
from tests.engine.prefill.cp_rig import TOPOLOGY, Tree
from tests.engine.prefill.test_cp4_attention_tp2 import start

Root = Callable[[str], Path]
FILES = (
    "sglang/srt/mem_cache/dsa_cache_layer_split.py",
    "sglang/srt/layers/cp/utils.py",
    "sglang/srt/mem_cache/memory_pool.py",
)


@pytest.mark.parametrize("kind", ["kv", "index"])
@pytest.mark.parametrize("tree", ["base", "patched"])
def test_every_rank_gets_each_layer_from_its_owner_in_the_stock_topology(ranks: Ranks, tree: str, kind: str) -> None:
    for _, split in ranks:
        assert split[f"{tree}, stock"][kind] == ["right"] * LAYERS


@pytest.mark.parametrize("kind", ["kv", "index"])
def test_with_two_attention_ranks_the_fallback_takes_rows_of_another_owner_or_fails(ranks: Ranks, kind: str) -> None:
    for lane in range(2):
        found = [ranks[rank][1]["base, attention TP2"][kind] for rank in range(lane, 8, 2)]
        assert any("wrong" in rank for rank in found)
        assert all("ValueError" in rank for rank in found)


def test_two_attention_ranks_and_a_split_cache_are_refused_at_start(patched: Root) -> None:
    with pytest.raises(ValueError, match="enable_dsa_cache_layer_split must be False, got True"):
        start(Tree(patched("prefill"), {TOPOLOGY: "1"}), {"enable_dsa_cache_layer_split": True})


@pytest.mark.parametrize("path", FILES)
def test_no_patch_touches_the_split_cache(stock: Root, patched: Root, path: str) -> None:
    assert (stock("prefill") / path).read_bytes() == (patched("prefill") / path).read_bytes()
