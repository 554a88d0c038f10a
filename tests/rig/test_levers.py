"""Gathered sends: who waits for whom, told by names alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lab.rig.levers import Gathering, OfRoom, Pending, _rotate_sources, gathered, retraction_steps


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("calm-12.01of03", ("calm-12", 3)),
        ("a.b.00of10", ("a.b", 10)),
        ("calm", None),
        ("calm.1of", None),
        ("", None),
        (None, None),
        (["calm.0of1"], None),
    ],
)
def test_only_a_gathered_name_has_a_group(name: object, group: object) -> None:
    assert gathered(name) == group


def test_nobody_starts_before_all_are_there_and_all_start_then() -> None:
    one = Gathering()
    assert one.waits(["s.00of03"])
    assert one.waits(["s.00of03", "s.02of03"])
    assert not one.waits(["s.00of03", "s.02of03", "s.01of03"])


def test_who_comes_back_later_waits_for_nobody() -> None:
    one = Gathering()
    assert not one.waits(["s.00of02", "s.01of02"])
    assert not one.waits(["s.01of02"])


def test_a_member_that_failed_is_not_waited_for() -> None:
    one = Gathering()
    assert one.waits(["s.00of03", "s.01of03"])
    one.fail("s.02of03")
    assert not one.waits(["s.00of03", "s.01of03"])


def test_a_failure_of_another_send_lets_nobody_go() -> None:
    one = Gathering()
    one.fail("t.00of02")
    one.fail("somebody")
    assert one.waits(["s.00of02"])


def test_other_requests_wait_for_nobody() -> None:
    assert not Gathering().waits(["x", "y"])
    assert not Gathering().waits([])


def test_retraction_is_forced_at_the_named_steps_of_gathered_sends() -> None:
    due, whoever = retraction_steps("4,14")
    assert [step for step in range(20) if due(step)] == [4, 14] and not whoever


def test_random_steps_are_the_same_on_every_rank_and_as_many_as_asked_for() -> None:
    drawn = []
    for _ in range(2):
        due, whoever = retraction_steps("random:0.25")
        assert whoever
        drawn.append([due(step) for step in range(1000)])
    assert drawn[0] == drawn[1] and 200 < sum(drawn[0]) < 300
    assert not any(map(retraction_steps("random:0")[0], range(100)))


@pytest.mark.parametrize("text", ["often", "4,x"])
def test_steps_that_are_no_numbers_end_the_engine(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        retraction_steps(text)


def test_a_broadcast_ahead_of_its_use_sends_what_its_scratch_holds_when_it_is_waited_for() -> None:
    sent: list[tuple[list[int], int]] = []
    one = Pending(lambda tensor, src: sent.append((list(tensor), src)))
    scratch = [1]
    with one.change_state(enable=True):
        one.broadcast(scratch, 0)
    one.ahead = True
    one.broadcast(scratch, 1)
    scratch[0] = 2
    assert sent == [([1], 0)]
    one.wait()
    one.wait()
    assert sent == [([1], 0), ([2], 1)]


def test_pending_broadcasts_go_in_their_order() -> None:
    sent: list[int] = []
    one = Pending(lambda tensor, src: sent.append(src))
    one.ahead = True
    for source in (3, 1, 2):
        one.broadcast(None, source)
    one.wait()
    assert sent == [3, 1, 2]


def test_the_sender_of_a_room_is_its_number_modulo_the_ranks_and_all_else_is_the_managers() -> None:
    managers = [
        SimpleNamespace(attn_cp_rank=rank, attn_cp_size=4, is_dummy_cp_rank=rank != 0, x=rank) for rank in range(4)
    ]
    for room in (8, 9, 15):
        seen = [OfRoom(manager, room) for manager in managers]
        assert [one.x for one in seen if not one.is_dummy_cp_rank] == [room % 4]
        assert [one.x for one in seen] == [0, 1, 2, 3]


@pytest.mark.parametrize("on", [True, False])
def test_prefill_and_decode_take_the_same_rank_for_a_room_and_rank_0_without_the_lever(
    on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on:
        monkeypatch.setenv("PATCHBUNDLE_RIG_ROTATE_SOURCES", "1")

    class Sender:
        def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, dest_tp_ranks: list[int]) -> None:
            self.kv_mgr = mgr

    class Receiver:
        prefill_info = SimpleNamespace(attn_cp_size=4)
        bootstrap_room = 7
        target_cp_ranks = (0,)

        def _setup_bootstrap_infos(self) -> list[int]:
            return list(self.target_cp_ranks)

    class Manager:
        attn_cp_size = 4

        def __init__(self, rank: int) -> None:
            self.attn_cp_rank, self.is_dummy_cp_rank = rank, rank != 0

        def _should_skip_cp_replicated_state_transfer(self) -> bool:
            return self.attn_cp_rank != 0

    module: Any = SimpleNamespace(CommonKVSender=Sender, CommonKVReceiver=Receiver, CommonKVManager=Manager)
    _rotate_sources(module)
    sends = [rank for rank in range(4) if not Sender(Manager(rank), "a", 7, []).kv_mgr.is_dummy_cp_rank]
    assert sends == Receiver()._setup_bootstrap_infos() == ([3] if on else [0])
    assert Manager(3)._should_skip_cp_replicated_state_transfer() is not on
