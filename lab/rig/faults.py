"""Faults that are planted on purpose in a patched engine, each of which must turn a named scenario red.

A rig that is green whatever runs in it proves nothing. Each fault is the mistake that its patch exists to avoid.
It is put into the running engine by the import hook, so that the tree on the disk stays the one that was recognised.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lab.rig.errors import RigError

VARIABLE = "PATCHBUNDLE_RIG_FAULT"
HOOK = "lab.rig.faults_inside"


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        module: the engine's module whose import triggers it.
        plant: changes the module after it was executed.
        scenario: the scenario that turns red.
        patch: whose rule it breaks; empty for a rule of stock that our deployment leans on.
        role: the engine in which it is planted.
    """

    name: str
    about: str
    module: str
    plant: Callable[[ModuleType], None]
    scenario: str
    patch: str
    role: str


FAULTS: dict[str, Fault] = {}


def fault(name: str, about: str, module: str, scenario: str, patch: str, role: str) -> Callable[[Any], Any]:
    """Register the decorated function as the planting of a fault."""

    def register(plant: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        FAULTS[name] = Fault(name, about, module, plant, scenario, patch, role)
        return plant

    return register


def _parallel() -> Any:
    return sys.modules["sglang.srt.runtime_context"].get_parallel()


def get(name: str) -> Fault:
    """Look a fault up.

    Raises:
        RigError: kind ``fault``; there is none of that name.
    """
    if name not in FAULTS:
        raise RigError("fault", f"no fault {name!r}; known: {', '.join(sorted(FAULTS))}")
    return FAULTS[name]


def chosen() -> Fault | None:
    """The fault that this process is to plant, by its environment."""
    name = os.environ.get(VARIABLE, "")
    return get(name) if name else None


_RETRACT = ("sglang.srt.research.retract", "dcp2-retract-patched", "dcp-retract-index", "decode")
_PACK = ("sglang.srt.research.bounded_pack", "bounded-pack", "bounded-pack", "prefill")
_POISON = ("sglang.srt.research.bounded_pack", "pack-poison", "bounded-pack", "prefill")
_CP = ("sglang.srt.research.cp_topology", "cp2-atp2", "cp4-attention-tp2", "prefill")
_SP = ("sglang.srt.research.input_sp", "cp2-atp2", "input-sp", "prefill")
_DSA = ("sglang.srt.research.dsa_dcp", "dsa-dcp", "dsa-dcp", "decode")
_SMALL = ("sglang.srt.research.dsa_dcp", "dsa-dcp-small", "dsa-dcp", "decode")
_SPLIT = ("sglang.srt.mem_cache.dsa_cache_layer_split", "cp4-layer-split", "", "prefill")


@fault(
    "retract-hunk-left-out",
    "the copy indexes a rank's rows with the group's slots, as the stock engine does",
    *_RETRACT,
)
def _retract_left_out(module: ModuleType) -> None:
    vars(module)["latent_rows"] = lambda pool, indices: indices


@fault("retract-blocks", "a rank takes a block of the tokens for its own, and not every second one", *_RETRACT)
def _retract_blocks(module: ModuleType) -> None:
    rows = module.latent_rows

    def latent_rows(pool: Any, indices: Any) -> Any:
        # Only another rank's number would do no harm: its tokens lie in rows of the same numbers.
        if rows(pool, indices) is indices:
            return indices
        size = module._size()
        return indices.tensor_split(size)[module._rank()] // size

    vars(module)["latent_rows"] = latent_rows


@fault("retract-row-off-by-one", "every row is taken one too high", *_RETRACT)
def _retract_off_by_one(module: ModuleType) -> None:
    rows = module.latent_rows
    calls = [0]

    def latent_rows(pool: Any, indices: Any) -> Any:
        found = rows(pool, indices)
        calls[0] += 1
        # Only on the way out: the same mistake on both ways would cancel itself.
        return found if found is indices or calls[0] % 2 == 0 else (found - 1).clamp(min=0)

    vars(module)["latent_rows"] = latent_rows


@fault("pack-hunk-left-out", "a send that does not fit falls back to a descriptor for each row", *_PACK)
def _pack_left_out(module: ModuleType) -> None:
    vars(module)["maybe_send"] = lambda *args, **kwargs: None


@fault("pack-slice-off-by-one", "each slice but the first begins one row late", *_PACK)
def _pack_off_by_one(module: ModuleType) -> None:
    edges = module.slice_edges

    def slice_edges(*args: Any, **kwargs: Any) -> Any:
        for low, high in edges(*args, **kwargs):
            yield min(low + (low > 0), high - 1), high

    vars(module)["slice_edges"] = slice_edges


@fault("pack-row-map", "every rank of D gets the rows of the first one", *_PACK)
def _pack_row_map(module: ModuleType) -> None:
    pack = module._pack

    def shifted(src_ptrs: Any, src_rows: Any, *rest: Any) -> Any:
        # Another order, or rows that two ranks have swapped, would do no harm: a latent row carries its position, and
        # the sum over all rows of all ranks has no order.
        return pack(src_ptrs, src_rows & ~1, *rest)

    vars(module)["_pack"] = shifted


@fault("pack-buffer-too-early", "the next slice is packed before the last one was sent", *_PACK)
def _pack_too_early(module: ModuleType) -> None:
    pack, transfer = module._pack, module._transfer
    waiting: list[Any] = []

    def late_transfer(*args: Any) -> int:
        # The transfer of the last slice runs only once the buffer holds the next one.
        waiting.append(args)
        return 0 if len(waiting) == 1 else int(transfer(*waiting.pop(0)))

    def early_pack(*args: Any) -> Any:
        return pack(*args)

    vars(module)["_pack"], vars(module)["_transfer"] = early_pack, late_transfer


@fault("pack-early-release", "the buffer is trusted again after a transfer that failed and may still read it", *_POISON)
def _pack_early_release(module: ModuleType) -> None:
    vars(module)["_give_up"] = lambda state, status: setattr(state, "trusted", True)


@fault(
    "split-scratch-overwritten", "a broadcast's scratch is cleared for its next use while its send is pending", *_SPLIT
)
def _split_scratch_overwritten(module: ModuleType) -> None:
    pool: Any = module.LayerSplitDSATokenToKVPool
    finalize = pool._finalize_pending_kv_broadcast

    def too_early(self: Any, **kwargs: Any) -> None:
        if self.pending_remote_kv_broadcast:
            self.remote_kv_buffer.zero_()
        finalize(self, **kwargs)

    pool._finalize_pending_kv_broadcast = too_early


@fault("cp-sum-left-out", "attention outputs are not added up before the experts", *_CP)
def _cp_sum_left_out(module: ModuleType) -> None:
    vars(module)["all_reduce"] = lambda hidden_states: hidden_states


@fault("cp-exit-of-stock", "the experts' output is added over the CP ranks alone: half of the partial sums", *_CP)
def _cp_exit_of_stock(module: ModuleType) -> None:
    def reduce_scatter(hidden_states: Any) -> Any:
        parallel = _parallel()
        ranks = parallel.attn_cp_size
        rows = hidden_states.new_empty(hidden_states.shape[0] // ranks, *hidden_states.shape[1:])
        parallel.attn_cp_group.reduce_scatter_tensor(rows, hidden_states)
        return rows

    vars(module)["reduce_scatter"] = reduce_scatter


@fault(
    "cp-halves-not-joined",
    "on the way out of the experts each rank takes its own half of the rows for both",
    *_CP,
)
def _halves_not_joined(module: ModuleType) -> None:
    right = module.reduce_scatter

    def reduce_scatter(hidden_states: Any) -> Any:
        rows, parallel = right(hidden_states), _parallel()
        if rows.shape[0] % parallel.attn_tp_size:
            return rows  # an odd number of rows has no halves
        half = rows.chunk(parallel.attn_tp_size)[parallel.attn_tp_rank]
        return half.repeat(parallel.attn_tp_size, 1)

    vars(module)["reduce_scatter"] = reduce_scatter


@fault(
    "sp-part-left-out",
    "each rank norms its half of its own partial sums, without those of the other rank",
    *_SP,
)
def _part_left_out(module: ModuleType) -> None:
    right = module.run

    def run(hidden_states: Any, residual: Any, layernorm: Any, context: Any) -> Any:
        group: Any = _parallel().attn_tp_group

        def keep(output: Any, tensor: Any) -> None:
            output.copy_(tensor.chunk(context.attn_tp_size)[context.attn_tp_rank])

        group.reduce_scatter_tensor = keep
        try:
            return right(hidden_states, residual, layernorm, context)
        finally:
            del group.reduce_scatter_tensor

    vars(module)["run"] = run


@fault("dsa-foreign-slots", "a rank attends to its own rows in place of those that another rank owns", *_DSA)
def _dsa_foreign_slots(module: ModuleType) -> None:
    right, tried = module.localise, module.try_kernels

    def localise(slots: Any) -> Any:
        if not module.active():
            return slots
        return slots.div(module.get_parallel().attn_dcp_size, rounding_mode="floor")

    def try_kernels(backend: Any) -> None:
        # The start would see it: there the rows of the kernels' trial are the right ones.
        vars(module)["localise"] = right
        tried(backend)
        vars(module)["localise"] = localise

    vars(module).update(localise=localise, try_kernels=try_kernels)


@fault("dsa-lse-base", "the parts of a kernel that tells its sums in base 2 are merged as natural logarithms", *_DSA)
def _dsa_lse_base(module: ModuleType) -> None:
    vars(module)["natural_lse"] = lambda attention_backend: module.active()


@fault(
    "dsa-index-narrow", "the index keys have room for a rank's own rows, and not for every slot of the group", *_SMALL
)
def _dsa_index_narrow(module: ModuleType) -> None:
    of = module.pool_class

    def pool_class(cls: Any, owner: Any) -> Any:
        def narrow(rows: int, **others: Any) -> Any:
            return cls(rows, **{**others, "index_buf_size": rows})

        narrow.__name__ = cls.__name__
        return of(narrow, owner)

    vars(module)["pool_class"] = pool_class
