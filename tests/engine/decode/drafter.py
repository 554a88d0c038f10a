"""The engine's draft loop without a model: loop, settings and the attention layer's question are the tree's own."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.engine.decode.world import World

BATCH, TOPK = 2, 8
MIXIN = "models.deepseek_common.attention_forward_methods.forward_mla"


class Worker:
    """The engine's draft worker as far as its loop goes; `log` says which steps ran the indexer."""

    def __init__(
        self, world: World, steps: int = 5, *, share: bool = True, topk: int = 1, index: int | None = TOPK
    ) -> None:
        self.world, self.steps = world, steps
        self.log: list[str] = []
        self.used: list[int] = []
        self.eagle = world.module("speculative.eagle_worker_v2")
        config = SimpleNamespace(
            index_share_for_mtp_iteration=share, index_topk=index, architectures=["GlmMoeDsaForCausalLMNextN"]
        )
        self.worker = object.__new__(self.eagle.EagleDraftWorker)
        vars(self.worker).update(
            topk=topk,
            speculative_num_steps=steps,
            speculative_num_draft_tokens=steps + 1,
            hot_token_id=None,
            device="cpu",
            _topk1_parents_prealloc=torch.zeros(8, steps, dtype=torch.long),
            _topk1_score_indices_prealloc=torch.zeros(8, steps, dtype=torch.long),
            draft_runner=SimpleNamespace(
                model_config=SimpleNamespace(hf_config=config), canary_manager=None, forward=self._forward
            ),
            draft_attn_backend=SimpleNamespace(attn_backends=[None] * steps),
        )
        self.worker._init_dsa_index_share_state()

    def _forward(self, batch: Any) -> Any:
        """The draft's one layer: it asks the engine whether to run the indexer."""
        previous = batch.spec_info.dsa_topk_indices if batch.reuse_dsa_topk_indices else None
        mixin = self.world.module(MIXIN).DeepseekMLAForwardMixin
        runs = mixin.should_run_indexer(SimpleNamespace(skip_topk=True, is_nextn=True), previous)
        self.log.append("run" if runs else "reuse")
        if runs:
            batch.spec_info.dsa_topk_indices = torch.full((BATCH, TOPK), 100 + len(self.log), dtype=torch.int32)
        self.used.append(int(batch.spec_info.dsa_topk_indices[0, 0]))
        logits = torch.arange(BATCH * 50.0).reshape(BATCH, 50)
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=torch.zeros(BATCH, 4))
        )

    def draft(self, seed: torch.Tensor | None) -> Any:
        """Run the engine's draft loop with this seed from another stage; returns what is left behind."""
        spec_info = self.world.module("speculative.eagle_info").EagleDraftInput(
            topk_p=torch.ones(BATCH, 1),
            topk_index=torch.zeros(BATCH, 1, dtype=torch.long),
            hidden_states=torch.zeros(BATCH, 4),
            bonus_tokens=torch.zeros(BATCH, dtype=torch.long),
            dsa_topk_indices=seed,
        )
        batch = SimpleNamespace(
            spec_info=spec_info,
            out_cache_loc=torch.arange(BATCH * self.steps),
            batch_size=BATCH,
            positions=torch.zeros(BATCH, dtype=torch.long),
            reuse_dsa_topk_indices=False,
            sampling_info=None,
        )
        names: dict[str, Any] = {
            "get_spec": lambda: SimpleNamespace(speculative_use_rejection_sampling=False),
            "forward_context": lambda context: nullcontext(),
            "per_step_draft_out_cache_loc": lambda slots, size, topk, steps: slots.view(size, topk, steps).permute(
                2, 0, 1
            ),
            "organize_draft_results": lambda *args: ("parents", "scores", "tokens"),
            "_is_cuda": False,
            "_is_hip": False,
        }
        present = {name: value for name, value in names.items() if hasattr(self.eagle, name)}
        with mock.patch.multiple(self.eagle, **present):
            self.worker.draft_forward(batch)
        return batch
