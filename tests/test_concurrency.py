"""Several processes at one tree: one writes, the others say so; a reader sees old or new of each file."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from patchbundle import journal, transaction
from patchbundle.errors import BundleError, Exit, Reason
from patchbundle.tree import Tree
from tests import toy as toys
from tests import trees
from tests.toy import Toy

WRITERS = 6


def spawn(function: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    return pid


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_of_several_writers_exactly_one_writes(toy: Toy) -> None:
    """The others find it busy, or come after it and have nothing to do; never a half-made tree, never "recover"."""
    for direction in ("apply", "revert", "apply", "revert"):
        read, write = os.pipe()

        def one(direction: str = direction, read: int = read) -> int:
            os.read(read, 1)  # all start at once
            return trees.run(toy, direction, "--root", toy.tree).code

        pids = [spawn(one) for _ in range(WRITERS)]
        os.write(write, b"x" * WRITERS)
        codes = sorted(code_of(pid) for pid in pids)
        os.close(read)
        os.close(write)
        assert codes.count(Exit.DONE) == 1, codes
        assert set(codes) <= {Exit.DONE, Exit.NOTHING_TO_DO, Exit.BUSY}
        assert trees.level(toy) == (3 if direction == "apply" else 0)


def test_a_reader_in_a_loop_sees_old_or_new_of_each_file(toy: Toy) -> None:
    """And never none: a call site is never without its module, a file never short."""
    engine = toy.tree / "sglang/srt/engine.py"
    module = toy.tree / toys.HOME / "alpha.py"
    allowed = {toys.ENGINE, toys.ENGINE_BETA}

    def reader() -> int:
        while True:
            data = engine.read_bytes()
            if data not in allowed:
                return 1
            if data == toys.ENGINE_BETA and engine.read_bytes() == toys.ENGINE_BETA and not _there(module, engine):
                return 2

    pid = spawn(reader)
    try:
        for _ in range(10):
            trees.change(toy, "apply")
            trees.change(toy, "revert")
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the reader saw something else"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _there(module: Path, engine: Path) -> bool:
    """Whether the module was there, or the call site had gone by the time of the look."""
    return module.exists() or engine.read_bytes() != toys.ENGINE_BETA


def test_status_during_runs_is_a_level_or_busy_and_never_drifted(toy: Toy) -> None:
    def writer() -> int:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            trees.change(toy, "apply")
            trees.change(toy, "revert")
        return 0

    pid = spawn(writer)
    codes = set()
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        codes.add(trees.run(toy, "plan", "--root", toy.tree).code)
    assert codes <= {Exit.DONE, Exit.NOTHING_TO_DO, Exit.BUSY}, codes
    assert codes & {Exit.DONE, Exit.NOTHING_TO_DO, Exit.BUSY}


def test_the_lock_ends_with_its_process_however_that_ends(toy: Toy) -> None:
    read, write = os.pipe()

    def holder() -> int:
        from patchbundle import transaction

        with transaction.locked(toy.tree):
            os.write(write, b"x")
            time.sleep(60)
        return 0

    pid = spawn(holder)
    os.read(read, 1)
    assert trees.apply(toy).code == Exit.BUSY
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    assert trees.apply(toy).code == Exit.DONE
    assert not [name for name in os.listdir(toy.tree) if name.startswith(".")]


# A reader that asks whether somebody writes.


@contextmanager
def shared_lock(root: Path) -> Iterator[int]:
    """What a reader holds for a moment, held for longer."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield fd
    finally:
        os.close(fd)


def interrupted(toy: Toy) -> None:
    """Leave what a run leaves that is killed at its start."""
    (toy.tree / journal.BESIDE).write_bytes(b"")


def test_a_reader_who_looks_at_the_lock_makes_no_writer_fail(toy: Toy) -> None:
    read, write = os.pipe()

    def reader() -> int:
        with shared_lock(toy.tree):
            os.write(write, b"x")
            time.sleep(0.3)
        return 0

    for verb, code in (("apply", 0), ("revert", 0), ("recover", Exit.NOTHING_TO_DO)):
        pid = spawn(reader)
        os.read(read, 1)
        assert trees.run(toy, verb, "--root", toy.tree).code == code, verb
        assert code_of(pid) == 0
    os.close(read)
    os.close(write)


def test_readers_in_a_loop_make_no_recovery_fail(toy: Toy) -> None:
    def reader() -> int:
        with Tree(toy.tree) as tree:
            while True:
                try:
                    transaction.refuse_interrupted(tree)
                except BundleError as error:
                    assert error.reason in (Reason.BUSY, Reason.RECOVERY_NEEDED)

    interrupted(toy)
    pids = [spawn(reader) for _ in range(3)]
    try:
        for _ in range(200):
            interrupted(toy)
            assert transaction.recover(toy.tree)[0] == "old"
        assert all(os.waitpid(pid, os.WNOHANG) == (0, 0) for pid in pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_lock_that_somebody_shares_without_end_is_busy_in_the_end(toy: Toy) -> None:
    with shared_lock(toy.tree):
        began = time.monotonic()
        assert trees.apply(toy).code == Exit.BUSY
        assert 0.9 < time.monotonic() - began < 5


def test_a_writer_is_not_waited_for(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: float) -> None:
        pytest.fail("waited for a writer")

    monkeypatch.setattr(time, "sleep", never)
    with transaction.locked(toy.tree):
        assert trees.apply(toy).code == Exit.BUSY


def test_a_run_that_ends_between_two_looks_of_a_reader_leaves_nothing_to_recover(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader finds a journal; by the time that it asks for the lock the run is over, journal and lock are gone."""
    (toy.tree / journal.NAME).write_bytes(b"")
    real = transaction.interrupted
    looks = []

    def then_it_ends(tree: Tree) -> bool:
        found = real(tree)
        looks.append(found)
        (toy.tree / journal.NAME).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(transaction, "interrupted", then_it_ends)
    assert trees.status(toy).code == 0
    assert looks[:2] == [True, False]
    (toy.tree / journal.NAME).write_bytes(b"")
    assert trees.run(toy, "recover", "--root", toy.tree, "-n").code == Exit.NOTHING_TO_DO


def test_no_run_can_begin_while_a_reader_asks_whether_one_is_interrupted(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the second look might see the journal of a next run, which is alive."""
    interrupted(toy)
    real = transaction.interrupted
    could_lock = []

    def watched(tree: Tree) -> bool:
        fd = os.open(toy.tree, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            could_lock.append(True)
        except BlockingIOError:
            could_lock.append(False)
        finally:
            os.close(fd)
        return real(tree)

    monkeypatch.setattr(transaction, "interrupted", watched)
    assert trees.status(toy).code == Exit.RECOVERY_NEEDED
    assert could_lock == [True, False]


def test_every_reader_says_busy_while_a_run_is_at_work(toy: Toy) -> None:
    with transaction.locked(toy.tree):
        interrupted(toy)
        for verb in (["status"], ["plan"], ["apply", "-n"], ["recover", "-n"]):
            assert trees.run(toy, verb[0], "--root", toy.tree, *verb[1:]).code == Exit.BUSY, verb
        assert trees.check(toy).code == Exit.BUSY
