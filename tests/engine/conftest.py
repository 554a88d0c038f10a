"""Trees for the engine tests: each base as it was published, and with its whole series applied."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from patchbundle import fetch, manifest, work
from patchbundle.manifest import Bundle
from patchbundle.target import Target

# Triton decides at its first import, for the whole process, whether its own library is interpreted. Which test came
# first once decided whether four others passed; what is to be compiled is so in a process of its own (apart.py).
with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
    importlib.import_module("triton")

Trees = Callable[[str], Path]
BUNDLE = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    return manifest.load(BUNDLE)


@pytest.fixture(scope="session")
def stock(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Trees:
    """Role -> root of its unpacked pinned base. Nobody may write to it."""

    @cache
    def make(role: str) -> Path:
        base = next(base for base in bundle.bases.values() if base.role == role)
        root = tmp_path_factory.mktemp(f"stock-{role}")
        fetch.unpack(fetch.fetch(base, fetch.default_archive(base)), root)
        return root

    return make


@pytest.fixture(scope="session")
def patched(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Trees:
    """Role -> root of its base with the whole series applied by the engine itself."""

    @cache
    def make(role: str) -> Path:
        base = next(base for base in bundle.bases.values() if base.role == role)
        root = tmp_path_factory.mktemp(f"patched-{role}")
        fetch.unpack(fetch.fetch(base, fetch.default_archive(base)), root)
        target = Target(root, (base,), base.version, None, None, ())
        state, plan = work.make_plan(bundle, target, "apply", None)
        work.execute(bundle, target, state, plan)
        return root

    return make
