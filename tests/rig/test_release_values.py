"""What boots and pages say of the release's own values, against the release itself."""

from __future__ import annotations

import re

import pytest

from lab.rig import boot, tree, trees

pytestmark = pytest.mark.rig


def test_a_decode_engine_whose_prefill_is_killed_looks_after_it_as_the_release_does() -> None:
    text = (trees.stock("decode") / "sglang/srt/environ.py").read_text(encoding="utf-8")
    stock = {
        name: float(value)
        for name, value in re.findall(r"^    (\w+) = Env(?:Int|Float)\(([\d.]+)\)$", text, re.MULTILINE)
    }
    for name in ("kill", "router-faults"):
        for value in ("INTERVAL", "MAX_FAILURE"):
            variable = f"SGLANG_DISAGGREGATION_HEARTBEAT_{value}"
            assert float(boot.load(name).part("D").env[variable]) == stock[variable]


def test_the_release_waits_for_kv_as_long_as_the_boots_say() -> None:
    """Their files call 300 seconds the engines' own default."""
    for role in tree.RELEASES:
        text = (trees.stock(role) / "sglang/srt/environ.py").read_text(encoding="utf-8")
        for value in ("BOOTSTRAP_TIMEOUT", "WAITING_TIMEOUT"):
            assert f"SGLANG_DISAGGREGATION_{value} = EnvInt(300)" in text
