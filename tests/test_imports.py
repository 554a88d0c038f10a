"""What would be imported for a name, as an interpreter decides it; where it is another file nothing starts."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from patchbundle import guard, imports
from patchbundle.errors import Exit
from tests import nodes, trees
from tests import toy as toys
from tests.toy import Toy

EXTENSIONS = importlib.machinery.EXTENSION_SUFFIXES
# Run by an interpreter: what would it import for a name from one entry of its path? A folder without a file is none.
ASK = """
import importlib.machinery as m, sys
spec = m.PathFinder.find_spec(sys.argv[1], [sys.argv[2]])
print(spec.origin if spec and spec.origin else "")
"""
FILES = ["m.py", "m.pyc", "m/__init__.py", "m/__init__.pyc", "m/other.py", "mm.py", "m.txt", "m.so.py", "m"]
FILES += [f"{stem}{ending}" for stem in ("m", "m/__init__") for ending in EXTENSIONS]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    toy = toys.make(tmp_path / "toy")
    assert trees.apply(toy).code == Exit.DONE
    return toy


def asked(name: str, entry: Path) -> str:
    command = [sys.executable, "-I", "-S", "-c", ASK, name, str(entry)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    folder.mkdir(exist_ok=True)
    return folder


TOGETHER = [("m.py", "m.pyc"), ("m.pyc", f"m{EXTENSIONS[-1]}"), ("m.py", "m/x"), ("m.py", "m/__init__.pyc")]
TOGETHER += [("m.py", f"m{EXTENSIONS[0]}"), ("m/__init__.py", f"m/__init__{EXTENSIONS[1]}")]


@pytest.mark.parametrize("names", [(), *((name,) for name in FILES), *TOGETHER], ids=" ".join)
def test_what_is_found_in_a_folder_is_what_an_interpreter_finds(names: tuple[str, ...], tmp_path: Path) -> None:
    place = made(tmp_path / "p", *names)
    assert str(imports.found(place, "m") or "") == asked("m", place)


@pytest.mark.parametrize("name", ["m.py", "m.pyc", "m/__init__.py", "m/__init__.pyc", "m/other.py", "below/m.py", ""])
@pytest.mark.parametrize("entry", ["x.zip", "x.zip/below"])
def test_what_is_found_in_an_archive_is_what_an_interpreter_finds(entry: str, name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(name or "other", b"")
    assert str(imports.found(tmp_path / entry, "m") or "") == asked("m", tmp_path / entry)


@pytest.mark.parametrize("what", ["nothing", "no archive", "a closed folder", "a fifo"])
def test_an_entry_that_is_neither_holds_nothing(what: str, tmp_path: Path) -> None:
    place = tmp_path / "p"
    if what == "no archive":
        place.write_bytes(b"x" * 100)
    elif what == "a closed folder":
        made(place, "m/x").chmod(0)
    elif what == "a fifo":
        os.mkfifo(place)
    assert imports.found(place, "m") is None


@pytest.mark.parametrize("other", ["sglang.pyc", "sglang/__init__.pyc", f"sglang{EXTENSIONS[0]}", "sglang.so"])
def test_a_copy_in_the_working_folder_need_not_be_a_source(other: str, toy: Toy, tmp_path: Path) -> None:
    here = made(tmp_path / "here", other)
    done = nodes.start(toy, sys.executable, "-c", "", cwd=here)
    assert (done.code, "[shadowed]" in done.err, str(here / other) in done.err) == (Exit.REFUSED, True, True)


def test_an_archive_on_the_path_is_looked_into(toy: Toy, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("sglang/__init__.py", b"")
    before, after = (f"{tmp_path}/x.zip:{toy.tree}", f"{toy.tree}:{tmp_path}/x.zip")
    done = nodes.start(toy, sys.executable, "-c", "", env={"PYTHONPATH": before}, cwd=made(tmp_path / "here"))
    assert (done.code, "[shadowed]" in done.err) == (Exit.REFUSED, True)
    assert nodes.start(toy, sys.executable, "-c", "", env={"PYTHONPATH": after}, cwd=tmp_path / "here").code == 0


@pytest.mark.parametrize("version", ["3.10", "3.11"])
def test_a_safe_path_is_none_for_the_interpreter_that_does_not_know_it(version: str, tmp_path: Path) -> None:
    root = made(tmp_path / f"lib/python{version}/site-packages", "sglang/__init__.py")
    here = made(tmp_path / "here", "sglang/__init__.py")
    other = guard.shadow(root, "sglang", {"PYTHONSAFEPATH": "1"}, here)
    assert (other is not None) == (version == "3.10")


@pytest.mark.parametrize(
    "other", ["engine/__init__.py", "engine/__init__.pyc", f"engine{EXTENSIONS[0]}", "engine.abi3.so"]
)
def test_a_file_that_is_imported_in_place_of_a_pinned_module_is_refused(other: str, toy: Toy, tmp_path: Path) -> None:
    here = made(tmp_path / "here")
    made(toy.tree / "sglang/srt", "engine/data.txt", "engine.txt", "engine_x.so")
    start = (sys.executable, "-c", "print('up')")
    assert nodes.start(toy, *start, cwd=here).out == "up\n"
    made(toy.tree / "sglang/srt", other)
    for done in (nodes.start(toy, *start, cwd=here), trees.check(toy, "--expect", "applied")):
        assert (done.code, "up\n" in done.out, "[bytecode]" in done.err) == (Exit.REFUSED, False, True)
        assert f"{toy.tree}/sglang/srt/{other}\n" in done.err
