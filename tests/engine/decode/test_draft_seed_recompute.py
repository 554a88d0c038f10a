"""The patch draft-seed-recompute: the first step of a draft loop selects for itself, and the later ones reuse it.

Draft loop, draft worker's settings, the attention layer's own question and the relay are the tree's own; the draft's
forward is a recorder that asks that question.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engine.decode.drafter import BATCH, MIXIN, TOPK, Worker
from tests.engine.decode.node import Node, Settings, drain, text
from tests.engine.decode.world import GATES, SCHEDULING, World

Tree = Callable[[str], Path]
REAL = (*SCHEDULING, MIXIN, "layers.attention.dsa.utils")
SEED = torch.full((BATCH, TOPK), 7, dtype=torch.int32)
FRESH = ["run", "reuse", "reuse", "reuse"]


@pytest.fixture(scope="module")
def old(stock: Tree) -> World:
    return World(stock("decode"), real=REAL)


@pytest.fixture(scope="module")
def new(patched: Tree) -> World:
    return World(patched("decode"), ["seed"], REAL)


@pytest.fixture(scope="module")
def ungated(patched: Tree) -> World:
    return World(patched("decode"), real=REAL)


@pytest.mark.parametrize("seed", [None, SEED], ids=["no seed", "seed"])
def test_the_unpatched_loop_never_selects_once_it_has_a_seed(old: World, seed: torch.Tensor | None) -> None:
    with old.entered():
        worker = Worker(old)
        worker.draft(seed)
    assert worker.log == (FRESH if seed is None else ["reuse"] * 4)
    assert worker.used == ([101] * 4 if seed is None else [7] * 4)


@pytest.mark.parametrize("seed", [None, SEED], ids=["no seed", "seed"])
def test_the_patched_loop_selects_in_its_first_step_whatever_came(new: World, seed: torch.Tensor | None) -> None:
    with new.entered():
        worker = Worker(new)
        batch = worker.draft(seed)
    assert worker.log == FRESH and worker.used == [101] * 4
    assert batch.spec_info.dsa_topk_indices is None and batch.reuse_dsa_topk_indices is False


@pytest.mark.parametrize("steps", [2, 3, 6])
def test_one_selection_for_each_loop_of_any_length(new: World, steps: int) -> None:
    with new.entered():
        worker = Worker(new, steps)
        worker.draft(SEED)
        worker.draft(SEED)
    assert worker.log == 2 * ["run", *["reuse"] * (steps - 2)]
    assert worker.used == [101] * (steps - 1) + [100 + steps] * (steps - 1)


@pytest.mark.parametrize("seed", [None, SEED], ids=["no seed", "seed"])
@pytest.mark.parametrize(
    ("share", "topk", "index"), [(True, 1, TOPK), (False, 1, TOPK), (True, 4, TOPK), (True, 1, None)]
)
def test_without_the_gate_the_loop_is_the_unpatched_one(
    old: World, ungated: World, seed: torch.Tensor | None, share: bool, topk: int, index: int | None
) -> None:
    found = []
    for world in (old, ungated):
        with world.entered():
            worker = Worker(world, share=share, topk=topk, index=index)
            flags = vars(worker.worker)
            if topk == 1 and share:
                worker.draft(seed)
            found.append((worker.log, worker.used, flags["seed_dsa_topk_from_draft_extend"], flags["dsa_index_topk"]))
    assert found[0] == found[1]
    assert found[0][2] is (share and topk == 1 and index is not None)


def test_the_flag_that_graphs_and_backends_follow_is_off_from_the_start(new: World, old: World) -> None:
    """Buffers of both graphs, the eager fallback and the fused top-k ask this one flag, at their making."""
    with old.entered():
        assert Worker(old).worker.seed_dsa_topk_from_draft_extend is True
    with new.entered():
        assert Worker(new).worker.seed_dsa_topk_from_draft_extend is False
        assert Worker(new).worker.index_share_for_mtp_iteration is True
        fused = new.module("layers.attention.dsa.utils")
        arguments = SimpleNamespace(disaggregation_mode="decode")
        with mock.patch.object(fused, "envs", SimpleNamespace(SGLANG_DSA_FUSE_TOPK=SimpleNamespace(get=lambda: True))):
            assert fused.should_use_dsa_fused_topk(arguments, Worker(new).worker.seed_dsa_topk_from_draft_extend)
            assert not fused.should_use_dsa_fused_topk(arguments, True)


@pytest.mark.parametrize(
    ("file", "asks"),
    [
        ("eagle_draft_cuda_graph_runner.py", "self.eagle_worker.seed_dsa_topk_from_draft_extend"),
        ("eagle_draft_extend_cuda_graph_runner.py", "self.eagle_worker.seed_dsa_topk_from_draft_extend"),
        ("draft_utils.py", "seed_dsa_topk_from_draft_extend=self.seed_dsa_topk_from_draft_extend"),
    ],
)
def test_what_is_captured_still_asks_the_worker(patched: Tree, file: str, asks: str) -> None:
    assert asks in (patched("decode") / "sglang/srt/speculative" / file).read_text(encoding="utf-8")


# Between the stages


def batch_of(world: World, seeds: list[torch.Tensor | None]) -> Any:
    requests = [
        SimpleNamespace(
            output_topk_p=torch.ones(1),
            output_topk_index=torch.zeros(1, dtype=torch.long),
            hidden_states_tensor=torch.zeros(4),
            output_dsa_topk_indices=seed,
        )
        for seed in seeds
    ]
    return SimpleNamespace(reqs=requests, device="cpu", enable_overlap=False)


@pytest.mark.parametrize("mixed", [False, True], ids=["all have one", "one has none"])
def test_what_the_prefill_sent_is_not_taken_into_a_batch(old: World, new: World, mixed: bool) -> None:
    seeds = [SEED[0], None if mixed else SEED[0]]
    arguments = Settings(speculative_eagle_topk=1)
    made = []
    for world in (old, new):
        with world.entered():
            build = world.module("speculative.eagle_disaggregation").build_eagle_disagg_draft_input
            made.append(build(batch_of(world, seeds), arguments, torch.zeros(2, dtype=torch.long), None))
    assert (made[0].dsa_topk_indices is None) is mixed
    assert made[1].dsa_topk_indices is None
    assert torch.equal(made[0].topk_p, made[1].topk_p) and torch.equal(made[0].hidden_states, made[1].hidden_states)


def test_the_wire_keeps_its_width(old: World, new: World) -> None:
    config = SimpleNamespace(index_share_for_mtp_iteration=True, index_topk=2048)
    widths = []
    for world in (old, new):
        with world.entered():
            utils = world.module("disaggregation.utils")
            with mock.patch.object(utils, "get_dsa_index_topk", lambda model: model.index_topk):
                widths.append(utils.get_dsa_seed_metadata_dim(config))
    assert widths == [2048, 2048]


def test_a_running_engine_relays_no_seed(old: World, new: World) -> None:
    buffers = []
    for world in (old, new):
        with world.entered():
            node = Node(world, speculative=True, seeds=True)
            node.relays_seeds = world is old  # the worker's flag decides it; the model here is told
            node.request([5, 6, 7], 20)
            node.request([4, 4], 20)
            node.run(drain(node))
            buffers.append(node.scheduler.future_map.dsa_topk_indices_buf)
            for seen in node.requests:
                assert list(seen.request.output_ids_through_stop) == text(seen.prompt, seen.new)
    assert buffers[0] is not None and buffers[1] is None


# Where the gate is refused


def engine(world: World, **changes: Any) -> Any:
    steps = changes.pop("steps", 5)
    worker = Worker(world, steps, **{key: changes.pop(key) for key in ("share", "topk", "index") if key in changes})
    arguments = Settings(disaggregation_mode="decode")
    one = SimpleNamespace(server_args=arguments, draft_worker=SimpleNamespace(draft_worker=worker.worker))
    for name, value in changes.items():
        setattr(one if name == "draft_worker" else arguments, name, value)
    return one


class MultiLayerEagleDraftWorker:
    """Has the name of another worker."""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode decode, found prefill"),
        ({"disaggregation_mode": "null"}, "--disaggregation-mode decode, found null"),
        ({"draft_worker": None}, "speculative decoding"),
        ({"draft_worker": SimpleNamespace()}, "single EAGLE layer, found NoneType"),
        (
            {"draft_worker": SimpleNamespace(draft_worker=MultiLayerEagleDraftWorker())},
            "single EAGLE layer, found MultiLayerEagleDraftWorker",
        ),
        ({"topk": 4}, "--speculative-eagle-topk 1, found 4"),
        ({"steps": 1}, "two draft steps or more, found 1"),
        ({"speculative_adaptive": True}, "a fixed number of draft steps"),
        ({"share": False}, "index_share_for_mtp_iteration"),
        ({"index": None}, "index_topk"),
    ],
)
def test_an_engine_that_it_was_not_made_for_does_not_start(
    new: World, ungated: World, changes: dict[str, Any], told: str
) -> None:
    with new.entered():
        module = new.module("research.seed")
        module.admit(engine(new))
        with pytest.raises(module.DraftSeedRefused, match=told) as error:
            module.admit(engine(new, **changes))
        assert GATES["seed"] in str(error.value)
    with ungated.entered():
        ungated.module("research.seed").admit(engine(ungated, **changes))


def test_a_gate_that_is_neither_on_nor_off_stops_the_start(patched: Tree) -> None:
    world = World(patched("decode"), **{GATES["seed"]: "always"})
    with world.entered(), pytest.raises(ValueError, match="neither on"):
        world.module("research.seed")


def test_the_engine_asks_before_pools_and_graphs_are_made(patched: Tree) -> None:
    source = (patched("decode") / "sglang/srt/managers/scheduler.py").read_text(encoding="utf-8")
    start = source.index("def init_model_worker")
    worker = source.index("self.maybe_init_draft_worker()", start)
    assert worker < source.index("seed.admit(self)") < source.index("self.init_memory_pools()", start)
