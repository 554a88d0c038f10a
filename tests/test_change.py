"""The plain form of apply and revert, which needs no command line: it ends as the whole one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from patchbundle import change
from patchbundle.errors import Exit
from tests import trees
from tests.toy import Toy
from tests.trees import REPOSITORY, Result

PLAIN = (
    "import sys; from pathlib import Path; from patchbundle import change; change.at_once({words!r}, Path({bundle!r}))"
)


def plain(toy: Toy, *words: str, before: str = "") -> Result:
    """These words in their plain form, in a process of its own; exit code 99 if they are left to the command line."""
    call = PLAIN.format(words=words, bundle=str(toy.bundle))
    text = f"{before}\n{call}\nsys.exit(99 if 'click' not in sys.modules else 98)"
    environment = {**toy.environment, "PYTHONPATH": str(REPOSITORY / "tools")}
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120)
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("plan", "--root", "x"),
        ("apply",),
        ("apply", "--root"),
        ("apply", "--root", ""),
        ("apply", "--root", "-x"),
        ("apply", "--root=x"),
        ("apply", "x", "--root"),
        ("apply", "--root", "x", "--root", "x"),
        ("apply", "--root", "x", "--json", "--json"),
        ("apply", "--root", "x", "--role", "other"),
        ("apply", "--root", "x", "--python", "y"),
        ("apply", "--root", "x", "--dry-run"),
        ("apply", "--root", "x", "-n"),
        ("apply", "--root", "x", "--to", "--json"),
        ("apply", "--root", "x", "--release", "1"),
        ("apply", "--root", "x", "--refuse-if-running"),
        ("apply", "--root", "x", "--require-signature", "y"),
        ("apply", "--role", "prefill"),
        ("apply", "--to", "base"),
        ("apply", "--help"),
    ],
    ids=" ".join,
)
def test_any_other_form_is_left_to_the_command_line(words: tuple[str, ...], tmp_path: Path) -> None:
    assert change.at_once(words, tmp_path / "no bundle") is None  # type: ignore[func-returns-value]


def test_a_plain_run_says_and_does_what_the_whole_command_line_does(toy: Toy) -> None:
    root = ("--root", str(toy.tree))
    steps: list[tuple[str, ...]] = [
        ("apply", *root, "--to", "beta-second"),
        ("apply", "--json", *root, "--role", "prefill"),
        ("apply", *root),
        ("revert", *root, "--to", "alpha-first", "--json"),
        ("apply", *root, "--to", "nothing-like-it"),
        ("apply", *root, "--role", "decode"),
        ("revert", "--root", str(toy.tree / "nowhere")),
        ("revert", *root),
        ("revert", *root),
    ]
    before = trees.snapshot(toy.tree, times=False)
    told: list[list[tuple[int, str, str, trees.Snapshot]]] = []
    for at_once in (True, False):
        told.append([])
        for step in steps:
            done = plain(toy, *step) if at_once else trees.child(toy, *step, "--bundle", str(toy.bundle))
            # How far it is, a slow machine tells.
            err = "".join(line for line in done.err.splitlines(True) if not line.startswith("…"))
            told[-1].append((done.code, done.out, err, trees.snapshot(toy.tree, times=False)))
    for step, one, two in zip(steps, *told, strict=True):
        assert one == two, step
    assert [code for code, *_ in told[0]] == [0, 0, 3, 0, 1, 1, 1, 0, 3]
    assert told[0][-1][-1] == before


def test_it_needs_no_click(toy: Toy) -> None:
    """Half of what the one file compiles at a start is click and the command line."""
    closed = "import sys; sys.modules['click'] = None; sys.modules['patchbundle.cli'] = None"
    assert plain(toy, "apply", "--root", str(toy.tree), before=closed).code == Exit.DONE
    assert plain(toy, "plan", "--root", str(toy.tree), before=closed).code == 98
    assert plain(toy, "plan", "--root", str(toy.tree)).code == 99


@pytest.mark.parametrize("fault", ["KeyboardInterrupt()", "OSError(5, 'Input/output error', 'x')", "MemoryError()"])
def test_it_ends_by_what_interrupts_it_as_the_whole_command_line_does(fault: str, toy: Toy) -> None:
    words = ("apply", "--root", str(toy.tree))
    before = f"from patchbundle import manifest\ndef load(*_):\n    raise {fault}\nmanifest.load = load\nimport sys"
    one = plain(toy, *words, before=before)
    whole = f"{before}; from patchbundle.cli import main_apply; sys.argv = {['apply.py', *words]!r}; main_apply()"
    environment = {**toy.environment, "PYTHONPATH": str(REPOSITORY / "tools")}
    done = subprocess.run([sys.executable, "-c", whole], env=environment, capture_output=True, check=False, timeout=120)
    assert (one.code, one.out, one.err) == (done.returncode, done.stdout.decode(), done.stderr.decode())
    assert one.code in (Exit.REFUSED, Exit.FAILED)
    assert one.err
