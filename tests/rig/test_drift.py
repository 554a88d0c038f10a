"""The released trees themselves, and what Python would import in the place of one of their files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lab.rig import tree, trees
from lab.rig.errors import RigError

pytestmark = pytest.mark.rig
# A compiled module beside a file, a package of its name that holds bytecode alone, and a file.
EXTRA = ("scheduler.cpython-311-x86_64-linux-gnu.so", "scheduler/__init__.pyc", "extra.py")


@pytest.mark.parametrize("role", sorted(tree.RELEASES))
def test_a_released_tree_is_base_and_with_anything_more_in_it_is_not(tmp_path: Path, role: str) -> None:
    root = tmp_path / "tree"
    shutil.copytree(trees.stock(role), root, copy_function=os.link)
    found = tree.find(role, root)
    assert trees.recognise(found, allow_drift=False) == "base"
    for name in EXTRA:
        extra = root / "sglang/srt/managers" / name
        extra.parent.mkdir(exist_ok=True)
        extra.write_bytes(b"")
        with pytest.raises(RigError, match="is not") as caught:
            trees.recognise(found, allow_drift=False)
        assert caught.value.kind == "drift" and extra.name in str(caught.value)
        assert trees.recognise(found, allow_drift=True) == "drifted, allowed"
        extra.unlink()
        if extra.parent.name == "scheduler":
            extra.parent.rmdir()
    assert trees.recognise(found, allow_drift=False) == "base"
