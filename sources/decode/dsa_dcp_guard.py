"""Where GLM-DSA under decode context parallelism was not made to run: one refusal that names all that is wrong."""

from __future__ import annotations

from typing import Any

from sglang.srt.research import exact_topk, gates, narrow_topology

GATE = "SGLANG_RESEARCH_DSA_DCP"
UNCHECKED = "SGLANG_RESEARCH_DSA_DCP_UNCHECKED_PREFILL"
_ANY_PREFILL: bool = gates.enabled(UNCHECKED)
PAGE = 64  # the index cache knows no other
OWN = (None, "dsa", "nsa")  # unset; what a model with index_topk is given then; its older name

# The attention kernels that skip -1 anywhere and return an LSE, and whether that is a natural logarithm or base 2.
# The two of sm_90 were measured on an H200 with sglang-kernel 0.4.5, the third was read in its source. What is written
# here is not trusted: the start runs the kernel and compares.
NATURAL = {"flashmla_kv": True, "flashmla_sparse": False, "flashinfer_sparse_mla": False}


class DsaDcpRefused(ValueError):
    """The gate is on where this patch was not made for. Raised at the start; the message names every condition."""


def check(args: Any, config: Any, pool: str) -> None:
    """Refuse an engine that does not fit, before its first pool is made.

    Args:
        args: the engine's ``ServerArgs``, its defaults filled in.
        config: the model's configuration; read is ``index_topk``.
        pool: name of the class of the pool that is about to be made.

    Raises:
        DsaDcpRefused: one or more conditions do not hold.
    """
    wrong = [f"{condition} (found {found})" for holds, condition, found in _conditions(args, config, pool) if not holds]
    if wrong:
        raise DsaDcpRefused(f"{GATE}=1 with --dcp-size {args.dcp_size} needs " + "; ".join(wrong))


def _conditions(args: Any, config: Any, pool: str) -> list[tuple[bool, str, Any]]:
    """(whether it holds, its words, what was found) of every condition."""
    attention_tp = args.tp_size // (args.dp_size if args.enable_dp_attention else 1) // (args.attn_cp_size or 1)
    known = " or ".join(NATURAL)
    prefill, decode = args.dsa_prefill_backend, args.dsa_decode_backend
    ragged = str(prefill).startswith("flashmla_sparse") and "fp8" in str(args.kv_cache_dtype)
    topk = getattr(config, "index_topk", None)
    backends = {
        "attention_backend": args.attention_backend,
        "prefill_attention_backend": args.prefill_attention_backend,
        "decode_attention_backend": args.decode_attention_backend,
        "speculative_draft_attention_backend": args.speculative_draft_attention_backend,
    }
    other = [f"{name}={value}" for name, value in backends.items() if value not in OWN]
    return [
        (bool(topk), "a model with index_topk", topk),
        (pool == "DSATokenToKVPool", "the plain DSA pool", pool),
        (args.page_size == PAGE, f"--page-size {PAGE}", args.page_size),
        (
            attention_tp % args.dcp_size == 0,
            f"an attention-TP that is a multiple of {args.dcp_size}",
            attention_tp,
        ),
        (not other, "no attention backend but the model's own, dsa", ", ".join(other)),
        (args.dcp_comm_backend == "ag_rs", "--dcp-comm-backend ag_rs", args.dcp_comm_backend),
        (decode in NATURAL, f"--dsa-decode-backend {known}", decode),
        (prefill in NATURAL, f"--dsa-prefill-backend {known}", prefill),
        (
            NATURAL.get(prefill) == NATURAL.get(decode),
            "prefill and decode backends whose LSE has one base",
            f"{prefill} and {decode}",
        ),
        (
            not ragged,
            "--dsa-prefill-backend flashmla_kv for an fp8 cache, as flashmla_sparse gathers all of it by slot",
            f"{prefill} with {args.kv_cache_dtype}",
        ),
        (not args.dcp_replicate_q_proj, "no --dcp-replicate-q-proj", args.dcp_replicate_q_proj),
        (args.attn_cp_size in (None, 1), "no prefill context parallelism in this engine", args.attn_cp_size),
        (args.pp_size == 1, "--pp-size 1", args.pp_size),
        (not args.enable_hisparse, "no --enable-hisparse", args.enable_hisparse),
        (not args.enable_hierarchical_cache, "no --enable-hierarchical-cache", args.enable_hierarchical_cache),
        (not args.enable_two_batch_overlap, "no --enable-two-batch-overlap", args.enable_two_batch_overlap),
        (
            args.speculative_algorithm in (None, "EAGLE", "NEXTN"),
            "no speculation but EAGLE or NEXTN",
            args.speculative_algorithm,
        ),
        (
            (args.speculative_eagle_topk or 1) == 1,
            "--speculative-eagle-topk 1, as accepted rows are not moved",
            args.speculative_eagle_topk,
        ),
        (
            not args.enable_multi_layer_eagle,
            "no --enable-multi-layer-eagle",
            args.enable_multi_layer_eagle,
        ),
        (args.disaggregation_mode != "prefill", "an engine that decodes", args.disaggregation_mode),
        (
            # No message of a prefill tells how many layers it sends, or what its index looks like: only its own half of
            # the patch compares that with what this engine registers. The fake backend has no prefill.
            args.disaggregation_mode != "decode"
            or args.disaggregation_transfer_backend == "fake"
            or narrow_topology.ENABLED
            or _ANY_PREFILL,
            f"{narrow_topology.GATE}=1 on both sides (DCP2 over attention-TP2), where the prefill compares its layers "
            f"and its index with this engine's, or {UNCHECKED}=1 to take KV that nobody compared",
            "neither",
        ),
        (
            exact_topk.ON or _broadcast(),
            f"the same selection on every rank: {exact_topk.GATE}=1 or SGLANG_DSA_TOPK_BROADCAST=1",
            "neither",
        ),
    ]


def _broadcast() -> bool:
    from sglang.srt.environ import envs

    on: bool = envs.SGLANG_DSA_TOPK_BROADCAST.get()
    return on
