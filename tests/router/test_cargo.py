"""Our modules under ``cargo test``: without a warning, their unit tests, and those of the router's own types."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.router.build import Builder, BuildError, Result

SOURCE = Path(__file__).parent / "cargo" / "research_modules.rs"
TREE = SOURCE.with_name("tree_evicts.rs")
MODULES = ("pd_ack", "pd_gates", "pd_race", "pd_rank", "pd_relay", "pd_settings")


# A warning as cargo prints it: some lines up to an empty one, the second of them a place.
SAID = """warning: unnecessary qualification
   --> {place}
    |
183 |     let mut fresh = axum::http::response::Builder::new()

warning: `sgl-model-gateway` (lib) generated 1 warning
"""


def warnings_of_ours(said: str) -> list[str]:
    """What the compiler complains about in files of ours, one text a warning."""
    found = re.findall(r"^warning: .*?(?:\n\n|\Z)", said, re.MULTILINE | re.DOTALL)
    return [one for one in found if re.search(rf"--> \S*(?:routers/http/research/|{SOURCE.name})", one)]


@pytest.mark.parametrize(
    ("place", "count"),
    [
        ("src/routers/http/research/pd_strict.rs:183:21", 1),
        ("tests/research_modules.rs:9:1", 1),
        ("src/policies/tree.rs:9:1", 0),
    ],
)
def test_a_warning_in_a_file_of_ours_is_found(place: str, count: int) -> None:
    assert len(warnings_of_ours("   Compiling x v1\n" + SAID.format(place=place))) == count


def test_our_modules_pass_under_cargo_with_the_lock_file_of_the_archive(built: dict[str, Result]) -> None:
    said = Builder().test(SOURCE)
    assert warnings_of_ours(said) == []
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
