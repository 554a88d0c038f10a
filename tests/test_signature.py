"""Signatures where no signature can be had: every way of that is a refusal. With the program: tests/extras."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import toy as toys
from tests import trees

KEY = "RW" + "A" * 54


@pytest.mark.parametrize("check", [False, True], ids=["apply", "check"])
def test_without_the_program_a_required_signature_is_refused_and_nothing_is_written(
    check: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = toys.make(tmp_path)
    before = trees.snapshot(toy.tree)
    (toy.bundle / "patches/pins.lock.minisig").write_bytes(b"whatever")
    monkeypatch.setenv("PATH", str(tmp_path))
    words: list[str | Path] = ["--root", toy.tree, "--require-signature", KEY, "--json"]
    result = trees.run(toy, *words, check=True) if check else trees.run(toy, "apply", *words)
    assert (result.code, result.reason) == (1, "no-program")
    assert trees.snapshot(toy.tree) == before


@pytest.mark.parametrize("check", [False, True], ids=["apply", "check"])
def test_a_place_of_a_signature_without_a_key_is_a_slip_in_the_command(check: bool, tmp_path: Path) -> None:
    toy = toys.make(tmp_path)
    words: list[str | Path] = ["--root", toy.tree, "--signature", tmp_path / "file"]
    result = trees.run(toy, *words, check=True) if check else trees.run(toy, "apply", *words)
    assert result.code == 2
    assert trees.status(toy, "--json").table["result"]["status"]["level"] == 0


def test_a_signature_beside_the_lock_is_no_orphan_and_changes_no_digest(tmp_path: Path) -> None:
    toy = toys.make(tmp_path)
    before = trees.check(toy, "--json").table["result"]["bundle"]["digest"]
    (toy.bundle / "patches/pins.lock.minisig").write_bytes(b"whatever")
    after = trees.check(toy, "--json")
    assert (after.code, after.table["result"]["bundle"]["digest"]) == (0, before)
    (toy.bundle / "patches/other.minisig").write_bytes(b"whatever")
    assert trees.run(toy, "--json", check=True).reason == "orphan"
    assert trees.check(toy, "--json").reason == "artifact"
