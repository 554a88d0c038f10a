"""Runs inside an engine on the GPU machine: what lets ``draft-seed-recompute`` start there, and what damages a seed.

``PATCHBUNDLE_RIG_SEEDS`` holds words, comma separated. ``alone``: of the patch's conditions the one that asks for
``--disaggregation-mode decode`` is not asked of an engine without disaggregation; every other condition stays.
``poison``: between draft-extend and draft all of a seed but its first entry is overwritten by -1; how many seeds were
is told when the cache is emptied.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from lab.rig.gpu import counts
from lab.rig.standins import hook

# As the patch words it, for an engine that is no half of a pair.
NOT_ASKED = "--disaggregation-mode decode, found null"


def admit_alone(module: ModuleType) -> None:
    """Leave out one condition of the patch's start-up check."""
    need = module._need

    def most(holds: bool, condition: str) -> None:
        if condition != NOT_ASKED:
            need(holds, condition)

    vars(module)["_need"] = most


class Poison:
    """Overwrites the seeds that reach a draft loop, and counts loops and seeds."""

    def __init__(self) -> None:
        self.loops = 0
        self.seeds = 0

    def install(self, module: ModuleType) -> None:
        """Poison before each loop of the EAGLE worker."""
        worker: Any = module.EagleDraftWorker
        draft = worker.draft

        def poisoned(this: Any, batch: Any) -> Any:
            self.loops += 1
            seed = getattr(batch.spec_info, "dsa_topk_indices", None)
            if seed is not None:
                # One entry stays: attention over nothing at all would not be a wrong selection but none.
                wrong = seed.clone()
                wrong[:, 1:] = -1
                batch.spec_info.dsa_topk_indices = wrong
                self.seeds += len(wrong)
            return draft(this, batch)

        worker.draft = poisoned

    def tell(self, module: ModuleType) -> None:
        """Tell the counts whenever the cache is emptied."""
        counts.tell(module, "seeds", lambda: {"loops": self.loops, "poisoned": self.seeds})


def register(words: str) -> None:
    """Register with the import hook what ``words`` name; nothing when it is empty.

    Raises:
        ValueError: another word.
    """
    for word in filter(None, words.split(",")):
        if word == "alone":
            hook.after("sglang.srt.research.seed")(admit_alone)
        elif word == "poison":
            poison = Poison()
            hook.after("sglang.srt.speculative.eagle_worker_v2")(poison.install)
            hook.after("sglang.srt.managers.scheduler")(poison.tell)
        else:
            raise ValueError(f"PATCHBUNDLE_RIG_SEEDS={words}: alone, poison, or both")
    hook.install()


register(os.environ.get("PATCHBUNDLE_RIG_SEEDS", ""))
