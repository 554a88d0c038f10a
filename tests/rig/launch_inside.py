"""Which launches the engine and the gates take. Runs inside an environment, the patched tree first on its path.

Each command line goes through the wheel's own ``ServerArgs``; the checks that gates make of them at the engine's start
are run on the result.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

Args = Any


def engine(name: str) -> Any:
    """A module of the engine, which is there in its own environment alone."""
    return importlib.import_module(f"sglang.srt.{name}")


def prefill(args: Args) -> None:
    """The checks of the prefill's gates hang on the arguments' own resolution, which the launcher asks for."""
    args.resolve_once()


def decode(args: Args) -> None:
    """The checks that the scheduler, the KV manager and the pools make of the arguments when they start."""
    research = {name: engine(f"research.{name}") for name in ("settle", "seed", "retract_draft", "pcp4_dcp2")}
    guard = engine("research.dsa_dcp_guard")
    config = args.get_model_config().hf_config
    # Another kind of speculation has another worker.
    single = args.speculative_algorithm == "EAGLE" and not args.enable_multi_layer_eagle
    worker = object.__new__(engine("speculative.eagle_worker_v2").EagleDraftWorker) if single else SimpleNamespace()
    # What the worker takes from the arguments and the model; the pools are looked at by tests of their own.
    worker.topk, worker.speculative_num_steps = args.speculative_eagle_topk, args.speculative_num_steps
    worker.index_share_for_mtp_iteration, worker.dsa_index_topk = True, config.index_topk
    mode = SimpleNamespace(value=args.disaggregation_mode)
    scheduler = SimpleNamespace(
        server_args=args,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=SimpleNamespace, size=0, page_size=64),
        disaggregation_mode=mode,
        draft_worker=SimpleNamespace(draft_worker=worker),
        enable_overlap=not args.disable_overlap_schedule,
        enable_hisparse=args.enable_hisparse,
        ps=SimpleNamespace(pp_size=args.pp_size),
        req_to_token_pool=SimpleNamespace(),
    )
    attention = args.tp_size // (args.dp_size if args.enable_dp_attention else 1)
    manager = SimpleNamespace(
        server_args=args,
        disaggregation_mode=mode,
        dcp_size=args.dcp_size,
        attn_tp_size=attention,
        attn_cp_size=args.attn_cp_size or 1,
        pp_size=args.pp_size,
        is_mla_backend=True,
        is_hybrid_mla_backend=False,
        enable_all_cp_ranks_for_transfer=engine("environ").envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.get(),
    )
    retract = engine("research.retract")
    with mock.patch.multiple(retract, unknown=lambda pool: "", admit=lambda *pools: None, _size=lambda: args.dcp_size):
        research["settle"].admit(scheduler)
        research["seed"].admit(scheduler)
        research["retract_draft"].admit(scheduler, SimpleNamespace(kv_buffer=[], research_layout=True))
    research["pcp4_dcp2"].check_manager(manager)
    if args.dcp_size > 1 and engine("research.dsa_dcp").ON:
        guard.check(args, config, "DSATokenToKVPool")


MODULES = {
    "prefill": ("bounded_pack", "cp_topology", "input_sp", "pcp4_dcp2", "gather_preload"),
    "decode": ("settle", "seed", "retract", "retract_draft", "pcp4_dcp2", "dsa_dcp", "dsa_dcp_guard", "exact_topk"),
}
CHECKS: dict[str, Callable[[Args], None]] = {"prefill": prefill, "decode": decode}


@contextmanager
def gates(on: Sequence[str]) -> Iterator[None]:
    """Only these gates on, in every module that has read one."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("sglang.srt.research.") and hasattr(module, "GATE"):
                for switch in {"ENABLED", "ON"} & vars(module).keys():
                    stack.enter_context(mock.patch.object(module, switch, module.GATE in on))
        yield


def outcome(role: str, case: dict[str, Any]) -> str:
    """What stopped a launch (``line``, ``variables``, gates ``on``); empty if nothing did."""
    with mock.patch.dict(os.environ, case["variables"]), gates(case["on"]):
        try:
            CHECKS[role](engine("server_args").prepare_server_args(case["line"]))
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def found(role: str, cases: list[dict[str, Any]]) -> list[str]:
    """The outcome of each, the gates' modules imported before the first."""
    for name in MODULES[role]:
        engine(f"research.{name}")
    return [outcome(role, case) for case in cases]
