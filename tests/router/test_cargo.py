"""Our modules under ``cargo test``: their unit tests, and those that use has of the router's own types."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.router.build import Builder, BuildError, Result

SOURCE = Path(__file__).parent / "cargo" / "research_modules.rs"
TREE = SOURCE.with_name("tree_evicts.rs")
MODULES = ("pd_ack", "pd_first", "pd_gates", "pd_race", "pd_rank", "pd_settings")


def test_our_modules_pass_under_cargo_with_the_lock_file_of_the_archive(built: dict[str, Result]) -> None:
    said = Builder().test(SOURCE)
    passed = set(re.findall(r"^test (\S+) \.\.\. ok$", said, re.MULTILINE))
    for module in MODULES:
        assert any(name.startswith(f"{module}::tests::") for name in passed), said
    assert {name for name in passed if "::" not in name} == set(
        re.findall(r"^(?:async )?fn (\w+)\(\) \{$", SOURCE.read_text(), re.MULTILINE)
    )
    assert "a_panic_in_the_handler_releases_both_loads" in passed


def test_an_eviction_and_a_request_at_one_node_end_where_stock_waits_for_ever(built: dict[str, Result]) -> None:
    said = Builder().test(TREE)
    assert re.findall(r"^test (\S+) \.\.\. ok$", said, re.MULTILINE), said
    with pytest.raises(BuildError, match="the request and the eviction wait for each other"):
        Builder().test(TREE, "stock")


def test_a_failing_test_is_a_failure(built: dict[str, Result], tmp_path: Path) -> None:
    source = tmp_path / "fails.rs"
    source.write_text("#[test]\nfn it_fails() {\n    assert_eq!(1, 2);\n}\n")
    with pytest.raises(BuildError, match="it_fails"):
        Builder().test(source)
