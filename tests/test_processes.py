"""Which processes have code of a tree, since when, with which gates; and what apply and revert do about them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from patchbundle import processes
from patchbundle.errors import Exit
from patchbundle.processes import Census, Process
from tests import trees
from tests.toy import Toy

WAIT = "print('up', flush=True); input()"


@contextmanager
def running(
    *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, text: str = WAIT
) -> Iterator[int]:
    """A Python process that is up; yields its id."""
    command = [sys.executable, "-S", "-c", text, *map(str, words)]
    environment = {**os.environ, **(env or {})}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=cwd
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield process.pid
        finally:
            process.kill()


def census(toy: Toy, changed: float | None = None, *gates: str) -> dict[int, Process]:
    found = processes.of_tree(toy.tree, time.time() if changed is None else changed, gates)
    return {process.pid: process for process in found.processes}


@pytest.mark.parametrize(
    ("how", "known_by"),
    [("argument", "command line"), ("root", "command line"), ("path", "PYTHONPATH"), ("folder", "working folder")],
)
def test_how_a_process_is_known_to_use_a_tree(how: str, known_by: str, toy: Toy) -> None:
    words: dict[str, tuple[str | Path, ...]] = {"argument": (toy.tree / "model",), "root": (toy.tree,)}
    env = {"PYTHONPATH": f"/nowhere:{toy.tree}"} if how == "path" else {}
    with running(*words.get(how, ()), env=env, cwd=toy.tree if how == "folder" else None) as pid:
        assert census(toy)[pid].known_by == (known_by,)


def test_a_process_of_another_tree_with_a_longer_name_is_none_of_this(toy: Toy) -> None:
    other = toy.tree.with_name("tree2")
    other.mkdir()
    with running(other / "model", env={"PYTHONPATH": str(other)}, cwd=other) as pid:
        assert pid not in census(toy)


def test_who_started_before_the_change_has_old_code_and_who_started_after_it_has_not(toy: Toy) -> None:
    with running(toy.tree) as before:
        time.sleep(0.05)
        changed = time.time()
        time.sleep(0.05)
        with running(toy.tree) as after:
            found = census(toy, changed)
            assert (found[before].older, found[after].older) == (True, False)
            assert changed - 60 < found[before].started < changed < found[after].started < time.time()
            assert [process.pid for process in processes.older_than(toy.tree, changed)] == [before]


def test_a_late_fork_of_an_early_process_has_the_old_code_too(toy: Toy) -> None:
    # One write a line: two processes print into one pipe.
    told = "os.write(1, b'%d\\n' % (os.fork() or os.getpid()))"
    text = f"import os, sys\nprint('up', flush=True)\ninput()\n{told}\ninput()"
    command = [sys.executable, "-S", "-c", text, str(toy.tree)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        time.sleep(0.05)
        changed = time.time()
        time.sleep(0.05)
        process.stdin.write("\n")
        process.stdin.flush()
        child = max(int(process.stdout.readline()), int(process.stdout.readline()))
        found = census(toy, changed)
        process.kill()
    assert found[child].started > changed
    assert found[child].older


def test_the_gates_of_a_process_are_those_that_it_was_started_with(toy: Toy) -> None:
    gates = ("SGLANG_RESEARCH_A", "SGLANG_RESEARCH_B")
    with running(toy.tree, env={gates[0]: "1", "SGLANG_RESEARCH_OTHER": "1"}) as pid:
        assert census(toy, None, *gates)[pid].gates == {gates[0]: "1"}


def test_to_a_user_without_rights_the_processes_of_others_are_closed_and_counted(toy: Toy) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")

    def told() -> list[list[object]]:
        found = processes.of_tree(toy.tree, time.time(), ("PATH",))
        rows: list[list[object]] = [[process.pid, process.gates] for process in found.processes]
        return [[found.closed], *rows]

    with running(toy.tree) as named, running(env={"PYTHONPATH": str(toy.tree)}) as unnamed:
        (closed,), *rest = trees.forked(told, unprivileged=True)
        assert [named, None] in rest
        assert unnamed not in [row[0] for row in rest]
        assert isinstance(closed, int)
        assert closed >= 1
        assert unnamed in census(toy)


def test_one_that_ends_while_it_is_looked_at_is_left_out(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(entry: Path, root: Path) -> tuple[tuple[str, ...], bool]:
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(processes, "_uses", gone)
    assert processes.of_tree(toy.tree, time.time()) == Census((), 0)


# In the verbs.


@pytest.fixture
def gated(toy: Toy) -> Toy:
    patch = toy.bundle / "patches/prefill/alpha-first.patch"
    patch.write_bytes(patch.read_bytes().replace(b"Gate: none; a toy", b"Gate: SGLANG_RESEARCH_TOY"))
    toy.pin()
    return toy


def test_patched_on_disk_and_old_code_in_memory_is_visible(gated: Toy) -> None:
    with running(gated.tree, env={"SGLANG_RESEARCH_TOY": "1"}) as before:
        time.sleep(0.05)
        assert trees.apply(gated).code == 0
        time.sleep(0.05)
        with running(gated.tree) as after:
            told = trees.status(gated, "--processes", "--json").table["result"]["status"]
            text = trees.status(gated, "--processes").out
    rows = {row["pid"]: row for row in told["processes"]}
    assert (rows[before]["older"], rows[before]["gates"]) == (True, {"SGLANG_RESEARCH_TOY": "1"})
    assert (rows[after]["older"], rows[after]["gates"]) == (False, {})
    assert rows[after]["known_by"] == ["command line"]
    assert [row["pid"] for row in told["older_processes"]] == [before]
    assert isinstance(told["closed_processes"], int)
    lines = [line for line in text.splitlines() if line.startswith("process:")]
    assert [f"pid {pid}" in line for pid, line in zip(sorted(rows), lines, strict=True)] == [True, True]
    assert "OLD CODE, from before the change" in next(line for line in lines if f"pid {before}" in line)
    assert "SGLANG_RESEARCH_TOY=1" in text


def test_without_the_option_status_has_the_old_ones_alone(toy: Toy) -> None:
    told = trees.status(toy, "--json").table["result"]["status"]
    assert (told["processes"], told["closed_processes"]) == (None, None)


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_a_change_below_a_running_process_is_told_or_refused(verb: str, toy: Toy) -> None:
    if verb == "revert":
        assert trees.apply(toy).code == 0
    before = trees.snapshot(toy.tree)
    with running(toy.tree) as pid:
        for more in ((), ("-n",)):
            done = trees.run(toy, verb, "--root", toy.tree, "--refuse-if-running", *more, "--json")
            assert (done.code, done.reason) == (Exit.REFUSED, "running")
            assert f"pid {pid}" in done.table["error"]["found"]
        assert trees.snapshot(toy.tree) == before
        done = trees.run(toy, verb, "--root", toy.tree)
        assert done.code == Exit.DONE
        assert "warning: python" in done.out and f"pid {pid}, runs from this tree: it keeps the old code" in done.out
    level = trees.level(toy)
    assert level == (0 if verb == "revert" else 3)
    other = "apply" if verb == "revert" else "revert"
    assert trees.run(toy, other, "--root", toy.tree, "--refuse-if-running").code == Exit.DONE


def test_where_nothing_is_to_be_done_nobody_is_in_the_way(toy: Toy) -> None:
    with running(toy.tree):
        assert trees.revert(toy, "--refuse-if-running").code == Exit.NOTHING_TO_DO


def test_without_a_proc_what_was_to_be_refused_is_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> Census:
        raise FileNotFoundError(2, "No such file or directory", "/proc")

    monkeypatch.setattr(processes, "of_tree", closed)
    before = trees.snapshot(toy.tree)
    assert trees.apply(toy, "--refuse-if-running").code == Exit.FAILED
    assert trees.snapshot(toy.tree) == before
    assert trees.apply(toy).code == Exit.DONE
