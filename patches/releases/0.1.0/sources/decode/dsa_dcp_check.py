"""Two mistakes under decode context parallelism that no error would show, and the checks that do.

*A wrong base.* The parts of the ranks are merged by the LSE of each kernel. Merged in another base the text stays
fluent and is wrong. So each start runs its kernels on a few rows whose result is known.

*Other selections.* Each rank keeps what it owns of its own selection. If two ranks selected differently, keys are lost
or counted twice. With ``SGLANG_RESEARCH_DSA_DCP_CHECK=1`` every selection is hashed and compared across the ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang.srt.research import gates
from sglang.srt.runtime_context import get_parallel

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

SWITCH = "SGLANG_RESEARCH_DSA_DCP_CHECK"
ON: bool = gates.enabled(SWITCH)

LATENT, ROPE = 512, 64
KEYS = 12  # for each rank in the row that all share
TOLERANCE = 0.05  # of an LSE near 6 (8.7 in base 2) and of outputs up to 2; bf16 and fp8 kernels stay below 0.01

_tried: set[str] = set()
_told: dict[str, Any] = {}  # device -> int64 [2]: rows compared, rows that differed
_logged: dict[str, int] = {}  # device -> rows compared when that was last logged


class KernelDiffers(RuntimeError):
    """An attention kernel of this device does not do what the merge of the ranks builds on. Raised at the start."""


class SelectionDiffers(RuntimeError):
    """The ranks of a DCP group did not select the same tokens for some row."""


def try_kernels(backend: Any, natural: Mapping[str, bool]) -> None:
    """Run each attention kernel of ``backend`` that this process has not run yet, and compare with plain sums.

    Args:
        backend: a new ``DeepseekSparseAttnBackend``.
        natural: for each kernel, whether its LSE is a natural logarithm.

    Raises:
        KernelDiffers: an output is off, a row without keys is not empty, or the LSE has another base than ``natural``.
    """
    for kernel in (backend.dsa_decode_impl, backend.dsa_prefill_impl):
        if kernel not in _tried:
            base = _try(backend, kernel)
            if base != natural[kernel]:
                raise KernelDiffers(f"{kernel}: its LSE is {_word(base)}, but is to be merged as {_word(not base)}")
            logger.info("%s: LSE is %s, as expected", kernel, _word(base))
            _tried.add(kernel)


def _word(natural: bool) -> str:
    return "a natural logarithm" if natural else "a logarithm of base 2"


def _try(backend: Any, kernel: str) -> bool:
    """Run ``kernel`` on ``D + 1`` rows and tell whether its LSE is natural.

    Row ``r`` names slots of rank ``r`` alone, the last row some of every rank. Its scores are peaked and the ranks
    have unequal shares. The names stand between holes.
    """
    import torch

    parallel = get_parallel()
    rank, size = parallel.attn_dcp_rank, parallel.attn_dcp_size
    random = torch.Generator().manual_seed(7)
    rows = backend.real_page_size
    # Small whole numbers: exact in bf16, and in fp8 with a scale of 1.
    keys = torch.randint(-2, 3, (rows, LATENT + ROPE), generator=random).float()
    heads = backend.num_q_heads
    queries = torch.randint(-2, 3, (size + 1, heads, LATENT + ROPE), generator=random).float()
    scale = 2.0**-5
    lists = [[owner + size * row for row in range(KEYS)] for owner in range(size)]
    lists.append([owner + size * row for owner in range(size) for row in range(KEYS // (owner + 1))])
    slots = torch.full((size + 1, backend.dsa_index_topk), -1, dtype=torch.int32)
    for number, named in enumerate(lists):
        slots[number, 1 : 1 + 2 * len(named) : 2] = torch.tensor(named, dtype=torch.int32)
    device = torch.device(backend.device)
    out, lse = _run(backend, kernel, queries.to(device, torch.bfloat16), _cache(backend, keys), slots.to(device), scale)
    out, lse = out.float().cpu(), lse.float().cpu()
    bases = set()
    for number, named in enumerate(lists):
        own = [slot // size for slot in named if slot % size == rank]
        if not own:
            # Merged with weight 0, which no NaN survives.
            empty = bool((lse[number].isinf() | (lse[number] < -1e29)).all() and out[number].isfinite().all())
            if not empty:
                raise KernelDiffers(f"{kernel}: a row without keys on this rank has an LSE of {lse[number].tolist()}")
            continue
        scores = queries[number] @ keys[own].T * scale
        error = (out[number] - torch.softmax(scores, -1) @ keys[own, :LATENT]).abs().max().item()
        if not error < TOLERANCE:
            raise KernelDiffers(f"{kernel}: output {error:.3g} away from the sum over the keys that this rank owns")
        expected = torch.logsumexp(scores, -1)
        bases |= {
            base
            for base, unit in ((True, 1.0), (False, math.log(2.0)))
            if (lse[number] - expected / unit).abs().max().item() < TOLERANCE
        }
    if len(bases) != 1:
        raise KernelDiffers(f"{kernel}: its LSE is neither a natural logarithm nor one of base 2")
    return bases.pop()


def _run(backend: Any, kernel: str, queries: Tensor, cache: Tensor, slots: Tensor, scale: float) -> tuple[Any, Any]:
    """Call ``kernel`` as the backend does: (out ``[rows, heads, 512]``, LSE ``[rows, heads]``)."""
    import torch

    lengths = torch.full((slots.shape[0],), slots.shape[1], dtype=torch.int32, device=slots.device)
    given: dict[str, Any] = {"q_all": queries, "kv_cache": cache, "page_table_1": slots, "sm_scale": scale}
    if kernel == "flashmla_sparse":
        result = backend._forward_flashmla_sparse(**given, v_head_dim=LATENT, topk_length=lengths)
    elif kernel == "flashmla_kv":
        result = backend._forward_flashmla_kv(
            **given,
            v_head_dim=LATENT,
            layer=SimpleNamespace(tp_q_head_num=queries.shape[1], head_dim=LATENT + ROPE),
            metadata=SimpleNamespace(
                dsa_cache_seqlens_int32=lengths, flashmla_metadata=backend._compute_flashmla_metadata(lengths, 1)
            ),
        )
    else:
        result = backend._forward_flashinfer_sparse_mla(
            **given, seq_lens=lengths, skip_softmax_threshold_scale_factor=None
        )
    if not isinstance(result, tuple):
        raise KernelDiffers(f"{kernel}: no LSE beside its output")
    out, lse = result
    return out, lse


def _cache(backend: Any, keys: Tensor) -> Tensor:
    """Lay out whole-number keys ``[rows, 576]`` as the pool stores its rows, on the backend's device."""
    import torch

    if not backend.dsa_kv_cache_store_fp8:
        return keys.to(torch.bfloat16)[:, None].to(backend.device)
    parts = (
        keys[:, :LATENT].to(torch.float8_e4m3fn),
        torch.ones(keys.shape[0], LATENT // 128),
        keys[:, LATENT:].to(torch.bfloat16),
    )
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
    return rows.view(torch.float8_e4m3fn)[:, None].to(backend.device)


def digest(slots: Tensor) -> Tensor:
    """Hash each row of ``slots`` ``[rows, selected]`` to an int64, whatever the order of its entries."""
    mixed = (slots.long() + 2) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 29)) * 0x1B873593CC9E2D51
    hashed: Tensor = (mixed ^ (mixed >> 32)).sum(-1)
    return hashed


def compare(slots: Tensor, group: Any) -> None:
    """Compare a selection with those of the other ranks of ``group``.

    Counts on the device, so that it can be captured in a CUDA graph; outside of a capture it reads the count, and so
    tells what a replay before it has found. Costs one small collective a call, and a wait for the device.

    Raises:
        SelectionDiffers: some row so far differed. Every rank raises, since every rank compares all.
    """
    import torch

    mine = digest(slots)
    all_ranks = group.all_gather(mine, dim=0).view(group.world_size, -1)
    key = str(slots.device)
    if key not in _told:
        _told[key] = torch.zeros(2, dtype=torch.int64, device=slots.device)
    differing = (all_ranks != all_ranks[:1]).any(0).sum()
    _told[key] += torch.stack([torch.full_like(differing, mine.numel()), differing])
    if slots.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    rows, differed = _told[key].tolist()
    if differed:
        raise SelectionDiffers(f"{differed} of {rows} rows were selected differently by the ranks of a DCP group")
    if rows >= 2 * _logged.get(key, 0):
        logger.info("%s: %d rows compared across the ranks, none differed", SWITCH, rows)
        _logged[key] = rows


def compared() -> dict[str, list[int]]:
    """For each device ``[rows compared, rows that differed]`` so far."""
    return {key: told.tolist() for key, told in _told.items()}
