"""Planted faults of the two halves into which a CP rank's rows are cut, beside those of ``faults``.

A file of its own: results of GPUs name the bytes of ``faults.py``, and none of these was planted there.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from lab.rig.faults import fault


def _parallel() -> Any:
    return sys.modules["sglang.srt.runtime_context"].get_parallel()


@fault(
    "cp-halves-not-joined",
    "on the way out of the experts each rank takes its own half of the rows for both",
    "sglang.srt.research.cp_topology",
    "cp2-atp2",
    "cp4-attention-tp2",
    "prefill",
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
    "sglang.srt.research.input_sp",
    "cp2-atp2",
    "input-sp",
    "prefill",
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
