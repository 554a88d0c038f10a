"""The launch arguments of config/ are options of the pinned engines."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from patchbundle import launch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_argument_is_one_of_the_pinned_engine(role: str, stock: Callable[[str], Path]) -> None:
    fields = (stock(role) / "sglang/srt/server_args.py").read_text(encoding="utf-8")
    listed = launch.read(ROOT / "config" / f"{role}.toml")
    names = set(listed["arguments"]) | {
        name for gate in listed["gates"].values() for name in gate.needs if name.islower()
    }
    # Follow from others; the engine has none of these names.
    names -= set(launch.DERIVED)
    assert [name for name in names if not re.search(rf"^    {name.replace('-', '_')}:", fields, re.MULTILINE)] == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_other_name_of_an_argument_that_a_gate_looks_at_is_known(role: str, stock: Callable[[str], Path]) -> None:
    """Aliases, and the beginnings that argparse takes for the whole: no option of the engine is one of them."""
    fields = (stock(role) / "sglang/srt/server_args.py").read_text(encoding="utf-8")
    listed = launch.read(ROOT / "config" / f"{role}.toml")["gates"].values()
    looked_at = launch.looked_at(listed)
    found: dict[str, str] = {}
    options: set[str] = set()
    tree = ast.parse(fields)
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs").body
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own = node.target.id.replace("_", "-")
            options.add(own)
            for word in ast.walk(node.annotation):
                if isinstance(word, ast.keyword) and word.arg == "aliases" and isinstance(word.value, ast.List):
                    for item in word.value.elts:
                        assert isinstance(item, ast.Constant)
                        found[str(item.value).lstrip("-")] = own
    assert len(options) > 200 and looked_at <= options
    assert {name: own for name, own in found.items() if own in looked_at} == {
        name: own for name, own in launch.ALIASES.items() if own in looked_at
    }
    long = looked_at | {name for name, own in found.items() if own in looked_at}
    assert [name for name in options - looked_at if any(one.startswith(name) for one in long)] == []
