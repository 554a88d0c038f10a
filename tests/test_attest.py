"""The whole tree is the pinned release, but for the series; or it is told what is missing, changed, extra."""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from patchbundle import attest, survey, work
from patchbundle.attest import Attestation
from patchbundle.errors import BundleError, Reason
from patchbundle.manifest import Bundle
from patchbundle.target import Target
from patchbundle.transaction import Outcome
from patchbundle.tree import Tree
from tests import toy as toys
from tests import trees
from tests.toy import Toy

TOOL = "sglang/srt/tool.sh"


def attested(toy: Toy) -> Attestation:
    bundle, _ = trees.load(toy)
    state = trees.look(toy)
    with Tree(toy.tree) as tree:
        return attest.attest(tree, bundle, state, state.require_level("tree"))


@pytest.mark.parametrize("level", ["base", *toys.LEVELS])
def test_an_installed_tree_holds_at_every_level(toy: Toy, level: str) -> None:
    if level != "base":
        trees.change(toy, "apply", level)
    found = attested(toy)
    assert found.holds
    assert (found.archive, found.extra) == (toys.WHEEL, ())


def test_a_changed_a_missing_and_an_extra_file(toy: Toy) -> None:
    (toy.tree / TOOL).write_bytes(b"#!/bin/sh\nexit 1\n")
    (toy.tree / "sglang/_version.py").unlink()
    (toy.tree / "sglang/new/deep").mkdir(parents=True)
    (toy.tree / "sglang/new/deep/x.py").write_bytes(b"")
    found = attested(toy)
    assert not found.holds
    assert (found.changed, found.missing, found.extra) == ((TOOL,), ("sglang/_version.py",), ("sglang/new/deep/x.py",))


def test_extra_files_alone_are_listed_not_refused(toy: Toy) -> None:
    (toy.tree / "sglang/x.py").write_bytes(b"")
    assert attested(toy).holds


def test_a_file_turned_into_a_link_to_the_same_bytes_does_not_hold(toy: Toy) -> None:
    place = toy.tree / TOOL
    place.rename(toy.tree.parent / "elsewhere")
    place.symlink_to(toy.tree.parent / "elsewhere")
    assert attested(toy).changed == (TOOL,)


def test_metadata_is_a_part_of_the_release(toy: Toy) -> None:
    place = toy.tree / toys.INFO / "METADATA"
    place.write_bytes(place.read_bytes() + b"more\n")
    assert attested(toy).changed == (f"{toys.INFO}/METADATA",)


def test_without_record_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    toy = toys.make(tmp_path, with_record=False)
    with pytest.raises(BundleError) as caught:
        attested(toy)
    assert caught.value.reason is Reason.NOT_ATTESTED


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data.replace(b"tool.sh,sha256=", b"tool.sh,sha256=A"),
        lambda data: b"\n".join(line for line in data.split(b"\n") if b"tool.sh" not in line),
        lambda data: data + b"sglang/x.py,sha256=" + toys._digest(b"").encode() + b",0\n",
    ],
    ids=["changed", "shortened", "lengthened"],
)
def test_a_record_that_was_edited_to_fit_is_not_the_releases(toy: Toy, edit: object) -> None:
    place = toy.tree / toys.RECORD
    place.write_bytes(edit(place.read_bytes()))  # type: ignore[operator]
    result = trees.check(toy, "--full")
    assert result.code == 1
    assert "[not-attested]" in result.err or "[record]" in result.err


def test_members_are_read_back_as_written() -> None:
    entries = {"a b/c": ("0" * 64, 7), "d": ("f" * 64, 0)}
    assert attest.parse_members(attest.dump_members(entries), "x") == entries


@pytest.mark.parametrize("line", ["", "x 1 p", f"{'0' * 64} x p", f"{'0' * 64} 1"])
def test_a_damaged_list_of_members(line: str) -> None:
    with pytest.raises(BundleError) as caught:
        attest.parse_members(f"{'0' * 64} 1 good\n{line}\n".encode(), "list")
    assert caught.value.where == "list:2"


def test_the_digest_of_a_tree_sees_bytes_modes_links_and_empty_folders(toy: Toy) -> None:
    def digest() -> str:
        with Tree(toy.tree) as tree:
            return attest.tree_digest(survey.take(tree))

    seen = {digest()}
    (toy.tree / TOOL).chmod(0o700)
    seen.add(digest())
    (toy.tree / TOOL).write_bytes(b"")
    seen.add(digest())
    (toy.tree / "empty").mkdir()
    seen.add(digest())
    (toy.tree / "empty").rmdir()
    (toy.tree / "empty").symlink_to("x")
    seen.add(digest())
    assert len(seen) == 5
    (toy.tree / "__pycache__").mkdir()
    assert digest() in seen


@pytest.mark.parametrize("limit", [1 << 28, 1])
def test_a_survey_that_was_begun_before_is_as_good(toy: Toy, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Or another one is taken, where files of the release are larger than what the first one read."""
    monkeypatch.setattr("patchbundle.attest.LIMIT", limit)
    monkeypatch.setattr(survey, "_FEW", 1)
    (toy.tree / TOOL).write_bytes(b"#!/bin/sh\nexit 1\n")
    (toy.tree / "sglang/x.py").write_bytes(b"")
    bundle, target = trees.load(toy)
    with Tree(toy.tree) as tree, attest.begun(tree, target.bases) as under_way:
        state = trees.look(toy)
        assert under_way is not None
        found = attest.attest(tree, bundle, state, 0, under_way)
    assert found == attested(toy)
    assert (found.changed, found.extra) == ((TOOL,), ("sglang/x.py",))


@pytest.mark.parametrize("wrong", [{"place": (0, 0)}, {"top": "sglang/srt"}, {"skip": frozenset()}, {"limit": 1}])
def test_a_survey_of_another_place_is_not_taken_for_this_one(toy: Toy, wrong: dict[str, Any]) -> None:
    bundle, target = trees.load(toy)
    state = trees.look(toy)
    with Tree(toy.tree) as tree:
        right = survey.Begun(survey.place(tree), "sglang", survey.BYTECODE, None, lambda: pytest.fail("taken"))
        with pytest.raises(pytest.fail.Exception, match="taken"):
            attest.attest(tree, bundle, state, 0, right)
        other = right._replace(**wrong)
        assert attest.attest(tree, bundle, state, 0, other).holds
        with attest.begun(tree, target.bases, other) as under_way:
            assert under_way is not other or "limit" in wrong
        with attest.begun(tree, target.bases, right) as under_way:
            assert under_way is right


@pytest.mark.parametrize("guess", ["right", "another tree", "none"])
def test_a_check_says_the_same_whatever_was_guessed_before(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guess: str
) -> None:
    (toy.tree / TOOL).write_bytes(b"#!/bin/sh\nexit 1\n")
    other = toys.make(tmp_path / "other")
    real, guesses = survey.guessed, []

    def guessed(root: Path, top: str) -> AbstractContextManager[survey.Begun | None]:
        guesses.append(root)
        return real({"right": root, "another tree": other.tree, "none": root / "nothing"}[guess], top)

    monkeypatch.setattr(survey, "guessed", guessed)
    done = trees.run(toy, "--root", toy.tree, "--full", check=True)
    assert done.code == 1
    assert TOOL in done.err
    assert guesses == [toy.tree]
    (toy.tree / TOOL).write_bytes((other.tree / TOOL).read_bytes())
    assert trees.run(toy, "--root", toy.tree, "--full", check=True).code == 0


def test_no_survey_is_begun_where_bases_lie_in_different_folders(toy: Toy) -> None:
    base = trees.load(toy)[1].bases[0]
    with Tree(toy.tree) as tree:
        for bases in ([], [base, base._replace(marker="other/x.py")]):
            with attest.begun(tree, bases) as under_way:
                assert under_way is None


def test_a_roundtrip_sees_a_change_of_a_file_that_no_patch_touches(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose size and time are put back."""
    bundle, target = trees.load(toy)
    real = work.execute

    def execute(bundle: Bundle, target: Target, *rest: Any) -> Outcome:
        done = real(bundle, target, *rest)
        place = target.root / TOOL
        before = place.stat()
        place.write_bytes(place.read_bytes().swapcase())
        os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
        return done

    with toys.cache_at(toy.cache):
        assert work.roundtrip(bundle, target.bases[0], offline=True).holds
        monkeypatch.setattr(work, "execute", execute)
        with pytest.raises(BundleError) as caught:
            work.roundtrip(bundle, target.bases[0], offline=True)
    assert (caught.value.reason, caught.value.found) == (Reason.NOT_ATTESTED, TOOL)


def test_a_roundtrip_leaves_nothing_behind(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    bundle, target = trees.load(toy)
    with toys.cache_at(toy.cache):
        work.roundtrip(bundle, target.bases[0], offline=True)
    assert not list(place.iterdir())
