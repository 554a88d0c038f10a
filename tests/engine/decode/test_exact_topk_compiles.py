"""The kernel's source through the real compiler, for every card that it was written for. No GPU is needed."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.load import load, stub

RESEARCH = "sglang.srt.research"


@pytest.fixture(scope="module")
def call(patched: Callable[[str], Path]) -> Any:
    """The module that builds and calls the kernel, as the bundle lays it down."""
    root = patched("decode")
    build = load(root, "sglang/srt/research/kernels/build.py")
    known = {
        RESEARCH: stub(RESEARCH, __path__=[]),
        f"{RESEARCH}.kernels": stub(f"{RESEARCH}.kernels", build=build, __path__=[]),
        f"{RESEARCH}.kernels.build": build,
    }
    return load(root, "sglang/srt/research/kernels/exact_topk.py", known)


@pytest.fixture
def toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The pinned compiler of requirements/test.txt, and an empty cache."""
    found = importlib.util.find_spec("nvidia.cu13")
    assert found is not None and found.submodule_search_locations is not None, "make test installs the compiler"
    home = Path(next(iter(found.submodule_search_locations)))
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path))
    return home


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_the_source_compiles_loads_and_agrees_with_its_module(
    call: Any, toolkit: Path, capability: tuple[int, int]
) -> None:
    library = call.build.library(call.SOURCE, call.SOURCE_SHA256, capability)
    assert library.exact_topk_argument_bytes() == ctypes.sizeof(call._Arguments)


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(
    call: Any, toolkit: Path, tmp_path: Path
) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void broken() { undeclared(); }\n")
    digest = call.build.hashlib.sha256(source.read_bytes()).hexdigest()
    with pytest.raises(call.build.KernelBuildError, match="undeclared"):
        call.build.library(source, digest, (9, 0))
