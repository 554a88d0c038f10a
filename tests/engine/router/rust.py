"""Run the standard-library-only Rust modules of ``sources/router`` under bare ``rustc --test``: seconds, no crates."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "sources" / "router"


def compile_tests(folder: Path, modules: Mapping[str, str], strict: bool) -> Path:
    """Compile ``modules`` (name: text) as one test binary and return it. Skips the calling test without rustc.

    Raises:
        AssertionError: they do not compile; ``strict`` takes warnings for errors.
    """
    if shutil.which("rustc") is None:
        pytest.skip("no rustc on this machine")
    for name, text in modules.items():
        (folder / f"{name}.rs").write_text(text)
    root = folder / "root.rs"
    root.write_text("#![allow(dead_code)]\n" + "".join(f"pub mod {name};\n" for name in modules))
    lint = ["-D", "warnings"] if strict else ["-A", "warnings"]
    command = [
        "rustc",
        "--edition",
        "2021",
        "--test",
        *lint,
        "-C",
        "debuginfo=0",
        str(root),
        "-o",
        str(folder / "tests"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "tests"


def run(binary: Path, module: str) -> tuple[bool, str]:
    """Run the tests of one module of a binary: whether all passed, and the output. Endless ones count as failed."""
    try:
        done = subprocess.run([str(binary), f"{module}::"], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return False, "the tests did not end"
    return done.returncode == 0, done.stdout + done.stderr


def source(module: str) -> str:
    """The text of a module of ours."""
    return (SOURCES / f"{module}.rs").read_text()


def assert_all_pass(folder: Path, module: str, beside: Sequence[str] = ()) -> None:
    """Assert that the module, beside those that it reaches by ``super::``, has tests and that all of them pass."""
    binary = compile_tests(folder, {name: source(name) for name in (module, *beside)}, strict=True)
    passed, output = run(binary, module)
    assert passed and " 0 passed" not in output, output


def assert_all_caught(
    folder: Path, module: str, mutants: Sequence[tuple[str, str]], beside: Sequence[str] = ()
) -> None:
    """Assert that each replacement of a piece of the module's code makes one of the module's tests fail."""
    body, mark, tests = source(module).partition("#[cfg(test)]")
    modules = {name: source(name) for name in beside}
    for index, (old, new) in enumerate(mutants):
        assert old in body, f"{old!r} is not in {module}.rs"
        modules[f"mutant_{index}"] = body.replace(old, new, 1) + mark + tests
    binary = compile_tests(folder, modules, strict=False)
    kept = [mutants[index] for index in range(len(mutants)) if run(binary, f"mutant_{index}")[0]]
    assert not kept, f"no test of {module}.rs notices {kept}"
