"""Attention tensor parallelism of two inside each rank of a four-way context parallel prefill of GLM-DSA.

The stock engine gives DSA prefill CP the whole tensor parallel group (CP8, attention TP1), because its communicator
reduces nothing: each attention output is complete. Here eight ranks are four CP ranks of two attention TP ranks, and
an attention output is one of two partial sums:

    tp_rank = 2 * cp_rank + attn_tp_rank      attn_tp = [0, 1], [2, 3], ...      attn_cp = [0, 2, 4, 6], [1, 3, 5, 7]

With S rows a CP rank, the boundary into the experts sums over the two attention TP ranks, adds the residual, norms, and
gathers over CP. The experts' output is one of *eight* partial sums for all 4 S rows, so the way out reduces and
scatters over all eight ranks and joins the two halves of a CP rank. (Reducing over the CP group alone, as stock does,
would add four of the eight.) Batches that CP does not split, such as a prompt shorter than the CP size, hold the same
rows on all ranks: they are summed over attention TP and gathered nowhere, and the experts reduce for themselves.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.research import gates

GATE = "SGLANG_RESEARCH_DSA_CP4_ATP2"
ENABLED: bool = gates.enabled(GATE)

TP_SIZE = 8
CP_SIZE = 4
ATTN_TP_SIZE = TP_SIZE // CP_SIZE

ATTN_TP_SIZES: tuple[int, ...] = (1, ATTN_TP_SIZE) if ENABLED else (1,)
"""Sizes of the attention TP group that the DSA CP communicator accepts."""

ARCHITECTURES = ("GlmMoeDsaForCausalLM",)
# The boundaries were compared in these alone.
DTYPES = ("torch.bfloat16", "torch.float32")

logger = logging.getLogger(__name__)

_CONDITIONS: tuple[tuple[str, Any], ...] = (
    ("disaggregation_mode", "prefill"),
    ("enable_prefill_cp", True),
    ("cp_strategy", "interleave"),
    ("dp_size", 1),
    ("pp_size", 1),
    ("nnodes", 1),
    ("dcp_size", 1),
    ("moe_dp_size", 1),
    ("moe_dense_tp_size", 1),
    ("moe_a2a_backend", "none"),
    # A fused sum over one group leaves out what follows the experts.
    ("flashinfer_allreduce_fusion_backend", None),
    # Its fallback takes a rank of the CP group for a rank of the world, which are the same only with attention TP 1.
    ("enable_dsa_cache_layer_split", False),
    ("enable_two_batch_overlap", False),
    ("enable_single_batch_overlap", False),
    ("dwdp_size", 1),
    ("enable_quant_communications", False),
    ("enable_attn_tp_input_scattered", False),
    ("enable_layernorm_sp", False),
    # Slices attention weights that it takes for whole ones.
    ("enable_cp_decode_attn_tp", False),
    ("enable_aiter_allreduce_fusion", False),
    *gates.NO_OUTER_CACHE,
)


def attn_cp_size(cfg: Any) -> int:
    """Return the attention CP size of a DSA model with prefill CP: all of TP as in stock, or as asked with the gate.

    Args:
        cfg: the server arguments under resolution. Whether they fit the gate is for ``check_start`` to say.
    """
    return int(cfg.attn_cp_size if ENABLED else cfg.tp_size // cfg.dp_size)


def check_start(server_args: Any) -> None:
    """Refuse to start with the gate set where the patch was not made for; does nothing with the gate unset.

    Args:
        server_args: the server arguments at the end of their resolution.

    Raises:
        ValueError: the gate is set and a condition fails; the message names each one.
    """
    if not ENABLED:
        return
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_platform

    cfg, model, platform = resolved_view(server_args), model_config_of(server_args), get_platform()
    shape = (("tp_size", TP_SIZE), ("attn_cp_size", CP_SIZE))
    gates.require(
        GATE,
        [
            ("architecture", ARCHITECTURES, model.hf_config.architectures[0]),
            ("the model's dtype", DTYPES, str(model.dtype)),
            *gates.facts_of(cfg, (*shape, *_CONDITIONS)),
            ("the backend of prefill CUDA graphs", "disabled", cfg.cuda_graph_config.prefill.backend),
            ("SGLANG_ENABLE_CP_V2", True, bool(envs.SGLANG_ENABLE_CP_V2.get())),
            # Its output is whole on every rank and would be added once for each.
            ("SGLANG_SHARED_EXPERT_TP1", False, bool(envs.SGLANG_SHARED_EXPERT_TP1.get())),
            ("SGLANG_USE_AG_AFTER_QLORA", False, bool(envs.SGLANG_USE_AG_AFTER_QLORA.get())),
            *((f"the platform {name}", False, bool(getattr(platform, f"is_{name}"))) for name in ("hip", "npu", "xpu")),
        ],
    )
    logger.info("%s is set: %d CP ranks of %d attention TP ranks", GATE, CP_SIZE, ATTN_TP_SIZE)


def check_layer(communicator: Any) -> None:
    """Refuse a layer whose process groups are not laid out as the collectives here need them.

    Args:
        communicator: a ``DSACPLayerCommunicator`` under construction. With the gate unset it is not looked at.

    Raises:
        ValueError: the gate is set and a condition fails; the message names each one.
    """
    if not ENABLED:
        return
    from sglang.srt.runtime_context import get_parallel

    parallel, context = get_parallel(), communicator._context
    first = parallel.tp_group.ranks[0]
    cp_rank, lane = divmod(parallel.tp_rank, ATTN_TP_SIZE)
    pair = [first + ATTN_TP_SIZE * cp_rank + other for other in range(ATTN_TP_SIZE)]
    lane_ranks = list(range(first + lane, first + TP_SIZE, ATTN_TP_SIZE))
    gates.require(
        GATE,
        [
            ("tp_size", TP_SIZE, context.tp_size),
            ("attn_tp_size", ATTN_TP_SIZE, context.attn_tp_size),
            ("attn_cp_size", CP_SIZE, context.attn_cp_size),
            ("attn_dp_size", 1, context.attn_dp_size),
            ("the experts' parallel size", TP_SIZE, parallel.moe_tp_size * parallel.moe_ep_size),
            ("ranks of tp_group", list(range(first, first + TP_SIZE)), list(parallel.tp_group.ranks)),
            ("ranks of attn_tp_group", pair, list(parallel.attn_tp_group.ranks)),
            ("ranks of attn_cp_group", lane_ranks, list(parallel.attn_cp_group.ranks)),
        ],
    )


def splits_attention(context: Any) -> bool:
    """Tell whether attention outputs are partial sums that the boundary after attention has to add up."""
    return ENABLED and context.attn_tp_size > 1


def all_reduce(hidden_states: Any) -> Any:
    """Add the attention TP ranks' partial sums of (rows, hidden); the input may be overwritten. No rows: no call."""
    from sglang.srt.runtime_context import get_parallel

    # Both ranks of a pair hold the same rows, so both leave the call out.
    return get_parallel().attn_tp_group.all_reduce(hidden_states) if hidden_states.shape[0] else hidden_states


def reduce_scatter(hidden_states: Any) -> Any:
    """Add the experts' partial sums of all ranks and return the rows of this CP rank.

    Args:
        hidden_states: this rank's partial sums, contiguous, of shape (CP size * rows, hidden), CP rank by CP rank.

    Returns:
        A new tensor of shape (rows, hidden), the same on both attention TP ranks of a CP rank.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel, total = get_parallel(), hidden_states.shape[0]
    rows = hidden_states.new_empty(total // parallel.attn_cp_size, *hidden_states.shape[1:])
    if total % parallel.tp_size:
        # An odd number of rows a CP rank has no halves: the same sum and the same bytes in two other steps.
        parallel.attn_cp_group.reduce_scatter_tensor(rows, hidden_states)
        return parallel.attn_tp_group.all_reduce(rows)
    half = hidden_states.new_empty(total // parallel.tp_size, *hidden_states.shape[1:])
    parallel.tp_group.reduce_scatter_tensor(half, hidden_states)
    parallel.attn_tp_group.all_gather_into_tensor(rows, half)
    return rows
