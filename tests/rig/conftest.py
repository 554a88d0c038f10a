"""What each engine's wheel says of itself, asked once a session."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.rig.standins import SITE, environment
from tests.rig.launches import cases

BUNDLE = Path(__file__).parents[2]
RELEASES = {"prefill": "0.5.19", "decode": "0.5.17"}
# Its index is shared inside an iteration of the draft, as draft-seed-recompute wants it.
MODEL = "glm-dsa-iteration"


@pytest.fixture(scope="session", params=RELEASES)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``role``, ``pools`` as in pools_inside, ``launches``: the outcome of each case of the role by its name."""
    cache, harness, models, trees = (
        importlib.import_module(f"lab.rig.{name}") for name in ("cache", "environment", "models", "trees")
    )
    role, folder = request.param, tmp_path_factory.mktemp("wheel")
    version, root = RELEASES[role], trees.patched(role)
    extra = [f"--model-path={models.ensure(MODEL, cache.ensure)}", "--device=cpu"]
    # What the model has on a GPU; on a CPU the engine takes another one. A launch that names one has the last word.
    own = ["--attention-backend=dsa"] if role == "decode" else []
    asked = [
        {"line": [*own, *case.launch.flags, *extra], "variables": dict(case.launch.environment), "on": list(case.on)}
        for case in cases(role)
    ]
    (folder / "cases.json").write_text(json.dumps(asked), encoding="utf-8")
    path = os.pathsep.join(map(str, (root, SITE, BUNDLE)))
    inside = {**environment(version), **cases(role)[-1].launch.exports, "PYTHONPATH": path}
    done = subprocess.run(
        [
            str(harness.ensure(version)),
            "-m",
            "tests.rig.wheel_inside",
            role,
            folder / "cases.json",
            folder / "out.json",
        ],
        env={**os.environ, **inside, "PYTHONDONTWRITEBYTECODE": "1", "TRANSFORMERS_OFFLINE": "1"},
        cwd=BUNDLE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert (found["version"], found["tree"]) == (version, str(root)), "another tree's modules were imported"
    names = [case.name for case in cases(role)]
    return {"role": role, "pools": found["pools"], "launches": list(zip(names, found["launches"], strict=True))}
