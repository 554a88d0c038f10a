"""Sizes of the wheel's own pools, and what its own send methods hand over. Runs inside an engine's environment.

Pools are objects of the wheel's classes on host memory; the sender is an object of the wheel's class whose transfer
engine writes down what it is given.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

PAGE, LAYERS, TOKENS = 64, 6, 640
KINDS: dict[str, tuple[torch.dtype, int]] = {"fp8": (torch.float8_e4m3fn, 656), "bf16": (torch.bfloat16, 576)}
QWEN = {"layers": 48, "heads": 4, "head": 128}
# Source pages in an order with breaks, so that runs are not pages.
PAGES = [3, 4, 5, 1, 7, 8, 2, 0]
Blocks = list[list[tuple[int, int, int]]]


def engine(name: str) -> Any:
    """A module of the engine, which is there in its own environment alone."""
    return importlib.import_module(f"sglang.srt.{name}")


def nbytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the storages themselves, each once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def dsa(kind: str, tokens: int = TOKENS, layers: int = LAYERS, **split: Any) -> Any:
    """A DSA pool of the wheel; split over layers if asked to."""
    dtype, width = KINDS[kind]
    module = engine("mem_cache.dsa_cache_layer_split") if split else engine("mem_cache.memory_pool")
    made = module.LayerSplitDSATokenToKVPool if split else module.DSATokenToKVPool
    return made(
        size=tokens,
        page_size=PAGE,
        kv_lora_rank=512,
        dtype=dtype,
        qk_rope_head_dim=64,
        layer_num=layers,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=width,
        **split,
    )


def sizes() -> list[dict[str, Any]]:
    """Bytes of whole pools, of their latent rows and of their index pages."""
    rows = []
    for kind in KINDS:
        for tokens, layers in ((TOKENS, LAYERS), (PAGE, 1)):
            pool = dsa(kind, tokens, layers)
            rows.append(
                {
                    "kind": kind,
                    "tokens": tokens,
                    "layers": layers,
                    "latent": nbytes(pool.kv_buffer),
                    "index": nbytes(pool.index_k_with_scale_buffer),
                    "item": pool.get_contiguous_buf_infos()[2][0],
                    "state": pool.get_state_buf_infos()[2][0],
                }
            )
    return rows


def splits(ranks: int) -> list[dict[str, int]]:
    """A pool of each rank of a layer split: what it keeps, and the scratch for the others' layers."""
    rows = []
    parallel = SimpleNamespace(attn_cp_group=SimpleNamespace(world_size=1, pynccl_comm=None))
    with mock.patch.object(engine("mem_cache.dsa_cache_layer_split"), "get_parallel", return_value=parallel):
        for rank in range(ranks):
            pool = dsa("fp8", layer_shard_rank=rank, layer_shard_size=ranks)
            scratch = [pool.remote_kv_buffer]
            # The index's part moved into an object of its own between the releases.
            if hasattr(pool, "index_key_cache"):
                scratch.append(pool.index_key_cache.remote_buffer)
            else:
                scratch.append(pool.remote_index_k_with_scale_buffer)
            own = [one for one in (*pool.kv_buffer, *pool.index_k_with_scale_buffer) if one.numel()]
            sent = handed(manager(pool.get_contiguous_buf_infos(), mla=True), np.array(PAGES[:5], dtype=np.int32))
            rows.append(
                {
                    "kept": nbytes(own),
                    "scratch": nbytes(scratch),
                    "sent": sum(length for call in sent for _, _, length in call),
                }
            )
    return rows


class Recorder:
    """In Mooncake's place."""

    def __init__(self) -> None:
        self.calls: Blocks = []

    def batch_transfer_sync(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        self.calls.append(list(zip(map(int, sources), map(int, targets), map(int, lengths), strict=True)))
        return 0


def manager(infos: tuple[list[int], list[int], list[int]], *, mla: bool, **more: Any) -> Any:
    """An object of the wheel's sender without its start-up."""
    conn = engine("disaggregation.mooncake.conn")
    made = conn.MooncakeKVManager.__new__(conn.MooncakeKVManager)
    made.engine = Recorder()
    made.kv_args = SimpleNamespace(
        page_size=PAGE,
        kv_data_ptrs=infos[0],
        kv_item_lens=infos[2],
        kv_layer_ids=[],
        prefill_start_layer=0,
        engine_rank=0,
        kv_head_num=QWEN["heads"],
        total_kv_head_num=QWEN["heads"],
        mla_compression_ratios=None,
    )
    made.is_mla_backend, made.is_hybrid_mla_backend = mla, False
    made.enable_custom_mem_pool, made.custom_mem_pool_type = False, None
    made.enable_deferred_decode_kv_release = made.enable_trace = made.enable_staging = False
    made.attn_tp_rank = made.attn_dp_rank = made.attn_cp_rank = made.pp_rank = 0
    made.attn_tp_size = made.attn_cp_size = made.pp_size = 1
    vars(made).update(more)
    return made


def handed(made: Any, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any] | None = None) -> Blocks:
    """What send_kvcache hands over, from these pages to those (default: the same order, from page 10 on)."""
    there = np.arange(10, 10 + len(source), dtype=np.int32) if target is None else target
    memory = SimpleNamespace(enable_unified_memory=False)
    with (
        ThreadPoolExecutor(2) as threads,
        mock.patch.object(sys.modules[type(made).__module__], "get_memory", return_value=memory, create=True),
    ):
        assert made.send_kvcache("peer", source, made.kv_args.kv_data_ptrs, there, threads) == 0
    calls: Blocks = made.engine.calls
    return calls


def slices(destination_tp: int) -> dict[str, Any]:
    """send_kvcache_slice of a pool of the wheel with the notes' heads, to one rank of a larger attention-TP."""
    layers, heads, head = QWEN["layers"], QWEN["heads"], QWEN["head"]
    pool = engine("mem_cache.memory_pool").MHATokenToKVPool(
        TOKENS, PAGE, torch.bfloat16, heads, head, layers, "cpu", False, enable_alt_stream=False
    )
    infos = pool.get_contiguous_buf_infos()
    made = manager(infos, mla=False)
    pages = np.array(PAGES, dtype=np.int32)
    with ThreadPoolExecutor(2) as threads:
        item = infos[2][0] // destination_tp
        assert made.send_kvcache_slice("peer", pages, infos[0], pages, 1, destination_tp, item, threads) == 0
    calls = made.engine.calls
    first = sorted(calls, key=lambda call: call[0][0])[0]
    return {
        "calls": len(calls),
        "descriptors": sorted({len(call) for call in calls}),
        "lengths": sorted({length for call in calls for _, _, length in call}),
        "source strides": sorted({b[0] - a[0] for a, b in itertools.pairwise(first[:PAGE])}),
        "target strides": sorted({b[1] - a[1] for a, b in itertools.pairwise(first[:PAGE])}),
        "bytes": [sum(length for _, _, length in call) for call in calls],
    }


def whole() -> dict[str, Any]:
    """send_kvcache of an MLA pool between pages in two orders: one piece for each run at both ends, in each layer."""
    pool = dsa("fp8")
    source = np.array(PAGES, dtype=np.int32)
    target = np.array([20, 21, 23, 24, 25, 26, 30, 31], dtype=np.int32)
    calls = handed(manager(pool.get_contiguous_buf_infos(), mla=True), source, target)
    return {
        "source": source.tolist(),
        "target": target.tolist(),
        "calls": len(calls),
        "descriptors": sum(map(len, calls)),
        "bytes": sum(length for call in calls for _, _, length in call),
    }


def by_rank(ranks: int, pages: int) -> list[int]:
    """Pages that each CP rank sends of ``pages``, by the wheel's own filter: every rank sends its range."""
    utils = engine("disaggregation.utils")
    found = []
    for rank in range(ranks):
        one = SimpleNamespace(attn_cp_rank=rank, attn_cp_size=ranks)
        kept, _ = utils.filter_kv_indices_for_cp_rank(one, np.arange(pages, dtype=np.int32), slice(0, pages))
        found.append(len(kept))
    return found


def relayout(dcp: int) -> list[dict[str, Any]]:
    """send_kvcache_dcp without a pack buffer: rows of each decode rank, one descriptor for each run and layer."""
    pool, rows = dsa("fp8"), []
    infos = pool.get_contiguous_buf_infos()
    tokens = len(PAGES) * PAGE - 5
    for rank in range(dcp):
        made = manager(infos, mla=True)
        target = np.arange(len(PAGES), dtype=np.int32)
        with ThreadPoolExecutor(2) as threads:
            status = made.send_kvcache_dcp(
                "peer",
                np.array(PAGES, dtype=np.int32),
                infos[0],
                target,
                dcp_token_item_lens=[length // PAGE for length in infos[2]],
                dst_dcp_size=dcp,
                dst_dcp_rank=rank,
                src_page_offset=0,
                decode_prefix_len=0,
                num_kv_tokens=tokens,
                executor=threads,
                dst_layer_ids=[],
            )
        assert status == 0
        calls = made.engine.calls
        rows.append(
            {
                "rank": rank,
                "tokens": tokens,
                "descriptors": sum(map(len, calls)),
                "bytes": sum(length for call in calls for _, _, length in call),
                # Of the first layer, whose blocks come first.
                "to": [
                    (there - infos[0][0]) // (infos[2][0] // PAGE)
                    for _, there, _ in calls[0][: len(calls[0]) // LAYERS]
                ],
            }
        )
    return rows


def found() -> dict[str, Any]:
    """All of it."""
    return {
        "sizes": sizes(),
        "splits": splits(4),
        "slices": {str(tp): slices(tp) for tp in (2, 4)},
        "whole": whole(),
        "ranges": {str(pages): by_rank(4, pages) for pages in (1, 5, 16, 64, 1281)},
        "relayout": {str(dcp): relayout(dcp) for dcp in (2, 4)},
    }
