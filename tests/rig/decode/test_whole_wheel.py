"""The decode patches among all of the wheel's own modules, inside its environment (``make test-engine``)."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.rig.standins import SITE, environment
from tests.engine.decode.world import GATES

pytestmark = pytest.mark.rig

BUNDLE = Path(__file__).parents[3]
INSIDE = Path(__file__).with_name("inside.py")
CHECKS = ("plain", "speculative", "bytes_come_back", "draft_loop")


@pytest.fixture(scope="module", params=["stock", "patched"])
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    """What every check said in one tree, all gates on where it has any."""
    trees: Any = importlib.import_module("lab.rig.trees")
    harness: Any = importlib.import_module("lab.rig.environment")
    root = getattr(trees, request.param)("decode")
    gates = dict.fromkeys(GATES.values(), "1") if request.param == "patched" else {}
    path = os.pathsep.join(map(str, (root, SITE, BUNDLE)))
    done = subprocess.run(
        [str(harness.ensure("0.5.17")), str(INSIDE), str(root)],
        env={**os.environ, **environment("0.5.17"), **gates, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    out: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert out.pop("root") == str(root), "another tree's modules were imported"
    return out


@pytest.mark.parametrize("name", CHECKS)
def test_inside_the_wheel(found: dict[str, str], name: str) -> None:
    assert found.get(name, "it did not run") == ""


def test_every_check_is_named_here(found: dict[str, str]) -> None:
    assert set(found) == set(CHECKS)
