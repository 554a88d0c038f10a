"""Eight real processes that run toy layers through a tree's CP communicator. Started by the tests as a program.

    python -m tests.engine.prefill.cp_ranks STOCK PATCHED OUT

One attention and one MLP stand in each layer, cut over the ranks as the engine cuts them: attention into two partial
sums, experts into eight. Each process writes what every case gave to OUT/RANK.pt.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.engine.load import blanks, load
from tests.engine.prefill.cp_rig import (
    ATTN_TP,
    CP,
    HIDDEN,
    INPUT_SP,
    TOPOLOGY,
    TP,
    Journal,
    RMSNorm,
    Tree,
    parallel_state,
)

SPARSE = (False, True, True, True)
"""Whether each toy layer's MLP is cut over all ranks; the first is whole on each, as in the real model."""

GATES: dict[str, dict[str, str]] = {
    "off": {},
    "plain": {TOPOLOGY: "1"},
    "sp": {TOPOLOGY: "1", INPUT_SP: "1"},
}


@dataclass(frozen=True)
class Case:
    """One run of all layers: which tree, how many rows each CP rank has, in which type, with which fault."""

    tree: str
    rows: int = 4
    dtype: torch.dtype = torch.float32
    attn_tp: int = ATTN_TP
    split: bool = True
    pad: int = 0
    fault: str = ""


@dataclass
class Result:
    """What one rank had at the end of a case.

    Attributes:
        hidden: rows of the last layer's output, residual not added.
        residual: their residual.
        entry: bytes sent at the boundary after attention, for each layer.
        exit: bytes sent at the boundary after the MLP, for each layer.
        calls: collectives in their order.
        kept: for each layer, whether the residual given to the boundary after attention was the same after it.
        error: the exception's name and text, if there was one.
    """

    hidden: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    entry: list[int] = field(default_factory=list)
    exit: list[int] = field(default_factory=list)
    calls: list[tuple[str, str, int]] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    error: str = ""


CASES: dict[str, Case] = {
    "stock cp8": Case("stock", attn_tp=1),
    "off cp8": Case("off", attn_tp=1),
    "stock at attention TP2": Case("stock"),
    "off at attention TP2": Case("off"),
}
for _tree in ("plain", "sp"):
    CASES |= {
        f"{_tree} fp32": Case(_tree),
        f"{_tree} bf16": Case(_tree, dtype=torch.bfloat16),
        f"{_tree} odd rows": Case(_tree, rows=3),
        f"{_tree} padded": Case(_tree, pad=2),
        f"{_tree} one row everywhere": Case(_tree, rows=1, split=False),
        f"{_tree} three rows everywhere": Case(_tree, rows=3, split=False),
        f"{_tree} no row": Case(_tree, rows=0, split=False),
    }


class Weights:
    """The toy model's weights, the same on every rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        numbers = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> torch.Tensor:
            drawn: torch.Tensor = torch.randn(*shape, generator=numbers) / shape[0] ** 0.5
            return drawn.to(dtype)

        self.layers = [
            SimpleNamespace(
                up=draw(HIDDEN, HIDDEN),
                down=draw(HIDDEN, HIDDEN),
                first=draw(HIDDEN, 4 * HIDDEN),
                second=draw(4 * HIDDEN, HIDDEN),
                before=(1 + draw(HIDDEN) / 8).to(dtype),
                after=(1 + draw(HIDDEN) / 8).to(dtype),
            )
            for _ in SPARSE
        ]


def cut(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """Give one of ``parts`` partial sums of ``relu(x @ first) @ second``."""
    return torch.relu(x @ first.chunk(parts, 1)[part]) @ second.chunk(parts, 0)[part]


def rows_of(case: Case) -> torch.Tensor:
    """The input rows, CP rank by CP rank; pad rows at each rank's end are zero."""
    ranks = TP // case.attn_tp if case.split else 1
    rows = torch.randn(ranks, case.rows, HIDDEN, generator=torch.Generator().manual_seed(9))
    rows[:, case.rows - case.pad :] = 0
    return rows.view(-1, HIDDEN).to(case.dtype)


def reference(case: Case) -> torch.Tensor:
    """Run the toy model in one process, in float32, and return output and residual added up."""
    hidden, residual = rows_of(case).float(), None
    for layer in Weights(case.dtype).layers:
        weights = SimpleNamespace(**{name: value.float() for name, value in vars(layer).items()})
        for first, second, norm in (("up", "down", "before"), ("first", "second", "after")):
            residual = hidden if residual is None else hidden + residual
            normed = RMSNorm(getattr(weights, norm))(residual.clone(), torch.zeros_like(residual))[0]
            hidden = torch.relu(normed @ getattr(weights, first)) @ getattr(weights, second)
    assert residual is not None
    return hidden + residual


FAULTS: dict[str, tuple[str, Callable[[Tree, Tree], None]]] = {}
"""Planted faults: the variant that each is planted in, and what plants it (given that tree and the stock one)."""


def _fault(name: str, variant: str) -> Callable[[Any], Any]:
    def register(plant: Callable[[Tree, Tree], None]) -> Callable[[Tree, Tree], None]:
        FAULTS[name] = variant, plant
        CASES[f"fault: {name}"] = Case(variant, fault=name)
        return plant

    return register


@_fault("attention outputs not added up before the experts", "plain")
def _no_sum_before_experts(tree: Tree, stock: Tree) -> None:
    tree.topology.all_reduce = lambda hidden_states: hidden_states


@_fault("attention outputs not added up before a dense layer", "plain")
def _no_sum_before_dense(tree: Tree, stock: Tree) -> None:
    functions = tree.communicator.CommunicateWithAllReduceAndLayerNormFn
    functions._tp_attn_all_reduce_and_layernorm = functions._simple


@_fault("the stock exit, which adds four of eight partial sums", "plain")
def _stock_exit(tree: Tree, stock: Tree) -> None:
    def exit_of_stock(hidden_states: torch.Tensor) -> torch.Tensor:
        stock.parallel = SimpleNamespace(**{**vars(tree.parallel), "attn_tp_size": 1})
        rows: torch.Tensor = stock.communicator.dsa_cp_reduce_scatter_hidden_states(hidden_states)
        return rows

    tree.topology.reduce_scatter = exit_of_stock


@_fault("the exit's halves are not joined", "plain")
def _halves_not_joined(tree: Tree, stock: Tree) -> None:
    right = tree.topology.reduce_scatter

    def halves(hidden_states: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = right(hidden_states)
        half: torch.Tensor = rows.chunk(ATTN_TP)[tree.parallel.attn_tp_rank]
        return half.repeat(ATTN_TP, 1)

    tree.topology.reduce_scatter = halves


def _changed_run(tree: Tree, change: Callable[[SimpleNamespace, Any], tuple[SimpleNamespace, Any]]) -> None:
    """Let the boundary run with other groups or another context than the right ones."""
    run = tree.input_sp.run

    def changed(hidden_states: Any, residual: Any, layernorm: Any, context: Any) -> Any:
        right = tree.parallel
        tree.parallel, context = change(SimpleNamespace(**vars(right)), SimpleNamespace(**vars(context)))
        try:
            return run(hidden_states, residual, layernorm, context)
        finally:
            tree.parallel = right

    tree.input_sp.run = changed


def _group(group: Any, **changed: Any) -> SimpleNamespace:
    names = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
    return SimpleNamespace(**{**{name: getattr(group, name) for name in names}, **changed})


@_fault("each rank takes its own half without the other's part", "sp")
def _no_reduction(tree: Tree, stock: Tree) -> None:
    def change(parallel: Any, context: Any) -> Any:
        def keep(output: torch.Tensor, tensor: torch.Tensor) -> None:
            output.copy_(tensor.chunk(ATTN_TP)[context.attn_tp_rank])

        parallel.attn_tp_group = _group(parallel.attn_tp_group, reduce_scatter_tensor=keep)
        return parallel, context

    _changed_run(tree, change)


@_fault("each rank adds the other's half of the residual", "sp")
def _other_residual(tree: Tree, stock: Tree) -> None:
    def change(parallel: Any, context: Any) -> Any:
        context.attn_tp_rank ^= 1
        return parallel, context

    _changed_run(tree, change)


@_fault("the gather over all ranks takes them in the order of the CP groups", "sp")
def _other_order(tree: Tree, stock: Tree) -> None:
    def change(parallel: Any, context: Any) -> Any:
        def gather(output: torch.Tensor, tensor: torch.Tensor) -> None:
            right.all_gather_into_tensor(output, tensor)
            output.copy_(output.view(CP, ATTN_TP, -1, HIDDEN).transpose(0, 1).reshape(output.shape).clone())

        right = parallel.tp_group
        parallel.tp_group = _group(right, all_gather_into_tensor=gather)
        return parallel, context

    _changed_run(tree, change)


@_fault("the residual is not restored from both halves", "sp")
def _half_residual(tree: Tree, stock: Tree) -> None:
    def change(parallel: Any, context: Any) -> Any:
        def repeat(output: torch.Tensor, tensor: torch.Tensor) -> None:
            output.copy_(tensor.repeat(ATTN_TP, 1))

        parallel.attn_tp_group = _group(parallel.attn_tp_group, all_gather_into_tensor=repeat)
        return parallel, context

    _changed_run(tree, change)


def forward(tree: Tree, case: Case, rank: int, result: Result) -> None:
    """Run all layers of ``case`` on this rank and write what came out, and what it cost, to ``result``."""
    journal = Journal()
    tree.parallel = parallel = parallel_state(rank, journal, case.attn_tp)
    tree.dtype, tree.buffer_rows = case.dtype, parallel.attn_cp_size * case.rows
    metadata = SimpleNamespace(per_rank_actual_token=[case.rows] * parallel.attn_cp_size) if case.split else None
    batch = SimpleNamespace(attn_cp_metadata=metadata)
    place = parallel.attn_cp_rank if case.split else 0
    hidden, residual = rows_of(case)[place * case.rows : (place + 1) * case.rows].clone(), None
    result.calls = journal.calls
    for weights, sparse in zip(Weights(case.dtype).layers, SPARSE, strict=True):
        layer = tree.layer(RMSNorm(weights.after), sparse)
        residual = hidden.clone() if residual is None else hidden + residual
        hidden = RMSNorm(weights.before)(residual.clone(), torch.zeros_like(residual))[0]
        hidden = cut(hidden, weights.up, weights.down, parallel.attn_tp_rank, parallel.attn_tp_size)
        before, given = journal.sent, (residual, residual.clone())
        with tree.active():
            hidden, residual = layer.prepare_mlp(hidden, residual, batch)
        result.entry.append(journal.sent - before)
        result.kept.append(torch.equal(*given))
        if sparse:
            hidden = cut(hidden, weights.first, weights.second, rank, TP)
            if not case.split and case.rows:
                parallel.tp_group.all_reduce(hidden)  # the experts' own, which a batch that CP splits leaves out
        else:
            hidden = torch.relu(hidden @ weights.first) @ weights.second
        before = journal.sent
        with tree.active():
            hidden, residual = layer.postprocess_layer(hidden, residual, batch)
        result.exit.append(journal.sent - before)
    result.hidden, result.residual = hidden, residual


LAYERS = 8
SPLITS = {"stock": 1, "attention TP2": ATTN_TP}
"""Topologies in which the layer split's broadcasts are run: attention TP ranks of each."""


def broadcasts(pools: Any, rank: int, attn_tp: int, group: Any) -> dict[str, list[str]]:
    """Let each owner broadcast its layer in a cache split by layers; say what came to this rank.

    No NCCL is here, so both broadcasts take the fallback, and none has a communicator of its own.

    Returns:
        For the KV and for the index keys, layer by layer: ``right``, ``wrong``, or the name of an error.
    """
    cp_size, cp_rank = TP // attn_tp, rank // attn_tp
    found: dict[str, list[str]] = {"kv": [], "index": []}
    pool = pools.LayerSplitDSATokenToKVPool.__new__(pools.LayerSplitDSATokenToKVPool)
    pool.layer_shard_rank, pool.layer_shard_size, pool.layer_num, pool.start_layer = cp_rank, cp_size, LAYERS, 0
    pool.layer_broadcast_comm = None
    index = pools.LayerSplitIndexKeyCache.__new__(pools.LayerSplitIndexKeyCache)
    index.pool, index.remote_layer_id = pool, None
    # Each owner's rows say whose they are, and of which layer.
    index.buffer = [torch.tensor([cp_rank, layer, 7]) for layer in range(LAYERS)]
    cp_group = SimpleNamespace(world_size=cp_size, pynccl_comm=None, cpu_group=group)
    with mock.patch.object(pools, "get_parallel", return_value=SimpleNamespace(attn_cp_group=cp_group)):
        for layer in range(LAYERS):
            wanted = torch.tensor([pool._get_layer_owner_rank(layer), layer, 7])
            for kind in found:
                into = torch.zeros(3, dtype=torch.int64)
                index.remote_buffer = into
                try:
                    if kind == "index":
                        index.get_broadcastable_buffer(layer)
                    else:
                        mine = index.buffer[layer] if pool._is_layer_owned(layer) else None
                        pool._broadcast_tensor_from_owner(into, layer, mine, use_layer_broadcast_comm=True)
                    found[kind].append("right" if torch.equal(into, wanted) else "wrong")
                except ValueError as error:
                    found[kind].append(type(error).__name__)
    return found


def load_pools(root: Path) -> Any:
    """Load the tree's file of the cache that is split by layers."""
    path = "sglang/srt/mem_cache/dsa_cache_layer_split.py"
    helpers = "sglang/srt/layers/cp/utils.py"
    known = {**blanks(root, path), **blanks(root, helpers)}
    known["sglang.srt.layers.cp.utils"] = load(root, helpers, known)
    vars(known["sglang.srt.mem_cache.memory_pool"])["DSATokenToKVPool"] = type("DSATokenToKVPool", (), {})
    vars(known["sglang.srt.mem_cache.index_key_cache"])["IndexKeyCache"] = type("IndexKeyCache", (), {})
    return load(root, path, known)


def work(rank: int, trees: dict[str, Tree], pools: dict[str, Any], out: Path) -> None:
    """Be rank ``rank``: run every case and write the results."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    where = f"file://{out / 'meeting'}"
    dist.init_process_group("gloo", where, timedelta(seconds=60), rank=rank, world_size=TP)
    results: dict[str, Result] = {}
    for name, case in CASES.items():
        results[name] = result = Result()
        tree = trees[case.fault or case.tree]
        try:
            forward(tree, case, rank, result)
        except AssertionError as error:
            result.error = f"AssertionError {error}".strip()
        dist.barrier()
    split: dict[str, dict[str, list[str]]] = {}
    for topology, attn_tp in SPLITS.items():
        groups = [dist.new_group(list(range(lane, TP, attn_tp))) for lane in range(attn_tp)]
        for name, module in pools.items():
            split[f"{name}, {topology}"] = broadcasts(module, rank, attn_tp, groups[rank % attn_tp])
    torch.save([{name: vars(result) for name, result in results.items()}, split], out / f"{rank}.pt")
    dist.destroy_process_group()


def main(stock: Path, patched: Path, out: Path) -> int:
    """Fork eight ranks and wait for them; give 0 if all ended well."""
    torch.set_num_threads(1)
    trees = {"stock": Tree(stock)}
    trees |= {name: Tree(patched, gates) for name, gates in GATES.items()}
    for name, (variant, plant) in FAULTS.items():
        trees[name] = Tree(patched, GATES[variant])
        plant(trees[name], Tree(stock))
    pools = {"base": load_pools(stock), "patched": load_pools(patched)}
    children = []
    for rank in range(TP):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(rank, trees, pools, out)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
