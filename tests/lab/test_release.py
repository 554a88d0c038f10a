"""The one file and the archive of the sources: the same bytes anywhere, whole or refused, and all that a node needs."""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lab.release import archives, pyz, sdist, wheels
from patchbundle import __version__, cli, fetch, releases, scan, store
from patchbundle.bases import parse_toml
from patchbundle.errors import BundleError, Exit, Reason
from patchbundle.identity import EXECUTABLE, File
from tests import nodes, trees
from tests.toy import Toy
from tests.trees import REPOSITORY

PARTS = ("LICENSE", "NOTICE", "README.md", "pyproject.toml", "config", "patches", "sources", "tools", "requirements")


@pytest.fixture
def file(toy: Toy, tmp_path: Path) -> Path:
    return nodes.one_file(toy, tmp_path / "bundle.pyz")


def clone(place: Path, umask: int, when: int) -> Path:
    """A copy of what the build reads, as another checkout on another day would lay it out."""
    for part in (*PARTS, "lab/__init__.py", "lab/release"):
        source, target = REPOSITORY / part, place / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    for path in [place, *place.rglob("*")]:
        executable = path.is_dir() or path.stat().st_mode & 0o100
        path.chmod((0o777 if executable else 0o666) & ~umask)
        os.utime(path, (when, when))
    return place


def built(place: Path, what: str, *, umask: int, environment: dict[str, str], python: Path) -> tuple[str, bytes]:
    """The digest that a build prints, and what it wrote."""
    packages = ":".join(map(str, nodes.packages()))
    environment = {**os.environ, **environment, "PYTHONPATH": f"{place / 'tools'}:{place}:{packages}"}
    command = [str(python), "-B", "-m", "lab.release", what, "--out", str(place / "dist")]
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, check=False, umask=umask)
    assert done.returncode == 0, done.stderr
    digest, name = done.stdout.split()
    data = (place / "dist" / name).read_bytes()
    assert digest == hashlib.sha256(data).hexdigest()
    return digest, data


@pytest.mark.parametrize("what", ["pyz", "sdist"])
def test_two_builds_are_the_same_bytes_whatever_the_path_umask_time_zone_locale_and_python(
    what: str, tmp_path: Path
) -> None:
    nodes.packages()
    one = clone(tmp_path / "one", 0o022, 1_000_000_000)
    two = clone(tmp_path / "elsewhere, far" / "zwei ü", 0o077, 1_900_000_000)
    first = built(one, what, umask=0o022, environment={"TZ": "UTC", "LC_ALL": "C"}, python=Path(sys.executable))
    other = {"TZ": "Pacific/Kiritimati", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "99"}
    for python in nodes.interpreters():
        assert built(two, what, umask=0o077, environment=other, python=python) == first


def test_a_changed_byte_of_the_bundle_is_another_digest(toy: Toy, file: Path, tmp_path: Path) -> None:
    path = toy.bundle / "sources/prefill/alpha.py"
    path.write_bytes(path.read_bytes() + b"# more\n")
    with pytest.raises(BundleError) as refusal:
        nodes.one_file(toy, tmp_path / "other.pyz")
    assert refusal.value.reason == Reason.ARTIFACT
    assert not (tmp_path / "other.pyz").exists()
    toy.pin()
    assert nodes.one_file(toy, tmp_path / "other.pyz").read_bytes() != file.read_bytes()


# On a node.


@pytest.mark.parametrize("python", nodes.interpreters(), ids=lambda path: str(path).strip("/").replace("/", "-"))
def test_a_node_with_python_alone_goes_up_and_down_and_knows_where_it_is(
    python: Path, toy: Toy, file: Path, tmp_path: Path
) -> None:
    before = trees.snapshot(toy.tree, times=False)

    def call(*words: str | Path) -> trees.Result:
        return nodes.call(file, *words, "--root", toy.tree, python=python, cwd=tmp_path)

    assert [call("plan").code, call("status").code, call("check", "--expect", "base", "--full").code] == [0, 0, 0]
    done = call("apply", "--json")
    assert done.code == Exit.DONE
    # A slow machine is told how far it is.
    assert all(line.startswith("…") for line in done.err.splitlines())
    after = trees.snapshot(toy.tree, times=False)
    assert call("check", "--expect", "applied", "--full").code == Exit.DONE
    assert call("apply").code == Exit.NOTHING_TO_DO
    assert call("recover").code == Exit.NOTHING_TO_DO
    assert call("revert").code == Exit.DONE
    assert trees.snapshot(toy.tree, times=False) == before
    assert trees.apply(toy).code == Exit.DONE
    assert trees.snapshot(toy.tree, times=False) == after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.pyz", "toy"]


def test_it_has_the_verbs_of_a_node_and_no_other(file: Path) -> None:
    told = nodes.call(file, "--help").out
    words = [line.split()[0] for line in told.partition("Commands:")[2].splitlines() if line.strip()]
    assert sorted(words) == sorted([*cli.NODE_VERBS, "check"])
    page = (REPOSITORY / "docs" / "operators.md").read_text(encoding="utf-8")
    listed = page.partition("Its verbs are those of a node: ")[2].partition(", which is")[0]
    assert sorted(re.findall("`([a-z]+)`", listed)) == sorted(words)
    for verb in set(cli.apply_cli.commands) - set(cli.NODE_VERBS):
        assert nodes.call(file, verb).code == Exit.USAGE


def test_what_to_do_next_is_a_command_that_this_node_has(toy: Toy, file: Path) -> None:
    (toy.tree / "sglang/srt/engine.py").write_bytes(b"edited\n")
    drifted = nodes.call(file, "apply", "--root", toy.tree)
    assert (drifted.code, "tools/" in drifted.err) == (Exit.REFUSED, False)
    assert f"python3 {file} status --root {toy.tree}" in drifted.err
    damaged = zipfile.ZipFile(file).read("patchbundle/errors.py").decode()
    assert "tools/check_sources.py" in damaged, "else this proves nothing"


def test_it_needs_no_right_to_write_anywhere(toy: Toy) -> None:
    python = nodes.for_everybody()
    with trees.open_place() as place:
        made = nodes.one_file(toy, place / "bundle.pyz")
        made.chmod(0o444)
        place.chmod(0o555)
        told = trees.unprivileged(lambda: nodes.call(made, "plan", "--root", place, python=python, cwd=place))
        assert (told.code, "[no-target]" in told.err) == (Exit.REFUSED, True)
        assert sorted(path.name for path in place.iterdir()) == ["bundle.pyz"]


def test_a_tree_of_a_filed_release_is_known_to_it(toy: Toy, tmp_path: Path) -> None:
    assert trees.apply(toy).code == 0
    releases.file(toy.bundle, "0.1.0")
    source = toy.bundle / "sources/prefill/alpha.py"
    source.write_bytes(source.read_bytes() + b"# newer\n")
    toy.pin()
    newer = nodes.one_file(toy, tmp_path / "newer.pyz")
    told = nodes.call(newer, "status", "--root", toy.tree, "--json").table["result"]["status"]
    assert (told["level"], told["release"]) == (3, "0.1.0")
    assert nodes.call(newer, "apply", "--root", toy.tree).code == Exit.DONE
    assert trees.check(toy, "--expect", "applied").code == Exit.DONE


def test_the_licences_of_what_it_carries_are_in_it(file: Path) -> None:
    names = store.Archive(zipfile.ZipFile(file)).names()
    assert {"LICENSE", "NOTICE"} <= set(names)
    for package in ("click", "unidiff", "tomli"):
        inside = [name for name in names if name.startswith(f"{package}-") and "/licenses/LICENSE" in name]
        assert inside, package
        assert f"{package}/__init__.py" in names
    assert not [name for name in names if not name.endswith((".py", ".pyc", ".typed")) and name.startswith("click/")]


def test_a_wheel_without_a_licence_is_not_carried(tmp_path: Path) -> None:
    place = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("x/__init__.py", "")
    with pytest.raises(wheels.WheelError, match="no licence"):
        wheels.members(place)


def test_a_cached_wheel_of_other_bytes_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(path for path in nodes.packages() if path.name.startswith("unidiff"))
    place = tmp_path / "wheels" / source.parent.name / source.name
    place.parent.mkdir(parents=True)
    place.write_bytes(source.read_bytes() + b" ")
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    one = tmp_path / "one.txt"
    version, digests = wheels.pinned(nodes.REQUIREMENTS)["unidiff"]
    one.write_text(f"unidiff=={version} " + " ".join(f"--hash=sha256:{digest}" for digest in digests))
    with pytest.raises(wheels.WheelError, match="unidiff-"):
        wheels.fetched(one)
    place.write_bytes(source.read_bytes())
    assert wheels.fetched(one) == [place]


def test_every_package_of_a_node_but_pip_is_carried_whatever_its_marker() -> None:
    assert sorted(wheels.pinned(nodes.REQUIREMENTS)) == ["click", "tomli", "unidiff"]
    assert all(digests for _, digests in wheels.pinned(nodes.REQUIREMENTS).values())


def test_a_package_of_the_node_never_takes_the_place_of_one_that_is_carried(
    toy: Toy, file: Path, tmp_path: Path
) -> None:
    for name in ("click", "unidiff", "patchbundle"):
        (tmp_path / "theirs" / name).mkdir(parents=True)
        (tmp_path / "theirs" / name / "__init__.py").write_text("raise SystemExit(41)\n")
    done = nodes.call(file, "plan", "--root", toy.tree, flags=(), env={"PYTHONPATH": str(tmp_path / "theirs")})
    assert done.code == Exit.DONE


def test_what_was_looked_at_is_what_runs_also_if_the_file_is_replaced_meanwhile(toy: Toy, file: Path) -> None:
    """The start looks at the file, then something else takes its place; modules and bundle come from the first."""
    start = zipfile.ZipFile(file).read("__main__.py").decode()
    gone = start.replace(
        "    sys.meta_path.insert(", "    import os\n    os.unlink(PLACE)\n    sys.meta_path.insert(", 1
    )
    assert gone != start
    text = f"__file__ = {str(file / '__main__.py')!r}\n{gone}"
    command = [sys.executable, "-I", "-S", "-c", text, "plan", "--root", str(toy.tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, file.exists()) == (Exit.DONE, "", False)
    assert "gamma-third" in done.stdout


# Damage.


def spots(file: Path) -> dict[str, int]:
    """A place in the bytes of each kind of member, and in the digest."""
    data = file.read_bytes()
    text = {
        "tool": b"class BundleError",
        "package": b"class PatchSet",
        "source": b"def start(): ...",
        "lock": b'"artifacts"',
    }
    return {**{name: data.index(part) for name, part in text.items()}, "digest": len(data) - 5, "shebang": 3}


@pytest.mark.parametrize("spot", ["tool", "package", "source", "lock", "digest", "shebang"])
def test_one_changed_byte_anywhere_and_nothing_of_it_runs(spot: str, toy: Toy, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[spots(file)[spot]] ^= 1
    file.write_bytes(bytes(data))
    before = trees.snapshot(toy.tree)
    done = nodes.call(file, "apply", "--root", toy.tree)
    assert (done.code, done.out) == (Exit.REFUSED, "")
    assert done.err.startswith(
        "error: the file that carries the tools and the bundle is not as it was built [damaged]\n"
    )
    assert trees.snapshot(toy.tree) == before


def test_its_refusal_is_the_one_of_the_tools(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"-")
    said = nodes.call(file, "status").err.splitlines()
    facts = dict(line.strip().split(":", 1) for line in said[1:])
    error = BundleError(
        Reason.DAMAGED, facts["where"].strip(), expected=facts["expected"].strip(), found=facts["found"].strip()
    )
    assert said == error.lines()


NAMED = "error: the file that carries the tools and the bundle is not as it was built [damaged]\n"


def said_of(data: bytes, toy: Toy, file: Path, python: Path | str = sys.executable) -> str:
    """How these bytes are refused as the one file: by name; by the same words, as Python shows them; or otherwise."""
    file.write_bytes(data)
    done = nodes.call(file, "apply", "--root", toy.tree, python=python)
    assert (done.code, done.out) == (Exit.REFUSED, "")
    return "name" if done.err.startswith(NAMED) else "words" if NAMED.strip() in done.err else done.err


@pytest.mark.parametrize("python", nodes.interpreters(), ids=lambda path: str(path).strip("/").replace("/", "-"))
def test_wherever_a_file_was_cut_off_it_is_refused_by_name(python: Path, toy: Toy, file: Path) -> None:
    data = file.read_bytes()
    before = trees.snapshot(toy.tree)
    first, last = data.index(b"PK\5\6") + 22, data.rindex(b"PK\5\6")
    step = (last - first) // 9
    inside = [
        first,
        first + 1,
        *range(first, last, step),
        last - 1,
        last,
        last + 3,
        last + 22,
        len(data) - 64,
        len(data) - 1,
    ]
    assert {said_of(data[:size], toy, file, python) for size in inside} == {"name"}
    # No archive is left, or half of the record that ends one: Python reads it as a program.
    words = data.index(b"PK\3\4")
    outside = [words, (words + first) // 2, first - 1, last + 4, last + 13, last + 21]
    assert {said_of(data[:size], toy, file, python) for size in outside} == {"words"}
    assert trees.snapshot(toy.tree) == before


def test_a_directory_of_the_archive_that_is_damaged_is_refused_by_name(toy: Toy, file: Path) -> None:
    data = file.read_bytes()
    last = data.rindex(b"PK\5\6")
    (size,) = struct.unpack_from("<L", data, last + 12)
    # Its first entry is what the interpreter starts; the numbers at its end say where it is.
    spots = {*range(last - size + 60, last, 1511), *range(last, last + 12), *range(last + 20, last + 22)}
    for spot in sorted(spots):
        changed = bytearray(data)
        changed[spot] ^= 1
        assert said_of(bytes(changed), toy, file) in ("name", "words"), spot - last


def test_what_an_archive_holds_in_parts_is_read_as_one_file(tmp_path: Path) -> None:
    files = {f"p/{size}": os.urandom(size) for size in (0, 1, 49_151, 49_152, 49_153, 200_000)} | {"p/0~": b"x"}
    place = tmp_path / "x.zip"
    place.write_bytes(archives.zipped({name: File(data) for name, data in files.items()}, first="p/1"))
    top = place.resolve() / "p"
    assert {path.name: store.read(path) for path in store.walk(top)} == {name[2:]: data for name, data in files.items()}
    assert zipfile.ZipFile(place).testzip() is None
    with pytest.raises(ValueError, match="part"):
        archives.zipped({"a": File(b""), "a~2": File(b"")}, first="a")


@pytest.mark.parametrize("sizes", [[100] * 900, [32_000] * 9, [300_000, 5, 300_000], [1]], ids=str)
def test_nowhere_is_the_next_end_of_an_archive_out_of_an_interpreters_reach(sizes: list[int]) -> None:
    files = {f"f{number:04}": File(b"x" * size) for number, size in enumerate(sizes)} | {"main": File(b"main")}
    data = archives.zipped(files, first="main", prefix=b"before\n", comment=b"0" * 64)
    ends = [match.end() + 18 for match in re.finditer(rb"PK\x05\x06", data)]
    assert ends[0] < 300
    assert max(after - before for before, after in zip(ends, [*ends[1:], len(data)], strict=True)) <= 65535
    for end in ends:
        archive = zipfile.ZipFile(io.BytesIO(data[:end] if end != ends[-1] else data))
        assert archive.namelist()[0] == "main"
        assert archive.read("main") == b"main"


def test_a_file_with_something_behind_it_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")
    assert nodes.call(file, "status").code != 0


def test_an_old_python_is_told_so_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = REPOSITORY / "lab/release/start.py"
    ast.parse(start.read_text(encoding="utf-8"), feature_version=(3, 5))
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(start))
    assert end.value.code == Exit.USAGE
    assert "Python 3.10 or newer" in capsys.readouterr().err


def test_two_parts_with_a_file_of_one_name_are_no_one_file(toy: Toy, tmp_path: Path) -> None:
    twice = [nodes.packages()[0]] * 2
    with pytest.raises(ValueError, match="two parts have"):
        pyz.build(REPOSITORY, toy.bundle, twice)


def test_a_name_that_a_zip_archive_would_change_is_refused() -> None:
    with pytest.raises(ValueError, match="no name"):
        archives.zipped({"a\0b": File(b"")}, first="a\0b")


# The archive of the sources.


def opened(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: member for member in archive.getmembers()}


def test_the_archive_of_the_sources_holds_what_is_published_and_nothing_of_this_machine() -> None:
    data = sdist.build(REPOSITORY)
    top = f"patchbundle-{__version__}"
    expected = {f"{top}/{path.relative_to(REPOSITORY).as_posix()}" for path in scan.files(REPOSITORY)}
    members = opened(data)
    assert set(members) == expected | {f"{top}/PKG-INFO"}
    for member in members.values():
        assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")
        assert member.mode in (0o644, 0o755)
    assert members[f"{top}/tools/apply.py"].mode == 0o755


def test_what_is_unpacked_from_it_works_and_makes_the_same_archive(tmp_path: Path) -> None:
    data = sdist.build(REPOSITORY)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / f"patchbundle-{__version__}"
    command = [sys.executable, str(root / "tools/check_sources.py")]
    assert subprocess.run(command, capture_output=True, check=False, env={**os.environ}).returncode == 0
    (root / "PKG-INFO").unlink()
    assert sdist.build(root) == data


def test_its_metadata_says_what_the_project_says() -> None:
    project: dict[str, Any] = parse_toml((REPOSITORY / "pyproject.toml").read_bytes(), "pyproject.toml")["project"]
    head = sdist.metadata(REPOSITORY).decode().partition("\n\n")[0].splitlines()
    assert f"Name: {project['name']}" in head
    assert f"Version: {__version__}" in head
    assert [line.partition(": ")[2] for line in head if line.startswith("Requires-Dist")] == project["dependencies"]


def test_a_gzip_stream_of_any_length_is_read_back() -> None:
    for size in (0, 1, 65535, 65536, 200_000):
        files = {"a": File(os.urandom(size)), "b": File(b"x", EXECUTABLE)}
        data = archives.tarred(files, top="t")
        assert gzip.decompress(data)
        assert {name: member.size for name, member in opened(data).items()} == {"t/a": size, "t/b": 1}
    assert fetch.cache_folder()
