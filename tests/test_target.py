"""The one tree to work on is found, or the refusal says why there is none, or which two there are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from patchbundle import manifest
from patchbundle import target as target_module
from patchbundle.errors import BundleError, Reason
from patchbundle.target import Target
from tests import toy as toys
from tests import trees
from tests.toy import Toy


def discover(toy: Toy, **options: object) -> Target:
    return target_module.discover(manifest.load(toy.bundle), **options)  # type: ignore[arg-type]


def refused(toy: Toy, reason: Reason, **options: object) -> BundleError:
    with pytest.raises(BundleError) as caught:
        discover(toy, **options)
    assert caught.value.reason is reason
    return caught.value


def environment(folder: Path) -> tuple[Path, Path]:
    """A virtual environment made by hand, which is quicker: its interpreter and its site-packages."""
    python = folder / "bin" / "python"
    site = folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    site.mkdir(parents=True)
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    return python, site


@pytest.fixture(autouse=True)
def no_overlay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)


def test_root_is_the_folder_that_holds_the_package(toy: Toy) -> None:
    found = discover(toy, root=toy.tree)
    assert (found.root, found.version, found.torch, found.record) == (toy.tree, "0.5.19", None, toys.RECORD)
    assert [base.id for base in found.bases] == [toys.BASE_ID]


def test_root_without_metadata_is_decided_by_its_version_file_and_the_hashes(tmp_path: Path) -> None:
    toy = toys.make(tmp_path, with_record=False)
    found = discover(toy, root=toy.tree)
    assert (found.version, found.record) == ("0.5.19", None)
    (toy.tree / "sglang/_version.py").unlink()
    assert discover(toy, root=toy.tree).version is None
    assert trees.apply(toy).code == 0
    assert trees.revert(toy).code == 0


@pytest.mark.parametrize("below", ["python", "lib/python3.12/site-packages", "lib/python3/dist-packages"])
def test_root_may_be_a_checkout_or_an_environment_around_it(toy: Toy, tmp_path: Path, below: str) -> None:
    place = tmp_path / "around" / below
    shutil.copytree(toy.tree, place)
    assert discover(toy, root=tmp_path / "around").root == place


def test_a_root_that_is_a_link_is_resolved_once(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(toy.tree)
    assert discover(toy, root=tmp_path / "link").root == toy.tree


@pytest.mark.parametrize("root", ["nowhere", "bundle", "tree/sglang", "tree/sglang/srt/engine.py"])
def test_a_root_without_a_tree(toy: Toy, root: str) -> None:
    refused(toy, Reason.NO_TARGET, root=toy.tree.parent / root)


def test_python_of_a_virtual_environment(toy: Toy, tmp_path: Path) -> None:
    python, site = environment(tmp_path / "venv")
    shutil.copytree(toy.tree, site, dirs_exist_ok=True)
    found = discover(toy, python=str(python))
    assert (found.root, found.version, found.record) == (site, "0.5.19", toys.RECORD)


def test_python_may_be_a_relative_path(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, site = environment(tmp_path / "venv")
    shutil.copytree(toy.tree, site, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert discover(toy, python="venv/bin/python").root == site


def test_the_running_interpreter_is_asked_if_nothing_is_named(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    if discover_or_none(toy) is not None:
        pytest.skip("this interpreter has an engine of its own")
    monkeypatch.setenv("PYTHONPATH", str(toy.tree))
    assert discover(toy).root == toy.tree


def discover_or_none(toy: Toy) -> Target | None:
    try:
        return discover(toy)
    except BundleError as error:
        return None if error.reason is Reason.NO_TARGET else pytest.skip(str(error))


@pytest.mark.parametrize("python", ["/nowhere/python", "false", "true", "echo"])
def test_something_that_is_no_interpreter(toy: Toy, python: str) -> None:
    assert python in refused(toy, Reason.NO_TARGET, python=python).where


def test_nothing_of_the_target_is_imported(toy: Toy, tmp_path: Path) -> None:
    python, site = environment(tmp_path / "venv")
    shutil.copytree(toy.tree, site, dirs_exist_ok=True)
    (site / "sglang/__init__.py").write_text("raise SystemExit('imported')\n")
    assert discover(toy, python=str(python)).root == site
    assert not list(site.rglob("__pycache__"))


def test_what_start_up_files_print_does_not_confuse(toy: Toy, tmp_path: Path) -> None:
    python, site = environment(tmp_path / "venv")
    shutil.copytree(toy.tree, site, dirs_exist_ok=True)
    (site / "noise.pth").write_text("import sys; print('hello')\n")
    assert discover(toy, python=str(python)).root == site


@pytest.mark.parametrize("kind", ["path", "finder"])
def test_an_editable_install_leads_to_its_checkout(toy: Toy, tmp_path: Path, kind: str) -> None:
    python, site = environment(tmp_path / "venv")
    checkout = tmp_path / "checkout/python"
    shutil.copytree(toy.tree / "sglang", checkout / "sglang")
    shutil.copytree(toy.tree / toys.INFO, site / toys.INFO)
    if kind == "path":
        (site / "__editable__.sglang-0.5.19.pth").write_text(f"{checkout}\n")
    else:
        (site / "finder_for_sglang.py").write_text(
            "import sys\nfrom importlib.machinery import ModuleSpec\n"
            "class Finder:\n"
            "    @staticmethod\n"
            "    def find_spec(name, path=None, target=None):\n"
            "        if name == 'sglang':\n"
            "            spec = ModuleSpec(name, None, is_package=True)\n"
            f"            spec.submodule_search_locations = ['{checkout}/sglang']\n"
            "            return spec\n"
            "sys.meta_path.insert(0, Finder)\n"
        )
        (site / "__editable__.sglang-0.5.19.pth").write_text("import finder_for_sglang\n")
    found = discover(toy, python=str(python))
    # Its metadata is somewhere else, and so is its RECORD, which does not list the checkout's files.
    assert (found.root, found.version, found.record) == (checkout, "0.5.19", None)
    moved = Toy(toy.bundle, checkout, toy.cache)
    assert trees.run(moved, "apply", "--python", python).code == 0
    assert trees.run(moved, "revert", "--root", tmp_path / "checkout").code == 0


def test_a_git_checkout_around_the_tree_changes_nothing(toy: Toy) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@host.example", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=toy.tree, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    (toy.tree / ".gitignore").write_text("*\n")
    git("add", "-A")
    assert trees.apply(toy).code == 0
    assert (toy.tree / "sglang/srt/engine.py").read_bytes() == toys.ENGINE_BETA
    assert trees.level(toy) == 3
    assert trees.revert(toy).code == 0
    assert git("status", "--porcelain") == ""


def test_two_candidates_by_an_overlay_on_the_path(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, site = environment(tmp_path / "venv")
    shutil.copytree(toy.tree, site, dirs_exist_ok=True)
    overlay = tmp_path / "overlay"
    shutil.copytree(toy.tree / "sglang", overlay / "sglang")
    monkeypatch.setenv("PYTHONPATH", str(overlay))
    error = refused(toy, Reason.TWO_TARGETS, python=str(python))
    assert error.found == ", ".join(sorted([str(overlay), str(site)]))
    assert "--root" in error.next_step


def test_the_same_tree_by_two_names_is_one(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, site = environment(tmp_path / "venv")
    shutil.copytree(toy.tree, site, dirs_exist_ok=True)
    (tmp_path / "link").symlink_to(site)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "link"))
    assert discover(toy, python=str(python)).root == site


def test_the_current_folder_does_not_shadow_the_installed_tree(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, site = environment(tmp_path / "venv")
    shutil.copytree(toy.tree, site, dirs_exist_ok=True)
    monkeypatch.chdir(toy.tree)
    assert discover(toy, python=str(python)).root == site


def test_a_role_that_the_tree_is_not_of(toy: Toy) -> None:
    refused(toy, Reason.NO_TARGET, root=toy.tree, role="router")


def beside(toy: Toy, version: str) -> None:
    folder = toy.tree / f"torch-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cu130", "2.13.0+cpu"])
def test_torch_seen(toy: Toy, version: str) -> None:
    beside(toy, version)
    found = discover(toy, root=toy.tree, require_torch=True)
    assert found.torch == version
    assert f"torch:   {version}" in found.describe()


def test_torch_not_seen_is_said_and_fatal_only_if_required(toy: Toy) -> None:
    assert "torch:   not seen" in discover(toy, root=toy.tree).describe()
    assert refused(toy, Reason.WRONG_TORCH, root=toy.tree, require_torch=True).found == "torch: not seen"


@pytest.mark.parametrize("version", ["2.12.0", "2.13.1", "2.13.0rc1", "2.13.00"])
@pytest.mark.parametrize("required", [False, True])
def test_torch_wrong_is_fatal_in_any_case(toy: Toy, version: str, required: bool) -> None:
    beside(toy, version)
    assert f"torch {version}" in str(refused(toy, Reason.WRONG_TORCH, root=toy.tree, require_torch=required))


def test_bytecode_mirrors_of_both_names_of_a_tree(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(toy.tree)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "prefix"))
    found = discover(toy, root=tmp_path / "link")
    expected = [tmp_path / "prefix" / name.relative_to("/") for name in (tmp_path / "link", toy.tree)]
    assert sorted(found.mirrors) == sorted(expected)


def test_the_prefix_that_the_asked_interpreter_has(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, site = environment(tmp_path / "venv")
    shutil.copytree(toy.tree, site, dirs_exist_ok=True)
    (site / "prefix.pth").write_text(f"import sys; sys.pycache_prefix = '{tmp_path}/own'\n")
    assert tmp_path / "own" / site.relative_to("/") in discover(toy, python=str(python)).mirrors
    assert os.environ.get("PYTHONPYCACHEPREFIX") is None


# An answer that is none.


def script(folder: Path, text: str) -> str:
    place = folder / "python"
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return str(place)


GOOD = '"locations": [], "path": [], "prefix": null, "seen": {}'


@pytest.mark.parametrize(
    "answer",
    [
        "{}",
        "5",
        "null",
        "[]",
        '"text"',
        '{"locations": null}',
        "{" + GOOD.replace('"locations": []', '"locations": null') + "}",
        "{" + GOOD.replace('"locations": []', '"locations": [1]') + "}",
        "{" + GOOD.replace('"path": []', '"path": {}') + "}",
        "{" + GOOD.replace('"path": []', '"path": ["a\\u0000b"]') + "}",
        "{" + GOOD.replace("null", "3") + "}",
        "{" + GOOD.replace("{}", "[]") + "}",
        "{" + GOOD.replace("{}", '{"torch": "2"}') + "}",
        "{" + GOOD.replace("{}", '{"torch": ["2"]}') + "}",
        "{" + GOOD.replace("{}", '{"torch": ["2", 3]}') + "}",
        "[" * 100_000,
        "\\377",
    ],
    ids=lambda answer: answer[:40],
)
def test_an_answer_of_another_shape_is_one_clear_refusal(toy: Toy, tmp_path: Path, answer: str) -> None:
    (tmp_path / "answer").write_text(answer)
    said = refused(toy, Reason.NO_TARGET, python=script(tmp_path, f"printf '%b' \"$(cat {tmp_path}/answer)\""))
    assert said.expected == "a Python interpreter"


def test_an_answer_of_the_right_shape_without_a_tree(toy: Toy, tmp_path: Path) -> None:
    said = refused(toy, Reason.NO_TARGET, python=script(tmp_path, f"echo '{{{GOOD}}}'"))
    assert said.found == "neither"


@pytest.mark.parametrize("text", ["sleep 50", "sleep 50 & wait", "exec >&- 2>&-; sleep 50"])
def test_an_interpreter_that_does_not_answer_is_left_and_ended(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(target_module, "_PATIENCE", 2.0)  # on a busy machine its first line takes a while
    began = time.monotonic()
    said = refused(toy, Reason.NO_TARGET, python=script(tmp_path, f"echo $$ > {tmp_path}/pid\n{text}"))
    assert time.monotonic() - began < 10
    assert said.found in ("no answer within 2 seconds", "no end within 2 seconds")
    assert "importlib" not in str(said)
    group = int((tmp_path / "pid").read_text())
    assert not group_lives(group)


def group_lives(group: int) -> bool:
    """Whether a process of it is left, when an ended orphan has had time to be taken by init."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def test_an_answer_without_end_is_not_kept(toy: Toy, tmp_path: Path) -> None:
    assert "more than" in str(refused(toy, Reason.NO_TARGET, python=script(tmp_path, "yes")).found)


def test_a_failing_interpreter_is_told_by_its_last_word(toy: Toy, tmp_path: Path) -> None:
    said = refused(toy, Reason.NO_TARGET, python=script(tmp_path, "echo one >&2; echo two >&2; exit 3"))
    assert said.found == "two"
    assert refused(toy, Reason.NO_TARGET, python=script(tmp_path, "exit 3")).found == "exit code 3"


def test_a_child_that_keeps_the_pipes_open_does_not_keep_us(toy: Toy, tmp_path: Path) -> None:
    began = time.monotonic()
    refused(toy, Reason.NO_TARGET, python=script(tmp_path, f"sleep 20 & echo '{{{GOOD}}}'"))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("path", [f"{toys.INFO}/METADATA", "sglang/_version.py"])
def test_a_fifo_where_the_version_is_looked_up_keeps_nobody_waiting(toy: Toy, path: str) -> None:
    if path.endswith(".py"):
        (toy.tree / toys.INFO).rename(toy.tree / "away")
    (toy.tree / path).unlink()
    os.mkfifo(toy.tree / path)
    assert discover(toy, root=toy.tree).version == (None if path.endswith(".py") else "0.5.19")


# RECORD.


def test_a_missing_record_is_said_by_every_command_and_never_left_out_in_silence(toy: Toy) -> None:
    listing = (toy.tree / toys.RECORD).read_bytes()
    (toy.tree / toys.RECORD).unlink()
    for verb in ("status", "plan", "apply", "revert"):
        done = trees.run(toy, verb, "--root", toy.tree)
        assert done.code == 0
        assert "warning: RECORD: not seen, " in done.out
    (toy.tree / toys.RECORD).write_bytes(listing)
    assert "RECORD: not seen" not in trees.status(toy).out
    assert trees.status(toy).code == 0


@pytest.mark.parametrize("words", [("status",), ()])
def test_a_missing_record_is_a_warning_in_the_json_of_status_and_check(toy: Toy, words: tuple[str, ...]) -> None:
    def look() -> trees.Result:
        return trees.run(toy, *words, "--root", toy.tree, "--json", check=not words)

    listing = (toy.tree / toys.RECORD).read_bytes()
    assert look().table["result"]["warnings"] == []
    (toy.tree / toys.RECORD).unlink()
    done = look()
    assert done.code == 0
    assert done.table["result"]["warnings"] == [
        "RECORD: not seen, so it is not kept up; if it comes back, the tree is drifted"
    ]
    (toy.tree / toys.RECORD).write_bytes(listing)
    assert look().table["result"]["warnings"] == []


@pytest.mark.parametrize("name", ["METADATA", "WHEEL", "INSTALLER"])
def test_a_record_is_seen_whatever_else_of_the_metadata_is_gone(toy: Toy, name: str) -> None:
    """Without METADATA too: the version is in the folder's name."""
    (toy.tree / toys.INFO / name).unlink()
    found = discover(toy, root=toy.tree)
    assert (found.version, found.record) == ("0.5.19", toys.RECORD)
    assert trees.apply(toy).code == 0
    assert b"research/receipt.json" in (toy.tree / toys.RECORD).read_bytes()


def test_another_version_by_the_folders_name_alone(toy: Toy) -> None:
    (toy.tree / toys.INFO / "METADATA").unlink()
    (toy.tree / toys.INFO).rename(toy.tree / "sglang-0.5.18.dist-info")
    refused(toy, Reason.WRONG_VERSION, root=toy.tree)


def test_two_folders_of_metadata_of_which_one_has_lost_its_own(toy: Toy) -> None:
    other = toy.tree / "sglang-0.5.18.dist-info"
    other.mkdir()
    (other / "RECORD").write_bytes(b"")
    assert "sglang-0.5.18.dist-info, sglang-0.5.19.dist-info" in str(refused(toy, Reason.TWO_TARGETS, root=toy.tree))


def dangling(place: Path) -> None:
    place.symlink_to("nowhere")


def linked(place: Path) -> None:
    moved = place.with_name("moved")
    place.with_name("kept").rename(moved)
    place.symlink_to(moved.name)


@pytest.mark.parametrize("put", [dangling, linked, os.mkfifo, os.mkdir, Path.touch])
@pytest.mark.parametrize("what", ["RECORD", "the folder"])
def test_an_odd_thing_in_the_place_of_record_is_refused(toy: Toy, put: Callable[[Path], None], what: str) -> None:
    place = toy.tree / (toys.RECORD if what == "RECORD" else toys.INFO)
    place.rename(place.with_name("kept"))
    put(place)
    if what == "the folder" and put is os.mkdir:
        assert discover(toy, root=toy.tree).record is None
        return
    for done in (trees.apply(toy), trees.check(toy), trees.run(toy, "plan", "--root", toy.tree)):
        assert (done.code, "[record]" in done.err) == (1, True), done
    assert trees.status(toy).code == 1


# Two of torch.


@pytest.mark.parametrize("other", ["2.11.0", "2.13.0+cu130", "2.14.0"])
def test_two_of_torch_beside_the_target_are_refused_and_named(toy: Toy, other: str) -> None:
    beside(toy, "2.13.0")
    beside(toy, other)
    for required in (False, True):
        said = refused(toy, Reason.WRONG_TORCH, root=toy.tree, require_torch=required)
        assert said.found == " and ".join(f"torch {version}" for version in sorted(["2.13.0", other]))


def test_two_of_torch_where_the_asked_interpreter_finds_it(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own; the one that is imported first hides those further down the path, as ever."""
    python, site = environment(tmp_path / "venv")
    shutil.copytree(toy.tree, site, dirs_exist_ok=True)
    own = tmp_path / "own"
    beside(Toy(toy.bundle, own, toy.cache), "2.13.0")
    beside(Toy(toy.bundle, site, toy.cache), "2.11.0")
    monkeypatch.setenv("PYTHONPATH", str(own))
    assert discover(toy, python=str(python)).torch == "2.13.0"
    beside(Toy(toy.bundle, own, toy.cache), "2.12.0")
    said = refused(toy, Reason.WRONG_TORCH, python=str(python))
    assert (said.where, said.found) == (str(own), "torch 2.12.0 and torch 2.13.0")
