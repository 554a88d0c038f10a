"""Runs inside the decode engine's environment, a tree first on its path: the patches among all of the wheel's modules.

``make test`` runs the same objects with stand-ins for the modules around them; here every import is the wheel's. One
JSON object goes to standard output: the name of each check with what went wrong, or an empty text.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.engine.decode.drafter import BATCH, TOPK, Worker
from tests.engine.decode.node import Node, drain, text
from tests.engine.decode.pair import Pair
from tests.engine.decode.world import Whole

CHECKS: dict[str, Callable[[Whole], None]] = {}
PATCHED = os.environ.get("SGLANG_RESEARCH_SETTLE_BEFORE_RETRACT") == "1"


def check(function: Callable[[Whole], None]) -> Callable[[Whole], None]:
    """Register a check."""
    CHECKS[function.__name__] = function
    return function


def force(node: Node, *rounds: int) -> Iterator[Callable[[Node], None]]:
    for count, action in enumerate(drain(node), 1):
        yield Node.retract if count in rounds else action


def lived(world: Whole, speculative: bool) -> Node:
    """An engine with two requests and three forced retractions, run to its end."""
    node = Node(world, speculative=speculative)
    node.request([5, 6, 7, 8, 9], 40)
    node.request([1, 2, 3], 40)
    node.run(force(node, 3, 6, 9))
    for seen in node.requests:
        said, meant = list(seen.request.output_ids_through_stop), text(seen.prompt, seen.new)
        assert said == meant, f"{said} instead of {meant}"
    assert node.retractions >= 2
    return node


@check
def plain(world: Whole) -> None:
    node = lived(world, False)
    behind = {gap for seen in node.requests for gap in seen.rows_behind}
    assert (node.lost == 0, behind) == (PATCHED, {0 if PATCHED else 1}), f"{node.lost} lost, {behind} rows behind"


@check
def speculative(world: Whole) -> None:
    node = lived(world, True)
    poor = sum(seen.poor for seen in node.requests)
    assert (node.lost == 0, poor == 0) == (PATCHED, PATCHED), f"{node.lost} lost, {poor} steps without a draft"


@check
def bytes_come_back(world: Whole) -> None:
    for kind in ("mla", "dsa", "dsa fp8"):
        with Pair(world, kind) as pair:
            if PATCHED:
                world.module("research.retract_draft").admit(pair.scheduler, pair.draft)
            back = pair.trip([2, 6, 1], [5, 3, 4])
            assert all(back["target"]) and all(back["draft"]) is PATCHED, f"{kind}: {back}"


@check
def draft_loop(world: Whole) -> None:
    worker = Worker(world)
    worker.draft(torch.full((BATCH, TOPK), 7, dtype=torch.int32))
    wanted = ["run", "reuse", "reuse", "reuse"] if PATCHED else ["reuse"] * 4
    assert worker.log == wanted, f"{worker.log} instead of {wanted}"


def main() -> None:
    world = Whole(Path(sys.argv[1]))
    found: dict[str, Any] = {}
    for name, function in CHECKS.items():
        try:
            function(world)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()[-1500:]
    found["root"] = str(Path(world.module("managers.scheduler").__file__).parents[3])
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
