"""A target's and a draft's pool with the allocator of both, and one request that is retracted and comes back.

Pools, allocators, requests and the gate's own module are the tree's. On a CPU for the tests, on a GPU for
``benchmarks/decode_gpu.py``.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from tests.engine.decode.node import Settings
from tests.engine.decode.world import World

PAGE = 64


ARGUMENTS = (
    "dcp_size",
    "disaggregation_decode_enable_offload_kvcache",
    "enable_hierarchical_cache",
    "speculative_eagle_topk",
)


def buffers(pool: Any) -> list[torch.Tensor]:
    return [*pool.kv_buffer, *getattr(pool, "index_k_with_scale_buffer", [])]


def scribble(pool: Any, seed: int) -> None:
    """Fill a pool with bytes that are others in every row."""
    for number, buffer in enumerate(buffers(pool)):
        random = torch.Generator(buffer.device).manual_seed(100 * seed + number)
        view = buffer.view(torch.uint8)
        view.copy_(torch.randint(0, 255, view.shape, generator=random, dtype=torch.uint8, device=buffer.device))


class Pair:
    """A target's and a draft's pool of one rank, the allocator of both, and one request."""

    def __init__(
        self,
        world: World,
        kind: str,
        *,
        ranks: int = 1,
        rank: int = 0,
        tokens: int = 151,
        layers: int = 3,
        pages: int = 8,
        widths: tuple[int, int] = (12, 4),
        device: str = "cpu",
    ) -> None:
        self.world, self.kind, self.ranks, self.rank = world, kind, ranks, rank
        self.widths, self.device = widths, device
        self.tokens, self.wide = tokens, PAGE * ranks
        self._stack = ExitStack()
        self.memory = world.module("mem_cache.memory_pool")
        allocators = world.module("mem_cache.allocator.paged")
        parallel = world.module("runtime_context").get_parallel()
        forced = {"dcp_enabled": ranks > 1, "dcp_size": ranks, "dcp_rank": rank}
        self._stack.enter_context(parallel.override(**forced, attn_dcp_size=ranks, attn_dcp_rank=rank))
        rows = pages * PAGE
        # A DSA pool gets index pages, and a DSA draft rows, for all slots of the group, as dsa-dcp would make them.
        more = PAGE * (ranks - 1) if kind != "mla" else 0
        self.raw_draft = bool(more)
        self.target = self.pool(rows, layers, span=rows * ranks + more if more else None)
        self.draft = self.pool(rows * ranks + more, 1, self.wide)  # the engine sizes a draft for all slots of the group
        if more and (world.root / "sglang/srt/research/retract.py").is_file():
            world.module("research.retract").declare(self.draft, latent="raw", index="replicated")
        self.allocator = allocators.PagedTokenToKVPoolAllocator(
            rows * ranks, self.wide, torch.float32, device, self.target, True
        )
        self.table = self.memory.ReqToTokenPool(4, 2 * rows * ranks, device, False)
        self.batching = world.module("managers.schedule_batch")
        self.request = Settings(rid="r", req_pool_idx=1, seqlen=tokens + 1, mamba_pool_idx=None, to_finish=None)
        self.scheduler = scheduler(allocator=self.allocator, dcp_size=ranks, world=world)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *args: object) -> None:
        self._stack.close()

    def pool(self, size: int, layers: int, page: int = PAGE, span: int | None = None) -> Any:
        latent, rope = self.widths
        if self.kind == "mla":
            dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
            return self.memory.MLATokenToKVPool(size, page, dtype, latent, rope, layers, self.device, False)
        dtype, width = (torch.float8_e4m3fn, 656) if self.kind == "dsa fp8" else (torch.bfloat16, latent + rope)
        return self.memory.DSATokenToKVPool(
            size, PAGE, latent, dtype, rope, layers, self.device, 128, False, width, index_buf_size=span
        )

    def take(self, pages: list[int]) -> torch.Tensor:
        """Give the request these pages of the allocator; returns the slots of its tokens."""
        slots = torch.cat([torch.arange(page * self.wide, (page + 1) * self.wide) for page in pages])
        self.table.req_to_token[1, : len(slots)] = slots.to(torch.int32)
        return slots[: self.tokens].to(self.device)

    def read(self, pool: Any, slots: torch.Tensor) -> list[torch.Tensor]:
        """The request's bytes: its rows on this rank, and whole pages of the index up to the last token's page."""
        raw = self.raw_draft and pool is self.draft
        own = slots if raw else slots[slots % self.ranks == self.rank] // self.ranks
        found = [buffer.view(torch.uint8)[own].clone() for buffer in pool.kv_buffer]
        pages = slots[::PAGE] // PAGE
        return found + [buffer[pages].clone() for buffer in getattr(pool, "index_k_with_scale_buffer", [])]

    def offload(self) -> None:
        self.batching.Req.offload_kv_cache(self.request, self.table, self.allocator)

    def load(self) -> None:
        self.batching.Req.load_kv_cache(self.request, self.table, self.allocator)

    def trip(self, before: list[int], after: list[int]) -> dict[str, list[bool]]:
        """Retract, let others write everywhere, resume; says for each pool which of its buffers came back."""
        slots = self.take(before)
        for seed, pool in enumerate((self.target, self.draft)):
            scribble(pool, seed)
        then = {"target": self.read(self.target, slots), "draft": self.read(self.draft, slots)}
        self.offload()
        for seed, pool in enumerate((self.target, self.draft)):
            scribble(pool, 10 + seed)
        slots = self.take(after)
        self.load()
        now = {"target": self.read(self.target, slots), "draft": self.read(self.draft, slots)}
        return {name: [torch.equal(a, b) for a, b in zip(now[name], then[name], strict=True)] for name in now}


def scheduler(*, allocator: Any, world: World, dcp_size: int = 1, **changes: Any) -> Any:
    """What the gate looks at; the worker is an object of the engine's own class."""
    arguments = Settings(speculative_eagle_topk=1, dcp_size=dcp_size)
    worker = world.module("speculative.eagle_worker_v2").EagleDraftWorker
    one = Settings(
        server_args=arguments,
        token_to_kv_pool_allocator=allocator,
        disaggregation_mode=SimpleNamespace(value="decode"),
        draft_worker=SimpleNamespace(draft_worker=object.__new__(worker)),
        result_queue=[],
    )
    for name, value in changes.items():
        setattr(arguments if name in ARGUMENTS else one, name, value)
    return one
