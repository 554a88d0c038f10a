"""docs/states.md as its reader takes it: each command in each state does what the table says, and nothing else."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from patchbundle.disk import Disk
from tests import toy as toys
from tests import trees
from tests.test_docs import code, page, rows, section
from tests.toy import Toy
from tests.trees import Result

TABLE = rows(section(page("docs/states.md"), "What each command does in each state"))
COLUMNS = ("base", "patched, k < n", "patched, k = n", "drifted", "interrupted")
LEVELS = {"base": 0, "patched, k < n": 1, "patched, k = n": len(toys.LEVELS)}
STARTED = 7  # the exit code of the command that `exec` starts


def test_the_columns_are_those_that_are_tried_here() -> None:
    head = next(line for line in page("docs/states.md").splitlines() if line.startswith("| command |"))
    assert tuple(cell.strip() for cell in head.strip("|").split("|"))[1:] == COLUMNS


def die(name: str, number: int) -> type[Disk]:
    """A disk that ends this process before its call ``name`` of that number on a file that is not the journal."""
    seen = 0

    def before(_: Disk, called: str, path: str) -> None:
        nonlocal seen
        seen += called == name and not path.startswith(".patchbundle-journal")
        if seen == number:
            trees.kill_self()

    return trees.hooked(before)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Toy]:
    """A toy in each state; of the interrupted one, one in each phase in which the answers differ."""
    first = toys.make(tmp_path_factory.mktemp("states"))

    def copied(name: str, of: Path) -> Toy:
        return replace(first, tree=Path(shutil.copytree(of, first.tree.parent / name, symlinks=True)))

    made = {"base": first}
    made["patched, k < n"] = copied("some", first.tree)
    assert trees.apply(made["patched, k < n"], "--to", toys.LEVELS[0]).code == 0
    made["patched, k = n"] = copied("all", first.tree)
    assert trees.apply(made["patched, k = n"]).code == 0
    made["drifted"] = copied("drifted", made["patched, k = n"].tree)
    (made["drifted"].tree / "sglang/srt/engine.py").write_bytes(b"edited\n")
    for phase, call, number in (("commit", "rename", 2), ("finish", "unlink", 2)):
        toy = made[f"interrupted, {phase}"] = copied(phase, first.tree)
        with pytest.raises(trees.Killed):
            trees.forked(lambda toy=toy, call=call, number=number: trees.change(toy, "apply", None, die(call, number)))  # type: ignore[misc]
        assert f'"phase": "{phase}"'.encode() in (toy.tree / ".patchbundle-journal").read_bytes()
    return made


def cell(row: list[str], column: int, index: int) -> str:
    """What the table says of the command ``index`` of a row, with "the same" and "as without -n" resolved."""
    at = column
    while row[1 + at].startswith("the same"):
        at -= 1
    if not row[1 + at].startswith("as without"):
        return row[1 + at]
    verb = code(row[0])[index].removesuffix(" -n")
    return next(other[1 + column] for other in TABLE if code(other[0]) == [verb])


def typed(toy: Toy, words: str, out: Path) -> Result:
    """The command of a row. FILE is one that a patch touches."""
    if words.startswith(("check_sources.py", "--expect")):
        return trees.check(toy, "--json", *words.removeprefix("check_sources.py --root").split())
    verb, *options = words.replace("FILE", "sglang/srt/engine.py").replace("--root", "").split()
    if verb == "exec":
        tail = ["--root", str(toy.tree), "--bundle", str(toy.bundle), "--json", "--", "sh", "-c", f"exit {STARTED}"]
        return trees.child(toy, "exec", "prefill", *options, *tail)
    more = ["--out", str(out)] if verb == "attest" else []
    return trees.run(toy, verb, *options, "--root", toy.tree, "--json", *more)


def expected(said: str, words: str) -> tuple[int, str | None]:
    """Exit code, and the word of the refusal if the cell has one."""
    if said.startswith("starts CMD"):
        return STARTED, None
    if words.startswith("explain"):
        # "as the nearest level": a look that refuses nothing.
        return (0 if said.startswith("as the nearest") else int(said[0])), None
    return int(said[0]), next(iter(code(said)), None)


COMMANDS = [(row, words, index) for row in TABLE for index, words in enumerate(code(row[0]))]


@pytest.mark.parametrize(("row", "words", "index"), COMMANDS, ids=[words for _, words, _ in COMMANDS])
def test_a_command_does_in_each_state_what_the_table_says(
    row: list[str], words: str, index: int, states: Mapping[str, Toy], tmp_path: Path
) -> None:
    for name, before in states.items():
        column = COLUMNS.index(name.removesuffix(", commit").removesuffix(", finish"))
        said = cell(row, column, index)
        toy = replace(before, tree=Path(shutil.copytree(before.tree, tmp_path / name / "tree", symlinks=True)))
        was = trees.snapshot(toy.tree)
        done = typed(toy, words, tmp_path / name / "out")
        exit_code, reason = expected(said, words)
        if words == "recover --back" and name == "interrupted, finish":
            exit_code, reason = int(said[said.index("or ") + 3]), "past-return"
        assert done.code == exit_code, (name, said, done)
        if reason is not None:
            assert done.reason == reason, (name, said)
        is_writer = words in ("apply", "revert") or words.startswith("recover")
        if not is_writer or exit_code:
            assert trees.snapshot(toy.tree) == was, (name, words)
        if is_writer and (match := re.search(r"to (level n|base)", said)):
            assert trees.level(toy) == (len(toys.LEVELS) if match[1] == "level n" else 0)


@pytest.mark.parametrize("phase", ["commit", "finish"])
@pytest.mark.parametrize("back", [False, True])
def test_an_interrupted_tree_is_at_a_known_level_again_after_recovery(
    phase: str, back: bool, states: Mapping[str, Toy], tmp_path: Path
) -> None:
    before = states[f"interrupted, {phase}"]
    toy = replace(before, tree=Path(shutil.copytree(before.tree, tmp_path / "tree", symlinks=True)))
    done = trees.run(toy, "recover", "--root", toy.tree, *(["--back"] if back else []))
    if back and phase == "finish":
        # As docs/recovery.md says of this phase: finish, then revert.
        assert done.code == 4
        assert trees.run(toy, "recover", "--root", toy.tree).code == 0
        done = trees.revert(toy)
    assert done.code == 0
    assert trees.status(toy).code == 0
    assert trees.level(toy) == (0 if back else len(toys.LEVELS))


@pytest.mark.parametrize("name", LEVELS)
def test_the_state_that_a_look_tells_is_the_one_that_stands_there(name: str, states: Mapping[str, Toy]) -> None:
    status = trees.status(states[name], "--json").table["result"]["status"]
    assert status["level"] == LEVELS[name]
