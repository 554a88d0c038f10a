"""The one tree to work on is found, or the refusal says why there is none, or which two there are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
    folder.mkdir()
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
