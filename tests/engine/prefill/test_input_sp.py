"""input-sp: the boundary into the experts on half of the rows each, bit for bit what the plain boundary gives.

The eight processes are those of test_cp4_attention_tp2.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.prefill.conftest import Outcomes
from tests.engine.prefill.cp_ranks import CASES, SPARSE
from tests.engine.prefill.cp_rig import CP, HIDDEN, INPUT_SP, TOPOLOGY, Journal, RMSNorm, Tree, parallel_state
from tests.engine.prefill.test_cp4_attention_tp2 import start

Root = Callable[[str], Path]
KINDS = [name.removeprefix("sp ") for name in CASES if name.startswith("sp ")]


@pytest.fixture(scope="module")
def off(patched: Root) -> Tree:
    return Tree(patched("prefill"), {TOPOLOGY: "1"})


@pytest.fixture(scope="module")
def on(patched: Root) -> Tree:
    return Tree(patched("prefill"), {TOPOLOGY: "1", INPUT_SP: "1"})


# --- eight processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_residual_are_bit_for_bit_those_of_the_plain_boundary(eight: Outcomes, kind: str) -> None:
    for plain, sp in zip(eight[f"plain {kind}"], eight[f"sp {kind}"], strict=True):
        assert plain.hidden is not None and sp.hidden is not None
        assert plain.residual is not None and sp.residual is not None
        assert torch.equal(plain.hidden, sp.hidden)
        assert torch.equal(plain.residual, sp.residual)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "padded"])
def test_the_boundary_sends_four_and_a_half_s_as_integers(eight: Outcomes, kind: str) -> None:
    case = CASES[f"sp {kind}"]
    s = case.rows * HIDDEN * case.dtype.itemsize
    for result in eight[f"sp {kind}"]:
        assert [2 * n for n, sparse in zip(result.entry, SPARSE, strict=True) if sparse] == [9 * s] * sum(SPARSE)
        assert [n for n, sparse in zip(result.exit, SPARSE, strict=True) if sparse] == [4 * s] * sum(SPARSE)


def test_the_boundary_is_three_collectives_in_this_order(eight: Outcomes) -> None:
    s = 4 * HIDDEN
    entry = [("reduce-scatter", "attn_tp", s), ("all-gather", "tp", s // 2), ("all-gather", "attn_tp", s // 2)]
    exits = [("reduce-scatter", "tp", CP * s), ("all-gather", "attn_tp", s // 2)]
    for result in eight["sp fp32"]:
        assert result.calls == [("all-reduce", "attn_tp", s)] + (entry + exits) * sum(SPARSE)


@pytest.mark.parametrize("kind", ["odd rows", "one row everywhere", "three rows everywhere", "no row"])
def test_rows_without_halves_take_the_plain_form_on_all_ranks(eight: Outcomes, kind: str) -> None:
    for plain, sp in zip(eight[f"plain {kind}"], eight[f"sp {kind}"], strict=True):
        assert plain.calls == sp.calls and plain.entry == sp.entry


def test_the_residual_that_was_given_is_not_written(eight: Outcomes) -> None:
    for plain, sp in zip(eight["plain fp32"], eight["sp fp32"], strict=True):
        assert sp.kept[1:] == [True] * sum(SPARSE)
        assert plain.kept[1:] == [False] * sum(SPARSE)  # else the norm here would not tell


# --- the decision ---------------------------------------------------------------------------------------------------


def batch(*counts: int) -> SimpleNamespace:
    return SimpleNamespace(attn_cp_metadata=SimpleNamespace(per_rank_actual_token=list(counts)))


def decide(tree: Tree, forward_batch: Any, hidden: Any, residual: Any) -> bool:
    tree.parallel = parallel_state(0, Journal())
    context = SimpleNamespace(attn_tp_size=2, attn_cp_size=4, attn_tp_rank=0)
    with tree.active():
        found: bool = tree.input_sp.applies(context, forward_batch, hidden, residual)
    return found


ROWS = torch.zeros(4, HIDDEN)


def test_equal_even_rows_take_the_form_with_halves(on: Tree, off: Tree) -> None:
    assert decide(on, batch(4, 4, 4, 4), ROWS, ROWS)
    assert not decide(off, batch(4, 4, 4, 4), ROWS, ROWS)


@pytest.mark.parametrize(
    "forward_batch",
    [batch(3, 3, 3, 3), batch(4, 4, 4, 2), batch(2, 4, 4, 4), batch(0, 0, 0, 0), batch(), batch(4, 4, 4, 5)],
    ids=["odd", "last differs", "first differs", "none", "no ranks", "odd at the end"],
)
def test_the_decision_looks_at_the_counts_alone_and_never_at_the_tensors(on: Tree, forward_batch: Any) -> None:
    assert not decide(on, forward_batch, None, None)


def test_a_batch_that_cp_does_not_split_takes_the_plain_form(on: Tree) -> None:
    assert not decide(on, SimpleNamespace(attn_cp_metadata=None), None, None)


WRONG: dict[str, tuple[Any, Any]] = {
    "fewer rows than the batch says": (ROWS[:2], ROWS[:2]),
    "more rows than the batch says": (torch.zeros(6, HIDDEN), torch.zeros(6, HIDDEN)),
    "no residual": (ROWS, None),
    "a residual of other rows": (ROWS, ROWS[:2]),
    "a residual of another type": (ROWS, ROWS.bfloat16()),
    "a residual elsewhere": (ROWS, ROWS.to("meta")),
    "quantised hidden states": ((ROWS, ROWS), ROWS),
    "two tuples": ((ROWS, ROWS), (ROWS, ROWS)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_one_rank_finds_at_home_is_an_error_and_never_another_form(on: Tree, off: Tree, case: str) -> None:
    with pytest.raises(RuntimeError, match=INPUT_SP):
        decide(on, batch(4, 4, 4, 4), *WRONG[case])
    assert not decide(off, batch(4, 4, 4, 4), *WRONG[case])


# --- one rank's arithmetic ------------------------------------------------------------------------------------------


class Echo:
    """A group whose other members hold what this one does."""

    def __init__(self, name: str, ranks: Any, rank: int, journal: Journal) -> None:
        self.ranks, self.world_size, self.rank_in_group = list(ranks), len(ranks), list(ranks).index(rank)
        self.seen: list[torch.Tensor] = []

    def reduce_scatter_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        assert output.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        output.copy_(tensor.chunk(self.world_size)[self.rank_in_group] * self.world_size)

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self.seen.append(tensor)
        output.copy_(tensor.repeat(self.world_size, 1))


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_inputs_are_read_in_any_layout_and_outputs_share_no_memory_with_them(
    on: Tree, lane: int, strided: bool
) -> None:
    def rows(seed: int) -> torch.Tensor:
        drawn = torch.randn(4, 2 * HIDDEN, generator=torch.Generator().manual_seed(seed))
        return drawn[:, ::2] if strided else drawn[:, :HIDDEN].contiguous()

    hidden, residual = rows(1), rows(2)
    before = hidden.clone(), residual.clone()
    on.parallel = parallel_state(lane, Journal(), group=Echo)
    context = SimpleNamespace(attn_tp_size=2, attn_cp_size=4, attn_tp_rank=lane)
    with on.active():
        gathered, restored = on.input_sp.run(hidden, residual, RMSNorm(torch.ones(HIDDEN)), context)
    assert gathered.shape == (16, HIDDEN) and restored.shape == (4, HIDDEN)
    half = slice(2 * lane, 2 * lane + 2)
    kept = 2 * before[0][half] + before[1][half]
    assert torch.equal(on.parallel.attn_tp_group.seen[0], kept)
    assert torch.equal(hidden, before[0]) and torch.equal(residual, before[1])
    stores = {tensor.untyped_storage().data_ptr() for tensor in (hidden, residual, gathered, restored)}
    assert len(stores) == 4


# --- start-up and construction --------------------------------------------------------------------------------------


def test_with_both_gates_set_the_topology_starts(on: Tree) -> None:
    start(on)


def test_the_gate_alone_is_refused_at_start_and_names_the_other(patched: Root) -> None:
    alone = Tree(patched("prefill"), {INPUT_SP: "1"})
    with pytest.raises(ValueError, match=f"{INPUT_SP} is set, but: {TOPOLOGY} must be True, got False"):
        start(alone)


def test_with_both_gates_set_a_wrong_topology_is_still_refused(on: Tree) -> None:
    with pytest.raises(ValueError, match="enable_two_batch_overlap must be False, got True"):
        start(on, {"enable_two_batch_overlap": True})


class GemmaRMSNorm(RMSNorm):
    """Another norm than the plain one."""


def norm(**changed: Any) -> RMSNorm:
    made = RMSNorm(torch.ones(HIDDEN))
    for name, value in changed.items():
        setattr(made, name, value)
    return made


NORMS: dict[str, tuple[str, RMSNorm]] = {
    "another norm": ("the post-attention norm", GemmaRMSNorm(torch.ones(HIDDEN))),
    "residual in fp32": ("the norm's fp32_residual", norm(fp32_residual=True)),
    "another variance": ("the norm's variance_size_override", norm(variance_size_override=8)),
    "another type": ("the norm's override_orig_dtype", norm(override_orig_dtype=torch.float32)),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_that_is_not_the_plain_one_is_refused_when_the_layer_is_made(on: Tree, off: Tree, kind: str) -> None:
    condition, wrong = NORMS[kind]
    for tree in (on, off):
        tree.parallel = parallel_state(2, Journal())
    with pytest.raises(ValueError, match=f"{INPUT_SP} is set, but: {condition} must be"):
        on.layer(wrong, sparse=True)
    off.layer(wrong, sparse=True)


def test_another_mode_of_the_mlp_is_refused_when_the_layer_is_made(on: Tree) -> None:
    on.parallel = parallel_state(2, Journal())
    layer = SimpleNamespace(
        post_attention_layernorm=norm(),
        layer_scatter_modes=SimpleNamespace(mlp_mode=SimpleNamespace(name="MOE_FULL")),
    )
    with pytest.raises(ValueError, match="mlp_mode must be 'FULL' or 'SCATTERED', got 'MOE_FULL'"):
        on.input_sp.check_layer(layer)


def test_a_gate_word_that_is_neither_on_nor_off_stops_the_import(patched: Root) -> None:
    with pytest.raises(ValueError, match=f"{INPUT_SP}='half'"):
        Tree(patched("prefill"), {INPUT_SP: "half"})
