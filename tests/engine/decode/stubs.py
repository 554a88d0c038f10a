"""Just enough of an engine's surroundings for the decode tree's pools and allocators to load without its packages.

What the tests judge is never in here: pools, allocators, the parallel context, the write kernel and our own sources
are the tree's own files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.engine.load import load, modules, stub

SRT = "sglang.srt"
OPS = "sglang.kernels.ops"
GATE = "SGLANG_RESEARCH_DCP_RETRACT"


class _Kernels(ModuleType):
    """A module from which every name can be imported, and none of them called: kernels that no test here may reach."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} needs a device")

        return unavailable


def _no(*args: Any) -> bool:
    return False


def _jit(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda inner: inner


def surroundings() -> dict[str, ModuleType]:
    """Give stand-ins, by name, for the modules that the pool and allocator files import at their top."""
    language = _Kernels("triton.language")
    vars(language)["constexpr"] = int
    saver = SimpleNamespace(create=lambda enable: SimpleNamespace(region=lambda *args, **named: nullcontext()))
    platform = SimpleNamespace(
        synchronize=lambda: None, is_cuda_alike=_no, is_out_of_tree=_no, is_pin_memory_available=_no
    )
    utils = stub(f"{SRT}.utils", **dict.fromkeys(("is_cpu", "is_cuda", "is_hip", "is_npu", "is_float4_e2m1fn_x2"), _no))
    vars(utils).update(dict.fromkeys(("cpu_has_amx_support", "get_bool_env_var", "get_num_new_pages"), _no))
    vars(utils).update(next_power_of_2=_no)
    dsa = {"INDEXER_K_CACHE_PRESHUFFLE_TILE": 16, "aiter_can_use_preshuffle_paged_mqa": _no}
    known = {
        "triton": stub("triton", jit=_jit, language=language),
        "triton.language": language,
        f"{OPS}.quantization.fp8_kernel": stub("fp8_kernel", fp8_dtype=torch.float8_e4m3fn, is_fp8_fnuz=_no),
        f"{SRT}.configs.mamba_utils": stub("mamba_utils", BaseLinearStateParams=object),
        f"{SRT}.constants": stub("constants", GPU_MEMORY_TYPE_KV_CACHE="kv_cache"),
        f"{SRT}.debug_utils.cuda_coredump": stub("cuda_coredump"),
        f"{SRT}.layers.attention.dsa.utils": stub("dsa_utils", **dsa),
        f"{SRT}.layers.quantization.fp4_kv_cache_quant_method": stub("fp4", UnquantizedKVCacheMethod=object),
        f"{SRT}.layers.radix_attention": stub("radix_attention", RadixAttention=object),
        f"{SRT}.mem_cache.allocator.mamba": stub("mamba", MambaSlotAllocator=object),
        f"{SRT}.mem_cache.kv_vmm_backing": stub("kv_vmm_backing", KvVmmBufferOwner=object),
        f"{SRT}.mem_cache.utils": _Kernels("memory_utils"),
        f"{SRT}.platforms": stub("platforms", current_platform=platform),
        f"{SRT}.utils": utils,
        f"{SRT}.utils.async_probe": stub("async_probe", maybe_detect_oob=_no),
        f"{SRT}.utils.torch_memory_saver_adapter": stub("saver", TorchMemorySaverAdapter=saver),
    }
    vars(known[f"{SRT}.mem_cache.utils"]).update(maybe_init_custom_mem_pool=lambda device: (False, None, None))
    for name in (
        f"{OPS}.attention.dsa",
        f"{OPS}.attention.dsa.quant_k_cache",
        f"{OPS}.kvcache.cache_move",
        f"{OPS}.kvcache.kvcache",
        f"{OPS}.memory.allocator",
        f"{SRT}.layers.cp.utils",
        f"{SRT}.mem_cache.layout.page_major",
    ):
        known[name] = _Kernels(name)
    return known


@dataclass(frozen=True)
class Engine:
    """The files of one tree that the tests use; ``retract`` is None in the stock tree."""

    root: Path
    pools: Any
    allocators: Any
    layer_split: Any
    context: Any
    retract: Any

    def rank(self, rank: int, size: int) -> AbstractContextManager[Any]:
        """Put this process at ``rank`` of a DCP group of ``size``, through the engine's own override."""
        forced: AbstractContextManager[Any] = self.context.get_parallel().override(
            dcp_enabled=size > 1, dcp_size=size, dcp_rank=rank, attn_dcp_size=size, attn_dcp_rank=rank
        )
        return forced

    def write(self, pool: Any, slots: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
        """Store latent rows in layer 0 of an MLA pool as the engine does, its Triton kernel interpreted on the CPU.

        Args:
            slots: ``[tokens]`` int64; nope, rope: ``[tokens, 1, width]`` of the pool's dtype.
        """
        with self._kernels("kvcache/mla_buffer.py") as kernels:
            kernel = kernels.set_mla_kv_buffer_triton
            with mock.patch.object(self.pools, "set_mla_kv_buffer_triton", kernel):
                pool.set_mla_kv_buffer(SimpleNamespace(layer_id=0), slots, nope, rope)

    def write_index(self, pool: Any, slots: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor) -> None:
        """Store index entries in layer 0 of a DSA pool as the engine does, likewise.

        Args:
            slots: ``[tokens]`` int64; keys: ``[tokens, 128]`` float8_e4m3fn; scales: ``[tokens, 1]`` float32.
        """
        with (
            self._kernels("attention/dsa/index_buf_accessor.py") as kernels,
            mock.patch.object(self.pools, "index_buf_accessor", kernels),
        ):
            pool.set_index_k_scale_buffer(0, slots, keys, scales)

    @contextmanager
    def _kernels(self, path: str) -> Iterator[Any]:
        utils = surroundings()
        needs = {
            f"{SRT}.runtime_context": self.context,
            f"{SRT}.utils": utils[f"{SRT}.utils"],
            f"{SRT}.layers.attention.dsa.utils": utils[f"{SRT}.layers.attention.dsa.utils"],
            f"{OPS}.quantization.fp8_kernel": utils[f"{OPS}.quantization.fp8_kernel"],
            "sglang.kernels.jit.utils": stub("jit_utils", is_arch_support_pdl=_no),
            f"{OPS}.kvcache.set_mla_kv_buffer": stub("tma", can_use_set_mla_kv_buffer=_no, set_mla_kv_buffer=None),
        }
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            kernels = load(self.root, f"sglang/kernels/ops/{path}", needs)
            with modules(needs):
                yield kernels


def engine(root: Path, gate: str | None) -> Engine:
    """Load pools and allocators of the tree ``root`` in a process whose gate variable is ``gate`` (None: unset)."""
    unset = {name: value for name, value in os.environ.items() if name != GATE}
    with mock.patch.dict(os.environ, unset if gate is None else {**unset, GATE: gate}, clear=True):
        entries = surroundings()

        def add(path: str) -> Any:
            module = load(root, path, entries)
            entries[module.__name__] = module
            return module

        add("sglang/srt/environ.py")
        context = add("sglang/srt/runtime_context.py")
        retract = None
        if (root / "sglang/srt/research").is_dir():
            add("sglang/srt/research/gates.py")
            retract = add("sglang/srt/research/retract.py")
        pools = add("sglang/srt/mem_cache/memory_pool.py")
        add("sglang/srt/mem_cache/allocator/base.py")
        allocators = add("sglang/srt/mem_cache/allocator/paged.py")
        layer_split = add("sglang/srt/mem_cache/dsa_cache_layer_split.py")
    return Engine(root, pools, allocators, layer_split, context, retract)
