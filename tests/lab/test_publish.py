"""A release: what is in it, that it is the same again, and what is refused before anything is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lab.release import notes, publish
from lab.release.notes import News, ReleaseError
from patchbundle import __version__, manifest, pin
from patchbundle.errors import BundleError, Reason
from tests import nodes, trees
from tests import toy as toys
from tests.toy import Toy, cache_at
from tests.trees import REPOSITORY
from workstation import attest

PARTS = ("LICENSE", "NOTICE", "README.md", "pyproject.toml", "tools", "requirements")


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """A repository to release: the tools of this one, a toy's bundle, two fragments of news."""
    nodes.packages()
    made = toys.make(tmp_path / "toy")
    for part in PARTS:
        source, place = REPOSITORY / part, made.bundle / part
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, place)
    news = made.bundle / "changelog.d"
    news.mkdir()
    (news / "README.md").write_text("How to.\n")
    (news / "one.md").write_text("- One thing,\n  told on two lines.\n")
    (news / "two.md").write_text("- Breaking: another thing.\n- A third thing.\n")
    (made.bundle / "CHANGELOG.md").write_text("# Changes\n\nWords.\n\nNo version has been released yet.\n")
    return made


def build(toy: Toy, out: Path) -> dict[str, str]:
    # The wheels come from this machine's own cache, the toy's archives from the toy's.
    return publish.build(toy.bundle, out, notes.read(toy.bundle), packages=nodes.packages())


def git(root: Path, *words: str) -> None:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(root), *words]
    subprocess.run(command, check=True, capture_output=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_release_holds_everything_and_its_manifest_and_sums_agree(toy: Toy, tmp_path: Path) -> None:
    out = tmp_path / "dist"
    sums = build(toy, out)
    files = contents(out)
    assert {publish.FILE, publish.SOURCES, publish.NOTES, publish.MANIFEST, publish.SUMS} <= set(files)
    assert {"attestation/prefill.cdx.json", "attestation/prefill.intoto.json", "attestation/pins.lock"} <= set(files)
    table = json.loads(files[publish.MANIFEST])
    assert (table["version"], table["bundle"]) == (__version__, manifest.load(toy.bundle).lock.digest)
    assert set(table["files"]) == set(files) - {publish.MANIFEST, publish.SUMS}
    for name, entry in table["files"].items():
        assert (entry["sha256"], entry["size"]) == (publish.digest(files[name]), len(files[name]))
        assert sums[name] == entry["sha256"]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", publish.SUMS], cwd=out, check=True)
    # What make pyz prints of the same state is what the manifest says.
    assert publish.digest(nodes.one_file(toy, tmp_path / "again.pyz").read_bytes()) == sums[publish.FILE]
    assert os.access(out / publish.FILE, os.X_OK)
    assert nodes.call(out / publish.FILE, "status", "--root", toy.tree).code == 0


def test_a_release_of_the_same_state_is_the_same_bytes(toy: Toy, tmp_path: Path) -> None:
    one = build(toy, tmp_path / "one")
    os.utime(toy.bundle / "README.md", (1, 1))
    assert build(toy, tmp_path / "elsewhere/two") == one
    assert contents(tmp_path / "one") == contents(tmp_path / "elsewhere/two")


def test_the_notes_are_the_fragments_with_what_breaks_first(toy: Toy, tmp_path: Path) -> None:
    build(toy, tmp_path / "dist")
    assert (tmp_path / "dist" / publish.NOTES).read_text() == (
        f"# {__version__}\n\n- Breaking: another thing.\n- One thing,\n  told on two lines.\n- A third thing.\n"
    )


def test_what_a_release_leaves_in_the_repository(toy: Toy) -> None:
    news = notes.read(toy.bundle)
    with cache_at(toy.cache):
        changed = publish.conclude(toy.bundle, "1.2.3", news)
    assert changed == ["patches/releases/1.2.3", "CHANGELOG.md", "changelog.d", manifest.LOCK]
    assert sorted(path.name for path in (toy.bundle / "changelog.d").iterdir()) == ["README.md"]
    log = (toy.bundle / "CHANGELOG.md").read_text()
    assert "No version" not in log
    assert log.index("## 1.2.3 (") < log.index("Breaking: another") < log.index("told on two lines")
    assert [filed.release for filed in manifest.load(toy.bundle).filed] == ["1.2.3"]
    with cache_at(toy.cache), pytest.raises(BundleError) as refusal:
        publish.conclude(toy.bundle, "1.2.3", news)
    assert refusal.value.reason == Reason.MANIFEST


def test_trees_of_the_release_are_known_to_the_bundle_after_it(toy: Toy) -> None:
    assert trees.apply(toy).code == 0
    with cache_at(toy.cache):
        publish.conclude(toy.bundle, "1.2.3", notes.read(toy.bundle))
    source = toy.bundle / "sources/prefill/alpha.py"
    source.write_bytes(source.read_bytes() + b"# newer\n")
    toy.pin()
    assert trees.status(toy, "--json").table["result"]["status"]["release"] == "1.2.3"
    assert trees.apply(toy).code == 0


# Refused before anything is written.


def test_a_folder_that_is_there_is_never_written_over(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    with pytest.raises(BundleError) as refusal:
        build(toy, tmp_path / "dist")
    assert refusal.value.reason == Reason.OUTPUT


def test_what_fails_half_way_leaves_nothing_behind(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(attest, "write", fail)
    with pytest.raises(OSError, match="No space"):
        build(toy, tmp_path / "out/dist")
    assert list((tmp_path / "out").iterdir()) == []


def test_only_a_committed_state_with_a_current_lock_is_released(toy: Toy) -> None:
    def check(version: str = "0.1.0") -> News:
        with cache_at(toy.cache):
            return publish.check(toy.bundle, manifest.load(toy.bundle), version)

    git(toy.bundle, "init", "-q")
    with pytest.raises(ReleaseError, match="committed first"):
        check()
    git(toy.bundle, "add", "-A")
    git(toy.bundle, "commit", "-qm", "x")
    assert check().breaks
    (toy.bundle / "README.md").write_text("other\n")
    with pytest.raises(ReleaseError, match="README"):
        check()
    git(toy.bundle, "checkout", "-q", "README.md")
    (toy.bundle / "patches/prefill/alpha-first.patch").write_bytes(b"")
    with pytest.raises((ReleaseError, BundleError)):
        check()


def test_a_lock_that_pin_would_change_is_not_released(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = manifest.load(toy.bundle).lock
    monkeypatch.setattr(pin, "pin", lambda *_, **__: (lock, True))
    with pytest.raises(ReleaseError, match="not current"):
        publish.check(toy.bundle, manifest.load(toy.bundle), "0.1.0")


def test_without_news_there_is_no_release(toy: Toy) -> None:
    for path in (toy.bundle / "changelog.d").glob("[ot]*.md"):
        path.unlink()
    with pytest.raises(ReleaseError, match="no news"):
        notes.read(toy.bundle)


@pytest.mark.parametrize("text", ["Words.\n", "  - indented\n", "- one\n\n- two\n", "* one\n"])
def test_a_fragment_that_is_no_list_is_named(text: str, toy: Toy) -> None:
    (toy.bundle / "changelog.d/aaa.md").write_text(text)
    with pytest.raises(ReleaseError, match=r"aaa\.md"):
        notes.read(toy.bundle)


PLAIN, BREAKS = News((), ("- A.\n",)), News((), ("- Breaking: A.\n",))


@pytest.mark.parametrize(
    ("version", "before", "news", "fault"),
    [
        ("0.1.0", [], BREAKS, None),
        ("0.1.1", ["0.1.0"], PLAIN, None),
        ("0.1.1", ["0.1.0"], BREAKS, "second number"),
        ("0.2.0", ["0.1.0"], BREAKS, None),
        ("1.0.0", ["0.9.0"], BREAKS, None),
        ("1.1.0", ["1.0.0"], BREAKS, "first number"),
        ("2.0.0", ["1.9.9"], BREAKS, None),
        ("0.10.0", ["0.9.0", "0.2.0"], PLAIN, None),
        ("0.9.0", ["0.10.0"], PLAIN, "does not come after"),
        ("0.1.0", ["0.1.0"], PLAIN, "does not come after"),
        ("0.1", [], PLAIN, "no version"),
        ("0.1.0rc1", [], PLAIN, "no version"),
        ("00.1.0", [], PLAIN, "no version"),
    ],
)
def test_the_version_follows_from_the_last_one_and_from_the_news(
    version: str, before: list[str], news: News, fault: str | None
) -> None:
    if fault is None:
        notes.check_version(version, before, news)
    else:
        with pytest.raises(ReleaseError, match=fault):
            notes.check_version(version, before, news)


def test_a_later_release_stands_above_the_earlier_ones() -> None:
    log = notes.fold("# Changes\n\nWords.\n\nNo version has been released yet.\n", "0.1.0", "2026-01-01", PLAIN)
    log = notes.fold(log, "0.2.0", "2026-02-01", BREAKS)
    assert log == ("# Changes\n\nWords.\n\n## 0.2.0 (2026-02-01)\n\n- Breaking: A.\n\n## 0.1.0 (2026-01-01)\n\n- A.\n")


def test_the_fragments_of_this_repository_can_be_released() -> None:
    # Right after a release there are none.
    if any(path.name != "README.md" for path in (REPOSITORY / "changelog.d").glob("*.md")):
        assert notes.read(REPOSITORY).items
    else:
        assert (REPOSITORY / "patches/releases").is_dir()
