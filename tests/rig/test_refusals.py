"""Bad input: each is a named error before anything starts."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lab.rig import (
    boot,
    cache,
    client,
    deployment,
    engine,
    environment,
    leash,
    lists,
    models,
    ports,
    runner,
    table,
    tree,
    trees,
)
from lab.rig.cli import main
from lab.rig.errors import RigError
from lab.rig.standins import patches, targets
from lab.rig.standins.table import StandIn


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_tree(root: Path, version: str = "0.5.17", record: bool = True) -> Path:
    files = {
        "sglang/__init__.py": "",
        "sglang/_version.py": f"__version__ = version = '{version}'\n",
        "sglang/srt/server_args.py": "x = 1\n",
    }
    rows = []
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(text)}")
    if record:
        info = root / f"sglang-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")
    return root


# trees


def test_a_tree_as_its_record_says_is_base(tmp_path: Path) -> None:
    found = tree.find("decode", make_tree(tmp_path / "t"))
    assert tree.recognise(found, allow_drift=False) == "base"


def test_a_folder_without_an_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RigError, match="holds no sglang package") as caught:
        tree.find("decode", tmp_path)
    assert caught.value.kind == "tree"


@pytest.mark.parametrize(("role", "version"), [("prefill", "0.5.17"), ("decode", "0.5.19"), ("decode", "0.5.170")])
def test_a_tree_of_another_release_is_refused(tmp_path: Path, role: str, version: str) -> None:
    with pytest.raises(RigError, match=f"is sglang {version}; {role} needs"):
        tree.find(role, make_tree(tmp_path, version))


def test_a_tree_without_a_version_is_refused(tmp_path: Path) -> None:
    (make_tree(tmp_path) / "sglang" / "_version.py").write_text("")
    with pytest.raises(RigError, match="unknown release"):
        tree.find("decode", tmp_path)


def _change(root: Path) -> None:
    (root / "sglang/srt/server_args.py").write_text("x = 2\n")


def _remove(root: Path) -> None:
    (root / "sglang/__init__.py").unlink()


def _add(root: Path) -> None:
    (root / "sglang/extra.py").write_text("")


def _forget(root: Path) -> None:
    (root / "sglang-0.5.17.dist-info/RECORD").unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [(_change, "is changed"), (_remove, "is missing"), (_add, "is extra"), (_forget, "no RECORD")],
)
def test_drift_is_refused_with_the_file_unless_it_is_allowed(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    found = tree.find("decode", make_tree(tmp_path / "t"))
    damage(found.root)
    with pytest.raises(RigError, match=f"{told}.*--allow-drift") as caught:
        tree.recognise(found, allow_drift=False, checker=tmp_path / "none")
    assert caught.value.kind == "drift"
    assert tree.recognise(found, allow_drift=True, checker=tmp_path / "none") == "drifted, allowed"


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (b"alone\n", "is extra"),
        (b"sglang/__init__.py,md5=x,0\n", "has no SHA-256"),
        (b"\xff\xfe\n", "is extra"),
    ],
)
def test_a_damaged_record_is_drift_and_no_traceback(tmp_path: Path, record: bytes, told: str) -> None:
    root = make_tree(tmp_path / "t")
    (root / "sglang-0.5.17.dist-info/RECORD").write_bytes(record)
    with pytest.raises(RigError, match=told):
        tree.recognise(tree.find("decode", root), allow_drift=False, checker=tmp_path / "none")


def test_a_version_file_that_is_no_text_is_an_unknown_release(tmp_path: Path) -> None:
    (make_tree(tmp_path) / "sglang" / "_version.py").write_bytes(b"version = '\xff'\n")
    with pytest.raises(RigError, match="decode needs") as caught:
        tree.find("decode", tmp_path)
    assert caught.value.kind == "tree"


@pytest.mark.parametrize(
    ("code", "level"),
    [
        ("print('holds:   sglang-0.5.17 at level 1 (dcp-retract-index)')", "dcp-retract-index"),
        ("raise SystemExit(1)", ""),
    ],
)
def test_a_changed_tree_is_what_the_bundles_checker_says(tmp_path: Path, code: str, level: str) -> None:
    found = tree.find("decode", make_tree(tmp_path / "t"))
    _change(found.root)
    checker = tmp_path / "check.py"
    checker.write_text("import sys\nassert sys.argv[1:5] == ['--role', 'decode', '--root', sys.argv[4]]\n" + code)
    if level:
        assert tree.recognise(found, allow_drift=False, checker=checker) == level
    else:
        with pytest.raises(RigError, match="not a known state"):
            tree.recognise(found, allow_drift=False, checker=checker)


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of the bundle's own, which knows the released trees alone: every tree is base."""
    path = tmp_path / "checker.py"
    path.write_text("print('holds:   sglang-0.5.17 at level 0 (base)')")
    monkeypatch.setattr(trees, "CHECKER", path)
    return path


def test_a_tree_is_base_only_if_the_checker_says_so_too(tmp_path: Path, checker: Path) -> None:
    found = tree.find("decode", make_tree(tmp_path / "t"))
    assert trees.recognise(found, allow_drift=False) == "base"
    for code in (
        "raise SystemExit('[bytecode]')",
        "print('holds:   sglang-0.5.17 at level 0 (base)'); raise SystemExit('[bytecode]')",
        "print('holds:   sglang-0.5.17 at level 1 (some-patch)'); print('[bytecode]')",
    ):
        checker.write_text(code)
        with pytest.raises(RigError, match="is not decode as it should be") as caught:
            trees.recognise(found, allow_drift=False)
        assert "[bytecode]" in str(caught.value)
        assert caught.value.kind == "drift"
        assert trees.recognise(found, allow_drift=True) == "drifted, allowed"


def test_a_tree_is_base_only_if_its_record_says_so_too(tmp_path: Path, checker: Path) -> None:
    found = tree.find("decode", make_tree(tmp_path / "t"))
    for damage, told in ((_add, "extra.py is extra"), (_forget, "no RECORD")):
        damage(found.root)
        with pytest.raises(RigError, match=f"is not decode as it should be: .*{told}.*--allow-drift") as caught:
            trees.recognise(found, allow_drift=False)
        assert caught.value.kind == "drift"
        assert trees.recognise(found, allow_drift=True) == "drifted, allowed"


@pytest.mark.parametrize("level", ["base", "some-patch"])
@pytest.mark.parametrize(
    "name", ["server_args.abi3.so", "server_args/__init__.pyc", "server_args/__init__.py", "new.pyc"]
)
def test_what_python_would_import_in_a_files_place_is_drift_at_every_level(
    tmp_path: Path, checker: Path, level: str, name: str
) -> None:
    found = tree.find("decode", make_tree(tmp_path / "t"))
    if level != "base":
        _change(found.root)
    checker.write_text(f"print('holds:   sglang-0.5.17 at level {int(level != 'base')} ({level})')")
    cached = found.root / "sglang/srt/__pycache__/server_args.cpython-311.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"")
    assert trees.recognise(found, allow_drift=False) == level
    extra = found.root / "sglang/srt" / name
    extra.parent.mkdir(exist_ok=True)
    extra.write_bytes(b"")
    with pytest.raises(RigError, match=f"sglang/srt/{name} is extra") as caught:
        trees.recognise(found, allow_drift=False)
    assert caught.value.kind == "drift"
    assert trees.recognise(found, allow_drift=True) == "drifted, allowed"


def test_no_part_of_the_rig_asks_record_alone() -> None:
    """``tree.recognise`` is for ``trees.recognise``, which asks the checker as well."""
    asked = {
        path.relative_to(tree.REPOSITORY).as_posix()
        for top in ("lab", "benchmarks", "tools")
        for path in (tree.REPOSITORY / top).rglob("*.py")
        if re.search(r"tree\.recognise\(|import .*\brecognise\b", path.read_text(encoding="utf-8"))
    }
    assert asked == {"lab/rig/trees.py"}


@pytest.mark.parametrize("drift", [False, True])
def test_a_stock_tree_does_not_pass_for_a_patched_one(tmp_path: Path, checker: Path, drift: bool) -> None:
    root = make_tree(tmp_path / "t")
    with pytest.raises(RigError, match="is to be a patched decode tree but stands at base") as caught:
        trees.gather({("decode", "patched"): root}, {("decode", "patched")}, allow_drift=drift)
    assert caught.value.kind == "drift"


def test_a_stock_tree_runs_in_every_place_where_trees_run_as_they_stand(
    tmp_path: Path, checker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "see_stand_ins", lambda found, patched, say: None)
    root, wanted = make_tree(tmp_path / "t"), {("decode", "patched"), ("decode", "stock")}
    found = trees.gather(dict.fromkeys(wanted, root), wanted, allow_drift=False, any_level=True)
    assert {one.root for one in found.values()} == {root}


def test_a_tree_that_the_checker_knows_at_another_level_does_not_pass_for_stock(tmp_path: Path, checker: Path) -> None:
    root = make_tree(tmp_path / "t")
    _change(root)
    checker.write_text("print('holds:   sglang-0.5.17 at level 1 (some-patch)')")
    with pytest.raises(RigError, match="is to be the stock decode tree but stands at some-patch") as caught:
        trees.gather({("decode", "stock"): root}, {("decode", "stock")}, allow_drift=False)
    assert caught.value.kind == "drift"


def test_a_patched_tree_does_not_pass_for_stock(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "t")
    _change(root)
    with pytest.raises(RigError):
        trees.gather({("decode", "stock"): root}, {("decode", "stock")}, allow_drift=False)


def test_a_tree_in_which_a_stand_ins_target_moved_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checker: Path
) -> None:
    site = tmp_path / "env/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    monkeypatch.setattr(environment, "ensure", lambda release, say: tmp_path / "env/bin/python")
    root = make_tree(tmp_path / "t")
    with pytest.raises(RigError, match=r"get_rope_cpu.*no module sglang") as caught:
        trees.gather({("decode", "stock"): root}, {("decode", "stock")}, allow_drift=False)
    assert caught.value.kind == "stand-in"


def test_a_stand_in_that_hides_a_patch_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = StandIn("sglang.srt.server_args:x", "checks:YES", "set", "check", "x", "x", "x")
    for module in (targets, patches):
        monkeypatch.setattr(module, "for_version", lambda version: (hidden,))
    monkeypatch.setattr(trees, "_packages", lambda role, say: tmp_path)
    base, root = make_tree(tmp_path / "base"), make_tree(tmp_path / "t")
    _change(root)
    monkeypatch.setattr(trees, "stock", lambda role, say: base)
    with pytest.raises(RigError, match="a patch changes x in") as caught:
        trees.gather({("decode", "patched"): root}, {("decode", "patched")}, allow_drift=True)
    assert caught.value.kind == "stand-in"
    _change(base)
    trees.gather({("decode", "patched"): root}, {("decode", "patched")}, allow_drift=True)


@pytest.mark.parametrize("text", [b"def (:\n", b"x = 1\0\n", b"\xff\n"])
def test_a_tree_that_may_drift_and_is_no_python_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    target = StandIn("sglang.srt.server_args:x", "checks:YES", "set", "check", "x", "x", "x")
    monkeypatch.setattr(targets, "for_version", lambda version: (target,))
    monkeypatch.setattr(trees, "_packages", lambda role, say: tmp_path)
    base, root = make_tree(tmp_path / "base"), make_tree(tmp_path / "t")
    (root / "sglang/srt/server_args.py").write_bytes(text)
    monkeypatch.setattr(trees, "stock", lambda role, say: base)
    for read in ((target,), ()):
        # The check of targets reads it; where no target lies in it, the comparison with the patches does.
        monkeypatch.setattr(targets, "for_version", lambda version, read=read: read)
        with pytest.raises(RigError, match="no Python") as caught:
            trees.gather({("decode", "patched"): root}, {("decode", "patched")}, allow_drift=True)
        assert caught.value.kind == "stand-in"


# cache


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.root() == tmp_path / "cache"
    monkeypatch.delenv("PATCHBUNDLE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.root() == tmp_path / "xdg" / "patchbundle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.root() == tmp_path / "home" / ".cache" / "patchbundle"


def test_a_build_that_fails_leaves_nothing_under_the_final_name() -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.ensure("x", "d" * 20, build)
    assert not cache.place("x", "d" * 20).exists()
    assert not cache.place("x", "d" * 20).with_suffix(".making").exists()


def test_what_a_killed_build_left_is_not_taken_for_a_result() -> None:
    left = cache.place("x", "d" * 20).with_suffix(".making")
    left.mkdir(parents=True)
    (left / "half").touch()
    made = cache.ensure("x", "d" * 20, lambda folder: (folder / "whole").touch())
    assert [path.name for path in made.iterdir()] == ["whole"]


def test_two_builders_at_once_build_once() -> None:
    built: list[int] = []
    begun = threading.Event()

    def build(folder: Path) -> None:
        built.append(1)
        begun.set()
        threading.Event().wait(0.2)

    threads = [threading.Thread(target=cache.ensure, args=("x", "d" * 20, build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1] and begun.is_set()


def test_too_little_disk_is_refused_with_both_numbers_before_the_build() -> None:
    with pytest.raises(RigError, match=r"needs 1000000\.0 GB below .*, \d+\.\d GB are free") as caught:
        cache.ensure("x", "d" * 20, lambda folder: pytest.fail("built"), needed=10**15)
    assert caught.value.kind == "disk"


# environment


@pytest.mark.parametrize("version", [(3, 10), (3, 12), (3, 13)])
def test_another_python_is_refused(version: tuple[int, int]) -> None:
    with pytest.raises(RigError, match=r"pinned for Python 3\.11") as caught:
        environment.need_python(version)
    assert caught.value.kind == "python"


def test_a_python_without_the_packages_or_too_old_for_the_rig_is_told_so_in_one_line() -> None:
    tool = tree.REPOSITORY / "tools" / "rig.py"
    # Without its site folders an interpreter has the standard library alone.
    done = subprocess.run([sys.executable, "-S", tool, "status", "--json"], capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert (done.returncode, told["verb"], told["error"]["error"]) == (1, "status", "python")
    assert "has no click and no numpy" in done.stderr and done.stderr.count("\n") == 1
    refused = runpy.run_path(str(tool))["refused"]
    assert refused((3, 10), ["click"]) == "the rig needs Python 3.11, this is 3.10"
    assert refused((3, 12), []) == ""


def test_a_machine_without_the_transfer_engines_libraries_is_refused_with_the_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "LIBRARIES", {"there": "libthere1", "no-such-one": "libnosuch1"})
    with pytest.raises(RigError, match="missing Debian packages: libnosuch1; run: make system-deps") as caught:
        environment.need_libraries(lambda name: "lib" if name == "there" else None)
    assert caught.value.kind == "library"
    environment.need_libraries(lambda name: "lib")
    # The loader may find what the look-up does not.
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    environment.need_libraries(lambda name: None)


def test_every_verb_that_makes_an_environment_needs_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def need() -> None:
        raise RigError("library", "none")

    monkeypatch.setattr(environment, "need_libraries", need)
    monkeypatch.setattr(environment, "need_python", lambda: None)
    with pytest.raises(RigError, match="none"):
        environment.ensure("0.5.17", lambda text: None)


def test_every_pin_has_a_hash_and_torch_is_the_release_that_the_engine_needs() -> None:
    for release, torch in (("0.5.17", "2.11.0"), ("0.5.19", "2.13.0")):
        one = environment.ENVIRONMENTS[release]
        pins = one.pins
        assert pins["torch"] == torch and pins["sglang"] == release
        assert "mooncake-transfer-engine-non-cuda" in pins
        blocks = one.requirements.read_text().split("\n\n")[-1].replace(" \\\n", " ")
        lines = [line for line in blocks.splitlines() if line and not line.startswith(("#", " "))]
        assert len(lines) == len(pins)
        assert all("--hash=sha256:" in line for line in lines)


def test_the_placeholder_package_is_in_no_list() -> None:
    for one in environment.ENVIRONMENTS.values():
        assert "rc" not in one.pins.get("cuda-tile", "")


def test_a_replaced_torch_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    one = environment.ENVIRONMENTS["0.5.17"]
    names = {name.lower().replace("_", "-").replace(".", "-"): version for name, version in one.pins.items()}
    monkeypatch.setattr(environment, "installed", lambda python: names)
    environment.check(one, Path("python"))
    monkeypatch.setattr(environment, "installed", lambda python: {**names, "torch": "2.13.0", "numpy": "0"})
    with pytest.raises(RigError, match=r": torch 2\.13\.0 instead of 2\.11\.0"):
        environment.check(one, Path("x/bin/python"))


def test_a_torch_that_was_replaced_since_is_refused_by_every_verb_that_starts_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = environment.ENVIRONMENTS["0.5.17"]
    one.folder.mkdir(parents=True)
    monkeypatch.setattr(environment, "need_python", lambda: None)
    monkeypatch.setattr(environment, "need_libraries", lambda: None)
    names = {name.lower().replace("_", "-").replace(".", "-"): version for name, version in one.pins.items()}
    monkeypatch.setattr(environment, "installed", lambda python: {**names, "torch": "2.13.0"})
    with pytest.raises(RigError, match=r"torch 2\.13\.0 instead of 2\.11\.0"):
        environment.ensure("0.5.17")
    asked: list[Path] = []

    def installed(python: Path) -> dict[str, str]:
        asked.append(python)
        return names

    monkeypatch.setattr(environment, "installed", installed)
    assert environment.ensure("0.5.17") == environment.ensure("0.5.17") == one.python
    assert asked == [one.python]


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(RigError, match="does not run: broken"):
        environment.installed(broken)
    with pytest.raises(RigError, match="does not run: No such file"):
        environment.installed(tmp_path / "none" / "bin" / "python")


def test_a_list_that_changed_is_another_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = environment.ENVIRONMENTS["0.5.17"]
    before = one.digest
    changed = tmp_path / "requirements.txt"
    changed.write_text(one.requirements.read_text() + "\n")
    monkeypatch.setattr(environment.Environment, "requirements", property(lambda self: changed))
    assert one.digest != before


# ports, engine, router


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as holder:
        holder.bind((ports.HOST, 0))
        holder.listen()
        with pytest.raises(RigError, match="is taken") as caught:
            ports.need_free(holder.getsockname()[1])
    assert caught.value.kind == "port"


def test_free_ports_are_different_and_free() -> None:
    found = ports.free(20)
    assert len(set(found)) == 20
    for port in found:
        ports.need_free(port)


def test_a_chosen_port_is_none_that_the_kernel_gives_to_an_outgoing_connection() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports.free(50)) < first


def test_a_port_that_is_taken_is_passed_over_and_too_few_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, other = ports.free(2)
    monkeypatch.setattr(ports, "_candidates", lambda: range(taken, taken + 1))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", taken))
        with pytest.raises(RigError, match="no 1 free ports") as caught:
            ports.free(1)
        assert caught.value.kind == "port"
        monkeypatch.setattr(ports, "_candidates", lambda: range(min(taken, other), max(taken, other) + 1))
        assert taken not in ports.free(1)


def test_an_engine_gets_its_tree_first_and_nothing_from_the_callers_switches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RESEARCH_X", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"kv_lora_rank": 1}))
    found = tree.find("decode", make_tree(tmp_path / "t"))
    one = engine.Engine("D", "decode", "decode", found, Path("python"), model, 1, 2, ("--flag",), {"GATE": "1"}, tp=3)
    spec = engine.engine_spec(one, tmp_path)
    assert spec.env["PYTHONPATH"].split(":")[0] == str(found.root) and "/elsewhere" not in spec.env["PYTHONPATH"]
    assert "SGLANG_RESEARCH_X" not in spec.env and spec.env["GATE"] == "1"
    assert spec.argv[-1] == "--flag" and "--disaggregation-mode=decode" in spec.argv
    assert spec.env["PATCHBUNDLE_RIG_TREE"] == str(found.root) and spec.env["PATCHBUNDLE_RIG_LEASH"] == "1"


def test_a_model_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RigError, match="neither MLA nor DSA"):
        engine.family(tmp_path)


@pytest.mark.parametrize("build", ["/nothing/here", "README.md"])
def test_a_router_that_is_none_is_refused(tmp_path: Path, build: str) -> None:
    with pytest.raises(RigError, match="is neither") as caught:
        engine.router_package(build, tmp_path, tmp_path / "bin" / "python")
    assert caught.value.kind == "router"


def test_a_compiled_router_is_laid_over_a_copy_of_the_published_package(tmp_path: Path) -> None:
    stock = tmp_path / "env/lib/python3.11/site-packages/sglang_router"
    stock.mkdir(parents=True)
    (stock / "__init__.py").write_text("published")
    (stock / "sglang_router_rs.abi3.so").write_text("old")
    library = tmp_path / "libsglang_router_rs.so"
    library.write_text("new")
    package = engine.router_package(str(library), tmp_path / "run", tmp_path / "env/bin/python")
    assert package is not None
    assert (package / "sglang_router/sglang_router_rs.abi3.so").read_text() == "new"
    assert (package / "sglang_router/__init__.py").read_text() == "published"
    assert (stock / "sglang_router_rs.abi3.so").read_text() == "old"
    assert engine.router_package("wheel", tmp_path, tmp_path) is None
    assert engine.router_package(str(package), tmp_path, tmp_path) == package


def test_a_router_that_never_lists_its_workers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"workers": [{"is_healthy": True}, {"is_healthy": False}]}
    monkeypatch.setattr(deployment, "get", lambda port, path, timeout: answers)
    deployment.wait_for_router(1, 1, lambda: None, limit=1.0)
    with pytest.raises(RigError, match="1 of 2 workers healthy"):
        deployment.wait_for_router(1, 2, lambda: None, limit=0.3)


# client


class _Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        length = len(body["input_ids"])
        self.send_response(200 if length < 10 else 500)
        self.end_headers()
        meta = {"output_token_logprobs": [[-0.5, 7, None]], "cached_tokens": 3, "spec_verify_ct": 1}
        self.wfile.write(json.dumps({"output_ids": [7], "meta_info": meta}).encode() if length < 10 else b"too long")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[int]:
    with HTTPServer((ports.HOST, 0), _Server) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield one.server_port
        one.shutdown()
        thread.join()


def test_an_answer_is_read(server: int) -> None:
    (answer,) = client.send_all(client.Route(server), [client.Request((1, 2), 1)], together=True)
    assert answer.ids == (7,) and answer.logprobs == (-0.5,) and answer.cached == 3 and not answer.error


def test_a_status_that_is_not_200_is_an_error_with_its_text(server: int) -> None:
    answer = client.send(client.Route(server), client.Request(tuple(range(20)), 1))
    assert "status 500: too long" in answer.error and answer.ids == ()


def test_a_dead_prefill_is_told_with_the_dead_decode() -> None:
    dead = ports.free(2)
    answer = client.send(client.Route(dead[0], dead[1], 1), client.Request((1,), 1), timeout=5)
    assert "prefill" in answer.error


# command line


def run_cli(*words: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(main, [*words, "--json"])
    text = result.stdout
    return result.exit_code, json.loads(text[text.index("{") :]) if "{" in text else {}


def make_run(name: str, phase: str, tied: bool = False) -> str:
    """A folder as a keeper leaves it; this process stands for the keeper of a run that goes on."""
    folder = deployment.new_folder(name)
    pid = os.getpid()
    state = {
        "phase": phase,
        "reason": "",
        "tail": [],
        "tied": tied,
        "keeper": {"pid": pid, "start_time": leash.start_time(pid)},
        "members": {},
    }
    (folder / "state.json").write_text(json.dumps(state))
    return folder.name


@pytest.mark.parametrize("verb", ["status", "down"])
@pytest.mark.parametrize("ended", [0, 2])
def test_nothing_running_is_exit_code_3_however_many_runs_have_ended(verb: str, ended: int) -> None:
    for index in range(ended):
        make_run(f"x{index}", "stopped")
    code, told = run_cli(verb)
    assert (code, told["result"], told["error"]) == (3, {}, None)
    assert CliRunner().invoke(main, [verb]).stdout == "nothing runs\n"


def test_a_log_without_a_run_says_that_nothing_runs_and_which_runs_there_were() -> None:
    name = make_run("x", "stopped")
    _, told = run_cli("logs", "P")
    assert told["error"]["message"] == f"nothing runs; the last runs, by name: {name}"


def test_of_several_that_run_one_must_be_named() -> None:
    names = [make_run(name, "ready") for name in ("a", "b")]
    make_run("c", "stopped")
    code, told = run_cli("down")
    assert code == 1 and told["error"]["message"] == f"several run, name one: {', '.join(names)}"


def test_a_run_of_a_command_at_work_is_not_ended_by_down() -> None:
    """`compare` in another clone shares the cache folder; here this very process would get the signal."""
    name = make_run("x", "ready", tied=True)
    assert run_cli("status")[0] == 0
    assert run_cli("down")[0] == 3
    assert CliRunner().invoke(main, ["down"]).stdout == "nothing runs that `up` started\n"
    code, told = run_cli("down", name)
    assert (code, told["error"]["error"]) == (1, "state") and "ends with it" in told["error"]["message"]
    left = make_run("y", "ready")
    state = json.loads((deployment.runs_folder() / left / "state.json").read_text())
    state["keeper"]["start_time"] = -1
    (deployment.runs_folder() / left / "state.json").write_text(json.dumps(state))
    assert run_cli("down")[0] == 3, "what `up` left is gone, and the other is still not touched"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keeper": {"pid": 1, "start_time": 3}}', '{"keeper": 1}'])
def test_a_damaged_state_is_named_and_does_not_hide_what_runs(text: str) -> None:
    damaged = deployment.new_folder("damaged")
    (damaged / "state.json").write_text(text)
    assert run_cli("status")[0] == 3
    name = make_run("x", "ready")
    code, told = run_cli("status")
    assert code == 0 and list(told["result"]) == [name]
    for verb in ("status", "down"):
        code, told = run_cli(verb, damaged.name)
        assert (code, told["error"]["error"]) == (1, "state")


@pytest.mark.parametrize(
    "words", [["status"], ["down"], ["env", "--check"], ["up"], ["smoke"], ["compare", "mla-router"]]
)
def test_a_cache_folder_that_cannot_be_is_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(deployment, "available_memory", lambda *_: 1 << 40)
    code, told = run_cli(*words)
    if words[0] in ("status", "down"):
        assert code == 3
    else:
        assert code == 1 and told["error"]["error"] in ("system", "environment")


def test_a_port_that_is_taken_or_nobodys_a_router_and_a_model_are_refused_before_a_tree_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trees, "gather", lambda *_, **__: pytest.fail("looked at trees"))
    monkeypatch.setattr(deployment, "available_memory", lambda *_: 1 << 40)
    with socket.socket() as holder:
        holder.bind((ports.HOST, 0))
        holder.listen()
        code, told = run_cli("up", f"--port={holder.getsockname()[1]}")
    assert (code, told["error"]["error"]) == (1, "port")
    code, told = run_cli("up", "--boot=pack", "--port=20001")
    assert (code, told["error"]["error"]) == (1, "port")
    for words in (["up"], ["smoke"], ["compare", "mla-router"]):
        code, told = run_cli(*words, "--router=README.md")
        assert (code, told["error"]["error"]) == (1, "router")
    model = boot.load("glm-dsa").parts[0].model
    (models.ensure(model, cache.ensure) / "config.json").write_text("{}")
    # Of two boots the second one's model is damaged: the first is not started either.
    code, told = run_cli("compare", "mla-router", "glm-dsa-cache")
    assert (code, told["error"]["error"]) == (1, "model") and "config.json is damaged" in told["error"]["message"]


def test_of_a_list_the_boot_that_needs_more_memory_than_there_is_ends_it_before_the_first_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trees, "gather", lambda *_, **__: pytest.fail("looked at trees"))
    mla, cp8 = (boot.load(name).memory for name in ("mla", "cp8"))
    monkeypatch.setattr(deployment, "available_memory", lambda *_: (cp8 << 20) - 1)
    code, told = run_cli("compare", "mla-router", "cp8")
    assert (code, told["error"]["error"]) == (1, "memory") and mla < cp8
    assert told["error"]["message"] == f"boot cp8 takes {cp8} MiB of memory, {cp8 - 1} MiB are free"
    monkeypatch.setattr(deployment, "available_memory", lambda *_: 1 << 40)
    monkeypatch.setattr(deployment, "DISK", 10**18)
    code, told = run_cli("compare", "mla-router")
    assert (code, told["error"]["error"]) == (1, "disk")


@pytest.mark.parametrize(("above", "code"), [(0, 0), (1 << 20, 1)])
@pytest.mark.parametrize(("which", "most"), [("short", 12288), ("full", 18432)])
def test_a_boot_of_a_list_that_takes_more_memory_than_allowed_is_red(
    monkeypatch: pytest.MonkeyPatch, which: str, most: int, above: int, code: int
) -> None:
    line = runner.Line("s", "done(a) == 1", 1.0, True)
    monkeypatch.setattr(runner, "need", lambda boot, only: None)
    monkeypatch.setattr(trees, "gather", lambda *_, **__: {})
    monkeypatch.setattr(runner, "need_builds", lambda *_: None)
    memory = (most << 20) + above
    monkeypatch.setattr(runner, "run_boot", lambda which, *_: runner.Report(which.name, [line], memory=memory))
    result = CliRunner().invoke(main, ["compare", "--list", which])
    assert result.exit_code == code
    assert (f"memory <= {most} MiB" in result.stdout) == bool(above)


def test_a_router_that_cannot_be_built_ends_a_list_before_a_tree_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def package(build: str, folder: Path, python: Path) -> None:
        built.append(build)
        if build == "patched":
            raise RigError("router", "no Rust here")

    monkeypatch.setattr(trees, "gather", lambda *_, **__: pytest.fail("looked at trees"))
    monkeypatch.setattr(runner, "need", lambda boot, only: None)
    monkeypatch.setattr(engine, "router_package", package)
    # The first boot needs none that is built.
    code, told = run_cli("compare", "mla-router", "router-lost")
    assert (code, told["error"]["error"], built) == (1, "router", ["patched"])
    # Without gates the routers are stock ones, and then patched ones.
    built.clear()
    code, told = run_cli("compare", "router-faults", "--gates-off")
    assert (code, told["error"]["error"], built) == (1, "router", ["stock", "patched"])


def test_a_boot_that_is_refused_in_the_middle_of_a_list_is_red_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_boot(which: boot.Boot, *rest: object) -> runner.Report:
        if which.name == "pack":
            raise RigError("memory", "somebody took it")
        return runner.Report(which.name, [runner.Line("s", "done(a) == 1", 1.0, True)])

    monkeypatch.setattr(runner, "need", lambda boot, only: None)
    monkeypatch.setattr(trees, "gather", lambda *_, **__: {})
    monkeypatch.setattr(runner, "run_boot", run_boot)
    out = tmp_path / "out.json"
    code, told = run_cli("compare", "mla-router", "bounded-pack", "chunks", f"--out={out}")
    assert code == 1 and json.loads(out.read_text()) == told["result"] and not told["result"]["green"]
    lines = {one["boot"]: one["lines"] for one in told["result"]["boots"]}
    assert [name for name in lines if all(line["holds"] for line in lines[name])] == ["mla", "chunks"]
    assert lines["pack"][0]["note"] == "memory: somebody took it"


@pytest.mark.parametrize("memory", ['"1"', "-1", "true", "1.5"])
def test_a_boot_whose_memory_is_no_number_of_mib_is_refused(memory: str) -> None:
    text = f'model = "mla"\nmemory = {memory}\n[engine.P]\nrole = "prefill"\n'
    with pytest.raises(RigError, match="a number of MiB"):
        boot.parse("b", text)


def test_what_a_boot_was_seen_to_take_is_what_it_needs_and_of_others_routers_count_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(deployment, "need_memory", lambda engines, ranks: asked.append((engines, ranks)))
    monkeypatch.setattr(deployment, "available_memory", lambda *_: 1 << 40)
    monkeypatch.setattr(models, "ensure", lambda name, make: None)
    which = boot.load("router-faults")
    runner.need(which)
    assert asked == []
    # Some of its engines alone; and one that nobody has seen.
    runner.need(which, {"P", "D", "stock", "strict"})
    runner.need(replace(which, memory=0))
    assert asked == [(4, 2), (10, 4)]


def test_no_shipped_boot_takes_more_than_a_list_may_or_less_than_was_seen() -> None:
    seen: dict[str, int] = {}
    page = (tree.REPOSITORY / "docs" / "rig.md").read_text(encoding="utf-8")
    told = re.findall(r"^([\w-]+): ready after .*, ([\d,]+) MiB at most", page, re.MULTILINE)
    told += re.findall(r"^\| `([\w-]+)` \|.*\| \d+ of \d+ \| \d+ \| \d+ \| ([\d,]+) \|$", page, re.MULTILINE)
    for name, memory in told:
        seen[name] = max(seen.get(name, 0), int(memory.replace(",", "")))
    assert len(seen) > 20
    for path in boot.FOLDER.glob("*.toml"):
        which = boot.load(path.stem)
        assert seen.get(which.name, 0) <= which.memory <= lists.MOST_MEMORY["full"] >> 20, which.name
    for entry in lists.short():
        assert 0 < entry.boot.memory <= lists.MOST_MEMORY["short"] >> 20


def test_a_run_that_has_ended_is_named_and_nothing_is_touched() -> None:
    name = make_run("x", "stopped")
    folder = deployment.runs_folder() / name
    state = json.loads((folder / "state.json").read_text())
    state["keeper"]["start_time"] = -1
    (folder / "state.json").write_text(json.dumps(state))
    code, told = run_cli("down", name)
    assert code == 3 and told["result"] == {"run": name, "ended": False}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["down", "nothing"], "state"),
        (["logs", "P"], "state"),
        (["compare"], "scenario"),
        (["compare", "nothing"], "scenario"),
        (["compare", "mla-router", "--fault", "nothing"], "fault"),
        (["compare", "mla-router", "--fault", "pack-row-map"], "fault"),
        (["up", "--boot", "nothing"], "scenario"),
        (["smoke", "--boot", "pack"], "scenario"),
        (["env", "--check"], "environment"),
        (["up", "--prefill-root", "/", "--decode-root", "/"], "tree"),
    ],
)
def test_a_refusal_is_exit_code_1_with_its_kind(words: list[str], kind: str) -> None:
    code, told = run_cli(*words)
    assert (code, told["error"]["error"]) == (1, kind)


@pytest.mark.parametrize(
    "words",
    [
        ["fly"],
        ["up", "--port", "x"],
        ["up", "--port", "0"],
        ["up", "--port", "65536"],
        ["up", "--limit", "0"],
        ["compare", "mla-router", "--list", "short"],
        ["compare", "mla-router", "--out", "/nothing/here.json"],
        ["compare", "--list", "none"],
        ["env", "--release", "1"],
        ["compare", "bounded-pack", "--fault", "pack-row-map", "--twice"],
        ["compare", "bounded-pack", "--gates-off", "--twice"],
    ],
)
def test_wrong_usage_is_exit_code_2(words: list[str]) -> None:
    assert CliRunner().invoke(main, words).exit_code == 2


def test_a_status_names_what_runs_and_what_was_lost(own_cache: Path) -> None:
    folder = deployment.new_folder("x")
    state = {
        "phase": "ready",
        "reason": "",
        "tail": [],
        "keeper": {"pid": 1, "start_time": -1},
        "members": {"P": {"role": "prefill", "port": 1, "pid": 1}},
    }
    (folder / "state.json").write_text(json.dumps(state))
    code, told = run_cli("status")
    assert code == 0 and told["result"][folder.name]["phase"] == "lost"


def test_more_engines_than_the_memory_holds_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for available in (1, 1 << 20):
        monkeypatch.setattr(deployment, "available_memory", lambda *_, available=available: available)
        for which in (boot.load("mla"), boot.load("cp2-faults")):
            with pytest.raises(RigError, match="of memory") as caught:
                runner.start(which, {})
            assert caught.value.kind == "memory"


def test_the_table_names_what_failed_and_why() -> None:
    report = runner.Report("b", [runner.Line("s", "done(a) == 1", None, False, "nothing came")])
    assert not report.green
    assert "FAIL (nothing came)" in table.lines([report])[1]
    assert not runner.Report("b").green
    assert [table.number(value) for value in (None, 3.0, 1.23456, 2e-16)] == ["-", "3", "1.235", "2e-16"]


def test_a_process_that_is_gone_has_no_start_time() -> None:
    assert leash.start_time(2**22 + 1) is None
    assert leash.start_time(1) is not None
    assert sys.executable
