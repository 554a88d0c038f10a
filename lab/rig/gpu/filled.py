"""Runs inside a decode engine that stands without a prefill: gives its pools seeded rows for a prompt's KV.

With ``--disaggregation-transfer-backend=fake``, the engine's own, a request's KV counts as brought at once, and its
rows hold whatever the pool holds: zeros in a fresh engine, so that no row tells from another. Here every row of every
layer is drawn from a seed when a pool is made. A text then depends on the rows of its slots, and a retraction that
brings back others changes it. Index keys are the same on every rank; latent rows differ, so this is for ranks that hold
different ones. No prompt is computed: what is shown is that an engine keeps its rows, not that a text is right.

The engine lets a decode half with DCP start with two transfer libraries alone, since others know no rows of several
ranks. Nothing is transferred here, so that one condition is not asked; every other one is.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from lab.rig.standins import hook

SEED = 17
# Of an 8-bit row: a float32 scale for so many entries behind them, then the rotated part in bfloat16.
TILE = 128
# An index page: so many keys of so many 8-bit entries, then a float32 scale for each key.
PAGE, KEY = 64, 128


def latent(buffer: Any, width: int, generator: Any) -> None:
    """Fill rows of a latent pool, ``[rows, 1, width + rotated]`` in floats or the engine's 8-bit row."""
    import torch

    if buffer.element_size() > 1:
        buffer.normal_(generator=generator)
        return
    raw = buffer.view(torch.uint8)
    scales = width // TILE * 4

    def drawn(entries: int, dtype: torch.dtype) -> Any:
        made = torch.randn(len(raw), 1, entries, generator=generator, device=raw.device)
        return made.to(dtype).view(torch.uint8)

    raw[..., :width] = drawn(width, torch.float8_e4m3fn)
    raw[..., width : width + scales] = torch.ones(1, 1, scales // 4, device=raw.device).view(torch.uint8)
    raw[..., width + scales :] = drawn((raw.shape[-1] - width - scales) // 2, torch.bfloat16)


def index(buffer: Any, generator: Any) -> None:
    """Fill pages of index keys, uint8 ``[pages, 64 * (128 + 4)]``."""
    import torch

    pages = len(buffer)
    keys = torch.randn(pages, PAGE * KEY, generator=generator, device=buffer.device).to(torch.float8_e4m3fn)
    scales = 0.5 + torch.rand(pages, PAGE, generator=generator, device=buffer.device)
    buffer[:, : PAGE * KEY] = keys.view(torch.uint8)
    buffer[:, PAGE * KEY :] = scales.view(torch.uint8)


def fill(pool: Any, rank: int) -> None:
    """Fill a pool of latent rows, and its index keys where it has them."""
    import torch

    def generator(seed: int) -> Any:
        return torch.Generator(device=pool.kv_buffer[0].device).manual_seed(seed)

    rows, keys = generator(SEED + 1 + rank), generator(SEED)
    for buffer in pool.kv_buffer:
        latent(buffer, pool.kv_lora_rank, rows)
    for buffer in getattr(pool, "index_k_with_scale_buffer", ()):
        index(buffer, keys)


@hook.after("sglang.srt.mem_cache.memory_pool")
def _fill_when_made(module: ModuleType) -> None:
    pool: Any = module.MLATokenToKVPool
    # The last thing that a pool of either kind does when it is made; a DSA pool has its index keys by then.
    told = pool._finalize_allocation_log

    def finalize(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        fill(self, torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        return told(self, *args, **kwargs)

    pool._finalize_allocation_log = finalize


@hook.after("sglang.srt.disaggregation.decode")
def _come_from_nowhere(module: ModuleType) -> None:
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST as nowhere

    queue: Any = module.DecodePreallocQueue
    add = queue.add

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        # The sender of the engine's own warm-up, which brings nothing.
        request.bootstrap_host = nowhere
        return add(self, request, *args, **kwargs)

    queue.add = add_request


@hook.after("sglang.srt.arg_groups.pd_disaggregation_hook")
def _start_without_a_library(module: ModuleType) -> None:
    check = module.handle_pd_disaggregation

    def handle_pd_disaggregation(args: Any) -> None:
        args.disaggregation_transfer_backend = "nixl"
        try:
            check(args)
        finally:
            args.disaggregation_transfer_backend = "fake"

    vars(module)["handle_pd_disaggregation"] = handle_pd_disaggregation


hook.install()
