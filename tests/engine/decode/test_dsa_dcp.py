"""The patch dsa-dcp: GLM-DSA under decode context parallelism (DCP).

Pools, pool sizes, attention callers, merge kernel, metadata and the model's paths are the engine's own, of the stock
and of the patched tree. A DCP group is run rank by rank in one process; attention kernels are the rig's stand-ins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lab.rig.standins import attention
from tests.engine.apart import compiled
from tests.engine.decode.dsa_dcp_rig import (
    LATENT,
    MLA,
    PAGE,
    WIDTH,
    Side,
    arguments,
    attend,
    backend,
    build_pool,
    owner,
    side,
)
from tests.engine.loose import anything

GATE, CHECK = "SGLANG_RESEARCH_DSA_DCP", "SGLANG_RESEARCH_DSA_DCP_CHECK"
NARROW, UNCHECKED = "SGLANG_RESEARCH_PCP4_DCP2", "SGLANG_RESEARCH_DSA_DCP_UNCHECKED_PREFILL"
ON = {GATE: "1", UNCHECKED: "1"}
BROADCAST = "SGLANG_DSA_TOPK_BROADCAST"
Tree = Callable[[str], Path]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setenv(BROADCAST, "1")


@pytest.fixture(scope="module")
def old(stock: Tree) -> Side:
    return side(stock("decode"))


@pytest.fixture(scope="module")
def ungated(patched: Tree) -> Side:
    return side(patched("decode"))


@pytest.fixture(scope="module")
def gated(patched: Tree) -> Side:
    return side(patched("decode"), ON)


@pytest.fixture
def new(gated: Side) -> Side:
    """As a new process would find it: what a first pool makes active stays active."""
    gated.ours["dsa_dcp"]._natural = None
    gated.ours["dsa_dcp_check"]._tried.clear()
    gated.kernels.__dict__.update(vars(attention))
    return gated


def started(made: Side, size: int, *, fp8: bool = True, **changes: Any) -> Side:
    """Let the first pool of ``made`` be made, as an engine does at its start."""
    build_pool(made, arguments(size, **kernels(fp8), **changes), PAGE, dtype=dtype(fp8))
    return made


def kernels(fp8: bool) -> dict[str, str]:
    name = "flashmla_kv" if fp8 else "flashmla_sparse"
    return {
        "dsa_prefill_backend": name,
        "dsa_decode_backend": name,
        "kv_cache_dtype": "fp8_e4m3" if fp8 else "bfloat16",
    }


def dtype(fp8: bool) -> torch.dtype:
    return torch.float8_e4m3fn if fp8 else torch.bfloat16


def held(pool: Any) -> int:
    """Bytes of all buffers of a pool."""
    return sum(buffer.nbytes for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer))


# Pools


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("tokens", [PAGE, 5 * PAGE])
@pytest.mark.parametrize("draft", [False, True])
def test_every_slot_that_the_allocator_hands_out_has_its_row_and_its_index_page(
    new: Side, size: int, tokens: int, draft: bool
) -> None:
    pool = build_pool(new, arguments(size), tokens, draft=draft)
    last = (tokens * size // (PAGE * size) + 1) * PAGE * size - 1
    assert pool.page_size == PAGE
    assert all(last // size < buffer.shape[0] == tokens + PAGE for buffer in pool.kv_buffer)
    assert all(last // PAGE < buffer.shape[0] for buffer in pool.index_k_with_scale_buffer)


@pytest.mark.parametrize("size", [2, 4])
def test_the_unpatched_pool_lacks_the_index_pages_of_high_slots(old: Side, size: int) -> None:
    pool = build_pool(old, arguments(size), 5 * PAGE)
    assert all((5 * PAGE * size) // PAGE >= buffer.shape[0] for buffer in pool.index_k_with_scale_buffer)


def test_the_unpatched_draft_pool_cannot_be_made(old: Side) -> None:
    with pytest.raises(AssertionError):
        build_pool(old, arguments(2), 5 * PAGE, draft=True)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("fp8", [False, True])
def test_budget_and_pool_agree_to_the_byte(new: Side, size: int, fp8: bool) -> None:
    made = new
    args = arguments(size, **kernels(fp8))
    one = owner(made, args, dtype=dtype(fp8))
    sizes = made.file("srt/model_executor/pool_configurator.py")
    configurator = made.file("srt/mem_cache/kv_cache_configurator.py")
    made.known["sglang.srt.mem_cache.kv_cache_configurator"] = configurator
    with made.rank(0, size, attn_tp_size=size):
        vars(sizes)["is_float4_e2m1fn_x2"] = lambda kind: False
        cell = sizes.DefaultPoolConfigurator._compute_cell_size(None, one, 2)
    small, large = (build_pool(made, args, tokens, dtype=dtype(fp8)) for tokens in (PAGE, 9 * PAGE))
    assert held(large) - held(small) == 8 * PAGE * cell
    draft = build_pool(made, args, 9 * PAGE, dtype=dtype(fp8), draft=True)
    assert held(draft) == held(large)  # so the engine's rule, a layer of draft costs a layer of target, holds


@pytest.mark.parametrize("draft", [False, True])
def test_retraction_is_told_how_each_pool_lies(patched: Tree, draft: bool) -> None:
    made = side(patched("decode"), {**ON, "SGLANG_RESEARCH_DCP_RETRACT": "1"})
    pool = build_pool(made, arguments(2), 5 * PAGE, draft=draft)
    allocator = SimpleNamespace(size=5 * PAGE * 2, page_size=2 * PAGE, get_kvcache=lambda: pool)
    with made.rank(1, 2):
        made.ours["retract"].admit(allocator, pool if draft else None)
        assert (pool.research_layout.latent, pool.research_layout.index) == ("striped", "replicated")
        slots = torch.arange(2 * PAGE, 4 * PAGE)
        assert made.ours["retract"].latent_rows(pool, slots).tolist() == list(range(PAGE, 2 * PAGE))


def test_capacity_is_what_the_documentation_says(new: Side) -> None:
    """Tokens that a DCP group holds in the memory in which each rank of a group without DCP held its tokens."""
    text = (Path(__file__).parents[3] / "docs" / "dsa-dcp.md").read_text(encoding="utf-8")
    for fp8, word in ((True, "fp8"), (False, "bf16")):
        costs = []
        for size in (1, 2, 4, 8):
            args = arguments(size, **kernels(fp8))
            small, large = (build_pool(new, args, tokens, dtype=dtype(fp8), layers=1) for tokens in (PAGE, 9 * PAGE))
            costs.append((held(large) - held(small)) / (8 * PAGE * size))
        cells = [f"{cost:.0f} | {costs[0] / cost:.2f}" for cost in costs]
        assert f"| {word} | {' | '.join(cells)} |" in text


# The attention kernels' callers, and the merge


def merge(made: Side, parts: list[tuple[torch.Tensor, torch.Tensor]], natural: bool) -> torch.Tensor:
    """Merge the ranks' parts with the engine's own kernel and sum them, as its reduce-scatter does."""
    module = made.file("kernels/ops/attention/dcp_kernels.py")
    lses = torch.stack([lse for _, lse in parts])
    total = torch.zeros(parts[0][0].transpose(0, 1).shape)
    for rank, (out, _) in enumerate(parts):
        corrected = torch.empty_like(total)
        with made.interpreted():
            module.correct_attn_out(out, lses, rank, None, corrected, is_lse_base_on_e=natural)
        total += corrected
    return total.transpose(0, 1)


def case(size: int, heads: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, a cache of whole rows, and selections: peaked scores, unequal shares, an empty rank, holes and tails."""
    random = torch.Generator().manual_seed(size)
    rows = torch.randn(8 * PAGE, WIDTH, generator=random).to(torch.bfloat16)
    queries = (3 * torch.randn(5, heads, WIDTH, generator=random)).to(torch.bfloat16)
    slots = torch.stack([torch.randperm(8 * PAGE, generator=random)[:PAGE] for _ in range(5)]).int()
    slots[1, PAGE // 3 :] = -1
    slots[2] = slots[2] // size * size + size - 1  # the last rank owns all
    slots[3, ::2] = -1
    slots[4, : PAGE // 2] = slots[4, : PAGE // 2] // size * size  # rank 0 has most
    cache = attention.quantize_rows(rows).view(torch.float8_e4m3fn) if fp8 else rows
    return queries, cache[:, None], slots


def merged(made: Side, size: int, heads: int, fp8: bool, natural: bool | None = None) -> torch.Tensor:
    """What the DCP group computes; the base is the one that the model asks for, unless told."""
    queries, cache, slots = case(size, heads, fp8)
    one = backend(made, fp8=fp8, heads=heads)
    parts = []
    for rank in range(size):
        with made.rank(rank, size):
            parts.append(attend(made, one, queries, cache[rank::size].contiguous(), slots))
    if natural is None:
        natural = made.file(MLA.removeprefix("sglang/"))._is_mla_dcp_lse_base_on_e("dsa")
    return merge(made, parts, natural)


def unsplit(made: Side, heads: int, fp8: bool, size: int) -> torch.Tensor:
    queries, cache, slots = case(size, heads, fp8)
    with made.rank(0, 1):
        result: torch.Tensor = attend(made, backend(made, fp8=fp8, heads=heads), queries, cache, slots)
    return result.reshape(5, heads, LATENT).float()


@pytest.mark.parametrize(("size", "heads"), [(2, 4), (4, 4), (2, 64)])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_merged_parts_of_all_ranks_are_the_unpatched_unsplit_attention(
    new: Side, old: Side, size: int, heads: int, fp8: bool
) -> None:
    started(new, size, fp8=fp8)
    assert (merged(new, size, heads, fp8) - unsplit(old, heads, fp8, size)).abs().max() < 0.03


@pytest.mark.parametrize("fp8", [False, True])
def test_a_merge_in_the_other_base_is_far_off(new: Side, old: Side, fp8: bool) -> None:
    started(new, 2, fp8=fp8)
    assert (merged(new, 2, 4, fp8, natural=not fp8) - unsplit(old, 4, fp8, 2)).abs().max() > 0.2


def test_slots_of_other_ranks_that_are_kept_are_far_off(new: Side, old: Side) -> None:
    started(new, 2)
    with mock.patch.object(new.ours["dsa_dcp"], "localise", lambda slots: (slots // 2).clamp_min(-1)):
        assert (merged(new, 2, 4, True) - unsplit(old, 4, True, 2)).abs().max() > 0.2


def test_one_rank_with_another_selection_is_far_off_and_the_check_says_so(
    patched: Tree, old: Side, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made = started(side(patched("decode"), {**ON, CHECK: "1"}), 2)
    queries, cache, slots = case(2, 4, True)
    other = slots.clone()
    other[0, :8] = torch.arange(8)

    def run(selections: list[torch.Tensor]) -> list[Any]:
        digests = torch.cat([made.ours["dsa_dcp_check"].digest(selection) for selection in selections])
        group = SimpleNamespace(world_size=2, all_gather=lambda mine, dim: digests)
        parts = []
        for rank, selection in enumerate(selections):
            with made.rank(rank, 2, dcp_group=group):
                parts.append(attend(made, backend(made, fp8=True, heads=4), queries, cache[rank::2], selection))
        return parts

    assert (merge(made, run([slots, slots]), True) - unsplit(old, 4, True, 2)).abs().max() < 0.03
    assert made.ours["dsa_dcp_check"].compared() == {"cpu": [10, 0]}
    assert f"{CHECK}: 10 rows compared across the ranks, none differed" in caplog.text
    with pytest.raises(made.ours["dsa_dcp_check"].SelectionDiffers, match="1 of 15 rows"):
        run([slots, other])
    with mock.patch.object(made.ours["dsa_dcp_check"], "ON", False):
        assert (merge(made, run([slots, other]), True) - unsplit(old, 4, True, 2)).abs().max() > 0.1


def test_a_hash_forgets_the_order_and_nothing_else(new: Side) -> None:
    digest = new.ours["dsa_dcp_check"].digest
    row = torch.arange(-1, 63, dtype=torch.int32)
    assert digest(row[None]).equal(digest(row.flip(0)[None]))
    changed = row.repeat(64, 1)
    changed[torch.arange(64), torch.arange(64)] += 64
    assert len({*digest(changed).tolist(), *digest(row[None]).tolist()}) == 65
    twice = row.clone()
    twice[5] = twice[6]
    assert not digest(twice[None]).equal(digest(row[None]))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_slot_becomes_a_row_of_its_owner_alone(new: Side, size: int) -> None:
    started(new, size)
    slots = torch.cat([torch.arange(-1, 500), torch.tensor([2**31 - 1])]).int().view(2, -1)
    kernel = new.ours["dcp_localise"].localise
    for rank in range(size):
        expected = [slot // size if slot >= 0 and slot % size == rank else -1 for slot in slots.flatten().tolist()]
        with new.rank(rank, size):
            rows = new.ours["dsa_dcp"].localise(slots)
        assert rows.flatten().tolist() == expected
        assert rows.dtype == torch.int32
        assert rows is not slots  # the selection itself is shared between layers
        with new.interpreted():
            assert kernel(slots, rank, size).equal(rows)
            assert kernel(slots[:0], rank, size).shape == (0, slots.shape[1])
            assert kernel(slots[:, 1::2], rank, size).equal(rows[:, 1::2])


COMPILE = """
import importlib.util, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
spec = importlib.util.spec_from_file_location("dcp_localise", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
types = {"slots": "*i32", "rows": "*i32", "count": "i32", "rank": "i32", "size": "constexpr", "block": "constexpr"}
for size in (2, 8):
    source = ASTSource(fn=module._localise, signature=types, constexprs={(4,): size, (5,): 1024})
    for capability in (90, 120):
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
        print(size, capability, f".target sm_{capability}" in made)
"""


def test_the_localisation_compiles_for_both_cards(patched: Tree, tmp_path: Path) -> None:
    lines = compiled(COMPILE, patched("decode") / "sglang/srt/research/kernels/dcp_localise.py", tmp_path)
    assert lines == [f"{size} {card} True" for size in (2, 8) for card in (90, 120)]


# Which path a forward takes


def path(made: Side, mode: Any, size: int) -> list[Any]:
    """Run the model's own ``forward_absorb_core`` until the parts are merged; tell what it called."""
    module = made.file(MLA.removeprefix("sglang/"))
    calls: list[Any] = []

    def attn(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            out = torch.zeros(3, 4 * (size if name == "group" else 1), 8)
            return (out, out[..., 0]) if name == "group" else out

        return call

    def merging(out: torch.Tensor, lse: torch.Tensor, group: Any, *, is_lse_base_on_e: bool) -> torch.Tensor:
        calls.append(("merged", is_lse_base_on_e))
        return out[:, :4].transpose(0, 1)

    layer = SimpleNamespace(
        current_attention_backend="dsa", _skip_rope_for_dsa_tilelang_fused=lambda: False,
        _fuse_rope_for_trtllm_mla=lambda batch: False, num_local_heads=4, kv_lora_rank=8,
        attn_mqa=attn("own"), attn_mqa_for_dcp_decode=attn("group"),
    )  # fmt: skip
    none: Any = torch.zeros(3, 4, 8)
    parallel = SimpleNamespace(
        dcp_enabled=size > 1, attn_dcp_size=size, attn_dcp_rank=0, dcp_comm_backend="ag_rs", dcp_group=None
    )
    changes: dict[str, Any] = {
        "get_parallel": lambda: parallel,
        "cp_lse_ag_out_rs_mla": merging,
        "get_in_autotune_dummy_run": lambda: False,
        "_SGLANG_EXPERIMENTAL_LORA_OPTI": False,
    }
    batch = SimpleNamespace(forward_mode=mode)
    with (
        mock.patch.multiple(module, **changes),
        made.rank(0, size),
        pytest.raises(AttributeError, match="use_deep_gemm_bmm"),  # what comes after the merge
    ):
        module.DeepseekMLAForwardMixin.forward_absorb_core(
            layer, none, none, none, none, batch, None, None, torch.zeros(3, 4), None
        )
    return calls


def modes(made: Side) -> list[Any]:
    return list(made.known["sglang.srt.model_executor.forward_batch_info"].ForwardMode)


@pytest.mark.parametrize("fp8", [False, True])
def test_every_mode_with_rows_gathers_the_queries_and_merges(new: Side, fp8: bool) -> None:
    started(new, 2, fp8=fp8)
    for mode in modes(new):
        assert path(new, mode, 2) == (["own"] if mode.name == "IDLE" else ["group", ("merged", fp8)]), mode


def test_without_the_gate_every_mode_takes_the_unpatched_path(old: Side, ungated: Side) -> None:
    for size in (1, 2):
        for theirs, ours in zip(modes(old), modes(ungated), strict=True):
            assert path(ungated, ours, size) == path(old, theirs, size), ours
    assert path(ungated, modes(ungated)[0], 2) == ["own"]  # extend reads a pool that it takes for whole


@pytest.mark.parametrize("name", ["flashmla", "flashinfer", "dsa", "nsa", "trtllm_mla", None])
def test_the_base_of_other_backends_is_theirs(new: Side, old: Side, ungated: Side, name: str | None) -> None:
    path_ = MLA.removeprefix("sglang/")
    wanted = old.file(path_)._is_mla_dcp_lse_base_on_e(name)
    assert ungated.file(path_)._is_mla_dcp_lse_base_on_e(name) == wanted
    started(new, 2)
    assert new.file(path_)._is_mla_dcp_lse_base_on_e(name) == (wanted or name in ("dsa", "nsa"))


def planned(made: Side) -> Any:
    """What the engine plans for a prefix: it asks for the slots of all of it, unless the path needs none."""
    module = made.file("srt/layers/dcp/planner.py")
    lengths = torch.tensor([5])
    with made.rank(0, 2):
        vars(module).update(
            get_device=lambda: SimpleNamespace(device="cpu"), DecodeContextParallelMetadata=SimpleNamespace
        )
        asked = mock.MagicMock()
        plan = module.prepare_decode_context_parallel_metadata(
            lengths, lengths, [5], lengths, lengths, torch.zeros(1, 8), 10, torch.Size([1, 1, 8]), torch.float, "cpu",
            asked,
        )  # fmt: skip
    return None if plan is None else asked.__getitem__.call_count


def test_no_buffer_for_a_whole_prefix_is_made(new: Side, old: Side, ungated: Side) -> None:
    assert planned(old) == planned(ungated) == 1
    assert planned(started(new, 2)) is None


@pytest.mark.parametrize("which", ["old", "ungated", "new"])
def test_short_prompts_are_not_read_as_dense_rows(request: pytest.FixtureRequest, which: str) -> None:
    made: Side = request.getfixturevalue(which)
    module = made.file("srt/layers/attention/dsa_backend.py")
    one = backend(made, fp8=True, heads=4)
    vars(one).update(
        token_to_kv_pool=SimpleNamespace(dtype=torch.float8_e4m3fn),
        hisparse_coordinator=None,
        enable_auto_select_prefill_impl=False,
    )
    if which == "new":
        started(made, 2)
    (extend,) = [mode for mode in modes(made) if mode.name == "EXTEND"]
    batch = SimpleNamespace(forward_mode=extend, seq_lens_cpu=torch.tensor([9]), get_max_chunk_capacity=lambda: 99)
    utils = made.known["sglang.srt.utils"]
    vars(utils).update(get_device_sm=lambda: 90, is_blackwell=lambda: False)
    graphs = "sglang.srt.model_executor.runner_backend_utils"
    no = {
        f"{graphs}.breakable_cuda_graph.context": SimpleNamespace(is_in_breakable_cuda_graph=lambda: False),
        f"{graphs}.tc_piecewise_cuda_graph": SimpleNamespace(is_in_tc_piecewise_cuda_graph=lambda: False),
    }
    known: Any = {**made.known, **no}
    vars(module).update(
        is_dsa_enable_prefill_cp=lambda: False,
        envs=SimpleNamespace(SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD=SimpleNamespace(get=lambda: 2048)),
    )
    with anything(known):
        one.set_dsa_prefill_impl(batch)
    assert one.use_mha is (which != "new")


@pytest.mark.parametrize("which", ["old", "ungated", "new"])
def test_flashinfer_is_asked_for_its_lse_and_given_own_rows(request: pytest.FixtureRequest, which: str) -> None:
    made: Side = request.getfixturevalue(which)
    if which == "new":
        started(made, 2)
    asked: dict[str, Any] = {}

    def kernel(**given: Any) -> Any:
        asked.update(given)
        out = torch.ones(3, 1, 4, LATENT)
        return (out, torch.ones(3, 1, 4)) if given.get("return_lse") else out

    made.known["flashinfer.mla"] = SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=kernel)  # type: ignore[assignment]
    slots = torch.arange(12, dtype=torch.int32).view(3, 4)
    module = made.file("kernels/ops/attention/flash_mla_sm120.py")
    with made.rank(1, 2):
        result = module.flashinfer_sparse_mla_forward(
            torch.zeros(3, 4, WIDTH), torch.zeros(PAGE, 656, dtype=torch.uint8), slots, torch.tensor([4, 4, 4]), None,
            page_size=PAGE, kv_cache_dim=656, qk_nope_head_dim=128, kv_lora_rank=LATENT, qk_rope_head_dim=64,
            sm_scale=1.0, skip_softmax_threshold_scale_factor=None,
        )  # fmt: skip
    if which != "new":
        assert result.shape == (3, 4, LATENT)
        assert "return_lse" not in asked
        assert asked["block_tables"].equal(slots[:, None])
        return
    assert [part.shape for part in result] == [(3, 4, LATENT), (3, 4)]
    assert asked["block_tables"].flatten().tolist() == [-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5]


# The kernels are tried at the start


def tried(made: Side, *, fp8: bool, size: int = 2, rank: int = 0) -> None:
    made.ours["dsa_dcp_check"]._tried.clear()
    with made.rank(rank, size):
        made.ours["dsa_dcp"].try_kernels(backend(made, fp8=fp8, heads=4))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("fp8", [False, True])
def test_kernels_that_are_as_known_pass_on_every_rank(new: Side, size: int, fp8: bool) -> None:
    started(new, size, fp8=fp8)
    for rank in range(size):
        tried(new, fp8=fp8, size=size, rank=rank)
    assert new.ours["dsa_dcp_check"]._tried == {kernels(fp8)["dsa_decode_backend"]}


def bent(
    made: Side, fp8: bool, change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Exchange the kernel for one whose output and LSE are changed."""
    if fp8:

        def decode(*args: Any, **given: Any) -> Any:
            return change(*attention.flash_mla_with_kvcache(*args, **given))

        made.kernels.flash_mla_with_kvcache = decode  # type: ignore[attr-defined]
    else:

        def sparse(*args: Any, **given: Any) -> Any:
            out, top, lse = attention.flash_mla_sparse_fwd(*args, **given)
            out, lse = change(out, lse)
            return out, top, lse

        made.kernels.flash_mla_sparse_fwd = sparse  # type: ignore[attr-defined]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out, lse: (out, lse * math.log(2)), "LSE is"),
        (lambda out, lse: (out, lse / math.log(2)), "LSE is"),
        (lambda out, lse: (out, lse + 1), "neither a natural logarithm nor one of base 2"),
        (lambda out, lse: (out * 1.2, lse), "output .* away"),
        (lambda out, lse: (out.roll(1, 0), lse), "output .* away|LSE"),
        (lambda out, lse: (out, lse.nan_to_num(posinf=0.0)), "row without keys"),
        (lambda out, lse: (torch.where(out == 0, math.nan, out), lse), "row without keys|output nan"),
    ],
)
def test_a_kernel_that_does_something_else_stops_the_start(
    new: Side, fp8: bool, change: Callable[..., Any], words: str
) -> None:
    started(new, 2, fp8=fp8)
    bent(new, fp8, change)
    with pytest.raises(new.ours["dsa_dcp_check"].KernelDiffers, match=words):
        tried(new, fp8=fp8)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_table_with_the_wrong_base_stops_the_start(new: Side, fp8: bool) -> None:
    started(new, 2, fp8=fp8)
    name = kernels(fp8)["dsa_decode_backend"]
    with (
        mock.patch.dict(new.ours["dsa_dcp_guard"].NATURAL, {name: not fp8}),
        pytest.raises(new.ours["dsa_dcp_check"].KernelDiffers, match="to be merged as"),
    ):
        tried(new, fp8=fp8)


def test_without_the_gate_no_kernel_is_tried(ungated: Side) -> None:
    with ungated.rank(0, 2):
        ungated.ours["dsa_dcp"].try_kernels(None)


# Off means off


@pytest.mark.parametrize("gates", [{}, {GATE: "0"}, {GATE: "off"}])
@pytest.mark.parametrize("size", [1, 2])
def test_without_the_gate_pools_budget_and_attention_are_the_unpatched_engines(
    patched: Tree, old: Side, gates: dict[str, str], size: int
) -> None:
    made = side(patched("decode"), gates)
    for fp8 in (False, True):
        args = arguments(size, **kernels(fp8))
        pools = [build_pool(one, args, 3 * PAGE, dtype=dtype(fp8)) for one in (old, made)]
        assert [held(pool) for pool in pools] == [held(pools[0])] * 2
        assert type(pools[1]).__name__ == "DSATokenToKVPool"
        results = []
        for one in (old, made):
            sizes = one.file("srt/model_executor/pool_configurator.py")
            vars(sizes)["is_float4_e2m1fn_x2"] = lambda kind: False
            one.known["sglang.srt.mem_cache.kv_cache_configurator"] = one.file("srt/mem_cache/kv_cache_configurator.py")
            configured = owner(one, args, dtype=dtype(fp8))
            with one.rank(0, size, attn_tp_size=size):
                results.append(sizes.DefaultPoolConfigurator._compute_cell_size(None, configured, 2))
        assert results[0] == results[1]
        for heads in (4, 64):
            assert unsplit(made, heads, fp8, size).equal(unsplit(old, heads, fp8, size))
    assert not made.ours["dsa_dcp"].active()


def test_with_the_gate_and_without_dcp_nothing_is_active(new: Side, old: Side) -> None:
    for fp8 in (False, True):
        args = arguments(1, **kernels(fp8), page_size=PAGE, dcp_replicate_q_proj=True)  # nothing is checked either
        assert held(build_pool(new, args, 3 * PAGE, dtype=dtype(fp8))) == held(
            build_pool(old, args, 3 * PAGE, dtype=dtype(fp8))
        )
        assert unsplit(new, 4, fp8, 1).equal(unsplit(old, 4, fp8, 1))
    assert not new.ours["dsa_dcp"].active()
    assert new.ours["dsa_dcp"].query_heads(4) == 4


def test_a_selection_is_handed_back_itself_without_the_gate(ungated: Side) -> None:
    ours = ungated.ours["dsa_dcp"]
    slots = torch.arange(4, dtype=torch.int32)
    with ungated.rank(1, 2):
        assert ours.localise(slots) is slots
        assert ours.part(slots, None, 4) is slots
        assert ours.ask_lse() == {}
        assert ours.query_heads(4) == 4


def test_query_heads_are_those_of_the_group(new: Side) -> None:
    started(new, 4, tp_size=8)
    with new.rank(1, 4):
        assert new.ours["dsa_dcp"].query_heads(8) == 32


@pytest.mark.parametrize("name", [GATE, CHECK, UNCHECKED])
def test_a_gate_that_is_neither_on_nor_off_stops_the_start(patched: Tree, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        side(patched("decode"), {name: "perhaps"})


# Guards

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"page_size": 128}, r"--page-size 64 \(found 128\)"),
    ({"tp_size": 3}, r"an attention-TP that is a multiple of 2 \(found 3\)"),
    ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, r"a multiple of 2 \(found 1\)"),
    ({"dcp_comm_backend": "a2a"}, r"--dcp-comm-backend ag_rs \(found a2a\)"),
    ({"dsa_decode_backend": "fa3"}, r"--dsa-decode-backend flashmla_kv or .* \(found fa3\)"),
    ({"dsa_decode_backend": "trtllm"}, r"\(found trtllm\)"),
    ({"dsa_prefill_backend": "tilelang"}, r"--dsa-prefill-backend flashmla_kv or .* \(found tilelang\)"),
    ({"dsa_prefill_backend": None}, r"--dsa-prefill-backend .* \(found None\)"),
    ({"dsa_prefill_backend": "flashmla_auto"}, r"\(found flashmla_auto\)"),
    ({"dsa_prefill_backend": "flashinfer_sparse_mla"}, "whose LSE has one base"),
    ({"dsa_prefill_backend": "flashmla_sparse"}, "flashmla_kv for an fp8 cache"),
    ({"dsa_prefill_backend": "flashmla_sparse_q8"}, "flashmla_kv for an fp8 cache"),
    ({"dsa_prefill_backend": "flashmla_sparse", "kv_cache_dtype": "fp8_e5m2"}, "flashmla_kv for an fp8 cache"),
    ({"dcp_replicate_q_proj": True}, "no --dcp-replicate-q-proj"),
    ({"attn_cp_size": 2, "tp_size": 4}, "no prefill context parallelism"),
    ({"pp_size": 2}, r"--pp-size 1 \(found 2\)"),
    ({"enable_hierarchical_cache": True}, "no --enable-hierarchical-cache"),
    ({"enable_two_batch_overlap": True}, "no --enable-two-batch-overlap"),
    ({"speculative_algorithm": "EAGLE3"}, r"EAGLE or NEXTN \(found EAGLE3\)"),
    ({"speculative_algorithm": "NGRAM"}, r"EAGLE or NEXTN \(found NGRAM\)"),
    ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 2}, r"--speculative-eagle-topk 1.*\(found 2\)"),
    ({"enable_multi_layer_eagle": True}, "no --enable-multi-layer-eagle"),
    ({"disaggregation_mode": "prefill"}, r"an engine that decodes \(found prefill\)"),
    ({"enable_hisparse": True}, "no --enable-hisparse"),
    ({"attention_backend": "flashinfer"}, r"model's own, dsa \(found attention_backend=flashinfer\)"),
    ({"prefill_attention_backend": "fa3"}, r"\(found prefill_attention_backend=fa3\)"),
    ({"decode_attention_backend": "triton"}, r"\(found decode_attention_backend=triton\)"),
    (
        {"speculative_algorithm": "EAGLE", "speculative_draft_attention_backend": "flashinfer"},
        r"\(found speculative_draft_attention_backend=flashinfer\)",
    ),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_each_condition_that_does_not_hold_stops_the_start(new: Side, changes: dict[str, Any], words: str) -> None:
    refused = new.ours["dsa_dcp_guard"].DsaDcpRefused
    with pytest.raises(refused, match=words) as error:
        build_pool(new, arguments(2, **changes), PAGE)
    assert str(error.value).startswith(f"{GATE}=1 with --dcp-size 2 needs ")
    assert not new.ours["dsa_dcp"].active()


def test_all_conditions_are_named_at_once(new: Side) -> None:
    changes: dict[str, Any] = {}
    for change, _ in WRONG:
        changes.update(change)
    changes["tp_size"] = 3 * 4 * 2  # three attention ranks
    with pytest.raises(new.ours["dsa_dcp_guard"].DsaDcpRefused) as error:
        build_pool(new, arguments(2, **changes), PAGE)
    assert str(error.value).count("(found ") == 16


def test_ranks_that_may_select_differently_are_refused(new: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BROADCAST)
    refused = new.ours["dsa_dcp_guard"].DsaDcpRefused
    with pytest.raises(refused, match=r"SGLANG_RESEARCH_EXACT_TOPK=1 or SGLANG_DSA_TOPK_BROADCAST=1 \(found neither\)"):
        build_pool(new, arguments(2), PAGE)
    with mock.patch.object(new.ours["exact_topk"], "ON", True):
        build_pool(new, arguments(2), PAGE)
    assert new.ours["dsa_dcp"].active()


@pytest.mark.parametrize(
    ("gates", "changes", "starts"),
    [
        ({}, {}, False),
        ({NARROW: "1"}, {}, True),
        ({UNCHECKED: "1"}, {}, True),
        ({}, {"disaggregation_mode": "null"}, True),
        ({}, {"disaggregation_transfer_backend": "fake"}, True),
    ],
)
def test_kv_of_a_prefill_that_compares_nothing_is_taken_only_when_that_is_asked_for(
    patched: Tree, monkeypatch: pytest.MonkeyPatch, gates: dict[str, str], changes: dict[str, Any], starts: bool
) -> None:
    monkeypatch.setenv(BROADCAST, "1")
    made = side(patched("decode"), {GATE: "1", **gates})
    if starts:
        build_pool(made, arguments(2, **changes), PAGE)
        assert made.ours["dsa_dcp"].active()
        return
    with pytest.raises(made.ours["dsa_dcp_guard"].DsaDcpRefused) as error:
        build_pool(made, arguments(2, **changes), PAGE)
    assert f"{NARROW}=1 on both sides" in str(error.value) and f"or {UNCHECKED}=1" in str(error.value)
    assert str(error.value).count("(found ") == 1


def test_a_model_without_a_selection_and_another_pool_are_refused(new: Side) -> None:
    check = new.ours["dsa_dcp_guard"].check
    with anything(new.known), pytest.raises(new.ours["dsa_dcp_guard"].DsaDcpRefused) as error:
        check(arguments(2), SimpleNamespace(), "LayerSplitDSATokenToKVPool")
    assert "a model with index_topk (found None); the plain DSA pool (found LayerSplitDSATokenToKVPool)" in str(
        error.value
    )


@pytest.mark.parametrize("changes", [{}, {"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}, {"tp_size": 4}])
@pytest.mark.parametrize("speculation", [None, "EAGLE", "NEXTN"])
@pytest.mark.parametrize("mode", ["decode", "null"])
def test_what_fits_starts(new: Side, changes: dict[str, Any], speculation: str | None, mode: str) -> None:
    build_pool(new, arguments(2, speculative_algorithm=speculation, disaggregation_mode=mode, **changes), PAGE)
    assert new.ours["dsa_dcp"].active()
