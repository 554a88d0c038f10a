"""Load single files of an engine tree on a machine that has no engine installed."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


class Anything(ModuleType):
    """A module from which every name can be imported; nothing of it is reached by a test."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


def blanks(root: Path, path: str) -> dict[str, ModuleType]:
    """Give an ``Anything`` for each module of the engine, our own left out, that the file ``path`` imports from."""
    nodes = [node for node in ast.walk(ast.parse((root / path).read_bytes())) if isinstance(node, ast.ImportFrom)]
    names = {node.module for node in nodes if node.module and node.module.startswith("sglang.")}
    return {name: Anything(name) for name in names if not name.startswith("sglang.srt.research")}


def stub(name: str, /, **attributes: Any) -> ModuleType:
    """Make an empty module called ``name`` that holds just ``attributes``."""
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


@contextmanager
def modules(entries: Mapping[str, ModuleType]) -> Iterator[None]:
    """Put ``entries`` (and empty parent packages for them) into ``sys.modules`` for the time of the block."""
    names: dict[str, ModuleType] = {}
    for name in entries:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            parent = ".".join(parts[:depth])
            if parent not in sys.modules and parent not in entries:
                package = ModuleType(parent)
                package.__path__ = []
                names[parent] = package
    names.update(entries)
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def load(root: Path, path: str, stubs: Mapping[str, ModuleType] | None = None) -> ModuleType:
    """Execute the file ``path`` of the tree ``root`` under its dotted name, its imports answered by ``stubs`` first.

    The module does not stay in ``sys.modules``: stock and patched copies of one file live side by side.
    """
    name = path.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, root / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with modules({**(stubs or {}), name: module}):
        spec.loader.exec_module(module)
    return module
