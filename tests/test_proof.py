"""Bytecode: what an interpreter would run for a pinned module is of the pinned source, or it is refused."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from patchbundle import proof
from patchbundle.errors import BundleError, Exit, Reason
from tests import nodes, trees
from tests.toy import Toy

ENGINE = "sglang/srt/engine.py"
MODES = py_compile.PycInvalidationMode


def check(toy: Toy, *more: str | Path, python: Path | str = sys.executable) -> trees.Result:
    return trees.check(toy, "--bytecode", python, *more)


def cached(toy: Toy, level: str = "") -> Path:
    return Path(importlib.util.cache_from_source(str(toy.tree / ENGINE), optimization=level))


def plant(toy: Toy, code: str, mode: MODES, *, like: bool = True) -> Path:
    """Bytecode of other code at the place of the engine's, with the time stamp and size of the real source."""
    other = toy.bundle.parent / "other.py"
    status = (toy.tree / ENGINE).stat()
    other.write_text(code.ljust(status.st_size - 1) + "\n" if like else code)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    py_compile.compile(str(other), str(cached(toy)), dfile=str(toy.tree / ENGINE), invalidation_mode=mode)
    return cached(toy)


@pytest.mark.parametrize("python", nodes.interpreters(), ids=lambda path: str(path).strip("/").replace("/", "-"))
def test_what_an_interpreter_compiled_itself_is_proven_by_it(python: Path, toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    for options in ([], ["-O"], ["-OO"]):
        subprocess.run([python, *options, "-m", "compileall", "-q", toy.tree / "sglang"], check=True)
    told = check(toy, "--json", python=python).table["result"]["bytecode"]
    assert (told["stale"], told["none"]) == (0, 0)
    assert told["proven"] == 3 * len(list(toy.tree.glob("sglang/srt/*.py"))) or told["proven"] % 3 == 0
    assert told["proven"] >= 12


def test_without_bytecode_there_is_nothing_to_prove_and_nothing_wrong(toy: Toy) -> None:
    told = check(toy, "--json").table["result"]["bytecode"]
    assert (told["proven"], told["stale"]) == (0, 0)
    assert told["none"] > 0


@pytest.mark.parametrize("mode", list(MODES), ids=lambda mode: mode.name)
def test_code_of_another_source_that_would_be_run_is_refused_and_else_is_stale(mode: MODES, toy: Toy) -> None:
    place = plant(toy, "print('planted')", mode)
    run = subprocess.run(
        [sys.executable, "-c", "import sglang.srt.engine"], cwd=toy.tree, capture_output=True, check=False
    )
    done = check(toy, "--json")
    if run.stdout == b"planted\n":
        assert (done.code, done.reason, done.table["error"]["where"]) == (Exit.REFUSED, "bytecode", str(place))
    else:
        assert mode is MODES.CHECKED_HASH
        assert done.table["result"]["bytecode"]["stale"] == 1


def test_code_that_is_never_checked_is_seen_by_the_proof_itself(toy: Toy) -> None:
    """The look at the tree refuses it too, and earlier."""
    place = plant(toy, "print('planted')", MODES.UNCHECKED_HASH)
    with pytest.raises(BundleError) as refusal:
        proof.prove(toy.tree, [ENGINE], sys.executable)
    assert refusal.value.where == str(place)


def test_a_time_stamp_alone_would_have_hidden_it(toy: Toy) -> None:
    """The case that hashes of sources cannot see: the very stamp and size, other code."""
    plant(toy, "print('planted')", MODES.TIMESTAMP)
    assert trees.check(toy).code == Exit.DONE
    assert check(toy).code == Exit.REFUSED


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, b"short"], ids=["empty", "nonsense", "short"])
def test_bytecode_that_is_none(data: bytes, toy: Toy) -> None:
    cached(toy).parent.mkdir()
    cached(toy).write_bytes(data)
    assert check(toy, "--json").table["result"]["bytecode"]["stale"] == 1


def test_bytecode_that_ends_or_crashes_the_reader_is_a_refusal(toy: Toy) -> None:
    place = plant(toy, "x = 1", MODES.UNCHECKED_HASH)
    good = place.read_bytes()
    source = importlib.util.source_hash((toy.tree / ENGINE).read_bytes())
    for rest in (b"", b"i\0\0", b"\xe3" + b"\xff" * 30, b"(" * 100_000, b"N"):
        place.write_bytes(good[:8] + source + rest)
        assert check(toy, "--json").reason == "bytecode"


@pytest.mark.parametrize("what", ["package", "extension"])
def test_another_file_that_is_imported_in_place_of_a_pinned_module_is_refused(what: str, toy: Toy) -> None:
    from importlib.machinery import EXTENSION_SUFFIXES

    if what == "package":
        (toy.tree / "sglang/srt/engine").mkdir()
        (toy.tree / "sglang/srt/engine/__init__.py").touch()
    else:
        (toy.tree / f"sglang/srt/engine{EXTENSION_SUFFIXES[0]}").touch()
    done = check(toy, "--json")
    assert (done.code, done.reason) == (Exit.REFUSED, "bytecode")
    assert done.table["error"]["found"] == "a package or an extension of its name"


def test_bytecode_below_a_prefix_is_what_counts_there(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(toy, "print('planted')", MODES.TIMESTAMP)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "prefix"))
    assert check(toy, "--json").table["result"]["bytecode"]["stale"] == 0
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
    plant(toy, "print('planted')", MODES.TIMESTAMP)
    assert check(toy, "--json").reason == "bytecode"


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true", "/bin/false"])
def test_an_interpreter_that_does_not_answer_is_a_refusal(python: str, toy: Toy) -> None:
    done = check(toy, "--json", python=python)
    assert (done.code, done.reason, done.table["error"]["where"]) == (Exit.REFUSED, "bytecode", python)


def test_without_a_target_the_option_is_a_mistake(toy: Toy) -> None:
    assert trees.run(toy, "--bytecode", sys.executable, check=True).code == Exit.USAGE


def test_a_module_that_went_away_meanwhile_is_a_refusal(toy: Toy) -> None:
    with pytest.raises(BundleError) as refusal:
        proof.prove(toy.tree, ["sglang/srt/no_module.py"], sys.executable)
    assert refusal.value.reason == Reason.BYTECODE
