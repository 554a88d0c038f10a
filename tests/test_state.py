"""Where a tree stands: the level, the word of each file, and what else status tells."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchbundle import processes, work
from tests import toy as toys
from tests import trees
from tests.toy import Toy

ENGINE = "sglang/srt/engine.py"


def words(toy: Toy) -> dict[str, str]:
    return {file.path: file.word for file in trees.look(toy).files}


@pytest.mark.parametrize("level", range(4))
def test_every_level_is_recognised_by_its_hashes_alone(toy: Toy, level: int) -> None:
    """The bytes are laid out by hand: no run, no receipt, no journal tells."""
    if level:
        trees.change(toy, "apply", toys.LEVELS[level - 1])
        (toy.tree / toys.HOME / "receipt.json").unlink()
    state = trees.look(toy)
    assert (state.level, state.level_name) == (level, ["base", *toys.LEVELS][level])
    assert state.receipt == ("missing" if level else "none")
    for path, word in words(toy).items():
        there = path in toys.after(level)
        assert (word == "absent") == (not there)
        assert not there or word == "base" or word.startswith("patched at step ")


def test_a_file_of_another_level_is_named_as_such(toy: Toy) -> None:
    trees.change(toy, "apply")
    (toy.tree / ENGINE).write_bytes(toys.ENGINE_ALPHA)
    state = trees.look(toy)
    assert (state.level, state.nearest) == (None, 3)
    assert words(toy)[ENGINE] == "as at level 1"


def test_words_of_damage(toy: Toy) -> None:
    trees.change(toy, "apply")
    (toy.tree / ENGINE).write_bytes(b"other")
    (toy.tree / "sglang/srt/launch.sh").chmod(0o644)
    (toy.tree / "sglang/srt/layers/pool.py").unlink()
    (toy.tree / "sglang/srt/layers/wired.py").unlink()
    (toy.tree / "sglang/srt/layers/wired.py").mkdir()
    (toy.tree / "sglang/srt/old.py").write_bytes(b"back")
    found = words(toy)
    assert found[ENGINE] == "drifted"
    assert found["sglang/srt/launch.sh"] == "wrong mode"
    assert found["sglang/srt/layers/pool.py"] == "missing"
    assert found["sglang/srt/layers/wired.py"] == "wrong kind"
    assert found["sglang/srt/old.py"] == "unexpected"


def test_other_bits_of_the_mode_are_the_installers_affair(toy: Toy) -> None:
    (toy.tree / ENGINE).chmod(0o600)
    (toy.tree / "sglang/srt/old.py").chmod(0o664)
    assert trees.level(toy) == 0


def test_caches_in_our_folders_are_not_unexpected(toy: Toy) -> None:
    trees.change(toy, "apply")
    (toy.tree / toys.HOME / "__pycache__").mkdir()
    (toy.tree / toys.HOME / "__pycache__" / "alpha.cpython-311.pyc").write_bytes(b"")
    assert trees.level(toy) == 3


def test_a_damaged_record_is_no_level(toy: Toy) -> None:
    (toy.tree / toys.RECORD).write_bytes(b"")
    state = trees.look(toy)
    assert state.level is None
    assert state.record_fault is not None
    assert trees.status(toy, "--json").table["result"]["status"]["record"] == "drifted"


def test_gates_set_in_the_environment_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = toys.make(tmp_path)
    patch = toy.bundle / "patches/prefill/alpha-first.patch"
    patch.write_bytes(patch.read_bytes().replace(b"Gate: none; a toy", b"Gate: SGLANG_RESEARCH_TOY"))
    toy.pin()
    assert "gate:" not in trees.status(toy).out
    monkeypatch.setenv("SGLANG_RESEARCH_TOY", "1")
    monkeypatch.setenv("SGLANG_RESEARCH_OTHER", "1")
    told = trees.status(toy)
    assert "gate:    SGLANG_RESEARCH_TOY=1" in told.out
    assert "OTHER" not in told.out


def test_processes_from_before_the_change_are_told_and_later_ones_are_not(toy: Toy) -> None:
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)", f"{toy.tree}/model"]
    before = subprocess.Popen(command, stdout=subprocess.PIPE)
    after = None
    try:
        assert before.stdout is not None
        before.stdout.readline()
        time.sleep(0.05)
        now = time.time() + 5  # the clock of /proc counts in hundredths, from a boot time in whole seconds
        assert before.pid in [process.pid for process in processes.older_than(toy.tree, now)]
        assert processes.older_than(toy.tree, time.time() - 3600) == []
        assert before.pid not in [process.pid for process in processes.older_than(toy.tree.parent / "other", now)]
    finally:
        for process in (before, after):
            if process is not None:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


def test_an_interpreter_in_usr_bin_is_not_taken_for_a_user_of_every_tree_below_usr(tmp_path: Path) -> None:
    """Only a virtual environment's own bin/ tells of its site-packages."""
    site = tmp_path / "usr/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    python = tmp_path / "usr/bin/python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    process = subprocess.Popen([str(python), "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        later = time.time() + 5
        time.sleep(0.2)
        assert process.pid not in [item.pid for item in processes.older_than(site, later)]
        (tmp_path / "usr/pyvenv.cfg").write_text("")
        assert process.pid in [item.pid for item in processes.older_than(site, later)]
    finally:
        process.kill()
        process.communicate()


def test_a_look_leaves_no_trace(toy: Toy) -> None:
    trees.change(toy, "apply")
    before = trees.snapshot(toy.tree)
    opened = set(os.listdir("/proc/self/fd"))
    trees.look(toy)
    work.status(*trees.load(toy))
    assert trees.snapshot(toy.tree) == before
    assert set(os.listdir("/proc/self/fd")) == opened
