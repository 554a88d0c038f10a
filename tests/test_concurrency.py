"""Several processes at one tree: one writes, the others say so; a reader sees old or new of each file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from patchbundle.errors import Exit
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
