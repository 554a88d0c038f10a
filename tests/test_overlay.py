"""An overlay: what apply would make, beside a tree that stays as it is; and no way to import another copy unseen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patchbundle import cli, guard, manifest, overlay
from patchbundle import target as target_module
from patchbundle.disk import Disk
from patchbundle.errors import BundleError, Exit, Reason
from tests import nodes, trees
from tests import toy as toys
from tests.toy import Toy
from tests.trees import Snapshot

WHERE = "import sglang.srt.engine as engine; print(engine.__file__)"


def make(toy: Toy, place: Path, *more: str | Path) -> trees.Result:
    return trees.apply(toy, "--overlay", place, *more)


def of_ours(root: Path) -> Snapshot:
    """The package and its metadata. Owners and times are not a matter of bytes."""
    found = trees.snapshot(root, times=False)
    return {name: item for name, item in found.items() if name.startswith("sglang")}


def test_an_overlay_is_what_apply_makes_and_the_tree_is_as_it_was(toy: Toy, tmp_path: Path) -> None:
    before = trees.snapshot(toy.tree)
    done = make(toy, tmp_path / "over", "--json")
    assert (done.code, done.table["result"]["plan"]["to"]) == (Exit.DONE, "gamma-third")
    assert trees.snapshot(toy.tree) == before
    assert sorted(path.name for path in (tmp_path / "over").iterdir()) == ["sglang", toys.INFO]
    assert trees.apply(toy).code == 0
    assert of_ours(tmp_path / "over") == of_ours(toy.tree)


@pytest.mark.parametrize("start", toys.LEVELS)
@pytest.mark.parametrize("goal", toys.LEVELS)
def test_an_overlay_leads_from_the_level_of_the_tree_upwards(start: str, goal: str, toy: Toy, tmp_path: Path) -> None:
    assert trees.apply(toy, "--to", start).code == 0
    done = make(toy, tmp_path / "over", "--to", goal)
    if toys.LEVELS.index(goal) < toys.LEVELS.index(start):
        assert done.code == Exit.REFUSED
        assert not (tmp_path / "over").exists()
    else:
        assert done.code == Exit.DONE
        told = trees.run(toy, "status", "--root", tmp_path / "over", "--json").table["result"]["status"]
        assert (told["name"], told["record"]) == (goal, "as pinned")


def test_an_overlay_is_a_tree_like_any_other(toy: Toy, tmp_path: Path) -> None:
    over = tmp_path / "over"
    assert make(toy, over, "--to", "alpha-first").code == 0
    assert trees.run(toy, "apply", "--root", over).code == 0
    assert trees.run(toy, "--root", over, "--expect", "applied", "--full", check=True).code == 0
    assert trees.run(toy, "revert", "--root", over).code == 0
    assert of_ours(over) == of_ours(toy.tree)


def test_a_dry_run_writes_nothing_and_refuses_what_a_run_would(toy: Toy, tmp_path: Path) -> None:
    assert make(toy, tmp_path / "over", "-n").code == Exit.DONE
    assert not (tmp_path / "over").exists()
    (tmp_path / "over").mkdir()
    (tmp_path / "over/x").touch()
    assert make(toy, tmp_path / "over", "-n").code == Exit.REFUSED


def test_an_empty_folder_that_is_there_is_kept_and_filled(toy: Toy, tmp_path: Path) -> None:
    """As a volume that a pod is given."""
    over = tmp_path / "over"
    over.mkdir(mode=0o700)
    inode = over.stat().st_ino
    assert make(toy, over).code == Exit.DONE
    assert (over.stat().st_ino, over.stat().st_mode & 0o777) == (inode, 0o700)


def test_an_overlay_changes_no_tree_that_could_be_in_use(toy: Toy, tmp_path: Path) -> None:
    assert make(toy, tmp_path / "over", "--refuse-if-running").code == Exit.USAGE


# Where it cannot be.


def taken(toy: Toy, folder: Path) -> Path:
    (folder / "over").mkdir()
    (folder / "over/x").touch()
    return folder / "over"


def file(toy: Toy, folder: Path) -> Path:
    (folder / "over").touch()
    return folder / "over"


def nowhere(toy: Toy, folder: Path) -> Path:
    return folder / "no" / "over"


def inside(toy: Toy, folder: Path) -> Path:
    return toy.tree / "over"


def itself(toy: Toy, folder: Path) -> Path:
    return toy.tree


def by_a_link(toy: Toy, folder: Path) -> Path:
    (folder / "link").symlink_to(toy.tree)
    return folder / "link" / "over"


def to_nothing(toy: Toy, folder: Path) -> Path:
    (folder / "over").symlink_to(folder / "nothing")
    return folder / "over"


def with_a_colon(toy: Toy, folder: Path) -> Path:
    return folder / "a:b"


@pytest.mark.parametrize(
    "place", [taken, file, nowhere, inside, itself, by_a_link, to_nothing, with_a_colon], ids=lambda item: item.__name__
)
def test_a_place_where_an_overlay_cannot_be_is_refused(place: object, toy: Toy, tmp_path: Path) -> None:
    assert callable(place)
    where = place(toy, tmp_path)
    before = trees.snapshot(tmp_path)
    done = make(toy, where, "--json")
    assert (done.code, done.reason) == (Exit.REFUSED, "overlay")
    assert trees.snapshot(tmp_path) == before


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_package_with_something_that_is_no_file_has_no_overlay(kind: str, toy: Toy, tmp_path: Path) -> None:
    odd = toy.tree / "sglang/odd.py"
    odd.symlink_to("_version.py") if kind == "link" else os.mkfifo(odd)
    done = make(toy, tmp_path / "over", "--json")
    assert (done.code, done.reason) == (Exit.REFUSED, "overlay")
    assert not (tmp_path / "over").exists()


def test_a_tree_that_has_drifted_or_was_left_half_way_has_no_overlay(toy: Toy, tmp_path: Path) -> None:
    (toy.tree / ".patchbundle-journal").touch()
    assert make(toy, tmp_path / "over").code == Exit.RECOVERY_NEEDED
    (toy.tree / ".patchbundle-journal").unlink()
    (toy.tree / "sglang/srt/engine.py").write_bytes(b"edited\n")
    assert make(toy, tmp_path / "over").code == Exit.REFUSED
    assert not (tmp_path / "over").exists()


def test_a_tree_that_changes_while_it_is_copied_has_none(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Disk.create

    def edit(self: Disk, path: str, *rest: object, **more: object) -> None:
        create(self, path, *rest, **more)  # type: ignore[arg-type]
        if path.endswith("_version.py"):
            (toy.tree / "sglang/srt/tool.sh").write_bytes(b"other\n")
            (toy.tree / "sglang/_version.py").write_bytes(b"other\n")

    monkeypatch.setattr(Disk, "create", edit)
    done = make(toy, tmp_path / "over", "--json")
    assert (done.code, done.reason) == (Exit.REFUSED, "swapped")
    assert not (tmp_path / "over").exists()


def test_a_crate_has_no_overlay(tmp_path: Path) -> None:
    bundle = manifest.load(cli.bundle_root())
    base = next(base for base in bundle.bases.values() if base.is_crate)
    target = target_module.Target(tmp_path / "crate", (base,), base.version, None, None, ())
    with pytest.raises(BundleError) as refusal:
        overlay.check_place(tmp_path / "over", target, base)
    assert refusal.value.reason == Reason.OVERLAY


# Stopped.


def calls(toy: Toy, place: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many calls on the file system one overlay makes."""
    count = 0
    call = Disk.call

    def counted(self: Disk, name: str, path: str, action: object) -> object:
        nonlocal count
        count += 1
        return call(self, name, path, action)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "call", counted)
        assert make(toy, place).code == Exit.DONE
    shutil.rmtree(place)
    return count


def test_failed_or_killed_at_any_call_there_is_a_whole_overlay_or_none_to_import(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, before = tmp_path / "over", trees.snapshot(toy.tree)
    total = calls(toy, over, monkeypatch)
    call = Disk.call
    whole = 0
    for at in (1, 2, total // 2, total - 4, total - 3, total - 2, total - 1, total):
        for kill in (False, True):
            seen = 0

            def stop(self: Disk, name: str, path: str, action: object, at: int = at, kill: bool = kill) -> object:
                nonlocal seen
                seen += 1
                if seen == at:
                    if kill:
                        trees.kill_self()
                    raise OSError(28, "No space left on device")
                return call(self, name, path, action)  # type: ignore[arg-type]

            with monkeypatch.context() as patch:
                patch.setattr(Disk, "call", stop)
                try:
                    code = trees.forked(lambda: make(toy, over).code)
                    assert code in (Exit.FAILED, Exit.RECOVERY_NEEDED)
                    assert not over.exists(), f"left behind after call {at}"
                except trees.Killed:
                    assert kill
            if (over / "sglang").exists():
                whole += 1
                told = trees.run(toy, "status", "--root", over, "--json").table["result"]["status"]
                # Of a whole one the folder that it was made in may be left: it is named, and a start is refused.
                assert told["name"] == "gamma-third" or told["unexpected"] == [".patchbundle-overlay"]
                assert all(row["holds"] for row in told["files"])
                assert told["record"] == "as pinned"
            elif over.exists() and list(over.iterdir()):
                assert make(toy, over, "--json").reason == "overlay"
            shutil.rmtree(over, ignore_errors=True)
    assert whole > 0
    assert trees.snapshot(toy.tree) == before


# How it is imported.


def found(python: str, env: dict[str, str], cwd: Path, *flags: str) -> Path:
    text = "import importlib.util as u; print(u.find_spec('sglang').origin)"
    command = [python, *flags, "-c", text]
    said = subprocess.run(command, env={**os.environ, **env}, cwd=cwd, capture_output=True, text=True, check=True)
    return Path(said.stdout.strip())


def test_what_it_says_to_type_makes_an_interpreter_import_the_overlay(toy: Toy, tmp_path: Path) -> None:
    over = tmp_path / "it's over"
    said = make(toy, over).out
    line = next(line.strip() for line in said.splitlines() if "export PYTHONPATH=" in line)
    script = f'{line}\nexec "$0" -c "import importlib.util as u; print(u.find_spec(\'sglang\').origin)"'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable],
        env={**os.environ, "PYTHONPATH": str(toy.tree)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(over / "sglang/__init__.py")


def test_a_working_folder_that_would_shadow_it_is_told(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "sglang").mkdir(parents=True)
    (here / "sglang/__init__.py").touch()
    monkeypatch.chdir(here)
    over = tmp_path / "over"
    done = make(toy, over, "--json")
    assert done.code == Exit.DONE
    assert any(str(here / "sglang/__init__.py") in warning for warning in done.table["result"]["warnings"])
    assert found(sys.executable, {"PYTHONPATH": str(over)}, here) == here / "sglang/__init__.py", "else a false alarm"
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(over)
    assert not any("sglang/__init__.py" in warning for warning in make(toy, over, "--json").table["result"]["warnings"])


def test_exec_puts_it_first_and_refuses_what_would_come_before_it(toy: Toy, tmp_path: Path) -> None:
    over, here = tmp_path / "over", tmp_path / "here"
    assert make(toy, over).code == 0
    (here / "sglang").mkdir(parents=True)
    (here / "sglang/__init__.py").touch()
    text = "import importlib.util as u, os, json; "
    text += "print(json.dumps([u.find_spec('sglang').origin, os.environ['PYTHONPATH']]))"
    where = ("--overlay", over)
    command = (sys.executable, "-c", text)
    for before, after in ((None, f"{over}"), (f"{toy.tree}:/x", f"{over}:{toy.tree}:/x")):
        env = {} if before is None else {"PYTHONPATH": before}
        done = nodes.start(toy, *command, where=where, env=env, cwd=tmp_path)
        assert json.loads(done.out) == [str(over / "sglang/__init__.py"), after]
    done = nodes.start(toy, *command, where=where, cwd=here)
    assert (done.code, "[shadowed]" in done.err) == (Exit.REFUSED, True)
    (over / "sglang/srt/engine.py").write_bytes(b"edited\n")
    assert "[drift]" in nodes.start(toy, *command, where=where, cwd=tmp_path).err


@pytest.mark.parametrize("way", ["-I", "-E", "-sE", "colon", "above", "none"])
def test_an_overlay_that_the_command_would_not_import_from_is_refused(way: str, toy: Toy, tmp_path: Path) -> None:
    over = tmp_path / ("a:b" if way == "colon" else "lib/python3.11/site-packages")
    over.parent.mkdir(parents=True, exist_ok=True)
    assert make(toy, tmp_path / "over").code == 0
    (tmp_path / "over").rename(over)
    flags = (way,) if way.startswith("-") else ()
    command = (sys.executable, *flags, "-c", "import sglang; print(sglang.__file__)")
    named = tmp_path if way == "above" else over
    done = nodes.start(toy, *command, where=("--overlay", named), cwd=toy.bundle)
    if way == "none":
        assert (done.code, done.out) == (0, f"{over}/sglang/__init__.py\n")
    else:
        assert (done.code, done.out, "[shadowed]" in done.err) == (Exit.REFUSED, "", True)


@pytest.mark.parametrize(
    ("words", "ignores"),
    [
        ("python3 -I -m x", True),
        ("python3 -Xdev -sE x.py", True),
        ("python3 -X dev -W error -E -c x", True),
        ("python3 -X E -m x -E", False),
        ("python3 -WI -mE", False),
        ("python3 x.py -I", False),
        ("python3 -cI", False),
        ("python3 - -I", False),
        ("python3 --version -I", False),
        ("python3 -u", False),
        ("sh -E", False),
        ("", False),
    ],
)
def test_an_interpreter_that_takes_nothing_from_its_environment_is_known(words: str, ignores: bool) -> None:
    assert guard.ignores_environment(words.split()) == ignores
