"""The author's loop: a patch written back from an edited tree, and a series looked up in another release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from patchbundle import author, manifest, work
from patchbundle import target as target_module
from patchbundle.errors import BundleError
from patchbundle.identity import EXECUTABLE, File
from patchbundle.manifest import Bundle
from patchbundle.parse import parse
from tests import toy as toy_module
from tests.toy import BASE, ENGINE, HOME, NOTES, OLD, Toy, cache_at


@pytest.fixture
def at_beta(toy: Toy) -> Iterator[Toy]:
    """The toy with its tree at the second patch."""
    with cache_at(toy.cache):
        bundle = manifest.load(toy.bundle)
        target = target_module.discover(bundle, root=toy.tree)
        state, plan = work.make_plan(bundle, target, "apply", "beta-second")
        work.execute(bundle, target, state, plan)
        yield toy


def unlocked(toy: Toy) -> Bundle:
    return manifest.load_unlocked(toy.bundle)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(File(ENGINE), File(ENGINE.replace(b"engine = 7\n", b"engine = seven\n")), id="a line"),
        pytest.param(File(ENGINE), File(ENGINE[:-1]), id="the last newline goes"),
        pytest.param(File(NOTES), File(NOTES + b"\n"), id="the last newline comes"),
        pytest.param(None, File(NOTES), id="a new file without a last newline"),
        pytest.param(None, File(b""), id="a new empty file"),
        pytest.param(None, File(b"#!/bin/sh\n", EXECUTABLE), id="a new executable"),
        pytest.param(File(OLD), None, id="a removed file"),
        pytest.param(File(OLD), File(OLD, EXECUTABLE), id="a mode alone"),
        pytest.param(File(b"a\r\nb\r\n"), File(b"a\r\nc\r\n"), id="carriage returns"),
        pytest.param(File(bytes(range(1, 256))), File(bytes(range(255, 0, -1))), id="every byte"),
    ],
)
def test_what_is_rendered_parses_and_leads_from_old_to_new(old: File | None, new: File | None) -> None:
    (file,) = parse(author.render("a/b.py", old, new), "p").files
    assert file.apply(old, "p") == new
    assert file.reversed().apply(new, "p") == old


def test_nothing_is_rendered_for_nothing() -> None:
    assert author.render("a.py", File(OLD), File(OLD)) == b""
    assert author.render("a.py", None, None) == b""


def test_a_hunk_names_the_definition_it_stands_in() -> None:
    old = b"import os\n\n\ndef first():\n" + b"".join(b"    x%d\n" % n for n in range(9))
    text = author.render("a.py", File(old), File(old.replace(b"x7", b"y7")))
    assert b"@@ def first():\n" in text


def test_an_unedited_tree_leaves_the_patch_as_it_is(at_beta: Toy) -> None:
    assert author.refresh(unlocked(at_beta), "beta-second", at_beta.tree) == author.Refreshed({}, ())


def test_an_edit_goes_into_the_patch_and_keeps_its_header(at_beta: Toy) -> None:
    pool = at_beta.tree / "sglang/srt/layers/pool.py"
    pool.write_bytes(pool.read_bytes().replace(b"pool = 3\n", b"pool = three\n"))
    bundle = unlocked(at_beta)
    made = author.refresh(bundle, "beta-second", at_beta.tree)
    (path,) = made.written
    assert path == "patches/prefill/beta-second.patch"
    assert made.written[path].startswith(toy_module.header())
    assert b"+pool = three\n" in made.written[path]
    author.write(at_beta.bundle, made)
    at_beta.pin()
    assert author.refresh(unlocked(at_beta), "beta-second", at_beta.tree).written == {}


def test_an_edited_source_goes_back_to_sources(at_beta: Toy) -> None:
    (at_beta.tree / HOME / "alpha.py").write_bytes(b"def start(): return 1\n")
    made = author.refresh(unlocked(at_beta), "beta-second", at_beta.tree)
    assert made.written == {"sources/prefill/alpha.py": b"def start(): return 1\n"}


def test_a_new_file_of_ours_is_written_and_named_as_missing_in_the_series(at_beta: Toy) -> None:
    (at_beta.tree / HOME / "delta.py").write_bytes(b"x = 1\n")
    made = author.refresh(unlocked(at_beta), "beta-second", at_beta.tree)
    assert made.written == {"sources/prefill/delta.py": b"x = 1\n"}
    assert made.unnamed == ("prefill/delta.py",)


def test_a_file_removed_from_the_tree_is_removed_by_the_patch(at_beta: Toy) -> None:
    (at_beta.tree / "sglang/srt/old.py").unlink()
    made = author.refresh(unlocked(at_beta), "beta-second", at_beta.tree)
    assert b"deleted file mode 100644\n--- a/sglang/srt/old.py\n" in made.written["patches/prefill/beta-second.patch"]


def test_a_lost_executable_bit_of_a_file_that_the_patch_leaves_alone_is_no_edit(at_beta: Toy) -> None:
    (at_beta.tree / "sglang/srt/tool.sh").chmod(0o644)
    assert author.refresh(unlocked(at_beta), "beta-second", at_beta.tree).written == {}


def test_a_tree_with_a_later_patch_is_refused(at_beta: Toy) -> None:
    with pytest.raises(BundleError) as caught:
        author.refresh(unlocked(at_beta), "alpha-first", at_beta.tree)
    assert caught.value.code == "not-expected"
    assert "revert --to alpha-first" in (caught.value.next_step or "")


def test_a_link_in_the_tree_is_refused(at_beta: Toy) -> None:
    (at_beta.tree / "sglang/srt/link.py").symlink_to("engine.py")
    with pytest.raises(BundleError) as caught:
        author.refresh(unlocked(at_beta), "beta-second", at_beta.tree)
    assert caught.value.code == "special-mode"


def test_an_unknown_patch_is_refused(at_beta: Toy) -> None:
    with pytest.raises(BundleError) as caught:
        author.refresh(unlocked(at_beta), "nobody", at_beta.tree)
    assert caught.value.code == "unknown-level"


def words(bundle: Bundle, **changed: File | None) -> dict[tuple[str, str], set[str]]:
    """(patch, file name) -> the words of its fates, on the base with some files changed."""
    release = {path: file for path, file in {**BASE, **changed}.items() if file is not None}
    result: dict[tuple[str, str], set[str]] = {}
    for fate in author.rebase_report(bundle, "prefill", release):
        result.setdefault((fate.patch, Path(fate.path).name), set()).add(fate.word)
    return result


def test_on_its_own_release_everything_fits(toy: Toy) -> None:
    assert set().union(*words(unlocked(toy)).values()) == {"fits"}


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        pytest.param(b"# new\n# lines\n" + ENGINE, {"moved"}, id="lines above"),
        pytest.param(ENGINE.replace(b"engine = 5\n", b"engine = five\n"), {"conflict", "fits"}, id="a context line"),
        pytest.param(toy_module.ENGINE_ALPHA, {"upstream"}, id="both changes are there already"),
        pytest.param(ENGINE + ENGINE, {"fits"}, id="a second copy of the block, the first in its place"),
        pytest.param(b"# new\n" + ENGINE + ENGINE, {"conflict"}, id="two places that look alike, none in its place"),
    ],
)
def test_the_fate_of_a_changed_file(toy: Toy, engine: bytes, expected: set[str]) -> None:
    fates = words(unlocked(toy), **{"sglang/srt/engine.py": File(engine)})
    assert fates["alpha-first", "engine.py"] == expected


def test_a_file_that_is_gone_and_a_place_that_is_taken(toy: Toy) -> None:
    taken = {f"{HOME}/alpha.py": File(b"theirs = 1\n")}
    fates = words(unlocked(toy), **{"sglang/srt/layers/pool.py": None}, **taken)
    assert fates["beta-second", "pool.py"] == {"gone"}
    assert fates["alpha-first", "alpha.py"] == {"taken"}


def test_a_later_patch_is_looked_up_in_what_the_earlier_one_left(toy: Toy) -> None:
    fates = words(unlocked(toy), **{"sglang/srt/engine.py": File(b"# new\n" + ENGINE)})
    assert fates["beta-second", "engine.py"] == {"moved"}
