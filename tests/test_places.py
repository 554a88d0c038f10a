"""Round trips where operators are, with the one file: up, used, and down again byte for byte; others stay untouched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from patchbundle.errors import Exit
from tests import nodes, trees
from tests import toy as toys
from tests.toy import Toy

PROBE = "import importlib.util as u; print(u.find_spec('sglang.srt').submodule_search_locations[0])"


@dataclass(frozen=True)
class Place:
    """A tree, how an operator names it, and the interpreter that imports from it."""

    tree: Path
    named: tuple[str | Path, ...]
    python: tuple[str | Path, ...]


def wheel(toy: Toy) -> Path:
    return next((toy.cache / "archives").glob("*/*.whl"))


def environment(place: Path, *flags: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *flags, str(place)], check=True)
    return place


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def venv(toy: Toy, folder: Path) -> Place:
    made = environment(folder / "env")
    pip("--python", made / "bin/python", "install", "--no-deps", "--no-index", wheel(toy))
    site = next(made.glob("lib/python3*/site-packages"))
    return Place(site, ("--python", made / "bin/python"), (made / "bin/python",))


def target_folder(toy: Toy, folder: Path) -> Place:
    pip("install", "--no-deps", "--no-index", "--target", folder / "packages", wheel(toy))
    return Place(folder / "packages", ("--root", folder / "packages"), (sys.executable, "-S"))


def editable(toy: Toy, folder: Path) -> Place:
    """A checkout that setuptools has put into an environment, as it does with -e."""
    checkout = folder / "checkout"
    toys.install(wheel(toy), checkout / "python", with_record=False)
    (checkout / "python/pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "sglang"\nversion = "0.5.19"\n[tool.setuptools.packages.find]\ninclude = ["sglang*"]\n'
    )
    made = environment(folder / "env")
    own = next(made.glob("lib/python3*/site-packages"))
    # The build backend is that of this test's environment; after the installation it is out of sight again.
    theirs = next(path for path in map(Path, sys.path) if (path / "setuptools").is_dir())
    (own / "theirs.pth").write_text(f"{theirs}\n")
    words = ("install", "--no-deps", "--no-index", "--no-build-isolation", "-e", checkout / "python")
    pip("--python", made / "bin/python", *words)
    (own / "theirs.pth").unlink()
    return Place(checkout / "python", ("--python", made / "bin/python"), (made / "bin/python",))


def checkout(toy: Toy, folder: Path) -> Place:
    """The same, named by the folder that a person clones."""
    made = editable(toy, folder)
    return Place(made.tree, ("--root", folder / "checkout"), made.python)


def image_root(toy: Toy, folder: Path) -> Place:
    """What an image's layers give when they are unpacked, with links that mean the image's own root."""
    root = folder / "rootfs"
    tree = root / "usr/local/lib/python3.11/dist-packages"
    toys.install(wheel(toy), tree)
    (root / "usr/lib/python3").mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    return Place(tree, ("--root", root), (sys.executable, "-S"))


def call(file: Path, place: Place, verb: str, *more: str | Path) -> trees.Result:
    return nodes.call(file, verb, *place.named, *more)


def imports(place: Place) -> Path:
    env = {**os.environ, **({"PYTHONPATH": str(place.tree)} if "-S" in place.python else {})}
    said = subprocess.run([*place.python, "-c", PROBE], env=env, cwd="/", capture_output=True, text=True, check=True)
    return Path(said.stdout.strip())


def contents(place: Place) -> trees.Snapshot:
    """Everything but bytecode that interpreters made meanwhile, and their folders' times."""
    return {name: item for name, item in trees.snapshot(place.tree, times=False).items() if "__pycache__" not in name}


def round_trip(file: Path, place: Place) -> None:
    before = contents(place)
    assert imports(place) == place.tree / "sglang/srt"
    assert call(file, place, "plan").code == Exit.DONE
    assert call(file, place, "apply").code == Exit.DONE
    patched = contents(place)
    assert {name: item[4] for name, item in patched.items() if name in toys.after(3)} == {
        name: toys.after(3)[name].identity.sha256 for name in patched if name in toys.after(3)
    }
    assert call(file, place, "check", "--expect", "applied").code == Exit.DONE
    assert nodes.call(file, "exec", "prefill", *place.named, "--expect", "applied", "-n").code == Exit.DONE
    for to in (*reversed(toys.LEVELS[:-1]), "base"):
        assert call(file, place, "revert", "--to", to).code == Exit.DONE
    assert contents(place) == before


PLACES = [venv, target_folder, editable, checkout, image_root]


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_a_round_trip_where_operators_are(make: object, toy: Toy, tmp_path: Path) -> None:
    file = nodes.one_file(toy, tmp_path / "bundle.pyz")
    assert callable(make)
    round_trip(file, make(toy, tmp_path))


def test_an_image_root_whose_links_lead_out_of_it_is_not_the_machines_own(toy: Toy, tmp_path: Path) -> None:
    """An absolute link means the image's root, and not the root of the machine that unpacked it."""
    packages = tmp_path / "rootfs/usr/local/lib/python3.11"
    packages.mkdir(parents=True)
    (packages / "dist-packages").symlink_to(toy.tree)
    before = trees.snapshot(toy.tree)
    done = trees.run(toy, "apply", "--root", tmp_path / "rootfs", "--json")
    assert (done.code, done.reason) == (Exit.REFUSED, "no-target")
    assert trees.snapshot(toy.tree) == before


def test_a_distribution_that_is_found_twice_is_refused_and_both_are_named(toy: Toy, tmp_path: Path) -> None:
    file = nodes.one_file(toy, tmp_path / "bundle.pyz")
    place = image_root(toy, tmp_path)
    second = tmp_path / "rootfs/usr/lib/python3/dist-packages"
    toys.install(wheel(toy), second)
    before = trees.snapshot(tmp_path / "rootfs")
    for verb in ("apply", "plan", "status", "check"):
        done = call(file, place, verb, "--json")
        assert (done.code, done.reason) == (Exit.REFUSED, "two-targets")
        # What status says may go into a ticket: there the folder that was given goes by its name.
        top, name = str(tmp_path / "rootfs"), "$ROOT" if verb == "status" else str(tmp_path / "rootfs")
        for tree in (place.tree, second):
            assert str(tree).replace(top, name) in done.table["error"]["found"]
    assert trees.snapshot(tmp_path / "rootfs") == before


# Environments that share their files.


def linked(source: Path, copy: Path) -> None:
    """As uv lays an environment out: every file a second name of the one in its cache."""
    for path in [source, *sorted(source.rglob("*"))]:
        there = copy / path.relative_to(source)
        there.mkdir(parents=True) if path.is_dir() else os.link(path, there)


def with_uv(toy: Toy, folder: Path) -> tuple[Place, Path]:
    sites = []
    for name in ("one", "two"):
        made = environment(folder / name)
        uv = str(Path(sys.executable).with_name("uv"))
        command = [uv, "pip", "install", "--offline", "--no-deps", "--link-mode", "hardlink", "--cache-dir"]
        subprocess.run([*command, folder / "cache", "--python", made / "bin/python", wheel(toy)], check=True)
        sites.append(next(made.glob("lib/python3*/site-packages")))
    python = folder / "one/bin/python"
    return Place(sites[0], ("--python", python), (python,)), sites[1]


def with_links(toy: Toy, folder: Path) -> tuple[Place, Path]:
    place = venv(toy, folder)
    linked(place.tree, folder / "other")
    return place, folder / "other"


@pytest.mark.parametrize("make", [with_uv, with_links], ids=lambda make: make.__name__)
def test_an_environment_that_shares_its_files_with_the_patched_one_is_untouched(
    make: object, toy: Toy, tmp_path: Path
) -> None:
    file = nodes.one_file(toy, tmp_path / "bundle.pyz")
    assert callable(make)
    place, other = make(toy, tmp_path)
    engine = "sglang/srt/engine.py"
    assert (place.tree / engine).stat().st_ino == (other / engine).stat().st_ino, "else this proves nothing"
    before = trees.snapshot(other)
    assert call(file, place, "apply").code == Exit.DONE
    assert trees.snapshot(other) == before
    assert call(file, place, "revert").code == Exit.DONE
    assert trees.snapshot(other) == before
    round_trip(file, place)
    assert trees.snapshot(other) == before


# Mounts.


@contextmanager
def mounted(*words: str | Path) -> Iterator[Path]:
    """A mount, its last word the place."""
    place = Path(words[-1])
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)


def test_a_read_only_mount_is_looked_at_and_started_from_and_never_written_to(toy: Toy, tmp_path: Path) -> None:
    file = nodes.one_file(toy, tmp_path / "bundle.pyz")
    before = trees.snapshot(toy.tree)
    with mounted("--bind", toy.tree, tmp_path / "ro") as place:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        where = ("--root", place)
        assert [nodes.call(file, verb, *where).code for verb in ("plan", "status", "check")] == [0, 0, 0]
        refused = nodes.call(file, "apply", *where, "--json")
        assert (refused.code, refused.reason) == (Exit.REFUSED, "not-writable")
        assert refused.table["error"]["found"] == "a read-only file system"
        assert nodes.call(file, "exec", "prefill", *where, "--expect", "base", "--", "true").code == 0
        over = tmp_path / "over"
        assert nodes.call(file, "apply", *where, "--overlay", over).code == Exit.DONE
        assert nodes.call(file, "check", "--root", over, "--expect", "applied", "--full").code == Exit.DONE
        # Mounted over the package, as the page says, the tree itself is the patched one.
        with (
            mounted("--bind", over / "sglang", place / "sglang"),
            mounted("--bind", over / toys.INFO, place / toys.INFO),
        ):
            assert nodes.call(file, "check", *where, "--expect", "applied", "--full").code == Exit.DONE
    assert trees.snapshot(toy.tree) == before


def test_on_overlayfs_the_lower_tree_is_untouched_and_the_upper_has_what_was_touched(toy: Toy, tmp_path: Path) -> None:
    file = nodes.one_file(toy, tmp_path / "bundle.pyz")
    lower = trees.snapshot(toy.tree)
    for name in ("upper", "work"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={toy.tree},upperdir={tmp_path / 'upper'},workdir={tmp_path / 'work'}"
    with mounted("-t", "overlay", "-o", options, "overlay", tmp_path / "merged") as merged:
        place = Place(merged, ("--root", merged), (sys.executable, "-S"))
        round_trip(file, place)
        assert call(file, place, "apply").code == Exit.DONE
        assert trees.snapshot(toy.tree) == lower
        changed = {name for name, item in toys.after(3).items() if toys.BASE.get(name) != item}
        upper = {path.relative_to(tmp_path / "upper").as_posix() for path in (tmp_path / "upper").rglob("*")}
        files = {name for name in upper if (tmp_path / "upper" / name).is_file()}
        assert files == changed | {f"{toys.HOME}/receipt.json", toys.RECORD}
    assert trees.snapshot(toy.tree) == lower


def test_an_overlay_made_beside_a_tree_can_be_the_lower_layer_above_it(toy: Toy, tmp_path: Path) -> None:
    over = tmp_path / "over"
    assert trees.apply(toy, "--overlay", over).code == 0
    options = f"lowerdir={over}:{toy.tree}"
    with mounted("-t", "overlay", "-o", options, "overlay", tmp_path / "merged") as merged:
        told = trees.run(toy, "status", "--root", merged, "--json").table["result"]["status"]
        # What a patch removes shines through from below: the page says so, and status tells.
        assert told["level"] is None
        assert [row["path"] for row in told["files"] if not row["holds"]] == ["sglang/srt/old.py"]


# A user without rights.


def test_a_user_without_rights_has_a_round_trip_in_a_tree_of_his_own() -> None:
    python = nodes.for_everybody()
    with trees.open_place() as place:
        toy = toys.make(place / "toy")
        file = nodes.one_file(toy, place / "bundle.pyz")
        before = trees.snapshot(toy.tree, times=False)
        trees.give_away(toy.tree)

        def verb(*words: str | Path) -> int:
            return trees.unprivileged(
                lambda: nodes.call(file, *words, "--root", toy.tree, python=python, cwd=place)
            ).code

        assert [verb("plan"), verb("apply"), verb("check", "--expect", "applied", "--full")] == [0, 0, 0]
        assert [verb("revert"), verb("check", "--expect", "base", "--full")] == [0, 0]
        after = trees.snapshot(toy.tree, times=False)
        assert {name: item[4] for name, item in after.items()} == {name: item[4] for name, item in before.items()}


def test_a_user_without_rights_is_refused_in_a_tree_of_another_and_may_make_an_overlay() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a tree of another user")
    python = nodes.for_everybody()
    with trees.open_place() as place:
        toy = toys.make(place / "toy")
        file = nodes.one_file(toy, place / "bundle.pyz")
        (place / "own").mkdir()
        os.chown(place / "own", trees.NOBODY, trees.NOBODY)
        before = trees.snapshot(toy.tree)

        def verb(*words: str | Path) -> trees.Result:
            return trees.unprivileged(lambda: nodes.call(file, *words, "--json", python=python, cwd=place))

        done = verb("apply", "--root", toy.tree)
        assert (done.code, done.reason) == (Exit.REFUSED, "owner")
        assert verb("apply", "--root", toy.tree, "--overlay", place / "own/over").code == Exit.DONE
        assert verb("check", "--root", place / "own/over", "--expect", "applied", "--full").code == Exit.DONE
        assert trees.snapshot(toy.tree) == before
