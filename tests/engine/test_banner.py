"""The patches banner (prefill) and banner-decode: one line at the start with a gate set, nothing without."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from patchbundle.manifest import Bundle
from tests.engine import load

Tree = Callable[[str], Path]
ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])
ENGINE, HOME = "sglang/srt/entrypoints/engine.py", "sglang/srt/research"
GATES = {"SGLANG_RESEARCH_B": " On ", "SGLANG_RESEARCH_A": "1", "SGLANG_RESEARCH_C": "0", "SGLANG_RESEARCH_D": ""}


class Reached(Exception):
    """The start came to the step after the banner."""


def banner(root: Path) -> ModuleType:
    """The installed module, with the installed gates."""
    gates = load.load(root, f"{HOME}/gates.py")
    package = load.stub("sglang.srt.research", gates=gates)
    return load.load(root, f"{HOME}/banner.py", {"sglang.srt.research": package, "sglang.srt.research.gates": gates})


def lines(caplog: pytest.LogCaptureFixture, module: ModuleType, environment: dict[str, str]) -> list[str]:
    caplog.clear()
    with mock.patch.dict("os.environ", environment), caplog.at_level(logging.DEBUG):
        module.show()
    return [record.getMessage() for record in caplog.records]


@ROLES
def test_the_line_names_digest_level_and_the_gates_that_are_on(
    bundle: Bundle, patched: Tree, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    base = next(base for base in bundle.bases.values() if base.role == role)
    top = bundle.series(role)
    assert lines(caplog, banner(patched(role)), GATES) == [
        f"patch bundle: {bundle.lock.digest}, level {len(top)} ({top[-1].id}) of {base.id};"
        " gates: SGLANG_RESEARCH_A, SGLANG_RESEARCH_B"
    ]


@ROLES
@pytest.mark.parametrize(
    "environment", [{}, {"SGLANG_RESEARCH_A": "0", "SGLANG_RESEARCH_B": ""}, {"OTHER": "1"}], ids=str
)
def test_without_a_gate_nothing_is_said_and_nothing_is_read(
    patched: Tree, caplog: pytest.LogCaptureFixture, role: str, environment: dict[str, str]
) -> None:
    module = banner(patched(role))
    with mock.patch.object(module, "_receipt", side_effect=AssertionError):
        assert lines(caplog, module, environment) == []


RECEIPTS = {
    "that is missing": None,
    "that is no JSON": b"{",
    "that is another JSON": b"[]",
    "without patches": json.dumps({"bundle": "x", "level": 0, "base": "b", "patches": []}).encode(),
}


@pytest.mark.parametrize("receipt", RECEIPTS.values(), ids=RECEIPTS)
def test_a_receipt_is_said_and_stops_nothing(
    patched: Tree, caplog: pytest.LogCaptureFixture, tmp_path: Path, receipt: bytes | None
) -> None:
    module = banner(patched("prefill"))
    if receipt is not None:
        (tmp_path / "receipt.json").write_bytes(receipt)
    with mock.patch.object(module, "__file__", str(tmp_path / "banner.py")):
        (line,) = lines(caplog, module, {"SGLANG_RESEARCH_A": "1"})
    assert line.startswith("patch bundle: no receipt to read (")
    assert line.endswith("gates: SGLANG_RESEARCH_A")


def started(root: Path) -> list[str]:
    """What the tree's own start calls, in order, up to the setting of its environment."""
    said: list[str] = []
    shown = load.stub("sglang.srt.research.banner", show=lambda: said.append("banner"))
    stubs = {**load.blanks(root, ENGINE), "sglang.srt.research": load.stub("sglang.srt.research", banner=shown)}
    for module in stubs.values():
        # Bases of its class: nothing of them runs here.
        vars(module).update(EngineScoreMixin=type("Mixin", (), {}), EngineBase=type("Base", (), {}))
    stubs["sglang.version"] = load.stub("sglang.version", __version__="0")
    stubs["uvloop"] = load.stub("uvloop", EventLoopPolicy=lambda: None)
    for name in ("zmq", "torch", "torch.multiprocessing", "fastapi", "psutil", "orjson"):
        stubs[name] = load.Anything(name)
    module = load.load(root, ENGINE, stubs)
    with (
        mock.patch.object(module, "configure_logger", side_effect=lambda _: said.append("logger")),
        mock.patch.object(module, "_set_envs_and_config", side_effect=Reached),
        pytest.raises(Reached),
    ):
        module.Engine._launch_subprocesses.__func__(module.Engine, mock.MagicMock(), None, None, None)
    return said


@ROLES
def test_the_start_says_it_once_after_the_logger_is_there(stock: Tree, patched: Tree, role: str) -> None:
    assert started(stock(role)) == ["logger"]
    assert started(patched(role)) == ["logger", "banner"]
