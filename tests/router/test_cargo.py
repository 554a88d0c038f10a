"""Our modules under ``cargo test``: without a warning, their unit tests, and those of the router's own types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from lab.router.build import Builder, BuildError, Result

SOURCE = Path(__file__).parent / "cargo" / "research_modules.rs"
TREE = SOURCE.with_name("tree_evicts.rs")
OWNED = SOURCE.with_name("owned.rs")
STRICT = Path(__file__).parents[2] / "sources" / "router" / "pd_strict.rs"
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


# What ``Owned`` must not do, and the tests that must notice.
MUTANTS = {
    "a drop that aborts nothing": ("task.abort();", "let _ = task;"),
    "a panic that is swallowed": ("Ok(panic) => resume_unwind(panic),", "Ok(_) => Poll::Pending,"),
    "a panic with other words": ("resume_unwind(panic)", 'resume_unwind(Box::new("it panicked"))'),
    "a task that is asked again": ("self.0 = None;", ""),
    "a task ended from outside that is a panic": ("Err(_) => Poll::Pending,", 'Err(_) => panic!("it was ended"),'),
}


def owned() -> tuple[str, str]:
    """The imports of pd_strict.rs from the standard library, and its ``Owned``: all of it up to what stands behind."""
    text = STRICT.read_text()
    imports, found = (
        re.search(pattern, text, re.MULTILINE | re.DOTALL)
        for pattern in (r"^use std::\{.*?^\};\n", r"^struct Owned<T>.*?(?=^enum AckFault \{)")
    )
    assert imports and found, "pd_strict.rs is not laid out as this test expects"
    assert found[0].count("Owned<T> {") == 2, found[0]
    return imports[0], found[0]


def rust_file(folder: Path, texts: Mapping[str, str]) -> Path:
    """A Rust file with a module for each text, the tests of owned.rs in each."""
    imports, tests = owned()[0] + "use tokio::task::JoinHandle;\n", OWNED.read_text().partition("\n\n")[2]
    modules = (f"mod {name} {{\n{imports}\n{text}\n{tests}}}\n" for name, text in texts.items())
    source = folder / "owned_tasks.rs"
    source.write_text("#![allow(unused)]\n" + "".join(modules))
    return source


def test_a_task_does_not_outlive_its_waiter_and_its_panic_is_the_waiters(
    built: dict[str, Result], tmp_path: Path
) -> None:
    said = Builder().test(rust_file(tmp_path, {"owned": owned()[1]}))
    passed = set(re.findall(r"^test owned::tests::(\w+) \.\.\. ok$", said, re.MULTILINE))
    assert passed == set(re.findall(r"^    async fn (\w+)\(\) \{$", OWNED.read_text(), re.MULTILINE)) and passed, said


def test_every_mutant_of_such_a_task_is_noticed(built: dict[str, Result], tmp_path: Path) -> None:
    text, mutants = owned()[1], {}
    for number, (old, new) in enumerate(MUTANTS.values()):
        assert text.count(old) == 1, old
        mutants[f"mutant_{number}"] = text.replace(old, new)
    with pytest.raises(BuildError) as caught:
        Builder().test(rust_file(tmp_path, {"owned": text, **mutants}))
    failed = set(re.findall(r"^    (\w+)::tests::\w+$", str(caught.value), re.MULTILINE))
    assert failed == mutants.keys(), str(caught.value)


def test_a_failing_test_is_a_failure(built: dict[str, Result], tmp_path: Path) -> None:
    source = tmp_path / "fails.rs"
    source.write_text("#[test]\nfn it_fails() {\n    assert_eq!(1, 2);\n}\n")
    with pytest.raises(BuildError, match="it_fails"):
        Builder().test(source)
