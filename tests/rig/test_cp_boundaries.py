"""cp4-attention-tp2 and input-sp with the engine's own groups on eight processes (``make test-engine``)."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.models.collectives import Collective, Op
from lab.rig.standins import SITE, environment
from tests.engine.prefill.cp_ranks import SPARSE, reference
from tests.engine.prefill.cp_rig import ATTN_TP, CP, HIDDEN, TP
from tests.rig.cp_inside import CASES, REDUCTIONS

pytestmark = pytest.mark.rig

VERSION = "0.5.19"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each of the eight processes had."""
    harness: Any = importlib.import_module("lab.rig.environment")
    trees: Any = importlib.import_module("lab.rig.trees")
    top, out = Path(__file__).parents[2], tmp_path_factory.mktemp("ranks")
    tree = trees.patched("prefill")
    gates = {"SGLANG_RESEARCH_DSA_CP4_ATP2": "1", "SGLANG_RESEARCH_INPUT_SP": "1"}
    path = os.pathsep.join(str(part) for part in (tree, SITE, top))
    done = subprocess.run(
        [str(harness.ensure(VERSION)), "-m", "tests.rig.cp_inside", str(out)],
        cwd=top,
        env={**os.environ, **environment(VERSION), **gates, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(out / f"{rank}.pt") for rank in range(8)]


def test_the_engine_lays_its_groups_out_as_the_patches_need_them(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert result["ranks"] == [list(range(8)), pair, list(range(rank % 2, 8, 2))]


@pytest.mark.parametrize("form", ["plain", "sp"])
@pytest.mark.parametrize("name", CASES)
def test_eight_ranks_of_the_engine_compute_what_one_process_does(ranks: Ranks, name: str, form: str) -> None:
    case, wanted = CASES[name], reference(CASES[name])
    for rank, result in enumerate(ranks):
        hidden, residual, _ = result[f"{form} {name}"]
        place = rank // 2 if case.split else 0
        mine = wanted[place * case.rows : (place + 1) * case.rows]
        assert (hidden + residual).float().sub(mine).abs().max() <= TOLERANCE[case.dtype]


def test_four_reductions_are_broken_on_purpose() -> None:
    assert REDUCTIONS == ["cp-sum-left-out", "cp-exit-of-stock", "cp-halves-not-joined", "sp-part-left-out"]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_each_broken_reduction_is_seen(ranks: Ranks, name: str) -> None:
    case, wanted = CASES["fp32"], reference(CASES["fp32"])
    for rank, result in enumerate(ranks):
        hidden, residual, _ = result[name]
        mine = wanted[rank // 2 * case.rows : (rank // 2 + 1) * case.rows]
        assert (hidden + residual).sub(mine).abs().max() > 100 * TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", CASES)
def test_half_of_the_rows_each_gives_the_same_bits_on_every_rank(ranks: Ranks, name: str) -> None:
    for result in ranks:
        plain, sp = result[f"plain {name}"], result[f"sp {name}"]
        assert torch.equal(plain[0], sp[0]) and torch.equal(plain[1], sp[1])


@pytest.mark.parametrize("form", ["plain", "sp"])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_calls_the_same_collectives_in_the_same_order(ranks: Ranks, name: str, form: str) -> None:
    calls = [result[f"{form} {name}"][2] for result in ranks]
    assert all(found == calls[0] for found in calls) and calls[0]


def test_the_forms_are_these_collectives(ranks: Ranks) -> None:
    s, experts = 4 * HIDDEN, sum(SPARSE)
    first, sum_, part = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"
    leave = [(sum_, "tp", CP * s), (part, "attention_tp", s // 2)]
    plain = [(first, "attention_tp", s), (part, "attn_cp", s)]
    half = [(sum_, "attention_tp", s), (part, "tp", s // 2), (part, "attention_tp", s // 2)]
    for name, entry in (("plain fp32", plain), ("sp fp32", half)):
        assert ranks[0][name][2] == [(first, "attention_tp", s)] + (entry + leave) * experts


OPS = {
    "all_reduce": Op.ALL_REDUCE,
    "reduce_scatter_tensor": Op.REDUCE_SCATTER,
    "all_gather_into_tensor": Op.ALL_GATHER,
}
SIZES = {"tp": TP, "attention_tp": ATTN_TP, "attn_cp": CP}


def sent(call: tuple[str, str, int], itemsize: int) -> int:
    """Bytes that a rank sends in one traced call; the light version counts the same in rings that it runs itself."""
    name, group, given = call
    whole = given * SIZES[group] if OPS[name] is Op.ALL_GATHER else given
    return Collective(name, OPS[name], SIZES[group], whole * itemsize).sent


@pytest.mark.parametrize(("form", "calls", "halves"), [("plain", 2, 8), ("sp", 3, 9)])
@pytest.mark.parametrize("name", ["fp32", "bf16", "padded"])
def test_the_entry_sends_four_and_four_and_a_half_s_as_integers(
    ranks: Ranks, name: str, form: str, calls: int, halves: int
) -> None:
    case = CASES[name]
    s = case.rows * HIDDEN * case.dtype.itemsize
    for result in ranks:
        dense, *rest = (sent(call, case.dtype.itemsize) for call in result[f"{form} {name}"][2])
        layers = [rest[first : first + calls + 2] for first in range(0, len(rest), calls + 2)]
        assert dense == s and len(layers) == sum(SPARSE)
        assert [(2 * sum(layer[:calls]), sum(layer[calls:])) for layer in layers] == [(halves * s, 4 * s)] * len(layers)
