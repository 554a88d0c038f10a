"""The whole tree is the pinned release, but for the series; or it is told what is missing, changed, extra."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchbundle import attest
from patchbundle.attest import Attestation
from patchbundle.errors import BundleError, Reason
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
            return attest.tree_digest(attest.survey(tree))

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
