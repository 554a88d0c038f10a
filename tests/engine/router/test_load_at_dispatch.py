"""load-at-dispatch: the std-only modules under rustc, and what the patched text must and must not hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.router.rust import SOURCES, assert_all_caught, assert_all_pass

PD_ROUTER = "src/routers/http/pd_router.rs"
Tree = Callable[[str], Path]

MUTANTS = {
    "pd_gates": [
        ('"1" | "true"', '"true"'),
        ('"" | "0"', '"0"'),
        ('"false" | "no"', '"no"'),
        (".trim()", ""),
        (".to_ascii_lowercase()", ".to_string()"),
        ("_ => Err(format!(", "_ if value.len() == 2 => Ok(true),\n        _ => Err(format!("),
        ("on && !topology.pd", "on && topology.pd"),
        ("if on && !topology.http", "if !topology.http"),
        ("on && !topology.http", "on && topology.http"),
        ("fits(name, on, topology).map(|()| on)", "Ok(on)"),
    ],
    "pd_relay": [
        ("Some(Ok(piece)) => (self.last)(piece),", "Some(Ok(_)) => false,"),
        ("Some(Err(_)) | None => true,", "Some(Err(_)) | None => false,"),
        ("Some(Err(_)) | None => true,", "Some(Err(_)) => false,\n            None => true,"),
        ("Ok((self.merge)(piece))", "Ok(piece)"),
        ("            self.source = None;\n", "            let _ = &self.source;\n"),
    ],
}


@pytest.mark.parametrize("module", ["pd_gates", "pd_relay"])
def test_the_modules_own_tests_pass_under_bare_rustc(module: str, tmp_path: Path) -> None:
    assert_all_pass(tmp_path, module)


@pytest.mark.parametrize("module", MUTANTS)
def test_a_broken_module_is_caught_by_its_own_tests(module: str, tmp_path: Path) -> None:
    assert_all_caught(tmp_path, module, MUTANTS[module])


def body_of(text: str, name: str) -> str:
    """The text of the function ``name`` of an impl block, to the next line that closes it."""
    found = re.search(rf"^    (?:async )?fn {name}\b.*?^    }}$", text, re.DOTALL | re.MULTILINE)
    assert found, f"{name} is not there"
    return found[0]


def test_the_pair_is_chosen_and_counted_in_one_turn(patched: Tree) -> None:
    body = body_of((patched("router") / PD_ROUTER).read_text(), "execute_dual_dispatch")
    order = [body.index(word) for word in ("pd_load::turn().await", ".select_pd_pair(", "pd_load::reserve(turn")]
    assert order == sorted(order)
    between = body[order[1] : order[2]]
    assert between.count(".await") == 1, "something else than the selection is awaited while the lock is held"


def test_the_selection_itself_awaits_nothing_under_the_lock(patched: Tree) -> None:
    assert ".await" not in body_of((patched("router") / PD_ROUTER).read_text(), "select_pd_pair")


def test_every_streaming_response_gets_the_guards(patched: Tree) -> None:
    text = (patched("router") / PD_ROUTER).read_text()
    code = text.partition("#[cfg(test)]")[0]
    calls = re.findall(r"self\.create_streaming_response\((.*?)\n\s*\)\n", code, re.DOTALL)
    assert len(calls) == 2
    assert all(call.rstrip().endswith("guards,") for call in calls)


def test_nothing_but_a_guard_ever_counts_a_load_down(patched: Tree) -> None:
    for path in [patched("router") / PD_ROUTER, *SOURCES.glob("*.rs")]:
        text = path.read_text()
        assert "decrement_load" not in text and "reset_load" not in text, path
        assert "mem::forget" not in text and "ManuallyDrop" not in text, path


def test_the_stock_guards_are_made_only_where_the_patch_made_none(patched: Tree) -> None:
    text = (patched("router") / PD_ROUTER).read_text().partition("#[cfg(test)]")[0]
    made = [line.strip() for line in text.splitlines() if "WorkerLoadGuard::new(" in line]
    assert len(made) == 4
    assert "let stock_guard = !context.is_stream && guards.is_none();" in text
    assert sum(line.endswith("headers));") and "stock_guard.then" in line for line in made) == 2
    stream = body_of(text, "create_streaming_response")
    with_guards = stream.index("if let Some(guards) = guards {")
    # The stock copy of a stream, and its guards, stand behind the return of the one that has guards.
    assert with_guards < stream.index("return pd_load::answer(") < stream.index("WorkerLoadGuard::new(")


def test_the_gate_is_read_at_start_and_nowhere_else(patched: Tree) -> None:
    root = patched("router")
    assert "crate::routers::http::pd_load::check(&config.router_config)?;" in (root / "src/server.rs").read_text()
    for path in (root / "src/routers/http").rglob("*.rs"):
        if path.name != "pd_gates.rs":
            assert "env::var" not in path.read_text(), f"{path.name} reads the environment itself"


def test_the_diff_touches_three_files_and_adds_calls_only(stock: Tree, patched: Tree) -> None:
    changed = [
        str(path.relative_to(patched("router")))
        for path in patched("router").rglob("*.rs")
        if not (stock("router") / path.relative_to(patched("router"))).exists()
        or path.read_bytes() != (stock("router") / path.relative_to(patched("router"))).read_bytes()
    ]
    research = {f"src/routers/http/research/{name}.rs" for name in ("pd_gates", "pd_load", "pd_relay")}
    assert research <= set(changed)
    assert {"src/server.rs", "src/routers/http/mod.rs", PD_ROUTER} <= set(changed)
