"""What the tests of the CP communicator share: one run of all cases on eight processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.prefill.cp_ranks import CASES, Result

Outcomes = dict[str, list[Result]]
Ranks = list[tuple[dict[str, Any], dict[str, dict[str, list[str]]]]]


@pytest.fixture(scope="session")
def ranks(
    stock: Callable[[str], Path], patched: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Ranks:
    """What each of the eight ranks had: of the cases, and of the broadcasts of a split cache."""
    out = tmp_path_factory.mktemp("ranks")
    top = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.engine.prefill.cp_ranks"]
    command += [str(path) for path in (stock("prefill"), patched("prefill"), out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(top / "tools"), str(top)])}
    # Half a second of work; the rest is for a machine on which eight processes get no turn.
    run = subprocess.run(command, cwd=top, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [tuple(torch.load(out / f"{rank}.pt")) for rank in range(8)]


@pytest.fixture(scope="session")
def eight(ranks: Ranks) -> Outcomes:
    """Case -> what each of the eight ranks had at its end."""
    return {name: [Result(**rank[0][name]) for rank in ranks] for name in CASES}
