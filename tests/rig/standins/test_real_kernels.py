"""The stand-ins beside the engines' own Triton kernels, inside the engine environments (``make test-engine``)."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.rig.standins import SITE, environment
from lab.rig.standins.table import VERSIONS

pytestmark = pytest.mark.rig

_INSIDE = Path(__file__).with_name("inside.py")


@pytest.fixture(scope="module", params=VERSIONS)
def results(request: pytest.FixtureRequest) -> dict[str, str]:
    """What every check inside one engine environment said; empty text is success."""
    harness: Any = importlib.import_module("lab.rig.environment")
    version: str = request.param
    done = subprocess.run(
        [str(harness.ensure(version)), str(_INSIDE)],
        env={**os.environ, **environment(version), "PYTHONPATH": str(SITE), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    out: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return out


def _names() -> list[str]:
    """The checks in the file, so that each shows as a test of its own."""
    text = _INSIDE.read_text(encoding="utf-8")
    return [block.split("(")[0].removeprefix("def ") for block in text.split("@check\n")[1:]]


@pytest.mark.parametrize("name", _names())
def test_inside_the_engine(results: dict[str, str], name: str) -> None:
    assert results.pop(name, "it did not run") == ""
