"""Random lives of a decode engine: requests arrive, are retracted, come back, are aborted and end, under every gate.

Each life is a random plan for the engine's own event loop (see `node`), then as many forced retractions as are still
missing to 37, then nothing until all is done. In every round no page is lost or owned twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.decode.node import Node, text
from tests.engine.decode.world import World

Tree = Callable[[str], Path]
Action = tuple[str, int, int]
RETRACTIONS = 37
GATES = {
    "off": (),
    "settle": ("settle",),
    "draft": ("draft",),
    "seed": ("seed",),
    "dcp": ("dcp",),
    "all": ("settle", "draft", "seed", "dcp"),
}
ACTIONS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(1, 22), st.integers(1, 30)),
    st.tuples(st.just("retract"), st.integers(0, 0), st.integers(0, 0)),
    st.tuples(st.just("abort"), st.integers(0, 9), st.integers(0, 0)),
    st.tuples(st.just("rest"), st.integers(0, 0), st.integers(0, 0)),
)
PLANS = st.lists(ACTIONS, min_size=12, max_size=40)
QUICK = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def worlds(stock: Tree, patched: Tree) -> dict[str, World]:
    made = {name: World(patched("decode"), gates) for name, gates in GATES.items()}
    return made | {"stock": World(stock("decode"))}


def do(node: Node, action: Action) -> None:
    kind, first, second = action
    if kind == "arrive" and len(node.requests) < 16:
        number = len(node.requests)
        node.request([(7 * number + place) % 90 for place in range(first)], second)
    elif kind == "retract":
        node.retract()
    elif kind == "abort" and first < len(node.requests) and not node.requests[first].request.finished():
        node.abort(node.requests[first])


def life(world: World, speculative: bool, plan: list[Action]) -> Node:
    """One engine from its start to its end."""
    node = Node(world, speculative=speculative, pages=26, slots=5)

    def rounds() -> Iterator[Callable[[Node], None]]:
        for action in plan:
            yield lambda node, action=action: do(node, action)  # type: ignore[misc]
        while node.retractions < RETRACTIONS:
            if len([seen for seen in node.requests if not seen.request.finished()]) < 3:
                node.request([len(node.requests) % 90, 3, 5], 30)
            yield Node.retract
            yield lambda node: None
        while node.busy:
            yield lambda node: None

    node.run(rounds())
    return node


def ended_well(node: Node) -> None:
    """What holds of every life, under every gate."""
    assert node.retractions >= RETRACTIONS
    assert not node.queue.retracted_queue, "the queue of the retracted drains"
    for seen in node.requests:
        said, meant = list(seen.request.output_ids_through_stop), text(seen.prompt, seen.new)
        assert said == (meant[: len(said)] if seen.aborted else meant)
        assert seen.request.kv is None and "kv_cache_cpu" not in vars(seen.request)
    free = len(node.allocator.free_pages) + len(node.allocator.release_pages)
    assert free == node.free_pages and set(node.slots.free_slots) == node.free_slots


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("gates", GATES)
def test_random_lives_end_with_every_text_right_and_every_page_free(
    worlds: dict[str, World], gates: str, speculative: bool
) -> None:
    world = worlds[gates]

    @QUICK
    @given(PLANS)
    def run(plan: list[Action]) -> None:
        with world.entered():
            node = life(world, speculative, plan)
        ended_well(node)
        behind = {gap for seen in node.requests for gap in seen.rows_behind}
        poor = sum(seen.poor for seen in node.requests)
        if gates in ("settle", "all"):
            assert node.lost == 0 and behind == {0}
        if gates == "all":
            assert poor == 0
        if gates == "draft" and speculative:
            assert poor <= node.retractions

    run()


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_with_every_gate_off_a_random_life_is_the_unpatched_engines(
    worlds: dict[str, World], speculative: bool
) -> None:
    @QUICK
    @given(PLANS)
    def run(plan: list[Action]) -> None:
        found: list[Any] = []
        for name in ("stock", "off"):
            with worlds[name].entered():
                node = life(worlds[name], speculative, plan)
            rows = [(seen.rows_behind, seen.steps, seen.poor, list(seen.request.output_ids)) for seen in node.requests]
            found.append((node.trace, node.lost, rows))
        assert found[0] == found[1]

    run()


def test_a_stock_engine_loses_tokens_and_drafts_in_such_a_life(worlds: dict[str, World]) -> None:
    """The same life that the gates make good: the machine would see it if they did not."""
    plan: list[Action] = [("arrive", 5, 30), ("arrive", 9, 30), ("rest", 0, 0), ("rest", 0, 0)]
    with worlds["stock"].entered():
        before = life(worlds["stock"], True, plan)
    with worlds["all"].entered():
        after = life(worlds["all"], True, plan)
    assert before.lost > 0 and sum(seen.poor for seen in before.requests) > 37
    assert after.lost == 0 and sum(seen.poor for seen in after.requests) == 0
