"""pip and uv on a patched tree: nothing of ours stays behind, and nothing is half replaced unseen.

An environment of its own holds the toy, installed from its wheel; the newer wheel is the toy's with another version
and one edited file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from patchbundle.errors import Exit
from tests import toy as toys
from tests import trees
from tests.toy import Toy
from tests.trees import Snapshot

Installer = Callable[..., subprocess.CompletedProcess[str]]


def pip(environment: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", environment / "bin/python"]
    return subprocess.run([*map(str, command), *map(str, words)], capture_output=True, text=True, check=False)


def uv(environment: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    verb, *rest = [word for word in map(str, words) if word not in ("-y", "--no-compile")]
    command = [
        str(Path(sys.executable).with_name("uv")),
        "pip",
        verb,
        "--offline",
        "--no-cache",
        "--python",
        str(environment / "bin/python"),
        *rest,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(params=[pip, uv], ids=["pip", "uv"])
def installer(request: pytest.FixtureRequest) -> Installer:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def installed(tmp_path: Path, installer: Installer) -> Toy:
    """The toy in an environment, put there by the installer; ``tree`` is its site-packages."""
    made = toys.make(tmp_path / "toy")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    site = next(environment.glob("lib/python3*/site-packages"))
    toy = Toy(made.bundle, site, made.cache)
    done = installer(environment, "install", "--no-deps", "--no-index", wheel(toy))
    assert done.returncode == 0, done.stderr
    return toy


def wheel(toy: Toy) -> Path:
    return next((toy.cache / "archives").glob("*/*.whl"))


def newer(toy: Toy, folder: Path) -> Path:
    """The next version: one file edited, none of the paths of ours."""
    place = folder / toys.WHEEL.replace("0.5.19", "0.5.20")
    with zipfile.ZipFile(wheel(toy)) as old, zipfile.ZipFile(place, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename == toys.RECORD:
                data = b"".join(
                    line.split(b",")[0].replace(b"0.5.19", b"0.5.20") + b",,\n" for line in data.splitlines()
                )
            elif info.filename.endswith("METADATA"):
                data = data.replace(b"0.5.19", b"0.5.20")
            elif info.filename.endswith("engine.py"):
                data += b"newer = 1\n"
            new.writestr(info.filename.replace("0.5.19", "0.5.20"), data)
    return place


def environment_of(toy: Toy) -> Path:
    return toy.tree.parents[2]


def left(toy: Toy) -> list[str]:
    return sorted(path.name for path in toy.tree.iterdir() if path.name.startswith(("sglang", ".patchbundle")))


def without_bytecode(snapshot: Snapshot) -> dict[str, tuple[object, ...]]:
    return {name: item[:3] + item[4:5] for name, item in snapshot.items() if "__pycache__" not in name and name != "."}


@pytest.mark.parametrize("to", toys.LEVELS)
def test_an_uninstall_of_a_patched_tree_leaves_nothing_of_ours(installed: Toy, installer: Installer, to: str) -> None:
    assert trees.apply(installed, "--to", to).code == 0
    done = installer(environment_of(installed), "uninstall", "-y", "sglang")
    assert done.returncode == 0, done.stderr
    assert left(installed) == []


def test_bytecode_of_ours_goes_with_it(installed: Toy) -> None:
    assert trees.apply(installed).code == 0
    python = environment_of(installed) / "bin/python"
    subprocess.run([str(python), "-m", "compileall", "-q", str(installed.tree / "sglang")], check=True)
    assert list((installed.tree / toys.HOME / "__pycache__").iterdir())
    assert pip(environment_of(installed), "uninstall", "-y", "sglang").returncode == 0
    assert left(installed) == []


def test_an_upgrade_of_a_patched_tree_is_the_new_release_alone(
    installed: Toy, installer: Installer, tmp_path: Path
) -> None:
    environment, after = environment_of(installed), newer(installed, tmp_path)
    fresh = installer(environment, "install", "--no-deps", "--no-index", "-U", after)
    assert fresh.returncode == 0, fresh.stderr
    expected = without_bytecode(trees.snapshot(installed.tree, times=False))
    for path in (after.name, "back"):
        again = installer(environment, "install", "--no-deps", "--no-index", wheel(installed))
        assert again.returncode == 0, again.stderr
        assert trees.apply(installed).code == 0, path
        done = installer(environment, "install", "--no-deps", "--no-index", "-U", after)
        assert done.returncode == 0, done.stderr
        assert without_bytecode(trees.snapshot(installed.tree, times=False)) == expected
        told = trees.run(installed, "status", "--root", installed.tree, "--json")
        assert (told.code, told.reason) == (Exit.REFUSED, "wrong-version")


def test_an_installation_over_a_patched_tree_is_the_base_or_said_to_be_drift(
    installed: Toy, installer: Installer
) -> None:
    """The same version again, by force: every file of the release comes back, and ours go, or status tells."""
    assert trees.apply(installed).code == 0
    words = ["--force-reinstall"] if installer is pip else ["--reinstall"]
    done = installer(environment_of(installed), "install", "--no-deps", "--no-index", *words, wheel(installed))
    assert done.returncode == 0, done.stderr
    assert trees.check(installed, "--expect", "base", "--full").code == 0
    assert not os.path.lexists(installed.tree / toys.HOME)


def test_pip_check_and_uv_check_say_what_they_said_before(installed: Toy, installer: Installer) -> None:
    environment = environment_of(installed)
    before = installer(environment, "check")
    assert trees.apply(installed).code == 0
    after = installer(environment, "check")
    assert (after.returncode, after.stdout) == (before.returncode, before.stdout)
    assert after.returncode == 0


def test_a_file_that_the_installer_replaced_alone_is_drift(installed: Toy) -> None:
    """An installer that is killed half way has put back some files: the hashes tell."""
    assert trees.apply(installed).code == 0
    (installed.tree / "sglang/srt/engine.py").write_bytes(toys.ENGINE)
    before = trees.snapshot(installed.tree)
    for verb in (trees.apply, trees.revert, trees.status):
        assert verb(installed).code == Exit.REFUSED
    assert trees.snapshot(installed.tree) == before
