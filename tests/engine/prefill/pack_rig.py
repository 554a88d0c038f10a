"""The prefill tree's real sender and worker on host memory: only streams, sockets and the RDMA engine are ours.

What the tests judge is never in here. `send_kvcache_dcp`, `transfer_worker`, the planner, the packing and the gather
kernel (in Triton's interpreter) are the tree's own files, stock and patched side by side.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch

from tests.engine.load import Anything, load, modules, stub

SRT = "sglang.srt"
PD = f"{SRT}.disaggregation"
GATE = "SGLANG_RESEARCH_DCP_BOUNDED_PACK"
PEER = "127.0.0.1:1"
CANARY = 0xA5
FENCE = 96


class _Off:
    """An environment object in which every switch is off."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(get=lambda: False)


class _Address:
    def __init__(self, host: str, port: int) -> None:
        self.name, self.is_ipv6 = f"{host}:{port}", False

    def to_tcp(self) -> str:
        return f"tcp://{self.name}"

    def to_host_port_str(self) -> str:
        return self.name


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Metric:
    """Stands for prometheus_client.Counter."""

    made: ClassVar[dict[str, Metric]] = {}

    def __init__(self, name: str, text: str) -> None:
        self.value, self.text = 0, text
        Metric.made[name] = self

    def inc(self, amount: int = 1) -> None:
        self.value += amount


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _surroundings() -> dict[str, ModuleType]:
    names = ["zmq", "requests", "aiohttp", f"{SRT}.configs.model_config", f"{SRT}.distributed.parallel_state"]
    names += [f"{SRT}.distributed", f"{SRT}.layers.dp_attention", f"{SRT}.runtime_context", f"{SRT}.server_args"]
    names += [f"{SRT}.observability.mooncake_trace", f"{PD}.mooncake.utils"]
    known: dict[str, ModuleType] = {name: Anything(name) for name in names}
    known["prometheus_client"] = stub("prometheus_client", Counter=Metric)
    known[f"{SRT}.environ"] = stub(f"{SRT}.environ", envs=_Off())
    known[f"{SRT}.utils"] = stub(f"{SRT}.utils", is_hip=lambda: False, is_npu=lambda: False)
    network = {"get_local_ip_auto": _nothing, "get_zmq_socket_on_host": _nothing}
    known[f"{SRT}.utils.network"] = stub(f"{SRT}.utils.network", NetworkAddress=_Address, **network)
    vars(known[f"{SRT}.observability.mooncake_trace"])["mooncake_trace_func"] = lambda stage: lambda function: function
    trace = {"TraceNullContext": SimpleNamespace, "TraceReqContext": SimpleNamespace, "trace_set_thread_info": _nothing}
    known[f"{SRT}.observability.trace"] = stub(f"{SRT}.observability.trace", **trace)
    parallel = SimpleNamespace(enable_dsa_cache_layer_split=False)
    vars(known[f"{SRT}.runtime_context"])["get_parallel"] = lambda: parallel
    return known


class Tree:
    """The sender's files of one engine tree, loaded with the gate unset (None) or set to ``gate``.

    ``gates`` are those of other patches.
    """

    def __init__(self, root: Path, gate: str | None = None, gates: Mapping[str, str] | None = None) -> None:
        self.root = root
        self._known = _surroundings()
        environment = {name: text for name, text in os.environ.items() if not name.startswith("SGLANG_RESEARCH_")}
        environment |= {"TRITON_INTERPRET": "1", **(gates or {})}
        if gate is not None:
            environment[GATE] = gate
        with mock.patch.dict(os.environ, environment, clear=True):
            self.pack: Any = None
            research = root / "sglang/srt/research"
            if research.is_dir():
                # A real path, so that the other patches of the series find their own modules too.
                self._known[f"{SRT}.research"] = stub(f"{SRT}.research", __path__=[str(research)])
                self._load("sglang/srt/research/gates.py")
                self.pack = self._load("sglang/srt/research/bounded_pack.py")
                self._load("sglang/srt/research/cp_topology.py")
                self._load("sglang/srt/research/narrow_topology.py")
                self.narrow = self._load("sglang/srt/research/pcp4_dcp2.py")
                self.preload = self._load("sglang/srt/research/gather_preload.py")
            base = self._load("sglang/srt/disaggregation/base/conn.py")
            self.poll = base.KVPoll
            self._known[f"{PD}.base"] = stub(f"{PD}.base", KVPoll=self.poll, __path__=[])
            self.utils = self._load("sglang/srt/disaggregation/common/utils.py")
            self.gather = self._load("sglang/kernels/ops/kvcache/pd_dcp_gather.py")
            self.staging = self._load("sglang/srt/disaggregation/common/staging_buffer.py")
            self.dcp_pack = self._load("sglang/srt/disaggregation/common/dcp_pack.py")
            self._load("sglang/srt/disaggregation/utils.py")
            self._load("sglang/srt/disaggregation/common/staging_handler.py")
            self._load("sglang/srt/disaggregation/common/conn.py")
            self.conn = self._load("sglang/srt/disaggregation/mooncake/conn.py")

    def fresh(self, path: str, stubs: Mapping[str, ModuleType]) -> Any:
        """Load one more file of the tree, its imports answered by ``stubs`` before all that is loaded already."""
        module = load(self.root, path, {**self._known, **stubs})
        self._adopt()
        return module

    def _load(self, path: str) -> Any:
        name = path.removesuffix(".py").replace("/", ".")
        self._known[name] = module = self.fresh(path, {})
        parent, _, last = name.rpartition(".")
        if parent in self._known:
            setattr(self._known[parent], last, module)
        return module

    def _adopt(self) -> None:
        """Keep modules of ours that an import has found by itself with this tree, out of other trees' sight."""
        for name in [name for name in sys.modules if name.startswith(f"{SRT}.research.")]:
            self._known[name] = sys.modules.pop(name)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Answer the imports that the tree's functions make when they run, and stand in for the gather's stream."""
        with (
            modules(self._known),
            mock.patch.dict(os.environ, TRITON_INTERPRET="1"),
            mock.patch("torch.cuda.default_stream", return_value=_Stream()),
            mock.patch("torch.cuda.stream", return_value=contextlib.nullcontext()),
        ):
            yield
        self._adopt()

    def buffer(self, size: int) -> Any:
        """Make the tree's own StagingBuffer of ``size`` bytes on host memory, between two fences of canary bytes."""
        made = object.__new__(self.staging.StagingBuffer)
        made.fenced = torch.full((size + 2 * FENCE,), CANARY, dtype=torch.uint8)
        made.buffer = made.fenced.narrow(0, FENCE, size)
        made.size_bytes, made.data_ptr, made.device, made.gpu_id = size, made.buffer.data_ptr(), "cpu", 0
        made._gather_stream = _Stream()
        return made

    def manager(self, world: World, engine: Engine, *, custom_pool: bool = False, drain: bool = False) -> Any:
        """Make the tree's own MooncakeKVManager without its start-up: no sockets, no threads, ``engine`` for RDMA."""
        made = self.conn.MooncakeKVManager.__new__(self.conn.MooncakeKVManager)
        made.engine = engine
        made.kv_args = SimpleNamespace(
            page_size=world.page,
            kv_layer_ids=[],
            kv_data_ptrs=[pool.data_ptr() for pool in world.source],
            prefill_start_layer=0,
            aux_data_ptrs=[world.aux_source.data_ptr()],
            aux_item_lens=[world.aux_source.numel()],
        )
        made.is_mla_backend, made.is_hybrid_mla_backend = True, False
        made.enable_custom_mem_pool, made.custom_mem_pool_type = custom_pool, None
        made.enable_deferred_decode_kv_release = drain
        made.enable_trace = made.enable_staging = False
        made.attn_tp_rank = made.attn_dp_rank = made.attn_cp_rank = made.pp_rank = 0
        made.attn_tp_size = made.attn_cp_size = made.pp_size = 1
        made.bootstrap_port = 0
        made.request_status, made.transfer_infos, made.decode_kv_args_table = {}, {}, {}
        made.failure_records, made.failure_lock = {}, threading.Lock()
        made.failed_sessions, made.session_failures, made.session_lock = set(), defaultdict(int), threading.Lock()
        made._staging_outstanding, made._deferred_ack_targets = defaultdict(int), {}
        made.req_to_decode_prefix_len, made._dcp_pack_buffers = {}, None
        made.told = []
        made._send_multipart_locked = lambda where, frames, is_ipv6=False: made.told.append((where, frames))
        return made

    def send(self, manager: Any, world: World, plan: Plan, buffer: Any, *, peer: str = PEER) -> int:
        """Call the tree's send_kvcache_dcp as its worker does."""
        with self.active():
            status: int = manager.send_kvcache_dcp(
                peer,
                plan.source_pages,
                [pool.data_ptr() for pool in world.target],
                plan.target_pages,
                dcp_token_item_lens=list(world.lens),
                dst_dcp_size=plan.dcp,
                dst_dcp_rank=plan.rank,
                src_page_offset=plan.offset,
                decode_prefix_len=plan.prefix,
                num_kv_tokens=plan.tokens,
                executor=world.executor,
                dst_layer_ids=[],
                pack_buffer=buffer,
            )
        return status

    def enlist(self, manager: Any, world: World, room: int, plan: Plan, peer: str = PEER) -> None:
        """Let decode rank ``peer`` wait for ``room``, as its two registration messages would."""
        manager.request_status[room] = self.poll.WaitingForInput
        manager.decode_kv_args_table[peer] = self.conn.KVArgsRegisterInfo(
            room="None",
            endpoint="127.0.0.1",
            dst_port=int(peer.rpartition(":")[2]),
            mooncake_session_id=peer,
            dst_kv_ptrs=[pool.data_ptr() for pool in world.target],
            dst_aux_ptrs=[world.aux_target.data_ptr()],
            dst_state_data_ptrs=[],
            dst_tp_rank=0,
            dst_attn_tp_size=1,
            dst_kv_item_len=world.lens[0] * world.page,
            dst_state_item_lens=[],
            dst_state_dim_per_tensor=[],
            dst_kv_layer_ids=[],
            dst_state_layer_ids=[],
            dst_dcp_size=plan.dcp,
            dst_dcp_rank=plan.rank,
            requires_dcp_relayout=True,
            dcp_token_item_lens=list(world.lens),
        )
        manager.transfer_infos.setdefault(room, {})[peer] = self.conn.TransferInfo(
            room=room,
            endpoint="127.0.0.1",
            dst_port=int(peer.rpartition(":")[2]),
            mooncake_session_id=peer,
            dst_kv_indices=plan.target_pages,
            dst_aux_index=0,
            dst_state_indices=[],
            required_dst_info_num=1,
            is_dummy=False,
            decode_prefix_len=plan.prefix,
        )

    def chunk(self, room: int, plan: Plan, *, last: bool = True) -> Any:
        """Make the work unit that the scheduler would queue for ``plan``."""
        return self.utils.TransferKVChunk(
            room=room,
            prefill_kv_indices=plan.source_pages,
            index_slice=slice(plan.offset, plan.offset + len(plan.source_pages)),
            is_last_chunk=last,
            prefill_aux_index=0,
            state_indices=None,
            num_kv_tokens=plan.tokens,
        )

    def work(self, manager: Any, world: World, chunks: Sequence[Any], worker: int = 0) -> None:
        """Run the tree's transfer_worker over ``chunks``; an exception that would end its thread comes out here."""

        class Done(BaseException):
            pass

        waiting = list(chunks)

        def get() -> Any:
            if not waiting:
                raise Done
            return waiting.pop(0)

        with self.active(), contextlib.suppress(Done):
            manager.transfer_worker(SimpleNamespace(get=get), world.executor, None, worker)


@dataclass
class Plan:
    """One send: which pages hold the tokens here and there, and which decode rank asks."""

    source_pages: np.ndarray[Any, Any]
    target_pages: np.ndarray[Any, Any]
    tokens: int
    dcp: int = 2
    rank: int = 0
    offset: int = 0
    prefix: int = 0

    def pairs(self, page: int) -> list[tuple[int, int]]:
        """Say token by token which row goes where: (source row, target row). The tests' oracle."""
        found = []
        for token in range(self.tokens):
            position = self.offset * page + token
            if (self.prefix + position) % self.dcp != self.rank:
                continue
            local = position // self.dcp
            source = int(self.source_pages[token // page]) * page + token % page
            found.append((source, int(self.target_pages[local // page]) * page + local % page))
        return found


@dataclass
class World:
    """The KV pools of both sides, one (rows, bytes) uint8 tensor a layer, and one worker's threads."""

    lens: Sequence[int] = (24, 24, 24)
    page: int = 8
    pages: int = 64
    seed: int = 0
    threads: int = 4
    source: list[torch.Tensor] = field(init=False)
    target: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        rows = self.pages * self.page
        self.source = [torch.randint(1, 256, (rows, n), dtype=torch.uint8, generator=random) for n in self.lens]
        self.target = [torch.zeros((rows, n), dtype=torch.uint8) for n in self.lens]
        self.aux_source, self.aux_target = torch.full((16,), 7, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
        self.executor = ThreadPoolExecutor(self.threads)
        self.numbers = np.random.default_rng(self.seed)

    @property
    def row(self) -> int:
        """Bytes of one row in all layers."""
        return sum(self.lens)

    def plan(self, tokens: int, *, dcp: int = 2, rank: int = 0, offset: int = 0, prefix: int = 0) -> Plan:
        """Draw a send of ``tokens`` tokens whose pages are permuted on both sides."""
        count = -(-tokens // self.page)
        reach = -(-(offset * self.page + tokens) // (self.page * dcp)) + 1
        source = self.numbers.permutation(self.pages)[:count].astype(np.int32)
        target = self.numbers.permutation(self.pages)[:reach].astype(np.int32)
        return Plan(source, target, tokens, dcp, rank, offset, prefix)

    def clear(self) -> None:
        """Forget what has arrived."""
        for pool in (*self.target, self.aux_target):
            pool.zero_()

    def expected(self, *plans: Plan, rows: int | None = None) -> list[torch.Tensor]:
        """Give the target pools as they must be after ``plans`` (of each only its first ``rows`` rows)."""
        made = [torch.zeros_like(pool) for pool in self.target]
        for plan in plans:
            for source, target in plan.pairs(self.page)[:rows]:
                for old, new in zip(self.source, made, strict=True):
                    new[target] = old[source]
        return made

    def arrived(self, *plans: Plan, rows: int | None = None) -> bool:
        """Tell whether exactly the rows of ``plans`` have arrived, byte for byte, and no other byte has changed."""
        return all(
            torch.equal(old, new) for old, new in zip(self.expected(*plans, rows=rows), self.target, strict=True)
        )


Block = tuple[int, int, int]


class Engine:
    """Copies blocks within this process in place of Mooncake; ``act(index)`` may wait, raise or return a bad status.

    A call counts as torn when a byte that it was given changed between its start and its end.
    """

    def __init__(self, act: Callable[[int], int | None] | None = None) -> None:
        self.calls: list[tuple[str, list[Block]]] = []
        self.torn: list[int] = []
        self.running = self.most_running = 0
        self.act = act
        self._lock = threading.Lock()

    @property
    def blocks(self) -> list[Block]:
        """All blocks of all calls, in the order of the calls."""
        return [block for _, blocks in self.calls for block in blocks]

    def batch_transfer_sync(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        with self._lock:
            index = len(self.calls)
            blocks = list(zip(sources, targets, lengths, strict=True))
            self.calls.append((session, blocks))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            before = [ctypes.string_at(source, length) for source, _, length in blocks]
            status = self.act(index) if self.act else None
            if before != [ctypes.string_at(source, length) for source, _, length in blocks]:
                self.torn.append(index)
            if status:
                return status
            for source, target, length in blocks:
                ctypes.memmove(target, source, length)
            return 0
        finally:
            with self._lock:
                self.running -= 1

    def reads(self, buffer: Any, since: int = 0) -> bool:
        """Tell whether a call from number ``since`` on reads ``buffer``."""
        low, high = buffer.get_ptr(), buffer.get_ptr() + buffer.get_size()
        return any(low <= source < high for _, blocks in self.calls[since:] for source, _, _ in blocks)


def intact(buffer: Any) -> bool:
    """Tell whether the canaries on both sides of the buffer are untouched."""
    fences = torch.cat([buffer.fenced[:FENCE], buffer.fenced[-FENCE:]])
    return bool((fences == CANARY).all())
