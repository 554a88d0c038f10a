"""Where a tree stands: the level, the word of each file, and what else status tells."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patchbundle import processes, work
from patchbundle.identity import File, Identity
from patchbundle.tree import Found, Tree
from tests import toy as toys
from tests import trees
from tests.toy import Toy

ENGINE = "sglang/srt/engine.py"


def words(toy: Toy) -> dict[str, str]:
    return {file.path: file.word for file in trees.look(toy).files}


@pytest.mark.parametrize("level", range(4))
def test_every_level_is_recognised_by_its_hashes_alone(toy: Toy, level: int) -> None:
    """The bytes are laid out by hand: no run, no receipt, no journal tells."""
    if level:
        trees.change(toy, "apply", toys.LEVELS[level - 1])
        (toy.tree / toys.HOME / "receipt.json").unlink()
    state = trees.look(toy)
    assert (state.level, state.level_name) == (level, ["base", *toys.LEVELS][level])
    assert state.receipt == ("missing" if level else "none")
    for path, word in words(toy).items():
        there = path in toys.after(level)
        assert (word == "absent") == (not there)
        assert not there or word == "base" or word.startswith("patched at step ")


def test_a_file_of_another_level_is_named_as_such(toy: Toy) -> None:
    trees.change(toy, "apply")
    (toy.tree / ENGINE).write_bytes(toys.ENGINE_ALPHA)
    state = trees.look(toy)
    assert (state.level, state.nearest) == (None, 3)
    assert words(toy)[ENGINE] == "as at level 1"


def test_words_of_damage(toy: Toy) -> None:
    trees.change(toy, "apply")
    (toy.tree / ENGINE).write_bytes(b"other")
    (toy.tree / "sglang/srt/launch.sh").chmod(0o644)
    (toy.tree / "sglang/srt/layers/pool.py").unlink()
    (toy.tree / "sglang/srt/layers/wired.py").unlink()
    (toy.tree / "sglang/srt/layers/wired.py").mkdir()
    (toy.tree / "sglang/srt/old.py").write_bytes(b"back")
    found = words(toy)
    assert found[ENGINE] == "drifted"
    assert found["sglang/srt/launch.sh"] == "wrong mode"
    assert found["sglang/srt/layers/pool.py"] == "missing"
    assert found["sglang/srt/layers/wired.py"] == "wrong kind"
    assert found["sglang/srt/old.py"] == "unexpected"


def test_other_bits_of_the_mode_are_the_installers_affair(toy: Toy) -> None:
    (toy.tree / ENGINE).chmod(0o600)
    (toy.tree / "sglang/srt/old.py").chmod(0o664)
    assert trees.level(toy) == 0


def test_caches_in_our_folders_are_not_unexpected(toy: Toy) -> None:
    trees.change(toy, "apply")
    (toy.tree / toys.HOME / "__pycache__").mkdir()
    (toy.tree / toys.HOME / "__pycache__" / "alpha.cpython-311.pyc").write_bytes(b"")
    assert trees.level(toy) == 3


def test_a_damaged_record_is_no_level(toy: Toy) -> None:
    (toy.tree / toys.RECORD).write_bytes(b"")
    state = trees.look(toy)
    assert state.level is None
    assert state.record_fault is not None
    assert trees.status(toy, "--json").table["result"]["status"]["record"] == "drifted"


def test_gates_set_in_the_environment_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = toys.make(tmp_path)
    patch = toy.bundle / "patches/prefill/alpha-first.patch"
    patch.write_bytes(patch.read_bytes().replace(b"Gate: none; a toy", b"Gate: SGLANG_RESEARCH_TOY"))
    toy.pin()
    assert "gate:" not in trees.status(toy).out
    monkeypatch.setenv("SGLANG_RESEARCH_TOY", "1")
    monkeypatch.setenv("SGLANG_RESEARCH_OTHER", "1")
    told = trees.status(toy)
    assert "gate:    SGLANG_RESEARCH_TOY=1" in told.out
    assert "OTHER" not in told.out


def test_processes_from_before_the_change_are_told_and_later_ones_are_not(toy: Toy) -> None:
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)", f"{toy.tree}/model"]
    before = subprocess.Popen(command, stdout=subprocess.PIPE)
    after = None
    try:
        assert before.stdout is not None
        before.stdout.readline()
        time.sleep(0.05)
        now = time.time() + 5  # the clock of /proc counts in hundredths, from a boot time in whole seconds
        assert before.pid in [process.pid for process in processes.older_than(toy.tree, now)]
        assert processes.older_than(toy.tree, time.time() - 3600) == []
        assert before.pid not in [process.pid for process in processes.older_than(toy.tree.parent / "other", now)]
    finally:
        for process in (before, after):
            if process is not None:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


def test_an_interpreter_in_usr_bin_is_not_taken_for_a_user_of_every_tree_below_usr(tmp_path: Path) -> None:
    """Only a virtual environment's own bin/ tells of its site-packages."""
    site = tmp_path / "usr/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    python = tmp_path / "usr/bin/python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    process = subprocess.Popen([str(python), "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        later = time.time() + 5
        time.sleep(0.2)
        assert process.pid not in [item.pid for item in processes.older_than(site, later)]
        (tmp_path / "usr/pyvenv.cfg").write_text("")
        assert process.pid in [item.pid for item in processes.older_than(site, later)]
    finally:
        process.kill()
        process.communicate()


def test_a_process_is_found_by_a_file_that_it_has_mapped_alone(toy: Toy) -> None:
    """Its command line does not name the tree, and its interpreter is nobody's."""
    text = "import mmap, sys; f = open(sys.stdin.readline().strip(), 'rb'); "
    text += "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print('up', flush=True); sys.stdin.readline()"
    command = [sys.executable, "-S", "-c", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{toy.tree / ENGINE}\n")
        process.stdin.flush()
        process.stdout.readline()
        later = time.time() + 5
        assert process.pid in [item.pid for item in processes.older_than(toy.tree, later)]
        assert process.pid not in [item.pid for item in processes.older_than(toy.tree / "sglang/srt/layers", later)]
        process.kill()


def test_those_that_started_this_command_are_not_told_as_users_of_the_tree(toy: Toy) -> None:
    """A shell that names the tree in its command line, and one above it; a sibling that does so is told."""
    text = "import sys, time; from pathlib import Path; from patchbundle import processes; "
    text += "print([p.pid for p in processes.older_than(Path(sys.argv[1]), time.time() + 5)], flush=True)"
    inner = f"{sys.executable} -c '{text}' {toy.tree}; : {toy.tree}/x"
    # The shell in the middle is named (a) (b), as a process may be.
    (toy.tree.parent / "a) (b").symlink_to("/bin/sh")
    outer = '"$0" -c "$1" & echo $!; wait; : "$2"'
    command = ["/bin/sh", "-c", outer, str(toy.tree.parent / "a) (b"), inner, f"{toy.tree}/x"]
    sibling = subprocess.Popen([sys.executable, "-c", "input()", f"{toy.tree}/x"], stdin=subprocess.PIPE)
    try:
        environment = {**os.environ, "PYTHONPATH": str(trees.REPOSITORY / "tools")}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        middle, told = done.stdout.splitlines()
        assert json.loads(told) == [sibling.pid], (middle, done)
    finally:
        sibling.kill()
        sibling.communicate()


def test_a_look_leaves_no_trace(toy: Toy) -> None:
    trees.change(toy, "apply")
    before = trees.snapshot(toy.tree)
    opened = set(os.listdir("/proc/self/fd"))
    trees.look(toy)
    work.status(*trees.load(toy))
    assert trees.snapshot(toy.tree) == before
    assert set(os.listdir("/proc/self/fd")) == opened


# What is too large to be it.


def grown(place: Path, size: int = 1 << 35) -> None:
    """A file of 32 GiB that takes no room."""
    with place.open("r+b") as stream:
        stream.truncate(size)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Room for another GiB beside what this process has mapped, which libraries make much."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (ENGINE, "drift"),
        ("sglang/srt/layers/pool.py", "drift"),
        (toys.RECORD, "record"),
        (f"{toys.HOME}/receipt.json", "not-expected"),
        (f"{toys.HOME}/alpha.py", "drift"),
    ],
)
def test_a_file_grown_beyond_all_reason_is_told_by_its_size_and_not_read(toy: Toy, path: str, reason: str) -> None:
    trees.change(toy, "apply")
    grown(toy.tree / path)
    for done in (trees.apply(toy), trees.revert(toy), trees.check(toy)):
        assert (done.code, f"[{reason}]" in done.err) == (1, True), done
        assert path in done.err
    assert trees.status(toy).code == 1


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("path", ["sglang/srt/tool.sh", "sglang/theirs.bin", f"{toys.INFO}/WHEEL"])
def test_a_huge_file_that_nobody_pins_is_attested_by_its_size(toy: Toy, path: str) -> None:
    (toy.tree / path).touch()
    grown(toy.tree / path)
    result = trees.check(toy, "--full", "-v")
    assert path in result.out + result.err
    assert result.code == (0 if path.endswith(".bin") else 1)


def test_no_more_of_a_file_is_read_than_can_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of one that grows after its size was taken."""
    (tmp_path / "x").write_bytes(b"1234")
    asked: list[int] = []

    def endless(_: int, count: int) -> bytes:
        asked.append(count)
        return b"x" * count

    with Tree(tmp_path) as tree:
        assert tree.find("x", 4).identity == Identity.of(b"1234")
        assert tree.find("x", 4, keep=False) == Found(Identity.of(b"1234"), None, (tmp_path / "x").stat())
        monkeypatch.setattr(os, "read", endless)
        assert tree.find("x", 3).identity == Identity("file", "100644", "", 4)
        assert asked == []
        found = tree.find("x", 4)
        assert (found.identity.sha256, found.data) == ("", None)
        assert sum(asked) == 5
        assert "larger than what may be there" in found.identity.brief()


# A receipt of another bundle.


def newer(toy: Toy, changes: bytes = b"") -> Toy:
    """A bundle with one more patch, that reaches for files which the older one does not pin; on the same tree."""
    changes = changes or toys.diff("sglang/_version.py", toys.BASE["sglang/_version.py"], None) + toys.diff(
        "sglang/extra.py", None, File(b"x = 1\n")
    )
    made = toys.make(toy.tree.parent / "newer", entries=[*toys.series(), toys.Entry("delta-fourth", changes)])
    return Toy(made.bundle, toy.tree, made.cache)


def test_an_older_bundle_does_not_take_a_newer_bundles_tree_for_its_own(toy: Toy) -> None:
    """It would say "base" of a tree in which files are gone and others are new, and delete the receipt that knew."""
    other = newer(toy)
    trees.change(other, "apply")
    before = trees.snapshot(toy.tree)
    for done in (
        trees.apply(toy),
        trees.apply(toy, "-n"),
        trees.revert(toy),
        trees.revert(toy, "--to", "alpha-first"),
        trees.run(toy, "plan", "--root", toy.tree),
        trees.check(toy),
        trees.check(toy, "--expect", "applied"),
    ):
        assert done.code == 1, done
        assert "[not-expected]" in done.err
        assert "receipt.json (of an unknown bundle" in done.err
        assert "alpha-first, beta-second, gamma-third, delta-fourth" in done.err
        assert "use the bundle that wrote it" in done.err
    told = trees.status(toy)
    assert told.code == 1
    assert "receipt: of an unknown bundle" in told.out
    assert trees.status(toy, "--json").table["result"]["status"]["level"] is None
    full = trees.check(toy, "--full")
    assert (full.code, "[not-attested]" in full.err) == (1, True)
    assert trees.snapshot(toy.tree) == before
    trees.change(other, "revert")
    assert trees.apply(toy).code == 0


def test_the_way_out_of_an_unknown_receipt(toy: Toy) -> None:
    """Nothing but the receipt is odd: --full says no more than that, and without the receipt the hashes tell."""
    trees.change(toy, "apply")
    receipt = toy.tree / toys.HOME / "receipt.json"
    table = json.loads(receipt.read_text())
    receipt.write_text(json.dumps({**table, "bundle": "0" * 64, "patches": ["alpha-first", "omega-last"]}))
    assert "[not-expected]" in trees.check(toy, "--full").err
    (toy.tree / "sglang/theirs.py").touch()
    assert "sglang/theirs.py (extra)" in trees.check(toy, "--full").err
    receipt.unlink()
    assert trees.apply(toy).code == 0
    assert trees.check(toy, "--full", "--expect", "applied").code == 0


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"level": 1}, "other"),
        ({"patches": []}, "other"),
        ({"patches": ["beta-second"]}, "of an unknown bundle"),
        ({"patches": None}, "of an unknown bundle"),
        ({"patches": [*toys.LEVELS, "delta"]}, "of an unknown bundle"),
        ({"bundle": "0" * 64}, "other"),
        ({"bundle": 7}, "other"),
        ({"bundle": "0" * 64, "patches": []}, "of an unknown bundle"),
        ({"bundle": "0" * 64, "patches": ["alpha-first"]}, "of an unknown bundle"),
        ({"bundle": "0" * 64, "patches": [*toys.LEVELS]}, "of an unknown bundle"),
        ({"bundle": "0" * 64, "patches": {"alpha-first": 1}}, "of an unknown bundle"),
        ({"bundle": "0" * 64, "base": "sglang-0.5.18"}, "of an unknown bundle"),
        ({"bundle": "0" * 64, "role": "decode"}, "of an unknown bundle"),
    ],
    ids=str,
)
def test_which_receipts_are_of_an_unknown_bundle(toy: Toy, changed: dict[str, object], word: str) -> None:
    trees.change(toy, "apply", "beta-second")
    receipt = toy.tree / toys.HOME / "receipt.json"
    receipt.write_text(json.dumps({**json.loads(receipt.read_text()), **changed}))
    assert trees.look(toy).receipt == word
    assert trees.apply(toy).code == (0 if word == "other" else 1)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"patches": [[], {}, null]}'])
def test_a_receipt_that_does_not_read_may_be_anybodys(toy: Toy, data: bytes) -> None:
    trees.change(toy, "apply")
    (toy.tree / toys.HOME / "receipt.json").write_bytes(data)
    assert trees.look(toy).receipt == "of an unknown bundle"
    assert "[not-expected]" in trees.revert(toy).err


# Bytecode that runs in place of a pinned module.


def unseen(source: Path, data: bytes, place: Path | None = None) -> Path:
    """Bytecode of ``data`` beside ``source`` that is never checked."""
    place = place or Path(importlib.util.cache_from_source(str(source)))
    other = source.parent.parent / "other.py"
    other.write_bytes(data)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(other), str(place), doraise=True, invalidation_mode=mode)
    other.unlink()
    return place


def all_refuse_bytecode(toy: Toy, place: Path, *, changing: bool = True) -> None:
    commands = [trees.apply(toy), trees.check(toy), trees.check(toy, "--expect", "applied", "--full")]
    for done in (*commands, *([trees.revert(toy, "-n")] if changing else [])):
        assert (done.code, "[bytecode]" in done.err) == (1, True), done
        assert f"where:    {place}\n" in done.err
    told = trees.status(toy)
    assert (told.code, f"stale bytecode: {place}" in told.out) == (1, True), told


MODULE = f"{toys.HOME}/alpha.py"


def test_bytecode_of_another_source_that_is_never_checked_is_no_level(toy: Toy) -> None:
    trees.change(toy, "apply")
    place = unseen(toy.tree / MODULE, b"def start(): evil\n")
    all_refuse_bytecode(toy, place, changing=False)
    assert trees.revert(toy).code == 0  # which drops it
    assert not place.exists()


def test_bytecode_of_the_very_source_that_is_never_checked_is_told_and_no_more(toy: Toy) -> None:
    trees.change(toy, "apply")
    place = unseen(toy.tree / MODULE, (toy.tree / MODULE).read_bytes())
    told = trees.status(toy)
    assert (told.code, f"{place} (unchecked)" in told.out) == (0, True)  # it would hide the next change
    assert trees.check(toy, "--expect", "applied", "--full").code == 0
    # Another interpreter's: this one cannot tell.
    place.write_bytes(b"\0\0\r\n" + place.read_bytes()[4:])
    all_refuse_bytecode(toy, place, changing=False)


@pytest.mark.parametrize("what", ["the folder", "the file", "nowhere"])
def test_a_link_in_the_place_of_bytecode_is_refused_and_not_followed(toy: Toy, tmp_path: Path, what: str) -> None:
    trees.change(toy, "apply")
    caches = toy.tree / toys.HOME / "__pycache__"
    real = unseen(toy.tree / MODULE, b"x = 1\n", tmp_path / "elsewhere" / "alpha.cpython-311.pyc")
    place = caches
    if what == "the file":
        caches.mkdir()
        place = caches / real.name
        place.symlink_to(real)
    else:
        caches.symlink_to(real.parent if what == "the folder" else "nowhere")
    all_refuse_bytecode(toy, place)
    assert real.exists()
    assert place.is_symlink()


@pytest.mark.parametrize("what", ["plain", "sglang", toys.HOME, "the file"])
def test_the_same_below_a_prefix(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    trees.change(toy, "apply")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "prefix"))
    mirror = tmp_path / "prefix" / toy.tree.relative_to("/")
    place = unseen(toy.tree / MODULE, b"x = 1\n", mirror / toys.HOME / "alpha.cpython-311.pyc")
    if what != "plain":
        place = place if what == "the file" else mirror / what
        place.rename(tmp_path / "moved")
        place.symlink_to(tmp_path / "moved")
    all_refuse_bytecode(toy, place, changing=what != "plain")


def test_bytecode_older_than_a_source_with_its_very_time_and_size_is_told_and_other_is_not(toy: Toy) -> None:
    source = toy.tree / ENGINE
    os.utime(source, (1_000_000_000, 1_000_000_000))
    place = Path(py_compile.compile(str(source), doraise=True) or "")
    os.utime(place, (1_100_000_000, 1_100_000_000))
    _, target = trees.load(toy)
    assert [cache.path for cache in work.status(trees.load(toy)[0], target).stale] == [
        place.relative_to(toy.tree).as_posix()
    ]
    assert trees.status(toy).code == 0
    os.utime(place)
    later = time.time() + 60
    os.utime(place, (later, later))
    assert work.status(trees.load(toy)[0], target).stale == ()


def test_files_under_the_tools_own_names_are_listed_and_are_no_level(toy: Toy) -> None:
    (toy.tree / "sglang/srt/.patchbundle-4.old").write_bytes(b"a rescue copy")
    state = trees.look(toy)
    assert state.level is None
    assert state.unexpected == ("sglang/srt/.patchbundle-4.old",)
