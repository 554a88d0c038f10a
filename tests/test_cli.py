"""The command line: transcripts, JSON against its schema, exit codes, and the same output under any locale."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from patchbundle import cli, journal, transaction
from patchbundle.errors import BundleError, Exit, Reason
from tests import images, trees
from tests import toy as toys
from tests.toy import Toy, cache_at
from tests.trees import Result

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.t"))
SCHEMA = trees.REPOSITORY / "tools/patchbundle/schema/output-1.json"
_WRITE = os.environ.get("TRANSCRIPTS") == "write"


def typed(toy: Toy, line: str) -> tuple[str, int]:
    """What a typed line gives: output and errors as one text, and the exit code."""
    words = line.split()
    if words[0] not in ("apply.py", "check_sources.py"):
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr, done.returncode
    to_null = words[-2:] == [">", "/dev/null"]
    words = words[:-2] if to_null else words
    command = cli.apply_cli if words[0] == "apply.py" else cli.check_cli
    words[(2 if words[0] == "apply.py" else 1) : (2 if words[0] == "apply.py" else 1)] = ["--bundle", "bundle"]
    with cache_at(toy.cache):
        result = CliRunner().invoke(command, words[1:], prog_name=words[0])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stderr if to_null else result.output, result.exit_code


def plain(text: str, folder: Path) -> str:
    text = text.replace(str(folder), "/where")
    text = re.sub(r"\b[0-9a-f]{64}\b", "HASH", text)
    return re.sub(r"\b[0-9a-f]{12}…", "HASH…", text)


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(transcript: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = toys.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    out: list[str] = []
    for line in transcript.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line:
            out += (
                ["", line] if line.startswith("#") and out and not out[-1].startswith("#") else [line] if line else []
            )
        elif line.startswith("$ "):
            said, code = typed(toy, line[2:])
            silent = not said and code == 0
            out += [line, *plain(said, tmp_path).splitlines(), *([] if silent else [f"[{code}]"])]
    made = "\n".join(out) + "\n"
    if _WRITE:
        transcript.write_text(made, encoding="utf-8")
    assert made == transcript.read_text(encoding="utf-8")


def test_every_verb_has_a_transcript_or_is_named_here() -> None:
    verbs = set(cli.apply_cli.commands) | {"check_sources"}
    assert verbs - {path.stem for path in TRANSCRIPTS} == {"roundtrip", "clean-cache"}


# JSON.


@cache
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def objects(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from objects(item)


def test_the_schema_allows_no_unknown_member_anywhere() -> None:
    for node in objects(json.loads(SCHEMA.read_text(encoding="utf-8"))):
        if isinstance(node.get("properties"), dict) and node.get("type") == "object":
            assert node["additionalProperties"] is False


def test_the_schema_knows_every_verb_exit_code_and_refusal() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert set(schema["properties"]["verb"]["enum"]) == set(cli.apply_cli.commands) | {"check"}
    assert schema["$defs"]["exit"]["enum"] == [int(code) for code in Exit]
    exits = {int(BundleError(reason, "x").exit_code) for reason in Reason}
    assert set(schema["$defs"]["refusal"]["enum"]) == exits


def valid(result: Result, verb: str, code: int) -> dict[str, Any]:
    table = result.table
    validator().validate(table)
    assert (table["verb"], table["exit"], result.code) == (verb, code, code)
    assert result.err == "" or result.err.startswith("…")
    inner = table["result"]
    assert isinstance(inner, dict)
    return inner


def test_json_of_every_verb_is_as_its_schema_says(toy: Toy) -> None:
    root = ("--root", toy.tree, "--json")
    valid(trees.run(toy, "plan", *root), "plan", 0)
    valid(trees.run(toy, "status", *root), "status", 0)
    valid(trees.run(toy, "apply", *root, "--dry-run"), "apply", 0)
    assert valid(trees.run(toy, "apply", *root, "-v"), "apply", 0)["plan"]["to"] == "gamma-third"
    valid(trees.run(toy, "apply", *root), "apply", 3)
    assert valid(trees.run(toy, "status", *root), "status", 0)["status"]["level"] == 3
    assert valid(trees.run(toy, *root, "--full", check=True), "check", 0)["attestation"]["extra"] == []
    valid(trees.run(toy, "--json", check=True), "check", 0)
    valid(trees.run(toy, "revert", *root), "revert", 0)
    valid(trees.run(toy, "exec", "prefill", *root, "--expect", "base", "-n"), "exec", 0)
    valid(trees.run(toy, "exec", "prefill", *root, "--expect", "applied", "-n"), "exec", 1)
    valid(trees.run(toy, "recover", *root), "recover", 3)
    valid(trees.run(toy, "recover", *root, "--dry-run"), "recover", 3)
    valid(trees.run(toy, "pin", "--offline", "--json"), "pin", 3)
    valid(trees.run(toy, "fetch-base", "--offline", "--json"), "fetch-base", 0)
    rows = valid(trees.run(toy, "roundtrip", "--offline", "--json"), "roundtrip", 0)["rows"]
    assert [row["holds"] for row in rows] == [True]
    images.Layout(toy.tree.parent / "in").image([images.tar(images.files_of(images.tree_files(toy.tree)))])
    words: list[str | Path] = [
        "--from",
        toy.tree.parent / "in",
        "--to",
        toy.tree.parent / "image",
        "--role",
        "prefill",
        "--json",
    ]
    assert valid(trees.run(toy, "image", *words, "--platform", "linux/amd64"), "image", 0)["image"]["name"] == "latest"
    valid(trees.run(toy, "image", *words, "--platform", "linux/s390x"), "image", 1)
    valid(trees.run(toy, "attest", "--out", toy.tree.parent / "out", *root), "attest", 1)
    valid(trees.run(toy, "attest", "--out", toy.tree.parent / "out", "--json"), "attest", 0)
    valid(trees.run(toy, "clean-cache", "--json"), "clean-cache", 3)


def test_json_of_refusals_is_as_its_schema_says(toy: Toy) -> None:
    root = ("--root", toy.tree, "--json")
    with transaction.locked(toy.tree):
        valid(trees.run(toy, "apply", *root), "apply", Exit.BUSY)
    (toy.tree / "sglang/srt/engine.py").write_bytes(b"other\n")
    for verb in ("apply", "revert", "plan", "status"):
        valid(trees.run(toy, verb, *root), verb, Exit.REFUSED)
    valid(trees.run(toy, *root, check=True), "check", Exit.REFUSED)
    (toy.tree / ".patchbundle-journal").write_bytes(b"")
    for verb in ("apply", "revert", "plan", "status", "recover"):
        valid(trees.run(toy, verb, *root), verb, Exit.RECOVERY_NEEDED)
    (toy.bundle / "sources/prefill/alpha.py").write_bytes(b"other\n")
    valid(trees.run(toy, "--json", check=True), "check", Exit.REFUSED)
    for place in (toy.cache / "archives").glob("*/*.whl"):
        place.unlink()
    for verb in ("pin", "fetch-base"):
        valid(trees.run(toy, verb, "--offline", "--json"), verb, Exit.FAILED)


@pytest.mark.parametrize("reason", Reason)
def test_every_refusal_has_a_word_a_sentence_and_a_next_step(reason: Reason) -> None:
    error = BundleError(reason, "somewhere")
    table = {
        "schema": 1,
        "tool": "0",
        "verb": "apply",
        "exit": int(error.exit_code),
        "result": {},
        "error": error.as_dict(),
    }
    validator().validate(table)
    assert str(error).splitlines()[-1].startswith("  next:     ")


# The process.

LOCALES = [
    {"LC_ALL": "C"},
    {"LC_ALL": "C.UTF-8"},
    {"LC_ALL": "xx_YY.nonsense"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "POSIX", "PYTHONIOENCODING": "latin-1", "LANGUAGE": "de"},
]


def test_output_is_the_same_under_any_locale(tmp_path: Path) -> None:
    toy = toys.make(tmp_path / "tÖy ☃")
    said = set()
    for variables in LOCALES:
        env = {"LANG": "", "LC_CTYPE": "", "PYTHONUTF8": "", "PYTHONIOENCODING": "", **variables}
        env = {name: value for name, value in env.items() if value or name in ("LANG", "LC_CTYPE")}
        result = trees.child(toy, "plan", "--bundle", toy.bundle, "--root", toy.tree, "-v", env=env)
        assert result.code == 0, (variables, result)
        said.add(result.out)
    assert len(said) == 1
    assert "sha256" in said.pop()


def test_the_tools_run_from_any_folder_and_say_their_version(toy: Toy, tmp_path: Path) -> None:
    for script in ("apply.py", "check_sources.py"):
        result = trees.child(toy, "--version", script=script, cwd=tmp_path)
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith("patchbundle, version ")


@pytest.mark.parametrize(
    "arguments", [["apply", "--nonsense"], ["nonsense"], ["recover"], ["apply", "--role", "other"]]
)
def test_wrong_usage_is_exit_code_2(toy: Toy, arguments: list[str]) -> None:
    assert CliRunner().invoke(cli.apply_cli, arguments).exit_code == Exit.USAGE


# Output that cannot be written.


def shell(toy: Toy, line: str, *, script: str = "apply.py") -> Result:
    """A line for bash, with $A for the command (its ``--bundle`` has to follow the verb), $B for that and $R for it."""
    env = {
        **toy.environment,
        "A": f"{shlex.quote(sys.executable)} {shlex.quote(str(trees.REPOSITORY / 'tools' / script))}",
        "B": f"--bundle {shlex.quote(str(toy.bundle))}",
        "R": f"--root {shlex.quote(str(toy.tree))}",
    }
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], env=env, capture_output=True, text=True, check=False, timeout=120
    )
    return Result(done.returncode, done.stdout, done.stderr)


LOST = [
    ">/dev/full",
    "2>/dev/full",
    ">/dev/full 2>&1",
    ">&-",
    "2>&-",
    ">&- 2>&-",
    "<&- >&- 2>&-",
    "| true",
    "2>&1 | true",
]


# Words go out in one way whatever they say: with more of them only the endings that differ most.
_MORE = [(where, more) for more in ("--json", "-v") for where in (">/dev/full 2>&1", "2>&-", "<&- >&- 2>&-", "| true")]


@pytest.mark.parametrize(("where", "more"), [*((where, "") for where in LOST), *_MORE])
def test_the_exit_code_is_that_of_what_was_done_whoever_listens(toy: Toy, where: str, more: str) -> None:
    if "full" in where and not Path("/dev/full").exists():
        pytest.skip("no full device here")
    for verb, code, level in (("apply", 0, 3), ("apply", 3, 3), ("revert", 0, 0), ("recover", 3, 0)):
        done = shell(toy, f"$A {verb} $B $R {more} {where}")
        assert done.code == code, (verb, done)
        assert "Traceback" not in done.out + done.err
        assert "Exception ignored" not in done.out + done.err
        assert trees.level(toy) == level
    assert not [name for name in os.listdir(toy.tree) if name.startswith(".")]


@pytest.mark.parametrize("where", LOST)
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("$A --help", Exit.DONE),
        ("$A apply --help", Exit.DONE),
        ("$A --version", Exit.DONE),
        ("$A plan $B --root /nowhere", Exit.REFUSED),
        ("$A nonsense", Exit.USAGE),
    ],
)
def test_help_and_refusals_too_keep_their_exit_code(toy: Toy, line: str, code: int, where: str) -> None:
    lost = shell(toy, f"{line} {where}")
    assert lost.code == code
    assert "Traceback" not in lost.out + lost.err


def test_a_writer_has_a_last_word_about_words_that_were_lost(toy: Toy) -> None:
    done = shell(toy, "$A apply $B $R >/dev/full")
    assert done.err == "warning: output was lost (No space left on device); apply ended with exit code 0\n"
    # The reader has left before the writer starts, however busy the machine is.
    done = shell(toy, "exec 3> >(true); wait $!; $A revert $B $R --json >&3")
    assert done.err == "warning: output was lost (Broken pipe); revert ended with exit code 0\n"


def test_a_reader_whose_own_reader_leaves_ends_quietly(toy: Toy) -> None:
    for verb in ("status", "plan", "status --json"):
        done = shell(toy, f"$A {verb} $B $R | true")
        assert (done.code, done.err) == (0, ""), verb
    assert shell(toy, "$A $B $R >&-", script="check_sources.py").code == 0
    assert shell(toy, "$A $B $R | true", script="check_sources.py") == Result(0, "", "")
    told = shell(toy, "$A status $B $R >/dev/full")
    assert told.err == "warning: output was lost (No space left on device); status ended with exit code 0\n"


def test_closed_streams_are_no_files_of_the_tree(toy: Toy) -> None:
    """Else the numbers 0 to 2 are given to the files that are opened next, and a stray message lands in one."""
    probe = (
        "import os, sys; sys.path.insert(0, 'tools'); from patchbundle import output; output.install();"
        "names = {os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)}; sys.exit(names != {os.devnull})"
    )
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(probe)} <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", line], cwd=trees.REPOSITORY, check=False).returncode == 0


def test_not_enough_memory_is_told_as_a_refusal(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(transaction, "locked", fail)
    result = trees.apply(toy)
    assert result.code == Exit.FAILED
    assert "not enough memory" in result.err


def next_command(result: Result) -> list[str]:
    """The words that a shell makes of the command after the next step's last colon."""
    assert result.code not in (0, Exit.NOTHING_TO_DO)
    line = next(line for line in result.err.splitlines() if line.startswith("  next: "))
    words = shlex.split(re.split(r"(?:run|then|file): (?=tools/)", line)[1].removesuffix(", then edit"))
    assert words[0] == "tools/apply.py"
    return words[1:]


def test_the_next_command_can_be_typed_as_it_stands_whatever_the_root_is_called(tmp_path: Path) -> None:
    toy = toys.make(tmp_path / "it's a tree; echo $HOME")
    root = str(toy.tree)
    assert next_command(trees.revert(toy, "--to", "alpha-first")) == ["apply", "--to", "alpha-first", "--root", root]
    with transaction.locked(toy.tree):
        assert next_command(trees.apply(toy)) == ["status", "--root", root]
    assert trees.apply(toy).code == 0
    assert next_command(trees.apply(toy, "--to", "base")) == ["revert", "--to", "base", "--root", root]
    assert next_command(trees.run(toy, "refresh", "alpha-first", "--from", toy.tree))[-2:] == ["--root", root]
    assert trees.revert(toy).code == 0
    (toy.tree / journal.BESIDE).write_bytes(b"")
    told = next_command(trees.apply(toy))
    assert told == ["recover", "--root", root]
    assert trees.run(toy, *told).code == 0


def test_an_unexpected_failure_of_the_system_is_told_as_one(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error", "/some/where")

    monkeypatch.setattr(transaction, "locked", fail)
    result = trees.apply(toy)
    assert result.code == Exit.FAILED
    assert "/some/where" in result.err
    assert "Input/output error" in result.err
