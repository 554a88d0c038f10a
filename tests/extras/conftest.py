"""Programs of the machine that these tests drive. One that is missing fails the test by its name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def program(name: str) -> str:
    """Where an installed program is."""
    place = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if place is None:
        pytest.fail(f"{name} is not installed: make system-deps", pytrace=False)
    return place


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A new pair of minisign keys without a password: public, secret."""
    public, secret = tmp_path / "key.pub", tmp_path / "key.sec"
    subprocess.run([program("minisign"), "-G", "-W", "-p", public, "-s", secret], check=True, capture_output=True)
    return public, secret
