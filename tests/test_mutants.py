"""The driver that breaks our source: what it changes, and that it tells a test that notices from one that does not."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

from lab import mutants

SOURCE = '''
def size(items: list[int], least: int = 3) -> bool:
    """1 < 2"""
    found = not items
    if len(items) < least and found:
        raise ValueError("x < 1")
    return True
'''


def test_each_place_that_decides_is_changed_and_words_are_not() -> None:
    words = [mutant.words for mutant in mutants.mutants(SOURCE)]
    assert sorted(word.partition(": ")[2] for word in words) == sorted(
        [
            "'3' -> '4'",
            "'not items' -> 'items'",
            "'len(items) < least' -> 'len(items) <= least'",
            "'len(items) < least and found' -> 'len(items) < least or found'",
            "\"raise ValueError('x < 1')\" -> 'pass'",
            "'True' -> 'False'",
        ]
    )


def test_a_mutant_is_the_module_with_that_one_change() -> None:
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    for mutant in mutants.mutants(SOURCE):
        after = ast.unparse(mutants.mutated(SOURCE, mutant)).splitlines()
        assert len(before) == len(after)
        assert sum(old != new for old, new in zip(before, after, strict=True)) == 1, mutant


@pytest.mark.parametrize(
    ("expected", "alive"), [("size([1, 2], 2) is True", False), ("size([1] * 9) in (True, False)", True)]
)
def test_a_mutant_is_killed_by_the_test_that_sees_it(
    expected: str, alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sized.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "test_sized.py").write_text(
        f"from sized import size\n\ndef test_size():\n    assert {expected}\n", encoding="utf-8"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("sized")
    mutant = next(mutant for mutant in mutants.mutants(SOURCE) if "'True' -> 'False'" in mutant.words)
    arguments = ["--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), str(tmp_path)]
    try:
        assert mutants.survives(module, SOURCE, mutant, arguments) is alive
    finally:
        del sys.modules["sized"]
