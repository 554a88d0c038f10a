"""The draft's indexer runs once in every draft loop; what it selects is shared within that loop alone.

The stock engine seeds a loop with a selection from another stage: the draft-extend of the step before, the prefill
engine's draft, or, after a retraction, the prefill again. Its row stands for the last accepted position, so none of
the positions of the loop can be in it. Here the first step of a loop selects for itself, and the later ones reuse it.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.research import gates

GATE = "SGLANG_RESEARCH_DRAFT_SEED_RECOMPUTE"
ON: bool = gates.enabled(GATE)

# Other workers never carry a seed, or carry one for each of their layers.
_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"


class DraftSeedRefused(RuntimeError):
    """The gate is on in an engine without a seed that could be left out. Raised at the start."""


def admit(scheduler: Any) -> None:
    """Check the engine at its start, whatever its worker is.

    Args:
        scheduler: the engine's ``Scheduler`` with its draft worker, before pools and CUDA graphs are made.

    Raises:
        DraftSeedRefused: the gate is on and a condition does not hold; the message names it.
    """
    if not ON:
        return
    args, worker = scheduler.server_args, scheduler.draft_worker
    _need(args.disaggregation_mode == "decode", f"--disaggregation-mode decode, found {args.disaggregation_mode}")
    _need(worker is not None, "speculative decoding")
    draft = getattr(worker, "draft_worker", None)
    name = f"{type(draft).__module__}.{type(draft).__qualname__}"
    _need(name == _WORKER, f"the worker of a single EAGLE layer, found {type(draft).__qualname__}")
    _need(draft.topk == 1, f"--speculative-eagle-topk 1, found {draft.topk}")
    _need(draft.speculative_num_steps >= 2, f"two draft steps or more, found {draft.speculative_num_steps}")
    _need(not args.speculative_adaptive, "a fixed number of draft steps, found an adaptive one")
    _need(bool(draft.index_share_for_mtp_iteration), "a model with index_share_for_mtp_iteration")
    _need(draft.dsa_index_topk is not None, "a model with index_topk")


def crosses_stages(stock: bool) -> bool:
    """Whether a selection may come from another stage: what the engine decided, and never with the gate on.

    The engine derives from it the buffers of its CUDA graphs, the fused top-k of its draft backends, and whether a
    draft step without a seed may run in a graph. So it is decided once, before any of them is made.
    """
    return False if ON else stock


def carried(seeds: list[Any]) -> list[Any]:
    """The seeds that a batch takes from its requests: ``seeds``, and none with the gate on."""
    return [] if ON else seeds


def _need(holds: bool, condition: str) -> None:
    if not holds:
        raise DraftSeedRefused(f"{GATE} is on, but needs {condition}")
