"""What a transaction leaves as it was, modes, owners, links, attributes, RECORD; and what it drops: bytecode."""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from patchbundle import bytecode, canonical
from patchbundle.errors import BundleError, Exit, Reason
from patchbundle.identity import EXECUTABLE, PLAIN, File
from patchbundle.tree import Tree
from tests import toy as toys
from tests import trees
from tests.toy import Toy

ENGINE = "sglang/srt/engine.py"
OLD = "sglang/srt/old.py"
OURS = f"{toys.HOME}/alpha.py"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def whole_way(toy: Toy) -> None:
    """Up and down; the tree must be as before, but for times."""
    before = trees.snapshot(toy.tree, times=False)
    assert trees.apply(toy).code == 0
    assert trees.revert(toy).code == 0
    assert trees.snapshot(toy.tree, times=False) == before


@pytest.mark.parametrize("bits", [0o644, 0o444, 0o400, 0o664, 0o2664, 0o600, 0o666])
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_exact_mode_of_a_changed_file_whatever_the_umask(toy: Toy, bits: int, umask: int) -> None:
    (toy.tree / ENGINE).chmod(bits)
    before = os.umask(umask)
    try:
        assert trees.apply(toy).code == 0
        assert mode(toy.tree / ENGINE) == bits
        assert mode(toy.tree / OURS) == 0o644
        assert mode((toy.tree / OURS).parent) == 0o755
        assert trees.revert(toy).code == 0
        assert mode(toy.tree / ENGINE) == bits
    finally:
        os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_new_files_are_as_the_release_would_have_them_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    made = {"sglang/srt/run.sh": (EXECUTABLE, 0o755), "sglang/srt/read.py": (PLAIN, 0o644)}
    diff = b"".join(toys.diff(path, None, File(b"new\n", kind)) for path, (kind, _) in sorted(made.items()))
    toy = toys.make(tmp_path, entries=[toys.Entry("one", diff)], sources={})
    before = os.umask(umask)
    try:
        assert trees.apply(toy).code == 0
    finally:
        os.umask(before)
    for path, (_, bits) in made.items():
        assert mode(toy.tree / path) == bits


@pytest.mark.parametrize(("before", "after"), [(0o644, 0o755), (0o640, 0o750), (0o600, 0o700), (0o2664, 0o2775)])
def test_a_declared_change_of_mode_lets_those_run_it_who_may_read_it(toy: Toy, before: int, after: int) -> None:
    (toy.tree / "sglang/srt/launch.sh").chmod(before)
    assert trees.apply(toy).code == 0
    assert mode(toy.tree / "sglang/srt/launch.sh") == after
    assert trees.revert(toy).code == 0
    assert mode(toy.tree / "sglang/srt/launch.sh") == before


@pytest.mark.parametrize("bits", [0o644, 0o600, 0o444, 0o664, 0o2640])
@pytest.mark.parametrize("stops", [[], ["beta-second"], ["gamma-third"]], ids=["at once", "level by level", "twice"])
def test_a_removed_file_of_the_release_comes_back_with_its_own_mode(toy: Toy, bits: int, stops: list[str]) -> None:
    (toy.tree / OLD).chmod(bits)
    before = trees.snapshot(toy.tree, times=False)
    for stop in stops:
        assert trees.apply(toy, "--to", stop).code == 0
    assert trees.apply(toy).code == (3 if "gamma-third" in stops else 0)
    receipt = json.loads((toy.tree / toys.HOME / "receipt.json").read_bytes())
    assert receipt.get("kept", {}) == ({} if bits == 0o644 else {OLD: f"{bits:04o} {os.geteuid()} {os.getegid()}"})
    assert trees.status(toy, "--json").table["result"]["status"]["receipt"] == "current"
    assert trees.check(toy, "--full").code == 0
    assert trees.revert(toy).code == 0
    assert trees.snapshot(toy.tree, times=False) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_removed_file_of_the_release_comes_back_with_its_own_owner(toy: Toy) -> None:
    os.chown(toy.tree / OLD, trees.NOBODY, 12)
    whole_way(toy)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_who_cannot_give_a_removed_file_back_to_its_owner_is_refused_before_anything_is_written() -> None:
    with trees.open_place() as place:
        toy = toys.make(place / "toy")
        os.chown(toy.tree / OLD, 12, 12)
        assert trees.apply(toy).code == 0
        trees.give_away(toy.tree)
        before = trees.snapshot(toy.tree)
        result = trees.unprivileged(lambda: trees.revert(toy, "--json"))
        assert (result.code, result.reason) == (1, "owner")
        assert trees.snapshot(toy.tree) == before


@pytest.mark.parametrize(
    "kept",
    ['"0640"', '{"OLD": "0640"}', '{"OLD": 7}', '{"OLD": "9999 0 0"}', '{"ENGINE": "0600 0 0"}', "null", "[]"],
)
def test_what_a_damaged_receipt_keeps_is_not_followed(toy: Toy, kept: str) -> None:
    (toy.tree / OLD).chmod(0o600)
    assert trees.apply(toy).code == 0
    place = toy.tree / toys.HOME / "receipt.json"
    table = json.loads(place.read_bytes())
    table["kept"] = json.loads(kept.replace("OLD", OLD).replace("ENGINE", ENGINE))
    place.write_bytes(canonical.dump(table) if kept != "null" else json.dumps(table).encode())
    assert trees.status(toy, "--json").table["result"]["status"]["receipt"] == "other"
    assert trees.revert(toy).code == 0
    assert mode(toy.tree / OLD) == 0o644
    assert mode(toy.tree / ENGINE) == 0o644


@pytest.mark.parametrize("bits", [0o755, 0o700, 0o750, 0o2750, 0o2775, 0o1777, 0o711, 0o2700])
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_new_folders_are_as_open_as_the_folder_above_them(toy: Toy, bits: int, umask: int) -> None:
    """Neither open to those who were kept out, nor closed to those who share the tree; the setgid bit is passed on."""
    for path in ("sglang/srt", "sglang/srt/layers"):
        (toy.tree / path).chmod(bits)
    before = os.umask(umask)
    try:
        whole_way(toy)
        trees.apply(toy)
        for path in (toys.HOME, f"{toys.HOME}/kernels", "sglang/srt/layers/deep", "sglang/srt/layers/deep/er"):
            assert mode(toy.tree / path) == bits, path
        assert trees.revert(toy).code == 0
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a folder of somebody else's")
def test_a_new_folder_can_be_filled_by_whoever_makes_it_through_its_group() -> None:
    with trees.open_place() as place:
        toy = toys.make(place / "toy")
        trees.give_away(toy.tree)
        os.chown(toy.tree / "sglang/srt", 0, trees.NOBODY)
        (toy.tree / "sglang/srt").chmod(0o575)
        assert trees.unprivileged(lambda: trees.apply(toy)).code == 0
        assert mode(toy.tree / toys.HOME) == 0o775


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can keep another's owner")
def test_owners_are_kept_and_new_files_belong_to_the_owner_of_their_folder(toy: Toy) -> None:
    trees.give_away(toy.tree)
    os.chown(toy.tree / ENGINE, 1234, 4321)
    whole_way(toy)
    trees.apply(toy)
    status = (toy.tree / ENGINE).stat()
    assert (status.st_uid, status.st_gid) == (1234, 4321)
    for path in (OURS, toys.HOME, f"{toys.HOME}/receipt.json", "sglang/srt/layers/deep"):
        assert (toy.tree / path).stat().st_uid == trees.NOBODY


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a folder of somebody else's")
def test_without_special_rights_new_files_are_the_users_own_in_a_folder_shared_by_its_group() -> None:
    with trees.open_place() as place:
        toy = toys.make(place / "toy")
        trees.give_away(toy.tree)
        for path in ("", "sglang/srt", "sglang/srt/layers", toys.INFO):
            os.chown(toy.tree / path, 0, trees.NOBODY)
            (toy.tree / path).chmod(0o775)
        result = trees.unprivileged(lambda: trees.apply(toy))
        assert result.code == 0, result
        assert (toy.tree / OURS).stat().st_uid == trees.NOBODY
        assert trees.unprivileged(lambda: trees.revert(toy)).code == 0


def test_hard_linked_caches_are_not_written_through(toy: Toy, tmp_path: Path) -> None:
    """Installers link one file into many environments: the others must not see the change, nor lose the link."""
    cached = {}
    for path in (ENGINE, "sglang/srt/old.py", "sglang/srt/launch.sh", toys.RECORD):
        cached[path] = tmp_path / path.replace("/", "-")
        os.link(toy.tree / path, cached[path])
    before = {path: (place.read_bytes(), place.stat().st_mtime_ns, mode(place)) for path, place in cached.items()}
    assert trees.apply(toy).code == 0
    assert (toy.tree / ENGINE).read_bytes() == toys.ENGINE_BETA
    assert trees.revert(toy).code == 0
    for path, place in cached.items():
        assert (place.read_bytes(), place.stat().st_mtime_ns, mode(place)) == before[path]
        assert place.stat().st_nlink == 1


def attributes_work(place: Path) -> bool:
    try:
        os.setxattr(place, "user.try", b"1")
        os.removexattr(place, "user.try")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("bits", [0o644, 0o444])
def test_extended_attributes_are_kept_also_of_read_only_files(tmp_path: Path, bits: int) -> None:
    if not attributes_work(tmp_path):
        pytest.skip("no extended attributes here")
    toy = toys.make(tmp_path / "toy")
    trees.give_away(toy.tree)
    place = toy.tree / ENGINE
    os.setxattr(place, "user.note", b"kept")
    os.setxattr(place, "user.zero", b"")
    place.chmod(bits)
    tmp_path.chmod(0o755)
    whole_way(toy)
    trees.apply(toy)
    assert os.getxattr(place, "user.note") == b"kept"
    assert sorted(os.listxattr(place)) == ["user.note", "user.zero"]


def test_folders_made_by_us_go_and_others_stay(toy: Toy) -> None:
    (toy.tree / "sglang/srt/empty").mkdir()
    assert trees.apply(toy).code == 0
    assert (toy.tree / "sglang/srt/layers/deep/er").is_dir()
    assert trees.revert(toy, "--to", "beta-second").code == 0
    assert not (toy.tree / "sglang/srt/layers/deep").exists()
    assert (toy.tree / toys.HOME / "kernels").is_dir()
    assert trees.revert(toy).code == 0
    assert not (toy.tree / toys.HOME).exists()
    assert (toy.tree / "sglang/srt/empty").is_dir()
    assert (toy.tree / "sglang/srt/layers").is_dir()


def test_bytecode_of_our_modules_goes_with_their_folder(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    caches = toy.tree / toys.HOME / "__pycache__"
    caches.mkdir()
    for name in ("alpha.cpython-311.pyc", "gates.cpython-312.opt-1.pyc", "alpha.cpython-311.pyc.140001"):
        (caches / name).write_bytes(b"x")
    assert trees.status(toy).code == 0
    assert trees.revert(toy).code == 0
    assert not (toy.tree / toys.HOME).exists()


@pytest.mark.parametrize("name", ["notes.txt", "folder"])
def test_something_else_among_the_bytecode_of_our_folder_is_refused_and_kept(toy: Toy, name: str) -> None:
    assert trees.apply(toy).code == 0
    place = toy.tree / toys.HOME / "__pycache__" / name
    place.mkdir(parents=True)
    if name != "folder":
        place.rmdir()
        place.write_bytes(b"x")
    before = trees.snapshot(toy.tree)
    result = trees.revert(toy)
    assert result.code == Exit.REFUSED
    assert str(place) in result.err
    assert trees.snapshot(toy.tree) == before


# RECORD and the receipt.


@pytest.mark.parametrize("ends", ["LF", "CR LF", "no final newline", "CR LF, no final newline"])
def test_record_is_updated_and_restored_byte_for_byte(toy: Toy, ends: str) -> None:
    place = toy.tree / toys.RECORD
    data = place.read_bytes()
    if "CR LF" in ends:
        data = data.replace(b"\n", b"\r\n")
    if "final" in ends:
        data = data.rstrip(b"\r\n")
    place.write_bytes(data)
    assert trees.apply(toy, "--to", "alpha-first").code == 0
    assert trees.apply(toy).code == 0
    patched = place.read_bytes()
    assert f"{OURS},sha256=".encode() in patched
    assert f"{toys.HOME}/receipt.json,sha256=".encode() in patched
    assert patched.endswith(b"\n") == data.endswith(b"\n")
    assert (b"\n" in patched.replace(b"\r\n", b"")) == ("CR LF" not in ends)
    assert trees.revert(toy).code == 0
    assert place.read_bytes() == data


def test_record_is_the_same_by_one_step_or_by_three(toy: Toy, tmp_path: Path) -> None:
    other = toys.make(tmp_path / "other")
    assert trees.apply(toy).code == 0
    for level in toys.LEVELS:
        assert trees.apply(other, "--to", level).code == 0
    assert trees.snapshot(toy.tree, times=False) == trees.snapshot(other.tree, times=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The toy's wheel, really installed by pip into a folder of its own."""
    made = toys.make(tmp_path_factory.mktemp("installed"))
    wheel = next((made.cache / "archives").glob("*/*.whl"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, "--target", str(made.tree.with_name("site")), str(wheel)], check=True)
    return Toy(made.bundle, made.tree.with_name("site"), made.cache)


def test_a_distribution_that_pip_installed_goes_up_and_down_and_is_attested(installed: Toy) -> None:
    assert b"INSTALLER" in (installed.tree / toys.RECORD).read_bytes()
    before = trees.snapshot(installed.tree, times=False)
    assert trees.check(installed, "--full", "--expect", "base").code == 0
    assert trees.apply(installed).code == 0
    assert trees.check(installed, "--full", "--expect", "applied").code == 0
    for line in (installed.tree / toys.RECORD).read_text().splitlines():
        path, digest, _ = line.split(",")
        assert not digest or (installed.tree / path).is_file(), path
    assert trees.revert(installed).code == 0
    assert trees.snapshot(installed.tree, times=False) == before


def test_receipt_is_written_removed_and_refreshed_by_a_newer_bundle_with_the_same_bytes(toy: Toy) -> None:
    receipt = toy.tree / toys.HOME / "receipt.json"
    assert trees.apply(toy).code == 0
    first = receipt.read_bytes()
    assert trees.status(toy, "--json").table["result"]["status"]["receipt"] == "current"
    patch = toy.bundle / "patches/prefill/alpha-first.patch"
    patch.write_bytes(patch.read_bytes().replace(b"Description: a toy", b"Description: a better told toy"))
    toy.pin()
    assert trees.status(toy, "--json").table["result"]["status"]["receipt"] == "other"
    assert trees.check(toy, "--expect", "applied").code == 0
    planned = trees.run(toy, "plan", "--root", toy.tree, "--json").table["result"]["plan"]["operations"]
    assert [step["path"] for step in planned] == [f"{toys.HOME}/receipt.json", toys.RECORD]
    assert trees.apply(toy).code == 0
    assert receipt.read_bytes() != first
    assert trees.apply(toy).code == Exit.NOTHING_TO_DO
    assert trees.revert(toy).code == 0
    assert not receipt.exists()


def test_a_missing_receipt_is_said_and_put_back(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    receipt = toy.tree / toys.HOME / "receipt.json"
    data = receipt.read_bytes()
    receipt.unlink()
    assert trees.status(toy, "--json").table["result"]["status"]["receipt"] == "missing"
    assert trees.check(toy).code == Exit.REFUSED
    assert trees.apply(toy).code == 0
    assert receipt.read_bytes() == data


# Bytecode.


def compiled(source: Path, kind: py_compile.PycInvalidationMode) -> Path:
    place = Path(importlib.util.cache_from_source(str(source)))
    py_compile.compile(str(source), str(place), doraise=True, invalidation_mode=kind)
    return place


KINDS = {
    "timestamp": py_compile.PycInvalidationMode.TIMESTAMP,
    "checked": py_compile.PycInvalidationMode.CHECKED_HASH,
    "unchecked": py_compile.PycInvalidationMode.UNCHECKED_HASH,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimize", [0, 1, 2])
def test_bytecode_of_other_code_under_the_right_digest_is_seen_by_the_whole_check(
    toy: Toy, kind: str, optimize: int
) -> None:
    """Whoever can write a cache can write any code under its source's digest or time stamp."""
    assert trees.apply(toy).code == 0
    source = toy.tree / OURS
    honest = importlib.util.cache_from_source(str(source), optimization=optimize or "")
    py_compile.compile(str(source), honest, doraise=True, invalidation_mode=KINDS[kind], optimize=optimize)
    assert trees.check(toy, "--full").code == 0
    head = Path(honest).read_bytes()[:16]
    Path(honest).write_bytes(head + marshal.dumps(compile("def start(): evil\ndef stop(): ...\n", OURS, "exec")))
    assert trees.check(toy).code == 0, "without --full its digest is believed"
    done = trees.check(toy, "--full", "--json")
    assert (done.code, done.reason) == (1, "bytecode")
    assert done.table["error"]["where"] == honest


@pytest.mark.parametrize("body", [b"", b"\xff" * 64, b"N", marshal.dumps(7), b"(" + b"\xff" * 4], ids=repr)
def test_bytecode_that_cannot_even_be_read_is_seen_too(toy: Toy, body: bytes) -> None:
    assert trees.apply(toy).code == 0
    place = Path(importlib.util.cache_from_source(str(toy.tree / OURS)))
    py_compile.compile(str(toy.tree / OURS), str(place), doraise=True)
    place.write_bytes(place.read_bytes()[:16] + body)
    assert trees.check(toy, "--full", "--json").reason == "bytecode"


def test_bytecode_that_the_interpreter_would_not_run_is_not_asked_for(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    place = Path(importlib.util.cache_from_source(str(toy.tree / OURS)))
    py_compile.compile(str(toy.tree / OURS), str(place), doraise=True)
    raw = place.read_bytes()
    for head in (b"\0\0\r\n" + raw[4:16], raw[:8] + b"\0" * 8, raw[:8] + raw[8:12] + b"\0" * 4):
        place.write_bytes(head + marshal.dumps(7))
        assert trees.check(toy, "--full").code == 0


def test_an_interpreter_that_dies_over_a_cache_names_it_and_goes_on(toy: Toy, tmp_path: Path) -> None:
    caches = [bytecode.Cache(toy.tree, f"{name}.pyc", f"{name}.py", "unchecked") for name in ("a", "b", "c")]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho 0\ncase "$5" in *a.pyc) echo 1; kill -SEGV $$;; esac\n')
    python.chmod(0o755)
    assert [cache.path for cache in bytecode.forged(caches, toy.tree, str(python))] == ["b.pyc"]
    python.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(BundleError) as caught:
        bytecode.forged(caches, toy.tree, str(python))
    assert caught.value.reason is Reason.UNREADABLE


@pytest.mark.parametrize("kind", KINDS)
def test_stale_bytecode_of_a_touched_module_is_dropped_and_of_others_kept(toy: Toy, kind: str) -> None:
    stale = compiled(toy.tree / "sglang/srt/old.py", KINDS[kind])
    other = compiled(toy.tree / "sglang/srt/__init__.py", KINDS[kind])
    similar = stale.with_name("older.cpython-311.pyc")
    similar.write_bytes(stale.read_bytes())
    with Tree(toy.tree) as tree:
        assert [cache.kind for cache in bytecode.find(tree, ["sglang/srt/old.py"])] == [kind]
    result = trees.apply(toy, "-v")
    assert result.code == 0
    assert f"dropped {stale}" in result.out
    assert not stale.exists()
    assert other.exists()
    assert similar.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_bytecode_under_a_prefix_is_dropped_too(
    toy: Toy, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "prefix"))
    mirrored = tmp_path / "prefix" / (toy.tree / "sglang/srt").relative_to("/") / "old.cpython-311.pyc"
    py_compile.compile(str(toy.tree / "sglang/srt/old.py"), str(mirrored), invalidation_mode=KINDS[kind])
    other = mirrored.with_name("else.cpython-311.pyc")
    other.write_bytes(mirrored.read_bytes())
    assert trees.apply(toy).code == 0
    assert not mirrored.exists()
    assert other.exists()


def test_bytecode_under_a_prefix_of_a_tree_that_is_reached_by_a_link(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter mirrors the name that it knows, which is the link's."""
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "prefix"))
    link = tmp_path / "link"
    link.symlink_to(toy.tree)
    mirrored = tmp_path / "prefix" / (link / "sglang/srt").relative_to("/") / "old.cpython-311.pyc"
    py_compile.compile(str(toy.tree / "sglang/srt/old.py"), str(mirrored))
    assert trees.run(toy, "apply", "--root", link).code == 0
    assert not mirrored.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs caches of somebody else's")
@pytest.mark.parametrize(("kind", "code"), [("timestamp", 0), ("checked", 0), ("unchecked", Exit.REFUSED)])
def test_unwritable_caches_are_reported_and_those_that_would_hide_the_change_refused(kind: str, code: int) -> None:
    with trees.open_place() as place:
        toy = toys.make(place / "toy")
        trees.give_away(toy.tree)
        stale = compiled(toy.tree / "sglang/srt/old.py", KINDS[kind])
        stale.parent.chmod(0o755)
        stale.chmod(0o644)
        before = trees.snapshot(toy.tree)
        for more in (["--dry-run"], []):
            result = trees.unprivileged(lambda more=more: trees.apply(toy, *more))  # type: ignore[misc]
            assert result.code == code, result
            assert str(stale) in result.out + result.err
            if more or code:
                assert trees.snapshot(toy.tree) == before
        assert stale.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs caches of somebody else's")
def test_caches_that_cannot_be_looked_into_stop_nobody() -> None:
    with trees.open_place() as place:
        toy = toys.make(place / "toy")
        trees.give_away(toy.tree)
        caches = toy.tree / "sglang/srt/__pycache__"
        caches.mkdir(mode=0o700)
        told = trees.unprivileged(lambda: trees.status(toy))
        assert told.code == 0, told
        assert str(caches) in told.out
        done = trees.unprivileged(lambda: trees.apply(toy))
        assert done.code == 0, done
        assert str(caches) in done.out


def test_status_finds_bytecode_that_is_never_checked(toy: Toy) -> None:
    stale = compiled(toy.tree / "sglang/srt/old.py", KINDS["unchecked"])
    assert f"stale bytecode: {stale} (unchecked)" in trees.status(toy).out


def test_status_finds_bytecode_that_hides_a_file_put_there_with_the_old_time_and_size(toy: Toy) -> None:
    """As when a file is copied back with its time stamp: an interpreter would go on running the other one."""
    source = toy.tree / "sglang/srt/old.py"
    os.utime(source, (1_000_000_000, 1_000_000_000))
    source.write_bytes(toys.OLD.replace(b"1", b"7"))
    os.utime(source, (1_000_000_000, 1_000_000_000))
    stale = compiled(source, KINDS["timestamp"])
    os.utime(stale, (1_100_000_000, 1_100_000_000))
    source.write_bytes(toys.OLD)
    os.utime(source, (1_000_000_000, 1_000_000_000))
    assert f"stale bytecode: {stale} (timestamp)" in trees.status(toy).out


def test_status_does_not_complain_about_bytecode_that_is_right(toy: Toy) -> None:
    compiled(toy.tree / "sglang/srt/old.py", KINDS["timestamp"])
    compiled(toy.tree / "sglang/srt/old.py", KINDS["checked"])
    assert "stale" not in trees.status(toy).out
