"""What a reader of a tree is told: which patch touched a file, how drift differs, and nothing private in a ticket."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from patchbundle import private
from patchbundle.errors import Exit
from tests import toy as toys
from tests import trees
from tests.toy import Toy
from tests.trees import Result

ENGINE = "sglang/srt/engine.py"
POOL = "sglang/srt/layers/pool.py"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return toys.make(tmp_path)


def explain(toy: Toy, file: str | Path, *more: str) -> Result:
    return trees.run(toy, "explain", "--root", toy.tree, *more, file)


# explain


def test_every_patch_that_touches_a_file_is_told_with_reason_gate_and_way_off(toy: Toy) -> None:
    place = toy.bundle / "patches/prefill/beta-second.patch"
    diff = place.read_bytes().partition(b"\n\n")[2]
    place.write_bytes(toys.header(Why="the stock pool is cold", Gate="SGLANG_RESEARCH_BETA") + diff)
    toy.pin()
    assert trees.apply(toy).code == 0
    told = explain(toy, ENGINE, "--json").table["result"]["explain"]
    assert (told["path"], told["kind"], told["word"], told["level"]) == (ENGINE, "file", "patched at step 2", 3)
    first, second = told["patches"]
    assert (first["id"], first["level"], first["applied"], first["does"]) == ("alpha-first", 1, True, "changes")
    assert (second["why"], second["gate"]) == ("the stock pool is cold", "SGLANG_RESEARCH_BETA")
    assert second["off"].endswith(f"revert --root {toy.tree} --to alpha-first")
    text = explain(toy, toy.tree / ENGINE).out
    for words in ("beta-second: patch 2, applied", "why:   the stock pool is cold", "(and the 1 above it)"):
        assert words in text


def test_the_way_off_that_is_told_takes_the_patch_off(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    off = explain(toy, POOL, "--json").table["result"]["explain"]["patches"][0]["off"].split()
    assert trees.run(toy, *off[off.index("revert") :]).code == 0
    after = explain(toy, POOL, "--json").table["result"]["explain"]
    assert (after["level"], after["word"], after["patches"][0]["applied"]) == (1, "base", False)
    assert "off:" not in explain(toy, POOL).out


def test_a_source_of_ours_is_told_as_installed(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    told = explain(toy, f"{toys.HOME}/alpha.py", "--json").table["result"]["explain"]["patches"]
    assert [(patch["id"], patch["does"]) for patch in told] == [("alpha-first", "installs")]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("sglang/_version.py", "no patch of this series touches it"),
        ("sglang/none.py", "(absent)"),
        (f"{toys.HOME}/receipt.json", "the receipt"),
        (toys.RECORD, "keep the lines"),
        ("sglang", "(folder)"),
    ],
)
def test_what_no_patch_touches_is_told_as_that(toy: Toy, file: str, words: str) -> None:
    assert trees.apply(toy).code == 0
    done = explain(toy, file)
    assert done.code == 3
    assert words in done.out


@pytest.mark.parametrize("file", ["", ".", "..", "../tree/sglang", "/etc/passwd", "a\tb", "sglang/../x"])
def test_what_names_no_file_of_the_tree_is_refused(toy: Toy, file: str) -> None:
    done = explain(toy, file, "--json")
    assert (done.code, done.reason) == (1, "name")


def test_a_drifted_tree_is_explained_by_its_nearest_level_and_an_interrupted_one_not_at_all(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    (toy.tree / ENGINE).write_bytes(b"edited\n")
    told = explain(toy, ENGINE, "--json").table["result"]["explain"]
    assert (told["word"], told["level"], [patch["applied"] for patch in told["patches"]]) == (
        "drifted",
        None,
        [True, True],
    )
    (toy.tree / ".patchbundle-journal").write_bytes(b"{}")
    assert explain(toy, ENGINE, "--json").reason == "recovery-needed"


def test_explaining_changes_nothing(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    before = trees.snapshot(toy.tree)
    assert explain(toy, ENGINE).code == 0
    assert trees.status(toy, "--diff").code == 0
    assert trees.snapshot(toy.tree) == before


# status --diff


def differences(toy: Toy) -> dict[str, str]:
    found = trees.status(toy, "--diff", "--json").table["result"]["status"]["diff"]
    return {item["path"]: item["diff"] for item in found}


@pytest.mark.parametrize("level", range(4))
def test_drift_is_shown_against_the_nearest_level(toy: Toy, level: int) -> None:
    if level:
        assert trees.apply(toy, "--to", toys.LEVELS[level - 1]).code == 0
    assert differences(toy) == {}
    place = toy.tree / ENGINE
    place.write_bytes(place.read_bytes().replace(b"engine = 20\n", b"engine = 21\nengine = 22\n"))
    shown = differences(toy)
    assert list(shown) == [ENGINE]
    changed = [line for line in shown[ENGINE].splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == ["-engine = 20", "+engine = 21", "+engine = 22"]


def remove(place: Path) -> None:
    place.unlink()


def link(place: Path) -> None:
    place.unlink()
    place.symlink_to("/nowhere")


def folder(place: Path) -> None:
    place.unlink()
    place.mkdir()


def executable(place: Path) -> None:
    place.chmod(0o755)


def huge(place: Path) -> None:
    with place.open("r+b") as stream:
        stream.truncate(5 << 20)


def bytes_of_no_text(place: Path) -> None:
    place.write_bytes(b"\0\1")


def latin(place: Path) -> None:
    place.write_bytes(b"\xe9\n")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove, "deleted file mode 100644"),
        (link, "a link stands there"),
        (folder, "a folder stands there"),
        (executable, "new mode 100755"),
        (huge, "5242880 bytes: too many to be shown"),
        (bytes_of_no_text, "bytes that are no text"),
        (latin, "+\\xe9"),
    ],
)
def test_drift_of_any_kind_is_shown_or_said_why_not(toy: Toy, damage: Callable[[Path], None], words: str) -> None:
    damage(toy.tree / POOL)
    assert words in differences(toy)[POOL]


def test_a_foreign_file_of_ours_is_shown_whole(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    (toy.tree / toys.HOME / "more.py").write_bytes(b"more = 1\n")
    (toy.tree / toys.HOME / "deep").mkdir()
    shown = differences(toy)
    assert shown[f"{toys.HOME}/more.py"].endswith("+more = 1\n")
    assert shown[f"{toys.HOME}/deep"] == "a folder"


def on_a_terminal(toy: Toy, *words: str) -> str:
    """What a command of its own writes to a terminal."""
    ours, its = os.openpty()
    command = [sys.executable, str(trees.REPOSITORY / "tools/apply.py"), *words]
    with subprocess.Popen(command, env=toy.environment, stdin=subprocess.DEVNULL, stdout=its) as process:
        os.close(its)
        said = b""
        # The other side is gone: Linux calls that an error.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 1 << 16):
                said += part
    os.close(ours)
    assert process.returncode == Exit.REFUSED
    return said.decode()


def test_a_terminal_gets_colours_and_a_file_none(toy: Toy) -> None:
    place = toy.tree / ENGINE
    place.write_bytes(place.read_bytes().replace(b"engine = 20\n", b"engine = 21\n"))
    words = ("status", "--bundle", str(toy.bundle), "--root", str(toy.tree), "--diff")
    plain, bright = trees.child(toy, *words).out, on_a_terminal(toy, *words)
    assert "\x1b" not in plain
    assert "\x1b[31m-engine = 20\x1b[0m" in bright
    assert "\x1b[32m+engine = 21\x1b[0m" in bright
    assert "\x1b[36m@@" in bright


def test_what_stands_in_a_file_does_not_speak_to_the_terminal(toy: Toy) -> None:
    (toy.tree / ENGINE).write_bytes(b"\x1b]0;title\x07\x1b[2J\r\xc2\x9b31m\tkept\n")
    words = ("status", "--bundle", str(toy.bundle), "--root", str(toy.tree), "--diff")
    shown = trees.child(toy, *words).out
    assert not {"\x1b", "\x07", "\r", "\x9b"} & set(shown)
    assert "+\\x1b]0;title\\x07\\x1b[2J\\r\\x9b31m\tkept" in shown


def test_without_the_archive_the_difference_is_refused_and_the_status_is_not(toy: Toy) -> None:
    (toy.tree / ENGINE).write_bytes(b"edited\n")
    shutil.rmtree(toy.cache)
    assert trees.status(toy).code == 1
    assert trees.status(toy, "--diff", "--json").reason == "not-fetched"


# The ticket


def test_status_as_json_names_no_folder_of_the_machine(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(toy.tree / "caches"))
    monkeypatch.setenv("HOME", str(toy.tree.parent / "people" / "somebody"))
    assert trees.apply(toy).code == 0
    (toy.tree / ENGINE).write_bytes(b"edited\n")
    (toy.tree / "sglang/srt/__pycache__").symlink_to("/nowhere")
    (toy.tree / toys.RECORD).write_bytes(b"edited\n")
    for words in ([], ["--diff"]):
        done = trees.status(toy, "--json", *words)
        told = done.table["result"]
        assert told["target"]["root"] == "$ROOT"
        assert told["status"]["stale_bytecode"] == ["$ROOT/sglang/srt/__pycache__"]
        for part in (str(toy.tree), str(toy.tree.parent), "somebody", "/dev/", "/tmp"):
            assert part not in done.out.replace("/dev/null", "")


def test_a_refusal_of_status_names_no_folder_either(toy: Toy) -> None:
    for root in (toy.tree / "none", toy.tree / ".." / "elsewhere", toy.bundle):
        done = trees.run(toy, "status", "--root", root, "--json")
        assert done.code == 1
        assert str(toy.tree.parent) not in done.out
        assert "$ROOT" in done.table["error"]["where"]
    (toy.tree / ".patchbundle-journal").write_bytes(b"{}")
    error = trees.status(toy, "--json").table["error"]
    assert error["where"] == "$ROOT"
    assert error["next"].endswith("recover --root $ROOT")
    (toy.bundle / "patches/series.toml").write_bytes(b"?")
    assert "$BUNDLE" in json.dumps(trees.status(toy, "--json").table) or str(toy.bundle) not in trees.status(toy).out


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("/people/a/tree/x.py: gone", "$ROOT/x.py: gone"),
        ("/people/a/trees/x.py", "$HOME/trees/x.py"),
        ("/people/ab/secret/x.py and /other/b/c", "/…/x.py and /…/c"),
        ("see https://github.com/sgl-project/sglang/issues/1", "see https://github.com/sgl-project/sglang/issues/1"),
        ("sglang/srt/a.py, file:/opt/people/me", "sglang/srt/a.py, file:/…/me"),
        ("a / b, 1/2, /", "a / b, 1/2, /"),
        ("/people/a", "$HOME"),
    ],
)
def test_paths_are_replaced_and_nothing_else(text: str, made: str) -> None:
    places = private.names_of(
        [("$HOME", "/people/a"), ("$ROOT", Path("/people/a/tree")), ("$NONE", None), ("$TOP", "/")]
    )
    assert private.scrubbed({text: [text, 1, None, True]}, places) == {made: [made, 1, None, True]}
