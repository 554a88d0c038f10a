"""cp4-attention-tp2: attention partial sums are added up at both boundaries of a CP4 x attention-TP2 prefill.

Eight real processes run toy layers through the communicator of the stock and of the patched file; see cp_ranks.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engine.load import Anything, blanks, load, modules, stub
from tests.engine.prefill.conftest import Outcomes
from tests.engine.prefill.cp_ranks import CASES, FAULTS, SPARSE, reference
from tests.engine.prefill.cp_rig import HIDDEN, INPUT_SP, SRT, TOPOLOGY, Journal, RMSNorm, Tree, parallel_state

Root = Callable[[str], Path]
ALL_CP = "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"
PIPELINE = "sglang/srt/arg_groups/pipeline.py"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}


@pytest.fixture(scope="module")
def base(stock: Root) -> Tree:
    return Tree(stock("prefill"))


@pytest.fixture(scope="module")
def off(patched: Root) -> Tree:
    return Tree(patched("prefill"))


@pytest.fixture(scope="module")
def on(patched: Root) -> Tree:
    return Tree(patched("prefill"), {TOPOLOGY: "1"})


def difference(eight: Outcomes, name: str) -> float:
    """Give the largest difference between what the ranks had together and a run in one process."""
    case, wanted, worst = CASES[name], reference(CASES[name]), 0.0
    for rank, result in enumerate(eight[name]):
        assert result.hidden is not None and result.residual is not None
        place = rank // case.attn_tp if case.split else 0
        mine = wanted[place * case.rows : (place + 1) * case.rows]
        found = (result.hidden + result.residual).float()
        assert found.shape == mine.shape
        worst = max(worst, float((found - mine).abs().max()) if mine.numel() else 0.0)
    return worst


# --- eight processes ------------------------------------------------------------------------------------------------

RIGHT = [name for name in CASES if name.startswith(("plain", "sp"))]


@pytest.mark.parametrize("name", RIGHT)
def test_eight_ranks_together_compute_what_one_process_does(eight: Outcomes, name: str) -> None:
    assert difference(eight, name) <= TOLERANCE[CASES[name].dtype]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_a_reduction_is_seen(eight: Outcomes, fault: str) -> None:
    name = f"fault: {fault}"
    assert {result.error for result in eight[name]} == {""}
    assert difference(eight, name) > 1


@pytest.mark.parametrize("name", RIGHT)
def test_both_attention_ranks_of_a_cp_rank_end_with_the_same_bits(eight: Outcomes, name: str) -> None:
    for left, right in zip(eight[name][::2], eight[name][1::2], strict=True):
        assert left.hidden is not None and right.hidden is not None
        assert left.residual is not None and right.residual is not None
        assert torch.equal(left.hidden, right.hidden) and torch.equal(left.residual, right.residual)


@pytest.mark.parametrize("name", [name for name in CASES if "attention TP2" not in name])
def test_every_rank_calls_the_same_collectives_in_the_same_order(eight: Outcomes, name: str) -> None:
    calls = eight[name][0].calls
    assert all(result.calls == calls for result in eight[name])
    assert calls or CASES[name].rows == 0


@pytest.mark.parametrize("name", ["plain fp32", "plain bf16", "plain padded"])
def test_the_boundaries_send_four_s_each_as_integers(eight: Outcomes, name: str) -> None:
    case = CASES[name]
    s = case.rows * HIDDEN * case.dtype.itemsize
    for result in eight[name]:
        assert [n for n, sparse in zip(result.entry, SPARSE, strict=True) if sparse] == [4 * s] * sum(SPARSE)
        assert [n for n, sparse in zip(result.exit, SPARSE, strict=True) if sparse] == [4 * s] * sum(SPARSE)
        # The dense layer's own boundary: a sum over two, and nothing after it.
        assert (result.entry[0], result.exit[0]) == (s, 0)


def test_an_odd_number_of_rows_leaves_in_two_other_steps_of_the_same_bytes(eight: Outcomes) -> None:
    s = 3 * HIDDEN * 4
    for result in eight["plain odd rows"]:
        assert result.exit[1:] == [4 * s] * sum(SPARSE)
        assert ("reduce-scatter", "attn_cp", 4 * 3 * HIDDEN) in result.calls


def test_a_batch_that_cp_does_not_split_is_summed_over_attention_ranks_alone(eight: Outcomes) -> None:
    for result in eight["plain one row everywhere"]:
        experts = ("all-reduce", "tp", HIDDEN)
        assert [call for call in result.calls if call != experts] == [("all-reduce", "attn_tp", HIDDEN)] * len(SPARSE)


def test_the_stock_exit_sends_three_s_and_adds_four_of_eight_partial_sums(eight: Outcomes) -> None:
    s = 4 * HIDDEN * 4
    for result in eight["fault: the stock exit, which adds four of eight partial sums"]:
        assert result.exit[1:] == [3 * s] * sum(SPARSE)


# --- gate unset -----------------------------------------------------------------------------------------------------


def test_with_the_gate_unset_stock_topology_gives_the_bits_bytes_and_calls_of_stock(eight: Outcomes) -> None:
    assert difference(eight, "off cp8") <= TOLERANCE[torch.float32]
    for stock, off in zip(eight["stock cp8"], eight["off cp8"], strict=True):
        assert stock.hidden is not None and off.hidden is not None
        assert stock.residual is not None and off.residual is not None
        assert torch.equal(stock.hidden, off.hidden) and torch.equal(stock.residual, off.residual)
        assert (stock.calls, stock.entry, stock.exit, stock.kept) == (off.calls, off.entry, off.exit, off.kept)


def test_with_the_gate_unset_attention_tp_two_is_refused_as_in_stock(eight: Outcomes) -> None:
    for name in ("stock at attention TP2", "off at attention TP2"):
        assert {result.error for result in eight[name]} == {"AssertionError"}
    assert eight["stock at attention TP2"][0].calls == eight["off at attention TP2"][0].calls


@contextmanager
def overrides_of(root: Path, gate: str | None) -> Iterator[Any]:
    """Give the tree's own override of the DeepSeek family, its imports answered."""
    wanted = stub(
        f"{SRT}.arg_groups.model_override_base",
        _register_for=lambda *names: lambda function: function,
        is_attention_backend_not_set=lambda cfg: False,
        resolving_view=lambda args: args,
        use_mla_backend=lambda cfg: True,
    )
    platform = SimpleNamespace(is_npu=False, is_xpu=False, is_hip=False, is_sm100=False)
    known: dict[str, ModuleType] = {
        wanted.__name__: wanted,
        f"{SRT}.runtime_context": stub(f"{SRT}.runtime_context", get_platform=lambda: platform),
        f"{SRT}.configs.model_config": stub(f"{SRT}.configs.model_config", is_deepseek_dsa=lambda config: config.dsa),
        f"{SRT}.layers.attention.dsa.utils": Anything(f"{SRT}.layers.attention.dsa.utils"),
    }
    environment = {name: text for name, text in os.environ.items() if name not in (TOPOLOGY, INPUT_SP)}
    with mock.patch.dict(os.environ, {**environment, **({TOPOLOGY: gate} if gate else {})}, clear=True):
        if (root / "sglang/srt/research").is_dir():
            known[f"{SRT}.research"] = package = stub(f"{SRT}.research", __path__=[])
            for name in ("gates", "cp_topology"):
                module = known[f"{SRT}.research.{name}"] = load(root, f"sglang/srt/research/{name}.py", known)
                setattr(package, name, module)
        module = load(root, "sglang/srt/arg_groups/model_overrides/deepseek_v2.py", known)
        with modules(known):
            yield module._deepseek_family_overrides


def arguments(**changed: Any) -> SimpleNamespace:
    cfg = SimpleNamespace(
        tp_size=8,
        dp_size=1,
        ep_size=1,
        attn_cp_size=4,
        enable_prefill_cp=True,
        cp_strategy="interleave",
        kv_cache_dtype="auto",
        moe_a2a_backend="none",
    )
    vars(cfg).update(changed)
    return cfg


SIZES = [(8, 1, 4), (8, 1, 1), (4, 1, 2), (8, 1, 8), (2, 1, 1)]


@pytest.mark.parametrize(("tp", "dp", "asked"), SIZES)
def test_with_the_gate_unset_every_override_of_the_model_is_the_stock_one(
    stock: Root, patched: Root, tp: int, dp: int, asked: int
) -> None:
    found = []
    for root in (stock("prefill"), patched("prefill")):
        with overrides_of(root, None) as override:
            cfg = arguments(tp_size=tp, dp_size=dp, attn_cp_size=asked)
            found.append(override(cfg, SimpleNamespace(dsa=True)))
    assert found[0] == found[1]
    assert found[0]["attn_cp_size"] == tp // dp


def test_with_the_gate_set_the_cp_size_is_the_one_that_was_asked_for(patched: Root) -> None:
    with overrides_of(patched("prefill"), "1") as override:
        for asked in (1, 2, 4, 8):
            assert override(arguments(attn_cp_size=asked), SimpleNamespace(dsa=True))["attn_cp_size"] == asked


# --- start-up -------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "tp_size": 8,
    "attn_cp_size": 4,
    "disaggregation_mode": "prefill",
    "enable_prefill_cp": True,
    "cp_strategy": "interleave",
    "dp_size": 1,
    "pp_size": 1,
    "nnodes": 1,
    "dcp_size": 1,
    "moe_dp_size": 1,
    "moe_dense_tp_size": 1,
    "moe_a2a_backend": "none",
    "flashinfer_allreduce_fusion_backend": None,
    "enable_dsa_cache_layer_split": False,
    "enable_two_batch_overlap": False,
    "enable_single_batch_overlap": False,
    "dwdp_size": 1,
    "enable_quant_communications": False,
    "enable_attn_tp_input_scattered": False,
    "enable_layernorm_sp": False,
    "enable_cp_decode_attn_tp": False,
    "enable_aiter_allreduce_fusion": False,
    "enable_hierarchical_cache": False,
    "hicache_storage_backend": None,
    "enable_lmcache": False,
}
BAD: dict[str, Any] = {
    "tp_size": 4,
    "attn_cp_size": 8,
    "disaggregation_mode": "decode",
    "enable_prefill_cp": False,
    "cp_strategy": "zigzag",
    "dp_size": 2,
    "pp_size": 2,
    "nnodes": 2,
    "dcp_size": 2,
    "moe_dp_size": 2,
    "moe_dense_tp_size": 2,
    "moe_a2a_backend": "deepep",
    "flashinfer_allreduce_fusion_backend": "auto",
    "enable_dsa_cache_layer_split": True,
    "dwdp_size": 8,
    "hicache_storage_backend": "file",
    **{name: True for name, value in GOOD.items() if value is False},
}
ENVIRONMENT = {"SGLANG_ENABLE_CP_V2": True, "SGLANG_SHARED_EXPERT_TP1": False, "SGLANG_USE_AG_AFTER_QLORA": False}
# What the checks of the patches on top of this one look at too.
ABOVE = {"disaggregation_transfer_backend": "mooncake", "chunked_prefill_size": 16384, "page_size": 64}


def start(
    tree: Tree,
    changed: Mapping[str, Any] | None = None,
    architecture: str = "GlmMoeDsaForCausalLM",
    environment: Mapping[str, bool] | None = None,
    graphs: str = "disabled",
    platform: str = "",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Run the tree's own resolution pipeline on arguments that are resolved already, up to its end."""
    fields = {**GOOD, **ABOVE, **(changed or {}), "model_path": "m", "device": "cuda"}
    graph = SimpleNamespace(prefill=SimpleNamespace(backend=graphs))
    record = dataclasses.make_dataclass("Args", [(name, Any, None) for name in (*fields, "cuda_graph_config")])
    args: Any = record(**fields, cuda_graph_config=graph)
    known = blanks(tree.root, PIPELINE)
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]), dtype=dtype)
    answers: dict[str, Callable[[Any], Any]] = {name: lambda args: args for name in ("resolved_view", "resolving_view")}
    vars(known[f"{SRT}.arg_groups.overrides"]).update(model_config_of=lambda args: model, **answers)
    switches = {name: SimpleNamespace(get=lambda value=value: value) for name, value in
                {ALL_CP: False, **ENVIRONMENT, **(environment or {})}.items()}  # fmt: skip
    known[f"{SRT}.environ"] = stub(f"{SRT}.environ", envs=SimpleNamespace(**switches))
    machine = SimpleNamespace(**{f"is_{name}": name == platform for name in ("hip", "npu", "xpu")})
    known[f"{SRT}.runtime_context"] = stub(f"{SRT}.runtime_context", get_platform=lambda: machine)
    research = {name: module for name, module in tree._known.items() if ".research" in name}
    pipeline = load(tree.root, PIPELINE, {**research, **known})
    with modules({**research, **known}):
        pipeline.run_resolution_pipeline(args)
    assert args._resolution_finished


def test_the_topology_that_the_patch_is_made_for_starts(on: Tree) -> None:
    start(on)


@pytest.mark.parametrize("name", GOOD)
def test_each_argument_that_does_not_fit_is_refused_at_start_by_name(on: Tree, off: Tree, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{TOPOLOGY} is set, but: {name} must be .*got {BAD[name]!r}"):
        start(on, {name: BAD[name]})
    start(off, {name: BAD[name]})


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_another_model_is_refused_at_start(on: Tree, off: Tree, architecture: str) -> None:
    with pytest.raises(ValueError, match=f"architecture must be 'GlmMoeDsaForCausalLM', got '{architecture}'"):
        start(on, architecture=architecture)
    start(off, architecture=architecture)


def test_a_model_in_half_precision_is_refused_at_start(on: Tree, off: Tree) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        start(on, dtype=dtype)
    with pytest.raises(ValueError, match=r"the model's dtype must be .*, got 'torch\.float16'"):
        start(on, dtype=torch.float16)
    start(off, dtype=torch.float16)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_an_environment_that_does_not_fit_is_refused_at_start(on: Tree, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        start(on, environment={name: not ENVIRONMENT[name]})


@pytest.mark.parametrize("platform", ["hip", "npu", "xpu"])
def test_another_platform_is_refused_at_start(on: Tree, platform: str) -> None:
    with pytest.raises(ValueError, match=f"the platform {platform} must be False"):
        start(on, platform=platform)


@pytest.mark.parametrize("graphs", ["full", "breakable", "tc_piecewise"])
def test_prefill_graphs_are_refused_at_start(on: Tree, graphs: str) -> None:
    with pytest.raises(ValueError, match=f"the backend of prefill CUDA graphs must be 'disabled', got '{graphs}'"):
        start(on, graphs=graphs)


def test_a_refusal_names_every_condition_that_fails(on: Tree) -> None:
    with pytest.raises(ValueError, match=r"tp_size .*; attn_cp_size .*; enable_lmcache .*"):
        start(on, {"tp_size": 16, "attn_cp_size": 1, "enable_lmcache": True})


def test_a_gate_word_that_is_neither_on_nor_off_stops_the_import(patched: Root) -> None:
    with pytest.raises(ValueError, match=f"{TOPOLOGY}='both'"):
        Tree(patched("prefill"), {TOPOLOGY: "both"})


# --- construction of a layer ----------------------------------------------------------------------------------------


def ranks(*found: int) -> SimpleNamespace:
    return SimpleNamespace(ranks=list(found))


MISLAID: dict[str, tuple[str, Any]] = {
    "tp_size": ("tp_size", 16),
    "attn_tp_size": ("attn_tp_size", 1),
    "attn_cp_size": ("attn_cp_size", 8),
    "attn_dp_size": ("attn_dp_size", 2),
    "the experts' parallel size": ("moe_tp_size", 4),
    "ranks of tp_group": ("tp_group", ranks(0, 1, 2, 3, 4, 5, 7, 6)),
    "ranks of attn_tp_group": ("attn_tp_group", ranks(0, 4)),
    "ranks of attn_cp_group": ("attn_cp_group", ranks(0, 1, 2, 3)),
}


@pytest.mark.parametrize("condition", MISLAID)
def test_a_layer_whose_groups_lie_otherwise_is_refused_by_name(on: Tree, off: Tree, condition: str) -> None:
    name, value = MISLAID[condition]
    for tree in (on, off):
        tree.parallel = parallel_state(5, Journal(), **{name: value})
    with pytest.raises(ValueError, match=f"{condition} must be"):
        on.layer(RMSNorm(torch.ones(HIDDEN)), sparse=True)
    if name != "attn_dp_size":  # stock's own assertion
        off.layer(RMSNorm(torch.ones(HIDDEN)), sparse=True)


@pytest.mark.parametrize("rank", range(8))
def test_a_layer_on_every_rank_of_the_right_layout_is_accepted(on: Tree, rank: int) -> None:
    on.parallel = parallel_state(rank, Journal())
    for sparse in (True, False):
        on.layer(RMSNorm(torch.ones(HIDDEN)), sparse)


def test_no_rows_make_no_call(on: Tree) -> None:
    journal = Journal()
    on.parallel = parallel_state(0, journal)
    with on.active():
        empty = torch.empty(0, HIDDEN)
        assert on.topology.all_reduce(empty) is empty
    assert not journal.calls
