"""Run the standard-library-only Rust modules of ``sources/router`` under bare ``rustc --test``: seconds, no crates."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "sources" / "router"


def run_tests(folder: Path, module: str, text: str | None = None, beside: tuple[str, ...] = ()) -> tuple[bool, str]:
    """Compile and run the tests of ``module`` (its own text, or ``text`` for a changed copy of it).

    ``beside`` names modules that it reaches through ``super::``. Returns whether all tests passed, and the output.
    Skips the calling test on a machine without rustc.
    """
    if shutil.which("rustc") is None:
        pytest.skip("no rustc on this machine")
    for name in (module, *beside):
        content = text if text is not None and name == module else (SOURCES / f"{name}.rs").read_text()
        (folder / f"{name}.rs").write_text(content)
    root = folder / "root.rs"
    root.write_text("#![allow(dead_code)]\n" + "".join(f"pub mod {name};\n" for name in (module, *beside)))
    binary = folder / "tests"
    command = [
        "rustc",
        "--edition",
        "2021",
        "--test",
        "-D",
        "warnings",
        "-C",
        "debuginfo=0",
        str(root),
        "-o",
        str(binary),
    ]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        return False, compiled.stderr
    done = subprocess.run([str(binary), f"{module}::"], capture_output=True, text=True, timeout=60)
    return done.returncode == 0, done.stdout + done.stderr


def assert_all_pass(folder: Path, module: str, beside: tuple[str, ...] = ()) -> None:
    """Assert that the module has tests and that all of them pass."""
    passed, output = run_tests(folder, module, beside=beside)
    assert passed, output
    assert " 0 passed" not in output, output


def assert_caught(folder: Path, module: str, old: str, new: str, beside: tuple[str, ...] = ()) -> None:
    """Assert that replacing ``old`` by ``new`` in the module compiles and makes one of its tests fail."""
    source = (SOURCES / f"{module}.rs").read_text()
    body, mark, tests = source.partition("#[cfg(test)]")
    assert body.count(old) >= 1, f"{old!r} is not in {module}.rs"
    passed, output = run_tests(folder, module, body.replace(old, new, 1) + mark + tests, beside)
    assert "error" not in output.split("running", 1)[0], output
    assert not passed, f"no test of {module}.rs notices {old!r} -> {new!r}"
