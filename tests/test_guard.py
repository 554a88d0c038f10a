"""A start that fails closed: only from a tree that is verified, and then as if nothing had stood in between."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from patchbundle import canonical, cli, guard, journal, manifest, releases, transaction
from patchbundle.disk import Disk
from patchbundle.errors import BundleError, Exit, Reason
from tests import nodes, trees
from tests import toy as toys
from tests.toy import Toy
from tests.trees import REPOSITORY, Result

# What a command sees of itself, as JSON.
SEES = """
import json, os, signal, sys
print(json.dumps({
    "pid": os.getpid(), "argv": sys.argv[1:], "cwd": os.getcwd(), "umask": os.umask(0), "env": dict(os.environ),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "ignored": [line.split()[1] for line in open("/proc/self/status") if line.startswith("SigIgn")],
    "open": sorted(os.listdir("/proc/self/fd"), key=int),
}))
"""
# An interpreter sets handlers of its own before it runs this; a shell does not.
IGNORED = "grep SigIgn /proc/self/status | cut -f2"


def verify(toy: Toy, expect: str, *more: str | Path) -> Result:
    """Without a process of its own, and without a start."""
    return trees.run(toy, "exec", "prefill", "--root", toy.tree, "--expect", expect, "-n", *more)


# What is started.


def test_the_command_is_what_it_would_be_without_us(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    words = [sys.executable, "-I", "-c", SEES, "a b", "--root", "ü"]
    plain = subprocess.run(words, env=toy.environment, cwd=toy.bundle, capture_output=True, check=True)
    before = trees.snapshot(toy.bundle.parent)
    guarded = nodes.start(toy, *words)
    assert (guarded.code, guarded.err) == (0, "")
    expected, found = json.loads(plain.stdout), guarded.table
    assert {**found, "pid": 0} == {**expected, "pid": 0}
    assert trees.snapshot(toy.bundle.parent) == before


def test_signals_that_python_ignores_are_not_ignored_by_the_command(toy: Toy) -> None:
    # What this test itself was started with, as by nohup, is handed on to both.
    direct = subprocess.run(["sh", "-c", IGNORED], capture_output=True, text=True, check=True).stdout
    assert nodes.start(toy, "sh", "-c", IGNORED, expect="base").out == direct
    # As the interpreter leaves them: else this proves nothing.
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN


def test_it_keeps_its_process_id_and_the_descriptors_that_it_was_given(toy: Toy) -> None:
    read, write = os.pipe()
    os.write(write, b"from the supervisor")
    os.set_inheritable(read, True)
    command = [sys.executable, str(REPOSITORY / "tools/apply.py"), "exec", "prefill", "--bundle", str(toy.bundle)]
    command += ["--root", str(toy.tree), "--expect", "base", "--", "sh", "-c", f"echo $$; head -c 19 /dev/fd/{read}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[read], env=toy.environment) as process:
        said = process.communicate()[0].decode()
    os.close(read)
    os.close(write)
    assert said == f"{process.pid}\nfrom the supervisor"


def test_its_exit_code_and_its_death_by_a_signal_are_the_commands(toy: Toy) -> None:
    assert nodes.start(toy, "sh", "-c", "exit 41", expect="base").code == 41
    assert nodes.start(toy, "sh", "-c", "kill -TERM $$", expect="base").code == -signal.SIGTERM


@pytest.mark.parametrize(
    ("command", "found"),
    [("no-such-program", "none"), ("./bases.toml", "none"), ("./empty", "Exec format error")],
)
def test_a_command_that_cannot_be_started_is_a_refusal(command: str, found: str, toy: Toy) -> None:
    (toy.bundle / "config/empty").touch(mode=0o755)
    done = nodes.start(toy, command, expect="base", cwd=toy.bundle / "config")
    assert (done.code, "[no-command]" in done.err, found in done.err) == (Exit.REFUSED, True, True)


def test_options_of_the_command_are_never_taken_for_ours(toy: Toy) -> None:
    assert trees.run(toy, "exec", "prefill", "--root", toy.tree, "--expect", "base", "python3", "-m", "x").code == 2
    assert trees.run(toy, "exec", "prefill", "--root", toy.tree, "--expect", "base").code == Exit.USAGE
    assert nodes.start(toy, "echo", "--expect", "-n", expect="base").out == "--expect -n\n"


# What is refused.


@pytest.mark.parametrize("name", ["base", *toys.LEVELS])
def test_only_the_expected_level_is_started(name: str, toy: Toy) -> None:
    if name != "base":
        assert trees.apply(toy, "--to", name).code == 0
    for expect in ("base", *toys.LEVELS, "applied"):
        meant = toys.LEVELS[-1] if expect == "applied" else expect
        done = verify(toy, expect, "--json")
        assert (done.code, done.reason) == ((0, None) if meant == name else (Exit.REFUSED, "not-expected")), expect


def test_a_level_that_no_tree_can_have_is_refused_as_such(toy: Toy) -> None:
    for expect, reason in (("delta", "unknown-level"), ("9.9:applied", "unknown-release"), ("any", "unknown-level")):
        assert verify(toy, expect, "--json").reason == reason


def test_a_level_of_a_filed_release_is_named_with_it(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    releases.file(toy.bundle, "0.1.0")
    source = toy.bundle / "sources/prefill/alpha.py"
    source.write_bytes(source.read_bytes() + b"# newer\n")
    toy.pin()
    assert verify(toy, "applied", "--json").reason == "not-expected"
    assert verify(toy, "0.1.0:gamma-third").code == Exit.DONE
    assert verify(toy, "0.1.0:applied").code == Exit.DONE
    assert verify(toy, "0.1.0:beta-second").code == Exit.REFUSED
    assert trees.apply(toy).code == 0
    assert verify(toy, "applied").code == Exit.DONE
    assert verify(toy, "0.1.0:gamma-third").code == Exit.REFUSED


def test_a_filed_release_that_was_edited_is_not_trusted(toy: Toy) -> None:
    releases.file(toy.bundle, "0.1.0")
    toy.pin()
    path = toy.bundle / "patches/releases/0.1.0/config/bases.toml"
    path.write_bytes(path.read_bytes() + b"\n")
    assert trees.apply(toy, "--bundle", toy.bundle).code == Exit.REFUSED or trees.level(toy) == 3
    (toy.tree / "sglang/srt/engine.py").write_bytes(b"edited\n")
    assert verify(toy, "base", "--json").reason == "artifact"


def test_a_filed_release_that_was_edited_and_locked_anew_is_not_trusted(toy: Toy) -> None:
    """Its own lock agrees with it; the lock that it is filed under does not."""
    releases.file(toy.bundle, "0.1.0")
    toy.pin()
    place = toy.bundle / "patches/releases/0.1.0"
    path, lock = place / "config/bases.toml", place / manifest.LOCK
    path.write_bytes(path.read_bytes() + b"\n")
    table = json.loads(lock.read_bytes())
    table["artifacts"]["config/bases.toml"] = hashlib.sha256(path.read_bytes()).hexdigest()
    del table["content"]
    lock.write_bytes(canonical.sealed(table))
    assert manifest.load_pins(place, release="0.1.0").release == "0.1.0", "else this proves nothing"
    (toy.tree / "sglang/srt/engine.py").write_bytes(b"edited\n")
    assert verify(toy, "base", "--json").reason == "artifact"


def test_an_edited_lock_or_base_of_the_bundle_is_not_trusted(toy: Toy) -> None:
    path = toy.bundle / "config/bases.toml"
    path.write_bytes(path.read_bytes() + b"\n")
    assert verify(toy, "base", "--json").reason == "artifact"
    lock = toy.bundle / manifest.LOCK
    lock.write_bytes(lock.read_bytes().replace(b"alpha-first", b"alpha-forst"))
    assert verify(toy, "base", "--json").reason == "lock"


def drifted(toy: Toy) -> None:
    path = toy.tree / "sglang/srt/layers/pool.py"
    path.write_bytes(path.read_bytes() + b"\n")


def without_receipt(toy: Toy) -> None:
    (toy.tree / toys.HOME / "receipt.json").unlink()


def with_a_stranger(toy: Toy) -> None:
    (toy.tree / toys.HOME / "stranger.py").touch()


def with_a_link(toy: Toy) -> None:
    path = toy.tree / "sglang/srt/engine.py"
    path.rename(toy.tree / "engine.py")
    path.symlink_to(toy.tree / "engine.py")


def with_a_record_that_lies(toy: Toy) -> None:
    path = toy.tree / toys.RECORD
    path.write_bytes(path.read_bytes().replace(b"sglang/srt/engine.py", b"sglang/srt/engin2.py"))


def with_unchecked_bytecode(toy: Toy) -> None:
    import py_compile

    other = toy.bundle.parent / "other.py"
    other.write_text("print('old code')\n")
    cache = toy.tree / "sglang/srt/__pycache__" / f"engine.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(str(other), str(cache), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (drifted, "drift"),
        (without_receipt, "drift"),
        (with_a_stranger, "drift"),
        (with_a_link, "drift"),
        (with_a_record_that_lies, "record"),
        (with_unchecked_bytecode, "bytecode"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_tree_that_is_not_whole_starts_nothing(harm: object, reason: str, toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    assert callable(harm)
    harm(toy)
    started = toy.bundle.parent / "started"
    done = nodes.start(toy, "touch", str(started), where=("--root", toy.tree, "--json"))
    assert (done.code, done.reason, started.exists()) == (Exit.REFUSED, reason, False)


@pytest.mark.parametrize("role", ["decode", "router"])
def test_a_tree_of_another_role_starts_nothing(role: str, toy: Toy) -> None:
    done = trees.run(toy, "exec", role, "--root", toy.tree, "--expect", "base", "-n", "--json")
    assert (done.code, done.reason) == (Exit.REFUSED, "no-target")


def kills(toy: Toy) -> Iterator[int]:
    """Apply to fresh copies of the toy's tree, killed at its first, second, … call; yields how many calls it made."""
    number, ended = 0, False
    while not ended:
        number += 1
        calls = 0

        def die(disk: Disk, name: str, path: str, at: int = number) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                trees.kill_self()

        toys.install(next((toy.cache / "archives").glob("*/*.whl")), trees.fresh(toy.tree))
        try:
            trees.forked(lambda: bool(trees.change(toy, "apply", disk_type=trees.hooked(before=die))))
            ended = True
        except trees.Killed:
            pass
        yield number


def test_killed_at_any_call_nothing_starts_before_it_is_recovered_but_from_a_whole_tree(toy: Toy) -> None:
    whole = {"base", "gamma-third"}
    seen = set()
    for _ in kills(toy):
        started = {expect for expect in ("base", *toys.LEVELS) if verify(toy, expect).code == Exit.DONE}
        halfway = any((toy.tree / name).exists() for name in (journal.NAME, journal.BESIDE))
        assert (len(started) == 1 and started <= whole) != halfway
        seen.add(verify(toy, "applied").code)
        transaction.recover(toy.tree)
    assert seen == {Exit.DONE, Exit.REFUSED, Exit.RECOVERY_NEEDED}


def test_while_a_run_is_going_on_nothing_starts(toy: Toy) -> None:
    answers: list[int] = []

    def look(disk: Disk, name: str, path: str) -> None:
        if name == "rename" and disk.kind(journal.NAME) != "absent":
            answers.append(trees.forked(lambda: verify(toy, "base").code))

    trees.change(toy, "apply", disk_type=trees.hooked(before=look))
    assert answers
    assert set(answers) == {Exit.BUSY}


# Which copy is imported.


def engine(folder: Path, text: str = "") -> Path:
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang/__init__.py").write_text(text)
    return folder


def test_a_copy_in_the_working_folder_is_found_where_an_interpreter_would_import_it(toy: Toy, tmp_path: Path) -> None:
    here = engine(tmp_path / "here", "print('another')")
    command = [sys.executable, "-c", "import sglang; print(sglang.__file__)"]
    site = {"PYTHONPATH": str(toy.tree)}
    stock = subprocess.run(command, cwd=here, env={**os.environ, **site}, capture_output=True, text=True, check=True)
    assert "another" in stock.stdout, "else this proves nothing"
    done = nodes.start(toy, *command, expect="base", env=site, cwd=here)
    assert (done.code, "[shadowed]" in done.err) == (Exit.REFUSED, True)
    safe = nodes.start(toy, *command, expect="base", env={**site, "PYTHONSAFEPATH": "1"}, cwd=here)
    assert (safe.code, safe.out) == (0, f"{toy.tree}/sglang/__init__.py\n")


@pytest.mark.parametrize(
    ("path", "here", "found"),
    [
        ("", "elsewhere", None),
        ("", "copy", "copy"),
        ("", "bare", None),
        ("", "module", "module"),
        ("", "tree", None),
        ("{tree}", "elsewhere", None),
        ("{copy}:{tree}", "elsewhere", "copy"),
        ("{tree}:{copy}", "elsewhere", None),
        ("{copy}", "elsewhere", "copy"),
        ("{bare}:{tree}", "elsewhere", None),
        ("../copy", "elsewhere", "copy"),
        (":{tree}", "copy", "copy"),
        ("{linked}:{copy}", "elsewhere", None),
    ],
)
def test_what_comes_before_the_tree_on_the_way_of_an_import(
    path: str, here: str, found: str | None, toy: Toy, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("elsewhere", "copy", "bare", "module", "linked")}
    for name in ("elsewhere", "module"):
        places[name].mkdir()
    engine(places["copy"])
    (places["bare"] / "sglang").mkdir(parents=True)
    (places["module"] / "sglang.py").touch()
    places["linked"].symlink_to(toy.tree)
    places["tree"] = toy.tree
    listed = path.format(**places)
    other = guard.shadow(toy.tree, "sglang", {"PYTHONPATH": listed} if listed else {}, places[here])
    assert (other is None) == (found is None)
    if found is not None and other is not None:
        assert places[found].resolve() in other.resolve().parents
    # As an interpreter decides, with the tree behind everything as its site-packages would be.
    text = "import sys; sys.path.append(sys.argv[1]); import importlib.util as u; print(u.find_spec('sglang').origin)"
    env = {**os.environ, **({"PYTHONPATH": listed} if listed else {})}
    origin = subprocess.run(
        [sys.executable, "-S", "-c", text, str(toy.tree)], cwd=places[here], env=env, capture_output=True, check=True
    ).stdout.decode()
    assert (Path(origin.strip()).resolve() == toy.tree.resolve() / "sglang/__init__.py") == (other is None)


def test_without_a_root_the_interpreter_of_the_command_is_asked(toy: Toy, tmp_path: Path) -> None:
    asked = tmp_path / "python3"
    asked.write_text(f'#!/bin/sh\nPYTHONPATH="{toy.tree}" exec {sys.executable} "$@"\n')
    asked.chmod(0o755)
    done = nodes.start(toy, str(asked), "-c", "print('up')", expect="base", where=())
    assert (done.code, done.out) == (0, "up\n")
    assert guard.interpreter_of(["/usr/bin/python3.11", "-m", "x"]) == "/usr/bin/python3.11"
    assert guard.interpreter_of(["python"]) == "python"
    for other in (["pythonic"], ["python2"], ["sh", "-c", "python3"], []):
        assert guard.interpreter_of(other) is None


def test_one_thing_is_verified_and_it_is_said_which(toy: Toy) -> None:
    file = toy.bundle / "config/bases.toml"
    for more in (("--python", sys.executable), ("--router", file)):
        assert verify(toy, "base", *more).code == Exit.USAGE
    done = trees.run(toy, "exec", "prefill", "--router", file, "--expect", "base", "-n")
    assert done.code == Exit.USAGE


# A plain start, read without the whole command line.

PLAIN = ["prefill", "--expect", "base", "--root", "r", "--", "cmd", "-n"]


def test_a_plain_start_is_read_and_anything_else_is_left_to_the_command_line() -> None:
    assert guard.Start.read(PLAIN) == guard.Start("prefill", "base", "--root", "r", ("cmd", "-n"))
    swapped = ["decode", "--overlay", "o", "--expect", "x:y", "--", "a", "--", "b"]
    assert guard.Start.read(swapped) == guard.Start("decode", "x:y", "--overlay", "o", ("a", "--", "b"))
    for words in (
        [],
        ["prefill"],
        PLAIN[:5],
        PLAIN[:6],
        ["--expect", "base", "prefill", "--root", "r", "--", "cmd"],
        ["other", *PLAIN[1:]],
        ["prefill", "--expect", "base", "--", "cmd"],
        ["prefill", "--expect", "base", "--router", "r", "--", "cmd"],
        ["prefill", "--expect", "base", "--root", "r", "-n", "--", "cmd"],
        ["prefill", "--expect", "base", "--root", "r", "--json", "x", "--", "cmd"],
        ["prefill", "--root", "a", "--root", "r", "--", "cmd"],
        ["prefill", "--root", "a", "--python", "r", "--", "cmd"],
        ["prefill", "--expect=base", "--root", "r", "x", "--", "cmd"],
    ):
        assert guard.Start.read(words) is None, words


@pytest.mark.parametrize("way", ["in place", "one file", "one file, not plain"])
@pytest.mark.parametrize("what", ["base", "applied", "drift", "journal", "shadow", "no-command", "overlay"])
def test_a_plain_start_and_the_whole_command_line_decide_alike(way: str, what: str, toy: Toy, tmp_path: Path) -> None:
    file = nodes.one_file(toy, tmp_path / "bundle.pyz")
    here, over = tmp_path / "here", tmp_path / "over"
    here.mkdir()
    where: list[str | Path] = ["--root", toy.tree]
    if what == "overlay":
        assert trees.apply(toy, "--overlay", over).code == 0
        where = ["--overlay", over]
    if what == "drift":
        drifted(toy)
    if what == "journal":
        (toy.tree / journal.NAME).touch()
    if what == "shadow":
        here = engine(tmp_path / "copy")
    expect = "applied" if what in ("applied", "overlay") else "base"
    program = "no-such-program" if what == "no-command" else "env"
    words = ["exec", "prefill", *where, "--expect", expect, *(["-v"] if "not plain" in way else []), "--", program]
    if way == "in place":
        done = trees.child(toy, *words[:-2], "--bundle", toy.bundle, *words[-2:], cwd=here)
    else:
        done = nodes.call(file, *words, cwd=here, env={"PATH": os.environ["PATH"]})
    codes = {"base": 0, "overlay": 0, "journal": Exit.RECOVERY_NEEDED}
    assert done.code == codes.get(what, Exit.REFUSED)
    if what == "overlay":
        assert f"PYTHONPATH={over}" in done.out.splitlines()
    if done.code == 0:
        assert "PATH=" in done.out
    else:
        assert done.out == ""
        word = {"applied": "not-expected", "journal": "recovery-needed", "shadow": "shadowed"}.get(what, what)
        assert f"[{word}]" in done.err


# A router's binary.

BINARY = b"\x7fELF" + b"\0" * 20 + b"PyInit_sglang_router_rs\0"


def router(expect: str, path: Path) -> str:
    """With the bundle of this repository: the toy has no router."""
    bundle = manifest.load_pins(cli.bundle_root())
    return guard.verify_router(bundle, path, expect)


def test_a_binary_of_the_expected_level_is_started_and_no_other(tmp_path: Path) -> None:
    from patchbundle import binary

    bundle = manifest.load(cli.bundle_root())
    base = binary.base_of(bundle)
    top = len(bundle.pins(base).levels)
    path = tmp_path / "router.so"
    path.write_bytes(BINARY + binary.mark(bundle, base, top).encode())
    assert router("applied", path) == bundle.pins(base).levels[-1]
    with pytest.raises(BundleError) as refusal:
        router("base", path)
    assert refusal.value.reason == Reason.NOT_EXPECTED
    path.write_bytes(BINARY)
    assert router("base", path) == "base"
    with pytest.raises(BundleError) as refusal:
        router("applied", path)
    assert refusal.value.reason == Reason.NOT_EXPECTED
    path.write_bytes(BINARY + f"[patchbundle-router-series sha256={'0' * 64} level={top}]".encode())
    with pytest.raises(BundleError, match="another bundle"):
        router("applied", path)
