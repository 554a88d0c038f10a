"""Input sequence parallelism at the boundary from attention into the experts of a CP4 x attention-TP2 prefill.

The plain boundary adds up the partial attention outputs on both attention TP ranks of a CP rank, and both then add the
residual and norm the same S rows. Here each of the two takes one half of the rows instead:

    reduce-scatter over attention TP (S -> S/2), residual add and norm on S/2 rows,
    all-gather over all eight ranks (S/2 -> 4 S), all-gather over attention TP of the new residual (S/2 -> S)

Half shards in tensor parallel order are CP rank by CP rank, so the gather over all eight leaves the rows in just the
order of the plain gather over CP. A sum of two is the same bits in either form, and a norm looks at one row at a time,
so both results are equal bit by bit. Sent bytes a rank: 4.5 S instead of 4.0 S; half the norm's work.

Which form a batch takes must be the same on all eight ranks, or they wait for each other for ever. So it is decided by
what every rank knows alike: the batch's CP row counts. What a rank finds only at home is an error, never another form.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.research import cp_topology, gates

GATE = "SGLANG_RESEARCH_INPUT_SP"
ENABLED: bool = gates.enabled(GATE)

logger = logging.getLogger(__name__)


def check_start(server_args: Any) -> None:
    """Refuse to start with the gate set but not that of the topology; the topology's own check does the rest.

    Args:
        server_args: not looked at; the signature is that of the other start-up checks.

    Raises:
        ValueError: the gate is set without ``SGLANG_RESEARCH_DSA_CP4_ATP2``.
    """
    if not ENABLED:
        return
    gates.require(GATE, [(cp_topology.GATE, True, cp_topology.ENABLED)])
    logger.info("%s is set: each attention TP rank norms half of a CP rank's rows before the experts", GATE)


def check_layer(communicator: Any) -> None:
    """Refuse a layer whose norm is not known to work on each row alone, or whose experts do not take all rows.

    Args:
        communicator: a ``DSACPLayerCommunicator`` under construction. With the gate unset it is not looked at.

    Raises:
        ValueError: the gate is set and a condition fails; the message names each one.
    """
    if not ENABLED:
        return
    norm = communicator.post_attention_layernorm
    mode = communicator.layer_scatter_modes.mlp_mode.name
    facts: list[tuple[str, Any, Any]] = [
        (cp_topology.GATE, True, cp_topology.ENABLED),
        # Dense layers keep their rows where they are: they have no such boundary.
        ("mlp_mode", ("FULL", "SCATTERED"), mode),
        ("the post-attention norm", "RMSNorm", type(norm).__name__),
    ]
    for name, plain in (("fp32_residual", False), ("variance_size_override", None), ("override_orig_dtype", None)):
        facts.append((f"the norm's {name}", plain, getattr(norm, name, None)))
    gates.require(GATE, facts)


def applies(context: Any, forward_batch: Any, hidden_states: Any, residual: Any) -> bool:
    """Decide, alike on all ranks, whether this batch's boundary takes the form with half the rows.

    Args:
        context: the communicator's context.
        forward_batch: the batch; its CP metadata are the same on all ranks.
        hidden_states: partial attention output of shape (S, hidden).
        residual: the CP rank's residual of the same shape, dtype and device.

    Returns:
        False with the gate unset, for a batch that CP does not split, and for row counts that are unequal or odd.

    Raises:
        RuntimeError: this rank's tensors are not what the row counts say, or a graph is being captured.
    """
    if not ENABLED:
        return False
    from sglang.srt.layers.attention.dsa.utils import dsa_use_prefill_cp

    if not dsa_use_prefill_cp(forward_batch):
        return False
    counts = forward_batch.attn_cp_metadata.per_rank_actual_token
    rows = counts[0] if counts else 0
    if rows == 0 or rows % context.attn_tp_size or any(count != rows for count in counts):
        return False
    _check_tensors(hidden_states, residual, rows)
    return True


def _check_tensors(hidden_states: Any, residual: Any, rows: int) -> None:
    import torch

    def described(tensor: Any) -> Any:
        return (tuple(tensor.shape), tensor.dtype, tensor.device) if isinstance(tensor, torch.Tensor) else type(tensor)

    if not isinstance(hidden_states, torch.Tensor) or described(hidden_states) != described(residual):
        raise RuntimeError(
            f"{GATE}: hidden states and residual differ: {described(hidden_states)}, {described(residual)}"
        )
    if hidden_states.shape[0] != rows:
        raise RuntimeError(f"{GATE}: {hidden_states.shape[0]} rows here, but the batch has {rows} on each CP rank")
    if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{GATE}: the boundary was never run while a CUDA graph is captured")


def run(hidden_states: Any, residual: Any, layernorm: Any, context: Any) -> tuple[Any, Any]:
    """Add up, norm and gather: each attention TP rank on its half of the rows.

    Args:
        hidden_states: this rank's partial sums, of shape (S, hidden), S even.
        residual: the CP rank's residual, of the same shape; it is not written.
        layernorm: takes (rows, residual rows), may write both in place, returns the normed and the added rows.
        context: the communicator's context.

    Returns:
        The normed rows of all CP ranks, of shape (CP size * S, hidden), and the new residual of shape (S, hidden).
        Both are new tensors.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel, parts = get_parallel(), context.attn_tp_size
    rows, *rest = hidden_states.shape
    half = hidden_states.new_empty(rows // parts, *rest)
    parallel.attn_tp_group.reduce_scatter_tensor(half, hidden_states.contiguous())
    # A copy: the fused norm writes into it, and the residual may be held by somebody who captures layer outputs.
    kept = residual.tensor_split(parts)[context.attn_tp_rank].clone()
    half, kept = layernorm(half, kept)
    gathered = hidden_states.new_empty(rows * context.attn_cp_size, *rest)
    parallel.tp_group.all_gather_into_tensor(gathered, half)
    restored = hidden_states.new_empty(rows, *rest)
    parallel.attn_tp_group.all_gather_into_tensor(restored, kept)
    return gathered, restored
