"""gather-preload: buffers, streams, kernels are there before the first transfer worker, or the engine does not start.

The tree's own managers run on host memory, the gather kernel in Triton's interpreter; see pack_rig.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.engine.apart import compiled
from tests.engine.prefill.cp_rig import TOPOLOGY
from tests.engine.prefill.cp_rig import Tree as Layers
from tests.engine.prefill.pack_rig import Engine, Tree, World, intact
from tests.engine.prefill.test_cp4_attention_tp2 import start
from tests.engine.prefill.test_pcp4_dcp2 import NARROW, manager_of, registration

Root = Callable[[str], Path]
PRELOAD = "SGLANG_RESEARCH_DCP_GATHER_PRELOAD"
ALL = {TOPOLOGY: "1", NARROW: "1", PRELOAD: "1"}
WORKERS = 3


@pytest.fixture(scope="module")
def base(stock: Root) -> Tree:
    return Tree(stock("prefill"))


@pytest.fixture(scope="module")
def off(patched: Root) -> Tree:
    return Tree(patched("prefill"))


@pytest.fixture(scope="module")
def on(patched: Root) -> Tree:
    return Tree(patched("prefill"), gates=ALL)


def world_of(page: int = 64) -> World:
    return World(lens=(24, 7, 40), page=page, pages=4)


def manager(tree: Tree, world: World, cp_rank: int = 0) -> Any:
    """A manager whose queues are made and whose workers are not."""
    made = manager_of(tree, world, cp_rank)
    made._dcp_pack_buffers, made.transfer_queues = None, [object()] * WORKERS
    made._register_staging_memory = lambda pointer, size: made.registered.append(size)
    made.registered, made.kv_args.gpu_id = [], 0
    return made


@contextmanager
def host(tree: Tree, tokens: int = 16384, size: int | None = None, split: bool = False) -> Iterator[list[Any]]:
    """Let the tree's buffers lie on the host; give those that it makes."""
    made: list[Any] = []

    def buffer(size_bytes: int, device: str, gpu_id: int, custom_mem_pool: Any = None) -> Any:
        made.append(tree.buffer(size_bytes if size is None else size))
        return made[-1]

    handler: Any = tree._known["sglang.srt.disaggregation.common.staging_handler"]
    context: Any = tree._known["sglang.srt.runtime_context"]
    parallel = SimpleNamespace(enable_dsa_cache_layer_split=split)
    with (
        tree.active(),
        mock.patch.object(tree.dcp_pack, "StagingBuffer", buffer),
        mock.patch.object(tree.dcp_pack, "max_prefill_buffer_tokens", return_value=tokens),
        mock.patch.object(context, "max_prefill_buffer_tokens", return_value=tokens, create=True),
        mock.patch.object(context, "get_parallel", return_value=parallel),
        mock.patch.object(handler, "_get_custom_mem_pool", return_value=(None, None)),
    ):
        yield made


@contextmanager
def launches(tree: Tree) -> Iterator[list[int]]:
    """Give the row counts with which the gather is launched within the block."""
    rows: list[int] = []
    copy = tree.dcp_pack.copy_mla_rows_into_pack

    def counted(pointers: Any, indices: torch.Tensor, pack: Any, lens: Any) -> None:
        rows.append(int(indices.numel()))
        copy(pointers, indices, pack, lens)

    with mock.patch.object(tree.dcp_pack, "copy_mla_rows_into_pack", counted):
        yield rows


# --- what is made ---------------------------------------------------------------------------------------------------


def test_every_worker_gets_its_buffer_and_every_variant_of_the_kernel_is_run_in_each(on: Tree) -> None:
    world = world_of()
    made = manager(on, world)
    with host(on) as buffers, launches(on) as rows:
        on.preload.preload(made)
    assert len(buffers) == WORKERS and made._dcp_pack_buffers == buffers
    assert rows == [1, 16, 17] * WORKERS
    assert made.registered == [16384 * world.row] * WORKERS
    assert all(intact(buffer) for buffer in buffers)


def test_with_the_gate_unset_nothing_is_made_and_the_function_is_the_stock_one(base: Tree, off: Tree) -> None:
    made = manager(off, world_of())
    with host(off) as buffers:
        off.preload.preload(made)
    assert buffers == [] and made._dcp_pack_buffers is None
    stock, unset = (tree.conn.CommonKVManager._init_dcp_pack_buffers_once for tree in (base, off))
    assert stock.__code__.co_code == unset.__code__.co_code and not hasattr(unset, "__wrapped__")


@pytest.mark.parametrize("dcp", [2, 4])
def test_with_the_gate_unset_the_first_registration_makes_what_stock_makes(base: Tree, off: Tree, dcp: int) -> None:
    sizes = []
    for tree in (base, off):
        made = manager(tree, world_of())
        with host(tree) as buffers:
            made._init_dcp_pack_buffers_once(dcp)
            made._init_dcp_pack_buffers_once(dcp)
        sizes.append([buffer.get_size() for buffer in buffers])
    assert sizes[0] == sizes[1] and len(sizes[0]) == WORKERS


@pytest.mark.parametrize("cp_rank", [1, 2, 3])
def test_a_cp_rank_that_never_sends_makes_nothing(on: Tree, cp_rank: int) -> None:
    made = manager(on, world_of(), cp_rank)
    with host(on) as buffers, launches(on) as rows:
        on.preload.preload(made)
    assert buffers == [] and rows == []


def test_a_registration_after_the_preload_makes_nothing_more(on: Tree) -> None:
    world = world_of()
    made = manager(on, world)
    with host(on) as buffers:
        on.preload.preload(made)
        made.kv_args.kv_item_lens = [world.lens[0] * world.page]  # as a peer's rows, so that geometry agrees
        assert not on.narrow.refuses(made, registration(on, world))
    assert len(buffers) == WORKERS


# --- order and threads ----------------------------------------------------------------------------------------------


def test_the_preload_runs_after_the_queues_and_before_the_first_worker_starts(on: Tree, off: Tree) -> None:
    for tree in (off, on):
        order: list[str] = []
        world = world_of()
        common: Any = tree._known["sglang.srt.disaggregation.common.conn"]

        def init(self: Any, args: Any, *rest: Any, tree: Tree = tree, world: World = world) -> None:
            vars(self).update(vars(manager(tree, world)))
            self.disaggregation_mode = tree._known["sglang.srt.disaggregation.utils"].DisaggregationMode.PREFILL

        class Thread:
            def __init__(self, target: Any, args: Any = (), daemon: bool = False, order: Any = order) -> None:
                self.name, self.order = target.__name__, order

            def start(self) -> None:
                self.order.append(self.name)

        cls = tree.conn.MooncakeKVManager
        number = {"SGLANG_DISAGGREGATION_THREAD_POOL_SIZE": 4, "SGLANG_DISAGGREGATION_QUEUE_SIZE": 2}
        envs = mock.MagicMock(**{f"{name}.get.return_value": value for name, value in number.items()})
        envs.SGLANG_DISAGG_STAGING_BUFFER.get.return_value = (
            envs.SGLANG_ENABLE_FAILED_SESSION_PROBE.get.return_value
        ) = False
        with (
            host(tree),
            mock.patch.object(common.CommonKVManager, "__init__", init),
            mock.patch.multiple(cls, init_engine=lambda self: None, register_buffer_to_engine=lambda self: None),
            mock.patch.object(cls, "start_prefill_thread", lambda self, order=order: order.append("bootstrap")),
            mock.patch.object(cls, "_register_staging_memory"),
            mock.patch.object(tree.conn, "envs", envs),
            mock.patch.object(tree.conn, "check_mooncake_custom_mem_pool_enabled", return_value=(False, None)),
            mock.patch.object(tree.conn.threading, "Thread", Thread),
            launches(tree) as rows,
        ):
            copy = tree.dcp_pack.copy_mla_rows_into_pack
            note = mock.Mock(side_effect=lambda *args, order=order, copy=copy: (order.append("kernel"), copy(*args)))
            with mock.patch.object(tree.dcp_pack, "copy_mla_rows_into_pack", note):
                cls(None, None, None)
        kernels = ["kernel"] * 6 if tree is on else []
        assert order == ["bootstrap", *kernels, "transfer_worker", "transfer_worker"]
        assert len(rows) == len(kernels)


def test_a_registration_that_comes_first_waits_and_makes_nothing_itself(on: Tree) -> None:
    made, went_on = manager(on, world_of()), threading.Event()

    def register() -> None:
        made._init_dcp_pack_buffers_once(2)
        went_on.set()

    thread = threading.Thread(target=register)
    with host(on) as buffers:
        thread.start()
        assert not went_on.wait(0.2) and buffers == []
        on.preload.preload(made)
        thread.join(10)
    assert went_on.is_set() and len(buffers) == WORKERS


def test_many_registrations_at_once_leave_one_set_of_buffers(on: Tree) -> None:
    made = manager(on, world_of())
    threads = [threading.Thread(target=made._init_dcp_pack_buffers_once, args=(2,)) for _ in range(8)]
    with host(on) as buffers:
        for thread in threads[:4]:
            thread.start()
        on.preload.preload(made)
        for thread in threads[4:]:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(buffers) == WORKERS and not any(thread.is_alive() for thread in threads)


def test_a_peer_of_another_dcp_size_is_refused_and_the_buffers_stay(on: Tree) -> None:
    made = manager(on, world_of())
    with host(on) as buffers:
        on.preload.preload(made)
        with pytest.raises(RuntimeError, match="made for DCP size 2, not 4"):
            made._init_dcp_pack_buffers_once(4)
        assert on.narrow.refuses(made, registration(on, world_of(), dcp=4))
    assert made._dcp_pack_buffers == buffers and len(buffers) == WORKERS


# --- what stops the start -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        ({"tokens": 8192}, "tokens of a chunk must be 16384, got 8192"),
        ({"tokens": 32768}, "tokens of a chunk must be 16384, got 32768"),
        ({"page": 32}, "page_size must be 64, got 32"),
        ({"dcp_size": 2}, "dcp_size must be 1, got 2"),
        ({"is_mla_backend": False}, "is_mla_backend must be True, got False"),
        ({"no_layers": True}, "layers with KV must be True, got False"),
        ({"split": True}, "enable_dsa_cache_layer_split must be False, got True"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_another_profile_stops_the_start_by_name(on: Tree, change: dict[str, Any], condition: str) -> None:
    made = manager(on, world_of(change.get("page", 64)))
    vars(made).update({name: value for name, value in change.items() if name in ("dcp_size", "is_mla_backend")})
    if "no_layers" in change:
        made.kv_args.kv_item_lens = []
    with (
        host(on, tokens=change.get("tokens", 16384), split=change.get("split", False)) as buffers,
        pytest.raises(ValueError, match=f"{PRELOAD} is set, but: {condition}"),
    ):
        on.preload.preload(made)
    assert buffers == []


def test_a_buffer_too_small_for_a_row_stops_the_start(on: Tree) -> None:
    with host(on, size=70), pytest.raises(RuntimeError, match="1 rows of 71 bytes do not fit 70 bytes"):
        on.preload.preload(manager(on, world_of()))


def test_no_memory_stops_the_start_and_leaves_nobody_waiting(on: Tree) -> None:
    made, failed = manager(on, world_of()), list[str]()

    def register() -> None:
        try:
            made._init_dcp_pack_buffers_once(2)
        except RuntimeError as error:
            failed.append(str(error))

    thread = threading.Thread(target=register)
    with host(on), mock.patch.object(on.dcp_pack, "StagingBuffer", side_effect=MemoryError):
        thread.start()
        with pytest.raises(MemoryError):
            on.preload.preload(made)
        thread.join(10)
    assert len(failed) == 1 and "made for DCP size None, not 2" in failed[0]


def test_a_worker_without_a_buffer_stops_the_start(on: Tree) -> None:
    made = manager(on, world_of())
    made._dcp_pack_buffers = [on.buffer(16384 * 71)]
    with host(on), pytest.raises(RuntimeError, match="1 pack buffers for 3 transfer workers"):
        on.preload.preload(made)


@pytest.mark.parametrize("rows", [16, 17])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_kernel_that_writes_other_bytes_stops_the_start(on: Tree, rows: int, layer: int) -> None:
    copy = on.dcp_pack.copy_mla_rows_into_pack

    def wrong(pointers: Any, indices: torch.Tensor, pack: torch.Tensor, lens: list[int]) -> None:
        copy(pointers, indices, pack, lens)
        if indices.numel() == rows:
            pack[rows * sum(lens[:layer]) + lens[layer] * (rows - 1)] ^= 1

    with host(on), mock.patch.object(on.dcp_pack, "copy_mla_rows_into_pack", wrong):
        with pytest.raises(RuntimeError, match=f"the gather of {rows} rows of .* gave other bytes"):
            on.preload.preload(manager(on, world_of()))


def test_with_all_gates_set_the_profile_starts(patched: Root) -> None:
    start(Layers(patched("prefill"), ALL))


@pytest.mark.parametrize(("name", "value"), [("chunked_prefill_size", 8192), ("page_size", 1)])
def test_another_profile_is_refused_at_start(patched: Root, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{PRELOAD} is set, but: {name} must be .*, got {value}"):
        start(Layers(patched("prefill"), ALL), {name: value})
    start(Layers(patched("prefill"), {TOPOLOGY: "1", NARROW: "1"}), {name: value})


def test_the_gate_alone_is_refused_at_start_and_names_the_other(patched: Root) -> None:
    with pytest.raises(ValueError, match=f"{PRELOAD} is set, but: {NARROW} must be True, got False"):
        start(Layers(patched("prefill"), {TOPOLOGY: "1", PRELOAD: "1"}))


def test_a_gate_word_that_is_neither_on_nor_off_stops_the_import(patched: Root) -> None:
    with pytest.raises(ValueError, match=f"{PRELOAD}='later'"):
        Tree(patched("prefill"), gates={PRELOAD: "later"})


# --- the kernel itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 100])
def test_the_kernel_copies_what_index_select_does(on: Tree, rows: int) -> None:
    lens = (656, 1, 7, 1152)
    random = torch.Generator().manual_seed(rows)
    pools = [torch.randint(0, 256, (64, n), dtype=torch.uint8, generator=random) for n in lens]
    indices = torch.randint(0, 64, (rows,), generator=random)
    pack = torch.zeros(rows * sum(lens) + 32, dtype=torch.uint8)
    with on.active():
        on.gather.copy_mla_rows_into_pack([pool.data_ptr() for pool in pools], indices, pack, lens)
    wanted = torch.cat([pool.index_select(0, indices).flatten() for pool in pools])
    assert torch.equal(pack[:-32], wanted) and not pack[-32:].any()


COMPILE = """
import importlib.util, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
spec = importlib.util.spec_from_file_location("pd_dcp_gather", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
types = {"src_metadata": "*i64", "row_indices": "*i64", "pack": "*u8", "num_rows": "i32", "BLOCK_SIZE": "constexpr"}
aligned = [["tt.divisibility", 16]]
variants = {"one": (3, {"num_rows": 1}), "sixteens": (4, {}), "other": (3, {})}
for arch in (90, 120):
    for name, (count, constants) in variants.items():
        signature = {key: "constexpr" if key in constants else kind for key, kind in types.items()}
        source = ASTSource(module._copy_mla_rows_into_pack_kernel, signature,
                           constexprs={"BLOCK_SIZE": 1024, **constants}, attrs={(i,): aligned for i in range(count)})
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32))
        print(arch, name, len(built.asm["cubin"]), built.hash)
"""


def test_all_three_variants_compile_for_both_architectures_without_a_gpu(patched: Root, tmp_path: Path) -> None:
    kernel = patched("prefill") / "sglang/kernels/ops/kvcache/pd_dcp_gather.py"
    lines = [line.split() for line in compiled(COMPILE, kernel, tmp_path)]
    assert [line[:2] for line in lines] == [[a, n] for a in ("90", "120") for n in ("one", "sixteens", "other")]
    assert all(int(line[2]) > 1000 for line in lines)
    assert len({line[3] for line in lines}) == 6


def test_the_row_counts_of_the_preload_are_one_of_each_variant(on: Tree) -> None:
    kinds = [(rows == 1, rows % 16 == 0) for rows in on.preload.ROW_COUNTS]
    assert sorted(kinds) == sorted({(n == 1, n % 16 == 0) for n in (1, 2, 15, 16, 17, 4096, 8191, 8192, 16384)})


def test_the_engine_still_sends_through_what_was_preloaded(on: Tree) -> None:
    world, engine = world_of(), Engine()
    made = manager(on, world)
    made.engine = engine
    with host(on):
        on.preload.preload(made)
    plan = world.plan(200)
    assert on.send(made, world, plan, made._dcp_pack_buffers[1]) == 0
    assert world.arrived(plan) and engine.reads(made._dcp_pack_buffers[1])
    assert np.size(plan.source_pages) == 4
