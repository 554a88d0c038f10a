"""The launches of config/ against the engines' own arguments and the gates' own checks, condition by condition."""

from __future__ import annotations

from typing import Any

import pytest

from patchbundle import launch, manifest
from tests.rig.launches import ROOT, Case, cases

ROLES = ("prefill", "decode")
ALL = [case for role in ROLES for case in cases(role)]
BROKEN = [case for case in ALL if case.gate]
# Conditions that the engine itself looks at before any gate is asked: words of its refusal, by condition.
STOCK = {
    "dp-size": "interleave DSA CP does not support DP attention",
    "enable-layernorm-sp": "--enable-layernorm-sp is only supported for",
    "enable-aiter-allreduce-fusion": "Aiter allreduce fusion is not supported with context parallelism",
    "moe-dp-size": "attn_cp_size != moe_dp_size",
    "dwdp-size": "must equal tp_size",
    "enable-hierarchical-cache": "PD decode DCP currently requires chunk cache",
    "speculative-algorithm": "speculative_eagle_topk",
    "speculative-eagle-topk": "speculative_eagle_topk > 1 with page_size > 1",
    "disaggregation-decode-enable-offload-kvcache": "only supported when hicache-storage-backend is provided",
    "dllm-algorithm": "Unknown diffusion LLM",
    "dcp-replicate-q-proj": "--dcp-replicate-q-proj only applies to",
}
# What the engine mends by itself, so that nothing is left to refuse; a launch that asks for it is still a slip.
MENDED = {"page-size", "moe-dense-tp-size", "speculative-adaptive"}


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_broken_condition_is_refused_before_anything_starts(case: Case) -> None:
    known = launch.gates_of(manifest.load(ROOT), case.role)
    assert any(case.gate in fault and case.broken in fault for fault in launch.faults(case.launch, known))


def test_every_gate_that_is_on_in_some_launch_has_a_condition_that_breaks() -> None:
    on = {name for case in ALL for name, gate in case.launch.gates.items() if gate.on and case.role in ROLES}
    bare = {"SGLANG_RESEARCH_DCP_RETRACT"}  # asks for nothing of the launch: its pools are looked at
    assert {case.gate for case in BROKEN} == on - bare


@pytest.mark.rig
def test_the_engine_and_all_gates_take_the_launches_of_config(wheel: dict[str, Any]) -> None:
    held = [said for case, (_, said) in zip(cases(wheel["role"]), wheel["launches"], strict=True) if not case.gate]
    assert held and held == [""] * len(held)


@pytest.mark.rig
def test_the_engine_or_the_gate_refuses_each_broken_one(wheel: dict[str, Any]) -> None:
    wrong = []
    for case, (name, said) in zip(cases(wheel["role"]), wheel["launches"], strict=True):
        if not case.gate or (case.broken in MENDED and not said):
            continue
        words = (case.gate, *case.on, STOCK.get(case.broken, case.gate))
        if not any(word in said for word in words):
            wrong.append((name, said[:200]))
    assert wrong == []
