"""pd-cache-tree: the trees are made in both places, since policies and workers come in either order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Tree = Callable[[str], Path]
SEED = "pd_cache::seed("


def test_the_stock_function_has_no_caller_and_the_patched_one_has(stock: Tree, patched: Tree) -> None:
    def callers(root: Path) -> int:
        return sum(path.read_text().count(".init_pd_cache_aware_policies(") for path in (root / "src").rglob("*.rs"))

    assert callers(stock("router")) == 0
    assert callers(patched("router")) == 1


def test_the_trees_are_made_after_the_policies_are_set_and_after_workers_are_registered(patched: Tree) -> None:
    factory = (patched("router") / "src/routers/factory.rs").read_text()
    assert factory.count(SEED) == 1
    assert factory.index("set_decode_policy(decode_policy)") < factory.index(SEED) < factory.index("PDRouter::new(ctx)")
    update = (patched("router") / "src/core/steps/worker/shared/update_policies.rs").read_text()
    assert update.count(SEED) == 1 and update.index("for worker in workers.iter()") < update.index(SEED)
