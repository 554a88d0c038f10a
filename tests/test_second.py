"""A second process takes a part of some work; whatever becomes of it, all of the work is done."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from patchbundle import second

COUNT = 50


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As without threads of others, on a machine with two processors; no process and no descriptor is left of it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    # Threads that tests before left behind: with them no second process is begun.
    count, others = threading.active_count, threading.active_count() - 1
    monkeypatch.setattr(threading, "active_count", lambda: count() - others)
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


class Word:
    """By it the second process says that it is at work: on a busy machine that takes its time."""

    def __init__(self) -> None:
        self._me, (self._out, self._into) = os.getpid(), os.pipe()

    def __enter__(self) -> Word:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._out)
        os.close(self._into)

    def say(self) -> None:
        if os.getpid() != self._me:
            os.write(self._into, b".")

    def hear(self) -> None:
        assert select.select([self._out], [], [], 60)[0], "the second process did nothing"


def squares(me: int, other: str = "") -> dict[int, int]:
    """The squares, shared; ``other`` is what the second process does instead after its third one."""
    made = 0

    def work(number: int) -> int:
        nonlocal made
        made += 1
        word.say()
        if os.getpid() != me and made > 3:
            if other == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if other == "ended":
                os._exit(0)
            if other == "fails":
                raise OSError("only there")
        return number * number

    with Word() as word, second.shared(COUNT, work) as done:
        word.hear()
        return done()


@pytest.mark.parametrize("other", ["", "killed", "ended", "fails"])
def test_all_is_done_however_the_second_process_ends(other: str) -> None:
    assert squares(os.getpid(), other) == {number: number * number for number in range(COUNT)}


@pytest.mark.parametrize("answer", [b"", b"x", b"\xff" * 20, b"i\x01\x00"])
def test_an_answer_that_is_none_counts_for_nothing(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    monkeypatch.setattr("marshal.dump", lambda said, stream: stream.write(answer))
    assert squares(os.getpid()) == {number: number * number for number in range(COUNT)}


def test_the_second_process_does_its_part() -> None:
    def work(number: int) -> int:
        word.say()
        return os.getpid()

    with Word() as word, second.shared(COUNT, work) as done:
        word.hear()
        assert set(done().values()) - {os.getpid()}


def test_results_go_packed_and_come_unpacked() -> None:
    def work(number: int) -> set[int]:
        word.say()
        return {number}

    with Word() as word, second.shared(COUNT, work, packed=sorted, unpacked=set) as done:
        word.hear()
        assert done() == {number: {number} for number in range(COUNT)}


def test_an_error_is_raised_here() -> None:
    def work(number: int) -> int:
        word.say()
        if number == 7:
            raise OSError("seven")
        return number

    with Word() as word, second.shared(COUNT, work) as done:
        word.hear()
        with pytest.raises(OSError, match="seven"):
            done()


def test_no_result_is_asked_for_twice() -> None:
    calls: list[int] = []
    with second.shared(3, calls.append, alone=True) as done:
        assert done() is done()
    assert calls == [0, 1, 2]


def test_work_that_is_given_up_ends() -> None:
    began = time.monotonic()
    with second.shared(COUNT, lambda number: time.sleep(60)):
        pass
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("why", ["alone", "one processor", "threads", "no room"])
def test_without_a_second_process_it_is_all_done_here(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def fork() -> int:
        assert why == "no room"
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", fork)
    if why == "one processor":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    if why == "threads":
        thread.start()
    try:
        with second.shared(3, lambda number: os.getpid(), alone=why == "alone") as done:
            assert done() == dict.fromkeys(range(3), os.getpid())
    finally:
        end.set()
        if why == "threads":
            thread.join()
