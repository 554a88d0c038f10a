"""Helpers of the tests that stand on a node: the one file, and every interpreter that this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from lab.release import pyz, wheels
from tests.toy import Toy
from tests.trees import REPOSITORY, Result, child

REQUIREMENTS = REPOSITORY / "requirements" / "node.txt"


@cache
def packages() -> tuple[Path, ...]:
    """The pinned wheels of a node. From the cache; the first run on a machine fetches them."""
    return tuple(wheels.fetched(REQUIREMENTS))


def one_file(toy: Toy, place: Path) -> Path:
    """The one file with the toy's bundle, at ``place``."""
    place.write_bytes(pyz.build(REPOSITORY, toy.bundle, packages()))
    place.chmod(0o755)
    return place


@cache
def interpreters() -> tuple[Path, ...]:
    """One interpreter for each Python from 3.10 on that is found: on PATH, or where pyenv and uv keep theirs."""
    found: dict[str, Path] = {}
    names = [shutil.which(f"python3.{minor}") for minor in range(10, 16)]
    kept = [
        *Path.home().glob(".pyenv/versions/3.*/bin/python"),
        *Path.home().glob(".local/share/uv/python/*/bin/python3"),
    ]
    for place in [sys.executable, *names, *map(str, sorted(kept))]:
        if place is None:
            continue
        command = [place, "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.version_info >= (3, 10))"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
        if said[1:] == ["True"]:
            found.setdefault(said[0], Path(place))
    return tuple(found[version] for version in sorted(found))


def for_everybody() -> Path:
    """An interpreter that a user without rights may start."""
    for place in map(Path, ("/usr/bin/python3", "/usr/local/bin/python3", os.path.realpath(sys.executable))):
        closed = [above for above in place.resolve().parents if not above.stat().st_mode & 0o001]
        if place.exists() and not closed:
            return place
    pytest.skip("no interpreter outside of a closed folder on this machine")


def call(
    file: Path,
    *words: str | Path,
    python: Path | str = sys.executable,
    flags: Sequence[str] = ("-I", "-S"),
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    umask: int = -1,
) -> Result:
    """Run the one file as a node does that has Python and nothing else."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **(env or {})}
    command = [str(python), *flags, str(file), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120, cwd=cwd, umask=umask)
    return Result(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"))


def start(
    toy: Toy,
    *command: str,
    expect: str = "applied",
    where: tuple[str | Path, ...] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Result:
    """A guarded start by the tools in place, a process of its own; from ``where``, by default the toy's tree."""
    words = [
        "exec",
        "prefill",
        "--bundle",
        toy.bundle,
        "--expect",
        expect,
        *(("--root", toy.tree) if where is None else where),
    ]
    return child(toy, *words, "--", *command, env=env, cwd=cwd or toy.bundle)
