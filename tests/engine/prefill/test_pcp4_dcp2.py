"""pcp4-dcp2, prefill's half: CP rank 0 of four alone sends, to two decode ranks; the rest is refused and kills nobody.

The tree's own managers, senders and workers run on host memory; see pack_rig.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.engine.prefill.cp_rig import TOPOLOGY, Journal, parallel_state
from tests.engine.prefill.cp_rig import Tree as Layers
from tests.engine.prefill.pack_rig import PEER, Engine, Plan, Tree, World
from tests.engine.prefill.test_cp4_attention_tp2 import ALL_CP, BAD, start

Root = Callable[[str], Path]
NARROW = "SGLANG_RESEARCH_PCP4_DCP2"
PLAIN = (int, bool, str, type(None))
MARK = "X-Research-PCP4-DCP2"


@pytest.fixture(scope="module")
def base(stock: Root) -> Tree:
    return Tree(stock("prefill"))


@pytest.fixture(scope="module")
def off(patched: Root) -> Tree:
    return Tree(patched("prefill"))


@pytest.fixture(scope="module")
def on(patched: Root) -> Tree:
    return Tree(patched("prefill"), gates={TOPOLOGY: "1", NARROW: "1"})


# --- which topologies ---------------------------------------------------------------------------------------------


def construct(tree: Tree, cp: int = 4, layer_split: bool = False, all_cp: bool = False, **changed: Any) -> Any:
    """Run the tree's own constructor of the manager's common part up to its sockets, as a prefill."""

    class Reached(Exception):
        pass

    conn: Any = tree._known["sglang.srt.disaggregation.common.conn"]
    made = tree.conn.MooncakeKVManager.__new__(tree.conn.MooncakeKVManager)
    prefill = tree._known["sglang.srt.disaggregation.utils"].DisaggregationMode.PREFILL
    args = SimpleNamespace(
        kv_cache_dtype_str="auto", kv_item_lens=[1], state_item_lens=[], system_dp_rank=0, pp_rank=0,
        is_hybrid_mla_backend=changed.pop("is_hybrid_mla_backend", False),
    )  # fmt: skip
    parallel = parallel_state(0, Journal(), enable_dsa_cache_layer_split=layer_split, dist_init_addr=None)
    vars(parallel).update(attn_cp_size=cp, attn_dcp_size=1, attn_dcp_rank=0, enable_dp_attention=True, dp_size=1)
    vars(parallel).update(pp_size=1)
    mla, dp = changed.pop("is_mla_backend", True), changed.pop("attn_dp_size", 1)
    vars(parallel).update({"attn_dcp_size" if name == "dcp_size" else name: value for name, value in changed.items()})
    switch = SimpleNamespace(get=lambda: all_cp)
    envs = SimpleNamespace(**{ALL_CP: switch, "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": switch})
    with (
        tree.active(),
        mock.patch.multiple(
            conn,
            get_parallel=lambda: parallel,
            envs=envs,
            get_attention_dp_size=lambda: dp,
            get_attention_dp_rank=lambda: 0,
            zmq=SimpleNamespace(Context=mock.Mock(side_effect=Reached)),
        ),
        pytest.raises(Reached),
    ):
        conn.CommonKVManager.__init__(made, args, prefill, None, mla)
    return made


@pytest.mark.parametrize("all_cp", [False, True], ids=["CP rank 0", "all CP ranks"])
@pytest.mark.parametrize("layer_split", [False, True], ids=["whole cache", "layer split"])
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_a_prefill_starts_with_the_gate_in_one_topology_with_cp_or_without_cp(
    base: Tree, off: Tree, on: Tree, cp: int, layer_split: bool, all_cp: bool
) -> None:
    stock, unset = (
        {name: value for name, value in vars(construct(tree, cp, layer_split, all_cp)).items() if type(value) in PLAIN}
        for tree in (base, off)
    )
    assert stock == unset and len(stock) > 15
    # Without CP there is no cache to split; that argument is looked at at the start.
    if not all_cp and (cp == 1 or (cp == 4 and not layer_split)):
        construct(on, cp, layer_split, all_cp)
    else:
        condition = "attn_cp_size must be 1 or 4" if cp in (2, 8) else "enable_all_cp_ranks_for_transfer must be False"
        with pytest.raises(ValueError, match=f"{NARROW} is set, but: {condition}"):
            construct(on, cp, layer_split, all_cp)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_tp_size", 1),
        ("attn_tp_size", 4),
        ("attn_dp_size", 2),
        ("pp_size", 2),
        ("dcp_size", 2),
        ("is_mla_backend", False),
        ("is_hybrid_mla_backend", True),
    ],
)
def test_another_size_or_pool_is_refused_when_the_manager_is_made(off: Tree, on: Tree, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{NARROW} is set, but: .*{name} must be"):
        construct(on, **{name: value})
    construct(off, **{name: value})


@pytest.mark.parametrize(("ranks", "starts"), [(1, True), (2, True), (4, False)])
def test_without_cp_a_prefill_of_one_or_two_attention_ranks_starts(on: Tree, ranks: int, starts: bool) -> None:
    if starts:
        construct(on, 1, attn_tp_size=ranks)
    else:
        with pytest.raises(ValueError, match=f"attn_tp_size must be 1 or 2, got {ranks}"):
            construct(on, 1, attn_tp_size=ranks)


@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("attn_tp", [1, 2])
def test_a_decode_rank_of_another_topology_is_refused_and_the_state_kept(
    base: Tree, off: Tree, on: Tree, dcp: int, rank: int, attn_tp: int
) -> None:
    world = World()
    manager, message = manager_of(on, world), registration(on, world, dcp, rank, attn_tp)
    registered = dict(manager.decode_kv_args_table)
    with on.active():
        refused = on.narrow.refuses(manager, message)
    assert refused == ((dcp, attn_tp) != (2, 2) or rank > 1)
    assert manager.decode_kv_args_table == registered
    assert not off.narrow.refuses(manager_of(off, world), message)


# Two layers' index keys, as one component: their addresses, and their bytes a page.
STATE: tuple[list[list[int]], list[list[int]]] = ([[4096, 8192]], [[8448, 8448]])


def manager_of(tree: Tree, world: World, cp_rank: int = 0, lane: int = 0, engine: Engine | None = None) -> Any:
    """A manager as one of eight prefill ranks has it."""
    made = tree.manager(world, engine or Engine())
    made.attn_cp_size, made.attn_tp_size, made.attn_cp_rank, made.attn_tp_rank = 4, 2, cp_rank, lane
    made.dcp_size, made.dcp_rank = 1, 0
    made.enable_all_cp_ranks_for_transfer, made.is_dummy_cp_rank = False, cp_rank != 0
    made.disaggregation_mode = tree._known["sglang.srt.disaggregation.utils"].DisaggregationMode.PREFILL
    made.kv_args.kv_item_lens = [length * world.page for length in world.lens]
    made.kv_args.state_data_ptrs, made.kv_args.state_item_lens = STATE
    made._dcp_pack_buffers = [tree.buffer(world.row * world.page * world.pages)]
    return made


def registration(tree: Tree, world: World, dcp: int = 2, rank: int = 0, attn_tp: int = 2, item: int = 0) -> Any:
    return SimpleNamespace(
        mooncake_session_id=PEER,
        dst_dcp_size=dcp,
        dst_dcp_rank=rank,
        dst_attn_tp_size=attn_tp,
        dst_kv_item_len=item or world.lens[0] * world.page,
        dst_kv_ptrs=[pool.data_ptr() for pool in world.target],
        dst_state_data_ptrs=STATE[0],
        dst_state_item_lens=STATE[1],
    )


# --- refused registrations ----------------------------------------------------------------------------------------


class _Closed(BaseException):
    """Ends the bootstrap thread's endless loop in a test."""


def receive(tree: Tree, manager: Any, messages: list[list[bytes]]) -> None:
    """Run the tree's own bootstrap thread over ``messages``; what would end it comes out here."""
    waiting = list(messages)

    def recv() -> list[bytes]:
        if not waiting:
            raise _Closed
        return waiting.pop(0)

    manager.server_socket = SimpleNamespace(recv_multipart=recv)
    started: list[Callable[[], None]] = []
    with tree.active(), mock.patch.object(tree.conn.threading, "Thread", lambda target: _Kept(target, started)):
        manager.start_prefill_thread()
        for target in started:
            with pytest.raises(_Closed):
                target()


class _Kept:
    def __init__(self, target: Callable[[], None], started: list[Callable[[], None]]) -> None:
        self.target, self.started = target, started

    def start(self) -> None:
        self.started.append(self.target)


def frames(
    tree: Tree,
    world: World,
    session: str,
    dcp: int,
    rank: int,
    item: int = 0,
    attn_tp: int = 2,
    layers: int = 0,
    state: tuple[list[list[int]], list[list[int]]] = STATE,
) -> list[bytes]:
    """A decode rank's registration as 0.5.17 sends it; ``layers`` more or fewer KV pointers than the prefill's."""
    pools = [pool.data_ptr() for pool in world.target]
    pools = pools[:layers] if layers < 0 else pools + [1 << 20] * layers
    pointers = np.array(pools, dtype=np.uint64).tobytes()
    return [
        b"None", b"127.0.0.1", b"1", session.encode(), pointers, np.array([1], dtype=np.uint64).tobytes(),
        tree.utils.pack_int_lists(state[0], "Q"),
        b"0", str(attn_tp).encode(), str(item or world.lens[0] * world.page).encode(),
        tree.utils.pack_int_lists(state[1], "I"), tree.utils.pack_int_lists([], "I"), b"", b"", b"", b"",
        str(dcp).encode(), str(rank).encode(),
    ]  # fmt: skip


BAD_PEERS: dict[str, tuple[dict[str, Any], str]] = {
    "without DCP": ({"dcp": 1}, "the peer's DCP size must be 2, got 1"),
    "four DCP ranks": ({"dcp": 4}, "the peer's DCP size must be 2, got 4"),
    "one attention rank": ({"attn_tp": 1}, "the peer's attention TP size must be 2, got 1"),
    "rows of another size": ({"item": 8}, "PD DCP source/destination KV geometry differs"),
    "a draft layer that is not here": ({"layers": 1}, r"KV layers, those of a draft among them must be (\d+), got"),
    "without the draft layer that is here": ({"layers": -1}, r"KV layers, those of a draft among them must be"),
    "an index key of another size": (
        {"state": ([[4096, 8192]], [[8448, 4352]])},
        r"bytes a page of each layer of state component 0 must be \[8448, 8448\], got \[8448, 4352\]",
    ),
    "an index of fewer layers": (
        {"state": ([[4096]], [[8448]])},
        r"state component 0 must be \[8448, 8448\], got \[8448\]; the peer's layers of state component 0 must be 2",
    ),
    "no index at all": ({"state": ([], [])}, "the peer's state components must be 1, got 0"),
    "a second state": (
        {"state": ([[4096, 8192], [1]], [[8448, 8448], [4]])},
        "the peer's state components must be 1, got 2",
    ),
}


@pytest.mark.parametrize("peer", BAD_PEERS)
def test_a_peer_that_does_not_fit_is_refused_by_name_and_the_next_one_is_registered(on: Tree, peer: str) -> None:
    world = World()
    manager = manager_of(on, world)
    changed, reason = BAD_PEERS[peer]
    bad = frames(on, world, "127.0.0.1:9", **{"dcp": 2, "rank": 0, **changed})
    receive(on, manager, [bad, frames(on, world, PEER, 2, 1)])
    assert set(manager.decode_kv_args_table) == {PEER}
    assert re.search(reason, on.narrow._state_of(manager).refused["127.0.0.1:9"])


@pytest.mark.parametrize(
    ("pointers", "sizes", "reason"),
    [
        ([[4096, 8192], [1 << 14]], [[8448, 8448], [256]], ""),
        ([[4096, 8192], [1 << 14]], [[8448, 8448], [128]], r"of state component 1 must be \[256\], got \[128\]"),
        ([[4096, 8192], [1, 2]], [[8448, 8448], [256]], "layers of state component 1 must be 1, got 2"),
    ],
)
def test_every_component_of_the_state_is_compared(
    on: Tree, pointers: list[list[int]], sizes: list[list[int]], reason: str
) -> None:
    world = World()
    manager = manager_of(on, world)
    manager.kv_args.state_data_ptrs = [[4096, 8192], [1 << 14]]
    manager.kv_args.state_item_lens = [[8448, 8448], [256]]
    receive(on, manager, [frames(on, world, PEER, 2, 0, state=(pointers, sizes))])
    assert (PEER in manager.decode_kv_args_table) == (not reason)
    assert re.search(reason, on.narrow._state_of(manager).refused.get(PEER, ""))


def test_a_dummy_request_of_a_refused_session_goes_the_stock_way(on: Tree) -> None:
    manager = manager_of(on, World())
    on.narrow._state_of(manager).refused[PEER] = "another draft"
    for dummy, away in ((True, False), (False, True)):
        request = SimpleNamespace(is_dummy=dummy, mooncake_session_id=PEER, room=1, endpoint="127.0.0.1", dst_port=1)
        manager.request_status[1] = on.poll.WaitingForInput
        with on.active():
            assert on.narrow.turned_away(manager, request, 0) is away


def test_a_failed_transfer_of_state_is_not_taken_for_one_of_another_length(on: Tree) -> None:
    manager = manager_of(on, World())
    for status in (0, -1, int(on.narrow.STATE_MISMATCH)):
        assert not on.narrow.state_refused(manager, status, SimpleNamespace(room=1), 0)


def test_stock_takes_a_peer_with_another_draft_or_index(base: Tree, off: Tree) -> None:
    for tree in (base, off):
        world = World()
        manager = manager_of(tree, world)
        others = [change for change, _ in BAD_PEERS.values() if "layers" in change or "state" in change]
        messages = [frames(tree, world, f"127.0.0.1:{port}", 2, 0, **change) for port, change in enumerate(others)]
        receive(tree, manager, messages)
        assert len(manager.decode_kv_args_table) == len(others) == 6


def test_stock_ends_its_bootstrap_thread_for_a_peer_that_does_not_fit(base: Tree, off: Tree) -> None:
    for tree in (base, off):
        world = World()
        manager = manager_of(tree, world)
        messages = [
            frames(tree, world, "127.0.0.1:9", 2, 0, item=8),
            frames(tree, world, PEER, 2, 1),
        ]
        with pytest.raises(RuntimeError, match="geometry differs"):
            receive(tree, manager, messages)


def test_a_peer_that_comes_back_in_order_is_served(on: Tree) -> None:
    world = World()
    manager = manager_of(on, world)
    receive(on, manager, [frames(on, world, PEER, 4, 0)])
    request = SimpleNamespace(is_dummy=False, mooncake_session_id=PEER)
    assert on.narrow._state_of(manager).refused
    receive(on, manager, [frames(on, world, PEER, 2, 0)])
    assert not on.narrow.turned_away(manager, request, 0)


def test_buffers_that_cannot_be_made_refuse_the_peer_and_end_no_thread(on: Tree) -> None:
    world = World()
    manager = manager_of(on, world)
    manager._dcp_pack_buffers = None
    manager._init_dcp_pack_buffers_once = mock.Mock(side_effect=MemoryError("no room"))
    receive(on, manager, [frames(on, world, PEER, 2, 0)])
    assert not manager.decode_kv_args_table
    assert on.narrow._state_of(manager).refused == {PEER: "no room"}


def test_requests_of_a_refused_peer_fail_at_both_ends_and_those_of_others_arrive(on: Tree) -> None:
    world, engine = World(), Engine()
    manager = manager_of(on, world, engine=engine)
    good, bad = world.plan(40), world.plan(40)
    on.enlist(manager, world, 1, bad, "127.0.0.1:9")
    del manager.decode_kv_args_table["127.0.0.1:9"]
    on.enlist(manager, world, 2, good)
    on.narrow._state_of(manager).refused["127.0.0.1:9"] = "the peer's DCP size must be 2, got 4"
    on.work(manager, world, [on.chunk(1, bad), on.chunk(2, good)])
    assert manager.request_status[1] == on.poll.Failed and manager.request_status[2] == on.poll.Success
    assert "the peer's DCP size must be 2, got 4" in manager.failure_records[1]
    assert manager.told[0][1][1] == str(int(on.poll.Failed)).encode()
    assert world.arrived(good)


# --- who sends, and what ------------------------------------------------------------------------------------------


def sender_of(tree: Tree, manager: Any, room: int, pages: int) -> Any:
    made = tree.conn.MooncakeKVSender.__new__(tree.conn.MooncakeKVSender)
    made.kv_mgr, made.bootstrap_room, made.aux_index = manager, room, 0
    made.curr_idx, made.num_kv_indices = 0, pages
    made._transfer_num_kv_indices = made._transfer_num_state_indices = 0
    made.trace_ctx = SimpleNamespace(copy_for_thread=lambda: None)
    return made


class Deployment:
    """Four CP ranks of two attention ranks each, and the two decode ranks that they serve."""

    def __init__(self, tree: Tree, tokens: int, act: Callable[[int], int | None] | None = None) -> None:
        self.tree, self.worlds = tree, [World(), World()]
        self.plan = self.worlds[0].plan(tokens)
        self.engines = {(cp, lane): Engine(act) for cp in range(4) for lane in range(2)}
        self.managers: dict[tuple[int, int], Any] = {}
        self.plans = [Plan(self.plan.source_pages, self.plan.target_pages, tokens, rank=lane) for lane in range(2)]
        for (cp, lane), engine in self.engines.items():
            world = self.worlds[lane]
            self.managers[cp, lane] = manager = manager_of(tree, world, cp, lane, engine)
            manager.request_status[7] = tree.poll.WaitingForInput
            if cp == 0:  # the decode ranks talk to CP rank 0 alone
                tree.enlist(manager, world, 7, self.plans[lane])

    def send(self, chunks: int = 1) -> None:
        """Let every rank send its request in ``chunks`` chunks, and every worker work."""
        pages = self.plan.source_pages
        for (_, lane), manager in self.managers.items():
            queued: list[Any] = []
            manager.transfer_queues = [SimpleNamespace(put=queued.append)]
            sender = sender_of(self.tree, manager, 7, len(pages))
            with self.tree.active():
                for part in np.array_split(pages, chunks):
                    done = sender.curr_idx * self.worlds[0].page
                    sender.send(part, None, min(len(part) * self.worlds[0].page, self.plan.tokens - done))
            self.tree.work(manager, self.worlds[lane], queued)

    def polls(self) -> list[int]:
        """Each rank's status after the tree's own reduction over attention TP, then CP."""
        utils: Any = self.tree._known["sglang.srt.disaggregation.utils"]
        polls = [[int(self.managers[cp, lane].request_status[7])] for cp in range(4) for lane in range(2)]
        group = utils.dist.ReduceOp.MIN
        assert group is not None
        lowest = min(poll[0] for poll in polls)

        def all_reduce(tensor: Any, op: Any, group: Any) -> None:
            assert op == utils.dist.ReduceOp.MIN
            tensor.fill_(lowest)

        found = []
        with self.tree.active(), mock.patch.object(utils.dist, "all_reduce", all_reduce):
            for poll in polls:
                poller = SimpleNamespace(poll=lambda poll=poll: poll[0])
                with mock.patch.object(
                    utils, "_poll_with_failure_injection", lambda pollers: [p.poll() for p in pollers]
                ):
                    found += utils.poll_and_all_reduce_attn_cp_tp_group([poller], None, None)
        return found


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 100, 233])
@pytest.mark.parametrize("chunks", [1, 3])
def test_both_decode_ranks_together_get_every_row_once_and_from_cp_rank_zero_alone(
    on: Tree, tokens: int, chunks: int
) -> None:
    made = Deployment(on, tokens)
    made.send(min(chunks, len(made.plan.source_pages)))
    pairs = [made.plans[lane].pairs(made.worlds[lane].page) for lane in range(2)]
    assert sorted(source for lane in pairs for source, _ in lane) == sorted(
        int(page) * 8 + row for page in made.plan.source_pages for row in range(8)
        if np.flatnonzero(made.plan.source_pages == page)[0] * 8 + row < tokens
    )  # fmt: skip
    for lane in range(2):
        assert made.worlds[lane].arrived(made.plans[lane])
    assert all(bool(engine.calls) == (cp == 0) for (cp, _), engine in made.engines.items())
    assert made.polls() == [int(on.poll.Success)] * 8


def test_a_failure_of_cp_rank_zero_fails_the_request_on_all_ranks(on: Tree) -> None:
    made = Deployment(on, 100, act=lambda call: -1 if call == 0 else None)
    made.send()
    assert {int(made.managers[cp, lane].request_status[7]) for cp in (1, 2, 3) for lane in (0, 1)} == {
        int(on.poll.Success)
    }
    assert made.polls() == [int(on.poll.Failed)] * 8


def test_the_request_is_held_until_cp_rank_zero_is_done(on: Tree) -> None:
    made = Deployment(on, 100)
    made.send()
    made.managers[0, 1].request_status[7] = on.poll.Transferring
    assert made.polls() == [int(on.poll.Transferring)] * 8


# --- index state of another length --------------------------------------------------------------------------------


def with_state(tree: Tree, manager: Any, here: int, there: int) -> tuple[Any, Any, Any]:
    """Give one DSA state component, ``here`` pages long on this side and ``there`` on the other."""
    types: Any = tree._known["sglang.srt.disaggregation.base.conn"].StateType
    vars(manager.kv_args).update(state_types=[types.DSA], state_data_ptrs=[[1]], state_item_lens=[[4]])
    vars(manager.kv_args).update(state_dim_per_tensor=[], state_layer_ids=[])
    manager._send_kvcache_generic = mock.Mock(return_value=0)
    request = SimpleNamespace(dst_state_indices=[list(range(there))], mooncake_session_id=PEER, room=7)
    target = SimpleNamespace(
        dst_state_data_ptrs=[[2]], dst_state_item_lens=[[4]], dst_state_dim_per_tensor=[], dst_state_layer_ids=[]
    )
    return request, [np.arange(here)], target


@pytest.mark.parametrize(("here", "there"), [(4, 3), (3, 4), (5, 0)])
def test_index_pages_of_another_number_are_not_cut_but_fail(
    base: Tree, off: Tree, on: Tree, here: int, there: int
) -> None:
    for tree in (base, off, on):
        manager = manager_of(tree, World())
        request, indices, target = with_state(tree, manager, here, there)
        with tree.active():
            status = manager.maybe_send_extra(request, indices, None, target)
        sent = [len(call.kwargs["prefill_data_indices"]) for call in manager._send_kvcache_generic.call_args_list]
        if tree is on:
            assert status is on.narrow.STATE_MISMATCH and status != 0 and not sent
        else:
            assert (status, sent) == (0, [min(here, there)])  # silently, in stock


def test_index_pages_of_the_same_number_are_sent_as_in_stock(base: Tree, on: Tree) -> None:
    calls = []
    for tree in (base, on):
        manager = manager_of(tree, World())
        with tree.active():
            request, indices, target = with_state(tree, manager, 4, 4)
            assert manager.maybe_send_extra(request, indices, None, target) == 0
        kwargs = manager._send_kvcache_generic.call_args.kwargs
        calls.append({name: np.asarray(value).tolist() for name, value in kwargs.items() if "indices" in name})
    assert calls[0] == calls[1]


def test_a_request_whose_state_does_not_fit_fails_alone_and_its_session_goes_on(on: Tree) -> None:
    world = World()
    manager = manager_of(on, world)
    first, second = world.plan(40), world.plan(24)
    on.enlist(manager, world, 1, first)
    on.enlist(manager, world, 2, second)
    manager._get_dsa_cache_transfer_skip_flags = lambda target: (False, False)
    chunk = on.chunk(1, first)
    chunk.state_indices = [np.arange(3)]
    manager.maybe_send_extra = mock.Mock(return_value=on.narrow.STATE_MISMATCH)
    on.work(manager, world, [chunk, on.chunk(2, second)])
    assert manager.request_status == {1: on.poll.Failed, 2: on.poll.Success}
    assert "differ in number" in manager.failure_records[1]
    assert not manager.failed_sessions and not manager.session_failures


# --- early sends --------------------------------------------------------------------------------------------------


def test_an_early_send_is_read_only_after_the_pass_that_writes_it(base: Tree, off: Tree, on: Tree) -> None:
    for tree in (base, off, on):
        world, order = World(), list[str]()

        def read(call: int, order: list[str] = order) -> None:
            order.append("read")

        manager = manager_of(tree, world, engine=Engine(read))
        plan = world.plan(64)
        tree.enlist(manager, world, 7, plan)
        queued: list[Any] = []
        manager.transfer_queues = [SimpleNamespace(put=queued.append)]
        sender = sender_of(tree, manager, 7, len(plan.source_pages))
        sender._early_send_wait_event = SimpleNamespace(synchronize=lambda order=order: order.append("written"))
        with tree.active():
            sender.send(plan.source_pages[:4], None, 32)
            assert not order  # the scheduler's own thread waits for nothing
            sender.send(plan.source_pages[4:], None, 32)
        tree.work(manager, world, queued)
        reads = ["read"] * (len(order) - (tree is on))
        assert order == ([*(["written"] if tree is on else []), *reads]) and "read" in order


def test_events_of_requests_that_are_gone_are_not_kept(on: Tree) -> None:
    manager = manager_of(on, World())
    for room in range(5):
        manager.request_status = {room: on.poll.WaitingForInput}
        on.narrow.hand_over(SimpleNamespace(kv_mgr=manager, bootstrap_room=room, _early_send_wait_event=object()))
    assert set(on.narrow._state_of(manager).writes) == {4}


# --- the bootstrap reply and start-up -----------------------------------------------------------------------------


def test_the_bootstrap_reply_has_the_stock_body_and_a_mark_only_with_the_gate(base: Tree, off: Tree, on: Tree) -> None:
    replies = []
    for tree in (base, off, on):
        conn: Any = tree._known["sglang.srt.disaggregation.common.conn"]
        server = SimpleNamespace(
            _is_ready=lambda: True, attn_tp_size=2, attn_cp_size=4, dp_size=1, pp_size=1, page_size=64,
            kv_cache_dtype="auto", follow_bootstrap_room=True, enable_dsa_cache_layer_split=False,
            prefill_http_port=None,
        )  # fmt: skip
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        query = SimpleNamespace(query=dict.fromkeys(names, "-1"))
        reply = mock.Mock(side_effect=lambda data, status, headers=None: (data, status, headers))
        with mock.patch.object(conn, "web", SimpleNamespace(json_response=reply)):
            replies.append(asyncio.run(conn.CommonKVBootstrapServer._handle_route_get(server, query)))
    assert replies[0] == replies[1]
    assert replies[2][:2] == replies[0][:2]
    assert (replies[0][2], replies[2][2]) == (None, {MARK: "2"})


def test_with_both_gates_set_the_topology_starts(patched: Root) -> None:
    start(Layers(patched("prefill"), {TOPOLOGY: "1", NARROW: "1"}))


def test_the_gate_alone_is_refused_at_start_and_names_the_other(patched: Root) -> None:
    with pytest.raises(ValueError, match=f"{NARROW} is set, but: {TOPOLOGY} must be True, got False"):
        start(Layers(patched("prefill"), {NARROW: "1"}))


def test_without_cp_the_gate_starts_alone(patched: Root) -> None:
    tree = Layers(patched("prefill"), {NARROW: "1"})
    for size in (1, None):
        start(tree, {"attn_cp_size": size, "tp_size": 2})


@pytest.mark.parametrize(
    "name",
    [
        *("disaggregation_mode", "dcp_size", "enable_dsa_cache_layer_split"),
        *("enable_hierarchical_cache", "hicache_storage_backend", "enable_lmcache"),
    ],
)
def test_it_names_each_argument_that_does_not_fit_whatever_the_other_gate_says(patched: Root, name: str) -> None:
    tree = Layers(patched("prefill"), {TOPOLOGY: "1", NARROW: "1"})
    # The topology's own check comes first, and asks for the same.
    with mock.patch.object(tree.topology, "check_start"):
        start(tree)
        with pytest.raises(ValueError, match=rf"{NARROW} is set, but: {name} must be .*got {BAD[name]!r}"):
            start(tree, {name: BAD[name]})


def test_what_would_send_from_all_cp_ranks_or_by_another_backend_is_refused_at_start(patched: Root) -> None:
    tree = Layers(patched("prefill"), {TOPOLOGY: "1", NARROW: "1"})
    with pytest.raises(ValueError, match=f"{NARROW} is set, but: {ALL_CP} must be False, got True"):
        start(tree, environment={ALL_CP: True})
    with pytest.raises(ValueError, match=f"{NARROW} is set, but: disaggregation_transfer_backend must be 'mooncake'"):
        start(tree, {"disaggregation_transfer_backend": "nixl"})


def test_a_gate_word_that_is_neither_on_nor_off_stops_the_import(patched: Root) -> None:
    with pytest.raises(ValueError, match=f"{NARROW}='narrow'"):
        Tree(patched("prefill"), gates={NARROW: "narrow"})
