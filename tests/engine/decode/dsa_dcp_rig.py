"""The files of a decode tree that dsa-dcp touches, loaded on a CPU; and one DCP group in one process, rank by rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from lab.rig.standins import attention
from tests.engine.decode.stubs import surroundings
from tests.engine.load import load, stub
from tests.engine.loose import anything, load_loosely, widened

SRT = "sglang/srt"
RESEARCH = f"{SRT}/research"
GATES = tuple(
    f"SGLANG_RESEARCH_{name}"
    for name in ("DSA_DCP", "DSA_DCP_CHECK", "DSA_DCP_UNCHECKED_PREFILL", "PCP4_DCP2", "EXACT_TOPK", "DCP_RETRACT")
)
MLA = f"{SRT}/models/deepseek_common/attention_forward_methods/forward_mla.py"
PAGE = 64
WIDTH, LATENT = 576, 512


@dataclass
class Side:
    """One tree with its gates as they are in ``gates``.

    Attributes:
        ours: our modules by their last name; empty in a stock tree.
        kernels: what stands for ``sgl_kernel.flash_mla``; a test may exchange its functions.
    """

    root: Path
    known: dict[str, ModuleType]
    kernels: ModuleType
    ours: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def file(self, path: str) -> Any:
        """The tree's own file below ``sglang/``, loaded once."""
        if path not in self.files:
            with self.interpreted():
                self.files[path] = load_loosely(self.root, f"sglang/{path}", self.known)
        return self.files[path]

    @contextmanager
    def interpreted(self) -> Iterator[None]:
        """Triton's kernels run on the CPU, and nothing is compiled by Torch."""
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"), mock.patch.object(torch, "compile", lambda call: call):
            yield

    @contextmanager
    def rank(self, rank: int, size: int, **more: Any) -> Iterator[None]:
        """Run as ``rank`` of a DCP group of ``size``, with every import answered by this tree."""
        parallel = self.known["sglang.srt.runtime_context"].get_parallel()
        with ExitStack() as stack:
            stack.enter_context(anything(self.known))
            stack.enter_context(
                parallel.override(
                    dcp_enabled=size > 1, dcp_size=size, dcp_rank=rank, attn_dcp_size=size, attn_dcp_rank=rank, **more
                )
            )
            yield


def side(root: Path, gates: Mapping[str, str] | None = None) -> Side:
    """Load what all tests need of ``root``, with exactly ``gates`` set."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        for name in GATES:
            os.environ.pop(name, None)
        os.environ.update(gates or {})
        known = {name: widened(module) for name, module in surroundings().items() if "triton" not in name}
        for path in ("environ.py", "runtime_context.py"):
            module = load(root, f"{SRT}/{path}", known)
            known[module.__name__] = module
        flash = stub(
            "sgl_kernel.flash_mla",
            flash_mla_sparse_fwd=attention.flash_mla_sparse_fwd,
            flash_mla_with_kvcache=attention.flash_mla_with_kvcache,
            get_mla_metadata=attention.get_mla_metadata,
        )
        known["sgl_kernel.flash_mla"] = flash
        made = Side(root, known, flash)
        if (root / RESEARCH).is_dir():
            names = ["gates", "retract", "exact_topk"]
            if (root / RESEARCH / "dsa_dcp.py").is_file():
                names += ["narrow_topology", "dsa_dcp_guard", "dsa_dcp_check", "kernels/dcp_localise", "dsa_dcp"]
            for name in names:
                module = load_loosely(root, f"{RESEARCH}/{name}.py", known)
                known[module.__name__] = module
                made.ours[name.rpartition("/")[2]] = module
        for path in (
            "mem_cache/memory_pool.py",
            "models/deepseek_common/utils.py",
            "model_executor/forward_batch_info.py",
        ):
            module = load_loosely(root, f"{SRT}/{path}", known)
            known[module.__name__] = module
            made.files[f"srt/{path}"] = module
        cp = "sglang.srt.layers.cp.utils"
        known[cp] = widened(
            stub(
                cp,
                get_glm_dsa_cp_layer_shard_info=lambda owner: (None, 1),
                get_glm_dsa_layer_split_effective_num_layers=lambda owner, layers: layers,
            )
        )
        dsa = "sglang.srt.configs.model_config"
        known[dsa] = widened(
            stub(
                dsa,
                is_deepseek_dsa=lambda config: hasattr(config, "index_topk"),
                get_dsa_index_head_dim=lambda config: 128,
                get_dsa_index_topk=lambda config: config.index_topk,
            )
        )
    return made


def arguments(size: int, **changes: Any) -> SimpleNamespace:
    """The server arguments that the patch reads, as an engine that fits has them."""
    values = {
        "dcp_size": size, "tp_size": size, "dp_size": 1, "enable_dp_attention": False, "attn_cp_size": 1,
        "page_size": PAGE, "dcp_comm_backend": "ag_rs", "dsa_prefill_backend": "flashmla_kv",
        "dsa_decode_backend": "flashmla_kv", "kv_cache_dtype": "fp8_e4m3", "dcp_replicate_q_proj": None, "pp_size": 1,
        "enable_hisparse": False, "enable_hierarchical_cache": False, "enable_two_batch_overlap": False,
        "speculative_algorithm": None, "speculative_eagle_topk": None, "enable_multi_layer_eagle": False,
        "disaggregation_mode": "decode", "disaggregation_transfer_backend": "mooncake", "attention_backend": "dsa",
        "prefill_attention_backend": None, "decode_attention_backend": None,
        "speculative_draft_attention_backend": None,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def owner(made: Side, args: Any, *, draft: bool = False, layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A pool configurator of the engine's own class, with what its functions for a DSA pool read."""
    module = made.file("srt/mem_cache/kv_cache_configurator.py")
    one = object.__new__(module.KVCacheConfigurator)
    values = {
        "server_args": args, "is_draft_worker": draft, "kv_cache_dtype": dtype, "device": "cpu",
        "use_mla_backend": True,
        "model_config": SimpleNamespace(
            hf_config=SimpleNamespace(index_topk=PAGE), kv_lora_rank=LATENT, qk_rope_head_dim=WIDTH - LATENT
        ),
        "layer_info": SimpleNamespace(num_effective_layers=layers, start_layer=0, end_layer=layers),
    }  # fmt: skip
    for name, value in values.items():
        object.__setattr__(one, name, value)
    vars(module).update(
        get_schedule=lambda: SimpleNamespace(page_size=args.page_size),
        get_memory=lambda: SimpleNamespace(enable_hisparse=False),
        get_exec=lambda: SimpleNamespace(features=SimpleNamespace(enable_memory_saver=False)),
    )
    return one


def build_pool(made: Side, args: Any, tokens: int, **more: Any) -> Any:
    """The pool that the engine's own ``_build_dsa_kv_pool`` makes for ``tokens`` a rank."""
    one = owner(made, args, **more)
    with made.rank(0, args.dcp_size):
        return one._build_dsa_kv_pool(max_total_num_tokens=tokens * one.loc_space_scale)


def backend(made: Side, *, fp8: bool, heads: int, topk: int = PAGE) -> Any:
    """An attention backend of the engine's own class, with what its sparse kernels' callers read."""
    one = object.__new__(made.file("srt/layers/attention/dsa_backend.py").DeepseekSparseAttnBackend)
    kernel = "flashmla_kv" if fp8 else "flashmla_sparse"
    vars(one).update(
        device="cpu", device_sm_major=9, dsa_index_topk=topk, num_q_heads=heads, flashmla_kv_num_q_heads=64,
        real_page_size=PAGE, kv_cache_dim=656 if fp8 else WIDTH, dsa_kv_cache_store_fp8=fp8,
        dsa_prefill_impl=kernel, dsa_decode_impl=kernel,
    )  # fmt: skip
    return one


def attend(made: Side, one: Any, queries: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> Any:
    """Call the backend's own caller of its kernel: q ``[T, H, 576]``, cache ``[N, 1, …]``, slots ``[T, K]`` int32."""
    lengths = torch.full((slots.shape[0],), slots.shape[1], dtype=torch.int32)
    given = {"q_all": queries, "kv_cache": cache, "page_table_1": slots, "sm_scale": 0.05, "v_head_dim": LATENT}
    if one.dsa_decode_impl == "flashmla_sparse":
        return one._forward_flashmla_sparse(**given, topk_length=lengths)
    metadata = SimpleNamespace(
        dsa_cache_seqlens_int32=lengths, flashmla_metadata=one._compute_flashmla_metadata(lengths, 1)
    )
    layer = SimpleNamespace(tp_q_head_num=queries.shape[1], head_dim=WIDTH)
    return one._forward_flashmla_kv(**given, layer=layer, metadata=metadata)
