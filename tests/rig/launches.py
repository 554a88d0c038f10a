"""Launches of config/ that hold, and for each condition of each gate one that breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from patchbundle import launch, manifest
from patchbundle.launch import Launch, Value

ROOT = Path(__file__).parents[2]
PROFILES = {"prefill": (None, "16k"), "decode": (None,)}
# A value that the engine's parser takes and the gate does not. Not named here: true for false and false for true.
OTHER: dict[str, Value] = {
    "tp-size": 4,
    "dp-size": 2,
    "attn-cp-size": 2,
    "attention-tp": 4,
    "moe-dense-tp-size": 2,
    "page-size": 128,
    "chunked-prefill-size": 8192,
    "dcp-size": 4,
    "pp-size": 2,
    "nnodes": 2,
    "moe-dp-size": 2,
    "dwdp-size": 2,
    "speculative-eagle-topk": 2,
    "speculative-num-steps": 1,
    "disaggregation-mode": False,
    "disaggregation-transfer-backend": "nixl",
    "cp-strategy": "zigzag",
    "moe-a2a-backend": "deepep",
    "flashinfer-allreduce-fusion-backend": "trtllm",
    "hicache-storage-backend": "file",
    "dsa-prefill-backend": "flashmla_sparse",
    "dsa-decode-backend": "flashmla_sparse",
    "attention-backend": "flashinfer",
    "prefill-attention-backend": "flashinfer",
    "decode-attention-backend": "flashinfer",
    "speculative-draft-attention-backend": "flashinfer",
    "dcp-comm-backend": "a2a",
    "dllm-algorithm": "LowConfidence",
    "speculative-algorithm": "NGRAM",
    "SGLANG_ENABLE_CP_V2": "0",
    "SGLANG_DSA_TOPK_BROADCAST": "0",
}


@dataclass(frozen=True)
class Case:
    """One launch. ``gate`` is the one that must refuse it, ``broken`` the condition; both are empty if it holds.

    ``on``: the gates that are on when the engine is asked, so that no other one refuses first.
    """

    role: str
    launch: Launch
    on: tuple[str, ...]
    gate: str = ""
    broken: str = ""

    @property
    def name(self) -> str:
        return f"{self.role} {self.gate.removeprefix('SGLANG_RESEARCH_')} {self.broken}".strip()


def _without(made: Launch, condition: str, wanted: Value) -> Launch:
    """The launch with one condition broken."""
    other = OTHER.get(condition, wanted is False)
    if condition.isupper():
        value = other if isinstance(other, str) else "1"
        return replace(made, environment={**made.environment, condition: value})
    if condition == "disaggregation-mode" and made.role == "decode":
        # Not unset: one gate takes every engine that decodes.
        return replace(made, arguments={**made.arguments, condition: "prefill"})
    if condition == "attention-tp-mod-dcp":
        return replace(made, arguments={**made.arguments, "dcp-size": 2 * int(made.arguments["dcp-size"])})
    if condition == "attention-tp":
        return replace(made, arguments={**made.arguments, "tp-size": 2 * int(made.arguments["tp-size"])})
    arguments = {**made.arguments, condition: other}
    if condition == "speculative-num-steps":  # the engine wants one draft token more than steps
        arguments["speculative-num-draft-tokens"] = 2
    return replace(made, arguments=arguments)


def _whole(made: Launch, gate: str) -> tuple[str, ...]:
    """A gate and all that it needs on."""
    return tuple({gate: None, **{name: None for other in made.gates[gate].gates for name in _whole(made, other)}})


def _of(role: str) -> Iterator[Case]:
    bundle, seen = manifest.load(ROOT), set[str]()
    for profile in PROFILES[role]:
        made = launch.load(bundle, ROOT, role, profile)
        yield Case(role, made, tuple(name for name, gate in made.gates.items() if gate.on))
        for name, gate in made.gates.items():
            if not gate.on or name in seen:
                continue
            seen.add(name)
            on = _whole(made, name)
            for condition, wanted in {**gate.needs, **gate.keeps}.items():
                yield Case(role, _without(made, condition, wanted), on, name, condition)
            for other in gate.gates:
                off = replace(made, gates={**made.gates, other: replace(made.gates[other], on=False)})
                yield Case(role, off, tuple(one for one in on if one != other), name, other)


@cache
def cases(role: str) -> tuple[Case, ...]:
    """Those of a role."""
    return tuple(_of(role))
