"""The table of stand-ins: what is replaced, by what, why, and in which engine version.

It is data. The import hook installs it, :mod:`lab.rig.standins.targets` checks it against a tree without running
anything, :mod:`lab.rig.standins.patches` compares it with our patches, and the docs print it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["DECODE", "PREFILL", "TABLE", "VERSIONS", "StandIn", "for_version", "markdown", "rows"]

DECODE = "0.5.17"
PREFILL = "0.5.19"
VERSIONS = (DECODE, PREFILL)

How = Literal["replace", "wrap", "add", "set", "empty"]
Kind = Literal["kernel", "device", "check"]


@dataclass(frozen=True)
class StandIn:
    """One stand-in.

    Attributes:
        target: ``module:name``, the place of definition in the engine or a library, dots for a class's method.
        by: ``module:name`` in this package.
        how: ``replace`` (a function with the same parameters), ``wrap`` (our function receives the target and
            returns what takes its place), ``add`` (the target does not exist on a machine without a GPU),
            ``set`` (the target's value becomes our object), ``empty`` (a compiled library: its import is answered by
            an empty module; then there is no name and nothing of ours).
        kind: ``kernel`` (device code), ``device`` (a call to the device's runtime), ``check`` (a question whether
            there is a GPU; nothing that computes).
        replaces: what does not run.
        why: why it cannot run on a CPU.
        maths: what runs instead.
        versions: engine versions that need it.
        readable: whether the target's source is Python that can be checked without importing it.
    """

    target: str
    by: str
    how: How
    kind: Kind
    replaces: str
    why: str
    maths: str
    versions: tuple[str, ...] = VERSIONS
    readable: bool = True

    @property
    def module(self) -> str:
        """Dotted name of the module that holds the target."""
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        """Name of the target inside its module."""
        return self.target.partition(":")[2]


_SPECULATIVE = "sgl_kernel.speculative"
_NO_CPU_OPERATION = "the CUDA build of sgl-kernel holds only the Python wrapper, the operation is in its CPU build"
_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
_TRANSFORM = "sglang.kernels.ops.attention.dsa.transform_index"
_FLASH = ("sglang.kernels.ops.attention.flash_attention", "sgl_kernel.flash_attn")
_FLASHINFER_MLA = "sglang.srt.layers.attention.flashinfer_mla_backend"
_GROUPS = "sglang.srt.distributed.parallel_state"
_DONE = "work on a CPU is done when its call returns"


def _cuda(name: str, by: str, replaces: str, maths: str = "nothing to wait for") -> StandIn:
    return StandIn(f"torch:{name}", f"cuda:{by}", "set", "device", replaces, _DONE, maths, readable=False)


TABLE: tuple[StandIn, ...] = (
    StandIn(
        "sgl_kernel.load_utils:_load_architecture_specific_ops",
        "checks:load_nothing",
        "replace",
        "check",
        "loading of the compiled operations of sgl-kernel",
        "they need the CUDA driver",
        "none: a call of a missing operation is an error that names it",
    ),
    StandIn(
        "sgl_kernel.load_utils:_preload_cuda_library",
        "checks:load_nothing",
        "replace",
        "check",
        "loading of the CUDA runtime",
        "there is none",
        "none",
    ),
    _cuda("cuda.Event", "Event", "CUDA events", "an event is reached as soon as it is recorded"),
    _cuda("cuda.Stream", "Stream", "CUDA streams", "one stream, in the order of the calls"),
    _cuda("cuda.current_stream", "current_stream", "the current stream"),
    _cuda("cuda.default_stream", "default_stream", "the default stream"),
    _cuda("cuda.stream", "stream", "choosing a stream"),
    _cuda("cuda.synchronize", "synchronize", "waiting for the device"),
    _cuda("cuda.set_device", "set_device", "choosing a device", "one device"),
    _cuda("cuda.get_device_capability", "get_device_capability", "asking for the card", "sm_90"),
    _cuda("Tensor.record_stream", "record_stream", "keeping memory for another stream"),
    StandIn(
        "triton.runtime.interpreter:_convert_float",
        "interpreter:rounded_conversion",
        "wrap",
        "kernel",
        "the float conversion of Triton's interpreter",
        "it drops the carry of rounding: one fp8 value in sixteen is half of what it should be; bf16 is cut off",
        "to nearest even, fp8 clamped to its largest finite value, as the hardware does",
    ),
    StandIn(
        "triton.runtime.interpreter:GridExecutor.__call__",
        "interpreter:one_at_a_time",
        "wrap",
        "check",
        "two kernels of two threads at the same time",
        "the interpreter patches the language for the whole process while a kernel runs",
        "the kernels one after the other",
    ),
    StandIn(
        "sglang.kernels.ops.attention.dsa.quant_k_cache:quantize_k_cache_separate",
        "attention:quantize_separate",
        "replace",
        "kernel",
        "packing of latent rows into the fp8 cache (Triton)",
        "row by row in the interpreter it takes minutes for a prompt; "
        "and a float32 model's rope part would not fit a 656-byte row",
        "the same bytes: fp8 tiles of 128 with one scale each, rope part in bf16",
    ),
    StandIn(
        f"{_SPECULATIVE}:assign_req_to_token_pool_cpu",
        "speculative:assign_req_to_token_pool",
        "replace",
        "kernel",
        "writing slots into the request-to-token table",
        _NO_CPU_OPERATION,
        "copy, request by request",
    ),
    StandIn(
        f"{_SPECULATIVE}:assign_extend_cache_locs_cpu",
        "speculative:assign_extend_cache_locs",
        "replace",
        "kernel",
        "reading the slots of an extend from the table",
        _NO_CPU_OPERATION,
        "copy, request by request",
    ),
    StandIn(
        f"{_SPECULATIVE}:assign_draft_cache_locs_contiguous_cpu",
        "speculative:assign_draft_cache_locs_contiguous",
        "replace",
        "kernel",
        "reading the slots of the draft steps from the table",
        _NO_CPU_OPERATION,
        "copy, request by request",
    ),
    StandIn(
        f"{_SPECULATIVE}:fill_bonus_tokens_cpu",
        "speculative:fill_bonus_tokens",
        "replace",
        "kernel",
        "picking the last accepted token",
        _NO_CPU_OPERATION,
        "gather at stride * i + accepted - 1",
    ),
    StandIn(
        f"{_SPECULATIVE}:fill_accept_out_cache_loc_cpu",
        "speculative:fill_accept_out_cache_loc",
        "replace",
        "kernel",
        "packing the slots of accepted tokens",
        _NO_CPU_OPERATION,
        "gather without -1",
    ),
    StandIn(
        f"{_SPECULATIVE}:build_tree_kernel_efficient_cpu",
        "speculative:build_tree",
        "replace",
        "kernel",
        "building the draft tree: links, positions, mask",
        _NO_CPU_OPERATION,
        "parent of a candidate from its draft step; mask = ancestors",
    ),
    StandIn(
        f"{_SPECULATIVE}:verify_tree_greedy_cpu",
        "speculative:verify_tree_greedy",
        "replace",
        "kernel",
        "greedy acceptance",
        _NO_CPU_OPERATION,
        "walk the tree along the target's own choices",
    ),
    *(
        StandIn(
            f"sgl_kernel.{library}:",
            "",
            "empty",
            "check",
            f"loading of the compiled library {library} of sgl-kernel",
            "it needs the CUDA driver",
            "none: the functions over it are stand-ins, named below",
        )
        for library in ("flash_ops", "flashmla_ops")
    ),
    *(
        StandIn(
            f"{place}:flash_attn_with_kvcache",
            "flash_attention:paged",
            "wrap",
            "kernel",
            "FlashAttention-3 over the paged cache, MHA and absorbed MLA",
            "CUDA, sm_90",
            "softmax(scale * (q.k + qv.v)) v in float32, causal, window and softcap as given; natural LSE",
        )
        for place in _FLASH
    ),
    *(
        StandIn(
            f"{place}:flash_attn_varlen_func",
            "flash_attention:packed",
            "wrap",
            "kernel",
            "FlashAttention-3 over packed keys",
            "CUDA, sm_90",
            "the same over packed keys",
        )
        for place in _FLASH
    ),
    *(
        StandIn(
            f"{_FLASHINFER_MLA}:{name}",
            f"flashinfer_mla:{name}",
            "add",
            "kernel",
            what,
            "CUDA; not even imported without a GPU",
            maths,
        )
        for name, what, maths in (
            (
                "BatchMLAPagedAttentionWrapper",
                "paged MLA attention of FlashInfer",
                "softmax over a request's own rows in float32; LSE in base 2, -inf for a row without keys",
            ),
            (
                "BatchPrefillWithRaggedKVCacheWrapper",
                "ragged attention of FlashInfer",
                "an error: start with --flashinfer-mla-disable-ragged",
            ),
        )
    ),
    StandIn(
        f"{_FLASHINFER_MLA}:torch",
        "flashinfer_mla:host_torch",
        "wrap",
        "device",
        "device memory of the index buffers of the FlashInfer MLA backend",
        'asked for as device="cuda"',
        "host memory",
    ),
    StandIn(
        "sgl_kernel.flash_attn:get_scheduler_metadata",
        "flash_attention:no_schedule",
        "set",
        "kernel",
        "the work split of FlashAttention-3",
        "CUDA",
        "none; the stand-ins do not split",
    ),
    StandIn(
        "sglang.kernels.ops.attention.pad:seqlens_expand_triton",
        "tables:seqlens_expand",
        "replace",
        "check",
        "a Triton kernel behind an assertion that its tensors are on CUDA",
        "the assertion stands in the launching function",
        "length - new + 1 ... length for each request, never below 0",
    ),
    StandIn(
        "sglang.srt.layers.attention.attention_registry:get_device_capability",
        "cuda:get_device_capability",
        "set",
        "check",
        "the question for the card before the FlashAttention-3 backend is made, its only use there",
        "there is no card",
        "sm_90",
    ),
    StandIn(
        "sgl_kernel.flash_mla:flash_mla_sparse_fwd",
        "attention:flash_mla_sparse_fwd",
        "replace",
        "kernel",
        "sparse attention over bf16 rows (FlashMLA)",
        "CUDA, sm_90",
        "softmax over the named rows in float32; -1 skipped; LSE in base 2, +inf for a row without keys",
    ),
    StandIn(
        "sgl_kernel.flash_mla:flash_mla_with_kvcache",
        "attention:flash_mla_with_kvcache",
        "replace",
        "kernel",
        "sparse attention over fp8 656-byte rows (FlashMLA)",
        "CUDA, sm_90",
        "rows unpacked, then the same in float32; natural LSE",
    ),
    StandIn(
        "sgl_kernel.flash_mla:get_mla_metadata",
        "attention:get_mla_metadata",
        "replace",
        "kernel",
        "the work split of FlashMLA",
        "CUDA",
        "zeros of the same kind; the stand-ins do not split",
    ),
    StandIn(
        "sgl_kernel.top_k:fast_topk_v2",
        "topk:fast_topk_v2",
        "replace",
        "kernel",
        "top-k of index logits",
        "CUDA, and 2048 only",
        "exact, ties to the lower position",
    ),
    StandIn(
        "sgl_kernel.top_k:fast_topk_transform_fused",
        "topk:fast_topk_transform_fused",
        "replace",
        "kernel",
        "top-k and page table in one",
        "CUDA, and 2048 only",
        "the same, then the slot of each position",
    ),
    StandIn(
        "sgl_kernel.top_k:fast_topk_transform_ragged_fused",
        "topk:fast_topk_transform_ragged_fused",
        "replace",
        "kernel",
        "top-k over packed keys",
        "CUDA, and 2048 only",
        "the same, plus each row's offset",
    ),
    StandIn(
        f"{_TRANSFORM}:transform_index_page_table_decode_fast",
        "tables:decode_slots",
        "wrap",
        "kernel",
        "the page-table transform of decode, for fewer than 2048 positions",
        "the Triton kernel is compiled for 2048; with 2048 it runs, interpreted",
        "look-up row by row",
    ),
    StandIn(
        f"{_TRANSFORM}:transform_index_page_table_prefill_fast",
        "tables:prefill_slots",
        "wrap",
        "kernel",
        "the page-table transform of prefill, for fewer than 2048 positions",
        "as above",
        "look-up row by row",
    ),
    StandIn(
        "sglang.kernels.ops.quantization.hadamard:hadamard_transform",
        "indexer:hadamard_transform",
        "replace",
        "kernel",
        "the Hadamard rotation of index queries and keys",
        "CUDA, compiled at run time",
        "butterflies in float32",
    ),
    StandIn(
        "sglang.kernels.ops.attention.dsa.triton_kernel:act_quant",
        "indexer:act_quant",
        "wrap",
        "check",
        "nothing: the quantiser runs, interpreted; its result names an indexed device",
        "the indexer asserts that its queries are on an indexed device",
        "the quantiser's own",
    ),
    StandIn(
        f"{_INDEXER}:deep_gemm",
        "indexer:deep_gemm",
        "add",
        "kernel",
        "index logits (DeepGEMM fp8_mqa_logits, fp8_paged_mqa_logits) and their work split",
        "CUDA, compiled at run time; not even imported without a GPU",
        "scale_k * sum_h w_h * relu(q_h . k) in float32; -inf outside a row's window",
    ),
    StandIn(
        f"{_INDEXER}:_is_cuda",
        "checks:YES",
        "set",
        "check",
        "the indexer's question for a GPU",
        "its paths behind it are the ones to run",
        "none",
    ),
    StandIn(
        f"{_INDEXER}:Indexer.forward_native",
        "checks:the_cuda_forward",
        "add",
        "check",
        "the choice of the indexer's forward by platform",
        "the class has one forward for every platform that can run it, the CUDA one",
        "none: the indexer's own forward_cuda runs",
        versions=(DECODE,),
    ),
    StandIn(
        f"{_INDEXER}:Indexer.forward_native",
        "checks:the_cuda_forward",
        "replace",
        "check",
        "the choice of the indexer's forward by platform",
        "the class has one forward for every platform that can run it, the CUDA one; this one only raises",
        "none: the indexer's own forward_cuda runs",
        versions=(PREFILL,),
    ),
    StandIn(
        f"{_INDEXER}:can_use_dsa_fused_store",
        "checks:no_fused_store",
        "set",
        "check",
        "the fused quantise-and-store of index keys",
        "CUDA, compiled at run time; the indexer's own unfused path runs instead",
        "none",
    ),
    StandIn(
        f"{_INDEXER}:Indexer._weights_proj_bf16_in_fp32_out",
        "indexer:weights_proj",
        "replace",
        "kernel",
        "the head gates' matrix product, bf16 in and fp32 out",
        "torch.mm with an output dtype exists on CUDA only",
        "the product in float32",
    ),
    StandIn(
        "sglang.srt.layers.attention.dsa_backend:DeepseekSparseAttnBackend.get_cpu_graph_seq_len_fill_value",
        "checks:same_fill_value",
        "add",
        "check",
        "the padding length of an empty row, asked for by the device's name",
        "the backend answers for CUDA only",
        "none: the backend's own answer for CUDA",
    ),
    StandIn(
        "sglang.kernels.jit.utils.arch:is_arch_support_pdl",
        "checks:no_pdl",
        "replace",
        "check",
        "the question for programmatic dependent launch",
        "Triton's interpreter has no such instruction",
        "none",
    ),
    StandIn(
        "sglang.srt.layers.rotary_embedding.factory:get_rope_cpu",
        "checks:plain_rope",
        "wrap",
        "check",
        "the CPU factory's assertion that there is rope scaling",
        "GLM has none",
        "the ordinary factory's class, whose torch formula runs",
    ),
    StandIn(
        "sglang.srt.arg_groups.speculative_hook:_disable_overlap_schedule_for_cpu",
        "checks:allow_overlap",
        "replace",
        "check",
        "the veto on overlap scheduling with speculation on a CPU",
        "the deployment runs both",
        "none",
    ),
    StandIn(
        "sglang.srt.speculative.eagle_utils:default_tree_mask_mode",
        "checks:full_tree_mask",
        "wrap",
        "check",
        "the mask form of the CPU's own attention kernel",
        "that kernel is not what runs; the backends that run read the form of the GPU kernels",
        "none",
    ),
    StandIn(
        f"{_GROUPS}:is_cuda",
        "checks:is_cuda",
        "set",
        "check",
        "the platform check of decode context parallelism, its only use there",
        "the collectives behind it run over gloo",
        "none",
    ),
    *(
        StandIn(
            f"{_GROUPS}:reg_{name}",
            f"groups:{name}",
            "replace",
            "check",
            "the registration of a collective as a custom operation",
            "it is registered for CUDA tensors only",
            "none: the group's own function behind it, over gloo",
        )
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor")
    ),
    StandIn(
        f"{_GROUPS}:GroupCoordinator.__init__",
        "checks:group_without_gpu_communicators",
        "wrap",
        "check",
        "pynccl, mscclpp, custom all-reduce and symmetric memory",
        "GPU only, and no flag switches pynccl off",
        "torch.distributed over gloo, chosen by the group's own code",
    ),
    StandIn(
        "sglang.srt.model_executor.forward_batch_info:torch",
        "cuda:unpinned_torch",
        "wrap",
        "device",
        "pinned memory for the token counts of data-parallel attention",
        "it is the CUDA driver's",
        "ordinary memory",
        versions=(DECODE,),
    ),
    StandIn(
        "sglang.srt.disaggregation.common.staging_buffer:StagingBuffer.__init__",
        "staging:host_memory",
        "wrap",
        "device",
        "device memory of the pack buffer",
        "asked for as cuda:<number>",
        "the same bytes in host memory",
    ),
)


def for_version(version: str) -> tuple[StandIn, ...]:
    """The stand-ins of one engine version, in the order of the table."""
    return tuple(entry for entry in TABLE if version in entry.versions)


def rows() -> list[dict[str, object]]:
    """The table as plain data, one dictionary for each stand-in, ready for JSON."""
    return [dataclasses.asdict(entry) for entry in TABLE]


def markdown(found: Mapping[str, str]) -> str:
    """The table for the docs: one line for each stand-in, kernels first.

    Args:
        found: by target, what the comparison with the kernel on a GPU gave.
    """
    order = {"kernel": 0, "device": 1, "check": 2}
    heads = ("replaced", "kind", "what does not run", "why", "what runs instead", "versions", "beside it on a GPU")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for entry in sorted(TABLE, key=lambda one: order[one.kind]):
        cells = (
            f"`{entry.target}`",
            entry.kind,
            entry.replaces,
            entry.why,
            entry.maths,
            " ".join(entry.versions),
            found.get(entry.target, "not compared" if entry.kind == "kernel" else ""),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
