"""Runs inside an engine whose selections are compared across its ranks: each rank tells how many rows it has compared.

The engine's own check logs that count when it has doubled, so what came after its last line is in no log. Here every
rank tells it each time that the cache is emptied: before some requests and after them, it says what they added.
"""

from __future__ import annotations

from types import ModuleType

from lab.rig.gpu import counts
from lab.rig.standins import hook


def compared() -> dict[str, int]:
    """This rank, the rows that it has compared, and how many of them differed."""
    import torch
    from sglang.srt.research import dsa_dcp_check

    if torch.cuda.is_available():
        # Counted on the stream of the last forward, which is not this one.
        torch.cuda.synchronize()
    found = list(dsa_dcp_check.compared().values())
    rank = torch.distributed.get_rank()
    return {"rank": rank, "rows": sum(rows for rows, _ in found), "differed": sum(differed for _, differed in found)}


@hook.after("sglang.srt.managers.scheduler")
def _tell(module: ModuleType) -> None:
    counts.tell(module, "compared", compared)


hook.install()
