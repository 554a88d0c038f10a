"""The launch arguments of config/ are options of the pinned engines."""

from __future__ import annotations

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
    # Follows from three arguments; the engine has none of that name.
    names -= {"attention-tp"}
    assert [name for name in names if not re.search(rf"^    {name.replace('-', '_')}:", fields, re.MULTILINE)] == []
