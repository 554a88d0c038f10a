"""pcp4-dcp2-decode: KV from a CP4 prefill that passed its checks; a prefill that does not fit fails its requests alone.

The tree's own look-up of a prefill and its queue of waiting requests run here, stock and patched side by side.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.engine.load import Anything, blanks, load, modules, stub

Root = Callable[[str], Path]
SRT = "sglang.srt"
PD = f"{SRT}.disaggregation"
NARROW = "SGLANG_RESEARCH_PCP4_DCP2"
MARK = "X-Research-PCP4-DCP2"
ALL_CP = "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"
ADDRESS, OTHER = "127.0.0.1:1", "127.0.0.1:2"
CONN, DECODE = "sglang/srt/disaggregation/common/conn.py", "sglang/srt/disaggregation/decode.py"


class Tree:
    """The bootstrap files of one decode tree, with prefills behind a stand-in for HTTP."""

    def __init__(self, root: Path, gate: str | None = None) -> None:
        self.root = root
        self.replies: dict[str, SimpleNamespace] = {}
        self.asked: list[str] = []
        self._known: dict[str, ModuleType] = {name: Anything(name) for name in ("zmq", "requests", "aiohttp")}
        vars(self._known["requests"])["get"] = self._get
        self._known |= {**blanks(root, DECODE), **blanks(root, CONN)}
        environment = {name: text for name, text in os.environ.items() if not name.startswith("SGLANG_RESEARCH_")}
        with mock.patch.dict(os.environ, {**environment, **({NARROW: gate} if gate else {})}, clear=True):
            if (root / "sglang/srt/research").is_dir():
                self._known[f"{SRT}.research"] = stub(f"{SRT}.research", __path__=[])
                for name in ("gates", "narrow_topology", "pcp4_dcp2"):
                    module = self._load(f"sglang/srt/research/{name}.py")
                    setattr(self._known[f"{SRT}.research"], name, module)
            self.base = self._load("sglang/srt/disaggregation/base/conn.py")
            self.poll = self.base.KVPoll
            vars(self._known[f"{PD}.base"])["KVPoll"] = self.poll
            mode = stub(f"{PD}.utils", DisaggregationMode=SimpleNamespace(PREFILL="prefill", DECODE="decode"))
            utils = self._known[f"{PD}.utils"]
            vars(utils).update(DisaggregationMode=mode.DisaggregationMode, poll_and_all_reduce=self._poll)
            self.conn = self._load(CONN)
            for name in ("DecodeHiCachePreallocMixin", "DecodeHiCacheTransferMixin"):
                vars(self._known[f"{PD}.decode_hicache_mixin"])[name] = type(name, (), {})
            self.decode = self._load(DECODE)

    def _load(self, path: str) -> Any:
        module = load(self.root, path, self._known)
        self._known[module.__name__] = module
        return module

    def _get(self, url: str, timeout: float) -> SimpleNamespace:
        address = url.removeprefix("http://").partition("/")[0]
        self.asked.append(address)
        return self.replies[address]

    def _poll(self, receivers: Any, group: Any) -> list[int]:
        return [receiver.kv_mgr.request_status[receiver.bootstrap_room] for receiver in receivers]

    def manager(self, dcp: int = 2, **changed: Any) -> Any:
        """A decode rank's manager after its start-up, without sockets and threads."""
        made = self.conn.CommonKVManager.__new__(
            type("Manager", (self.conn.CommonKVManager,), dict.fromkeys(self.abstract, lambda self: None))
        )
        made.dcp_size, made.is_mla_backend, made.is_hybrid_mla_backend = dcp, True, False
        made.attn_tp_size, made.attn_cp_size, made.attn_cp_rank, made.pp_size, made.pp_rank = 2, 1, 0, 1, 0
        made.kv_args = SimpleNamespace(page_size=64, engine_rank=1)
        made.kv_cache_dtype_str, made.enable_all_cp_ranks_for_transfer = "fp8_e4m3", False
        made.prefill_info_table, made.request_status = {}, {}
        made.failure_records, made.failure_lock = {}, mock.MagicMock()
        vars(made).update(changed)
        return made

    @property
    def abstract(self) -> set[str]:
        return set(getattr(self.conn.CommonKVManager, "__abstractmethods__", ()))

    def serve(self, address: str = ADDRESS, mark: str | None = "2", status: int = 200, **changed: Any) -> None:
        """Let a prefill answer at ``address``; by default the one that the patch is made for."""
        body = {
            "attn_tp_size": 2, "attn_cp_size": 4, "dp_size": 1, "pp_size": 1, "page_size": 64,
            "kv_cache_dtype": "fp8_e4m3", "follow_bootstrap_room": True, "enable_dsa_cache_layer_split": False,
            "prefill_http_port": None, **changed,
        }  # fmt: skip
        headers = {} if mark is None else {MARK: mark}
        self.replies[address] = SimpleNamespace(status_code=status, json=lambda: body, headers=headers, text="not yet")

    def queue(self, manager: Any) -> Any:
        """The tree's own queue of requests before allocation, holding nothing."""
        made = self.decode.DecodePreallocQueue.__new__(self.decode.DecodePreallocQueue)
        made.kv_manager, made.pending_reqs, made.queue = manager, [], []
        made._ensure_retry_count, made._ensure_last_attempt_time = {}, {}
        made._max_ensure_retries, made._ensure_retry_interval = 15, 0.0
        return made

    def request(self, queue: Any, room: int, address: str = ADDRESS) -> Any:
        """A request that waits for the prefill at ``address``."""
        receiver_class = type("Receiver", (self.conn.CommonKVReceiver,), {"poll": lambda self: None})
        receiver: Any = object.__new__(receiver_class)
        receiver.bootstrap_room, receiver.bootstrap_addr, receiver.kv_mgr = room, address, queue.kv_manager
        receiver.conclude_state, receiver.abort_notified = None, False
        queue.kv_manager.request_status[room] = self.poll.Bootstrapping
        return SimpleNamespace(kv_receiver=receiver, req=SimpleNamespace(bootstrap_room=room))

    def ensure(self, queue: Any, waiting: dict[str, list[Any]]) -> tuple[Any, Any]:
        with modules(self._known):
            found: tuple[Any, Any] = queue._ensure_prefill_info(waiting)
        return found


@pytest.fixture(scope="module")
def base(stock: Root) -> Tree:
    return Tree(stock("decode"))


@pytest.fixture(scope="module")
def off(patched: Root) -> Tree:
    return Tree(patched("decode"))


@pytest.fixture(scope="module")
def on(patched: Root) -> Tree:
    return Tree(patched("decode"), "1")


# --- which prefills -----------------------------------------------------------------------------------------------


def look_up(tree: Tree, manager: Any) -> Any:
    """Look the prefill up and give what is known of it then, or the error."""
    with modules(tree._known):
        try:
            tree_knows = manager.try_ensure_parallel_info(ADDRESS)
        except Exception as error:
            return type(error).__name__, str(error)
    return dataclasses.asdict(manager.prefill_info_table[ADDRESS]) if tree_knows else None


@pytest.mark.parametrize("all_cp", [False, True], ids=["CP rank 0", "all CP ranks"])
@pytest.mark.parametrize("split", [False, True], ids=["whole cache", "layer split"])
@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_with_dcp_a_prefill_with_cp_is_taken_in_one_pair_of_topologies_alone(
    base: Tree, off: Tree, on: Tree, cp: int, dcp: int, split: bool, all_cp: bool
) -> None:
    found = []
    for tree in (base, off, on):
        tree.serve(attn_cp_size=cp, enable_dsa_cache_layer_split=split)
        found.append(look_up(tree, tree.manager(dcp, enable_all_cp_ranks_for_transfer=all_cp)))
    assert found[0] == found[1]
    if dcp == 1 or (cp == 1 and not split):
        assert isinstance(found[0], dict) and found[2] == found[0]
        return
    if cp == 1:  # no prefill says this: without CP there is nothing to split
        assert isinstance(found[0], dict) and "enable_dsa_cache_layer_split must be False" in found[2][1]
        return
    assert found[0] == ("RuntimeError", f"PD decode DCP currently requires prefill attention CP=1, got {cp}.")
    if cp == 4 and not split:
        # The decode rank's own DCP size and switch are looked at when its manager is made.
        assert found[2]["target_cp_ranks"] == ([0] if not all_cp else [0, 1, 2, 3])
        assert found[2]["required_prefill_response_num"] == (1 if not all_cp else 4)
    else:
        assert found[2][0] == "ValueError" and NARROW in found[2][1]


@pytest.mark.parametrize(
    ("changed", "condition"),
    [
        ({"attn_cp_size": 2}, "the prefill's attn_cp_size must be 1 or 4, got 2"),
        ({"attn_cp_size": 8}, "the prefill's attn_cp_size must be 1 or 4, got 8"),
        ({"attn_cp_size": 1, "attn_tp_size": 4}, "the prefill's attn_tp_size must be 1 or 2, got 4"),
        ({"attn_cp_size": 1, "dp_size": 2}, "the prefill's dp_size must be 1, got 2"),
        ({"attn_cp_size": 1, "mark": None}, f"header {MARK} .* must be '2', got None"),
        ({"attn_tp_size": 1}, "the prefill's attn_tp_size must be 2, got 1"),
        ({"dp_size": 2}, "the prefill's dp_size must be 1, got 2"),
        ({"pp_size": 2}, "the prefill's pp_size must be 1, got 2"),
        ({"enable_dsa_cache_layer_split": True}, "enable_dsa_cache_layer_split must be False, got True"),
        ({"mark": None}, f"header {MARK} .* must be '2', got None"),
        ({"mark": "0"}, f"header {MARK} .* must be '2', got '0'"),
        # A prefill of bundle 0.1.0, which compares neither layers nor index.
        ({"mark": "1"}, f"header {MARK} .* must be '2', got '1'"),
    ],
)
def test_each_condition_of_a_prefill_is_refused_by_name(on: Tree, changed: dict[str, Any], condition: str) -> None:
    on.serve(**changed)
    with modules(on._known), pytest.raises(ValueError, match=rf"{NARROW} is set, but: .*{condition}"):
        on.manager().try_ensure_parallel_info(ADDRESS)


CONDITIONS: dict[str, Any] = {
    "dcp_size": 4,
    "attn_tp_size": 4,
    "attn_cp_size": 2,
    "pp_size": 2,
    "is_mla_backend": False,
    "is_hybrid_mla_backend": True,
    "enable_all_cp_ranks_for_transfer": True,
}
ARGUMENTS: dict[str, Any] = {
    "disaggregation_transfer_backend": "nixl",
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "file",
    "enable_lmcache": True,
}


def check(tree: Tree, mode: str = "decode", **changed: Any) -> None:
    args = {"disaggregation_transfer_backend": "mooncake", "enable_hierarchical_cache": False}
    args |= {"hicache_storage_backend": None, "enable_lmcache": False}
    args |= {name: value for name, value in changed.items() if name in ARGUMENTS}
    sizes = {name: value for name, value in changed.items() if name in CONDITIONS}
    manager = tree.manager(
        **{"server_args": SimpleNamespace(**args), **{n: v for n, v in sizes.items() if n != "dcp_size"}}
    )
    manager.dcp_size = sizes.get("dcp_size", 2)
    manager.disaggregation_mode = SimpleNamespace(value=mode)
    tree._known[f"{SRT}.research.pcp4_dcp2"].check_manager(manager)


def test_the_topology_that_the_patch_is_made_for_starts(on: Tree) -> None:
    check(on)
    check(on, disaggregation_transfer_backend="mooncake_tcp")


@pytest.mark.parametrize("name", [*CONDITIONS, *ARGUMENTS])
def test_any_other_decode_engine_is_refused_at_start_by_name(on: Tree, off: Tree, name: str) -> None:
    value = {**CONDITIONS, **ARGUMENTS}[name]
    with pytest.raises(ValueError, match=rf"{NARROW} is set, but: .*{name} must be .*got {value!r}"):
        check(on, **{name: value})
    check(off, **{name: value})


def test_a_prefill_of_this_release_is_refused_at_start(on: Tree) -> None:
    with pytest.raises(ValueError, match="disaggregation_mode must be 'decode', got 'prefill'"):
        check(on, mode="prefill")


def test_the_check_is_made_when_a_manager_is_made(on: Tree, off: Tree) -> None:
    for tree, error in ((on, ValueError), (off, ZeroDivisionError)):
        args = SimpleNamespace(kv_cache_dtype_str="", kv_item_lens=[], state_item_lens=[], system_dp_rank=0, pp_rank=0)
        parallel = SimpleNamespace(
            attn_tp_size=1, attn_tp_rank=0, attn_cp_size=1, attn_cp_rank=0, enable_dp_attention=True,
            enable_dsa_cache_layer_split=False,
        )  # fmt: skip
        server = mock.MagicMock(dcp_size=1, pp_size=1)
        mode = SimpleNamespace(value="decode")
        context = mock.Mock(side_effect=ZeroDivisionError)
        with (
            modules(tree._known),
            mock.patch.multiple(
                tree.conn, get_parallel=lambda parallel=parallel: parallel, zmq=mock.Mock(Context=context)
            ),
            pytest.raises(error),
        ):
            tree.conn.CommonKVManager.__init__(tree.manager(), args, mode, server, True)


# --- a prefill that does not fit ----------------------------------------------------------------------------------

WRONG: dict[str, dict[str, Any]] = {
    "another CP size": {"attn_cp_size": 2},
    "another KV dtype": {"kv_cache_dtype": "bfloat16"},
    "another page size": {"page_size": 1},
}


@pytest.mark.parametrize("kind", WRONG)
def test_stock_raises_out_of_the_schedulers_loop_and_the_patch_fails_these_requests_alone(
    base: Tree, off: Tree, on: Tree, kind: str
) -> None:
    for tree in (base, off, on):
        tree.serve(ADDRESS, **WRONG[kind])
        tree.serve(OTHER, attn_cp_size=1)
        queue = tree.queue(tree.manager())
        bad, good = [tree.request(queue, room) for room in (1, 2)], [tree.request(queue, 3, OTHER)]
        waiting = {ADDRESS: bad, OTHER: good}
        if tree is not on:
            with pytest.raises(RuntimeError):
                tree.ensure(queue, waiting)
            continue
        ready, remaining = tree.ensure(queue, waiting)
        assert ready == {OTHER: good} and remaining == []
        for request in bad:
            room = request.req.bootstrap_room
            assert queue.kv_manager.request_status[room] == tree.poll.Failed
            assert request.kv_receiver.conclude_state == tree.poll.Failed
            assert f"The prefill at {ADDRESS} is refused: " in queue.kv_manager.failure_records[room]
        assert queue.kv_manager.request_status[3] == tree.poll.Bootstrapping
        assert set(queue.kv_manager.prefill_info_table) == {OTHER}


@pytest.mark.parametrize("error", [TypeError("no such field"), KeyError("x"), AssertionError("pp")])
def test_a_look_up_that_raises_anything_fails_its_requests_alone(on: Tree, error: Exception) -> None:
    on.serve()
    queue = on.queue(on.manager())
    queue._ensure_retry_count[ADDRESS] = 3
    bad = [on.request(queue, 1)]
    with mock.patch.object(queue.kv_manager, "try_ensure_parallel_info", mock.Mock(side_effect=error)):
        assert on.ensure(queue, {ADDRESS: bad}) == ({}, [])
    assert queue.kv_manager.request_status[1] == on.poll.Failed
    assert ADDRESS not in queue._ensure_retry_count


def test_the_reason_of_a_refusal_is_what_stock_would_have_died_of(on: Tree) -> None:
    on.serve(kv_cache_dtype="bfloat16")
    queue = on.queue(on.manager())
    on.ensure(queue, {ADDRESS: [on.request(queue, 1)]})
    assert "KV cache dtype mismatch: prefill server has kv_cache_dtype=bfloat16" in queue.kv_manager.failure_records[1]


def test_a_prefill_that_comes_back_in_order_is_taken(on: Tree) -> None:
    queue = on.queue(on.manager())
    on.serve(kv_cache_dtype="bfloat16")
    on.ensure(queue, {ADDRESS: [on.request(queue, 1)]})
    on.serve()
    later = [on.request(queue, 2)]
    assert on.ensure(queue, {ADDRESS: later}) == ({ADDRESS: later}, [])


def test_a_refused_prefill_is_looked_up_again_only_after_the_usual_time(on: Tree) -> None:
    queue = on.queue(on.manager())
    queue._ensure_retry_interval = 60.0
    on.serve(kv_cache_dtype="bfloat16")
    on.ensure(queue, {ADDRESS: [on.request(queue, 1)]})
    asked = len(on.asked)
    later = [on.request(queue, 2)]
    assert on.ensure(queue, {ADDRESS: later}) == ({}, later)
    assert len(on.asked) == asked


def test_a_request_that_was_cleaned_up_while_it_waited_is_no_error(on: Tree) -> None:
    on.serve(kv_cache_dtype="bfloat16")
    queue = on.queue(on.manager())
    gone = on.request(queue, 1)
    gone.kv_receiver = None
    assert on.ensure(queue, {ADDRESS: [gone]}) == ({}, [])


def test_a_prefill_that_does_not_answer_yet_is_waited_for_as_in_stock(base: Tree, off: Tree, on: Tree) -> None:
    for tree in (base, off, on):
        tree.serve(status=503)
        queue = tree.queue(tree.manager())
        waiting = [tree.request(queue, 1)]
        asked = len(tree.asked)
        for attempt in range(1, 15):
            assert tree.ensure(queue, {ADDRESS: waiting}) == ({}, waiting)
            assert queue._ensure_retry_count == {ADDRESS: attempt}
        assert tree.ensure(queue, {ADDRESS: waiting}) == ({}, [])
        assert queue.kv_manager.request_status[1] == tree.poll.Failed
        assert len(tree.asked) == asked + 15


# --- both releases ------------------------------------------------------------------------------------------------


def test_the_fields_that_the_prefill_release_sends_are_those_that_the_decode_release_reads(
    base: Tree, stock: Root
) -> None:
    root = stock("prefill")
    known: dict[str, ModuleType] = {name: Anything(name) for name in ("zmq", "requests", "aiohttp")}
    known |= blanks(root, CONN)
    known[f"{PD}.base.conn"] = load(root, "sglang/srt/disaggregation/base/conn.py", known)
    conn = load(root, CONN, known)
    sent = {field.name: field.default for field in dataclasses.fields(conn.PrefillServerInfo)}
    read = {field.name: field.default for field in dataclasses.fields(base.conn.PrefillServerInfo)}
    assert sent == read


def test_both_releases_have_the_same_gate_mark_and_sizes(patched: Root) -> None:
    texts = {(patched(role) / "sglang/srt/research/narrow_topology.py").read_bytes() for role in ("prefill", "decode")}
    assert len(texts) == 1


def test_a_gate_word_that_is_neither_on_nor_off_stops_the_import(patched: Root) -> None:
    with pytest.raises(ValueError, match=f"{NARROW}='narrow'"):
        Tree(patched("decode"), "narrow")
